"""Names of tasks: they become folders, so no name may lead out of one, or be another in a file system without case."""

from __future__ import annotations

import re
from collections.abc import Iterable

from peft_mux.errors import Fault, raise_faults, shown

# Names become folders, so they keep to what every file system takes.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


RESERVED_NAMES = frozenset(
    "run state control plan metrics report config environment tmp con prn aux nul".split()
    + [f"com{port}" for port in range(10)]
    + [f"lpt{port}" for port in range(10)]
)
"""Names that the run folder uses itself, and device names of Windows; compared case-folded."""


def check_task_names(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Refuse names that differ at most in case, among themselves or from those already taken.

    Args:
        names: names of the tasks to check.
        taken: names that other tasks of the run have already.

    Raises:
        ConfigError: naming each duplicate.
    """
    # Windows and macOS fold the case of folder names.
    faults, seen = [], {name.casefold(): name for name in taken}
    for name in names:
        if name.casefold() in seen:
            faults.append(
                Fault(
                    f"tasks.{name}.name",
                    f'"{name}" beside "{seen[name.casefold()]}"',
                    "names that differ in more than case (they become folders)",
                    "Rename one of them.",
                )
            )
        seen[name.casefold()] = name
    raise_faults(faults)


def name_fault(name: object, where: str = "task.name") -> Fault | None:
    """Return what is wrong with a task's name, or `None`.

    Args:
        name: what was given as the name.
        where: dotted path of the field, for the message.
    """
    allowed = "1 to 64 letters, digits, '_' and '-', beginning with a letter or digit (it becomes a folder)"
    if not isinstance(name, str):
        return Fault(where, f"{shown(name)} ({type(name).__name__})", allowed)
    got = repr(name) if len(name) <= 80 else f"a name of {len(name)} characters"
    if not NAME_PATTERN.fullmatch(name):
        return Fault(where, got, allowed)
    if name.casefold() in RESERVED_NAMES:
        return Fault(where, got, f"any name but {', '.join(sorted(RESERVED_NAMES))} (reserved)")
    return None
