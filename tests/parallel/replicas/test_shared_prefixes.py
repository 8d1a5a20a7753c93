"""Rows with a common prefix and rows with few targets, in any layout of processes: the result of one process that
computes all tokens of all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig

from peft_mux import Task
from tests.engine.processes.cases import Part, assert_as_one, launch, values
from tests.invariants import mux_lab as lab
from tests.parallel.replicas import layout_cases as cases

SLOW, NIGHTLY = ([mark, pytest.mark.distributed] for mark in (pytest.mark.slow, pytest.mark.nightly))
NUM_ROWS, NUM_STEPS = 6, 3
LENGTHS = {"a": (24, 8), "b": (0, 12), "c": (30, 5), "d": (14, 3), "e": (20, 1), "f": (9, 4)}
"""Tokens that all rows of a task begin with, and tokens of its own of each row; of the last three tasks those are the
only targets, and all rows differ."""


def tasks() -> list[Task]:
    """Return tasks whose rows share a prefix, one whose rows do not, and tasks with few targets."""
    rng, found = np.random.default_rng(4), []
    for name, (prefix, own) in LENGTHS.items():
        rows, shots = [], rng.integers(1, lab.VOCABULARY, size=prefix).tolist()
        for _ in range(NUM_ROWS):
            before = shots if name in "abc" else rng.integers(1, lab.VOCABULARY, size=prefix).tolist()
            ids = [*before, *rng.integers(1, lab.VOCABULARY, size=own).tolist()]
            rows.append({"input_ids": ids, **({} if name in "abc" else {"labels": [-100] * prefix + ids[prefix:]})})
        config = LoraConfig(r=4, target_modules="all-linear")
        options: dict[str, Any] = {"train_batch_size": NUM_ROWS, "max_steps": NUM_STEPS, "learning_rate": 3e-3}
        # With its usual epsilon, AdamW turns gradients of pure rounding into steps of full size.
        epsilon = 1e-8 if name in "abc" else 1e-4
        found.append(Task(name=name, peft_config=config, train_dataset=rows, seed=1, adam_epsilon=epsilon, **options))
    return found


def train(rank: int, folder: Path, model: Any, arguments: dict[str, Any]) -> Part:
    """Train them."""
    return cases.train(folder, model or cases.backbone("llama"), tasks(), **arguments)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Return what one process makes of them that computes all tokens of all rows."""
    return train(0, tmp_path_factory.mktemp("alone"), None, {"share_prefixes": False})


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a backbone, as sharded weights are read from one."""
    return cases.saved_backbone("llama", tmp_path_factory.mktemp("backbone"))


PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
RECOMPUTED = {"gradient_checkpointing": True}
CHAINS = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}
TURNS = {"interleaved_passes": 2, "planner": "interleaved"}
SHARDED = {"shard_backbone": True}


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(1, {}, id="one process"),
        pytest.param(1, {"max_tokens_per_micro_batch": 64}, id="one process, bundles cut", marks=pytest.mark.slow),
        pytest.param(2, {}, id="dp2", marks=SLOW),
        pytest.param(2, {**PP2, **RECOMPUTED}, id="pp2, recomputed", marks=SLOW),
        pytest.param(2, {**TP2, **TURNS, **RECOMPUTED}, id="tp2, passes in turns, recomputed", marks=SLOW),
        pytest.param(3, {"replicas": "<2,1>, <1,1>"}, id="shards beside a whole one", marks=SLOW),
        pytest.param(2, {**TP2, **CHAINS}, id="tp2, parts of long rows", marks=NIGHTLY),
        pytest.param(2, {**SHARDED, **RECOMPUTED}, id="sharded", marks=NIGHTLY),
        pytest.param(4, {**PP2, **TP2, "interleaved_passes": 2}, id="pp2 x tp2, passes in turns", marks=NIGHTLY),
        pytest.param(3, {"replicas": "<1,2>, <1,1>"}, id="stages beside a whole one", marks=NIGHTLY),
    ],
)
def test_every_layout_computes_shared_prefixes_once_as_planned(
    world_size: int, arguments: dict[str, Any], tmp_path: Path, backbone: str, plain: Part
) -> None:
    options = {"max_tokens_per_micro_batch": 512, **arguments}
    if world_size == 1:
        found = [train(0, tmp_path, backbone, options)]
    else:
        found = values(launch(world_size, train, tmp_path, backbone, options, limit_s=240))
    part = found[0]
    assert_as_one(part, plain)
    if CHAINS.items() <= arguments.items():
        return
    for report in part.pass_reports:
        assert (report.num_steps, report.same_tasks, report.same_tokens) == (NUM_STEPS,) * 3, report
    # Each replica computes a beginning once at most; where bundles are cut, more often.
    once = {name: (prefix if name in "abc" else prefix * NUM_ROWS) for name, (prefix, _) in LENGTHS.items()}
    most = NUM_STEPS * sum(2 * once[name] + NUM_ROWS * own for name, (_, own) in LENGTHS.items())
    asked = NUM_STEPS * NUM_ROWS * sum(sum(pair) for pair in LENGTHS.values())
    assert sum(report.tokens for report in part.pass_reports) < min(most, 0.8 * asked)
