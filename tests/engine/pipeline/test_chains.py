"""Long sequences in parts through a pipeline: what one process gives with unsplit ones, under every schedule."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux.data.batch import chains_of
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.pipeline.traffic import Key
from peft_mux.engine.processes import Processes
from peft_mux.scheduler.pipeline.template import SCHEDULES, build_template
from tests.engine.pipeline import chain_cases as cases
from tests.engine.pipeline import stage_cases as stages
from tests.engine.processes.cases import run_in_session

WORLD = 2


SLOW = ("mistral-1f1b", "qwen-mux-chunks", "llama-mux-limit")


def some_slow(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in names]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Run all cases that a selected test asks for in two processes, once."""
    home = tmp_path_factory.mktemp("chains")
    beside = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in beside}
    items = [f"chain:{name}" for name in cases.CASES if name in asked]
    launch = {"world": WORLD, "folder": str(home / "of-2"), "items": items}
    run_in_session(stages.run_launches, [[launch]], limit_s=300)
    for rank, code in enumerate(json.loads((home / "of-2" / "codes.json").read_text())):
        assert code == 0, (home / "of-2" / f"output-{rank}.txt").read_text()[-3000:]
    yield home / "of-2"
    unsplit.cache_clear()


@functools.cache
def unsplit(shape: str) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    return cases.alone(stages.Case(shape), is_split=False)


def facts_of(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return json.loads((folder / f"{name}-{rank}.json").read_text())


def check_gradients(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        assert gradient.norm() > 0, key
        assert (found[key] - gradient).norm() <= 1e-5 * gradient.norm(), key


@pytest.mark.distributed
@pytest.mark.parametrize("name", some_slow(cases.CASES))
def test_two_stages_give_the_losses_and_gradients_of_unsplit_sequences_in_one_process(name: str, folder: Path) -> None:
    wanted = unsplit(cases.CASES[name].shape)
    for rank in range(WORLD):
        fact = facts_of(folder, name, rank)
        for step, (losses, _) in enumerate(wanted):
            assert fact["losses"][step] == pytest.approx(losses, rel=1e-5)
        assert fact["held_bytes"] == 0
    for step, (_, gradients) in enumerate(wanted):
        check_gradients(cases.read_gradients(folder, name, step, WORLD), gradients)


def test_every_schedule_is_among_the_cases() -> None:
    assert {case.schedule for case in cases.CASES.values()} == set(SCHEDULES)


@pytest.mark.distributed
@pytest.mark.parametrize("name", some_slow(["llama-gpipe", "mistral-1f1b", "gpt2-mux"]))
def test_each_part_is_sent_on_before_the_next_one_is_computed_and_gradients_come_back_in_reverse(
    name: str, folder: Path
) -> None:
    events = facts_of(folder, name, 0)["events"]
    parts = [index for index, event in enumerate(events) if event.startswith("pass 0: e0@")]
    assert [events[index] for index in parts] == [f"pass 0: e0@{start}" for start in (0, 32)] * cases.NUM_STEPS
    for one, other in pairwise(parts[:2]):
        assert [event.split(":")[0] for event in events[one:other]] == ["pass 0", "F to 1"]
    bucket, micro_batch, number = (int(part) for part in events[parts[0] + 1].split()[-1][:-2].split("."))
    sent = [event.split()[-1][:-2] for event in facts_of(folder, name, 1)["events"] if event.startswith("B to 0")]
    first, second = (sent.index(f"{bucket}.{micro_batch}.{number + later}") for later in (0, 1))
    assert second + 1 == first


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["llama-interleaved", "gpt2-mux"])
def test_losses_without_gradients_are_those_of_one_process(name: str, folder: Path) -> None:
    model = stages.mux_model(cases.CASES[name])
    wanted = stages.Executor(model).forward_sums(cases.step_work(cases.NUM_STEPS, is_split=False).micro_batches).losses
    for rank in range(WORLD):
        found = facts_of(folder, name, rank)["forward_losses"]
        assert found == pytest.approx({task: loss.item() for task, loss in wanted.items()}, rel=1e-5)


# ---------------------------------------------------------------- one process


def plan_of(num_stages: int, schedule: Any, num_chunks: int) -> PipelinePlan:
    template = build_template(stages.loads_of(num_stages, (1000, 700)), schedule, num_chunks=num_chunks)
    return PipelinePlan(template, stages.HTASKS, stages.BUCKETS)


def test_virtual_stages_of_one_process_give_the_gradients_of_unsplit_sequences() -> None:
    stage = StageModel(stages.mux_model(stages.Case("qwen")), StageLayout.of(stages.NUM_LAYERS, 1, num_chunks=3), 0)
    executor = PipelineExecutor(stage, plan_of(1, "mux", 3), Processes())
    losses, gradients = unsplit("qwen")[0]
    found = executor.run(cases.step_work(0)).losses
    assert {name: loss.item() for name, loss in found.items()} == pytest.approx(losses, rel=1e-5)
    check_gradients(cases.gradients_of(stage.model), gradients)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("mux", 1), ("interleaved_1f1b", 2)])
def test_parts_stay_in_one_micro_batch_of_their_bucket_and_both_ends_agree_on_the_order(
    schedule: str, num_chunks: int
) -> None:
    plan, work = plan_of(3, schedule, num_chunks), cases.step_work(0)
    slots = plan.slots(work.micro_batches)
    assert sum(map(len, slots.values())) == len(work.micro_batches)
    for chain in chains_of(work.micro_batches):
        homes = [slot for slot, passes in slots.items() for one in passes if any(one is part for part in chain)]
        assert len(homes) == len(chain)
        assert len(set(homes)) == 1
    for stage, row in enumerate(plan.template.actions):
        traffic = stages.traffic_of(plan.template, slots, stage)
        needed = [(a.kind, Key(a.slot, n, a.chunk)) for a in row if traffic.source(a) for n in traffic.numbers(a)]
        arriving = [(kind, one) for kind in "FB" for other in range(3) for one in traffic.expected(kind, other)]
        assert sorted(needed) == sorted((kind, one.key) for kind, one in arriving)
        for action in row:
            numbers = list(traffic.numbers(action))
            passes = slots[action.slot]
            is_reversed = action.kind == "B" and any(one.parts for one in passes)
            assert numbers == sorted(range(len(passes)), reverse=is_reversed)
        for _, (key, shape, _) in arriving:
            assert shape == (slots[key.slot][key.number].num_tokens, stages.HIDDEN_SIZE)
