"""`peft-mux demo`: make a backbone, train six tasks on it together, and check and measure the result."""

from __future__ import annotations

import copy
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.demo import sentences
from peft_mux.demo.baseline import train_one_by_one
from peft_mux.demo.small_llama import make_backbone, make_tokenizer, pretrain
from peft_mux.demo.task_rows import DemoTask, demo_tasks, exact_match, last_token_ids
from peft_mux.errors import ConfigError
from peft_mux.reporting.views import window_width, wrapped
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer


def run_demo(output_dir: str, *, fast: bool = False) -> int:
    """Run the demo and print what it finds.

    Args:
        output_dir: folder for adapters, metrics and the plot; a number is appended where it holds a run already.
        fast: whether to take a few steps only, to see that everything runs; nothing is learned then.

    Returns:
        0, or 1 if a reloaded adapter differs from the trained one.
    """
    started = time.perf_counter()
    _quiet_libraries()
    root = _unused_folder(Path(output_dir))
    _print_line(f"peft_mux demo on {_hardware()}; no network is used. Everything goes to {root}.")
    tasks = demo_tasks()
    backbone, tokenizer = _prepare(tasks, root, num_steps=4 if fast else 120)
    # Before the trainer puts adapters into it: the comparison shall train plain PEFT on the plain backbone.
    pristine = copy.deepcopy(backbone)
    trainer = _trainer(backbone, tokenizer, tasks, root, num_steps=4 if fast else 120)
    _print_line(f"\n{trainer.plan()}\n")
    before = trainer.evaluate()
    together = trainer.train()
    after = trainer.evaluate()
    _print_line("\n" + _results_table(tasks, before, after))
    is_equal = _check_adapters(trainer, root)
    _compare_speed(trainer, pristine, together.metrics["train_tokens_per_second"], num_steps=2 if fast else 16)
    _plot(trainer)
    _print_line(
        f"\ndone in {time.perf_counter() - started:.0f} s. Next: look into {root}, then write a tasks.yaml and run "
        "`peft-mux plan tasks.yaml`."
    )
    return 0 if is_equal else 1


def _prepare(tasks: list[DemoTask], root: Path, *, num_steps: int) -> tuple[Any, Any]:
    """Make tokenizer and backbone; both are saved, so that the adapters can be used later."""
    lines = sentences.corpus(3_000)
    tokenizer = make_tokenizer([*lines, *("".join(row.values()) for task in tasks for row in task.train_rows[:200])])
    backbone = make_backbone(tokenizer)
    _print_line(
        f"backbone: a Llama of {sum(p.numel() for p in backbone.parameters()):,} parameters, made here and pre-trained "
        f"for {num_steps} steps on template sentences that the package generates. It knows nothing else."
    )
    started = time.perf_counter()
    loss = pretrain(backbone, tokenizer, lines, num_steps=num_steps)
    _print_line(f"pre-trained in {time.perf_counter() - started:.0f} s to a loss of {loss:.2f}")
    for part in (backbone, tokenizer):
        part.save_pretrained(root / "backbone")
    return backbone, tokenizer


def _trainer(backbone: Any, tokenizer: Any, tasks: list[DemoTask], root: Path, *, num_steps: int) -> MultiTaskTrainer:
    from peft import LoraConfig

    args = MultiTaskTrainingArguments(
        output_dir=str(root), logging_steps=max(1, num_steps // 6), max_steps=num_steps, lr_scheduler_type="cosine"
    )
    return MultiTaskTrainer(
        backbone,
        args,
        [
            Task(
                name=task.name,
                peft_config=LoraConfig(r=task.rank, lora_alpha=2 * task.rank, target_modules=task.target_modules),
                train_dataset=task.train_rows,
                eval_dataset=task.eval_rows,
                train_batch_size=task.batch_size,
                learning_rate=task.learning_rate,
                compute_metrics=exact_match if task.has_answers else None,
                preprocess_logits_for_metrics=last_token_ids,
            )
            for task in tasks
        ],
        processing_class=tokenizer,
    )


def _results_table(tasks: list[DemoTask], before: dict[str, float], after: dict[str, float]) -> str:
    lines = ["held out            loss before -> after    answers right before -> after"]
    for task in tasks:
        loss = f"{before[f'{task.name}/eval_loss']:8.3f} -> {after[f'{task.name}/eval_loss']:6.3f}"
        key = f"{task.name}/eval_accuracy"
        accuracy = f"{before[key]:8.0%} -> {after[key]:4.0%}" if key in before else "       (free text)"
        lines.append(f"  {task.name:<12} r={task.rank:<3} {loss}         {accuracy}")
    return "\n".join(lines)


@torch.no_grad()
def _check_adapters(trainer: MultiTaskTrainer, root: Path) -> bool:
    """Load every saved adapter with plain PEFT and compare its logits with the trained model's."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trainer.model.eval()
    equal = {}
    for task in trainer.tasks:
        plain = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(root / "backbone", trust_remote_code=False), str(root / task.name)
        )
        run = trainer.table[task.name]
        ids = torch.from_numpy(run.eval_data[0].input_ids)[None].to(trainer.model.device)
        ours = trainer.model.task_view(task.name)(input_ids=ids).logits.cpu()
        theirs = plain.eval()(input_ids=ids.cpu()).logits
        equal[task.name] = torch.allclose(ours, theirs, atol=1e-5)
    bad = [name for name, is_equal in equal.items() if not is_equal]
    _print_line(
        f"reloaded {len(equal)} adapters with plain PeftModel.from_pretrained: "
        + (f"logits of {', '.join(bad)} DIFFER" if bad else "all give the same logits")
    )
    return not bad


def _compare_speed(trainer: MultiTaskTrainer, backbone: Any, tokens_per_second: float, *, num_steps: int) -> None:
    seconds, tokens = train_one_by_one(backbone, list(trainer.table), num_steps=num_steps)
    alone = tokens / seconds
    _print_line(
        f"speed on {_hardware()}: together {tokens_per_second:,.0f} tokens/s; HF Trainer + PEFT one task after another "
        f"(first {num_steps} global batches of each, same rows) {alone:,.0f} tokens/s: {tokens_per_second / alone:.1f}x"
    )


def _plot(trainer: MultiTaskTrainer) -> None:
    try:
        _print_line(f"losses drawn in {trainer.plot_losses()}")
    except ConfigError as error:
        _print_line(f"no plot: {error}")


def _unused_folder(root: Path) -> Path:
    """Return `root`, or the first of `root-2`, `root-3`, ... that does not exist yet."""
    number, free = 2, root
    while free.exists() and any(free.iterdir()):
        free, number = root.with_name(f"{root.name}-{number}"), number + 1
    return free


def _quiet_libraries() -> None:
    """Keep loading bars and notices about names that transformers will rename one day out of the story."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads of {os.cpu_count()} CPU cores"


def _print_line(line: str) -> None:
    print(wrapped(line, window_width()), flush=True)
