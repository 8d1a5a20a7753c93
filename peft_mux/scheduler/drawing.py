"""Bars of time and memory as text, as inline SVG and as a picture.

`memory_rows`, and `timeline` of `plan_views.py`, return bars in rows (`Rows`), which `rows_svg` and `save_rows` draw.
SVG is readable on light and dark backgrounds, because text takes the colour of its surroundings; `report.html` and
notebooks show it without matplotlib, which only draws picture files.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.errors import ConfigError
from peft_mux.scheduler.pipeline.simulator import Simulation
from peft_mux.scheduler.units import bytes_text

PALETTE = ("#4c8dd6", "#e08a2e", "#4fa86b", "#c95f5f", "#9479c9", "#a07a5f", "#d67fb5", "#8a8f98", "#b3ab3d", "#4bb0bf")
"""Colours of middle brightness."""
ALARM = "#d03b3b"
"""The red of what is nearly full."""
_MEMORY_COLORS = (0, 1, 2, 4, 5, 6, 8, 9)
"""Colours of parts of memory: without red, which would look like an alarm, and without `_FREE`."""
_FREE = 7
"""The colour of memory that is free."""
NEARLY_FULL = 0.95
"""Share of a device's memory above which it is shown in red."""
_LABEL_WIDTH, _ROW, _WIDTH = 150, 26, 760
_GAP_FROM = 4
"""Bars wider than this many pixels give one of them up for a gap to the next bar."""
_LEGEND_WIDTH = 40
"""Characters of a line of a picture's legend."""
_LABELLED_SHARE = 0.018
"""Bars of pictures get their labels if they take at least this share of the axis."""


class Bar(NamedTuple):
    """A piece of a row.

    Attributes:
        start: where it begins, in the unit of the drawing.
        end: where it ends.
        color: index into `PALETTE`.
        words: its tooltip.
        is_light: whether it is drawn lighter, as forwards are.
        label: what stands on it in pictures.
    """

    start: float
    end: float
    color: int
    words: str
    is_light: bool = False
    label: str = ""


class Rows(NamedTuple):
    """Bars in rows along one axis.

    Attributes:
        rows: label and bars of each row.
        end: where the axis ends, in the unit of the bars.
        unit: the unit of the numbers at the axis: its size in the unit of the bars, and its name.
        legend: names of colours.
        mark: where a vertical line crosses all rows; 0 for none.
        alarms: numbers of the rows that are framed in red.
    """

    rows: Sequence[tuple[str, Sequence[Bar]]]
    end: float
    unit: tuple[float, str]
    legend: Sequence[tuple[str, int]] = ()
    mark: float = 0.0
    alarms: Collection[int] = ()


def memory_rows(
    parts_of: Mapping[str, Mapping[str, float]], limit_bytes: int | None, device_bytes: int | None = None
) -> Rows:
    """Return the parts of memory, a row for each device or stage; parts of one name have one colour.

    Free memory is a bar as well, and a row that is nearly full is an alarm.

    Args:
        parts_of: the names and bytes of the parts of each row, by its label.
        limit_bytes: what a plan may fill, drawn as a line; `None` for no limit.
        device_bytes: memory of a device; `None` if unknown, so that the limit counts as its size.
    """
    largest = max((sum(parts.values()) for parts in parts_of.values()), default=0.0)
    size = device_bytes or limit_bytes
    # If the memory is far larger than what is used, the parts would be invisible next to all of it.
    shown = size if size is not None and size <= 4 * largest else 0
    end = max(largest, shown)
    names = list(dict.fromkeys(name for parts in parts_of.values() for name in parts))
    colors = {name: _MEMORY_COLORS[number % len(_MEMORY_COLORS)] for number, name in enumerate(names)}
    rows, alarms = [], []
    for number, (label, parts) in enumerate(parts_of.items()):
        bars, at = [], 0.0
        for name, num_bytes in parts.items():
            bars.append(Bar(at, at + num_bytes, colors[name], f"{name}: {bytes_text(num_bytes)}"))
            at += num_bytes
        if at < shown:
            bars.append(Bar(at, shown, _FREE, f"free: {bytes_text(shown - at)}", is_light=True))
            colors["free"] = _FREE
        rows.append((f"{label}: {bytes_text(at)}", bars))
        alarms += [number] if size is not None and at > NEARLY_FULL * size else []
    mark = limit_bytes if limit_bytes is not None and shown and limit_bytes <= end else 0
    unit = (2**30, "GiB") if end >= 2**30 else (2**20, "MiB")
    return Rows(rows, end, unit, list(colors.items()), mark, alarms)


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


