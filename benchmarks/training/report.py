"""Figures of `benchmarks.training.throughput`: derived numbers, the table, the JSON file and the plot."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.training.workloads import Case

LABELS = {
    "hf": "HF Trainer, in turn",
    "padded": "padded joint (SL-PEFT)",
    "mux": "peft_mux",
    "floor": "floor",
}
COLOURS = {"hf": "#888888", "padded": "#d1853a", "mux": "#2b6cb0", "floor": "#b7c9dd"}


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of one contender; see `baselines.Run` and `audit.Audit`."""

    contender: str
    num_processed_tokens: int
    num_tokens: int
    steps_s: list[float]
    train_s: list[float]
    peak_bytes: int
    replicated_bytes: int | None


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All contenders on one case."""

    case: Case
    length_source: str
    num_tokens: int
    rows: list[Row]

    def figures(self) -> list[dict[str, Any]]:
        """Return what is reported of each contender; ratios are `None` where the other one did not run."""
        return [self._figures(row) for row in self.rows]

    def _figures(self, row: Row) -> dict[str, Any]:
        return {
            **asdict(row),
            "tokens_per_s": row.num_processed_tokens / median(row.steps_s),
            "effective_tokens_per_s": row.num_tokens / median(row.steps_s),
            "best_effective_tokens_per_s": row.num_tokens / min(row.steps_s),
            "median_over_floor": self._ratio(row, "floor", median),
            "min_over_floor": self._ratio(row, "floor", min),
            "hf_over_this_median": _inverse(self._ratio(row, "hf", median)),
            "hf_over_this_min": _inverse(self._ratio(row, "hf", min)),
            "train_over_floor": self._ratio(row, "floor", median, "train_s"),
            "hf_train_over_this": _inverse(self._ratio(row, "hf", median, "train_s")),
        }

    def _ratio(self, row: Row, other: str, reduce: Any, field: str = "steps_s") -> float | None:
        times = [getattr(found, field) for found in self.rows if found.contender == other]
        return reduce(getattr(row, field)) / reduce(times[0]) if times else None


def _inverse(ratio: float | None) -> float | None:
    return None if ratio is None else 1 / ratio


_COLUMNS: tuple[tuple[str, int, str, str], ...] = (
    ("tokens/s", 9, "tokens_per_s", ".0f"),
    ("effective", 10, "effective_tokens_per_s", ".0f"),
    ("best", 7, "best_effective_tokens_per_s", ".0f"),
    ("/ floor", 9, "median_over_floor", ".2f"),
    ("(min)", 7, "min_over_floor", ".2f"),
    ("vs hf", 7, "hf_over_this_median", ".2f"),
    ("(min)", 7, "hf_over_this_min", ".2f"),
    ("train()/floor", 15, "train_over_floor", ".2f"),
    ("vs hf", 7, "hf_train_over_this", ".2f"),
    ("MiB", 7, "peak_mebibytes", ".0f"),
    ("replicated", 12, "replicated_mebibytes", ".0f"),
)


def table(result: CaseResult) -> str:
    """Return the figures of a case as text; see `benchmarks/README.md` for the columns."""
    case = result.case
    rank = f", rank {case.rank}" if case.rank else ""
    lines = [
        f"\n{case.num_tasks} tasks, {case.mix}{rank}, {case.num_steps} steps each, {result.num_tokens} tokens, "
        f"loss {case.loss}; {result.length_source}; {case.model.title}",
        f"{'contender':24}" + "".join(f"{title:>{width}}" for title, width, _, _ in _COLUMNS),
    ]
    for row in result.figures():
        row["peak_mebibytes"] = row["peak_bytes"] / 2**20
        row["replicated_mebibytes"] = row["replicated_bytes"] and row["replicated_bytes"] / 2**20
        cells = [_cell(row[field], width, style) for _, width, field, style in _COLUMNS]
        lines.append(f"{LABELS[row['contender']]:24}" + "".join(cells))
    return "\n".join(lines)


def _cell(value: float | None, width: int, style: str) -> str:
    return f"{'-' if value is None else format(value, style):>{width}}"


def write(path: Path, results: list[CaseResult], command: list[str]) -> None:
    """Write the JSON file and, next to it, the plot.

    Args:
        path: path of the JSON file.
        results: what was measured in each case.
        command: the command that was run, as a list of words.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    cases = [
        {
            **asdict(result.case),
            "data_folder": None,
            "length_source": result.length_source,
            "num_tokens": result.num_tokens,
            "contenders": result.figures(),
        }
        for result in results
    ]
    content = {**circumstances(command), "cases": cases}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    plot(path.with_suffix(".png"), results)


