"""Tasks with different losses, for the tests that each layout of processes trains them to the result of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from peft_mux import Task
from peft_mux.modeling.objectives.objective import TokenOutputs
from tests.engine.replicas import layout_cases as layouts
from tests.invariants import mux_lab as lab

NUM_STEPS = 3


def own_loss(outputs: TokenOutputs) -> torch.Tensor:
    """Return a loss of rows that the package does not have."""
    return outputs.mean_over_rows(outputs.row_sums(outputs.nll_M) ** 2 / 100)


def broken_loss(outputs: TokenOutputs) -> torch.Tensor:
    """Fail in the second step."""
    if outputs.step == 1:
        raise ValueError("no such reward")
    return outputs.nll_M


def rows(seed: int, **columns: Any) -> list[dict[str, Any]]:
    """Return tokenised rows with numbers for each token."""
    rng = np.random.default_rng(seed)
    found = lab.rows(seed, 12, 4, 20)
    for row in found:
        length = len(row["input_ids"])
        row |= {name: make(rng, length) for name, make in columns.items()}
    return found


def tasks(*, has_words: bool = True, is_broken: bool = False) -> list[Task]:
    """Return tasks with different losses."""
    rollouts = {
        "advantages": lambda rng, length: float(rng.normal()),
        "old_logprobs": lambda rng, length: (-4.5 + rng.normal(0, 0.3, size=length)).tolist(),
    }
    words = {
        "teacher_ids": lambda rng, length: rng.integers(1, lab.VOCABULARY, size=(length, 3)).tolist(),
        "teacher_logprobs": lambda rng, length: np.log(rng.dirichlet(np.ones(5), size=length)[:, :3]).tolist(),
    }
    options: dict[str, Any] = {"max_steps": NUM_STEPS, "learning_rate": 1e-3, "train_batch_size": 4}
    weights = {"weights": lambda rng, length: rng.uniform(0, 2, size=length).tolist()}
    found = [
        ("plain", rows(1), {}),
        ("weighted", rows(2, **weights), {}),
        ("policy", rows(3, **rollouts), {"objective_args": {"beta": 0.2, "temperature": 0.8}, "loss_type": "grpo"}),
        ("dynamic", rows(6, **weights), {"loss_type": "dft"}),
        ("own", rows(5), {"objective": broken_loss if is_broken else own_loss}),
    ]
    if has_words:
        found.append(("taught", rows(4, **words), {}))
        found.append(("curious", rows(7, **rollouts), {"objective_args": {"entropy_coef": 0.1, "temperature": 1.2}}))
    made = []
    for name, data, more in found:
        config = lab.small_task(name, data_seed=1).peft_config
        held_out = data[:5]
        made.append(
            Task(name=name, peft_config=config, train_dataset=data, eval_dataset=held_out, seed=3, **options, **more)
        )
    return made


def train(rank: int, folder: Path, model: str, arguments: dict[str, Any], options: dict[str, Any]) -> Any:
    """Train them; return what it showed, and all that was logged of each task."""
    watcher = layouts.Watcher()
    logging = {"logging_strategy": "steps", "logging_steps": 1, "eval_steps": NUM_STEPS, "eval_strategy": "steps"}
    found = layouts.train(folder, model, tasks(**options), watcher=watcher, **{**logging, **arguments})
    assert watcher.trainer is not None
    logs = {run.name: list(run.state.log_history) for run in watcher.trainer.table}
    return found, logs