def rows_svg(drawn: Rows) -> str:
    """Return rows of bars as inline SVG; bars have tooltips."""
    origin = max([_LABEL_WIDTH, *(round(7.2 * len(label)) + 12 for label, _ in drawn.rows)])
    scale = (_WIDTH - origin - 10) / (drawn.end or 1.0)
    height = _ROW * len(drawn.rows) + 22
    axis = height - 18
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" style="max-width:{_WIDTH}px" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
    ]
    for number, (label, bars) in enumerate(drawn.rows):
        top = number * _ROW
        red = f' fill="{ALARM}" font-weight="bold"' if number in drawn.alarms else ""
        parts.append(f'<text x="{origin - 8}" y="{top + 17}" text-anchor="end"{red}>{escape(label)}</text>')
        for bar in bars:
            left, width = origin + bar.start * scale, (bar.end - bar.start) * scale
            is_followed = any(other.start == bar.end and other.color == bar.color for other in bars)
            # A gap between neighbours of one colour.
            width = width - 1 if is_followed and width > _GAP_FROM else max(width, 0.5)
            parts.append(
                f'<rect x="{left:.1f}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}" '
                f'fill="{PALETTE[bar.color % len(PALETTE)]}" fill-opacity="{0.55 if bar.is_light else 0.95}">'
                f"<title>{escape(bar.words)}</title></rect>"
            )
        if number in drawn.alarms:
            right = origin + max((bar.end for bar in bars), default=0.0) * scale
            frame = f"M{origin} {top + 3}H{right:.1f}V{top + _ROW - 3}H{origin}Z"
            parts.append(f'<path d="{frame}" fill="none" stroke="{ALARM}" stroke-width="2"/>')
    if drawn.mark:
        at = origin + drawn.mark * scale
        parts.append(f'<path d="M{at:.1f} 0V{height - 20}" stroke="currentColor" stroke-dasharray="3 3"/>')
    parts.append(f'<path d="M{origin} {axis}H{_WIDTH - 10}" stroke="currentColor" opacity="0.5"/>')
    size, unit = drawn.unit
    for value, text in rounded_ticks(0, drawn.end / size):
        x = origin + value * size * scale
        anchor = "middle" if x < _WIDTH - 40 else "end"
        parts.append(f'<text x="{x:.1f}" y="{height - 4}" text-anchor="{anchor}">{text} {unit}</text>')
    return "".join([*parts, "</svg>"])


def legend(names: Iterable[tuple[str, int]]) -> str:
    """Return an HTML legend of names and the indices of their colours."""
    return " ".join(
        f'<span style="display:inline-block;margin-right:1em"><span style="color:{PALETTE[color % len(PALETTE)]}">'
        f"&#9632;</span> {escape(name)}</span>"
        for name, color in names
    )


# ---------------------------------------------------------------- pictures


