"""Prompts that classify: each trains a head of its own, and is what plain PEFT makes of it alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as tf
from peft import TaskType
from torch.nn import functional as F

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, with_virtual_tokens
from tests.invariants.mux_lab import relative
from tests.modeling.adapters.prompts import prompt_cases
from tests.modeling.adapters.prompts.prompt_cases import plain, task_ids
from tests.modeling.test_architectures import (
    GROUPED,
    NO_BERT_DROPOUT,
    SIZE,
    VOCABULARY,
    bert_classifier,
    filled,
    llama_classifier,
    roberta_classifier,
)

SEQ, TOKEN = TaskType.SEQ_CLS, TaskType.TOKEN_CLS
TOKENS = ("prompt", "words", "mlp", "lstm", "multitask")
"""Forms of virtual tokens that PEFT trains for classification: all but CPT."""
KEYS = ("prefix", "projected", "cartridge")
CLASSES = 3


def gpt2_config(**settings: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
    return tf.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, num_labels=CLASSES, **settings)


def bert_tagger() -> Any:
    return tf.BertForTokenClassification(tf.BertConfig(**SIZE, **NO_BERT_DROPOUT, num_labels=CLASSES))


class Case(NamedTuple):
    """A backbone, the task type that it serves, and the forms of prompts that PEFT trains on it."""

    make: Callable[[], Any]
    task_type: TaskType
    forms: tuple[str, ...]


CASES = {
    "Bert": Case(bert_classifier, SEQ, TOKENS + KEYS),
    "Roberta": Case(roberta_classifier, SEQ, TOKENS + KEYS),
    "Llama": Case(llama_classifier, SEQ, KEYS),
    "GPT2": Case(lambda: tf.GPT2ForSequenceClassification(gpt2_config()), SEQ, KEYS),
    "Bert, tokens": Case(bert_tagger, TOKEN, KEYS),
    "Llama, tokens": Case(
        lambda: tf.LlamaForTokenClassification(tf.LlamaConfig(**GROUPED, num_labels=CLASSES, classifier_dropout=0.0)),
        TOKEN,
        KEYS,
    ),
    "GPT2, tokens": Case(lambda: tf.GPT2ForTokenClassification(gpt2_config(classifier_dropout=0.0)), TOKEN, KEYS),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def config_of(form: str, task_type: TaskType) -> Any:
    config: Any = prompt_cases.config_of(form, task_type)
    if form == "lora":
        config.target_modules = r".*(query|q_proj|c_attn)"  # plain PEFT adapts the head of a tagger by "all-linear"
    return config


class Row(NamedTuple):
    """Tokens, and their class or classes."""

    ids: list[int]
    label: Any


def rows_of(form: str, task_type: TaskType, count: int = 4) -> list[Row]:
    """Return rows of random tokens and classes, others for each form."""
    rng = np.random.default_rng(sum(map(ord, form)))
    found = []
    for length in rng.integers(2, 20, count):
        ids = rng.integers(2, VOCABULARY, length).tolist()
        classes = np.where(rng.random(length) < 0.3, IGNORE_INDEX, rng.integers(0, CLASSES, length))
        classes[-1] = 1
        found.append(Row(ids, classes.tolist() if task_type == TOKEN else int(classes[-1])))
    return found


def packed(model: MultiTaskPeftModel, rows: dict[str, list[Row]]) -> MuxBatch:
    """Return the rows of tasks as one stream."""
    batches = []
    for form, own in rows.items():
        sequences = []
        for number, (ids, label) in enumerate(own):
            is_of_tokens = isinstance(label, list)
            labels = np.array(label if is_of_tokens else ids)
            options = {"labels_itself": True} if is_of_tokens else {"class_label": label}
            sequence = TokenSequence(np.array(ids), labels, number, **options)
            sequences.append(with_virtual_tokens(sequence, model.virtual_labels.get(form, ())))
        batches.append(TaskBatch(form, 0, 1, tuple(sequences)))
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=10_000)
    return batch


def plain_outputs(model: Any, rows: list[Row]) -> list[Any]:
    """Return the outputs of plain PEFT's model for rows, one at a time, with its own losses."""
    return [
        model(input_ids=torch.tensor([ids]), labels=torch.tensor([label]), **task_ids(model)) for ids, label in rows
    ]


def plain_loss(model: Any, rows: list[Row]) -> torch.Tensor:
    """Return plain PEFT's loss, as a mean over the rows or the labelled tokens of all."""
    counts = [sum(one != IGNORE_INDEX for one in row.label) if isinstance(row.label, list) else 1 for row in rows]
    losses = [output.loss * count for output, count in zip(plain_outputs(model, rows), counts, strict=True)]
    return torch.stack(losses).sum() / sum(counts)


def mux(name: str, *forms: str) -> MultiTaskPeftModel:
    case = CASES[name]
    configs = {form: config_of(form, case.task_type) for form in forms}
    return MultiTaskPeftModel(filled(case.make), configs, seeds={form: len(form) for form in forms})


@EVERY_CASE
def test_a_pass_gives_each_prompt_what_plain_peft_alone_gives(name: str) -> None:
    make, task_type, forms = CASES[name]
    rows = {form: rows_of(form, task_type) for form in (*forms, "lora")}
    model = mux(name, *rows)
    losses = model(packed(model, rows)).losses
    losses.sum().backward()
    for loss, form in zip(losses, rows, strict=True):
        judge, own = plain(config_of(form, task_type), len(form), filled(make))
        ours = model.task_parameters(form)
        assert ours.keys() == own.keys(), "names are plain PEFT's"
        assert all(torch.equal(ours[key], item) for key, item in own.items()), "initial weights"
        wanted = plain_loss(judge.train(), rows[form])
        wanted.backward()
        assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-5), form
        for key, item in own.items():
            assert item.grad.norm() > 0 or key.endswith("lora_A.weight"), f"{form} {key}: nothing would be compared"
            found: Any = ours[key].grad
            assert relative(found, item.grad) <= 1e-4, f"{form} {key}"
