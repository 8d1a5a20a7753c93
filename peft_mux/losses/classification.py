"""Classifiers of sequences and of tokens: a small head for each task on a packed stream, and their losses.

Model code pools by batch row (`hidden[:, 0]`, last token), which a packed stream does not have. So the pooled rows are
picked by sequence offsets here, and the model's own pooler, dropout and head modules run on them. The packing probe
compares the result with the model's own forward, and refuses architectures whose head does anything else.

Shape letters: T tokens, M labelled tokens, S sequences, D hidden features, C classes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TaskBatch
from peft_mux.data.tokenize import CLASS_LABELS, LABELLED_ROWS, TAGGED_ROWS
from peft_mux.errors import ConfigError
from peft_mux.modeling.attention.rows import states_of
from peft_mux.modeling.backbone.modules import CLASSIFICATION, TOKEN_CLASSIFICATION, head_module
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import (
    HEADS,
    LossArgs,
    Objective,
    OutputHead,
    SequenceOutputs,
    TaskLoss,
    common_fields,
    register_objective,
)
from peft_mux.modeling.pieces import PassThrough
from peft_mux.modeling.stream import temporary_attributes


class TaskHead(OutputHead):
    """A small head for each task; PEFT trains a copy of it."""

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Give the task's head its own number of classes, and draw from the task's seed what was not loaded.

        Raises:
            ConfigError: if the head is not a single linear layer and its size would have to change.
        """
        _, wrapper = head_module(backbone)
        head = wrapper.modules_to_save[adapter]
        if isinstance(head, PassThrough):  # on another stage
            return
        if isinstance(head, nn.Identity):  # on a language model
            size, number = backbone.config.get_text_config().hidden_size, classes or backbone.config.num_labels
            head = nn.Linear(size, number, bias=False, device=backbone.device, dtype=backbone.dtype)
            wrapper.modules_to_save[adapter] = head
        elif classes is not None and classes != backbone.config.num_labels:
            if not isinstance(head, nn.Linear):
                raise ConfigError(
                    f"num_labels must be {backbone.config.num_labels}, as the backbone was loaded, got {classes} for "
                    f"the {type(head).__name__} of {type(backbone).__name__}. Load it with num_labels={classes}."
                )
            options = {"bias": head.bias is not None, "device": head.weight.device, "dtype": head.weight.dtype}
            head = wrapper.modules_to_save[adapter] = nn.Linear(head.in_features, classes, **options)
        elif not is_new:
            return
        # From the task's seed: from the global state, it would depend on what else the process has drawn.
        generator = torch.Generator().manual_seed(seed)
        deviation = getattr(backbone.config, "initializer_range", 0.02)
        for layer in head.modules():
            if isinstance(layer, nn.Linear) and not layer.weight.is_meta:
                layer.weight.data.copy_(torch.normal(0.0, deviation, layer.weight.shape, generator=generator))
                if layer.bias is not None:
                    layer.bias.data.zero_()

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the encoder from pooling the packed stream, whose first row is one task's first token."""
        # BERT's encoder skips a pooler that is None; its output is not wanted, and would be of the first task alone.
        encoder = backbone.base_model
        return nullcontext() if getattr(encoder, "pooler", None) is None else temporary_attributes(encoder, pooler=None)


def head_outputs(
    states: torch.Tensor, offsets: Sequence[int], places: torch.Tensor, batch: MuxBatch, model: Any
) -> list[torch.Tensor]:
    """Return the output of each task's own head for its rows.

    Args:
        states: rows that the heads read, sorted by task.
        offsets: where each task's rows begin, `N + 1` numbers.
        places: place of each row in its task's global batch.
        batch: the micro-batch that the stream reads.
        model: the `MultiTaskPeftModel`.
    """
    _, wrapper = head_module(model.backbone)
    logits = []
    for index, name in enumerate(batch.task_names):
        start, end = offsets[index], offsets[index + 1]
        head = wrapper
        if hasattr(wrapper, "modules_to_save"):
            adapter, copies = model.adapters[name], {} if wrapper.disable_adapters else wrapper.modules_to_save
            # Tasks of another kind have none, and nothing reads their rows. A `ModuleDict` has no `get`.
            head = copies[adapter] if adapter in copies else wrapper.original_module  # noqa: SIM401
        # One task at a time, as heads have classes of their own: all rows before and after this task's are left out.
        task_offsets = (0,) * (index + 1) + (end - start,) * (len(offsets) - index - 1)
        with model.stream.selected_rows(task_offsets, places[start:end], model.adapters):
            logits.append(head(states[start:end]))
    return logits


