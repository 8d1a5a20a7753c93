"""Runs of a whole trainer whose plan has passes take turns, for the tests of planned turns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.scheduler.costs.hardware import DEVICES, Link, Overlap
from peft_mux.scheduler.costs.profile import Curve, analytic_profile
from peft_mux.scheduler.plan import Plan
from tests.engine.replicas import layout_cases


@dataclass
class InTurns:
    """What a run in turns showed to one process.

    Attributes:
        laid: what any run shows.
        plans: the plan of each step.
        decisions: the order of turns of each group.
    """

    laid: layout_cases.LaidOut
    plans: list[Plan]
    decisions: list[tuple[tuple[int, int], ...]]


class PlanWatcher(layout_cases.Watcher):
    """Keeps the plans, too."""

    def __init__(self) -> None:
        """Start without steps."""
        super().__init__()
        self.plans: list[Plan] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the plan of the step."""
        assert self.trainer is not None
        self.plans.append(self.trainer._plans.current)
        super().on_step_end(args, state, control, **kwargs)


def stored_profile(path: Path, overlap: Overlap | None) -> str:
    """Write a profile that passes as measured, of a link on which ranks wait only for slower ranks."""
    backbone = layout_cases.backbone("llama")
    shape = model_shape(backbone, backbone.config, dtype=backbone.dtype, activation_dtype=backbone.dtype)
    profile = analytic_profile(DEVICES["cpu"], shape, 2, link=Link(1e-7, 1e12))
    counts = np.array([16.0, 4096.0])
    # In proportion to tokens, so that two small passes take no longer than a large one.
    facts = {"layer": Curve.measured(counts, 1e-4 * counts), "pass_overhead_s": 0.0, "overlap": overlap}
    path.write_text(replace(profile, source="measured", **facts).to_json(), encoding="utf-8")
    return str(path)


def train_in_turns(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> InTurns:
    """Train the five tasks of the tests of layouts."""
    watcher = PlanWatcher()
    laid = layout_cases.train(folder, model, layout_cases.tasks_of("llama"), watcher=watcher, **arguments)
    trainer: Any = watcher.trainer
    executor = trainer._placement.executor
    interleaving = getattr(executor, "actions", executor).interleaving
    return InTurns(laid, watcher.plans, list(interleaving.decisions))
