"""What the tests of prompts share: backbones, a configuration of each form, and plain PEFT's own loss as the judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import (
    CartridgeConfig,
    CPTConfig,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
)

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, with_virtual_tokens
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab
from tests.modeling import backbones
from tests.modeling.adapters.alone import Side, alone

LM, SEQ, TOKEN = TaskType.CAUSAL_LM, TaskType.SEQ_CLS, TaskType.TOKEN_CLS
CLASSES = 3

PROMPTS = ("prompt", "words", "mlp", "lstm", "multitask", "cpt", "prefix", "projected", "cartridge")
"""Every form of prompts: each type, and each way of PEFT's that computes another thing."""
TOKENS = PROMPTS[:5]
"""Forms of virtual tokens that PEFT trains for classification: all but CPT."""
KEYS = PROMPTS[6:]
ENCODED = ("mlp", "lstm", "cpt", "projected")
"""Forms of which PEFT's own file does not hold all that is trained."""


def config_of(form: str, task_type: TaskType = LM) -> PeftConfig:
    """Return a configuration of a form of prompts; "lora" is one of none."""
    # By "all-linear" plain PEFT adapts the head of a tagger before it copies it, which fails.
    targets = "all-linear" if task_type == LM else r".*(query|q_proj|c_attn)"
    config: PeftConfig = {
        "prompt": lambda: PromptTuningConfig(task_type=LM, num_virtual_tokens=3),
        "words": lambda: PromptTuningConfig(task_type=LM, num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"),
        "mlp": lambda: PromptEncoderConfig(task_type=LM, num_virtual_tokens=4, encoder_hidden_size=16),
        "lstm": lambda: PromptEncoderConfig(
            task_type=LM, num_virtual_tokens=2, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"
        ),
        "multitask": lambda: MultitaskPromptTuningConfig(task_type=LM, num_virtual_tokens=3, num_ranks=2),
        "cpt": lambda: CPTConfig(
            task_type=LM, cpt_token_ids=list(range(5, 13)), cpt_mask=[1] * 8, cpt_tokens_type_mask=list(range(1, 9))
        ),
        "prefix": lambda: PrefixTuningConfig(task_type=LM, num_virtual_tokens=5),
        "projected": lambda: PrefixTuningConfig(
            task_type=LM, num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=8
        ),
        "cartridge": lambda: CartridgeConfig(task_type=LM, num_virtual_tokens=4),
        "lora": lambda: LoraConfig(task_type=LM, r=4, target_modules=targets),
    }[form]()
    config.task_type = task_type
    return config


# ----------------------------------------------------------------------- backbones


class Case(NamedTuple):
    """A backbone, the task type that it serves, and the forms that are trained on it."""

    make: Callable[[], Any]
    task_type: TaskType = LM
    forms: tuple[str, ...] = ("prompt", "prefix")


def _classifier(make: Callable[[], Any], task_type: TaskType, *forms: str) -> Case:
    return Case(lambda: backbones.filled(make), task_type, (*forms, *KEYS, "lora"))


LANGUAGE = Case(lab.tiny_llama, LM, (*PROMPTS, "lora"))
CLASSIFYING = {
    "Bert": _classifier(backbones.CLASSIFIERS["Bert"][0], SEQ, *TOKENS),
    "Roberta": _classifier(backbones.CLASSIFIERS["Roberta"][0], SEQ, *TOKENS),
    "Llama": _classifier(backbones.CLASSIFIERS["Llama"][0], SEQ),
    "GPT2": _classifier(backbones.classifier_of("gpt2"), SEQ),
    "Bert, tokens": _classifier(backbones.tagger_of("bert", **backbones.NO_BERT_DROPOUT), TOKEN),
    "Llama, tokens": _classifier(backbones.tagger_of("llama"), TOKEN),
}
CASES = {"language": LANGUAGE, **CLASSIFYING}
"""Backbones by name."""


def speaking(architecture: str) -> Case:
    """Return a language model of an architecture."""
    return Case(lambda: backbones.filled(backbones.LANGUAGE_MODELS[architecture][0]))


# ------------------------------------------------------------------ rows and models


class Row(NamedTuple):
    """Tokens, and their class, or the classes of each; none for language models."""

    ids: list[int]
    label: Any = None

    def sequence(self, number: int) -> TokenSequence:
        """Return the row as a sequence to train on."""
        options: dict[str, Any] = {} if self.label is None else {"class_label": self.label}
        if isinstance(self.label, list):
            options = {"labels_itself": True}
        labels = self.label if isinstance(self.label, list) else self.ids
        return TokenSequence(np.array(self.ids), np.array(labels), number, **options)


def rows_of(form: str, task_type: TaskType = LM, count: int = 4, low: int = 2, high: int = 20) -> list[Row]:
    """Return rows of random tokens and classes, others for each form."""
    rng = np.random.default_rng(sum(map(ord, form)))
    found = []
    for length in rng.integers(low, high, count):
        ids = rng.integers(2, backbones.VOCABULARY, length).tolist()
        classes = np.where(rng.random(length) < 0.3, IGNORE_INDEX, rng.integers(0, CLASSES, length))
        classes[-1] = rng.integers(0, CLASSES)
        found.append(Row(ids, {LM: None, SEQ: int(classes[-1]), TOKEN: classes.tolist()}[task_type]))
    return found


def streams(
    model: MultiTaskPeftModel, rows: Mapping[str, Sequence[Row]], *, max_tokens: int = 16, **options: Any
) -> list[MuxBatch]:
    """Return the micro-batches of a step of all tasks."""
    labels, batches = model.virtual_labels, []
    for form, own in rows.items():
        sequences = [with_virtual_tokens(row.sequence(number), labels.get(form, ())) for number, row in enumerate(own)]
        batches.append(TaskBatch(form, 0, 1, tuple(sequences)))
    return ChunkPackingCollator(**{"chunk_size": 8, **options}).micro_batches(batches, max_tokens=max_tokens)


def packed(model: MultiTaskPeftModel, rows: Mapping[str, Sequence[Row]]) -> MuxBatch:
    """Return the rows of tasks as one stream for a model."""
    (batch,) = streams(model, rows, max_tokens=10_000)
    return batch


def mux(*forms: str, case: Case = LANGUAGE, verify: bool = False) -> MultiTaskPeftModel:
    """Return a model of tasks of some forms, the weights of each drawn from a seed of its own."""
    configs = {form: config_of(form, case.task_type) for form in forms}
    return MultiTaskPeftModel(case.make(), configs, seeds={form: len(form) for form in forms}, verify=verify)


def task_of(form: str, case: Case = LANGUAGE, **settings: Any) -> Task:
    """Return a task of a form of prompts, whose name is the form's."""
    column = {LM: "", SEQ: "label", TOKEN: "labels"}[case.task_type]
    rows = rows_of(form, case.task_type, 10)
    options: dict[str, Any] = {
        "train_dataset": [{"input_ids": row.ids, **({column: row.label} if column else {})} for row in rows],
        "train_batch_size": 4,
        "learning_rate": 1e-2 if form != "lora" else 3e-3,
        "max_steps": 5,
        "seed": 3,
        "num_labels": CLASSES if column else None,
    }
    return Task(name=form, peft_config=config_of(form, case.task_type), **{**options, **settings})


# --------------------------------------------------------------------------- judge


def prompt_loss(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Return plain PEFT's own loss of rows, one at a time, as a mean over the targets of all."""
    losses, counts = [], []
    for ids, label in rows:
        row = torch.tensor([ids])
        labels = row if label is None else torch.tensor([label])
        losses.append(model(input_ids=row, labels=labels, **task_ids(model)).loss)
        of_words = len(ids) - 1 + _more_targets(model.peft_config["default"])
        counts.append(of_words if label is None else int((labels != IGNORE_INDEX).sum()))
    return torch.stack([loss * count for loss, count in zip(losses, counts, strict=True)]).sum() / sum(counts)


def task_ids(model: Any) -> dict[str, torch.Tensor]:
    """Return the inputs that multitask prompts need in addition to tokens."""
    return {"task_ids": torch.zeros(1, dtype=torch.int64)} if hasattr(model.active_peft_config, "num_tasks") else {}


def _more_targets(config: Any) -> int:
    """Return how many targets a prompt adds to a row: its first token, which a virtual one predicts, and answers."""
    if isinstance(config, CPTConfig):
        types: Any = config.cpt_tokens_type_mask
        return 1 + sum(kind > 0 and kind % 4 == 0 for kind in types[1:])
    return 0 if isinstance(config, (PrefixTuningConfig, CartridgeConfig, LoraConfig)) else 1


def rows_loss(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return plain PEFT's loss of rows that may begin with virtual tokens, which PEFT adds itself."""
    rows = []
    for one in sequences:
        own = slice(one.num_virtual_tokens, None)
        rows.append(
            Row(one.input_ids[own].tolist(), one.labels[own].tolist() if one.labels_itself else one.class_label)
        )
    return prompt_loss(model, rows)


def judge(
    trainer: MultiTaskTrainer,
    task: Task,
    case: Case = LANGUAGE,
    loss_of: Callable[[Any, Sequence[TokenSequence]], torch.Tensor] = rows_loss,
) -> Side:
    """Train one task alone with plain PEFT and an ordinary loop, on the same rows."""
    return alone(trainer, task, case.make, lambda model, batch: iter([loss_of(model, batch.sequences)]))


def padded(rows: Sequence[Row], pad: int) -> dict[str, torch.Tensor]:
    """Return rows as a batch of equal lengths, padded on the right."""
    missing = [max(len(row.ids) for row in rows) - len(row.ids) for row in rows]
    ids = [row.ids + [pad] * count for row, count in zip(rows, missing, strict=True)]
    mask = [[1] * len(row.ids) + [0] * count for row, count in zip(rows, missing, strict=True)]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
