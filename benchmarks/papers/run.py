"""The evaluations of MuxTune and LobRA on CPUs, each compared with the papers' figures.

    python -m benchmarks.papers                               small, about 10 minutes on 2 idle cores
    python -m benchmarks.papers --parts c d                   some parts alone
    python -m benchmarks.papers --tasks 8 --steps 6 --rounds 3 --hidden-size 512 --layers 8 --write    the whole

Every contender trains in processes of its own (`worker.py`). Before anything is timed, all of a comparison are held to
the same losses for two steps; then they run by turns. Seconds are those of all steps but each task's first, so that
startup is left out. `--write` stores the JSON in benchmarks/results/ and writes docs/paper_tables.md from it, after
each part, so that a run that is cut off keeps what it has; parts that are not run again keep their rows where the
settings are the same.

    a  M Fig. 14   pp2 and tp2 by the planner's own plan, HF PEFT task by task, NeMo-like, padded batches
    b  M Fig. 16   one technique off at a time, on pp2; "orchestration off" is 1F1B over the same buckets, not drained
    c  M Fig. 20   effective tokens/s of zero padding, packing only, and chunks of 32, 64 and 128, in one hTask
    d  M Fig. 17   peak memory of 1 to 32 tasks
    e  L Fig. 7    three unequal replicas against Task-Fused and Task-Sequential, measured profile, limits that bind
    f  L Fig. 10   two stages against Eq. 1, by the published profile; actual against planned comes with part e
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Table
from benchmarks.papers import lobra, muxtune
from benchmarks.papers.runs import launch
from benchmarks.papers.table import PAGE, PARTS, Row, Settings, figure, page
from benchmarks.paths import RESULTS, ROOT
from benchmarks.stored import hardware, versions
from benchmarks.training.workloads import ModelSpec

RESULT = RESULTS / "papers.json"
_RUNS: dict[str, Callable[[Settings, Path], list[Row]]] = {
    "a": muxtune.end_to_end,
    "b": muxtune.breakdown,
    "c": muxtune.alignment,
    "d": muxtune.memory,
    "e": lobra.replicas,
    "f": lambda settings, backbone: lobra.two_stages(settings),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print the table, and write what is asked for; return 1 where a part failed."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = _parser().parse_args(given)
    settings = _settings(options)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commands": [" ".join(["python -m benchmarks.papers", *given])],
        "hardware": hardware(),
        "versions": versions(),
        "settings": _words(settings),
        "seconds": {},
        "rows": [],
        "faults": {},
    }
    if options.write and RESULT.exists():
        keep_others(result, json.loads(RESULT.read_text(encoding="utf-8")), options.parts)
    with tempfile.TemporaryDirectory() as folder:
        backbone = Path(folder) / "backbone"
        launch({"kind": "prepare", "case": settings.case("uniform").to_json(), "backbone": str(backbone)}, 1)
        for part in options.parts:
            _run_part(part, settings, backbone, result)
            if options.write:
                RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    table = Table("figure:<86", "paper:<44", "here:>8")
    for row in result["rows"]:
        table.row(row["what"], row["paper"], figure(row))
    if options.write:
        _write_page(result)
        print(f"written: {RESULT.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
    return int(bool(result["faults"]))


def _write_page(result: dict[str, Any]) -> None:
    """Write the measured figures; what is simulated, by other commands, stays."""
    _, heading, simulated = PAGE.read_text(encoding="utf-8").partition("\n## Simulated\n")
    PAGE.write_text(page(result) + heading + simulated, encoding="utf-8")


def keep_others(result: dict[str, Any], before: dict[str, Any], parts: Sequence[str]) -> None:
    """Take over what an earlier run found of the parts that are not run again; nothing of one with other settings.

    Args:
        result: what this run finds, so far nothing; changed.
        before: what the earlier run wrote.
        parts: letters of the parts that are run now.
    """
    if before["settings"] == result["settings"]:
        earlier = [command for command in before["commands"] if command not in result["commands"]]
        result["commands"] = [*earlier, *result["commands"]]
        result["rows"] = [row for row in before["rows"] if row["part"] not in parts]
        for key in ("seconds", "faults"):
            result[key] = {part: value for part, value in before[key].items() if part not in parts}


def _run_part(part: str, settings: Settings, backbone: Path, result: dict[str, Any]) -> None:
    """Add the rows of a part to the result, or its fault: the other parts still run."""
    print(f"{part}: {PARTS[part]}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    try:
        result["rows"] += [asdict(row) for row in _RUNS[part](settings, backbone)]
    except Exception as error:  # a part that fails is reported, and the others run
        result["faults"][part] = f"{type(error).__name__}: {error}"
        print(f"FAULT {part}: {result['faults'][part]}", flush=True)
    result["seconds"][part] = time.perf_counter() - start


def _settings(options: argparse.Namespace) -> Settings:
    model = ModelSpec(
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        intermediate_size=options.hidden_size * 43 // 16,
        num_heads=options.heads,
    )
    return Settings(
        model=model,
        num_tasks=options.tasks,
        num_steps=options.steps,
        rounds=options.rounds,
        heavy_rows=options.heavy_rows,
        task_numbers=tuple(options.task_numbers),
        profile_s=options.profile_s,
    )


def _words(settings: Settings) -> str:
    model = settings.model
    return (
        f"Llama of {model.num_layers} layers, hidden size {model.hidden_size}, fp32; {settings.num_tasks} tasks, "
        f"{settings.num_steps} steps, {settings.rounds} rounds"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run, by letter")
    add("--tasks", type=int, default=4, help="tasks of a measurement")
    add("--steps", type=int, default=4, help="optimizer steps of a timed run; the first is not timed")
    add("--rounds", type=int, default=1, help="timed runs of each contender")
    add("--heavy-rows", type=int, default=8, help="rows a task and step of the heavy load of part b")
    add("--task-numbers", type=int, nargs="+", default=[1, 8], help="numbers of tasks of part d, such as 1 4 8 16 32")
    add("--profile-s", type=float, default=15.0, help="seconds of measuring the profile of part e")
    add("--hidden-size", type=int, default=256, help="features of the backbone's hidden states")
    add("--layers", type=int, default=4, help="layers of the backbone")
    add("--heads", type=int, default=8, help="attention heads of the backbone")
    add("--write", action="store_true", help="write benchmarks/results/papers.json and docs/paper_tables.md")
    return parser
