"""Techniques of the papers, each on and off: the real engine on sleeping devices (`benchmarks.processes.sleeping`).

    python -m benchmarks.processes.techniques                    all of them, some 15 minutes on 2 cores
    python -m benchmarks.processes.techniques --only turns       one of them
    python -m benchmarks.processes.techniques --write            also into benchmarks/results/

    template   four stages: the multi-task template (M 3.4.1), one task's pipeline after another's, and the schedules
               1F1B and GPipe over all tasks, by the number C of micro-batches of a task
    turns      two tensor parallel ranks: passes in turns at subgraphs (M 3.4.2), by the speed of the link
    stages     two stages whose tasks adapt the upper layers alone: layers cut by what each stage has to do, or evenly
    policies   one process: the planner's hTasks, all tasks in one batch, and each task by itself (M 3.3)
    dispatch   unequal replicas: rows dispatched in balance (L 4.3), by length, and uniformly

All arms of a technique train the same rows. `faster` is how many times as long a step of the arm takes as one with the
technique, and `planned` the same by the plans of both runs. Sleeping devices make the ratios independent of what else
this machine does; `late` says how far that holds, and `sums` which part of the time sums over shards are on the link.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from benchmarks.harness import Table
from benchmarks.processes import sleeping
from benchmarks.stored import host_kind, write_result


class Technique(NamedTuple):
    """What is compared.

    Attributes:
        layout: the replicas, in LobRA's notation.
        options: other values of the options of `sleeping`.
        arms: settings of all ranks (`sleeping_worker.Settings`) by the name of the arm; the first is the technique.
    """

    layout: str
    options: dict[str, Any]
    arms: dict[str, dict[str, Any]]


def arms_of(**arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return arms that differ in the arguments of the run."""
    return {name.replace("_", " ").strip(): {"arguments": values} for name, values in arguments.items()}


def techniques() -> dict[str, Technique]:
    """Return all comparisons by name."""
    by_name = {}
    for count in (1, 2, 4):
        apart = {"num_micro_batches": count, "planner": "interleaved"}
        by_name[f"template, C = {count}"] = Technique(
            "<1,4>x1",
            {"per_node": 4, "tasks": 4},
            arms_of(
                template=apart,
                one_task_after_another={**apart, "planner": "sequential", "pipeline_schedule": "1f1b"},
                _1F1B={**apart, "pipeline_schedule": "1f1b"},
                GPipe={**apart, "pipeline_schedule": "gpipe"},
            ),
        )
    turns = arms_of(in_turns={"interleaved_passes": 4}, one_by_one={"interleaved_passes": 1})
    for link in (100, 50, 25):
        by_name[f"turns, {link} GB/s"] = Technique("<2,1>x1", {"per_node": 2, "tasks": 4, "link": link}, turns)
    for lowest in (0, 8, 14):
        cuts = {"by work": {"lowest_layer": lowest}, "evenly": {"lowest_layer": lowest, "is_cut_evenly": True}}
        by_name[f"stages, adapters from layer {lowest}"] = Technique("<1,2>x1", {"per_node": 2, "tasks": 4}, cuts)
    policies = arms_of(**{name: {"planner": name} for name in ("mux", "together", "interleaved")})
    by_name["policies"] = Technique("<1,1>x1", {"per_node": 1}, policies)
    dispatches = arms_of(**{name: {"dispatch": name} for name in ("balanced", "length", "uniform")})
    by_name["dispatch"] = Technique("<1,2>x1, <1,1>x2", {"per_node": 4}, dispatches)
    return by_name


def compare(name: str, technique: Technique, options: argparse.Namespace, table: Table) -> list[dict[str, Any]]:
    """Run all arms, print a line of each, and return them."""
    settings = argparse.Namespace(**{**vars(options), "nodes": 1, **technique.options})
    rows: list[dict[str, Any]] = []
    for arm, changes in technique.arms.items():
        row = {"technique": name, "arm": arm, **sleeping.run(technique.layout, settings, **changes)}
        faster, planned = ((row[key] / (rows or [row])[0][key]) for key in ("measured_s", "planned_s"))
        rows.append(row | {"faster": faster, "planned_faster": planned})
        milliseconds = 1e3 * row["measured_s"] / row["slow"]
        table.row(name, arm, milliseconds, faster, planned, row["summed_share"], row["late_share"])
    return rows


def main() -> None:
    """Run all techniques that the command line names."""
    parser = sleeping.parser()
    parser.description = __doc__
    parser.add_argument("--only", nargs="+", help="beginnings of the names of techniques; by default all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("technique:<32", "arm:<24", "ms:>8.1f", "faster:>6.2f", "planned:>7.2f", "sums:>6.0%", "late:>6.1%")
    rows = []
    for name, technique in techniques().items():
        if not options.only or name.startswith(tuple(options.only)):
            rows += compare(name, technique, options, table)
    if options.write:
        write_result(f"techniques-{host_kind()}", {"rows": rows})


if __name__ == "__main__":
    main()