def new_figure(**options: Any) -> Any:
    """Return a figure of matplotlib, which is an extra.

    Raises:
        ConfigError: if it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install matplotlib.") from error
    return Figure(**options)


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure to a PNG or an SVG, by the suffix of its path; the same figure has the same bytes.

    Raises:
        ConfigError: for another suffix.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"path must be a name that ends in .png or .svg, got {path.name!r}.")
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "peft_mux"}):
        figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else {})
    return path


def save_rows(path: Path, drawings: Mapping[str, Rows]) -> Path:
    """Draw rows of bars into one picture, below each other under their titles; light bars are forwards (M Figure 10).

    Raises:
        ConfigError: if matplotlib is not installed, or the path ends in neither .png nor .svg.
    """
    heights = [1.4 + 0.55 * len(drawn.rows) for drawn in drawings.values()]
    figure = new_figure(figsize=(11, sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (title, drawn) in zip(panels, drawings.items(), strict=True):
        unit, unit_name = drawn.unit
        # One collection of bars for each row, colour and direction.
        intervals: defaultdict[tuple[int, int, bool], list[tuple[float, float]]] = defaultdict(list)
        for number, (_, bars) in enumerate(drawn.rows):
            for bar in bars:
                start, width = bar.start / unit, (bar.end - bar.start) / unit
                intervals[number, bar.color, bar.is_light].append((start, width))
                if bar.label and bar.end - bar.start >= _LABELLED_SHARE * drawn.end:
                    axes.text(start + width / 2, number, bar.label, ha="center", va="center", fontsize=6)
        for (number, color, is_light), spans in intervals.items():
            edge = {"edgecolor": ALARM, "linewidth": 2.0} if number in drawn.alarms else {"edgecolor": "white"}
            color, alpha = PALETTE[color % len(PALETTE)], 0.55 if is_light else 1.0
            axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=color, alpha=alpha, **edge)
        for name, color in drawn.legend:
            label = textwrap.fill(name, _LEGEND_WIDTH, break_on_hyphens=False)
            axes.barh(0, 0, color=PALETTE[color % len(PALETTE)], label=label)
        if drawn.mark:
            axes.axvline(drawn.mark / unit, color="black", linestyle="--")
        axes.set_yticks(range(len(drawn.rows)), [label for label, _ in drawn.rows])
        axes.invert_yaxis()
        axes.set_xlim(0, drawn.end / unit)
        axes.set_xlabel(unit_name)
        axes.set_title(title, loc="left", color=ALARM if drawn.alarms else "black")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", ncols=1 + len(drawn.legend) // 17)
    return save_figure(figure, path)


# ---------------------------------------------------------------- text

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

    @property
    def words(self) -> str:
        """How full the memory is; "" if its size is unknown."""
        if self.size_bytes is None:
            return ""
        free = self.size_bytes - self.peak_bytes
        room = f"{bytes_text(free)} free" if free >= 0 else f"{bytes_text(-free)} too much"
        full = "; NEARLY FULL: more than 95 %" if self.is_nearly_full else ""
        of = "the device's" if self.is_device else "the"
        return f"{self.peak_bytes / self.size_bytes:.0%} of {of} {bytes_text(self.size_bytes)}, {room}{full}"

    def lines(self, width: int = 20) -> list[str]:
        """Return the bar in `width` characters, the free memory, and the meaning of its letters."""
        whole = max(self.peak_bytes, self.size_bytes or 0, 1)
        ends = [math.ceil(width * at / whole) for at in accumulate((size for _, size in self.parts), initial=0)]
        drawn = "".join(
            letter * (end - start) for letter, (start, end) in zip(_PART_LETTERS, pairwise(ends), strict=True)
        )
        meanings = [f"{letter} {name}" for letter, (name, _) in zip(_PART_LETTERS, self.parts, strict=True)]
        meanings += [] if self.size_bytes is None else [". free"]
        return [f"{_INDENT}[{drawn:.<{width}}]  {self.words}".rstrip(), _INDENT + ", ".join(meanings)]


def memory_bars_text(peak_bytes: Sequence[int], limit_bytes: int, *, width: int = 40) -> str:
    """Draw the most bytes that each stage holds at once, "#" in `width` characters for the limit of each."""
    lines = []
    for stage, peak in enumerate(peak_bytes):
        filled = min(width, math.ceil(width * peak / limit_bytes))
        over = f"  over by {bytes_text(peak - limit_bytes)}" if peak > limit_bytes else ""
        label = f"stage {stage}".ljust(len(f"stage {len(peak_bytes) - 1}"))
        lines.append(
            f"{label}  [{'#' * filled}{'.' * (width - filled)}]  {bytes_text(peak)} of {bytes_text(limit_bytes)}"
            f"  {peak / limit_bytes:.0%}{over}"
        )
    return "\n".join(lines)


_BUCKET_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MIN_SLOTS = 20


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
    margin = len(f"stage {simulation.num_stages - 1}") + 3
    num_slots, makespan_s = width - margin, simulation.makespan_s
    if num_slots < _MIN_SLOTS:
        raise ValueError(
            f"width must be {_MIN_SLOTS + margin} or more for {simulation.num_stages} stages, got {width}."
        )
    slot_s = makespan_s / num_slots
    # As many decimals as the whole time axis calls for.
    decimals = max(0, -1 - math.floor(math.log10(makespan_s))) if makespan_s > 0 else 0
    end = f"{makespan_s * 1e3:.{decimals}f} ms"
    lines = [f"makespan {end}, {simulation.num_stages} stages, {simulation.utilization:.0%} of device time busy"]
    for stage in range(simulation.num_stages):
        busy_s: list[Counter[str]] = [Counter() for _ in range(num_slots)]
        for span in [span for span in simulation.spans if span.device == stage and slot_s]:
            letter = _BUCKET_LETTERS[span.action.bucket % len(_BUCKET_LETTERS)]
            letter = letter if span.action.kind == "F" else letter.lower()
            first = min(int(span.start_s / slot_s), num_slots - 1)
            for slot in range(first, min(math.ceil(span.end_s / slot_s), num_slots)):
                in_slot_s = min(span.end_s, (slot + 1) * slot_s) - max(span.start_s, slot * slot_s)
                busy_s[slot][letter] += in_slot_s  # type: ignore[assignment]
        # What is idle counts as one more letter, the last one among equals.
        row = "".join(
            max({**taken_s, ".": slot_s - taken_s.total()}.items(), key=lambda part: part[1])[0] for taken_s in busy_s
        )
        lines.append(f"{f'stage {stage}':<{margin - 2}}|{row}|")

    # The time axis: each number begins below the slot of its instant, the last one ends at the end.
    axis = ""
    # Marks of 12 characters or more stay apart from each other and from the one at the end.
    for slot in range(0, num_slots, max(num_slots // 5, 12)):
        text = f"{1e3 * slot_s * slot:.{decimals}f}"
        if slot + len(text) + 12 <= num_slots:
            axis = axis.ljust(margin - 1 + slot) + text
    lines.append(axis.ljust(margin - 1 + num_slots - len(end)) + end)

    # The legend; buckets beyond the alphabet begin it again.
    line = "upper case forward, lower case backward, . idle:"
    for index, name in enumerate(simulation.bucket_names):
        entry = f"{_BUCKET_LETTERS[index % len(_BUCKET_LETTERS)]} {name}"
        if len(line) + 2 + len(entry) > width:
            lines.append(line)
            line = " "
        line += f"  {entry}"
    return "\n".join([*lines, line])
