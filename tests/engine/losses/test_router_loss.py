"""The balancing loss of routers is of a task's whole global batch, however its rows are divided among passes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.engine.losses import router_cases as cases
from tests.engine.losses.cases import Trained, observed
from tests.engine.losses.test_layouts import NIGHTLY, SLOW, assert_as
from tests.engine.processes.cases import launch, values
from tests.parallel.replicas.layout_cases import Watcher

NAMES = [task.name for task in cases.tasks()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    """Return the results of each task alone in one process, with its global batch in one pass."""
    options = {"max_tokens_per_micro_batch": 1000, "share_prefixes": False}
    return {
        name: cases.train_all(0, tmp_path_factory.mktemp(name), copy.deepcopy(cases.backbone()), options, [name])
        for name in NAMES
    }


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_tokens_per_micro_batch": 70, "share_prefixes": True}, id="shared prefixes in many passes"),
        pytest.param(
            {"max_tokens_per_micro_batch": 40, "activation_checkpointing": True},
            id="many passes, recomputed",
            marks=SLOW,
        ),
        pytest.param(
            {"max_tokens_per_micro_batch": 16, "split_long_sequences": True}, id="parts of long rows", marks=SLOW
        ),
    ],
)
def test_passes_do_not_change_the_balancing_loss(
    arguments: dict[str, Any], alone: dict[str, Trained], tmp_path: Path
) -> None:
    together = cases.train_all(0, tmp_path, copy.deepcopy(cases.backbone()), arguments)
    for name in NAMES:
        assert_as(together, alone[name], name)
        entries = [entry for entry in together.logs[name] if "loss" in entry]
        assert all(("aux_loss" in entry) == (name != "without") for entry in entries)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(2, {}, id="dp2", marks=SLOW),
        pytest.param(2, {"tensor_parallel_size": 2}, id="tp2", marks=SLOW),
        pytest.param(3, {"replicas": "<1,2>, <1,1>"}, id="unequal replicas of stages", marks=SLOW),
        pytest.param(2, {"shard_backbone": True}, id="fsdp2", marks=NIGHTLY),
        pytest.param(4, {"pipeline_parallel_size": 2, "shard_backbone": True}, id="fsdp2 x pp2", marks=NIGHTLY),
    ],
)
def test_layouts_do_not_change_the_balancing_loss(
    world_size: int, arguments: dict[str, Any], alone: dict[str, Trained], tmp_path: Path
) -> None:
    cases.backbone().save_pretrained(tmp_path / "backbone")
    folder = str(tmp_path / "backbone")
    parts = values(launch(world_size, cases.train_all, tmp_path / "run", folder, arguments, limit_s=120))
    for part in parts[1:]:
        assert part.laid_out.losses == parts[0].laid_out.losses
        assert part.logs == parts[0].logs
    weights = 2e-4 if "tensor_parallel_size" in arguments else 1e-4
    for name in parts[0].laid_out.losses:
        assert_as(parts[0], alone[name], name, weights=weights)


@SLOW
def test_a_resumed_run_balances_with_the_same_bits_or_says_that_the_coefficient_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(trainer: Any) -> None:
        trainer.control.should_training_stop = True

    def train(folder: Path, watcher: Watcher, *, resume: bool = False, **settings: Any) -> Trained:
        options = {"save_strategy": "steps", "save_steps": 1, "resume": resume}
        task = cases.task("a", cases.with_long_prompts(1, 11), **settings)
        return observed(folder, copy.deepcopy(cases.backbone()), [task], watcher, **options)

    whole = train(tmp_path / "whole", Watcher())
    for folder in ("same", "other"):
        train(tmp_path / folder, Watcher(at_end={3: stop}))
    capsys.readouterr()
    same = train(tmp_path / "same", Watcher(), resume=True)
    assert same.laid_out.losses["a"] == whole.laid_out.losses["a"][3:]
    assert "router_aux_loss_coef 0.4 ->" not in capsys.readouterr().out
    other = train(tmp_path / "other", Watcher(), resume=True, router_aux_loss_coef=0.0)
    assert other.laid_out.losses["a"][0] < whole.laid_out.losses["a"][3] - 0.5
    assert "router_aux_loss_coef 0.4 -> 0.0" in capsys.readouterr().out
