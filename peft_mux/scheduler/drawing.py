"""Drawings of a plan: its time line and memory as text, as inline SVG and as a picture.

SVG is readable on light and dark backgrounds, because text takes the colour of its surroundings; `report.html` and
notebooks show it without matplotlib, which only draws picture files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from peft_mux.errors import ConfigError
from peft_mux.scheduler.pipeline.simulator import Simulation, Span
from peft_mux.scheduler.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


PALETTE = ("#4c8dd6", "#e08a2e", "#4fa86b", "#c95f5f", "#9479c9", "#a07a5f", "#d67fb5", "#8a8f98", "#b3ab3d", "#4bb0bf")
"""Colours of middle brightness."""
ALARM = "#d03b3b"
"""The red of what is nearly full."""
MEMORY_COLORS = (0, 1, 2, 4, 5, 6, 8, 9)
"""Which of these colours parts of memory have: not the red one, which would look like an alarm, nor that of `FREE`."""
FREE = 7
"""The colour of memory that is free."""
NEARLY_FULL = 0.95
"""Share of a device's memory above which it is shown in red."""
_LABEL_WIDTH, _ROW, _WIDTH = 150, 26, 760
_GAP_FROM = 4
"""Bars wider than this many pixels give one of them up for a gap to the next bar."""


class Bar(NamedTuple):
    """A piece of a row.

    Attributes:
        start: where it begins, in the unit of the drawing.
        end: where it ends.
        color: index into `PALETTE`.
        words: its tooltip.
        is_light: whether it is drawn lighter, as forwards are.
    """

    start: float
    end: float
    color: int
    words: str
    is_light: bool = False


