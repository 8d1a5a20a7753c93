"""Tables of the documentation: a command that computes figures rewrites its table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.papers.table import PAGE


def write_table(command: str, rows: Sequence[Sequence[str]], page: Path = PAGE) -> None:
    """Replace the rows of the first table behind the line that names a command.

    Args:
        command: the module that computes them, as `python -m` runs it.
        rows: cells of each row.
        page: the page that has the table; by default `docs/paper_tables.md`.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    named = next(number for number, line in enumerate(lines) if line.startswith(f"`python -m {command}`"))
    # Two lines of a table are its head.
    first = next(number for number in range(named, len(lines)) if lines[number].startswith("|")) + 2
    last = next((number for number in range(first, len(lines)) if not lines[number].startswith("|")), len(lines))
    lines[first:last] = [f"| {' | '.join(row)} |" for row in rows]
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote the table of {command} into {page.name}")
