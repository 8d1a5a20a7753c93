"""Sums, norms and whole states over layouts of real processes, compared with those of one process."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peft_mux.checkpoint.task_state import TaskState, join_state, merge_states, split_state
from peft_mux.engine.gradients import GradientSync, holding_of
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from tests.engine.gradients import sum_cases as cases
from tests.engine.processes.cases import launch, values

LAYOUTS = (
    "<1,1>x2",
    "<2,1>",
    pytest.param("<1,2>x2", marks=pytest.mark.slow),
    "<2,1>, <1,1>x2",
    pytest.param("<1,2>, <2,1>", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=LAYOUTS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ParallelLayout, list[Any]]:
    """Run every layout once; what each process saw."""
    layout = ParallelLayout.parse(request.param)
    outcomes = launch(layout.world_size, cases.train_over, request.param, tmp_path_factory.mktemp("sums"))
    return layout, [pickle.loads(value) for value in values(outcomes)]


def whole_gradients(num_replicas: int) -> dict[str, dict[str, torch.Tensor]]:
    model = cases.whole_model()
    return {
        task: {
            key: cases.whole_gradient(task, key, parameter.shape, num_replicas, step=1)
            for key, parameter in model.task_parameters(task).items()
        }
        for task in cases.TASKS
    }


@pytest.mark.distributed
def test_every_process_gets_its_part_of_the_whole_gradient(run: tuple[ParallelLayout, list[Any]]) -> None:
    layout, shown = run
    totals = whole_gradients(layout.num_replicas)
    for rank, one in enumerate(shown):
        for task, pieces in one["pieces"].items():
            gradients = one["healthy"]["gradients"][task]
            assert gradients.keys() == pieces.keys()
            for key, piece in pieces.items():
                expected = piece.take(totals[task][key]).numpy()
                np.testing.assert_allclose(gradients[key], expected, rtol=1e-5, atol=1e-5, err_msg=f"{rank} {key}")


@pytest.mark.distributed
def test_holders_of_the_same_region_have_the_same_bits(run: tuple[ParallelLayout, list[Any]]) -> None:
    layout, shown = run
    num_compared = 0
    for task, totals in whole_gradients(layout.num_replicas).items():
        for key, total in totals.items():
            known = torch.full_like(total, float("nan"))
            for one in shown:
                piece = one["pieces"][task].get(key)
                if piece is None:
                    continue
                before = piece.take(known).clone()
                own = torch.from_numpy(one["healthy"]["gradients"][task][key])
                is_known = ~before.isnan()
                assert torch.equal(own[is_known], before[is_known]), (task, key)
                num_compared += int(is_known.sum())
                piece.put(known, own)
            assert not known.isnan().any()
    assert num_compared > 0


@pytest.mark.distributed
def test_norms_are_those_of_whole_gradients_with_the_same_bits_everywhere(
    run: tuple[ParallelLayout, list[Any]],
) -> None:
    layout, shown = run
    totals = whole_gradients(layout.num_replicas)
    for one in shown:
        assert one["healthy"]["norms"] == shown[0]["healthy"]["norms"]
    for task, norm in shown[0]["healthy"]["norms"].items():
        expected = math.sqrt(sum(total.double().square().sum().item() for total in totals[task].values()))
        assert norm == pytest.approx(expected, rel=1e-6), task


@pytest.mark.distributed
def test_losses_are_added_up_over_replicas_and_not_over_their_processes(
    run: tuple[ParallelLayout, list[Any]],
) -> None:
    layout, shown = run
    for one in shown:
        assert one["healthy"]["losses"] == shown[0]["healthy"]["losses"]
    for task, loss in shown[0]["healthy"]["losses"].items():
        expected = sum(cases.replica_loss(replica, task) for replica in range(layout.num_replicas))
        assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.distributed
def test_nan_in_one_task_reaches_no_other(run: tuple[ParallelLayout, list[Any]]) -> None:
    _, shown = run
    assert all(math.isnan(one["poisoned"]["norms"][cases.POISONED]) for one in shown)
    for one in shown:
        for task in set(cases.TASKS) - {cases.POISONED}:
            for what in ("norms", "losses"):
                assert one["poisoned"][what][task] == one["healthy"][what][task]
            for key, gradient in one["healthy"]["gradients"][task].items():
                assert gradient.tobytes() == one["poisoned"]["gradients"][task][key].tobytes(), (task, key)


@pytest.mark.distributed
def test_bytes_sent_are_those_of_the_closed_form(run: tuple[ParallelLayout, list[Any]]) -> None:
    _, shown = run
    for one in shown:
        assert one["healthy"]["num_bytes"] == one["poisoned"]["num_bytes"] == one["closed_form"] > 0


@pytest.mark.distributed
def test_gathered_tasks_are_those_of_one_process_and_resume_exactly(
    run: tuple[ParallelLayout, list[Any]], tmp_path: Path
) -> None:
    layout, shown = run
    totals, model = whole_gradients(layout.num_replicas), cases.whole_model()
    assert all(one["states"] is None and one["resumed"] is None for one in shown[1:])
    for task in cases.TASKS:
        optimizer = cases.optimizer_of(model, task, tmp_path)
        assert optimizer is not None
        model.registry.slab_of(task).bind_gradients()
        for key, parameter in model.task_parameters(task).items():
            parameter.grad.copy_(totals[task][key])
        optimizer.step(optimizer.gradient_norm())
        expected = cases.state_of(model, task, optimizer)
        check_states(shown[0]["states"][task], expected, exactly=False)
        check_states(shown[0]["resumed"][task], shown[0]["states"][task], exactly=True)


def check_states(found: TaskState, expected: TaskState, *, exactly: bool) -> None:
    def check(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
        torch.testing.assert_close(one, other, rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5, msg=what)

    assert found.weights.keys() == expected.weights.keys() == found.copies["last_good"].keys()
    for key, weight in expected.weights.items():
        check(found.weights[key], weight, key)
        check(found.copies["last_good"][key], expected.copies["last_good"][key], key)
    assert found.moments.keys() == expected.moments.keys()
    for key, moments in expected.moments.items():
        assert found.moments[key].keys() == moments.keys() == {"exp_avg", "exp_avg_sq", "step"}
        for name, moment in moments.items():
            check(found.moments[key][name], moment, f"{key} {name}")
    assert found.settings == expected.settings
    assert found.schedule == expected.schedule


@pytest.mark.distributed
@pytest.mark.parametrize(("how", "timeout_s"), [("dies", 60.0), pytest.param("hangs", 3.0, marks=pytest.mark.slow)])
def test_a_peer_that_is_lost_is_an_error_everywhere_within_the_limit(how: str, timeout_s: float) -> None:
    outcomes = launch(4, cases.falls_over, "<2,1>, <1,1>x2", how, timeout_s, limit_s=50.0)
    for rank, outcome in enumerate(outcomes[:3]):
        assert outcome.error.startswith("ProcessError: rank"), outcome.error
        assert f"rank {rank} of 4 got no answer at" in outcome.error
        # Closed connections show a death long before the limit; a process that hangs would return after it.
        assert outcome.seconds < 50.0


@pytest.mark.distributed
def test_parts_that_are_no_whole_are_an_error_on_every_process() -> None:
    for outcome in launch(2, cases.unequal):
        assert outcome.error.startswith('ProcessError: task "a", '), outcome.error
        assert 'ProcessError: task "a", base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight' in outcome.error
        assert ", got shapes " in outcome.error


# ---------------------------------------------------------------- one process


def test_bytes_of_two_shards_are_the_partial_sums() -> None:
    """A of column-parallel and B of row-parallel layers, r * D * 4 bytes each; only one shard has the rest."""
    layout, model = ParallelLayout.parse("<2,1>"), cases.part_of(ParallelLayout.parse("<2,1>"), 0)

    class Both(Processes):
        def __init__(self) -> None:
            super().__init__(0, 2)

        def gather(self, value: Any) -> list[Any]:
            other = cases.part_of(layout, 1)
            return [value, {name: holding_of(other, name) for name in value}]

    sync = GradientSync(model, Both(), layout)
    sync.exchange_holdings(["some"])
    # q_proj is column-parallel, o_proj row-parallel; hidden size 32, rank 3, in each of 2 layers.
    assert sum(bundle.num_bytes for bundle in sync.cells_of("some").bundles) == 2 * (3 * 32 + 3 * 32) * 4


def test_a_process_that_is_alone_sums_nothing_and_has_the_norms_of_its_own() -> None:
    layout = ParallelLayout.parse("<1,1>")
    sync = GradientSync(cases.whole_model(), Processes(), layout)
    for task in cases.TASKS:
        sync.model.registry.slab_of(task).bind_gradients()
    shown = cases.seen(sync, cases.one_step(sync, layout, 0, step=1))
    assert shown["num_bytes"] == 0
    for task, gradients in shown["gradients"].items():
        expected = math.sqrt(sum(float(np.square(gradient, dtype=np.float64).sum()) for gradient in gradients.values()))
        assert shown["norms"][task] == pytest.approx(expected, rel=1e-5)


def step_once(model: Any, optimizer: Any) -> None:
    model.registry.slab_of("some").bind_gradients()
    for key, parameter in model.task_parameters("some").items():
        parameter.grad.copy_(cases.numbers("some", key, parameter.shape, salt=5))
    optimizer.step(optimizer.gradient_norm())


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd"])
def test_a_state_by_name_holds_the_moments_of_each_parameter_with_any_optimizer(optim: str, tmp_path: Path) -> None:
    model, other = cases.whole_model(), cases.whole_model()
    optimizer, resumed = (cases.optimizer_of(one, "some", tmp_path, optim) for one in (model, other))
    step_once(model, optimizer)
    join_state(split_state(model.task_parameters("some"), optimizer), other.task_parameters("some"), resumed)
    for one, own in ((model, optimizer), (other, resumed)):
        step_once(one, own)
    for key, parameter in model.task_parameters("some").items():
        assert torch.equal(parameter, other.task_parameters("some")[key]), key


def test_an_optimizer_without_elements_brings_no_settings_and_takes_the_rate(tmp_path: Path) -> None:
    model = cases.whole_model()
    optimizer = cases.optimizer_of(model, "last", tmp_path)
    stage = StageModel(cases.whole_model(), StageLayout.of(cases.NUM_LAYERS, 2), 0).model
    assert not stage.task_parameters("last")
    stage.registry.adopt("last", {"nothing": torch.nn.Parameter(torch.zeros(0))})
    empty = cases.optimizer_of(stage, "last", tmp_path)
    assert optimizer is not None
    assert empty is not None
    for own in (optimizer, empty):
        own.optimizer.step()
        own.schedule.step()
    state = split_state(model.task_parameters("last"), optimizer)
    nothing = split_state({}, empty)
    assert nothing.settings == {}
    assert nothing.moments == {}
    whole = merge_states([state, nothing])
    assert (whole.settings, whole.schedule) == (state.settings, state.schedule)
    fresh = cases.optimizer_of(stage, "last", tmp_path)
    assert fresh is not None
    join_state(whole, {}, fresh)
    assert fresh.learning_rate == optimizer.learning_rate > 0
