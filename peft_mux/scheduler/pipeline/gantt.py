"""Drawings of a simulated pipeline: who runs what when, and what each stage holds, as text or as a picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peft_mux.errors import ConfigError
from peft_mux.scheduler.pipeline.simulator import Simulation, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IDLE = "."
_MIN_SLOTS = 20
_LABELLED_SHARE = 0.018
"""A bar gets its label (bucket.micro-batch) where it takes at least this share of the time axis."""


def gantt_text(simulation: Simulation, width: int = 100) -> str:
    """Draw one iteration in characters.

    One row a stage, one character a time slot: the letter of the bucket that runs for most of the slot, upper case
    for a forward and lower case for a backward, "." where the stage is idle for longer than it runs any of them.

    Args:
        simulation: the simulated iteration to draw.
        width: characters of a row, label included.

    Raises:
        ValueError: if `width` leaves fewer than 20 slots.
    """
    labels = [f"stage {stage}" for stage in range(simulation.num_stages)]
    margin = max(map(len, labels)) + 3
    num_slots = width - margin
    if num_slots < _MIN_SLOTS:
        raise ValueError(f"width is {width}; allowed: {_MIN_SLOTS + margin} or more for {len(labels)} stages.")
    rows = [
        f"{label:<{margin - 2}}|{_row([s for s in simulation.spans if s.device == stage], simulation, num_slots)}|"
        for stage, label in enumerate(labels)
    ]
    head = (
        f"makespan {_milliseconds(simulation.makespan_s, simulation.makespan_s)} ms, {simulation.num_stages} stages, "
        f"{simulation.utilization:.0%} of device time busy"
    )
    return "\n".join([head, *rows, _axis(simulation.makespan_s, num_slots, margin - 1), *_legend(simulation, width)])


def _row(spans: Sequence[Span], simulation: Simulation, num_slots: int) -> str:
    """Return the characters of one stage."""
    slot_s = simulation.makespan_s / num_slots
    longest = [0.0] * num_slots
    covered = [0.0] * num_slots
    row = [_IDLE] * num_slots
    if slot_s == 0:
        return "".join(row)
    for span in spans:
        first = min(int(span.start_s / slot_s), num_slots - 1)
        last = min(math.ceil(span.end_s / slot_s), num_slots)
        for slot in range(first, last):
            share_s = min(span.end_s, (slot + 1) * slot_s) - max(span.start_s, slot * slot_s)
            covered[slot] += share_s
            if share_s > longest[slot]:
                longest[slot] = share_s
                letter = _LETTERS[span.action.bucket % len(_LETTERS)]
                row[slot] = letter if span.action.kind == "F" else letter.lower()
    return "".join(
        _IDLE if slot_s - busy_s > most_s else char for char, busy_s, most_s in zip(row, covered, longest, strict=True)
    )


def _milliseconds(seconds: float, makespan_s: float) -> str:
    """Return an instant in ms with as many decimals as the whole time axis calls for."""
    whole = makespan_s * 1e3
    decimals = max(0, 2 - math.floor(math.log10(whole))) if whole > 0 else 0
    return f"{seconds * 1e3:.{decimals}f}"


def _axis(makespan_s: float, num_slots: int, indent: int) -> str:
    """Return the time axis: numbers that begin below the slot of their instant, the last one ending at the end."""
    line = [" "] * (indent + num_slots)
    # Marks of 12 characters or more stay apart from each other and from the one at the end.
    step = max(num_slots // 5, 12)
    for slot in range(0, num_slots, step):
        text = _milliseconds(makespan_s * slot / num_slots, makespan_s)
        if slot + len(text) + 12 <= num_slots:
            line[indent + slot : indent + slot + len(text)] = text
    end = f"{_milliseconds(makespan_s, makespan_s)} ms"
    line[-len(end) :] = end
    return "".join(line)


def _legend(simulation: Simulation, width: int) -> list[str]:
    """Return what the letters mean; buckets beyond the alphabet begin it again."""
    entries = [f"{_LETTERS[index % len(_LETTERS)]} {name}" for index, name in enumerate(simulation.bucket_names)]
    lines, line = [], "upper case forward, lower case backward, . idle:"
    for entry in entries:
        if len(line) + 2 + len(entry) > width and line:
            lines.append(line)
            line = " "
        line += f"  {entry}"
    return [*lines, line]


def save_gantt(simulation: Simulation, path: Path, draw_below: Callable[[Axes], None] | None = None) -> Path:
    """Draw one iteration as a picture in the manner of M Figure 10: light forwards, dark backwards.

    Args:
        simulation: the simulated iteration to draw.
        path: the file to write, a PNG or an SVG by its suffix.
        draw_below: draws what belongs below the iteration; nothing where it is `None`.

    Returns:
        `path`, now a written file.

    Raises:
        ConfigError: if matplotlib is not installed.
        ValueError: for another suffix.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path is {path.name!r}; allowed: a name that ends in .png or .svg.")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots: got no matplotlib; allowed: pip install 'peft-mux[plots]'.") from error
    heights = [1.4 + 0.55 * simulation.num_stages, *([] if draw_below is None else [1.6])]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0])
    if draw_below is not None:
        draw_below(figure.add_subplot(grid[1]))
    _draw_bars(axes, simulation)
    axes.set_yticks(range(simulation.num_stages), [f"stage {stage}" for stage in range(simulation.num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, simulation.makespan_s * 1e3)
    axes.set_xlabel("ms")
    axes.set_title("pipeline (light: forward, dark: backward)")
    axes.legend(
        loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", ncols=1 + len(simulation.bucket_names) // 17
    )
    # A fixed salt and no date: the same plan draws the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def _draw_bars(axes: Axes, simulation: Simulation) -> None:
    """Draw the bars of all actions, one collection for each bucket and direction."""
    from matplotlib import colormaps
    from matplotlib.colors import to_rgb

    palette = colormaps["tab10" if len(simulation.bucket_names) <= 10 else "tab20"]
    spans: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    for span in simulation.spans:
        interval = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        spans.setdefault((span.action.bucket, span.action.kind, span.device), []).append(interval)
        if span.end_s - span.start_s >= _LABELLED_SHARE * simulation.makespan_s:
            middle = (span.start_s + span.end_s) / 2 * 1e3
            label = f"{span.action.bucket}.{span.action.micro_batch}"
            axes.text(middle, span.device, label, ha="center", va="center", fontsize=6)
    named: set[int] = set()
    for (bucket, kind, device), intervals in sorted(spans.items()):
        red, green, blue = to_rgb(palette(bucket % palette.N))
        light = tuple(0.45 * part + 0.55 for part in (red, green, blue))
        axes.broken_barh(
            intervals,
            (device - 0.4, 0.8),
            facecolors=light if kind == "F" else (red, green, blue),
            edgecolor="white",
            linewidth=0.4,
            label=simulation.bucket_names[bucket] if kind == "B" and bucket not in named else None,
        )
        if kind == "B":
            named.add(bucket)


def memory_bars_text(
    peak_bytes: Sequence[int], limit_bytes: Sequence[int], names: Sequence[str], *, width: int = 40
) -> str:
    """Draw how full the memory of each stage or device gets: one bar each, "#" up to the peak of its limit.

    Args:
        peak_bytes: the most bytes that each stage or device holds at once.
        limit_bytes: the most bytes that each may hold.
        names: the label of each row.
        width: characters of a full bar.

    Raises:
        ValueError: if the three are not equally long, or a limit is not positive.
    """
    if not len(peak_bytes) == len(limit_bytes) == len(names):
        raise ValueError(
            f"peak_bytes, limit_bytes and names have {len(peak_bytes)}, {len(limit_bytes)} and {len(names)} entries;"
            " allowed: one of each for every row."
        )
    label_width = max(map(len, names), default=0)
    lines = []
    for peak, limit, name in zip(peak_bytes, limit_bytes, names, strict=True):
        if limit <= 0:
            raise ValueError(f"limit_bytes of {name!r} is {limit}; allowed: more than 0.")
        filled = min(width, math.ceil(width * peak / limit))
        unit_name, unit = ("GiB", 2**30) if limit >= 2**30 else ("MiB", 2**20)
        over = f"  over by {(peak - limit) / unit:.2f} {unit_name}" if peak > limit else ""
        lines.append(
            f"{name:<{label_width}}  [{'#' * filled}{'.' * (width - filled)}]"
            f"  {peak / unit:.2f} of {limit / unit:.2f} {unit_name}  {peak / limit:.0%}{over}"
        )
    return "\n".join(lines)
