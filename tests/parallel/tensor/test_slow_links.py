"""Links that are slower than a profile says are learnt as such, and the plan ends as that of the right profile."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from peft_mux import Task
from peft_mux.engine.work import PassClock, PassTime, StepTimes
from peft_mux.planning.learning import PassPrices
from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.profile import Parts, Profile
from peft_mux.scheduler.plan import Link, Plan
from peft_mux.scheduler.planner.planned_passes import TurnTimes
from tests.engine.processes.cases import TIMEOUT_S, launch, values
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import make_trainer, train
from tests.parallel.replicas.layout_cases import backbone
from tests.parallel.tensor.test_planned_turns import stored_profile

NUM_STEPS = 32
OPTIONS: dict[str, Any] = {"max_tokens_per_micro_batch": 512, "ddp_timeout": TIMEOUT_S}
DECIDES: dict[str, Any] = {"measured_times": "plan", "replan_steps": 8, "logging_steps": 1, "tensor_parallel_size": 2}


@dataclass
class Learnt:
    """What a run showed to one process.

    Attributes:
        plans: the plan of each step.
        factors: what the parts of a pass take over the profile, as was learnt.
        waited: whether the clock had timed waiting for sums, by the number of passes that were timed together.
        losses: of each task by its steps.
    """

    plans: list[Plan]
    factors: Parts
    waited: set[tuple[int, bool]]
    losses: dict[str, list[float]]


def tasks() -> list[Task]:
    """Return tasks of like sizes, each of whose steps fills a pass or more."""
    return [
        lab.small_task(name, data_seed=seed, length=length, train_batch_size=6, max_steps=NUM_STEPS)
        for seed, (name, length) in enumerate((("a", 16), ("b", 20), ("c", 18), ("d", 17)), start=1)
    ]


def profile_of_link(path: Path, bytes_per_s: float) -> str:
    """Write a profile of a link of so many bytes a second."""
    overlap, link = Overlap(slowdown=0.1, turn_s=4e-4), Link(1e-6, bytes_per_s)
    return stored_profile(path, pass_overhead_s=1e-3, overlap=overlap, link=link)


def learn(rank: int, folder: Path, given: str, machine: str) -> Learnt:
    """Train with one profile on a machine for which another one holds."""
    plans: list[Plan] = []
    at_begin = dict.fromkeys(range(NUM_STEPS), lambda trainer: plans.append(trainer._plans.current))
    recorder = lab.Recorder(at_begin=at_begin, keep_weights=False)
    trainer = lab.make_trainer(
        tasks(), folder, model=backbone("llama"), recorder=recorder, cost_profile=given, **DECIDES, **OPTIONS
    )
    waited: set[tuple[int, bool]] = set()
    take = PassClock.take

    def pretended(self: PassClock) -> StepTimes:
        times = take(self)
        waited.update((len(one.passes), bool(one.waited_s)) for one in times.passes)
        prices = prices_of(trainer, machine)
        return replace(times, passes=tuple(on_machine(one, prices) for one in times.passes))

    PassClock.take = pretended  # type: ignore[method-assign]
    trainer.train()
    return Learnt(plans, trainer._plans.planner.correction.agreed, waited, recorder.losses)


def prices_of(trainer: Any, profile: str) -> PassPrices:
    planner = trainer._plans.planner
    known = Profile.from_json(Path(profile).read_text(encoding="utf-8"))
    loads = {load.name: load for load in planner._last_inputs.loads}
    return PassPrices(CostModel(known, planner.shape, devices_per_stage=2), loads, 0)


def on_machine(one: PassTime, prices: PassPrices) -> PassTime:
    """Return what passes take there, however busy this machine is."""
    if len(one.passes) > 1:
        rows = [prices._rows(own) for own in one.passes]
        parts = [prices.cost.pass_parts(0, prices.cost.pass_work(own, [whole_pass(own)])) for own in rows]
        return replace(one, seconds=TurnTimes(prices.cost).group_s(parts))
    predicted = prices.of(one)
    return replace(one, seconds=predicted.total, waited_s=None if one.waited_s is None else predicted.communication)


FAST, SLOW, FACTOR = 2e8, 2.5e7, 8.0


def shape_of(plan: Plan) -> tuple[int, list[list[tuple[tuple[str, ...], int]]]]:
    buckets = [[(plan.htasks[i].tasks, plan.htasks[i].micro_batches) for i in bucket] for bucket in plan.buckets]
    return plan.passes_in_turns, sorted(map(sorted, buckets))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_on_slow_links_end_in_the_turns_of_the_right_profile(tmp_path: Path) -> None:
    given, machine = (profile_of_link(tmp_path / f"{rate}.json", rate) for rate in (FAST, SLOW))
    trainer = make_trainer(tasks(), tmp_path / "right", model=backbone("llama"), cost_profile=machine, **OPTIONS)
    expected = shape_of(trainer._plans.planner.plan(list(trainer.table), devices_per_stage=2))
    found = values(launch(2, learn, tmp_path / "run", given, machine, limit_s=120))
    first, last = (shape_of(found[0].plans[step]) for step in (0, -1))
    assert (first[0], expected[0] > 1) == (1, True), "the case is too easy"
    assert last == expected
    for part in found:
        assert part.plans == found[0].plans
        assert part.factors.communication == pytest.approx(FACTOR, rel=0.25)
        assert part.factors.tokens == pytest.approx(1.0, rel=0.1)
        # Waiting for sums is separated for a pass by itself, not for passes in turns.
        assert part.waited == {(1, True), (expected[0], False)}
    # Another plan in the middle of a run, and no other result.
    alone = train(tasks(), tmp_path / "alone", model=backbone("llama"), **OPTIONS)
    for name, losses in alone.losses.items():
        assert found[0].losses[name] == pytest.approx(losses, rel=1e-5), name
