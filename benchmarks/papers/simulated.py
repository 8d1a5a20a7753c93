"""Tables of simulated figures in docs/paper_tables.md: a command that computes figures rewrites its table."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.table import PAGE


def write_table(command: str, rows: Sequence[Sequence[str]]) -> None:
    """Replace the rows of the first table behind the line that names a command.

    Args:
        command: the module that computes them, as `python -m` runs it.
        rows: cells of each row.
    """
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    named = next(number for number, line in enumerate(lines) if line.startswith(f"`python -m {command}`"))
    # Two lines of a table are its head.
    first = next(number for number in range(named, len(lines)) if lines[number].startswith("|")) + 2
    last = next(number for number in range(first, len(lines)) if not lines[number].startswith("|"))
    lines[first:last] = [f"| {' | '.join(row)} |" for row in rows]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote the table of {command} into {PAGE.name}")
