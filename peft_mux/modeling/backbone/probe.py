"""A language model that scores few words for a while: what is shown on it need not read its whole head each time."""

# MERGED: What peft_mux can train on: checks of a backbone before anything is injected, and what its positions allow.
# MERGED: The packing probe: proof, on the model itself, that packing changes nothing.
# MERGED: Class names and configurations do not tell everything about an architecture. So before the first step a few
# MERGED: short
# MERGED: sequences go through the backbone twice, packed by us and one by one by the model's own code; a model whose
# MERGED: results
# MERGED: differ is refused by name. Of layers that are alike (`layer_list`) the first stand for all. This is done
# MERGED: where the model
# MERGED: will train and in that precision, as a GPU computes attention by other kernels than a CPU. A second pass in
# MERGED: training
# MERGED: mode watches the global random generators: a model that draws from them (functional dropout, layer drop)
# MERGED: would make one
# MERGED: task's result depend on its neighbours.
# MERGED: Shape letters: S sequences, L tokens of one, V vocabulary.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.modules import find_layers, first_layers, kinds_of_layers, num_telling_layers
from peft_mux.modeling.interface import MultiplexedModel


@contextmanager
def few_words(backbone: Any, count: int) -> Iterator[None]:
    """Let the head of a backbone have the logits of its first words only, for the time of the block.

    Heads that are no plain linear layer (adapted, quantised or sharded ones) stay as they are.

    Args:
        backbone: a transformers model, possibly with adapters.
        count: how many of its words stay; targets must be among them.
    """
    head = backbone.get_output_embeddings()
    if type(head) is not nn.Linear or not _is_plain(head.weight) or len(head.weight) <= count:
        yield
        return
    # In its own table and not by its name, as what is tied to it (the embeddings) keeps all words.
    whole = dict(head._parameters)
    for name, values in whole.items():
        if values is not None:
            head._parameters[name] = nn.Parameter(values.data[:count], requires_grad=False)
    try:
        yield
    finally:
        head._parameters.update(whole)


def _is_plain(weight: Any) -> bool:
    return type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_floating_point()


def check_backbone(backbone: Any) -> None:
    """Refuse by name a model that packing would change, as far as its class and configuration tell.

    What they do not tell, `peft_mux.modeling.backbone.probe` measures.

    Raises:
        UnsupportedModelError: naming the architecture, the reason, and what is allowed.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

    name = type(backbone).__name__
    if isinstance(backbone, PeftModel):
        raise UnsupportedModelError(
            f"{name} already holds adapters; allowed: a plain transformers model. Pass "
            "`model.unload()` and load the adapters with `MultiTaskPeftModel.from_pretrained`."
        )
    if any(isinstance(module, BaseTunerLayer) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} still holds the adapters of another trainer or PEFT model, which new ones would be trained on top "
            "of; allowed: a plain transformers model. Give `trainer.model.unload()`, which takes them out, or load the "
            "model again; `MultiTaskTrainer(model=trainer.model, ...)` goes on with them."
        )
    if not isinstance(backbone, PreTrainedModel):
        raise UnsupportedModelError(f"got {name}; allowed: a transformers PreTrainedModel.")
    reason = _unsupported_reason(backbone)
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be packed: {reason}; allowed: decoder-only causal language models and encoders or "
            "decoders with a sequence-classification head, whose attention goes through transformers' attention "
            "interface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, BERT, ...)."
        )


def _unsupported_reason(backbone: Any) -> str | None:
    config = backbone.config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models have two streams"
    if getattr(backbone, "_is_stateful", False):
        return "its recurrent layers carry state from one sequence into the next"
    if odd := _odd_layer_kinds(config):
        return f"its layers of kind {', '.join(odd)} do not look at one packed sequence alone"
    # transformers sets this where attention goes through its interface, with all arguments of the call.
    if not getattr(backbone, "_supports_attention_backend", False):
        return "it computes attention on a path of its own"
    if getattr(config, "output_router_logits", False):
        return "its router loss (output_router_logits) mixes the tokens of all tasks; set it to False"
    return None


def _odd_layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return sorted(set(kinds) - {"attention", "full_attention", "sliding_attention"})


def rope_limit(config: Any) -> int | None:
    """Return the length up to which rotary scaling is independent of the longest sequence in the batch.

    `dynamic` and `longrope` scaling look at the longest position of the whole batch, so that one long sequence would
    change its neighbours; below this length they do not. `None` for every other kind.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each kind (Gemma 3).
    variants = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for variant in variants:
        if variant.get("rope_type") in ("dynamic", "longrope"):
            return variant.get("original_max_position_embeddings") or config.max_position_embeddings
    return None


_OFFSET_POSITION_TYPES = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer")


def position_offset(backbone: Any) -> int:
    """Return the position id of a sequence's first token: RoBERTa and its kin start after the padding id."""
    config = backbone.config
    return config.pad_token_id + 1 if config.model_type in _OFFSET_POSITION_TYPES else 0


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that a backbone can tell the positions of, or `None` where it has no limit."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    known = [limit for limit in limits if isinstance(limit, int)]
    limit = min(known) if known else None
    if limit is not None and config.model_type in _OFFSET_POSITION_TYPES:
        # Their tables of positions begin with rows that no token of a sequence uses.
        limit -= config.pad_token_id + 1
    rope = rope_limit(text)
    return limit if rope is None else min(rope, limit or rope)


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
