"""`SweepResult`: the tasks of a sweep from best to worst, as text, as a table of a notebook and as a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.reporting.views import Curve
from peft_mux.reporting.words import number_text
from peft_mux.storage import write_file


@dataclass(frozen=True, slots=True)
class RankedTask:
    """One task of a sweep.

    Attributes:
        name: name of the task.
        settings: the settings that were swept, by field.
        value: the metric that it is ranked by; `None` where it was never evaluated.
        step: the step at which it had that value.
        num_steps: steps that it would have taken.
        status: how it has ended.
        curve: the metric at each of its evaluations.
        place: folder of its adapter; `None` where nothing was saved.
    """

    name: str
    settings: Mapping[str, Any]
    value: float | None
    step: int
    num_steps: int
    status: str
    curve: Curve
    place: Path | None


@dataclass(frozen=True, slots=True)
class SweepResult:
    """What came of a sweep.

    Attributes:
        name: name of the task that was swept.
        metric: the metric that tasks are ranked by.
        ranking: the tasks, best first: those that came further stand before those that ended earlier.
        place: folder with a copy of the best adapter; `None` where nothing was saved.
    """

    name: str
    metric: str
    ranking: tuple[RankedTask, ...]
    place: Path | None = None

    @property
    def best(self) -> RankedTask:
        """The best task."""
        return self.ranking[0]

    def __str__(self) -> str:
        """Return the ranking as a table."""
        cells = [self._heads(), *(self._cells(number, one) for number, one in enumerate(self.ranking, start=1))]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(own, widths, strict=True)).rstrip() for own in cells]
        place = f"\nbest adapter: {self.place}" if self.place else ""
        return "\n".join(rows) + place

    def _repr_html_(self) -> str:
        """Return the ranking as a table of HTML."""
        rows = [self._heads(), *(self._cells(number, one) for number, one in enumerate(self.ranking, start=1))]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        return f"<b>sweep {escape(self.name)}</b><table>{body}</table>"

    def _heads(self) -> Sequence[str]:
        return ["", "task", *self.best.settings, self.metric, "step", "status"]

    def _cells(self, number: int, one: RankedTask) -> Sequence[str]:
        settings = [f"{value:g}" if isinstance(value, float) else str(value) for value in one.settings.values()]
        step = f"{one.step}/{one.num_steps}"
        return [str(number), one.name, *settings, number_text(one.value), step, one.status]

    def plot(self, path: str | Path) -> Path:
        """Draw the metric of each task over its steps into a PNG, the best one thick.

        Args:
            path: the file to write.

        Raises:
            ConfigError: if matplotlib is not installed.
            CheckpointError: if the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigError("plots: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for number, one in enumerate(self.ranking):
            if one.curve:
                label = ", ".join(str(value) for value in one.settings.values()) if number < 10 else None
                steps, values = zip(*one.curve, strict=True)
                axes.plot(steps, values, "o-", linewidth=3 if number == 0 else 1, markersize=3, label=label)
        axes.set_xlabel("step")
        axes.set_ylabel(self.metric)
        axes.set_title(f"sweep {self.name}")
        axes.grid(alpha=0.3)
        axes.legend(title=", ".join(self.best.settings), fontsize="small")
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=120)
        write_file(Path(path), image.getvalue())
        return Path(path)
