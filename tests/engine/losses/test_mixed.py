"""Many losses and many types of PEFT in one run over real text, each task as if it were alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux import (
    BottleneckConfig,
    DiffPruningConfig,
    MultiTaskPeftModel,
    MultiTaskTrainer,
    MultiTaskTrainingArguments,
    Task,
)
from peft_mux.modeling.objectives.objective import TokenOutputs
from tests.engine.losses.cases import Row
from tests.invariants import mux_lab as lab

NUM_ROWS, STEPS, MAX_LENGTH = 10, 3, 128


def lines(folder: Path, name: str) -> list[dict[str, str]]:
    """Return the first rows of a file."""
    text = (folder / "text" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[: NUM_ROWS + 1]]


def with_other_answers(rows: list[dict[str, str]]) -> list[Row]:
    """Return each prompt with its own answer, and with one that is longer and wrong."""
    return [
        {
            "prompt": row["prompt"][-100:],
            "chosen": row["completion"],
            "rejected": f"{other['completion']} or {row['prompt'][:20]}",
        }
        for row, other in zip(rows, rows[1:], strict=False)
    ]


def distilled(texts: list[dict[str, str]], tokenizer: Any, teacher: Any) -> list[Row]:
    """Return rows with the three likeliest words of a teacher for each token."""
    rows = []
    for row in texts:
        ids = tokenizer(row["text"])["input_ids"][:40]
        with torch.no_grad():
            logprobs = torch.log_softmax(0.7 * teacher(torch.tensor([ids])).logits[0], dim=-1)
        best = logprobs.roll(1, 0).topk(3, dim=-1)
        rows.append({"input_ids": ids, "teacher_ids": best.indices.tolist(), "teacher_logprobs": best.values.tolist()})
    return rows


def rollouts(texts: list[dict[str, str]], tokenizer: Any) -> list[Row]:
    """Return rows with the log-probabilities of a policy of before, and an advantage each."""
    rng = np.random.default_rng(0)
    rows = []
    for row in texts:
        ids = tokenizer(row["prompt"] + row["completion"])["input_ids"][:50]
        old = (-2.0 - rng.random(len(ids))).tolist()
        rows.append({"input_ids": ids, "old_logprobs": old, "advantages": float(rng.normal())})
    return rows


def surprise(outputs: TokenOutputs) -> torch.Tensor:
    """Return the mean square of a row's negative log-likelihood."""
    return outputs.mean_over_rows((outputs.row_sums(outputs.nll_M) / 50) ** 2)


def adapters() -> dict[str, PeftConfig]:
    """Return the adapter of each task: twelve types of PEFT."""
    few = ["q_proj", "v_proj"]
    return {
        "sft": LoraConfig(r=2, target_modules="all-linear", use_dora=True),
        "dpo": LoraConfig(r=4, target_modules="all-linear"),
        "chats": MissConfig(r=4, target_modules=few),
        "orpo": VeraConfig(r=8, target_modules=few),
        "kto": OFTConfig(oft_block_size=8, target_modules=few),
        "distill": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "policy": BottleneckConfig(bottleneck_size=4, target_modules=["o_proj", "down_proj"]),
        "own": LoHaConfig(r=2, target_modules=few),
        "prompt": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "norms": LNTuningConfig(target_modules=["input_layernorm"]),
        "diff": DiffPruningConfig(target_modules=few),
    }


def tasks(folder: Path, tokenizer: Any, teacher: Any) -> list[Task]:
    """Return a task for each loss, on texts of its own."""
    answers = [
        {"prompt": row["prompt"], "completion": row["completion"], "label": place % 2 == 0}
        for place, row in enumerate(lines(folder, "sst2.train"))
    ]
    pairs = with_other_answers(lines(folder, "openbookqa.train"))
    chats = [
        {
            "prompt": [{"role": "user", "content": row["prompt"][:80]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]}],
        }
        for row in with_other_answers(lines(folder, "instruct"))
    ]
    shakespeare = lines(folder, "tinyshakespeare")
    settings: dict[str, dict[str, Any]] = {
        "sft": {"train_dataset": lines(folder, "sst2.dev")},
        "dpo": {"train_dataset": pairs, "objective": "dpo", "train_batch_size": 3},
        "chats": {
            "train_dataset": chats,
            "loss_type": ["ipo", "sft"],
            "objective_args": {"loss_weights": [1.0, 0.1], "beta": 0.5},
            "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        },
        "orpo": {"train_dataset": with_other_answers(lines(folder, "rte.train")), "objective": "orpo"},
        "kto": {"train_dataset": answers, "train_batch_size": 5},
        "distill": {"train_dataset": distilled(shakespeare, tokenizer, teacher), "objective": "distill"},
        "policy": {"train_dataset": rollouts(lines(folder, "pubmedqa.train"), tokenizer), "objective": "policy"},
        "own": {"train_dataset": shakespeare, "objective": surprise},
        **{name: {"train_dataset": shakespeare} for name in ("prompt", "prefix", "norms", "diff")},
    }
    # Adam divides gradients by their size, so where they are nearly 0 the last bits would decide.
    hyper = {"learning_rate": 2e-3, "adam_epsilon": 1e-6}
    return [
        Task(
            name=name,
            peft_config=adapters()[name],
            seed=place,
            **{"train_batch_size": 2, "max_steps": STEPS, **hyper, "max_length": MAX_LENGTH, **own},
        )
        for place, (name, own) in enumerate(settings.items())
    ]


def train(chosen: list[Task], model: str, tokenizer: Any, folder: Path, max_tokens: int) -> lab.Run:
    """Train tasks, and record them."""
    recorder = lab.Recorder()
    args = MultiTaskTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        max_tokens_per_micro_batch=max_tokens,
    )
    backbone = AutoModelForCausalLM.from_pretrained(model)
    trainer = MultiTaskTrainer(backbone, args, chosen, processing_class=tokenizer, callbacks=[recorder])
    recorder.trainer = trainer
    trainer.train()
    return lab.Run(trainer, recorder)


@pytest.mark.slow
def test_eight_losses_and_eleven_types_over_real_text_train_together_as_each_alone(
    shared_data: Path, tmp_path: Path
) -> None:
    model = str(shared_data / "stories260K")
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = tasks(shared_data, tokenizer, AutoModelForCausalLM.from_pretrained(model))
    assert len({task.peft_config.peft_type for task in made}) == 11
    together = train(made, model, tokenizer, tmp_path / "together", 400)
    assert set(together.losses) == {task.name for task in made}
    for task in made:
        alone = train([task], model, tokenizer, tmp_path / task.name, 4000)
        lab.assert_close(together.losses[task.name], alone.losses[task.name], 1e-5, task.name)
        assert all(math.isfinite(loss) for loss in together.losses[task.name])
        theirs = alone.weights(task.name)
        for key, weight in together.weights(task.name).items():
            assert lab.relative(weight, theirs[key]) <= 1e-4, f"{task.name} {key}: {lab.relative(weight, theirs[key])}"
        new = MultiTaskPeftModel(
            AutoModelForCausalLM.from_pretrained(model), {task.name: task.peft_config}, seeds={task.name: task.seed}
        )
        before = new.task_parameters(task.name)
        assert any(not torch.equal(weight, before[key]) for key, weight in theirs.items()), f"{task.name} has not moved"
