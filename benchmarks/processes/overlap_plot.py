"""The picture of `benchmarks.processes.overlap`: turns of one step, planned above, measured below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = ("#2b6cb0", "#d1853a", "#5a9e6f", "#9b5fa8")
SUM_COLOUR = "#b8b8b8"


def plot(path: Path, timeline: dict[str, Any]) -> None:
    """Draw computing of each hTask and the sums on the link, in milliseconds."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(span[0] for span in timeline["planned"]))
    planned = {
        name: [(start, end) for htask, _, start, end, *_ in timeline["planned"] if htask == name] for name in names
    }
    measured = {
        name: [(start, end) for owner, _, _, start, end in timeline["turns"] if owner == index]
        for index, name in enumerate(names)
    }
    planned["link"] = [(begin, end) for *_, begin, end in timeline["planned"] if end > begin]
    measured["link"] = [tuple(one) for one in timeline["sums"]]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    for axis, title, rows in zip(axes, ("planned", "measured"), (planned, measured), strict=True):
        for row, (name, spans) in enumerate(rows.items()):
            bars = [(start * 1e3, (end - start) * 1e3) for start, end in spans]
            colour = SUM_COLOUR if name == "link" else COLOURS[row]
            axis.broken_barh(bars, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4)
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        last_s = max(end for spans in rows.values() for _, end in spans)
        axis.set_title(f"{title}: {last_s * 1e3:.0f} ms", loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms since the step began; one shard of two")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
