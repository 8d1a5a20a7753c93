"""Two replicas of two stages that share the weights of each stage (FSDP2): the result of one process."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from tests.engine.fsdp import sharded_stages as cases
from tests.engine.fsdp.sharded_stages import Shown
from tests.engine.pipeline import stage_cases
from tests.engine.pipeline.stage_cases import CASES, POISONED, Case
from tests.engine.processes.cases import launch, values

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@functools.cache
def trained(case: Case, home: Path) -> list[Shown]:
    return values(launch(4, cases.train, case, home, limit_s=120))


def assert_as_one(shown: Shown, case: Case, home: Path, *, but: str = "") -> None:
    one, states = stage_cases.train_alone(case, home)
    for name in one.losses.keys() - {but}:
        np.testing.assert_allclose(shown.seen.losses[name], one.losses[name], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(shown.seen.norms[name], one.norms[name], rtol=1e-4, err_msg=name)
        for key, weight in states[name].weights.items():
            gap = np.linalg.norm(shown.weights[name][key] - weight.numpy()) / np.linalg.norm(weight.numpy())
            assert gap <= 1e-4, f"{name} {key}"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-1f1b", marks=SLOW),  # a run in this layout is a fast test of replicas
        pytest.param("gpt2-mux", marks=SLOW),
        pytest.param("llama-interleaved", marks=SLOW),
        pytest.param("mistral-uneven", marks=SLOW),
        pytest.param("qwen-mux", marks=SLOW),
    ],
)
def test_replicas_with_other_passes_that_share_their_stages_train_to_the_result_of_one_process(
    name: str, home: Path
) -> None:
    shown = trained(CASES[name], home)
    for part in shown:
        assert_as_one(part, CASES[name], home)
        assert part.seen == shown[0].seen


def test_each_process_holds_half_of_its_stage_and_gathers_as_often_as_the_one_with_most_passes(home: Path) -> None:
    shown = trained(CASES["llama-1f1b"], home)
    assert min(shown[0].num_passes, shown[2].num_passes) > 0
    assert all(part.most_passes > part.num_passes for part in shown), "one replica has the most passes in every place"
    for part in shown:
        assert part.held == pytest.approx(part.stage_bytes / 2, rel=0.02)
        assert part.received == part.most_passes * part.bytes_per_pass


def test_replicas_evaluate_their_own_rows_in_unlike_numbers_of_passes(home: Path) -> None:
    shown = trained(CASES["llama-1f1b"], home)
    expected = cases.evaluated_alone(CASES["llama-1f1b"], shown[0].weights)
    assert shown[0].evaluated.keys() | shown[2].evaluated.keys() == expected.keys()
    for part in shown:
        for name, loss in part.evaluated.items():
            assert loss == pytest.approx(expected[name], rel=1e-5), name


@SLOW
def test_a_nan_ends_its_task_on_all_processes_and_harms_no_neighbour(home: Path) -> None:
    healthy = CASES["llama-mux"]
    for part in trained(CASES["llama-poisoned"], home):
        assert part.seen.failures == {POISONED: "non_finite: loss is nan"}
        assert_as_one(part, healthy, home, but=POISONED)


@SLOW
def test_replicas_that_follow_different_templates_are_reported_before_they_gather() -> None:
    for outcome in launch(4, cases.follow_apart, CASES["llama-1f1b"], limit_s=60):
        assert outcome.error.startswith("PlanError: processes must follow the same template, ")
        assert "(their digests, by rank: [" in outcome.error
