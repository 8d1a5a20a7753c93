"""Figures of `benchmarks.training.throughput`: derived numbers and the table."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.training.workloads import Case

LABELS = {
    "hf": "HF Trainer, in turn",
    "padded": "padded joint (SL-PEFT)",
    "mux": "peft_mux",
    "floor": "floor",
}


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

    def to_json(self) -> dict[str, Any]:
        """Return the case and the figures of its contenders as plain values."""
        facts = {"data_folder": None, "length_source": self.length_source, "num_tokens": self.num_tokens}
        return {**asdict(self.case), **facts, "contenders": self.figures()}

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