def rounded_ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Return round numbers from `low` to `high`, at most `most` + 1 and equally far apart, each with its text."""
    span = high - low
    if not 0 < span < math.inf:
        return []
    unit = 10.0 ** math.floor(math.log10(span / most))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * most >= span * (1 - 1e-9))
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    is_plain = digits <= 6 and max(map(abs, values), default=0.0) < 1e7
    return [(value, f"{value:,.{digits}f}" if is_plain else f"{value:.4g}") for value in values]


def time_unit(seconds: float) -> tuple[float, str]:
    """Return the unit of an axis of so many seconds: its size in seconds, and its name."""
    return (1.0, "s") if seconds >= 1 else (1e-3, "ms")


def memory_unit(num_bytes: float) -> tuple[float, str]:
    """Return the unit of an axis of so many bytes: its size in bytes, and its name."""
    return (2**30, "GiB") if num_bytes >= 2**30 else (2**20, "MiB")


def rows_svg(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    end: float,
    unit: tuple[float, str],
    *,
    mark: float = 0.0,
    alarms: Collection[int] = (),
) -> str:
    """Draw bars in rows along one axis.

    Args:
        rows: label and bars of each row.
        end: where the axis ends, in the unit of the bars.
        unit: the unit of the numbers at the axis: its size in the unit of the bars, and its name.
        mark: where a vertical line crosses all rows; 0 for none.
        alarms: numbers of the rows that are framed in red.
    """
    scale = (_WIDTH - _LABEL_WIDTH - 10) / (end or 1.0)
    height = _ROW * len(rows) + 22
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" style="max-width:{_WIDTH}px" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
    ]
    for number, (label, bars) in enumerate(rows):
        top = number * _ROW
        red = f' fill="{ALARM}" font-weight="bold"' if number in alarms else ""
        parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{top + 17}" text-anchor="end"{red}>{escape(label)}</text>')
        for bar in bars:
            left, width = _LABEL_WIDTH + bar.start * scale, (bar.end - bar.start) * scale
            is_followed = any(other.start == bar.end and other.color == bar.color for other in bars)
            # A gap between neighbours of one colour.
            width = width - 1 if is_followed and width > _GAP_FROM else max(width, 0.5)
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}" '
                f'fill="{PALETTE[bar.color % len(PALETTE)]}" fill-opacity="{0.55 if bar.is_light else 0.95}">'
                f"<title>{escape(bar.words)}</title></rect>"
            )
        if number in alarms:
            right = _LABEL_WIDTH + max((bar.end for bar in bars), default=0.0) * scale
            frame = f"M{_LABEL_WIDTH} {top + 3}H{right:.1f}V{top + _ROW - 3}H{_LABEL_WIDTH}Z"
            parts.append(f'<path d="{frame}" fill="none" stroke="{ALARM}" stroke-width="2"/>')
    if mark:
        at = _LABEL_WIDTH + mark * scale
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{height - 20}" stroke="currentColor" '
            'stroke-dasharray="3 3"/>'
        )
    axis = height - 18
    parts.append(
        f'<line x1="{_LABEL_WIDTH}" x2="{_WIDTH - 10}" y1="{axis}" y2="{axis}" stroke="currentColor" opacity="0.5"/>'
    )
    for value, text in rounded_ticks(0, end / unit[0]):
        x = _LABEL_WIDTH + value * unit[0] * scale
        anchor = "middle" if x < _WIDTH - 40 else "end"
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">{text} {unit[1]}</text>')
    return "".join([*parts, "</svg>"])


def memory_svg(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], limit_bytes: int | None, device_bytes: int | None = None
) -> str:
    """Draw the parts of memory, a row for each device or stage; parts of one name have one colour.

    Free memory is drawn as well, and a row that is nearly full is framed in red.

    Args:
        rows: label of each row, and the names and bytes of its parts.
        limit_bytes: what a plan may fill, drawn as a line; `None` for no limit.
        device_bytes: memory of a device; `None` if unknown, so that the limit counts as its size.
    """
    totals = [sum(size for _, size in parts) for _, parts in rows]
    largest, size = max(totals, default=0.0), device_bytes or limit_bytes
    shown = size if size is not None and shows_size(size, largest) else None
    end = max(largest, shown or 0)
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    drawn = []
    for (label, parts), total in zip(rows, totals, strict=True):
        bars, at = [], 0.0
        for name, own in parts:
            color = MEMORY_COLORS[names.index(name) % len(MEMORY_COLORS)]
            bars.append(Bar(at, at + own, color, f"{name}: {bytes_text(own)}"))
            at += own
        if shown is not None and total < shown:
            bars.append(Bar(total, shown, FREE, f"free: {bytes_text(shown - total)}", is_light=True))
        drawn.append((f"{label}: {bytes_text(total)}", bars))
    alarms = [number for number, total in enumerate(totals) if size is not None and total > NEARLY_FULL * size]
    mark = limit_bytes if limit_bytes is not None and shown is not None and limit_bytes <= end else 0
    return rows_svg(drawn, end, memory_unit(end), mark=mark, alarms=alarms)


def shows_size(size_bytes: float, used_bytes: float) -> bool:
    """Return whether to draw memory to its end: if it is far larger than what is used, the parts would be invisible."""
    return size_bytes <= 4 * used_bytes


def legend(names: Sequence[str], colors: Sequence[int] = range(len(PALETTE))) -> str:
    """Return an HTML legend of names and their colours: indices into the palette, repeated if there are more names."""
    shown = [PALETTE[colors[number % len(colors)]] for number in range(len(names))]
    return " ".join(
        f'<span style="display:inline-block;margin-right:1em"><span style="color:{color}">&#9632;</span> '
        f"{escape(name)}</span>"
        for color, name in zip(shown, names, strict=True)
    )


def memory_legend(names: Collection[str]) -> str:
    """Return the legend of the colours that `memory_svg` gives to parts and to free memory."""
    colors = [MEMORY_COLORS[number % len(MEMORY_COLORS)] for number in range(len(names))]
    return legend([*names, "free"], [*colors, FREE])


_PART_LETTERS = "#ao+w"
"""The letters of the parts in text, in their order; "." is free memory."""
_INDENT = " " * 8


class MemoryBar(NamedTuple):
    """The parts of the predicted peak of a plan's fullest stage, and the memory that they have to fit into.

    Attributes:
        parts: name and bytes of each part, in the order in which they are drawn.
        size_bytes: bytes of that memory; `None` if unknown.
        is_device: whether that is a whole device, rather than the limit of a plan.
    """

    parts: tuple[tuple[str, int], ...]
    size_bytes: int | None
    is_device: bool = True

    @property
    def peak_bytes(self) -> int:
        """Sum of all parts."""
        return sum(size for _, size in self.parts)

    @property
    def is_nearly_full(self) -> bool:
        """Whether the peak takes more than 95 % of the memory, which drawings show in red."""
        return self.size_bytes is not None and self.peak_bytes > NEARLY_FULL * self.size_bytes

    def lines(self, width: int = 20) -> list[str]:
        """Return the bar in characters, the free memory, and the meaning of its letters.

        Args:
            width: characters of the bar.
        """
        whole = max(self.peak_bytes, self.size_bytes or 0, 1)
        ends = [math.ceil(width * at / whole) for at in accumulate((size for _, size in self.parts), initial=0)]
        drawn = "".join(
            letter * (end - start) for letter, (start, end) in zip(_PART_LETTERS, pairwise(ends), strict=True)
        )
        legend = [f"{letter} {name}" for letter, (name, _) in zip(_PART_LETTERS, self.parts, strict=True)]
        if self.size_bytes is None:
            return [f"{_INDENT}[{drawn:.<{width}}]", f"{_INDENT}{', '.join(legend)}"]
        of = "the device's" if self.is_device else "the"
        free = self.size_bytes - self.peak_bytes
        room = f"{bytes_text(free)} free" if free >= 0 else f"{bytes_text(-free)} too much"
        full = "; NEARLY FULL: more than 95 %" if self.is_nearly_full else ""
        share = f"{self.peak_bytes / self.size_bytes:.0%} of {of} {bytes_text(self.size_bytes)}"
        return [
            f"{_INDENT}[{drawn:.<{width}}]  {share}, {room}{full}",
            f"{_INDENT}{', '.join([*legend, '. free'])}",
        ]

    def draw(self, axes: Axes) -> None:
        """Draw the bar into a picture, in GiB or MiB; framed in red if it is nearly full."""
        unit, name_of_unit = (2**30, "GiB") if self.peak_bytes >= 2**30 else (2**20, "MiB")
        edge: dict[str, Any] = {"edgecolor": "white"}
        if self.is_nearly_full:
            edge = {"edgecolor": ALARM, "linewidth": 2.0}
        at = 0.0
        for color, (name, size) in zip(MEMORY_COLORS, self.parts, strict=False):
            label = f"{name} {size / unit:.2f}"
            axes.barh(0, size / unit, left=at, color=PALETTE[color], label=label, **edge)
            at += size / unit
        title = f"memory of the fullest stage: {self.peak_bytes / unit:.2f} {name_of_unit}"
        if self.size_bytes is not None:
            free = self.size_bytes / unit - at
            if free > 0 and shows_size(self.size_bytes, self.peak_bytes):
                axes.barh(0, free, left=at, color=PALETTE[FREE], alpha=0.3, label=f"free {free:.2f}", **edge)
            title += f" of {self.size_bytes / unit:.2f}, {self.peak_bytes / self.size_bytes:.0%}"
        axes.set_title(title, color=ALARM if self.is_nearly_full else "black")
        axes.set_yticks([])
        axes.set_xlabel(name_of_unit)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


_BUCKET_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IDLE = "."
_MIN_SLOTS = 20
_LABELLED_SHARE = 0.018
"""A bar gets its label (bucket.micro-batch) if it takes at least this share of the time axis."""


def gantt_text(simulation: Simulation, width: int = 100) -> str:
    """Draw one iteration in characters.

    One row per stage, one character per time slot: the letter of the bucket that runs for most of the slot, upper case
    for a forward and lower case for a backward, "." if the stage is idle for longer than it runs any of them.

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
        raise ValueError(f"width must be {_MIN_SLOTS + margin} or more for {len(labels)} stages, got {width}.")
    makespan_s = simulation.makespan_s
    lines = [
        f"makespan {_milliseconds(makespan_s, makespan_s)} ms, {simulation.num_stages} stages, "
        f"{simulation.utilization:.0%} of device time busy"
    ]
    lines += [
        f"{label:<{margin - 2}}|{_row([s for s in simulation.spans if s.device == stage], simulation, num_slots)}|"
        for stage, label in enumerate(labels)
    ]

    # The time axis: each number begins below the slot of its instant, the last one ends at the end.
    axis = [" "] * (margin - 1 + num_slots)
    # Marks of 12 characters or more stay apart from each other and from the one at the end.
    for slot in range(0, num_slots, max(num_slots // 5, 12)):
        text = _milliseconds(makespan_s * slot / num_slots, makespan_s)
        if slot + len(text) + 12 <= num_slots:
            axis[margin - 1 + slot : margin - 1 + slot + len(text)] = text
    end = f"{_milliseconds(makespan_s, makespan_s)} ms"
    axis[-len(end) :] = end
    lines.append("".join(axis))

    # The legend; buckets beyond the alphabet begin it again.
    line = "upper case forward, lower case backward, . idle:"
    for index, name in enumerate(simulation.bucket_names):
        entry = f"{_BUCKET_LETTERS[index % len(_BUCKET_LETTERS)]} {name}"
        if len(line) + 2 + len(entry) > width:
            lines.append(line)
            line = " "
        line += f"  {entry}"
    return "\n".join([*lines, line])


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
                letter = _BUCKET_LETTERS[span.action.bucket % len(_BUCKET_LETTERS)]
                row[slot] = letter if span.action.kind == "F" else letter.lower()
    return "".join(
        _IDLE if slot_s - busy_s > most_s else char for char, busy_s, most_s in zip(row, covered, longest, strict=True)
    )


def _milliseconds(seconds: float, makespan_s: float) -> str:
    """Return an instant in ms with as many decimals as the whole time axis calls for."""
    whole = makespan_s * 1e3
    decimals = max(0, 2 - math.floor(math.log10(whole))) if whole > 0 else 0
    return f"{seconds * 1e3:.{decimals}f}"


def save_gantt(simulation: Simulation, path: Path, draw_below: Callable[[Axes], None] | None = None) -> Path:
    """Draw one iteration as a picture in the style of M Figure 10: light forwards, dark backwards.

    Args:
        simulation: the simulated iteration to draw.
        path: the file to write, a PNG or an SVG by its suffix.
        draw_below: draws into the axes below the iteration; `None` for no such axes.

    Raises:
        ConfigError: if matplotlib is not installed.
        ValueError: for another suffix.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"path must be a name that ends in .png or .svg, got {path.name!r}.")
    try:
        import matplotlib
        from matplotlib import colormaps
        from matplotlib.colors import to_rgb
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'peft-mux[plots]'.") from error
    num_stages, names, makespan_s = simulation.num_stages, simulation.bucket_names, simulation.makespan_s
    heights = [1.4 + 0.55 * num_stages, *([] if draw_below is None else [1.6])]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    axes = figure.add_subplot(grid[0])
    if draw_below is not None:
        draw_below(figure.add_subplot(grid[1]))

    # One collection of bars for each bucket, direction and stage.
    spans: dict[tuple[int, str, int], list[tuple[float, float]]] = {}
    for span in simulation.spans:
        bucket, seconds = span.action.bucket, span.end_s - span.start_s
        spans.setdefault((bucket, span.action.kind, span.device), []).append((span.start_s * 1e3, seconds * 1e3))
        if seconds >= _LABELLED_SHARE * makespan_s:
            middle = (span.start_s + span.end_s) / 2 * 1e3
            axes.text(middle, span.device, f"{bucket}.{span.action.micro_batch}", ha="center", va="center", fontsize=6)
    palette = colormaps["tab10" if len(names) <= 10 else "tab20"]
    named: set[int] = set()
    for (bucket, kind, device), intervals in sorted(spans.items()):
        dark = to_rgb(palette(bucket % palette.N))
        is_named = kind == "B" and bucket not in named
        axes.broken_barh(
            intervals,
            (device - 0.4, 0.8),
            facecolors=tuple(0.45 * part + 0.55 for part in dark) if kind == "F" else dark,
            edgecolor="white",
            linewidth=0.4,
            label=names[bucket] if is_named else None,
        )
        if is_named:
            named.add(bucket)

    axes.set_yticks(range(num_stages), [f"stage {stage}" for stage in range(num_stages)])
    axes.invert_yaxis()
    axes.set_xlim(0, makespan_s * 1e3)
    axes.set_xlabel("ms")
    axes.set_title("pipeline (light: forward, dark: backward)")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", ncols=1 + len(names) // 17)
    # A fixed salt and no date: the same plan draws the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def memory_bars_text(peak_bytes: Sequence[int], limit_bytes: Sequence[int], *, width: int = 40) -> str:
    """Draw how full the memory of each stage gets: one bar each, "#" up to its peak.

    Args:
        peak_bytes: the most bytes that each stage holds at once.
        limit_bytes: the most bytes that each may hold.
        width: characters of a full bar.
    """
    label_width = len(f"stage {len(peak_bytes) - 1}")
    lines = []
    for stage, (peak, limit) in enumerate(zip(peak_bytes, limit_bytes, strict=True)):
        filled = min(width, math.ceil(width * peak / limit))
        unit_name, unit = ("GiB", 2**30) if limit >= 2**30 else ("MiB", 2**20)
        over = f"  over by {(peak - limit) / unit:.2f} {unit_name}" if peak > limit else ""
        lines.append(
            f"{f'stage {stage}':<{label_width}}  [{'#' * filled}{'.' * (width - filled)}]"
            f"  {peak / unit:.2f} of {limit / unit:.2f} {unit_name}  {peak / limit:.0%}{over}"
        )
    return "\n".join(lines)


def plan_html(plan: Any) -> str:
    """Return the summary of a plan, its time line and its memory, as notebooks show them.

    Args:
        plan: the `Plan`, whose module imports this one.
    """
    text = f"<pre style='line-height:1.3;overflow:auto'>{escape(plan.summary())}</pre>"
    if plan.template is None:
        return text
    simulation = plan.timeline()
    stages = [(f"stage {stage}", planned_bars(simulation, stage)) for stage in range(simulation.num_stages)]
    timeline = rows_svg(stages, simulation.makespan_s, time_unit(simulation.makespan_s))
    red = f"<b style='color:{ALARM}'>more than 95 % is taken</b> "
    words = f"memory of the fullest stage, predicted: {red * plan.memory_bar.is_nearly_full}"
    memory = memory_svg([("planned", list(plan.memory.parts.items()))], plan.limit_bytes, plan.device_bytes)
    return (
        f"{text}<div>a step, predicted: {legend(bucket_names(plan))} paler: forward</div>{timeline}"
        f"<div>{words}{memory_legend(plan.memory.parts)}</div>{memory}"
    )


def bucket_names(plan: Any) -> list[str]:
    """Return a name for each bucket: its tasks, or the first four of many."""
    names = []
    for bucket in plan.buckets:
        tasks = [task for index in bucket for task in plan.htasks[index].tasks]
        names.append(", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else ""))
    return names


def planned_bars(simulation: Simulation, stage: int) -> list[Bar]:
    """Return the bars of the forwards and backwards of a stage, in seconds from the start of the step."""
    return [
        Bar(
            span.start_s,
            span.end_s,
            span.action.bucket,
            f"{simulation.bucket_names[span.action.bucket]}, {'forward' if span.action.kind == 'F' else 'backward'}: "
            f"{seconds_text(span.end_s - span.start_s)}",
            is_light=span.action.kind == "F",
        )
        for span in simulation.spans
        if span.device == stage
    ]
