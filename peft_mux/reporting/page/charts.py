"""Curves of losses as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from peft_mux.reporting.views import Curve
from peft_mux.reporting.words import number_text, shortened
from peft_mux.scheduler.pipeline.svg import PALETTE

_MOST_POINTS = 200
_LEFT, _BOTTOM, _TOP = 46, 18, 20
_LETTER = 6.4
"""Width of a letter of a title, in pixels; rather too much."""
_FEW_POINTS = 3
"""Curves of so few points show them."""


class Line(NamedTuple):
    """One curve of a chart.

    Attributes:
        name: what it is of.
        points: its points.
        color: index into the palette.
        has_dots: whether its points are drawn, as those of evaluations are.
    """

    name: str
    points: Curve
    color: int = 0
    has_dots: bool = False


def chart_svg(title: str, lines: Sequence[Line], *, width: int = 240, height: int = 130) -> str:
    """Draw curves over the steps of a task, or of several; "" where there is no point.

    Args:
        title: what stands above.
        lines: the curves.
        width: pixels.
        height: pixels.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    last = max(max(step for step, _ in points), 1)
    low, high = min(value for _, value in points), max(value for _, value in points)
    middle = 0.5 * low + 0.5 * high
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    scale_x, scale_y = (width - _LEFT - 8) / last, (height - _TOP - _BOTTOM) / (high - low + 2 * pad)

    def place(point: tuple[int, float]) -> str:
        return f"{_LEFT + point[0] * scale_x:.1f},{height - _BOTTOM - (point[1] - low + pad) * scale_y:.1f}"

    drawn = [part for line in lines for part in _line_parts(line, place)]
    bottom = height - _BOTTOM
    heights = [float(place((0, value)).split(",")[1]) for value in (high, middle, low)]
    lines_at = "".join(f"M{_LEFT} {y:.1f}H{width - 8}" for y in heights)
    values = "".join(
        f'<text x="{_LEFT - 4}" y="{y + 4:.1f}" text-anchor="end">{number_text(value)}</text>'
        for y, value in zip(heights, (high, middle, low), strict=True)
        if value == high or low < high
    )
    shown = escape(shortened(title, int((width - _LEFT) / _LETTER)))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" style="max-width:100%;height:auto" '
        f'role="img" font-family="sans-serif" font-size="11" fill="currentColor">'
        f'<text x="{_LEFT}" y="13" font-weight="bold">{shown}<title>{escape(title)}</title></text>'
        f'<path d="{lines_at}" fill="none" stroke="currentColor" opacity="0.15"/>'
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{width - 8}" fill="none" stroke="currentColor" opacity="0.5"/>{values}'
        f'<text x="{_LEFT}" y="{height - 5}">0</text>'
        f'<text x="{width - 8}" y="{height - 5}" text-anchor="end">step {last:,}</text>{"".join(drawn)}</svg>'
    )


def _line_parts(line: Line, place: Callable[[tuple[int, float]], str]) -> Iterator[str]:
    """Yield the elements of one curve, whose points lie at "x,y"."""
    color, kept = PALETTE[line.color % len(PALETTE)], thinned(line.points)
    places = [place(point) for point in kept]
    yield f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{" ".join(places)}"/>'
    if line.has_dots or len(kept) <= _FEW_POINTS:
        for at, (step, value) in zip(places, kept, strict=True):
            x, y = at.split(",")
            words = escape(f"{line.name}, step {step}: {number_text(value)}")
            yield f'<circle cx="{x}" cy="{y}" r="2.5" fill="{color}"><title>{words}</title></circle>'


def thinned(points: Curve) -> Curve:
    """Return a curve with at most some hundred points, its first and last among them."""
    if len(points) <= _MOST_POINTS:
        return points
    stride = -(-len(points) // _MOST_POINTS)
    return (*points[:-1:stride], points[-1])
