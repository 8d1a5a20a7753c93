"""Draws a deployment as L Figure 9: seconds of each kind of replica, and lengths of what lies on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.scheduler.deployment.report import DeploymentReport
from peft_mux.scheduler.dispatching.dispatch import Dispatch

_FORMATS = (".png", ".svg")


def save_deployment(report: DeploymentReport, path: str | Path) -> Path:
    """Draw length-based dispatch beside the balanced one into a .png or .svg file, and return the path.

    Args:
        report: the planned deployment, with its expected batch under both dispatches.
        path: where the picture is written; an existing file is replaced.

    Raises:
        ConfigError: for another kind of file, or if matplotlib is not installed.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ConfigError(f"image: got {path.name!r}; allowed: a name that ends in {' or '.join(_FORMATS)}.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("image: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    ways = {"length-based dispatch": report.by_length, "balanced dispatch": report.plan.expected}
    figure = Figure(figsize=(5.2 * len(ways), 6.2), layout="constrained")
    axes = figure.subplots(2, len(ways), squeeze=False, sharey="row")
    names = [str(group) for group in report.plan.groups]
    for column, (title, dispatch) in enumerate(ways.items()):
        _draw_seconds(axes[0][column], names, dispatch)
        axes[0][column].set_title(f"{title}: {dispatch.makespan_s:.3g} s a step")
        _draw_lengths(axes[1][column], names, dispatch)
    axes[0][0].set_ylabel("seconds a step")
    axes[1][0].set_ylabel("tokens a step, padded")
    axes[1][-1].legend(title="padded to", fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    # A fixed salt and no date: the same plan draws the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def _draw_seconds(axes: Any, names: list[str], dispatch: Dispatch) -> None:
    """Draw a bar for the seconds of each group of replicas."""
    bars = axes.bar(names, dispatch.group_s, color="C0")
    axes.bar_label(bars, [f"{seconds:.3g}" for seconds in dispatch.group_s])
    axes.margins(y=0.12)


def _draw_lengths(axes: Any, names: list[str], dispatch: Dispatch) -> None:
    """Draw the padded tokens of each group as a stack of its buckets."""
    from matplotlib import colormaps

    palette = colormaps["viridis"]
    bottom = [0.0] * len(names)
    for bucket, boundary in enumerate(dispatch.boundaries):
        tokens = [group[bucket] * boundary for group in dispatch.counts]
        color = palette(bucket / max(1, len(dispatch.boundaries) - 1))
        axes.bar(names, tokens, bottom=bottom, color=color, label=str(boundary))
        bottom = [below + own for below, own in zip(bottom, tokens, strict=True)]
