"""Pictures of losses: one of a run with a panel for each task, and one of each task."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peft_mux.errors import ConfigError
from peft_mux.reporting.views import Curve, curve_of
from peft_mux.reporting.words import shortened
from peft_mux.storage import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = Mapping[str, Curve]
"""The points of `loss` and `eval_loss` of one task, as far as there are any."""
PICTURE_NAME = "loss.png"
_MOST_COLUMNS = 6


def plot_losses(records: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the training and held-out loss of every task, one panel each, into a PNG.

    Args:
        records: the records of a `metrics.jsonl`, in order.
        path: the PNG file to write.

    Returns:
        The path of the file, as given.

    Raises:
        ConfigError: if matplotlib is not installed, or no loss was recorded.
        CheckpointError: if the file cannot be written.
    """
    make_figure = _figure_class()
    found = task_curves(records)
    if not found:
        raise ConfigError("plots: got no loss in the records; allowed: a run that has logged at least once.")
    columns = min(_MOST_COLUMNS, len(found) if len(found) < 4 else math.ceil(math.sqrt(len(found))))
    rows = math.ceil(len(found) / columns)
    width, height = 4.2 * columns, 2.8 * rows
    figure = make_figure(figsize=(width, height))
    # Set by hand, as a layout that measures all texts takes seconds where panels are many.
    figure.subplots_adjust(0.65 / width, 0.5 / height, 1 - 0.15 / width, 1 - 0.3 / height, 0.22, 0.42)
    for index, (name, curves) in enumerate(found.items()):
        _draw(figure.add_subplot(rows, columns, index + 1), name, curves)
    write_file(path, _image(figure, path.suffix.removeprefix(".") or "png"))
    return path


def plot_task(name: str, curves: Curves) -> bytes:
    """Return a PNG of one task's losses.

    Args:
        name: name of the task.
        curves: its curves, at least one.

    Raises:
        ConfigError: if matplotlib is not installed.
    """
    figure = _figure_class()(figsize=(5.6, 3.4))
    figure.subplots_adjust(left=0.13, right=0.97, top=0.91, bottom=0.15)
    _draw(figure.add_subplot(), name, curves)
    return _image(figure, "png")


def task_curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Curves]:
    """Return the curves of each task that has any, from the records of a run."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if isinstance(name := record.get("task"), str):
            by_task.setdefault(name, []).append(record)
    found = {name: {key: curve_of(own, key) for key in ("loss", "eval_loss")} for name, own in by_task.items()}
    return {name: curves for name, curves in found.items() if any(curves.values())}


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    return Figure


def _draw(axes: Axes, name: str, curves: Curves) -> None:
    # A line through a single point is nothing to see.
    dots = "o-" if len(curves.get("loss", ())) == 1 else "-"
    for key, label, style in (("loss", "train", dots), ("eval_loss", "eval", "o--")):
        if curves.get(key):
            axes.plot(*zip(*curves[key], strict=True), style, label=label, markersize=4)
    axes.set_title(shortened(name, 40))
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    axes.legend()


def _image(figure: Figure, kind: str) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format=kind, dpi=120)
    return image.getvalue()
