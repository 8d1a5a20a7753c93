"""The heads of sequence classifiers: pooling a packed stream and running one head a task.

Model code pools by batch row (`hidden[:, 0]`, last token), which a packed stream does not have; so the pooled rows are
picked by sequence offsets here, and the model's own pooler, dropout and head modules run on them. `probe` holds the
result against the model's own forward, and refuses architectures whose head does anything else.

Shape letters: T tokens, S sequences, D hidden features, C classes.
"""

# MERGED: The loss of sequence classifiers and of regressions on sequences.
# MERGED: Shape letters: S sequences, C classes.
# MERGED: The loss of classifiers of tokens, and their heads: one small head for each task, on every token.
# MERGED: Shape letters: T tokens, M labelled tokens, D hidden features, C classes.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TaskBatch
from peft_mux.data.tokenize import CLASS_LABELS, LABELLED_ROWS, TAGGED_ROWS
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.attention.rows import ReadRows, rows_of_targets, states_of
from peft_mux.modeling.backbone.modules import CLASSIFICATION, HEAD_NAMES, TOKEN_CLASSIFICATION
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import (
    BaseObjective,
    HeadPass,
    LossArgs,
    SequenceOutputs,
    TaskLoss,
    common_fields,
    register_head,
    register_objective,
)


class ClassificationHead:
    """A small head for each task, on one pooled row of each sequence."""

    kind = CLASSIFICATION
    example_label = 0

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Give the task a head with its own number of classes; see `prepare_head`."""
        prepare_head(backbone, adapter, classes, seed, is_new=is_new)

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the encoder from pooling; see `without_pooler`."""
        return without_pooler(backbone)

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows | None:
        """Return the row of each sequence that is pooled; `None` where several sequences may have it in common."""
        if batch.shared is not None:
            return None
        return ReadRows(_pooled_tokens(batch, backbone), batch.sequence_offsets)

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Refuse: no loss of classifiers is captured."""
        raise NotImplementedError("passes of classifiers are not captured.")

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[SequenceOutputs]:
        """Return the logits of each task's own head, with the labels of its sequences."""
        return [
            SequenceOutputs(
                logits_SC=own_SC,
                class_labels=None
                if batch.class_labels is None
                else batch.class_labels[batch.sequence_offsets[index] : batch.sequence_offsets[index + 1]],
                row_sequences=batch.row_sequences[batch.row_offsets[index] : batch.row_offsets[index + 1]],
                problem_type=getattr(head.backbone.config, "problem_type", None),
                **common_fields(batch, index),
            )
            for index, own_SC in enumerate(task_logits(hidden_TD, batch, head))
        ]

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits `[C]` of every sequence."""
        return [row for part in task_logits(hidden_TD, batch, head) for row in part]

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the class or the value of every sequence; its values where it has several."""
        if CLASS_LABELS in micro_batch.row_values[0]:
            yield from micro_batch.row_values[0][CLASS_LABELS].cpu().numpy()
            return
        assert micro_batch.class_labels is not None, "a classification batch carries class labels"
        yield from micro_batch.class_labels.cpu().numpy()


def head_module(backbone: Any) -> tuple[str, Any]:
    """Return the name and the module of the classification head (PEFT's wrapper once adapters are injected).

    Raises:
        UnsupportedModelError: if there is none under a name that PEFT knows.
    """
    for name in HEAD_NAMES:
        if isinstance(getattr(backbone, name, None), nn.Module):
            return name, getattr(backbone, name)
    raise UnsupportedModelError(
        f"{type(backbone).__name__} has no classification head; allowed: models with a module named "
        f"{' or '.join(HEAD_NAMES)}. Load the backbone with AutoModelForSequenceClassification for SEQ_CLS tasks."
    )


@contextmanager
def without_pooler(backbone: Any) -> Iterator[None]:
    """Keep the encoder from pooling the packed stream, whose first row is one task's first token."""
    # BERT's encoder skips a pooler that is None; its output is not wanted, and would be of the first task alone.
    encoder = backbone.base_model
    pooler = getattr(encoder, "pooler", None)
    if pooler is None:
        yield
        return
    encoder.pooler = None
    try:
        yield
    finally:
        encoder.pooler = pooler


def pooled_states(hidden_TD: torch.Tensor, backbone: Any, batch: MuxBatch) -> torch.Tensor:
    """Return `[S, D]`: the first token of each sequence for encoders, the last for decoders, through the pooler."""
    pooled = states_of(hidden_TD, batch, _pooled_tokens(batch, backbone))
    pooler = getattr(backbone.base_model, "pooler", None)
    # Poolers take `[S, L, D]` and look at the first token of each; here that is the only one.
    return pooled if pooler is None else pooler(pooled.unsqueeze(1))


def _pooled_tokens(batch: MuxBatch, backbone: Any) -> torch.Tensor:
    """Return the token `[S]` of each sequence whose state is pooled."""
    name, _ = head_module(backbone)
    if name == "score":
        return _last_tokens(batch, backbone.config.get_text_config().pad_token_id)
    return batch.cu_seqlens[:-1].to(torch.int64)


