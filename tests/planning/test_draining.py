"""Which runs drain their pipeline after nearly every step, as plans take it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux import MultiTaskTrainingArguments
from peft_mux.planning.planner import is_drained
from peft_mux.planning.targets import Target
from tests.scheduler.planner.cases import load, models

TARGET = Target(
    device="2 devices",
    device_type="cpu",
    num_stages=2,
    devices_per_stage=1,
    num_replicas=1,
    backbone_shards=1,
    limit_bytes=None,
    profile=models(2)[0].profile,
    tensor_link=None,
    stage_link=None,
    notes=(),
    is_own=True,
)


def drained(folder: Path, *, target: Target = TARGET, arguments: dict[str, Any] | None = None, **changed: Any) -> bool:
    args = MultiTaskTrainingArguments(str(folder), report_to="none", **{"logging_steps": 10, **(arguments or {})})
    task = SimpleNamespace(
        name="a",
        objective=changed.get("objective"),
        loss_type=None,
        objective_args=None,
        train_dataset=[{"input_ids": [1, 2]}],
        peft_config=SimpleNamespace(task_type="CAUSAL_LM"),
    )
    loader = SimpleNamespace(steps_per_epoch=changed.get("steps_per_epoch", 3))
    run: Any = SimpleNamespace(task=task, num_steps=changed.get("num_steps", 100), loader=loader)
    return is_drained(args, target, [run], [replace(load("a"), **changed.get("load", {}))])


def test_a_plain_pipeline_with_logs_now_and_then_is_not_drained(tmp_path: Path) -> None:
    assert not drained(tmp_path)
    assert not drained(tmp_path, arguments={"logging_strategy": "no", "logging_steps": 1})


def test_logs_of_a_share_of_the_steps_count_as_the_steps_that_they_are_apart(tmp_path: Path) -> None:
    assert not drained(tmp_path, arguments={"logging_steps": 0.1}, num_steps=100)
    assert drained(tmp_path, arguments={"logging_steps": 0.1}, num_steps=20)


def test_logs_after_each_epoch_do_not_drain_it_whatever_logging_steps_says(tmp_path: Path) -> None:
    assert not drained(tmp_path, arguments={"logging_strategy": "epoch", "logging_steps": 1})


@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": {"pipeline_flush": "every_step"}},
        {"arguments": {"logging_steps": 1}},
        {"target": replace(TARGET, num_stages=1)},
        {"target": replace(TARGET, num_replicas=2)},
        {"target": replace(TARGET, devices_per_stage=2)},
        {"steps_per_epoch": None},
        {"load": {"has_reference_forward": True}},
        {"load": {"has_batch_forward": True}},
        {"objective": lambda outputs: outputs},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_makes_all_stages_meet_after_every_step_drains_it(changed: dict[str, Any], tmp_path: Path) -> None:
    assert drained(tmp_path, **changed)