# ------------------------------------------------------- classes of sequences


class ClassificationHead(TaskHead):
    """A small head for each task, on one pooled row of each sequence."""

    kind = CLASSIFICATION
    example_label = 0

    def outputs(
        self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
    ) -> list[SequenceOutputs]:
        """Return the logits of each task's own head, with the labels of its sequences."""
        outputs = []
        for index, task_SC in enumerate(task_logits(hidden_TD, batch, model)):
            sequences = slice(batch.sequence_offsets[index], batch.sequence_offsets[index + 1])
            outputs.append(
                SequenceOutputs(
                    logits_SC=task_SC,
                    class_labels=None if batch.class_labels is None else batch.class_labels[sequences],
                    problem_type=getattr(model.backbone.config, "problem_type", None),
                    **common_fields(batch, index),
                )
            )
        return outputs

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
        """Return the logits `[C]` of every sequence."""
        return [row for part in task_logits(hidden_TD, batch, model) for row in part]

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the class or the value of every sequence; its values if it has several."""
        labels = micro_batch.row_values[0].get(CLASS_LABELS, micro_batch.class_labels)
        assert labels is not None, "a classification batch carries class labels"
        yield from labels.cpu().numpy()


def task_logits(hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
    """Return the `[S_task, C_task]` logits of each task of a micro-batch that the stream reads."""
    backbone = model.backbone
    _, wrapper = head_module(backbone)
    # A head that is no linear layer, nor the place of some, takes `[S, L, D]`, drops out and pools by itself (RoBERTa).
    takes_features = not isinstance(getattr(wrapper, "original_module", wrapper), nn.Linear | nn.Identity)
    # A pooled row is a sequence; the place of its first token stands for it in dropout.
    places = batch.token_places[batch.cu_seqlens[:-1].to(torch.int64)]
    with model.stream.selected_rows(batch.sequence_offsets, places, model.adapters):
        if getattr(backbone.config, "classifier_pooling", None) == "mean":  # ModernBERT
            pooled = torch.stack([hidden_LD.mean(dim=0) for hidden_LD in hidden_TD.split(batch.sequence_lengths)])
        else:
            pooled = states_of(hidden_TD, batch, pooled_tokens(batch, backbone))
        pooler = getattr(backbone.base_model, "pooler", None)
        if pooler is not None:
            # Poolers take `[S, L, D]` and look at the first token of each; here that is the only one.
            pooled = pooler(pooled.unsqueeze(1))
        if not takes_features:
            pooled = _before_head(backbone, pooled)
    states = pooled.unsqueeze(1) if takes_features else pooled
    return head_outputs(states, batch.sequence_offsets, places, batch, model)


def _before_head(backbone: Any, states: torch.Tensor) -> torch.Tensor:
    """Return states after the modules that a model applies to them before its linear head."""
    for name in ("head", "drop", "dropout"):  # the first two are ModernBERT's
        module = getattr(backbone, name, None)
        states = module(states) if isinstance(module, nn.Module) else states
    return states


def pooled_tokens(batch: MuxBatch, backbone: Any) -> torch.Tensor:
    """Return the token `[S]` of each sequence that is pooled: for encoders its first, for decoders its last one."""
    name, _ = head_module(backbone)
    bounds = batch.cu_seqlens.to(torch.int64)
    if name != "score":
        return bounds[:-1]
    # The last token that is not the padding token, as transformers picks it.
    pad_token_id = backbone.config.get_text_config().pad_token_id
    rows = torch.arange(batch.num_tokens, device=bounds.device)
    if pad_token_id is not None:
        rows = torch.where(batch.input_ids[0] != pad_token_id, rows, -1)
    # The running maximum ends at the last real token of each sequence, without a loop or a wait for the device. If a
    # sequence is nothing but padding, the maximum belongs to an earlier one, and its own first token is taken.
    return torch.maximum(torch.cummax(rows, dim=0).values[bounds[1:] - 1], bounds[:-1])


CLASSIFICATION_HEAD = ClassificationHead()
HEADS[CLASSIFICATION.name] = CLASSIFICATION_HEAD


class ClassificationLoss(Objective):
    """Negative log-likelihood of the class, or squared error of the value, one term for each sequence.

    Rows with a list of numbers have one for each class: multi-label classification, or a regression on several values
    if the backbone's configuration says so (`problem_type="regression"`). Only single classes can be smoothed.
    """

    name = "classification"
    loss_types = smoothed_loss_types = ("nll",)
    head = CLASSIFICATION_HEAD
    row_form = LABELLED_ROWS
    is_default = True
    uses_totals = False

    def eager_reason(self, args: LossArgs) -> str:
        """Return why such passes cannot be captured."""
        return "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the sequences, or the labelled tokens, of the global batch."""
        # In fp32: a sum of exponentials loses too many bits in half precision.
        scores_SC, labels_S = outputs.logits_SC.float(), outputs.class_labels
        if CLASS_LABELS in outputs.row_values:
            # A number for each class: the term of a row is the mean over its classes, as in transformers.
            labels_SC = outputs.row_values[CLASS_LABELS].to(scores_SC.dtype)
            if outputs.problem_type == "regression":
                terms_SC = (scores_SC - labels_SC) ** 2
            else:
                terms_SC = F.binary_cross_entropy_with_logits(scores_SC, labels_SC, reduction="none")
            return TaskLoss(terms_SC.mean(dim=1).sum() * outputs.loss_weight)
        assert labels_S is not None, "a classification batch carries class labels"
        # One output means a regression, as in transformers.
        if scores_SC.shape[1] == 1:
            terms_S = (scores_SC[:, 0] - labels_S.float()) ** 2
        else:
            share = args.label_smoothing_factor
            terms_S = F.cross_entropy(scores_SC, labels_S.long(), reduction="none", label_smoothing=share)
        return TaskLoss(terms_S.sum() * outputs.loss_weight)