def _last_tokens(batch: MuxBatch, pad_token_id: int | None) -> torch.Tensor:
    """Return `[S]` rows: the last token of each sequence that is not the padding token, as transformers picks it."""
    bounds = batch.cu_seqlens.to(torch.int64)
    rows = torch.arange(batch.num_tokens, device=bounds.device)
    if pad_token_id is not None:
        rows = torch.where(batch.input_ids[0] != pad_token_id, rows, -1)
    # The running maximum ends at the last real token of each sequence, without a loop or a wait for the device. Where a
    # sequence is padding throughout, the maximum is of an earlier one, and its own first token is taken.
    return torch.maximum(torch.cummax(rows, dim=0).values[bounds[1:] - 1], bounds[:-1])


def task_logits(hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
    """Return the `[S_task, C_task]` logits of each task of a micro-batch.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    backbone, stream, adapters = head.backbone, head.stream, head.adapters
    # A pooled row is a sequence; the place of its first token stands for it in dropout.
    places = batch.token_places[batch.cu_seqlens[:-1].to(torch.int64)]
    _, wrapper = head_module(backbone)
    with stream.selected_rows(batch.sequence_offsets, places, adapters):
        pooled = pooled_states(hidden_TD, backbone, batch)
        takes_features = _takes_features(wrapper)
        dropout = getattr(backbone, "dropout", None)
        # Heads that take features drop out by themselves.
        if isinstance(dropout, nn.Module) and not takes_features:
            pooled = dropout(pooled)
    return head_outputs(pooled.unsqueeze(1) if takes_features else pooled, batch.sequence_offsets, places, batch, head)


def head_outputs(
    states: torch.Tensor, offsets: tuple[int, ...], places: torch.Tensor, batch: MuxBatch, head: HeadPass
) -> list[torch.Tensor]:
    """Return what each task's own head makes of its rows.

    Args:
        states: rows that the heads read, sorted by task.
        offsets: where each task's rows begin, `N + 1` numbers.
        places: place of each row in its task's global batch.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    stream, adapters, logits = head.stream, head.adapters, []
    _, wrapper = head_module(head.backbone)
    for index, name in enumerate(batch.task_names):
        # One task at a time, as heads have classes of their own: all rows before and after this task's are left out.
        rows = (0,) * (index + 1) + (offsets[index + 1] - offsets[index],) * (len(offsets) - index - 1)
        start, end = offsets[index], offsets[index + 1]
        own_head = _head_of(wrapper, adapters[name])
        with stream.selected_rows(rows, places[start:end], adapters):
            logits.append(own_head(states[start:end]))
    return logits


def _head_of(wrapper: Any, adapter: str) -> Any:
    if not hasattr(wrapper, "modules_to_save"):
        return wrapper
    return wrapper.original_module if wrapper.disable_adapters else wrapper.modules_to_save[adapter]


def _takes_features(wrapper: Any) -> bool:
    """Whether the head is a module of its own kind that takes `[S, L, D]` and pools by itself (RoBERTa)."""
    head = getattr(wrapper, "original_module", wrapper)
    return not isinstance(head, nn.Linear)


def prepare_head(backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
    """Give a task's classification head its own number of classes, and draw from the task's seed what is not trained.

    Args:
        backbone: the classifier, with the task's adapter injected.
        adapter: internal adapter id of the task.
        classes: number of classes of the task; `None` for that of the backbone.
        seed: fixes the weights of a head that is drawn.
        is_new: whether the backbone's own head was not among its weights, so that it holds numbers of nobody's seed.

    Raises:
        ConfigError: if the head is not a single linear layer and its size would have to change.
    """
    _, wrapper = head_module(backbone)
    head = wrapper.modules_to_save[adapter]
    if classes is not None and classes != backbone.config.num_labels:
        if not isinstance(head, nn.Linear):
            raise ConfigError(
                f"num_labels: got {classes} for the {type(head).__name__} of {type(backbone).__name__}; allowed: "
                f"{backbone.config.num_labels}, as the backbone was loaded. Load it with num_labels={classes}."
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


CLASSIFICATION_HEAD = ClassificationHead()
register_head(CLASSIFICATION_HEAD)


class ClassificationLoss(BaseObjective):
    """Negative log-likelihood of the class, or squared error of the value, one term for each sequence.

    Rows with a list of numbers have one for each class: multi-label classification, or a regression on several values
    where the backbone's configuration says so (`problem_type="regression"`).
    """

    name = "classification"
    loss_types = ("nll",)
    head = CLASSIFICATION_HEAD
    row_form = LABELLED_ROWS
    is_default = True
    uses_totals = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the sequences of the global batch."""
        if CLASS_LABELS in outputs.row_values:
            terms_S = value_terms(outputs.logits_SC, outputs.row_values[CLASS_LABELS], outputs.problem_type)
            return TaskLoss(terms_S.sum() * outputs.loss_weight)
        assert outputs.class_labels is not None, "a classification batch carries class labels"
        return TaskLoss(class_terms(outputs.logits_SC, outputs.class_labels).sum() * outputs.loss_weight)


def class_terms(logits_SC: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the `[S]` losses: cross-entropy for classes, squared error for values.

    Args:
        logits_SC: `[S, C]`, of one task.
        labels: class or value of each sequence, `[S]`.
    """
    # In fp32: a sum of exponentials loses too many bits in half precision.
    scores = logits_SC.float()
    # One output means a regression, as in transformers.
    if scores.shape[1] == 1:
        return (scores[:, 0] - labels.float()) ** 2
    return F.cross_entropy(scores, labels.long(), reduction="none")


def value_terms(logits_SC: torch.Tensor, labels_SC: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """Return the `[S]` losses of rows with a number for each class, means over the classes as in transformers.

    Args:
        logits_SC: `[S, C]`, of one task.
        labels_SC: `[S, C]`, from 0 to 1; for a regression any numbers.
        problem_type: "regression" for squared errors; else binary cross-entropy of each class (multi-label).
    """
    scores = logits_SC.float()
    labels = labels_SC.to(scores.dtype)
    if problem_type == "regression":
        return ((scores - labels) ** 2).mean(dim=1)
    return F.binary_cross_entropy_with_logits(scores, labels, reduction="none").mean(dim=1)


register_objective(ClassificationLoss())


class TokenClassificationHead:
    """A small head for each task, on every token."""

    kind = TOKEN_CLASSIFICATION
    example_label = None

    def prepare(self, backbone: Any, adapter: str, classes: int | None, seed: int, *, is_new: bool) -> None:
        """Give the task a head with its own number of classes; see `prepare_head`."""
        prepare_head(backbone, adapter, classes, seed, is_new=is_new)

    def bypassed(self, backbone: Any) -> AbstractContextManager[None]:
        """Keep the encoder from pooling; see `without_pooler`."""
        return without_pooler(backbone)

    def read_rows(self, batch: MuxBatch, backbone: Any) -> ReadRows:
        """Return the rows that have a target."""
        return rows_of_targets(batch)

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Refuse: no loss of classifiers is captured."""
        raise NotImplementedError("passes of classifiers are not captured.")

    def outputs(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[SequenceOutputs]:
        """Return the logits of each task's own head at its labelled tokens, with their labels."""
        labels_M = batch.labels[0].index_select(0, batch.target_rows)
        logits = token_logits(hidden_TD, batch.target_rows, batch.target_offsets, batch, head)
        return [
            SequenceOutputs(
                logits_SC=own_MC,
                class_labels=labels_M[batch.target_offsets[index] : batch.target_offsets[index + 1]],
                **common_fields(batch, index),
            )
            for index, own_MC in enumerate(logits)
        ]

    def logits(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> list[torch.Tensor]:
        """Return the logits `[L, C]` of every sequence."""
        rows = torch.arange(batch.num_tokens, device=hidden_TD.device)
        found = []
        for index, own_TC in enumerate(token_logits(hidden_TD, rows, batch.task_offsets, batch, head)):
            first, last = batch.sequence_offsets[index], batch.sequence_offsets[index + 1]
            found += own_TC.split(list(batch.sequence_lengths[first:last]))
        return found

    def labels(self, batch: TaskBatch, micro_batch: MuxBatch) -> Iterator[np.ndarray]:
        """Yield the labels `[L]` of every sequence."""
        return LANGUAGE_HEAD.labels(batch, micro_batch)


TOKEN_CLASSIFICATION_HEAD = TokenClassificationHead()
register_head(TOKEN_CLASSIFICATION_HEAD)


def token_logits(
    hidden_TD: torch.Tensor, rows: torch.Tensor, offsets: tuple[int, ...], batch: MuxBatch, head: HeadPass
) -> list[torch.Tensor]:
    """Return the `[rows, C]` logits of each task's own rows.

    Args:
        hidden_TD: the last hidden states `[T, D]`.
        rows: positions that the heads shall read, sorted by task.
        offsets: where each task's positions begin among them, `N + 1` numbers.
        batch: the micro-batch that the stream reads.
        head: what the output head is computed with.
    """
    places, states = batch.token_places.index_select(0, rows), states_of(hidden_TD, batch, rows)
    dropout = getattr(head.backbone, "dropout", None)
    if isinstance(dropout, nn.Module):
        with head.stream.selected_rows(offsets, places, head.adapters):
            states = dropout(states)
    return head_outputs(states, offsets, places, batch, head)


class TokenClassificationLoss(BaseObjective):
    """Mean negative log-likelihood of the classes of the labelled tokens."""

    name = "token_classification"
    loss_types = ("nll",)
    head = TOKEN_CLASSIFICATION_HEAD
    row_form = TAGGED_ROWS
    is_default = True
    uses_totals = False
    eager_reason = "a classifier takes the loss of each task on its own"

    def loss(self, outputs: SequenceOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean over the labelled tokens of the global batch."""
        assert outputs.class_labels is not None, "labelled tokens have labels"
        return TaskLoss(class_terms(outputs.logits_SC, outputs.class_labels).sum() * outputs.loss_weight)


register_objective(TokenClassificationLoss())
