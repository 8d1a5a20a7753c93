"""Tasks with different losses, one of which needs a pass without adapters, in every layout as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes.cases import launch, values
from tests.engine.replicas import layout_cases as layouts
from tests.engine.replicas import loss_cases as cases
from tests.invariants.mux_lab import assert_close

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow
SHARDED_STAGES = {"pipeline_parallel_size": 2, "shard_backbone": True}
LAYOUTS = [
    pytest.param({}, True, id="replicas", marks=SLOW),
    pytest.param({"pipeline_parallel_size": 2, "pipeline_schedule": "1f1b"}, True, id="pipeline"),
    pytest.param({"tensor_parallel_size": 2}, False, id="tensor parallel", marks=SLOW),
    pytest.param(
        {"tensor_parallel_size": 2, "interleaved_passes": 3, "planner": "interleaved"},
        False,
        id="tensor parallel, in turns",
        marks=SLOW,
    ),
    pytest.param({"shard_backbone": True}, False, id="sharded", marks=SLOW),
    pytest.param(SHARDED_STAGES, False, id="sharded stages", marks=SLOW),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a backbone."""
    return layouts.saved_backbone("llama", tmp_path_factory.mktemp("backbone"))


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the results of the tasks in one process."""
    return cases.train(0, tmp_path_factory.mktemp("alone"), model, {}, {})


@pytest.mark.parametrize(("arguments", "has_words"), LAYOUTS)
def test_losses_statistics_and_evaluations_are_those_of_one_process(
    arguments: dict[str, Any], has_words: bool, alone: Any, model: str, tmp_path: Path
) -> None:
    world_size = 4 if arguments == SHARDED_STAGES else 2
    parts = values(launch(world_size, cases.train, tmp_path, model, arguments, {"has_words": has_words}, limit_s=120))
    one, logs = alone
    for found, own_logs in parts:
        assert own_logs.keys() == {name for name in logs if has_words or name not in ("taught", "curious")}
        for name, entries in own_logs.items():
            assert_close(found.losses[name], one.losses[name], 1e-5, name)
            for mine, theirs in zip(entries, logs[name], strict=True):
                assert mine.keys() == theirs.keys()
                assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    assert {"kl", "clip_ratio/low_mean"} <= parts[0][1]["policy"][0].keys()
    assert any("eval_kl" in entry for entry in parts[0][1]["policy"])
    assert parts[0][0].losses == parts[1][0].losses


def test_a_function_that_fails_on_one_process_fails_its_task_alone_and_every_process_says_why(
    model: str, tmp_path: Path, alone: Any
) -> None:
    options = {"has_words": False, "is_broken": True}
    parts = values(launch(2, cases.train, tmp_path, model, {}, options, limit_s=120))
    for found, _ in parts:
        assert found.statuses["own"][0] == "failed"
        assert "objective: ValueError: no such reward" in found.statuses["own"][1]
        assert_close(found.losses["policy"], alone[0].losses["policy"], 1e-5, "policy")


@pytest.mark.parametrize("arguments", [{"tensor_parallel_size": 2}, {"shard_backbone": True}])
def test_several_words_for_each_target_are_refused_where_the_head_is_divided(
    arguments: dict[str, Any], model: str, tmp_path: Path
) -> None:
    outcomes = launch(2, cases.train, tmp_path, model, arguments, {})
    for outcome in outcomes:
        assert "ConfigError" in outcome.error
        assert "tasks.taught.train_dataset must be rows with one target per token in this layout, got" in outcome.error
        assert "tasks.curious.objective_args must be a loss without entropies in this layout" in outcome.error
