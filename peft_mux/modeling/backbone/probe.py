"""What peft_mux can train on: checks of a backbone by its class and configuration, and the packing probe.

Class names and configurations do not say everything about an architecture. So before the first step a few short
sequences go through the backbone twice, packed by us and one by one by the model's own code; a model whose results
differ is refused by name. Of layers that are of one kind the first stand for all. The probe runs on the device where
the model will train and in that precision, as a GPU computes attention by other kernels than a CPU; with
`shard_backbone` and pipeline stages it runs on the host, before the weights are distributed. A second pass in
training mode watches the global random generators: a model that draws from them (functional dropout, layer drop) would
make one task's result depend on its neighbours.

Shape letters: S sequences, L tokens of one, V vocabulary.
"""

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
from peft_mux.modeling.backbone.modules import telling_layers
from peft_mux.modeling.stream import in_mode, temporary_attributes

# ------------------------------------------------------------ class and configuration


def check_backbone(backbone: Any) -> None:
    """Refuse by name a model that packing would change, as far as its class and configuration say.

    Raises:
        UnsupportedModelError: naming the architecture, the reason, and what is allowed.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

    name = type(backbone).__name__
    if isinstance(backbone, PeftModel):
        raise UnsupportedModelError(
            f"{name} already holds adapters, and must be a plain transformers model. Pass `model.unload()` and load "
            "the adapters with `MultiTaskPeftModel.from_pretrained`."
        )
    if any(isinstance(module, BaseTunerLayer) for module in backbone.modules()):
        raise UnsupportedModelError(
            f"{name} still holds the adapters of another trainer or PEFT model, and must be a plain transformers "
            "model. Pass `trainer.model.unload()`, which removes them, or load the model again; "
            "`MultiTaskTrainer(model=trainer.model, ...)` continues with them."
        )
    if not isinstance(backbone, PreTrainedModel):
        raise UnsupportedModelError(f"the backbone must be a transformers PreTrainedModel, got {name}.")
    config = backbone.config
    # `compile()` sets this attribute; what a compiled module computes would be fixed for the tasks of its first pass.
    compiled = next((key for key, module in backbone.named_modules() if module._compiled_call_impl is not None), None)
    layer_types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    odd_types = sorted(set(layer_types) - {"attention", "full_attention", "sliding_attention"})
    if getattr(config, "is_encoder_decoder", False):
        reason = "encoder-decoder models have two streams"
    elif getattr(backbone, "_is_stateful", False):
        reason = "its recurrent layers carry state from one sequence into the next"
    elif odd_types:
        reason = f"its layers of kind {', '.join(odd_types)} do not look at one packed sequence alone"
    # transformers sets this if attention goes through its interface, with all arguments of the call.
    elif not getattr(backbone, "_supports_attention_backend", False):
        reason = "it computes attention on a path of its own"
    elif compiled is not None:
        reason = f"{compiled or 'the model'} is compiled; load it without compile(), as Liger's kernels fuse its layers"
    elif getattr(config, "output_router_logits", False):
        reason = (
            "its router loss (output_router_logits) mixes the tokens of all tasks; set it to False, as "
            "Task.router_aux_loss_coef balances routers for each task"
        )
    else:
        return
    raise UnsupportedModelError(
        f"{name} cannot be packed: {reason}. It must be a decoder-only causal language model, or an encoder or "
        "decoder with a sequence-classification head, whose attention goes through transformers' attention interface "
        "(Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, BERT, ...)."
    )


_OFFSET_POSITION_TYPES = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer")


def position_offset(backbone: Any) -> int:
    """Return the position id of a sequence's first token: RoBERTa and its relatives start after the padding id."""
    config = backbone.config
    return config.pad_token_id + 1 if config.model_type in _OFFSET_POSITION_TYPES else 0


def max_positions(config: Any) -> int | None:
    """Return the most tokens of a sequence whose positions a backbone knows, or `None` if it has no limit.

    `dynamic` and `longrope` rotary scaling look at the longest position of the whole batch, so that one long sequence
    would change its neighbours; below their original length they do not.
    """
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    limit = min((one for one in limits if isinstance(one, int)), default=None)
    if limit is not None and config.model_type in _OFFSET_POSITION_TYPES:
        # Their tables of positions begin with rows that no token of a sequence uses.
        limit -= config.pad_token_id + 1
    rope = getattr(text, "rope_parameters", None) or {}
    # Models with several kinds of layers have parameters for each kind (Gemma 3).
    variants = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for variant in variants:
        if variant.get("rope_type") in ("dynamic", "longrope"):
            original = variant.get("original_max_position_embeddings") or text.max_position_embeddings
            return min(original, limit or original)
    return limit


# -------------------------------------------------------------------------- the probe

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


