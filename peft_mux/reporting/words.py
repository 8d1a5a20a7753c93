"""Numbers in few characters, for tables and charts."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """Return a number with its noun, such as `1 step` or `1,200 steps`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def number_text(value: float | None) -> str:
    """Return a loss in six characters or so, whatever its size."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def rate_text(tokens_per_s: float | None) -> str:
    """Return a rate in a few characters, such as 9.8k; "-" for none."""
    if tokens_per_s is None:
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens_per_s >= 10 * size or (unit == "M" and tokens_per_s >= size):
            return f"{tokens_per_s / size:.1f}{unit}"
    return f"{tokens_per_s:,.0f}"


def time_text(seconds: float | None) -> str:
    """Return a time as 0:07, 12:03 or 3:25:00; "-" for none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(text: str, width: int, mark: str = "…") -> str:
    """Return a name in at most so many characters: its middle goes, as the names of a sweep differ at their ends.

    Args:
        text: the name.
        width: characters that there are.
        mark: what stands for the middle.
    """
    if len(text) <= width:
        return text
    kept = max(width - len(mark), 0)
    return (text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :])[: max(width, 0)]


def share_text(share: float | None) -> str:
    """Return a share of a whole, from 0 to 1, in percent; "-" where there is none."""
    return "-" if share is None else f"{share:.0%}"
