"""The last layer at the rows that are read, in any layout of processes: the result of one that computes all rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux import Task
from peft_mux.modeling.last_layer import LastLayerForward
from tests.engine.processes.cases import launch, values
from tests.engine.replicas import layout_cases as cases
from tests.engine.replicas.layout_cases import LaidOut
from tests.invariants import mux_lab as lab

SLOW = pytest.mark.slow


def completion_tasks() -> list[Task]:
    """Return tasks whose loss is of the last tokens of each row."""
    rng, tasks = np.random.default_rng(4), []
    for name, (prompt, own) in {"a": (14, 3), "b": (20, 1), "c": (9, 4)}.items():
        rows = []
        for _ in range(6):
            ids = rng.integers(1, lab.VOCABULARY, size=prompt + own).tolist()
            rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
        config = LoraConfig(r=4, target_modules="all-linear")
        # With its usual epsilon, AdamW turns gradients of pure rounding into steps of full size.
        options: dict[str, Any] = {"train_batch_size": 6, "max_steps": 3, "learning_rate": 3e-3, "adam_epsilon": 1e-4}
        tasks.append(Task(name=name, peft_config=config, train_dataset=rows, seed=1, **options))
    return tasks


class Trained(NamedTuple):
    """What a run showed to one process, and how often it computed some rows of its last layer alone to train."""

    laid: LaidOut
    num_narrow: int


def train_completions(rank: int, folder: Path, model: Any, arguments: dict[str, Any]) -> Trained:
    """Train them."""
    narrow, plain = [], LastLayerForward._compute

    def counted(*given: Any, **named: Any) -> Any:
        narrow.extend([1] * torch.is_grad_enabled())
        return plain(*given, **named)

    LastLayerForward._compute = counted  # type: ignore[method-assign]
    try:
        laid = cases.train(folder, model or cases.backbone("llama"), completion_tasks(), **arguments)
    finally:
        LastLayerForward._compute = plain  # type: ignore[method-assign]
    return Trained(laid, len(narrow))


@pytest.fixture(scope="module")
def of_all_rows(tmp_path_factory: pytest.TempPathFactory) -> LaidOut:
    """Return what one process makes of them whose last layer computes all rows."""
    alone = train_completions(0, tmp_path_factory.mktemp("alone"), None, {"last_layer_at_targets": False})
    assert alone.num_narrow == 0
    return alone.laid


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a backbone, as sharded weights are read from one."""
    return cases.saved_backbone("llama", tmp_path_factory.mktemp("backbone"))


PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
CHAINS = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}
TURNS = {"interleaved_passes": 2, "planner": "interleaved"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(2, {**PP2, "gradient_checkpointing": True}, id="pp2, recomputed"),
        pytest.param(2, {**PP2, "num_micro_batches": 4}, id="pp2, four passes", marks=[SLOW]),
        pytest.param(2, {**TP2, **TURNS, "gradient_checkpointing": True}, id="tp2, turns, recomputed", marks=[SLOW]),
        pytest.param(2, TP2, id="tp2", marks=[SLOW]),
        pytest.param(2, {**TP2, **TURNS}, id="tp2, passes in turns", marks=[SLOW]),
        pytest.param(2, {**TP2, **CHAINS}, id="tp2, parts of long rows", marks=[SLOW]),
        pytest.param(4, {**PP2, **TP2, "interleaved_passes": 2}, id="pp2 x tp2, passes in turns", marks=[SLOW]),
        pytest.param(2, {"shard_backbone": True, "gradient_checkpointing": True}, id="sharded", marks=[SLOW]),
    ],
)
def test_every_layout_gives_the_results_of_all_rows(
    world_size: int, arguments: dict[str, Any], tmp_path: Path, backbone: str, of_all_rows: LaidOut
) -> None:
    found = values(launch(world_size, train_completions, tmp_path, backbone, arguments, limit_s=240))
    part = found[0].laid
    with_head = found[world_size // 2 :] if "pipeline_parallel_size" in arguments else found
    assert all(one.num_narrow > 0 for one in with_head), "the last layer computes some rows alone"
    assert part.statuses == of_all_rows.statuses
    for name, weights in of_all_rows.adapters.items():
        lab.assert_close(part.losses[name], of_all_rows.losses[name], 1e-5, name)
        for key, weight in weights.items():
            assert lab.relative(torch.from_numpy(part.adapters[name][key]), torch.from_numpy(weight)) <= 1e-4, key
