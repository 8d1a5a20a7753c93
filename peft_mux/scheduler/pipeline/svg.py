"""Inline SVG of time lines and memory: readable on light and on dark ground, as all text has the colour around it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from typing import NamedTuple

from peft_mux.scheduler.units import bytes_text, seconds_text

PALETTE = ("#4c8dd6", "#e08a2e", "#4fa86b", "#c95f5f", "#9479c9", "#a07a5f", "#d67fb5", "#8a8f98", "#b3ab3d", "#4bb0bf")
"""Colours of middle brightness."""
ALARM = "#d03b3b"
"""The red of what is nearly full."""
MEMORY_COLORS = (0, 1, 2, 4, 5, 6, 8, 9)
"""Which of these colours parts of memory have: not the red one, which would look like an alarm, nor that of `FREE`."""
FREE = 7
"""The colour of memory that is free."""
NEARLY_FULL = 0.95
"""Share of a device's memory from which on it is shown in red."""
_LABEL_WIDTH, _ROW, _WIDTH = 150, 26, 760
_GAP_FROM = 4
"""Pixels from which on a bar gives one of them up to the gap behind it."""


class Bar(NamedTuple):
    """A piece of a row.

    Attributes:
        start: where it begins, in the unit of the drawing.
        end: where it ends.
        color: index into `PALETTE`.
        words: what is told of it, when one points at it.
        is_light: whether it is drawn lighter, as forwards are.
    """

    start: float
    end: float
    color: int
    words: str
    is_light: bool = False


def rows_svg(
    rows: Sequence[tuple[str, Sequence[Bar]]],
    end: float,
    end_words: str,
    *,
    mark: float = 0.0,
    alarms: Collection[int] = (),
) -> str:
    """Draw bars in rows along one axis.

    Args:
        rows: label and bars of each row.
        end: where the axis ends, in the unit of the bars.
        end_words: what stands at its end.
        mark: where a line goes through all rows; 0 for none.
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
        f'<text x="{_LABEL_WIDTH}" y="{height - 4}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{height - 4}" text-anchor="end">{escape(end_words)}</text></svg>'
    )
    return "".join(parts)


def memory_svg(
    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], limit_bytes: int | None, device_bytes: int | None = None
) -> str:
    """Draw what memory is made of, a row for each device or stage; parts of one name have one colour.

    What is free is drawn as well, and a row that is nearly full is framed in red.

    Args:
        rows: label of each row, and the names and bytes of its parts.
        limit_bytes: what a plan may fill, drawn as a line; `None` for no limit.
        device_bytes: what a device holds; `None` where that is not known, so that the limit counts as its size.
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
    return rows_svg(drawn, end, bytes_text(end), mark=mark, alarms=alarms)


def shows_size(size_bytes: float, used_bytes: float) -> bool:
    """Whether memory is drawn to its end: one far beyond what is used would leave nothing to be seen of the parts."""
    return size_bytes <= 4 * used_bytes


def legend(names: Sequence[str], colors: Sequence[int] = range(len(PALETTE))) -> str:
    """Return the names of colours, in their order.

    Args:
        names: what the colours stand for.
        colors: their indices into the palette; they begin again where there are more names.
    """
    shown = [PALETTE[colors[number % len(colors)]] for number in range(len(names))]
    return " ".join(
        f'<span style="display:inline-block;margin-right:1em"><span style="color:{color}">&#9632;</span> '
        f"{escape(name)}</span>"
        for color, name in zip(shown, names, strict=True)
    )


def memory_legend(names: Collection[str]) -> str:
    """Return the names of the colours that `memory_svg` gives to parts, and that of what is free."""
    colors = [MEMORY_COLORS[number % len(MEMORY_COLORS)] for number in range(len(names))]
    return legend([*names, "free"], [*colors, FREE])


def time_end(seconds: float) -> str:
    """Return what stands at the end of an axis of time."""
    return seconds_text(seconds)
