"""The packing probe: proof, on the model itself, that packing changes nothing.

Class names and configurations do not tell everything about an architecture. So before the first step a few short
sequences go through the backbone twice, packed by us and one by one by the model's own code; a model whose results
differ is refused by name. Of layers that are alike (`layer_list`) the first stand for all. This is done where the model
will train and in that precision, as a GPU computes attention by other kernels than a CPU. A second pass in training
mode watches the global random generators: a model that draws from them (functional dropout, layer drop) would make one
task's result depend on its neighbours.

Shape letters: S sequences, L tokens of one, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.few_words import few_words
from peft_mux.modeling.backbone.layer_list import find_layers, first_layers, kinds_of_layers, num_telling_layers
from peft_mux.modeling.interface import MultiplexedModel

# Unequal, and on both sides of 16, by which attention rounds: padding and two rectangles take part.
_LENGTHS = (5, 3, 9, 18)
_NUM_WORDS = 1024
"""Words that the probe draws and scores; what packing does to hidden states, the logits of these show."""
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
_OTHER_TOLERANCE = 1e-2
_TF32_TOLERANCE = 1e-2
"""Factors of products keep ten bits then, as those of fp16 do."""


class ComputingPath(NamedTuple):
    """What decides by which kernels a pass is computed.

    Attributes:
        device_type: kind of the device, "cuda" or "cpu".
        dtype: precision of products, autocast included.
    """

    device_type: str
    dtype: torch.dtype


def path_of(model: MultiplexedModel) -> ComputingPath:
    """Return what a pass of a model would be computed by now."""
    device_type = model.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    return ComputingPath(device_type, torch.get_autocast_dtype(device_type) if is_autocast else model.backbone.dtype)


def check_packing(model: MultiplexedModel) -> None:
    """Hold packed against separate results, and see that no global random number is drawn.

    Args:
        model: a model with at least one task and with its weights.

    Raises:
        UnsupportedModelError: naming the architecture and what was found.
    """
    found = find_layers(model.backbone)
    kinds = [] if found is None else kinds_of_layers(model.backbone, list(found.layers))
    was_training = model.training
    model.eval()
    try:
        # What layers of one kind do to a packed stream, one of them shows.
        with first_layers(model.backbone, num_telling_layers(kinds)), few_words(model.backbone, _NUM_WORDS):
            _check_first_layers(model, probe_batch(model, next(iter(model.tasks))))
    finally:
        model.train(was_training)


def _check_first_layers(model: MultiplexedModel, batch: Any) -> None:
    with torch.no_grad(), model.without_adapters():
        packed = model.packed.sequence_logits(batch)
        # Equal results alone would not show that attention was told where sequences end.
        if model.stream.num_attention_calls == 0:
            raise UnsupportedModelError(_message(model, "its attention never reached the packed attention function"))
        separate = _separate_logits(model, batch)
    _compare(model, packed, separate)
    _check_random_numbers(model, batch)


def probe_batch(model: MultiplexedModel, task: str) -> Any:
    """Return a few made-up sequences of a task as a micro-batch."""
    vocabulary = min(_NUM_WORDS, model.backbone.config.get_text_config().vocab_size)
    rng = np.random.default_rng(0)
    sequences = []
    pad_token_id = model.backbone.config.get_text_config().pad_token_id
    for row, length in enumerate(_LENGTHS):
        ids = rng.integers(1, vocabulary, size=length)
        # Classifiers look for the last token that is no padding, so none may be drawn.
        ids[ids == pad_token_id] = (pad_token_id or 0) - 1 if (pad_token_id or 0) > 1 else vocabulary - 1
        label = model.objectives.head.example_label
        # A label that every head has, be it a word or a class of each token.
        sequences.append(TokenSequence(ids, np.zeros_like(ids), row, class_label=label))
    batch = TaskBatch(task, 0, 0, tuple(sequences))
    (micro_batch,) = ChunkPackingCollator().micro_batches([batch], max_tokens=sum(_LENGTHS))
    return micro_batch.to(model.device)


def _separate_logits(model: MultiplexedModel, batch: Any) -> list[torch.Tensor]:
    bounds = np.cumsum((0, *batch.sequence_lengths))
    logits = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        logits.append(model.backbone(input_ids=batch.input_ids[:, start:end]).logits[0].float())
    return logits


def _compare(model: MultiplexedModel, packed: list[torch.Tensor], separate: list[torch.Tensor]) -> None:
    tolerance = tolerance_of(path_of(model))
    for ours, theirs in zip(packed, separate, strict=True):
        scale = theirs.abs().max().clamp_min(1e-6)
        difference = ((ours.float() - theirs).abs().max() / scale).item()
        # Asked this way round, NaN is refused as well.
        if not difference <= tolerance:
            raise UnsupportedModelError(
                _message(model, f"its logits differ by {difference:.1e} of their size between packed and separate runs")
            )


def tolerance_of(path: ComputingPath) -> float:
    """Return by which share of their size logits may differ: packed tokens go through products of other shapes."""
    if path == ("cuda", torch.float32) and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return _TF32_TOLERANCE
    return _TOLERANCES.get(path.dtype, _OTHER_TOLERANCE)


def _check_random_numbers(model: MultiplexedModel, batch: Any) -> None:
    model.train()
    before = _random_states(batch.input_ids.device)
    # Prompts draw nothing, and the probe's rows begin with none of their tokens.
    with torch.no_grad(), model.without_prompts(), model.objectives.of_made_up_rows():
        model(batch)
    after = _random_states(batch.input_ids.device)
    if any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)):
        raise UnsupportedModelError(
            _message(
                model,
                "in training it draws from the global random generator (functional dropout, layer drop or jitter of a "
                "router), so one task's neighbours would shift its draws; set the model's dropout, layerdrop and "
                "jitter noise to 0 in its config",
            )
        )


def _random_states(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def _message(model: MultiplexedModel, reason: str) -> str:
    return (
        f"{type(model.backbone).__name__} cannot be packed: {reason}; allowed: models whose tokens meet those of "
        "their own sequence only, through transformers' attention interface."
    )
