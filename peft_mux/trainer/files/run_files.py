"""`RunFiles`: what is left of a run beside its adapters: `report.html`, pictures of its losses."""

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peft_mux.checkpoint.numerics import numerics_of
from peft_mux.errors import ConfigError
from peft_mux.own_code import describe_error
from peft_mux.reporting.banner import device_words
from peft_mux.reporting.metrics_file import METRICS_NAME, read_metrics
from peft_mux.reporting.page.measured import MeasuredPass, MeasuredStep
from peft_mux.reporting.page.plots import plot_losses, task_curves
from peft_mux.reporting.page.run_page import RunFacts, page_html
from peft_mux.reporting.report import RunReport
from peft_mux.reporting.views import RunView, view_of
from peft_mux.scheduler.plan import Plan
from peft_mux.storage import write_file
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World

PAGE_NAME = "report.html"
PLOT_NAME = "losses.png"
_MOST_PANELS = 60


class RunFiles:
    """Writes what is left of a run; where that fails, says so and goes on.

    Args:
        run: the run.
        world: all processes of the run.
    """

    def __init__(self, run: Run, world: World) -> None:
        """Write nothing yet."""
        self._run, self._world = run, world

    @property
    def page(self) -> Path | None:
        """The page of the run; `None` where none was written."""
        path = self._run.root / PAGE_NAME
        return path if self._is_wanted and path.is_file() else None

    @property
    def _is_wanted(self) -> bool:
        return self._run.saver.is_writer and self._run.saver.folder is not None

    def write(self, report: RunReport, plan: Plan | None, steps: Sequence[MeasuredStep]) -> None:
        """Write the page and the picture of the losses, where anything of the run is saved.

        Args:
            report: the tasks at the end.
            plan: the plan that was followed for most steps.
            steps: its last step, as each process timed it.
        """
        if self._is_wanted:
            self._try(PAGE_NAME, lambda: self._write_page(report, plan, steps))
            self._try(PLOT_NAME, self._plot)

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        # Whatever draws and the disk say is no reason to lose what was trained.
        except Exception as error:
            self._run.log.warn(f"{self._run.root / name}: could not be written ({describe_error(error)})")

    def _plot(self) -> None:
        records = read_metrics(self._run.root / METRICS_NAME)
        curves = task_curves(records)
        # A single point is nothing to see, and hundreds of panels neither: the page has them all.
        if not any(len(curve) > 1 for own in curves.values() for curve in own.values()) or len(curves) > _MOST_PANELS:
            return
        try:
            plot_losses(records, self._run.root / PLOT_NAME)
        except ConfigError:  # no matplotlib, which is an extra
            return

    def _write_page(self, report: RunReport, plan: Plan | None, steps: Sequence[MeasuredStep]) -> None:
        run = self._run
        facts = RunFacts(
            title=f"peft_mux: {run.root.name}",
            report=report,
            view=RunView(tuple(map(view_of, run.table)), run.state.global_step),
            plan=plan,
            steps=steps,
            records=self._world.records,
            config=self._config(),
            versions=self._versions(),
            remark=self._remark(),
            is_host=run.args.device.type != "cuda",
        )
        write_file(run.root / PAGE_NAME, page_html(facts).encode())

    def _remark(self) -> str:
        number = self._run.interrupted_by
        return f"Interrupted by {signal.Signals(number).name}: it may go on." if number else ""

    def _config(self) -> Mapping[str, str]:
        run = self._run
        # Tokens that a user gave as arguments are for nobody else; `to_dict` masks them.
        sections: dict[str, Any] = {"arguments of the run": run.args.to_dict()}
        for own in run.table:
            config = own.task.peft_config.to_dict()
            sections[f"task {own.name}"] = {**asdict(own.hyper), "num_steps": own.num_steps, "peft_config": config}
        return {name: json.dumps(section, indent=2, default=str) for name, section in sections.items()}

    def _versions(self) -> Mapping[str, Any]:
        found = numerics_of(self._run.args)
        names = [name for name in found if name.endswith("version")] + ["attention", "world_size"]
        return {
            "Python": f"{platform.python_version()}, {platform.platform()}",
            "device": device_words(self._run.args.device),
            **{name.removesuffix(" version"): found[name] for name in names},
        }


def measured_steps(world: World, times: Any) -> tuple[MeasuredStep, ...]:
    """Return the last step under a plan as each process timed it; all processes call this.

    Args:
        world: all processes of the run.
        times: the passes of the step, as they were timed on this process.
    """
    own = tuple(
        MeasuredPass(tuple(dict.fromkeys(part.task for rows in one.passes for part in rows)), one.seconds)
        for one in times.passes
    )
    found = world.processes.gather(own)
    places = [world.layout.place(rank) for rank in range(len(found))]
    return tuple(
        MeasuredStep(rank, place.stage, place.replica, tuple(MeasuredPass(*one) for one in passes))
        for rank, (place, passes) in enumerate(zip(places, found, strict=True))
    )
