"""Prompts with answers to others, against TRL; and streams of some of the sequences of rows."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.dataset import TaskLoader, tokenize_dataset
from peft_mux.data.formats import DataFormat
from peft_mux.data.streams import StreamLoader
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.data.tokenize import RowTokenizer, TokenizeOptions
from peft_mux.demo.small_llama import make_tokenizer
from peft_mux.losses.preference_rows import KTO_ROWS
from tests.modeling.objectives.test_objectives import is_same

ROWS = [
    {"prompt": prompt, "completion": completion, "label": place % 2 == 0}
    for place, (prompt, completion) in enumerate(
        [("the sky", " is"), ("", "a blue sky"), ("which color", " blue or green"), ("so", " be it"), ("no", " more")]
    )
]
OPTIONS = TokenizeOptions(task="a", max_length=9, row_form=KTO_ROWS)


def test_each_prompt_gets_the_answer_before_it_in_its_batch_as_in_trl() -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    tokenizer = make_tokenizer(["the sky is a blue sky", "which color is it"])
    own = {"max_length": 9, "desirable_weight": 1.0, "undesirable_weight": 1.0, "calculate_KL": True}
    args = SimpleNamespace(dataset_num_proc=None, per_device_train_batch_size=2, **own)
    stand_in = SimpleNamespace(_tokenizer=tokenizer, **own)
    examples = trl.KTOTrainer._prepare_dataset(stand_in, Dataset.from_list(ROWS), tokenizer, args, "train")
    collate = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=9)
    dataset = tokenize_dataset(ROWS, options=OPTIONS, tokenizer=tokenizer)
    loader = TaskLoader(dataset, task="a", batch_size=2, seed=0, shuffle=False, arrange=OPTIONS.arrange)
    found = [sequence for step in range(loader.steps_per_epoch) for sequence in loader.batch(step).sequences]
    for sequence, example in zip(found, examples, strict=True):
        batch = collate([example])
        (_, first), (start, end) = sequence.sequence_bounds
        assert sequence.input_ids[:first].tolist() == batch["input_ids"][0].tolist()
        assert sequence.input_ids[start:end].tolist() == batch["KL_input_ids"][0].tolist()
        is_answer = sequence.labels[start:end] != IGNORE_INDEX
        assert is_answer.astype(int).tolist() == batch["KL_completion_mask"][0].tolist()


def test_a_stream_is_arranged_as_a_dataset_is() -> None:
    rows = [{"prompt_ids": [1 + place], "completion_ids": [20 + place, 30], "label": True} for place in range(5)]

    def open_rows(first: Any) -> RowTokenizer:
        return RowTokenizer(OPTIONS, None, DataFormat.TOKENIZED_UNPAIRED)

    settings: dict[str, Any] = {"task": "a", "batch_size": 2, "seed": 0, "arrange": OPTIONS.arrange}
    stream = StreamLoader(rows, open_rows, where="rows", timeout_s=30.0, **settings)
    dataset = TaskLoader(tokenize_dataset(rows, options=OPTIONS, tokenizer=None), **settings, shuffle=False)
    for step in range(2):
        found, wanted = stream.batch(step).sequences, dataset.batch(step).sequences
        assert [one.input_ids.tolist() for one in found] == [one.input_ids.tolist() for one in wanted]
        assert all(len(one.sequence_bounds) == 2 for one in found)


def row(rng: np.random.Generator, lengths: tuple[int, ...], index: int) -> TokenSequence:
    ids = rng.integers(1, 90, size=sum(lengths))
    labels = np.where(rng.random(len(ids)) < 0.3, IGNORE_INDEX, ids)
    columns = {"weights": rng.random(len(ids)).astype(np.float32)}
    starts = tuple(np.cumsum(lengths)[:-1].tolist())
    return TokenSequence(ids, labels, index, None, None, True, starts, columns, {"value": float(index)})


def of(row: TokenSequence, number: int) -> TokenSequence:
    """Return one sequence of a row as a row."""
    start, end = row.sequence_bounds[number]
    columns = {name: values[start:end] for name, values in row.token_columns.items()}
    part = {"input_ids": row.input_ids[start:end], "labels": row.labels[start:end], "token_columns": columns}
    return replace(row, starts=(), **part)


@pytest.mark.parametrize("number", [0, 1])
def test_the_stream_of_some_sequences_is_that_of_rows_without_the_others(number: int) -> None:
    rng = np.random.default_rng(0)
    pairs = [row(rng, lengths, index) for index, lengths in enumerate(((4, 3), (2, 6), (5, 5)))]
    others = [row(rng, (7,), 0), row(rng, (3,), 1)]
    batches = [TaskBatch("a", 0, 1, tuple(pairs)), TaskBatch("b", 2, 3, tuple(others))]
    whole = ChunkPackingCollator()
    (stream,) = whole.micro_batches(batches, max_tokens=1000)
    kept = [place == number for _ in pairs for place in range(2)] + [True, True]
    found = stream.of_sequences(kept)
    alone = [replace(batches[0], sequences=tuple(of(pair, number) for pair in pairs)), batches[1]]
    (wanted,) = whole.micro_batches(alone, max_tokens=1000)
    for field in fields(MuxBatch):
        mine, theirs = getattr(found, field.name), getattr(wanted, field.name)
        if field.name in ("token_places", "totals"):
            continue  # those of the whole rows, so that dropout does not depend on which sequences a pass reads
        assert is_same(mine, theirs), field.name
    starts = [place for place, stays in zip(stream.cu_seqlens[:-1].tolist(), kept, strict=True) if stays]
    assert found.token_places[found.cu_seqlens[:-1].long()].tolist() == stream.token_places[starts].tolist()
