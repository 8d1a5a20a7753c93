"""Inline SVG of time lines and memory: readable on light and on dark ground, as all text has the colour around it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from peft_mux.scheduler.units import bytes_text, seconds_text

PALETTE = ("#4c8dd6", "#e08a2e", "#4fa86b", "#c95f5f", "#9479c9", "#a07a5f", "#d67fb5", "#8a8f98", "#b3ab3d", "#4bb0bf")
"""Colours of middle brightness."""
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


def rows_svg(rows: Sequence[tuple[str, Sequence[Bar]]], end: float, end_words: str, *, mark: float = 0.0) -> str:
    """Draw bars in rows along one axis.

    Args:
        rows: label and bars of each row.
        end: where the axis ends, in the unit of the bars.
        end_words: what stands at its end.
        mark: where a line goes through all rows; 0 for none.
    """
    scale = (_WIDTH - _LABEL_WIDTH - 10) / (end or 1.0)
    height = _ROW * len(rows) + 22
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="100%" style="max-width:{_WIDTH}px" role="img" '
        'font-family="sans-serif" font-size="12" fill="currentColor">'
    ]
    for number, (label, bars) in enumerate(rows):
        top = number * _ROW
        parts.append(f'<text x="{_LABEL_WIDTH - 8}" y="{top + 17}" text-anchor="end">{escape(label)}</text>')
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


def memory_svg(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], limit_bytes: int | None) -> str:
    """Draw what memory is made of, a row for each device or stage; parts of one name have one colour.

    Args:
        rows: label of each row, and the names and bytes of its parts.
        limit_bytes: what a device may hold, drawn as a line; `None` for no limit.
    """
    totals = [sum(size for _, size in parts) for _, parts in rows]
    largest = max(totals, default=0.0)
    # A limit far beyond what is used would leave nothing to be seen of the parts.
    shows_limit = limit_bytes is not None and limit_bytes <= 4 * largest
    end = max(largest, limit_bytes if shows_limit and limit_bytes else 0)
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    drawn = []
    for (label, parts), total in zip(rows, totals, strict=True):
        bars, at = [], 0.0
        for name, size in parts:
            bars.append(Bar(at, at + size, names.index(name), f"{name}: {bytes_text(size)}"))
            at += size
        drawn.append((f"{label}: {bytes_text(total)}", bars))
    return rows_svg(drawn, end, bytes_text(end), mark=limit_bytes or 0 if shows_limit else 0)


def legend(names: Sequence[str]) -> str:
    """Return the names of colours, in their order."""
    return " ".join(
        f'<span style="display:inline-block;margin-right:1em"><span style="color:{PALETTE[number % len(PALETTE)]}">'
        f"&#9632;</span> {escape(name)}</span>"
        for number, name in enumerate(names)
    )


def time_end(seconds: float) -> str:
    """Return what stands at the end of an axis of time."""
    return seconds_text(seconds)
