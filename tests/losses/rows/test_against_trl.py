"""Rows of preferences become the tokens, masks and order that TRL makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from peft_mux.data.formats import RowForm
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.demo.small_llama import make_tokenizer
from peft_mux.errors import DataError
from peft_mux.losses.preference_rows import JOINED_ROWS, ODDS_ROWS, PAIR_ROWS, SCORED_ROWS, SINGLE_ROWS
from tests.data.cases import read

pytest.importorskip("trl", reason="trl is not installed")

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer_of(has_bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(["the sky is blue", "which color is the sky?", "it is green, it is red", "say no more"])
    tokenizer.chat_template = TEMPLATE
    if has_bos:
        tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    return tokenizer


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if place % 2 == 0 else "assistant", "content": text} for place, text in enumerate(texts)]


def answered(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


TEXTS: list[dict[str, Any]] = [
    {"prompt": "Which color is the sky?", "chosen": " It is blue.", "rejected": " Green, say no more of it."},
    {"prompt": "Say ", "chosen": "noth", "rejected": "no<|end|>"},
    {"prompt": "the sk", "chosen": "y is blue", "rejected": "in is red"},
    {"prompt": "", "chosen": "the sky is blue", "rejected": "is it so"},
]
IMPLICIT = [
    {"chosen": "The sky is blue today.", "rejected": "The sky is green."},
    {"chosen": "Is it blue", "rejected": "Is it black or green"},
    {"chosen": "same", "rejected": "same but longer"},
]
CHATS: list[dict[str, Any]] = [
    {"prompt": said("which color is the sky?"), "chosen": answered("blue"), "rejected": answered("it is green")},
    {"prompt": said("hi", "ho", "the sky?"), "chosen": answered("is blue"), "rejected": answered("red, red")},
]
IMPLICIT_CHATS = [{"chosen": said("the sky?", "blue"), "rejected": said("the sky?", "it is green, say no more")}]
DATASETS = {"texts": TEXTS, "implicit prompts": IMPLICIT, "chats": CHATS, "implicit chats": IMPLICIT_CHATS}


def ours(rows: Sequence[dict[str, Any]], form: RowForm, max_length: int, tokenizer: Any) -> list[TokenSequence]:
    dataset = read(list(rows), form, tokenizer, max_length=max_length)
    return [dataset[index] for index in range(len(dataset))]


def prepared(trainer: Any, rows: Sequence[dict[str, Any]], tokenizer: Any, **options: Any) -> list[dict[str, Any]]:
    """Return what a trainer of TRL makes of rows before it collates them."""
    args = SimpleNamespace(dataset_num_proc=None, truncation_mode="keep_start", **options)
    stand_in = SimpleNamespace(_tokenizer=tokenizer, **options)
    return list(trainer._prepare_dataset(stand_in, Dataset.from_list(list(rows)), tokenizer, args, "train"))


def left_out(examples: Sequence[Any], rows: Sequence[dict[str, Any]], form: RowForm, max_length: int) -> bool:
    """Return whether TRL leaves out all rows; then they must be left out here."""
    if examples:
        return False
    with pytest.raises(DataError, match="none of which can be trained on"):
        ours(rows, form, max_length, tokenizer_of())
    return True


def of_batch(batch: Any, count: int) -> list[tuple[list[int], list[int]]]:
    """Return ids and which of them are answers, of each sequence of a batch that TRL has collated."""
    return [
        (
            batch["input_ids"][row][batch["attention_mask"][row] == 1].tolist(),
            batch["completion_mask"][row][batch["attention_mask"][row] == 1].tolist(),
        )
        for row in range(count)
    ]


def of_row(sequence: TokenSequence) -> list[tuple[list[int], list[int]]]:
    return [
        (sequence.input_ids[start:end].tolist(), (sequence.labels[start:end] != IGNORE_INDEX).astype(int).tolist())
        for start, end in sequence.sequence_bounds
    ]


@pytest.mark.parametrize("max_length", [8, 14, 1024])
@pytest.mark.parametrize("name", DATASETS)
def test_pairs_become_the_tokens_of_the_dpo_trainer(name: str, max_length: int) -> None:
    from trl import DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    tokenizer, rows = tokenizer_of(), DATASETS[name]
    examples = prepared(DPOTrainer, rows, tokenizer, max_length=max_length)
    if left_out(examples, rows, PAIR_ROWS, max_length):
        return
    found = ours(rows, PAIR_ROWS, max_length, tokenizer)
    collate = DataCollatorForPreference(pad_token_id=0, max_length=max_length)
    assert len(found) == len(examples)
    for sequence, example in zip(found, examples, strict=True):
        batch = collate([example])
        assert of_row(sequence) == of_batch(batch, 2)
        assert sequence.row_values == {
            "chosen_tokens": batch["completion_mask"][0].sum(),
            "rejected_tokens": batch["completion_mask"][1].sum(),
        }


@pytest.mark.parametrize("has_bos", [False, True])
@pytest.mark.parametrize("max_length", [40, 1024])
@pytest.mark.parametrize("name", DATASETS)
def test_pairs_become_the_tokens_of_the_orpo_and_cpo_trainers(name: str, max_length: int, has_bos: bool) -> None:
    from trl.data_utils import maybe_apply_chat_template, maybe_extract_prompt
    from trl.experimental.orpo import ORPOTrainer

    tokenizer = tokenizer_of(has_bos)
    trainer: Any = SimpleNamespace(processing_class=tokenizer, is_encoder_decoder=False, max_length=max_length)
    trainer.build_tokenized_answer = lambda prompt, answer: ORPOTrainer.build_tokenized_answer(trainer, prompt, answer)
    expected, rows = [], []
    for row in DATASETS[name]:
        example = maybe_apply_chat_template(maybe_extract_prompt(dict(row)), tokenizer)
        try:
            tokens = ORPOTrainer.tokenize_row(trainer, example)
        except ValueError:
            with pytest.raises(DataError, match="merge"):
                ours([row], ODDS_ROWS, max_length, tokenizer)
            continue
        rows.append(row)
        pair = [(tokens[f"{kind}_input_ids"], tokens[f"{kind}_labels"]) for kind in ("chosen", "rejected")]
        # TRL keeps rows without a token of an answer, whose loss is not a number.
        if all(any(label != IGNORE_INDEX for label in labels[1:]) for _, labels in pair):
            expected.append(pair)
    assert expected
    for sequence, pair in zip(ours(rows, ODDS_ROWS, max_length, tokenizer), expected, strict=True):
        is_answer = sequence.token_columns["is_answer"] == 1
        labels = np.where(is_answer, sequence.labels, IGNORE_INDEX)
        assert pair == [
            (sequence.input_ids[start:end].tolist(), labels[start:end].tolist())
            for start, end in sequence.sequence_bounds
        ]
        # The whole chosen row is learnt, and of the rejected one its answer.
        (start, end), (second, last) = sequence.sequence_bounds
        assert sequence.labels[start:end].tolist() == sequence.input_ids[start:end].tolist()
        assert sequence.labels[second:last].tolist() == labels[second:last].tolist()
    # CPOTrainer tokenises in the same way, and learns only the answers.
    for sequence, pair in zip(ours(rows, JOINED_ROWS, max_length, tokenizer), expected, strict=True):
        assert pair == [
            (sequence.input_ids[start:end].tolist(), sequence.labels[start:end].tolist())
            for start, end in sequence.sequence_bounds
        ]


SINGLES = [
    {"prompt": "Which color is the sky?", "completion": " It is blue.", "label": True},
    {"prompt": "the sk", "completion": "y is blue", "label": False},
    {"prompt": "", "completion": "the sky is blue", "label": True},
]
SINGLE_CHATS = [
    {"prompt": said("which color is the sky?"), "completion": answered("blue"), "label": False},
    {"prompt": said("hi", "ho", "the sky?"), "completion": answered("is blue"), "label": True},
]


@pytest.mark.parametrize("max_length", [8, 1024])
@pytest.mark.parametrize(
    "rows", [SINGLES, SINGLE_CHATS, TEXTS, IMPLICIT, CHATS], ids=["texts", "chats", "pairs", "implicit", "chat pairs"]
)
def test_answers_become_the_tokens_and_the_order_of_the_kto_trainer(rows: Any, max_length: int) -> None:
    from trl import KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    tokenizer = tokenizer_of()
    options = {"undesirable_weight": 1.0, "desirable_weight": 1.0, "calculate_KL": False}
    examples = prepared(KTOTrainer, rows, tokenizer, max_length=max_length, **options)
    if left_out(examples, rows, SINGLE_ROWS, max_length):
        return
    found = ours(rows, SINGLE_ROWS, max_length, tokenizer)
    collate = DataCollatorForUnpairedPreference(pad_token_id=0, max_length=max_length)
    for sequence, example in zip(found, examples, strict=True):
        assert of_row(sequence) == of_batch(collate([example]), 1)
        assert sequence.row_values["desirable"] == example["label"]
    assert len({sequence.row for sequence in found}) == len(found)


def test_more_pairs_than_datasets_maps_at_a_time_come_in_its_order() -> None:
    from trl import unpair_preference_dataset

    from peft_mux.losses.preference_rows import unpaired

    rows = [{"prompt": f"p{place}", "chosen": f"c{place}", "rejected": f"r{place}"} for place in range(1203)]
    expected = list(unpair_preference_dataset(Dataset.from_list(rows)))
    assert [dict(row) for row in unpaired(iter(rows), "rows")] == expected


@pytest.mark.parametrize("max_length", [12, 1024])
@pytest.mark.parametrize("name", DATASETS)
def test_texts_to_score_become_the_tokens_of_the_reward_trainer(name: str, max_length: int) -> None:
    from trl import RewardTrainer

    tokenizer, rows = tokenizer_of(), DATASETS[name]
    examples = prepared(RewardTrainer, rows, tokenizer, max_length=max_length)
    if left_out(examples, rows, SCORED_ROWS, max_length):
        return
    for sequence, example in zip(ours(rows, SCORED_ROWS, max_length, tokenizer), examples, strict=True):
        assert [ids for ids, _ in of_row(sequence)] == [example["chosen_ids"], example["rejected_ids"]]
        assert sequence.row_values == {}
