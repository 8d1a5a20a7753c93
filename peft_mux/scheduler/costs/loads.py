"""The planner's view of a backbone and of a task, as pure numbers: no model, no data.

`ModelShape` is the backbone, and how its layers form stages. M Eq. 5 spreads it evenly over stages. Its embedding is on
the first stage, though, its output head on the last one; tensor parallelism cuts the linear layers and the head and
leaves norms and the embedding whole (`peft_mux.parallel.tensor.parallel`); and FSDP2 gathers one unit after another
(`peft_mux.parallel.fsdp`).

`TaskLoad` is the shape of one typical global batch, and the adapters. There is also how many bytes kernels hold while
they compute, for the memory model, as the kernels decide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from peft_mux.data.packing.prefixes import RowTrie


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Bytes of the frozen weights of a backbone.

    Attributes:
        before_bytes: bytes of the embeddings, learned positions included; they are on the first stage.
        layer_bytes: bytes of one layer, as a mean over all layers.
        cut_bytes: the part of `layer_bytes` that tensor parallelism divides; the rest is whole on every device.
        after_bytes: bytes of the last norm and what else follows the layers; they are on the last stage.
        head_bytes: bytes of the output head, which tensor parallelism divides; they are on the last stage.
        is_tied: whether the head is the embedding's weight, which takes no room of its own if both are on one stage.
    """

    before_bytes: int
    layer_bytes: int
    cut_bytes: int
    after_bytes: int
    head_bytes: int
    is_tied: bool = False

    @classmethod
    def even(cls, backbone_bytes: int, num_layers: int) -> FrozenParts:
        """Return a backbone that consists of its layers only, all of which can be cut."""
        layer_bytes = backbone_bytes // num_layers
        # Bytes that do not divide evenly come after the layers, so that the sum is right.
        return cls(0, layer_bytes, layer_bytes, backbone_bytes - num_layers * layer_bytes, 0)

    def device_bytes(self, num_layers: int, *, is_first: bool, is_last: bool, devices: int = 1) -> float:
        """Return the bytes on each device of a stage.

        Args:
            num_layers: layers that the stage has.
            is_first: whether the stage has the embedding.
            is_last: whether the stage has the head.
            devices: devices that share every layer of the stage (tensor parallelism).
        """
        layer = self.layer_bytes - self.cut_bytes + self.cut_bytes / devices
        # On a single stage a tied head is the embedding, which is counted already.
        head = 0.0 if self.is_tied and is_first else self.head_bytes / devices
        return num_layers * layer + is_first * self.before_bytes + is_last * (self.after_bytes + head)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What estimates need to know of a backbone.

    Attributes:
        num_layers: decoder or encoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP; of a mixture, of all experts of a token together.
        attention_size: query heads times channels.
        key_value_size: key-value heads times channels.
        vocab_size: rows of the output head.
        backbone_bytes: bytes of all backbone parameters and buffers as they are held.
        activation_bytes: bytes of one element of an activation.
        parts: where the bytes of the backbone lie; `None` spreads them evenly, as Eq. 5 does.
        held_intermediate_size: width of all experts of a layer together; `None` if a token passes through all of them.
        routed_share: part of the experts of a layer that a token passes through.
        caps_logits: whether logits are bounded smoothly (Gemma 2).
        head_dim: channels of a head.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    key_value_size: int
    vocab_size: int
    backbone_bytes: int
    activation_bytes: int
    parts: FrozenParts | None = None
    held_intermediate_size: int | None = None
    routed_share: float = 1.0
    caps_logits: bool = False
    head_dim: int = 128

    def in_precision(self, factor: float) -> ModelShape:
        """Return the shape with frozen weights that take `factor` times the bytes."""
        parts = self.parts
        if parts is not None:
            names = ("before_bytes", "layer_bytes", "cut_bytes", "after_bytes", "head_bytes")
            parts = replace(parts, **{name: int(factor * getattr(parts, name)) for name in names})
        return replace(self, backbone_bytes=int(factor * self.backbone_bytes), parts=parts)


def split_layers(num_layers: int, num_stages: int, layers_per_stage: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the layers of each stage: those given, or as equal as can be, the first stages taking one more.

    Raises:
        ValueError: for stages without layers, or numbers that do not add up.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages must be 1 to {num_layers}, the layers of the backbone, got {num_stages}.")
    if not layers_per_stage:
        each, rest = divmod(num_layers, num_stages)
        return tuple(each + (stage < rest) for stage in range(num_stages))
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage must be {num_stages} numbers of 1 or more that add up to {num_layers}, got "
            f"{layers_per_stage}."
        )
    return tuple(layers_per_stage)


