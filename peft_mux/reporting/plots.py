"""Pictures of a run, from its `metrics.jsonl`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError


def plot_losses(records: list[dict[str, Any]], path: Path) -> Path:
    """Draw the training and held-out loss of every task, one panel each, into a PNG.

    Args:
        records: the records of a `metrics.jsonl`, in order.
        path: the PNG file to write.

    Returns:
        The path of the file, as given.

    Raises:
        ConfigError: if matplotlib is not installed, or no loss was recorded.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    names = list(dict.fromkeys(r["task"] for r in records if "task" in r and ("loss" in r or "eval_loss" in r)))
    if not names:
        raise ConfigError("plots: got no loss in the records; allowed: a run that has logged at least once.")
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.2 * columns, 2.8 * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for key, label, style in (("loss", "train", "-"), ("eval_loss", "held out", "o--")):
            points = [(r["step"], float(r[key])) for r in records if r.get("task") == name and key in r]
            if points:
                axes.plot(*zip(*points, strict=True), style, label=label, markersize=4)
        axes.set_title(name)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    return path
