"""A run of tasks with losses of every kind over any layout of processes: what each process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from peft_mux import Task
from peft_mux.modeling.objectives.objective import TokenOutputs
from tests.engine.processes.cases import Part
from tests.invariants import mux_lab as lab
from tests.parallel.replicas.layout_cases import Watcher, backbone, train

Row = dict[str, Any]
STEPS = 4
HELD_OUT: dict[str, Any] = {"eval_steps": 2}


@dataclass
class Trained:
    """What a run showed to one process; the logs of each task have its metrics and evaluations."""

    laid_out: Part
    logs: dict[str, list[dict[str, float]]]


def ids(rng: np.random.Generator, low: int, high: int) -> list[int]:
    """Return a few random tokens."""
    return rng.integers(1, lab.VOCABULARY, size=int(rng.integers(low, high + 1))).tolist()


def pairs(seed: int, count: int) -> list[Row]:
    """Return pairs of answers, as tokens."""
    rng = np.random.default_rng(seed)
    return [
        {"prompt_ids": ids(rng, 1, 8), "chosen_ids": ids(rng, 2, 9), "rejected_ids": ids(rng, 2, 9)}
        for _ in range(count)
    ]


def answers(seed: int, count: int) -> list[Row]:
    """Return answers with a label, as tokens."""
    rng = np.random.default_rng(seed)
    return [
        {"prompt_ids": ids(rng, 1, 8), "completion_ids": ids(rng, 2, 9), "label": place % 3 > 0}
        for place in range(count)
    ]


def own_loss(outputs: TokenOutputs) -> torch.Tensor:
    """Return a loss of rows that the package does not have."""
    return outputs.mean_over_rows(outputs.row_sums(outputs.nll_M) ** 2 / 100)


def broken_loss(outputs: TokenOutputs) -> torch.Tensor:
    """Fail in the second step."""
    if outputs.step == 1:
        raise ValueError("no such reward")
    return outputs.nll_M


def with_columns(seed: int, **columns: Any) -> list[Row]:
    """Return tokenised rows with numbers for each token or row."""
    rng = np.random.default_rng(seed)
    return [
        {**row, **{name: make(rng, len(row["input_ids"])) for name, make in columns.items()}}
        for row in lab.rows(seed, 12, 4, 20)
    ]


def token_tasks(*, has_words: bool = True, is_broken: bool = False) -> list[Task]:
    """Return tasks of losses of tokens; those with several words for each target take a whole head."""
    rollouts = {
        "advantages": lambda rng, length: float(rng.normal()),
        "old_logprobs": lambda rng, length: (-4.5 + rng.normal(0, 0.3, size=length)).tolist(),
    }
    words = {
        "teacher_ids": lambda rng, length: rng.integers(1, lab.VOCABULARY, size=(length, 3)).tolist(),
        "teacher_logprobs": lambda rng, length: np.log(rng.dirichlet(np.ones(5), size=length)[:, :3]).tolist(),
    }
    weights = {"weights": lambda rng, length: rng.uniform(0, 2, size=length).tolist()}
    found: list[tuple[str, list[Row], dict[str, Any]]] = [
        ("weighted", with_columns(2, **weights), {}),
        (
            "policy",
            with_columns(3, **rollouts),
            {"objective_args": {"beta": 0.2, "temperature": 0.8}, "loss_type": "grpo"},
        ),
        ("dynamic", with_columns(6, **weights), {"loss_type": "dft"}),
        ("own", with_columns(5), {"objective": broken_loss if is_broken else own_loss}),
    ]
    if has_words:
        curious = {"objective_args": {"entropy_coef": 0.1, "temperature": 1.2}}
        found += [("taught", with_columns(4, **words), {}), ("curious", with_columns(7, **rollouts), curious)]
    options = {"learning_rate": 1e-3, "train_batch_size": 4, "seed": 3, **HELD_OUT}
    return [_task(name, rows, eval_dataset=rows[:5], **{**options, **more}) for name, rows, more in found]


def all_tasks() -> list[Task]:
    """Return all tasks that a process with the whole backbone trains."""
    return [*tasks(), *token_tasks()]


def tasks() -> list[Task]:
    """Return tasks of seven losses, in batches and on rows of unequal sizes, some with held-out rows."""
    return [
        _task("sft", lab.rows(1, 11, 5, 20), train_batch_size=4),
        _task(
            "smoothed",
            lab.rows(7, 9, 3, 15),
            eval_dataset=lab.rows(17, 5, 3, 12),
            label_smoothing_factor=0.3,
            neftune_noise_alpha=5,
            **HELD_OUT,
        ),
        _task("dpo", pairs(2, 9), eval_dataset=pairs(12, 5), objective="dpo", train_batch_size=3, **HELD_OUT),
        _task("ipo", pairs(3, 7), objective="dpo", loss_type="ipo", objective_args={"ld_alpha": 0.5}, seed=4),
        _task("orpo", pairs(4, 8), eval_dataset=pairs(14, 4), objective="orpo", rank=2, **HELD_OUT),
        _task(
            "simpo",
            pairs(8, 7),
            objective="cpo",
            loss_type="simpo",
            objective_args={"beta": 2.0},
            loraplus_lr_ratio=4.0,
        ),
        _task("kto", answers(5, 11), eval_dataset=answers(15, 7), objective="kto", train_batch_size=5, **HELD_OUT),
        _task("apo", answers(6, 6), objective="kto", loss_type="apo_zero_unpaired", train_batch_size=3),
        _task("warm", pairs(8, 7), objective="dpo", init_adapter=_saved_adapter().name, seed=5),
    ]


@cache
def _saved_adapter() -> TemporaryDirectory[str]:
    """Return a temporary folder with an adapter that has changed since it was drawn; the same in all processes."""
    model, folder = (
        get_peft_model(backbone("llama"), LoraConfig(r=4, target_modules="all-linear")),
        TemporaryDirectory(),
    )
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for _, value in sorted(model.named_parameters()):
            if value.requires_grad:
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    model.save_pretrained(folder.name)
    return folder


def _task(name: str, rows: Sequence[Row], rank: int = 4, **settings: Any) -> Task:
    options: dict[str, Any] = {"train_batch_size": 2, "learning_rate": 3e-3, "max_steps": STEPS, "seed": 1, **settings}
    config = LoraConfig(r=rank, target_modules="all-linear")
    return Task(name=name, peft_config=config, train_dataset=list(rows), **options)


def train_all(
    rank: int,
    folder: Path,
    model: Any,
    arguments: dict[str, Any],
    names: Sequence[str] | None = None,
    options: dict[str, bool] | None = None,
) -> Trained:
    """Train some of the tasks, by default all, on a folder's model or on one that is made here."""
    made = [*tasks(), *token_tasks(**(options or {}))]
    chosen = [task for task in made if names is None or task.name in names]
    return observed(folder, model or backbone("llama"), chosen, Watcher(), **arguments)


def observed(folder: Path, model: Any, chosen: Sequence[Task], watcher: Watcher, **arguments: Any) -> Trained:
    """Train, and return what it showed."""
    logging = {"logging_strategy": "steps", "logging_steps": 1}
    laid_out = train(folder, model, chosen, watcher=watcher, **{**logging, **arguments})
    assert watcher.trainer is not None
    states = watcher.trainer.task_states
    return Trained(
        laid_out, {task.name: [_figures(entry) for entry in states[task.name].log_history] for task in chosen}
    )


def _figures(entry: dict[str, Any]) -> dict[str, float]:
    """Return what is the same in every run: times and learning rates are not looked at."""
    return {key: value for key, value in entry.items() if key.removeprefix("eval_").startswith(_FIGURES)}


_FIGURES = ("loss", "aux_loss", "rewards/", "logps/", "kl", "nll", "log_odds", "clip_ratio", "entropy")