class AdapterLoad(NamedTuple):
    """One adapter of one linear layer of one decoder layer.

    Attributes:
        rank: R, the rank of its factors.
        width: input plus output features of the linear layer.
        cut_width: the part of `width` that tensor parallelism divides: outputs of column-parallel layers, inputs of
            row-parallel ones; 0 for a layer that stays whole.
        is_routed: whether `rank` is the rank of all experts of a mixture together, while a token uses some of them.
    """

    rank: int
    width: int
    cut_width: int = 0
    is_routed: bool = False

    def device_width(self, devices: int) -> float:
        """Return the input plus output features of the factors on each of the devices that share the layer."""
        return self.width - self.cut_width + self.cut_width / devices


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """The load of one task in a step.

    Attributes:
        name: name of the task, unique in the run.
        lengths: tokens of each sequence of one typical global batch; empty if no rows are known.
        num_targets: loss terms of that batch.
        adapters: the adapters of ONE decoder layer from `lowest_layer` on; averaged if these layers differ.
        trainable_parameters: number of trainable parameters of the whole task.
        num_steps: optimizer steps of the whole task.
        priority: tasks of higher priority are admitted first.
        longest_row_tokens: tokens of the longest of all rows, which a typical batch may lack; 0 if unknown.
        cut_parameters: the part of `trainable_parameters` that tensor parallelism divides; the rest is on every device.
        stays_whole: whether its rows are never cut into parts, such as rows with a class.
        has_reference_forward: whether its rows go through the backbone without adapters before the passes of a step, as
            the reference of DPO does.
        has_batch_forward: whether they go through it with adapters before, as the estimate of KTO's divergence does.
        shared: how many tokens of each sequence other sequences compute if all are in one pass; empty for none.
        trie: the shared prefixes of its rows, to cut them into passes by; `None` if they share nothing.
        lowest_layer: the layer of its lowest adapter, counted from 0: its rows need no gradient below.
    """

    name: str
    lengths: tuple[int, ...]
    num_targets: int
    adapters: tuple[AdapterLoad, ...]
    trainable_parameters: int
    num_steps: int = 1
    priority: int = 0
    longest_row_tokens: int = 0
    cut_parameters: int = 0
    stays_whole: bool = False
    has_reference_forward: bool = False
    has_batch_forward: bool = False
    shared: tuple[int, ...] = ()
    trie: RowTrie | None = None
    lowest_layer: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the global batch (C n_k in M), each shared one once."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may come, which no micro-batch splits."""
        return max(self.longest_row_tokens, max(self.lengths, default=0))

    def device_parameters(self, devices: int) -> float:
        """Return the trainable parameters on each of the devices that share every layer."""
        return self.trainable_parameters - self.cut_parameters + self.cut_parameters / devices


# These are the numbers of `block_rows` in `peft_mux.kernels.cross_entropy`, which this folder may not import, as it
# needs torch; a test compares the two.
_LOSS_BLOCKS = {"cpu": (384, 2**22, 2**27)}
_DEFAULT_LOSS_BLOCKS = (1024, 2**26, 2**28)
_LEAST_BLOCK_ROWS = 16
_TILE_ROWS = 128


def loss_block_rows(vocab_size: int, device_type: str) -> int:
    """Return how many rows of logits the loss holds at a time.

    Args:
        vocab_size: V, words of the head; with tensor parallelism the words of one device.
        device_type: "cuda" or "cpu", whose kernels use blocks of different size.
    """
    fast_rows, logits, most_logits = _LOSS_BLOCKS.get(device_type, _DEFAULT_LOSS_BLOCKS)
    fast = min(fast_rows, most_logits // vocab_size)
    rows = max(_LEAST_BLOCK_ROWS, fast, logits // vocab_size)
    return rows // _TILE_ROWS * _TILE_ROWS if device_type != "cpu" and rows >= _TILE_ROWS else rows


# These are numbers of `peft_mux.kernels.lora`, which this folder may not import, as it needs torch; a test compares
# what is computed here with what the kernels allocate.
_CHUNK_ROWS = 512
_MAX_JOINT_RANK = 1024
_RANK_STEP = 8
_PART_BYTES = 4
_MOST_JOINT_LAYERS = 3
"""q, k and v: layers that read the same activations, whose factors A are computed as one."""


def weight_gradient_bytes(loads: Sequence[TaskLoad], tokens: float, hidden_size: int, devices: int = 1) -> float:
    """Return the bytes of the largest sum of weight gradients in a pass of all tasks: fp32 `[chunks, rank, width]`.

    An upper bound: it assumes that the three adapters of a task of greatest rank read the same activations.

    Args:
        loads: the loads of the tasks.
        tokens: tokens of the pass.
        hidden_size: width of the residual stream, which one end of each linear layer of a decoder layer has.
        devices: devices that share each layer (tensor parallelism).
    """
    widest = max((_widest_gradient(load.adapters, hidden_size, devices) for load in loads), default=0.0)
    # A chunk never crosses a task, so that each task may leave its last one partly empty.
    chunks = min(tokens, tokens // _CHUNK_ROWS + len(loads))
    return chunks * widest * _PART_BYTES


@lru_cache(maxsize=4096)
def _widest_gradient(adapters: tuple[AdapterLoad, ...], hidden_size: int, devices: int) -> float:
    """Return the elements of a chunk's largest weight gradient; cached, as planners ask for each pass that they try."""
    if not adapters:
        return 0.0
    padded = sorted((-(-adapter.rank // _RANK_STEP) * _RANK_STEP for adapter in adapters), reverse=True)
    joint_rank = min(sum(padded[:_MOST_JOINT_LAYERS]), max(_MAX_JOINT_RANK, padded[0]))
    wide = max(adapter.rank * (adapter.device_width(devices) - hidden_size) for adapter in adapters)
    return max(joint_rank * hidden_size, wide)
