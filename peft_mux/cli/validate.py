"""`peft-mux validate`: what each task of a file trains on, before anything is loaded or trained."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from peft_mux.reporting.views import counted

_TARGET, _OTHER, _END = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_MOST_SHOWN = 240
"""Tokens of a sample that are shown."""
_MOST_BINS, _BAR = 8, 32
"""Of a histogram of lengths: its bins, and the characters of its longest bar."""
_MOST_READ = 1000
"""Rows in which the end of sequence is looked for."""


def show_rows(trainer: Any, arguments: argparse.Namespace) -> int:
    """Print each task's format, lengths, cut and masked shares, end of sequence, a sample, and rows of both datasets.

    Args:
        trainer: the trainer of the file's tasks, which has read their rows and no weights.
        arguments: parsed options of `peft-mux validate`.

    Returns:
        The exit status: 0, or 1 where held-out rows are trained on.
    """
    found = {run.name: rows_of_task(run, trainer.processing_class) for run in trainer.table}
    if arguments.json:
        print(json.dumps(found, indent=1))  # noqa: T201
    else:
        for name, one in found.items():
            print(_text(name, one, is_coloured=sys.stdout.isatty()))  # noqa: T201
    return 1 if any(one["in_both"] for one in found.values()) else 0


def rows_of_task(run: Any, tokenizer: Any) -> dict[str, Any]:
    """Return what a task trains on, as plain JSON.

    Args:
        run: the task, with its rows read.
        tokenizer: writes tokens as text; `None` for their numbers.
    """
    splits = {"train_dataset": getattr(run.loader, "dataset", None), "eval_dataset": run.eval_data}
    facts: dict[str, Any] = {
        "steps": run.num_steps,
        "batch": run.hyper.train_batch_size,
        "splits": {name: _split(dataset) for name, dataset in splits.items() if dataset is not None},
        "in_both": _in_both(splits["train_dataset"], splits["eval_dataset"]),
    }
    # Of a stream only what its first step reads is known.
    is_stream = splits["train_dataset"] is None
    sequences = run.loader.batch(0).sequences if is_stream else run.loader.sample(_MOST_READ)
    facts["end_of_sequence"] = _end_of_sequence(sequences, tokenizer)
    facts["sample"] = _sample(sequences[0], tokenizer)
    return facts


def _end_of_sequence(sequences: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Return in how many rows the end of sequence carries loss; `None` where rows are classified, or none is known."""
    end = getattr(tokenizer, "eos_token_id", None)
    if end is None or sequences[0].class_label is not None or sequences[0].labels_itself:
        return None
    trained = sum(bool((sequence.labels == end).any()) for sequence in sequences)
    return {"token": str(tokenizer.eos_token), "trained": trained, "rows": len(sequences)}


def _histogram(lengths: list[int]) -> list[dict[str, int]]:
    """Return how many rows have lengths of each of a few equal ranges, from the shortest row to the longest."""
    first = lengths[0]
    width = -(-(lengths[-1] - first + 1) // _MOST_BINS)
    bins = [
        {"from": low, "to": min(low + width - 1, lengths[-1]), "rows": 0}
        for low in range(first, lengths[-1] + 1, width)
    ]
    for length in lengths:
        bins[(length - first) // width]["rows"] += 1
    return bins


def _split(dataset: Any) -> dict[str, Any]:
    report, lengths = dataset.report, sorted(int(length) for length in dataset.lengths)
    return {
        "format": str(report.data_format),
        "rows": report.num_rows,
        "kept": report.num_kept,
        "tokens": report.num_tokens,
        "shortest": lengths[0],
        "median": lengths[len(lengths) // 2],
        "longest_of_95_percent": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
        "longest": lengths[-1],
        "histogram": _histogram(lengths),
        "limit": report.limit,
        "cut_share": report.num_truncated / max(report.num_rows, 1),
        "left_out_share": (report.num_dropped_long + report.num_without_targets) / max(report.num_rows, 1),
        "masked_share": 1 - report.num_target_tokens / max(report.num_tokens, 1),
    }


def _in_both(train: Any, held_out: Any) -> int:
    """Return how many held-out rows are among those that are trained on, token for token."""
    if train is None or held_out is None:
        return 0
    known = {train[row].input_ids.tobytes() for row in range(len(train))}
    return sum(held_out[row].input_ids.tobytes() in known for row in range(len(held_out)))


def _sample(sequence: Any, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the tokens of a sequence as text, each with whether it carries loss; alike neighbours are joined."""
    parts: list[tuple[str, bool]] = []
    ids, labels = sequence.input_ids.tolist()[:_MOST_SHOWN], sequence.labels.tolist()[:_MOST_SHOWN]
    written = ""
    for number, label in enumerate(labels, start=1):
        # Behind those before it, as tokenizers drop the space of a token that stands first.
        before, written = written, "" if tokenizer is None else tokenizer.decode(ids[:number])
        text = f"{ids[number - 1]} " if tokenizer is None else written[len(before) :]
        is_target = label != -100
        if parts and parts[-1][1] == is_target:
            parts[-1] = (parts[-1][0] + text, is_target)
        else:
            parts.append((text, is_target))
    return parts


def _text(name: str, one: dict[str, Any], *, is_coloured: bool) -> str:
    lines = [f"{name}  {counted(one['steps'], 'step')} of {counted(one['batch'], 'row')}"]
    for split, own in one["splits"].items():
        lines.append(
            f"  {split}: {own['kept']:,} of {own['rows']:,} rows ({own['format']}), {own['tokens']:,} tokens; "
            f"lengths {own['shortest']} to {own['longest']}, median {own['median']}, "
            f"95 % up to {own['longest_of_95_percent']}, limit {own['limit']}; cut {own['cut_share']:.1%}, "
            f"left out {own['left_out_share']:.1%}, without loss {own['masked_share']:.1%} of the tokens"
        )
        lines += _bars(own["histogram"])
    lines += _end_line(one["end_of_sequence"])
    if one["in_both"]:
        lines.append(f"  {one['in_both']:,} held-out rows are trained on as well: take them out of train_dataset")
    shown = "".join(
        f"{_TARGET if is_target else _OTHER}{text}{_END}" if is_coloured else f"[{text}]" if is_target else text
        for text, is_target in one["sample"]
    )
    meaning = "green carries loss" if is_coloured else "[...] carries loss"
    return "\n".join([*lines, f"  first row ({meaning}):", *(f"    {line}" for line in shown.split("\n"))])


def _bars(histogram: list[dict[str, int]]) -> list[str]:
    """Return a bar for each range of lengths; none where all rows are of one."""
    if len(histogram) < 2:
        return []
    most, width = max(own["rows"] for own in histogram), len(str(histogram[-1]["to"]))
    bars = ["#" * -(-_BAR * own["rows"] // most) for own in histogram]
    return [
        f"    {own['from']:>{width}} to {own['to']:>{width}}  {bar:<{_BAR}}  {own['rows']:,}"
        for own, bar in zip(histogram, bars, strict=True)
    ]


def _end_line(end: dict[str, Any] | None) -> list[str]:
    if end is None:
        return []
    line = f"  end of sequence {end['token']}: trained in {end['trained']:,} of {end['rows']:,} rows"
    if end["trained"] == end["rows"]:
        return [line]
    return [f"{line}; rows without it teach no end: max_length cuts it off, or chat template or input_ids lack it"]
