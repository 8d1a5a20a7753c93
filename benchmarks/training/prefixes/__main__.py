"""Sharing the common prefixes of rows: the ideal and the realised gain of ordinary set-ups, time and memory.

python -m benchmarks.training.prefixes                       some 15 minutes on one core
python -m benchmarks.training.prefixes --only 4-shot --rounds 5
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Table, hand_over
from benchmarks.paths import SHARED_DATA
from benchmarks.stored import host_kind, read_result, write_result
from benchmarks.training.prefixes.measure import Found, measure, peak_bytes
from benchmarks.training.prefixes.rows import SET_UPS
from benchmarks.training.timing import use_clock
from benchmarks.training.workloads import ModelSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every set-up that is asked for, print a row of each, and write the JSON."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    use_clock("processor")
    if options.memory_of:
        given = json.loads(options.memory_of)
        (set_up,) = (candidate for candidate in SET_UPS if candidate.name == given["name"])
        hand_over(peak_bytes(set_up, ModelSpec(**given["model"]), given["num_tasks"], given["share"]))
        return
    if not (SHARED_DATA / "text").is_dir():
        raise SystemExit(f"there are no texts in {SHARED_DATA / 'text'}: nothing is measured")
    model = ModelSpec(hidden_size=options.hidden_size, num_layers=options.layers, max_tokens=2048)
    name = f"prefixes-{host_kind()}"
    table = Table(
        "set-up:<35", "tokens a step:>13,.0f", "ideal:>5.2f", "computed:>8.2f", "realised:>8.2f", "of the ideal:>12.0%",
        "s a step:>8.2f", "HF, in turn / this:>18.2f", "TRL, in turn / this:>19.2f", "memory, MB, shared / not:>24",
    )  # fmt: skip
    stored = read_result(name, options.output)
    # Rows of other set-ups on the same backbone stay.
    rows = {row["name"]: row for row in stored["rows"]} if stored.get("model") == asdict(model) else {}
    # Those first that a gain was promised of, and a file after each, as this may be stopped before it ends.
    for set_up in sorted(SET_UPS, key=lambda candidate: not candidate.has_target):
        if options.only is None or any(part in set_up.name for part in options.only):
            extras = {"with_hf": not options.no_hf, "with_memory": set_up.has_target and not options.no_memory}
            measured = measure(set_up, model, options.tasks, options.rounds, **extras)
            table.row(*cells(measured))
            rows[set_up.name] = asdict(measured)
            kept = [rows[candidate.name] for candidate in SET_UPS if candidate.name in rows]
            write_result(name, {"model": asdict(model), "rows": kept}, options.output)


def cells(row: Found) -> list[Any]:
    """Return the cells of a set-up's row of the table."""
    others = ("" if seconds is None else seconds / row.share_s for seconds in (row.hf_s, row.trl_s))
    memory = "" if row.peak_bytes is None else " / ".join(f"{peak / 1e6:,.0f}" for peak in row.peak_bytes)
    return [
        row.name, row.tokens, row.ideal, row.computed, row.gain, row.realised, row.share_s, *others, memory
    ]  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.prefixes", description="Gains of shared prefixes."
    )
    add = parser.add_argument
    add("--only", nargs="+", help="parts of the names of the set-ups to measure; by default all")
    add("--tasks", type=int, default=2, help="tasks that train together")
    add("--rounds", type=int, default=3, help="timed steps with sharing and without, in turns")
    add("--hidden-size", type=int, default=384, help="features of the backbone's hidden states")
    add("--layers", type=int, default=4, help="layers of the backbone")
    add("--no-hf", action="store_true", help="leave HF's Trainer and TRL's out")
    add(
        "--no-memory",
        action="store_true",
        help="leave memory out, which is measured where a gain was promised, in processes of its own",
    )
    add("--output", type=Path, help="folder for the JSON file")
    add("--memory-of", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
