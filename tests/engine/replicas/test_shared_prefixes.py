"""Rows with a common prefix, in any layout of processes: the result of one process that shares nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux import Task
from tests.engine.processes.cases import launch, values
from tests.engine.replicas import layout_cases as cases
from tests.engine.replicas.layout_cases import LaidOut
from tests.invariants import mux_lab as lab

SLOW = pytest.mark.slow
NUM_ROWS, NUM_STEPS = 6, 3
LENGTHS = {"a": (24, 8), "b": (0, 12), "c": (30, 5)}
"""Tokens that all rows of a task begin with, and tokens of its own of each row."""


def few_shot_tasks() -> list[Task]:
    """Return tasks whose rows share a prefix, and one whose rows do not."""
    rng = np.random.default_rng(4)
    tasks = []
    for name, (prefix, own) in LENGTHS.items():
        shots = rng.integers(1, lab.VOCABULARY, size=prefix).tolist()
        rows = [{"input_ids": [*shots, *rng.integers(1, lab.VOCABULARY, size=own).tolist()]} for _ in range(NUM_ROWS)]
        config = LoraConfig(r=4, target_modules="all-linear")
        options: dict[str, Any] = {"train_batch_size": NUM_ROWS, "max_steps": NUM_STEPS, "learning_rate": 3e-3}
        tasks.append(Task(name=name, peft_config=config, train_dataset=rows, seed=1, **options))
    return tasks


def train_few_shot(rank: int, folder: Path, model: Any, arguments: dict[str, Any]) -> LaidOut:
    """Train them."""
    return cases.train(folder, model or cases.backbone("llama"), few_shot_tasks(), **arguments)


@pytest.fixture(scope="module")
def unshared(tmp_path_factory: pytest.TempPathFactory) -> LaidOut:
    """Return what one process makes of them that computes all tokens of all rows."""
    return train_few_shot(0, tmp_path_factory.mktemp("alone"), None, {"share_prefixes": False})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a backbone, as sharded weights are read from one."""
    return cases.saved_backbone("llama", tmp_path_factory.mktemp("backbone"))


def assert_as_unshared(part: LaidOut, unshared: LaidOut) -> None:
    """Assert losses within 1e-5 and adapters within 1e-4."""
    assert part.statuses == unshared.statuses
    for name, weights in unshared.adapters.items():
        lab.assert_close(part.losses[name], unshared.losses[name], 1e-5, name)
        for key, weight in weights.items():
            assert lab.relative(torch.from_numpy(part.adapters[name][key]), torch.from_numpy(weight)) <= 1e-4, key


PP2 = {"pipeline_parallel_size": 2}
TP2 = {"tensor_parallel_size": 2}
BOUND = {"max_tokens_per_micro_batch": 256}


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(1, BOUND, id="one process"),
        pytest.param(1, {"max_tokens_per_micro_batch": 64}, id="one process, bundles cut"),
        pytest.param(2, BOUND, id="dp2", marks=pytest.mark.distributed),
        pytest.param(2, {**BOUND, **PP2}, id="pp2", marks=pytest.mark.distributed),
        pytest.param(2, {**BOUND, **PP2, "num_micro_batches": 4}, id="pp2, four passes", marks=[SLOW]),
        pytest.param(2, {**BOUND, **TP2}, id="tp2", marks=[SLOW]),
        pytest.param(
            2, {**BOUND, **TP2, "interleaved_passes": 2, "num_micro_batches": 2}, id="tp2, turns", marks=[SLOW]
        ),
        pytest.param(2, {**BOUND, "shard_backbone": True}, id="sharded", marks=[SLOW]),
        pytest.param(4, {**BOUND, **PP2, **TP2}, id="pp2 x tp2", marks=[SLOW]),
        pytest.param(4, {**BOUND, **PP2}, id="dp2 x pp2", marks=[SLOW]),
    ],
)
def test_every_layout_computes_what_rows_begin_with_once_and_as_planned(
    world_size: int, arguments: dict[str, Any], tmp_path: Path, backbone: str, unshared: LaidOut
) -> None:
    if world_size == 1:
        part = train_few_shot(0, tmp_path, backbone, arguments)
    else:
        part = values(launch(world_size, train_few_shot, tmp_path, backbone, arguments, limit_s=240))[0]
    assert_as_unshared(part, unshared)
    for report in part.pass_reports:
        assert (report.num_steps, report.same_tasks, report.same_tokens) == (NUM_STEPS,) * 3, report
    asked = NUM_STEPS * NUM_ROWS * sum(sum(pair) for pair in LENGTHS.values())
    assert sum(report.tokens for report in part.pass_reports) < 0.75 * asked


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("replicas", ["<2,1>, <1,1>", "<1,2>, <1,1>"])
def test_unequal_replicas_are_dispatched_what_rows_compute_together_and_as_planned(
    replicas: str, tmp_path: Path, backbone: str, unshared: LaidOut
) -> None:
    arguments = {**BOUND, "replicas": replicas}
    part = values(launch(3, train_few_shot, tmp_path, backbone, arguments, limit_s=240))[0]
    assert_as_unshared(part, unshared)
    for report in part.pass_reports:
        assert (report.num_steps, report.same_tasks, report.same_tokens) == (NUM_STEPS,) * 3, report
    # Each of two replicas computes a beginning once at most.
    most = NUM_STEPS * sum(2 * prefix + NUM_ROWS * own for prefix, own in LENGTHS.values())
    assert sum(report.tokens for report in part.pass_reports) <= most
