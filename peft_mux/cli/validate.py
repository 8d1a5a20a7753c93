"""`peft-mux validate`: what each task of a file trains on, before anything is loaded or trained."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import Any

from peft_mux.cli.commands import make_trainer
from peft_mux.cli.config_file import read_config
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.log.lines import counted, window_width, wrapped

_TARGET, _OTHER, _END = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_MOST_SHOWN = 240
"""Tokens of a sample that are shown."""
_MOST_BINS, _BAR = 8, 32
"""Of a histogram of lengths: its bins, and the characters of its longest bar."""
_MOST_READ = 1000
"""Rows in which the end of sequence is looked for."""


def validate(arguments: argparse.Namespace) -> int:
    """Print each task's format, lengths, cut and masked shares, end of sequence, a sample, and rows of both datasets.

    Returns:
        The exit status: 0, or 1 if held-out rows are trained on.
    """
    # It has read the rows and no weights.
    trainer = make_trainer(read_config(arguments.file, arguments.overrides))
    tasks = {run.name: rows_of_task(run, trainer.processing_class) for run in trainer.table}
    if arguments.json:
        print(json.dumps(tasks, indent=1))
    else:
        for name, rows in tasks.items():
            print(_text(name, rows, is_coloured=sys.stdout.isatty()))
    return 1 if any(rows["in_both"] for rows in tasks.values()) else 0


def rows_of_task(run: Any, tokenizer: Any) -> dict[str, Any]:
    """Return what a task trains on, as plain JSON.

    Args:
        run: the task, with its rows read.
        tokenizer: writes tokens as text; `None` for their numbers.
    """
    train, held_out = getattr(run.loader, "dataset", None), run.eval_data
    splits = {"train_dataset": train} | {rows.report.split: rows for rows in held_out.values()}
    in_both = 0
    if train is not None:
        known = {train[row].input_ids.tobytes() for row in range(len(train))} if held_out else set()
        in_both = sum(rows[row].input_ids.tobytes() in known for rows in held_out.values() for row in range(len(rows)))
    # For a stream, only the rows of its first step are known.
    sequences = run.loader.batch(0).sequences if train is None else run.loader.sample(_MOST_READ)
    end, end_of_sequence = getattr(tokenizer, "eos_token_id", None), None
    # Rows that are classified need no end of sequence.
    if end is not None and sequences[0].class_label is None and not sequences[0].labels_itself:
        trained = sum(bool((sequence.labels == end).any()) for sequence in sequences)
        end_of_sequence = {"token": str(tokenizer.eos_token), "trained": trained, "rows": len(sequences)}
    return {
        "steps": run.num_steps,
        "batch": run.hyper.train_batch_size,
        "splits": {name: _split(dataset) for name, dataset in splits.items() if dataset is not None},
        "in_both": in_both,
        "end_of_sequence": end_of_sequence,
        "sample": _sample(sequences[0], tokenizer),
    }


def _split(dataset: Any) -> dict[str, Any]:
    """Return the facts of a dataset, with a histogram of the lengths of its rows."""
    report, lengths = dataset.report, sorted(int(length) for length in dataset.lengths)
    first, last = lengths[0], lengths[-1]
    width = -(-(last - first + 1) // _MOST_BINS)
    bins = [{"from": low, "to": min(low + width - 1, last), "rows": 0} for low in range(first, last + 1, width)]
    for length in lengths:
        bins[(length - first) // width]["rows"] += 1
    return {
        "format": str(report.data_format),
        "rows": report.num_rows,
        "kept": report.num_kept,
        "tokens": report.num_tokens,
        "shortest": first,
        "median": lengths[len(lengths) // 2],
        "longest_of_95_percent": lengths[min(len(lengths) - 1, int(0.95 * len(lengths)))],
        "longest": last,
        "histogram": bins,
        "limit": report.limit,
        "cut_share": report.num_truncated / max(report.num_rows, 1),
        "left_out_share": (report.num_dropped_long + report.num_without_targets) / max(report.num_rows, 1),
        "masked_share": 1 - report.num_target_tokens / max(report.num_tokens, 1),
    }


def _sample(sequence: Any, tokenizer: Any) -> list[tuple[str, bool]]:
    """Return the tokens of a sequence as pieces of text, each with whether it carries loss."""
    pieces: list[tuple[str, bool]] = []
    ids, labels = sequence.input_ids.tolist()[:_MOST_SHOWN], sequence.labels.tolist()[:_MOST_SHOWN]
    written = ""
    for number, label in enumerate(labels, start=1):
        # Decoded with the tokens before it, as tokenizers drop the leading space of the first token.
        before, written = written, "" if tokenizer is None else tokenizer.decode(ids[:number])
        text = f"{ids[number - 1]} " if tokenizer is None else written[len(before) :]
        is_target = label != IGNORE_INDEX
        if pieces and pieces[-1][1] == is_target:
            pieces[-1] = (pieces[-1][0] + text, is_target)
        else:
            pieces.append((text, is_target))
    return pieces


def _text(name: str, rows: dict[str, Any], *, is_coloured: bool) -> str:
    lines = [f"{name}  {counted(rows['steps'], 'step')} of {counted(rows['batch'], 'row')}"]
    for split, of in rows["splits"].items():
        lines.append(
            f"  {split}: {of['kept']:,} of {of['rows']:,} rows ({of['format']}), {of['tokens']:,} tokens; "
            f"lengths {of['shortest']} to {of['longest']}, median {of['median']}, "
            f"95 % up to {of['longest_of_95_percent']}, limit {of['limit']}; cut {of['cut_share']:.1%}, "
            f"left out {of['left_out_share']:.1%}, without loss {of['masked_share']:.1%} of the tokens"
        )
        bins = of["histogram"]
        most, width = max(each["rows"] for each in bins), len(str(bins[-1]["to"]))
        for each in bins if len(bins) > 1 else ():
            bar = "#" * -(-_BAR * each["rows"] // most)
            bounds = f"{each['from']:>{width}} to {each['to']:>{width}}"
            lines.append(f"    {bounds}  {bar:<{_BAR}}  {each['rows']:,}")
    if (end := rows["end_of_sequence"]) is not None:
        line = f"  end of sequence {end['token']}: trained in {end['trained']:,} of {end['rows']:,} rows"
        if end["trained"] < end["rows"]:
            line += "; rows without it teach no end: max_length cuts it off, or chat template or input_ids lack it"
        lines.append(line)
    if rows["in_both"]:
        lines.append(f"  {rows['in_both']:,} held-out rows are trained on as well: take them out of train_dataset")
    if is_coloured:
        meaning = "green carries loss"
        shown = "".join(f"{_TARGET if is_target else _OTHER}{text}{_END}" for text, is_target in rows["sample"])
    else:
        meaning = "[...] carries loss"
        shown = "".join(f"[{text}]" if is_target else text for text, is_target in rows["sample"])
    width = window_width()
    sample = [f"    {line}" for line in shown.split("\n")]
    if not is_coloured:  # a terminal wraps the coloured text itself
        options: dict[str, Any] = {"subsequent_indent": " " * 4, "replace_whitespace": False, "expand_tabs": False}
        sample = [part for line in sample for part in textwrap.wrap(line, width, **options) or [line]]
    return "\n".join([wrapped("\n".join([*lines, f"  first row ({meaning}):"]), width), *sample])
