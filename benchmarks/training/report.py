"""Figures of `benchmarks.training.throughput`: derived numbers and the table."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.harness import Table
from benchmarks.training.workloads import Case

LABELS = {
    "hf": "HF Trainer, in turn",
    "padded": "padded joint (SL-PEFT)",
    "mux": "peft_mux",
    "floor": "floor",
}
_COLUMNS = {
    "tokens_per_s": "tokens/s:>9.0f",
    "effective_tokens_per_s": "effective:>9.0f",
    "best_effective_tokens_per_s": "best:>6.0f",
    "median_over_floor": "/ floor:>7.2f",
    "min_over_floor": "(min):>5.2f",
    "hf_over_this_median": "vs hf:>5.2f",
    "hf_over_this_min": "(min):>5.2f",
    "train_over_floor": "train()/floor:>13.2f",
    "hf_train_over_this": "vs hf:>5.2f",
    "peak_mebibytes": "MiB:>6.0f",
    "replicated_mebibytes": "replicated:>10.0f",
}
"""Titles and formats of the figures, by name; see `benchmarks/README.md`."""


def add_figures(rows: list[dict[str, Any]]) -> None:
    """Add to what was measured of each contender what is reported of it; no ratios to one that did not run."""
    by_name = {row["contender"]: row for row in rows}
    floor, hf = by_name.get("floor"), by_name.get("hf")
    for row in rows:
        row["tokens_per_s"] = row["num_processed_tokens"] / median(row["steps_s"])
        row["effective_tokens_per_s"] = row["num_tokens"] / median(row["steps_s"])
        row["best_effective_tokens_per_s"] = row["num_tokens"] / min(row["steps_s"])
        for name, reduce in (("median", median), ("min", min)):
            if floor:
                row[f"{name}_over_floor"] = reduce(row["steps_s"]) / reduce(floor["steps_s"])
            if hf:
                row[f"hf_over_this_{name}"] = reduce(hf["steps_s"]) / reduce(row["steps_s"])
        if floor:
            row["train_over_floor"] = median(row["train_s"]) / median(floor["train_s"])
        if hf:
            row["hf_train_over_this"] = median(hf["train_s"]) / median(row["train_s"])


def print_table(case: Case, facts: dict[str, Any]) -> None:
    """Print the figures of a case."""
    rank = f", rank {case.rank}" if case.rank else ""
    print(
        f"\n{case.num_tasks} tasks, {case.mix}{rank}, {case.num_steps} steps each, {facts['num_tokens']} tokens, "
        f"{facts['length_source']}; {case.model.title}"
    )
    table = Table("contender:<22", *_COLUMNS.values())
    for row in facts["contenders"]:
        table.row(LABELS[row["contender"]], *(row.get(name) or "-" for name in _COLUMNS))
