"""The picture of `benchmarks.processes.pipeline`: what each stage ran when in one step, planned and measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLOURS = ("#2b6cb0", "#d1853a", "#5a9e6f", "#9b5fa8", "#b4464b", "#6b7280", "#3aa6a0", "#a3812c")
TITLES = {"mux": "multi-task template", "drained": "task by task"}


def plot(path: Path, timelines: Mapping[str, Any], num_micro_batches: int) -> None:
    """Draw light forwards and dark backwards of each stage, in milliseconds.

    Args:
        path: path of the PNG file.
        timelines: for each schedule, the `planned` and the `measured` spans of each stage.
        num_micro_batches: number of micro-batches of a task, for the title.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    panels = figure.subplots(len(TITLES), 2, sharex=True, squeeze=False)
    for row, (schedule, title) in zip(panels, TITLES.items(), strict=True):
        for axes, kind in zip(row, ("planned", "measured"), strict=True):
            _draw(axes, timelines[schedule][kind], f"{title}, {kind}")
    for axes in panels[-1]:
        axes.set_xlabel("ms since the step began")
    figure.suptitle(f"forward (light) and backward (dark) of each task, C = {num_micro_batches}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _draw(axes: Any, stages: list[list[Any]], title: str) -> None:
    from matplotlib.colors import to_rgb

    for stage, spans in enumerate(stages):
        for kind, bucket, number, start_s, end_s in spans:
            colour = to_rgb(COLOURS[bucket % len(COLOURS)])
            light = tuple(0.45 * part + 0.55 for part in colour)
            bar = [(start_s * 1e3, (end_s - start_s) * 1e3)]
            axes.broken_barh(
                bar, (stage - 0.4, 0.8), facecolor=light if kind == "F" else colour, edgecolor="white", linewidth=0.4
            )
            middle_ms = (start_s + end_s) / 2 * 1e3
            axes.text(middle_ms, stage, f"{bucket}.{number}", ha="center", va="center", fontsize=5)
    last_s = max(span[-1] for spans in stages for span in spans)
    axes.set_title(f"{title}: {last_s * 1e3:.0f} ms", loc="left", fontsize=9)
    axes.set_yticks(range(len(stages)), [f"stage {stage}" for stage in range(len(stages))])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