# ---------------------------------------------------------- classes of tokens


class TokenClassificationHead(TaskHead):
    """A small head for each task, on every token."""

    kind = TOKEN_CLASSIFICATION

    def outputs(
        self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any, smoothed: Collection[str] = ()
    ) -> list[SequenceOutputs]:
        """Return the logits of each task's own head at its labelled tokens, with their labels."""
        labels_M = batch.labels[0].index_select(0, batch.target_rows)
        logits = token_logits(hidden_TD, batch.target_rows, batch.target_offsets, batch, model)
        return [
            SequenceOutputs(
                logits_SC=task_MC,
                class_labels=labels_M[batch.target_offsets[index] : batch.target_offsets[index + 1]],
                **common_fields(batch, index),
            )
            for index, task_MC in enumerate(logits)
        ]

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, model: Any) -> list[torch.Tensor]:
        """Return the logits `[L, C]` of every sequence."""
        rows = torch.arange(batch.num_tokens, device=hidden_TD.device)
        logits = []
        for index, task_TC in enumerate(token_logits(hidden_TD, rows, batch.task_offsets, batch, model)):
            first, last = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
            logits += task_TC.split(list(batch.sequence_lengths[first:last]))
        return logits

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence."""
        return LANGUAGE_HEAD.labels(batch, micro_batch)


def token_logits(
    hidden_TD: torch.Tensor, rows: torch.Tensor, offsets: Sequence[int], batch: MuxBatch, model: Any
) -> list[torch.Tensor]:
    """Return the `[rows, C]` logits of each task's own rows.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        rows: positions that the heads read, sorted by task.
        offsets: where each task's positions begin among them, `N + 1` numbers.
        batch: the micro-batch that the stream reads.
        model: the `MultiTaskPeftModel`.
    """
    places, states = batch.token_places.index_select(0, rows), states_of(hidden_TD, batch, rows)
    with model.stream.selected_rows(offsets, places, model.adapters):
        states = _before_head(model.backbone, states)
    return head_outputs(states, offsets, places, batch, model)


TOKEN_CLASSIFICATION_HEAD = TokenClassificationHead()
HEADS[TOKEN_CLASSIFICATION.name] = TOKEN_CLASSIFICATION_HEAD


class TokenClassificationLoss(ClassificationLoss):
    """Mean negative log-likelihood of the classes of the labelled tokens."""

    name = "token_classification"
    other_names: ClassVar[Mapping[str, str]] = {
        "prm": 'Set task_type="TOKEN_CLS" on the adapter, for rows whose labels are at the last token of each step.'
    }
    head = TOKEN_CLASSIFICATION_HEAD
    row_form = TAGGED_ROWS


register_objective(ClassificationLoss())
register_objective(TokenClassificationLoss())
