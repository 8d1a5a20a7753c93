"""Pictures of a run, from its `metrics.jsonl`."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.storage import write_file


def plot_losses(records: list[dict[str, Any]], path: Path) -> Path:
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
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for record in records:
        for key in ("loss", "eval_loss"):
            if (point := _point(record, key)) is not None:
                curves.setdefault(record["task"], {}).setdefault(key, []).append(point)
    if not curves:
        raise ConfigError("plots: got no loss in the records; allowed: a run that has logged at least once.")
    columns = min(3, len(curves))
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    for index, (name, own) in enumerate(curves.items()):
        axes = figure.add_subplot(rows, columns, index + 1)
        for key, label, style in (("loss", "train", "-"), ("eval_loss", "held out", "o--")):
            if key in own:
                axes.plot(*zip(*own[key], strict=True), style, label=label, markersize=4)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.removeprefix(".") or "png", dpi=120)
    write_file(path, image.getvalue())
    return path


def _point(record: dict[str, Any], key: str) -> tuple[float, float] | None:
    """Return step and loss of a record; `None` where it has none, or a changed byte has made something else of them."""
    try:
        return (float(record["step"]), float(record[key])) if isinstance(record["task"], str) else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
