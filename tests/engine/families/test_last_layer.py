"""Families whose last layer computes only the rows that the loss reads: stages and shards train as one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.modeling.backbone.families import FAMILIES
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.last_layer import LastLayerForward
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.families import family_cases as cases
from tests.engine.families.test_families import check_as_alone
from tests.engine.pipeline import stage_cases
from tests.engine.processes import cases as parallel_cases

SUMS_BEFORE = ("flex_olmo", "minimax_m2", "olmo2", "olmo3")
"""Families whose shards sum before attention, for a norm over all heads; they compute all rows."""
FAST = ("qwen3", "mixtral")
SLOW = tuple(kind for kind in FAMILIES if kind not in FAST)
PARTS = tuple(SLOW[start : start + 8] for start in range(0, len(SLOW), 8))


class Shown(NamedTuple):
    """What a process showed: its training, and whether its last layer computed only some rows; `None` without a last
    layer."""

    seen: cases.Seen
    was_narrow: bool | None
    reason: str | None


def completions(name: str, step: int, lengths: Sequence[int], num_words: int) -> TaskBatch:
    """Return random rows whose last two tokens are targets."""
    batch = _random_batch(name, step, lengths, num_words)
    labels = [np.where(np.arange(len(one)) < len(one) - 2, IGNORE_INDEX, one.labels) for one in batch.sequences]
    sequences = [replace(one, labels=own) for one, own in zip(batch.sequences, labels, strict=True)]
    return replace(batch, sequences=tuple(sequences))


_random_batch = stage_cases.random_batch


def forward_of(model: MultiTaskPeftModel) -> LastLayerForward | None:
    found = find_layers(model.backbone)
    forward = None if found is None else found.layers[-1].__dict__.get("forward")
    return forward if isinstance(forward, LastLayerForward) else None


def train(kind: str, layout: ParallelLayout, processes: Processes, links: TensorLinks, folder: Path) -> Shown:
    """Train as one process of a replica of stages or shards, as `parallelize` makes it."""
    model, place, replica = cases.mux_model(kind), layout.place(processes.rank), layout.replicas[0]
    stage = None
    if replica.pp > 1:
        stage = StageModel(model, StageLayout.of(cases.NUM_LAYERS, replica.pp), place.stage)
    else:
        model.last_layer.prove(model)
    TensorParallelModel(model, links)
    if stage is not None:
        stage.prove_last_layer()
    model.last_layer.check_cut(model)
    forward = forward_of(model)
    if forward is not None:
        forward.was_narrowed = False
    sync = GradientSync(model, processes, layout)
    with mock.patch.object(stage_cases, "random_batch", completions):
        if stage is None:
            seen = cases.train(Executor(model, sync=sync), model, folder, sync)
        else:
            executor = PipelineExecutor(stage, cases.two_stages(), processes, pipelines=layout.pipelines, sync=sync)
            seen = cases.train(executor, model, folder, sync)
            executor.links.close()
    return Shown(seen, None if forward is None else forward.was_narrowed, model.last_layer.reason)


def train_alone(kind: str, folder: Path) -> cases.Seen:
    """Train in one process, whose last layer computes all rows."""
    model = cases.mux_model(kind)
    with mock.patch.object(stage_cases, "random_batch", completions):
        return cases.train(Executor(model), model, folder)


def conform(rank: int, kinds: Sequence[str], folder: Path) -> dict[str, dict[str, Shown]]:
    """Train families as one of two stages, and as one of two shards."""
    processes = parallel_cases.connected(120.0)
    pp, tp = ParallelLayout.of(2, pp=2), ParallelLayout.of(2, tp=2)
    alone, both = TensorLinks(pp.tensor_groups, processes), TensorLinks(tp.tensor_groups, processes)
    return {
        kind: {"pp": train(kind, pp, processes, alone, folder), "tp": train(kind, tp, processes, both, folder)}
        for kind in kinds
    }


def check(kinds: Sequence[str], home: Path) -> None:
    """Compare families in two processes with one process whose last layer computes all rows."""
    parts = parallel_cases.values(parallel_cases.launch(2, conform, kinds, home, limit_s=600))
    failed: dict[str, Any] = {}
    for kind in kinds:
        expected = train_alone(kind, home)
        for layout in ("pp", "tp"):
            last: Shown = parts[1][kind][layout]
            wanted = not (layout == "tp" and kind in SUMS_BEFORE)
            if last.was_narrow is not wanted:
                failed[f"{kind} {layout}"] = last.was_narrow, last.reason
            check_as_alone(parts[0][kind][layout].seen, expected)
    assert not failed


@pytest.mark.distributed
def test_families_compute_the_rows_that_are_read_alone_in_stages_and_shards(tmp_path: Path) -> None:
    check(FAST, tmp_path)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kinds", PARTS, ids=lambda kinds: f"{kinds[0]} to {kinds[-1]}")
def test_all_other_families_compute_the_rows_that_are_read_alone_in_stages_and_shards(
    kinds: tuple[str, ...], tmp_path: Path
) -> None:
    check(kinds, tmp_path)
