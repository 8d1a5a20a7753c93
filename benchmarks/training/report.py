"""Figures of `benchmarks.training.throughput`: derived numbers and the table."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.training.workloads import Case

LABELS = {
    "hf": "HF Trainer, in turn",
    "padded": "padded joint (SL-PEFT)",
    "mux": "peft_mux",
    "floor": "floor",
}
_COLUMNS = (
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


def table(case: Case, facts: dict[str, Any]) -> str:
    """Return the figures of a case as text; see `benchmarks/README.md` for the columns."""
    rank = f", rank {case.rank}" if case.rank else ""
    lines = [
        f"\n{case.num_tasks} tasks, {case.mix}{rank}, {case.num_steps} steps each, {facts['num_tokens']} tokens, "
        f"{facts['length_source']}; {case.model.title}",
        f"{'contender':24}" + "".join(f"{title:>{width}}" for title, width, _, _ in _COLUMNS),
    ]
    for row in facts["contenders"]:
        cells = [
            f"{format(row[field], style) if row.get(field) else '-':>{width}}" for _, width, field, style in _COLUMNS
        ]
        lines.append(f"{LABELS[row['contender']]:24}" + "".join(cells))
    return "\n".join(lines)
