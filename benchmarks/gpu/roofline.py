"""The shapes of `benchmarks.gpu`, and how large and how fast what it trains will be: computed, so that it can be cut.

    python -m benchmarks.gpu.roofline       prints predicted speeds

What a pass keeps a token and layer was counted from the tensors that autograd saves in Llama-3-8B's shape, on a
pretended device. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad
from peft_mux.scheduler.costs.profile import FUSED, Execution, analytic_profile, with_recomputed_inputs

PEAK_FLOPS = {"H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12}
"""Dense bf16 rates of the data sheets."""
COMPILE_S = 0.8
"""For each variant of a Triton kernel, one after another (0.6 to 0.9 s on one core here)."""
START_S = 25.0
"""Imports, the context of the device, the first products."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a contender keeps for its backward pass.

    Attributes:
        share: over the formula of the package (`layer_bytes`), for a token and layer.
        word_bytes: for a token and word of the vocabulary, with the gradients of logits.
    """

    share: float
    word_bytes: float


KEPT = {
    "floor": Kept(1.05, 0.0),
    "hf": Kept(1.46, 12.0),
    "packed": Kept(1.46, 0.1),
    # Measured on an H100: 42.6 KB a token and layer more than the floor, between steps of 1,945 and 7,444 tokens.
    "mux": Kept(1.29, 0.1),
    "mux_graphs": Kept(1.29, 0.1),
    "padded": Kept(1.33, 14.0),
}

ADAPTER_BYTES = 22
"""For a trained weight: fp32 weight, gradient, two moments, last good copy, and a copy in bf16."""
USABLE_SHARE = 0.9
"""Of a device's memory: the rest is the context, libraries, and what no allocation fits into."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The shape of a Llama with a quarter as many key-value heads as heads.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: decoder layers.
        intermediate_size: width inside the MLP.
        num_heads: attention heads.
        vocab_size: words of the head, which is not tied to the embedding.
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    vocab_size: int

    @property
    def key_value_size(self) -> int:
        """Channels of all key-value heads."""
        return self.hidden_size // self.num_heads * max(1, self.num_heads // 4)

    @property
    def layer_weights(self) -> int:
        """Weights of the linear layers of a decoder layer."""
        attention = 2 * self.hidden_size + 2 * self.key_value_size
        return self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def linear_weights(self) -> int:
        """Weights that a token is multiplied with, the head's included."""
        return self.num_layers * self.layer_weights + self.vocab_size * self.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes in bf16, the embedding included."""
        return 2 * (self.linear_weights + self.vocab_size * self.hidden_size)

    @property
    def rank_weights(self) -> int:
        """Trained weights of a task for each rank, with adapters in all linear layers."""
        inside = 2 * (self.hidden_size + self.key_value_size) + 4 * self.hidden_size
        return self.num_layers * (inside + 3 * (self.hidden_size + self.intermediate_size))

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token and layer in bf16, as `activation_bytes_per_token` of the package has them."""
        return 2 * (7 * self.hidden_size + 2 * self.key_value_size + 4 * self.intermediate_size)

    def of_layers(self, num_layers: int) -> Backbone:
        """Return the shape with another number of layers."""
        return replace(self, num_layers=num_layers)

    def flops_per_token(self, length: float, rank: float = 16) -> float:
        """Return what a step computes for a token; the formula is at the top of `train.py`.

        Args:
            length: mean square length of sequences over their mean length.
            rank: rank of the adapters.
        """
        lora = 6 * rank * self.rank_weights
        return 4 * self.linear_weights + lora + 7 * self.hidden_size * self.num_layers * length


LLAMA_8B = Backbone(4096, 32, 14336, 32, 128256)


def peak_bytes(backbone: Backbone, contender: str, num_tokens: int, trained_weights: int) -> float:
    """Return the bytes of the largest pass of a contender.

    Args:
        backbone: its shape.
        contender: name of the contender.
        num_tokens: tokens of the pass, padding included.
        trained_weights: trained weights that are there at once.
    """
    kept = KEPT[contender]
    per_token = kept.share * backbone.num_layers * backbone.layer_bytes + kept.word_bytes * backbone.vocab_size
    per_token += 8 * backbone.intermediate_size  # gradients of one layer
    return backbone.weight_bytes + ADAPTER_BYTES * trained_weights + num_tokens * per_token


def pass_tokens(backbone: Backbone, contender: str, trained_weights: int, device_bytes: int | None, most: int) -> int:
    """Return how many tokens of a pass a device has room for, in whole thousands (1,024), at least one of them.

    Args:
        backbone: its shape.
        contender: name of the contender.
        trained_weights: trained weights that are there at once.
        device_bytes: memory of the device; `None` for no limit.
        most: tokens that are enough.
    """
    tokens = most
    while device_bytes is not None and tokens > 1024:
        if peak_bytes(backbone, contender, tokens, trained_weights) <= USABLE_SHARE * device_bytes:
            break
        tokens -= 1024
    return tokens


def predicted_step_s(
    backbone: Backbone,
    tasks: list[tuple[list[int], int]],
    num_passes: int,
    execution: Execution,
    *,
    selective: bool = False,
) -> float:
    """Return the seconds of a step on an H100 by the cost model and data sheet.

    Args:
        backbone: its shape.
        tasks: lengths of the rows of each task, and its rank; 0 for none.
        num_passes: passes of the step.
        execution: how the software runs.
        selective: whether the run has `selective_recompute`.
    """
    d, i, k, layers = backbone.hidden_size, backbone.intermediate_size, backbone.key_value_size, backbone.num_layers
    shape = ModelShape(layers, d, i, d, k, backbone.vocab_size, backbone.weight_bytes, 2)
    widths = (2 * d, d + k, d + k, 2 * d, d + i, d + i, d + i)
    loads = [
        TaskLoad(
            name=str(number),
            lengths=tuple(lengths),
            num_targets=sum(lengths) - len(lengths),
            adapters=tuple(AdapterLoad(rank, width) for width in widths if rank),
            trainable_parameters=rank * backbone.rank_weights,
        )
        for number, (lengths, rank) in enumerate(tasks)
    ]
    profile = analytic_profile(DEVICES["H100-80GB"], shape, execution=execution)
    cost = CostModel(with_recomputed_inputs(profile) if selective else profile, shape)
    members = whole_pass(loads)
    passes_s = cost.passes_s(loads, [members[start::num_passes] for start in range(num_passes)])
    return float(passes_s.sum()) + cost.outside_s(loads)


def main() -> None:
    """Print tokens a second of 8 tasks on Llama-3-8B."""
    ways: Sequence[tuple[str, Execution, bool]] = (
        ("launched", FUSED, False),
        ("CUDA graph", replace(FUSED, graph_tokens=2**31), False),
        ("launched, selective_recompute", FUSED, True),
        ("CUDA graph, selective_recompute", replace(FUSED, graph_tokens=2**31), True),
    )
    for num_rows in (3, 6, 22):
        num_tokens = 8 * 46 * num_rows
        print(f"{num_tokens:,} tokens in rows of 46, 8 tasks of rank 16, one pass")
        for name, execution, selective in ways:
            step_s = predicted_step_s(LLAMA_8B, [([46] * num_rows, 16)] * 8, 1, execution, selective=selective)
            print(f"  {name}: {num_tokens / step_s:,.0f} tokens/s, {1e3 * step_s:.1f} ms")


if __name__ == "__main__":
    main()
