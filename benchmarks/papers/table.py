"""What the parts share: settings, rows, and the page that is written from the JSON."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from benchmarks.paths import ROOT
from benchmarks.training.workloads import Case, ModelSpec

PAGE = ROOT / "docs" / "paper_tables.md"
PARTS = {
    "a": "M Figure 14: end to end on two processes, the planner's own plan",
    "b": "M Figure 16: one technique off at a time",
    "c": "M Figures 20 and 13: data alignment",
    "d": "M Figure 17: memory against the number of tasks",
    "e": "L Figure 7: three unequal replicas",
    "f": "L Figure 10: planned, in two stages, and actual",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One figure next to the paper's.

    Attributes:
        part: letter of the part.
        what: what is measured.
        paper: the paper's figure; "-" where it has none.
        own: ours.
        unit: unit of ours.
        note: what belongs to it, such as the seconds of every round.
    """

    part: str
    what: str
    paper: str
    own: float
    unit: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Settings:
    """How large everything is.

    Attributes:
        model: shapes of the backbone.
        num_tasks: tasks of a measurement.
        num_steps: optimizer steps of a timed run.
        rounds: timed runs of each contender.
        heavy_rows: rows a task and step of heavy loads.
        task_numbers: numbers of tasks whose memory is measured.
        profile_s: seconds of measuring a profile.
    """

    model: ModelSpec
    num_tasks: int
    num_steps: int
    rounds: int
    heavy_rows: int
    task_numbers: tuple[int, ...]
    profile_s: float

    def case(self, mix: str, *, num_tasks: int | None = None, batch_size: int | None = None) -> Case:
        """Return what a comparison is made on.

        Args:
            mix: "uniform" or "nonuniform".
            num_tasks: number of tasks; by default that of the settings.
            batch_size: rows of a task in a step; by default that of the mix.
        """
        return Case(mix, num_tasks or self.num_tasks, self.num_steps, self.model, batch_size)


def page(result: dict[str, Any]) -> str:
    """Return the page of the documentation that a result makes.

    Args:
        result: what `run.py` wrote.
    """
    hardware, versions = result["hardware"], result["versions"]
    commands = ", then ".join(f"`{command}`" for command in result["commands"])
    lines = [
        "# The papers' evaluations",
        "",
        f"Written by {commands} ({result['date']}); `benchmarks/papers/` describes each figure.",
        "Ratios compare the time of all steps except each task's first. Contenders alternate in one run, after a check",
        "that losses are equal; `benchmarks/results/papers.json` has the seconds of each run. The papers used A40,",
        "H100 and A100 GPUs, and backbones of 2.7B parameters or more, so only the direction is comparable. M is",
        "MuxTune, L is LobRA.",
        "",
        f"{hardware['cpu']}, {hardware['cores']} cores, load average {hardware['load_average']}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + f". Settings: {result['settings']}.",
    ]
    for part, title in PARTS.items():
        rows = [row for row in result["rows"] if row["part"] == part]
        if not rows:
            continue
        lines += ["", f"## {title}", "", "| figure | paper | here |", "|---|---|---|"]
        lines += [f"| {_without_figure(row['what'], title)} | {row['paper']} | {figure(row)} |" for row in rows]
    left = [part for part in PARTS if part not in {row["part"] for row in result["rows"]}]
    if left:
        lines += ["", "Not in this run: " + "; ".join(PARTS[part] for part in left) + "."]
    return "\n".join([*lines, ""])


def _without_figure(what: str, title: str) -> str:
    """Return what a row compares, without the figure's number if the heading has it."""
    match = re.match(r"[ML] Fig\. (\d+), ", what)
    return what[match.end() :] if match and match[1] in re.findall(r"\d+", title) else what


def figure(row: dict[str, Any]) -> str:
    """Return our figure with its unit."""
    return f"{row['own']:.2f}x" if row["unit"] == "x" else f"{row['own']:.1f} {row['unit']}"
