"""`peft-mux train --sweep`: tasks of a file, each with many settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from peft_mux.errors import ConfigError, closest


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sweeps to a command.

    Args:
        parser: that of the command that trains.
    """
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="train a task once for each value, such as tasks.sql.learning_rate=1e-4,3e-4; may be repeated",
    )
    parser.add_argument("--early-stop", choices=["halving"], help="end the worse half of a sweep at doubling steps")


def swept(config: Any, options: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return a file's configuration with the tasks of its sweeps in place of those that are swept, and the sweeps.

    Args:
        config: the `RunConfig` that was read.
        options: texts such as `tasks.sql.peft.r=8,16`.

    Raises:
        ConfigError: naming what cannot be swept.
    """
    from peft_mux.sweeps.grid import sweep_tasks

    grids = _grids(options, [task.name for task in config.tasks])
    contests, tasks = [], []
    for task in config.tasks:
        if task.name not in grids:
            tasks.append(task)
            continue
        contest, own = sweep_tasks(task, grids[task.name])
        contests.append(contest)
        tasks += own
    return replace(config, tasks=tasks), contests


def _grids(options: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    from peft_mux.cli.yaml_text import parse_value

    grids: dict[str, dict[str, list[Any]]] = {}
    for option in options:
        key, separator, text = option.partition("=")
        parts = key.split(".", 2)
        if not separator or len(parts) != 3 or parts[0] != "tasks":
            raise ConfigError(f"--sweep: got {option!r}; allowed: tasks.NAME.FIELD=VALUE,VALUE.")
        if parts[1] not in names:
            hint = closest(parts[1], names)
            raise ConfigError(f"--sweep: got task {parts[1]!r}; allowed: {', '.join(names)}. {hint}".rstrip())
        field = parts[2].replace("peft.", "peft_config.", 1) if parts[2].startswith("peft.") else parts[2]
        # As a list of YAML, so that lists and texts with commas in them can be values.
        values = parse_value(text if text.startswith("[[") else f"[{text}]", f"--sweep {key}")
        grids.setdefault(parts[1], {})[field] = values
    return grids
