"""Drawing of cluster replays: throughput, completion times, and what runs and waits; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner.cluster.result import Replay

_FORMATS = (".png", ".svg")


def save_replays(cases: Mapping[str, Sequence[Replay]], path: Path) -> Path:
    """Draw the replays of one or more cases, a row each, into a .png or .svg file, and return the path.

    Args:
        cases: replays of the systems that are compared, by the name of the case.
        path: where the picture is written; an existing file is replaced.

    Raises:
        ValueError: for no case, a case without replays, or another kind of file.
    """
    if path.suffix not in _FORMATS:
        raise ValueError(f"path must end in {', '.join(_FORMATS)}, got {path.suffix!r}.")
    if not cases or not all(cases.values()):
        raise ValueError(
            "cases must have at least one case with at least one replay, so that there is something to draw."
        )
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.6 * len(cases)), layout="constrained")
    rows = figure.subplots(len(cases), 3, squeeze=False)
    for axes, (name, replays) in zip(rows, cases.items(), strict=True):
        _draw_throughput(axes[0], replays)
        _draw_completion(axes[1], replays)
        _draw_running(axes[2], replays)
        axes[0].set_title(name)
    # A fixed salt and no date: the same replays draw the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def _draw_throughput(axes: Any, replays: Sequence[Replay]) -> None:
    """Draw a bar for the effective throughput of each system."""
    values = [replay.tokens_per_s / 1e3 for replay in replays]
    bars = axes.bar([replay.system for replay in replays], values, color=[f"C{i}" for i in range(len(replays))])
    axes.bar_label(bars, [f"{value:.1f}" for value in values])
    axes.margins(y=0.12)
    axes.set_ylabel("effective throughput, 1,000 tokens/s")


def _draw_completion(axes: Any, replays: Sequence[Replay]) -> None:
    """Draw the distribution of the hours from submission to end."""
    for number, replay in enumerate(replays):
        hours = sorted(seconds / 3600 for seconds in replay.completion_s)
        parts = [(place + 1) / len(replay.records) for place in range(len(hours))]
        axes.step([0, *hours], [0, *parts], where="post", color=f"C{number}", label=replay.system)
    axes.set_xlabel("hours from submission to end")
    axes.set_ylabel("part of all submitted tasks")
    axes.legend()


def _draw_running(axes: Any, replays: Sequence[Replay]) -> None:
    """Draw how many tasks run and wait over the trace."""
    for number, replay in enumerate(replays):
        hours = [moment[0] / 3600 for moment in replay.timeline]
        axes.step(hours, [moment[1] for moment in replay.timeline], where="post", color=f"C{number}")
        axes.step(hours, [moment[2] for moment in replay.timeline], where="post", color=f"C{number}", linestyle=":")
    axes.set_xlabel("hours since the start of the trace")
    axes.set_ylabel("tasks running (dotted: waiting)")
