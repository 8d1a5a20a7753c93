"""`peft-mux demo`: make a backbone, train six tasks on it together, and check and measure the result."""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.demo import sentences
from peft_mux.demo.baseline import train_one_by_one
from peft_mux.demo.small_llama import make_backbone, make_tokenizer, pretrain
from peft_mux.demo.task_rows import DemoTask, demo_tasks, exact_match, last_token_ids
from peft_mux.errors import ConfigError
from peft_mux.log.lines import window_width, wrapped
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer


def run_demo(output_dir: str, *, fast: bool = False, verbose: bool = False) -> int:
    """Run the demo and print what it finds.

    Args:
        output_dir: folder for adapters, metrics and the plot; a number is appended where it holds a run already.
        fast: whether to take a few steps only, to see that everything runs; nothing is learned then.
        verbose: whether the plan, and all that a run prints, are printed too.

    Returns:
        0, or 1 if a reloaded adapter differs from the trained one.
    """
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.*", category=FutureWarning)
    root = _unused_folder(Path(output_dir))
    hardware, num_steps = _use_idle_cores(), 4 if fast else 120
    _print_line(f"peft_mux demo on {hardware}; no network is used. Files go to {root}.\n")
    tasks = demo_tasks()
    backbone, tokenizer = _prepare(tasks, root, num_steps)
    # Before the trainer puts adapters into it: the comparison shall train plain PEFT on the plain backbone.
    pristine = copy.deepcopy(backbone)
    trainer = _trainer(backbone, tokenizer, tasks, root, num_steps, verbose=verbose)
    if verbose:
        _print_line(f"\n{trainer.plan()}\n")
    _print_line(f"2. Training {len(tasks)} LoRA adapters on it at the same time, {num_steps} steps each ...")
    before = trainer.evaluate()
    together = trainer.train()
    _print_line(f"   {together.metrics['train_runtime']:.0f} s")
    after = trainer.evaluate()
    _print_line("3. Loading each adapter with plain PEFT, and timing HF Trainer + PEFT one task after another ...\n")
    different = _different_adapters(trainer, root)
    num_timed = 2 if fast else 16
    seconds, tokens = train_one_by_one(pristine, list(trainer.table), num_steps=num_timed)
    fast_rate, slow_rate = together.metrics["train_tokens_per_second"], tokens / seconds
    _print_line(
        f"{_results_table(tasks, before, after)}\n\n"
        + (f"loaded with plain PEFT, {', '.join(different)} give OTHER logits\n" if different else "")
        + f"together {fast_rate:,.0f} tokens/s, HF Trainer + PEFT one task after another {slow_rate:,.0f} tokens/s: "
        f"{fast_rate / slow_rate:.1f}x ({hardware}, fp32; the same rows, the first {num_timed} steps of each task)\n"
    )
    with suppress(ConfigError):  # no matplotlib, which is an extra
        trainer.plot_losses()
    command = "peft-mux" if shutil.which("peft-mux") else os.path.relpath(Path(sys.executable).with_name("peft-mux"))
    _print_line(
        f"next   # open in a browser: curves, times, memory\n       {root / 'report.html'}\n"
        f"       # merge an adapter into the model\n"
        f"       {command} export {shlex.quote(str(root))} --merge mood --output merged\n"
        f"       # write a file of your own tasks\n       {command} init"
    )
    return 1 if different else 0


def _prepare(tasks: list[DemoTask], root: Path, num_steps: int) -> tuple[Any, Any]:
    """Make tokenizer and backbone; both are saved, so that the adapters can be used later."""
    lines = sentences.corpus(3_000)
    tokenizer = make_tokenizer([*lines, *("".join(row.values()) for task in tasks for row in task.train_rows[:200])])
    backbone = make_backbone(tokenizer)
    _print_line(
        f"1. Pre-training a Llama of {sum(p.numel() for p in backbone.parameters()) / 1e6:.1f}M parameters for "
        f"{num_steps} steps on generated sentences ..."
    )
    started = time.perf_counter()
    loss = pretrain(backbone, tokenizer, lines, num_steps=num_steps)
    _print_line(f"   {time.perf_counter() - started:.0f} s, to a loss of {loss:.2f}")
    for part in (backbone, tokenizer):
        part.save_pretrained(root / "backbone")
    return backbone, tokenizer


def _trainer(
    backbone: Any, tokenizer: Any, tasks: list[DemoTask], root: Path, num_steps: int, *, verbose: bool = False
) -> MultiTaskTrainer:
    args = MultiTaskTrainingArguments(
        output_dir=str(root),
        logging_steps=max(1, num_steps // 6),
        max_steps=num_steps,
        lr_scheduler_type="cosine",
        log_level="info" if verbose else "warning",
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
    lines = ["task         rank  held-out loss     right answers"]
    for task in tasks:
        loss = f"{before[f'{task.name}/eval_loss']:6.3f} -> {after[f'{task.name}/eval_loss']:5.3f}"
        key = f"{task.name}/eval_accuracy"
        accuracy = f"{before[key]:8.0%} -> {after[key]:4.0%}" if key in before else "     (free text)"
        lines.append(f"{task.name:<12} {task.rank:>4}  {loss} {accuracy}")
    return "\n".join(lines)


@torch.no_grad()
def _different_adapters(trainer: MultiTaskTrainer, root: Path) -> list[str]:
    """Load every saved adapter with plain PEFT; return those whose logits are not those of the trained model."""
    trainer.model.eval()
    different = []
    for task in trainer.tasks:
        backbone = AutoModelForCausalLM.from_pretrained(root / "backbone", trust_remote_code=False)
        plain = PeftModel.from_pretrained(backbone, str(root / task.name)).eval()
        ids = torch.from_numpy(trainer.table[task.name].eval_data["eval"][0].input_ids)[None]
        ours = trainer.model.task_view(task.name)(input_ids=ids.to(trainer.model.device)).logits.cpu()
        if not torch.allclose(ours, plain(input_ids=ids).logits, atol=1e-5):
            different.append(task.name)
    return different


def _unused_folder(root: Path) -> Path:
    """Return `root`, or the first of `root-2`, `root-3`, ... that does not exist yet."""
    number, free = 2, root
    while free.exists() and any(free.iterdir()):
        free, number = root.with_name(f"{root.name}-{number}"), number + 1
    return free


def _use_idle_cores() -> str:
    """Compute on the cores that nothing else uses, one thread each, and return the hardware in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    num_idle = round(sum(100 - busy for busy in psutil.cpu_percent(0.5, percpu=True)) / 100)
    torch.set_num_threads(min(torch.get_num_threads(), max(num_idle, 1)))
    return f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores"


def _print_line(line: str) -> None:
    print(wrapped(line, window_width()), flush=True)