def circumstances(command: list[str]) -> dict[str, Any]:
    """Return with which command, when, on what and with which versions something was measured.

    Args:
        command: the command that was run, as a list of words.
    """
    return {
        "command": shlex.join(["python", *command[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hardware": hardware(),
        "versions": versions(),
    }


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware() -> dict[str, Any]:
    """Return what the figures were measured on."""
    import torch

    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
    }


def host_kind() -> str:
    """Return a short name of the kind of machine, for file names."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return f"{slug}-{num_cores()}-cores"


def versions() -> dict[str, str]:
    """Return the versions of what was measured."""
    names = ("torch", "transformers", "peft", "accelerate", "peft_mux")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def plot(path: Path, results: list[CaseResult]) -> None:
    """Draw effective tokens/s and memory of every contender, one row of panels per mix."""
    from matplotlib.figure import Figure

    mixes = list(dict.fromkeys(result.case.mix for result in results))
    figure = Figure(figsize=(10, 3.4 * len(mixes)), layout="constrained")
    panels = figure.subplots(len(mixes), 2, squeeze=False)
    for (speed, memory), mix in zip(panels, mixes, strict=True):
        of_mix = [result for result in results if result.case.mix == mix]
        _bars(speed, of_mix, "effective_tokens_per_s", 1)
        _bars(memory, of_mix, "peak_bytes", 2**30)
        _replicated(memory, of_mix)
        speed.set(title=f"{mix}: effective tokens/s", xlabel="tasks", ylabel="real tokens / s")
        memory.set(title=f"{mix}: peak memory", xlabel="tasks", ylabel="GiB")
    handles, labels = panels[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    model = results[0].case.model
    figure.suptitle(
        f"{cpu_name()}, {num_cores()} cores; {model.title}",
        fontsize=9,
    )
    figure.savefig(path, dpi=120)


def _bars(axes: Any, results: list[CaseResult], field: str, unit: float) -> None:
    names = [row.contender for row in results[0].rows]
    for name in names:
        values = [row[field] / unit for result in results for row in result.figures() if row["contender"] == name]
        centres = [index + _offset(results[0], name) for index in range(len(values))]
        bars = axes.bar(centres, values, _bar_width(results[0]), label=LABELS[name], color=COLOURS[name])
        axes.bar_label(bars, fmt="%.0f" if unit == 1 else "%.2f", fontsize=7)
    axes.set_xticks(range(len(results)), [str(result.case.num_tasks) for result in results])
    axes.spines[["top", "right"]].set_visible(False)


def _bar_width(result: CaseResult) -> float:
    return 0.8 / len(result.rows)


def _offset(result: CaseResult, name: str) -> float:
    """Return where a contender's bar stands, from the middle of its group."""
    names = [row.contender for row in result.rows]
    return (names.index(name) - (len(names) - 1) / 2) * _bar_width(result)


def _replicated(axes: Any, results: list[CaseResult]) -> None:
    """Mark the computed memory of one backbone a task."""
    marks = [
        (index + _offset(result, row.contender), row.replicated_bytes / 2**30)
        for index, result in enumerate(results)
        for row in result.rows
        if row.replicated_bytes is not None
    ]
    if marks:
        xs, ys = zip(*marks, strict=True)
        axes.scatter(xs, ys, marker="_", s=400, color="black", label="HF, one backbone a task (computed)")
