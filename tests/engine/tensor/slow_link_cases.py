"""Runs of two tensor parallel ranks on a machine that is pretended, whose links are slower than a profile says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from peft_mux import Task
from peft_mux.engine.work import PassClock, PassTime, StepTimes
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.planning.learning import PassPrices
from peft_mux.scheduler.costs.hardware import DEVICES, Link, Overlap
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.profile import Curve, Parts, Profile, analytic_profile
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.passes import TurnTimes
from tests.engine.processes.cases import TIMEOUT_S
from tests.engine.replicas.layout_cases import backbone
from tests.invariants import mux_lab as lab

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


def stored_profile(path: Path, bytes_per_s: float) -> str:
    """Write a profile that passes as measured, of a link of so many bytes a second."""
    own = backbone("llama")
    shape = model_shape(own, own.config, dtype=own.dtype, activation_dtype=own.dtype)
    counts = np.array([16.0, 4096.0])
    facts: dict[str, Any] = {
        "layer": Curve.measured(counts, 1e-4 * counts),
        "pass_overhead_s": 1e-3,
        "overlap": Overlap(slowdown=0.1, turn_s=4e-4),
        "link": Link(1e-6, bytes_per_s),
    }
    profile = replace(analytic_profile(DEVICES["cpu"], shape, 2), source="measured", **facts)
    path.write_text(profile.to_json(), encoding="utf-8")
    return str(path)


def train(rank: int, folder: Path, given: str, machine: str) -> Learnt:
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
        parts = [prices.cost.pass_parts(own, [whole_pass(own)]) for own in rows]
        return replace(one, seconds=TurnTimes(prices.cost).group_s(parts))
    predicted = prices.of(one)
    return replace(one, seconds=predicted.total, waited_s=None if one.waited_s is None else predicted.communication)
