"""Sums of gradients over replicas of a pipeline begin while it still runs, and change nothing about the result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.scheduler.pipeline.template import build_template
from tests.engine.gradients import pipeline_cases as cases
from tests.engine.pipeline import chain_cases, stage_cases
from tests.engine.processes import cases as parallel_cases

OF_FOUR = ("llama-1f1b", "llama-interleaved")


# ---------------------------------------------------------------- two replicas of two stages


@pytest.fixture(scope="module")
def shown() -> list[dict[str, Any]]:
    return parallel_cases.values(parallel_cases.launch(4, cases.as_stage_of_replica, OF_FOUR, limit_s=120))


@pytest.mark.distributed
@pytest.mark.parametrize("name", OF_FOUR)
def test_two_replicas_of_two_stages_give_the_losses_gradients_and_norms_of_one_process(
    name: str, shown: list[dict[str, Any]]
) -> None:
    case = stage_cases.CASES[name]
    model = stage_cases.mux_model(case)
    alone = stage_cases.Alone(model)
    expected = alone.run(stage_cases.step_work(0, list(stage_cases.LENGTHS))).losses
    norms = alone.gradient_norms(list(expected))
    parts = [one[name] for one in shown]
    assert all((one["losses"], one["norms"]) == (parts[0]["losses"], parts[0]["norms"]) for one in parts)
    for task, loss in expected.items():
        assert parts[0]["losses"][task] == pytest.approx(loss.item(), rel=1e-5), task
        assert parts[0]["norms"][task] == pytest.approx(norms[task].item(), rel=1e-4), task
    for first, last in ((0, 1), (2, 3)):
        found = {**parts[first]["gradients"], **parts[last]["gradients"]}
        for task in model.tasks:
            for key, parameter in model.task_parameters(task).items():
                gradient = parameter.grad.numpy()
                gap = np.linalg.norm(found[f"{task}/{key}"] - gradient)
                assert gap <= 1e-4 * np.linalg.norm(gradient), (task, key)


@pytest.mark.distributed
@pytest.mark.parametrize("name", OF_FOUR)
def test_sums_begin_before_the_last_action_and_in_one_order_on_all_holders(
    name: str, shown: list[dict[str, Any]]
) -> None:
    for one, other in ((0, 2), (1, 3)):
        logs = [shown[rank][name]["log"] for rank in (one, other)]
        sums = [[event for event in log if event.startswith(f"sum over ({one}, {other})")] for log in logs]
        assert sums[0] == sums[1]
        assert len(sums[0]) >= len(cases.ORDER) - 1, "one task has no weights in the first stage"
    for log in (part[name]["log"] for part in shown):
        actions = [index for index, event in enumerate(log) if event.startswith("action")]
        early = [event for event in log[: actions[-1]] if event.startswith("sum")]
        assert early, "nothing was summed while the pipeline ran"


# ---------------------------------------------------------------- one process


SLOW = pytest.mark.slow
SCHEDULES = [
    ("1f1b", 1),
    ("mux", 3),
    *(pytest.param(*one, marks=SLOW) for one in (("gpipe", 1), ("mux", 1), ("interleaved_1f1b", 2))),
]


def watched_pipeline(schedule: Any, num_chunks: int) -> tuple[PipelineExecutor, list[tuple[str, Any]]]:
    """Return a pipeline of one process, and the calls of its sync, with the actions between."""
    layout = StageLayout.of(stage_cases.NUM_LAYERS, 1, num_chunks=num_chunks)
    stage = StageModel(stage_cases.mux_model(stage_cases.Case("llama")), layout, 0)
    template = build_template(stage_cases.loads_of(1, (1000, 700)), schedule, num_chunks=num_chunks)
    plan = PipelinePlan(template, stage_cases.HTASKS, stage_cases.BUCKETS)
    sync = cases.RecordingSync(stage.model, Processes())
    executor = PipelineExecutor(stage, plan, Processes(), sync=sync)
    backward = executor._backward

    def watched(action: Any, traffic: Any) -> None:
        backward(action, traffic)
        done = traffic.slots[action.slot]
        sync.events.append(("backward", (action.chunk, [id(micro_batch) for micro_batch in done])))

    executor._backward = watched  # type: ignore[method-assign]
    return executor, sync.events


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
def test_every_micro_batch_is_passed_once_behind_its_last_backward(schedule: str, num_chunks: int) -> None:
    executor, events = watched_pipeline(schedule, num_chunks)
    all_tasks, one_task = (stage_cases.step_work(0, names) for names in (list(stage_cases.LENGTHS), ["d"]))
    long_sequences = chain_cases.step_work(0)
    assert any(micro_batch.parts for micro_batch in long_sequences.micro_batches)
    for work in (all_tasks, one_task, long_sequences):
        events.clear()
        executor.run(work)
        check_events(events, work, num_chunks)


def check_events(events: list[tuple[str, Any]], work: StepWork, num_chunks: int) -> None:
    assert [what for what, _ in events].index("begin") == 0
    assert events[-1][0] == "finish"
    done: dict[int, set[int]] = {id(micro_batch): set() for micro_batch in work.micro_batches}
    passed = []
    for what, detail in events:
        if what == "backward":
            for one in detail[1]:
                done[one].add(detail[0])
        elif what == "passed":
            assert done[id(detail)] == set(range(num_chunks)), "a backward was still to come"
            passed.append(id(detail))
    assert sorted(passed) == sorted(done)


def test_a_pipeline_without_a_sync_adds_nothing_up_and_counts_no_norms() -> None:
    stage = StageModel(stage_cases.mux_model(stage_cases.Case("llama")), StageLayout.of(stage_cases.NUM_LAYERS, 1), 0)
    template = build_template(stage_cases.loads_of(1, (1000, 700)), "1f1b")
    executor = PipelineExecutor(stage, PipelinePlan(template, stage_cases.HTASKS, stage_cases.BUCKETS), Processes())
    result = executor.run(stage_cases.step_work(0, ["a"]))
    assert (result.norms, executor.sync.num_bytes) == (None, 0)
    assert executor.sync.gather("word") == ["word"]