def path_of(model: Any) -> ComputingPath:
    """Return which kernels and attention a pass of a model would use now."""
    device_type = model.device.type
    is_autocast = torch.is_autocast_enabled(device_type)
    return ComputingPath(device_type, torch.get_autocast_dtype(device_type) if is_autocast else model.backbone.dtype)


def tolerance_of(path: ComputingPath) -> float:
    """Return by which share of their size logits may differ: packed tokens go through products of other shapes."""
    if path == ("cuda", torch.float32) and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return _TF32_TOLERANCE
    return _TOLERANCES.get(path.dtype, _OTHER_TOLERANCE)


def probe_batch(model: Any, task: str) -> Any:
    """Return a few made-up sequences of a task as a micro-batch."""
    config = model.backbone.config.get_text_config()
    vocabulary, pad_token_id = min(_NUM_WORDS, config.vocab_size), config.pad_token_id
    rng = np.random.default_rng(0)
    sequences = []
    for row, length in enumerate(_LENGTHS):
        ids = rng.integers(1, vocabulary, size=length)
        # Classifiers look for the last token that is no padding, so none may be drawn.
        ids[ids == pad_token_id] = (pad_token_id or 0) - 1 if (pad_token_id or 0) > 1 else vocabulary - 1
        # A label that every head has, be it a word or a class of each token.
        label = model.objectives.head.example_label
        sequences.append(TokenSequence(ids, np.zeros_like(ids), row, class_label=label))
    batch = TaskBatch(task, 0, 0, tuple(sequences))
    (micro_batch,) = ChunkPackingCollator().micro_batches([batch], max_tokens=sum(_LENGTHS))
    return micro_batch.to(model.device)


@contextmanager
def truncated_head(backbone: Any, count: int) -> Iterator[None]:
    """Let the head of a backbone give the logits of its first words only, for the time of the `with` block.

    Heads that are no plain linear layer (adapted, quantised or sharded ones) stay as they are.

    Args:
        backbone: a transformers model, possibly with adapters.
        count: how many of its words stay; targets must be among them.
    """
    head = backbone.get_output_embeddings()
    weight = head.weight if type(head) is nn.Linear else None
    is_plain = type(weight) is nn.Parameter and type(weight.data) is torch.Tensor and weight.is_floating_point()
    if weight is None or not is_plain or len(weight) <= count:
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


def check_packing(model: Any) -> None:
    """Compare packed with separate results, and check that no global random number is drawn.

    Args:
        model: a `MultiTaskPeftModel` with at least one task and with its weights.

    Raises:
        UnsupportedModelError: naming the architecture and the reason.
    """
    backbone = model.backbone
    # What layers of one kind do to a packed stream, one of them shows.
    with telling_layers(backbone), truncated_head(backbone, _NUM_WORDS), in_mode(model, training=False):
        batch = probe_batch(model, next(iter(model.tasks)))
        reason = _packing_fault(model, batch) or _random_number_fault(model, batch)
    if reason:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} cannot be packed: {reason}. Its tokens must meet only those of their "
            "own sequence, through transformers' attention interface."
        )


def _packing_fault(model: Any, batch: Any) -> str:
    """Return how packed results differ from separate ones, a clause; "" if they do not."""
    made_up = temporary_attributes(model.objectives, are_rows_made_up=True)
    with torch.no_grad(), model.disable_adapter():
        with made_up:  # the backbone's own head, also of a task that has another
            packed = model.sequence_logits(batch)
        # Equal results alone would not show that attention knows where sequences end.
        if model.stream.num_attention_calls == 0:
            return "its attention never reached the packed attention function"
        ids = batch.input_ids.split(batch.sequence_lengths, dim=1)
        separate = [model.backbone(input_ids=own).logits[0].float() for own in ids]
    for ours, theirs in zip(packed, separate, strict=True):
        difference = ((ours.float() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6)).item()
        # Written this way round, so that NaN is refused as well.
        if not difference <= tolerance_of(path_of(model)):
            return f"its logits differ by {difference:.1e} of their size between packed and separate runs"
    return ""


def _random_number_fault(model: Any, batch: Any) -> str:
    """Return that a pass in training mode draws from a global random generator, a clause; "" if it does not."""

    def states() -> list[torch.Tensor]:
        device = batch.input_ids.device
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

    model.train()
    before = states()
    # Prompts draw nothing, and the probe's rows begin with none of their tokens.
    made_up = temporary_attributes(model.objectives, are_rows_made_up=True)
    with torch.no_grad(), temporary_attributes(model, has_prompts=False), made_up:
        model(batch)
    if all(torch.equal(*pair) for pair in zip(before, states(), strict=True)):
        return ""
    return (
        "in training it draws from the global random generator (functional dropout, layer drop or jitter of a router), "
        "so one task's neighbours would shift its draws; set the model's dropout, layerdrop and jitter noise to 0 in "
        "its config"
    )
