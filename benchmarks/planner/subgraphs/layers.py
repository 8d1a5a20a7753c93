"""`layer_graph`: the operator graph of decoder layers under Megatron tensor parallelism, from operator latencies.

    forward    qkv, attention, output, all-reduce, gate_up, down, all-reduce
    backward   down, gate_up, all-reduce, output, attention, qkv, all-reduce

Column-parallel linear layers (qkv, gate_up) need an all-reduce in the backward pass, row-parallel ones (output, down)
in the forward pass. Every linear layer with an adapter is three operators: the base operator and the adapter read the
same input, and Add sums them before the all-reduce, because the factors of the adapter are cut like the layer and
so its partial results travel with those of the base operator (M Figure 11). Norms, residuals and activation functions
belong to the operator that they follow. Gradients of adapter factors that all devices hold are summed once a step and
are not part of these graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.planner.figures_bench import LLAMA_7B
from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.latency import all_reduce_s
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.plan import Link

# Megatron-LM's cut: row-parallel layers add up results in the forward pass, column-parallel ones gradients of their
# input in the backward pass.
_ALL_REDUCE_AFTER = {"forward": ("output", "down"), "backward": ("gate_up", "qkv")}
_PASSES = {
    "forward": ("qkv", "attention", "output", "gate_up", "down"),
    "backward": ("down", "gate_up", "output", "attention", "qkv"),
}


WIDTHS = {"qkv": 3 * 8192, "output": 8192, "gate_up": 2 * 15104, "down": 15104}
"""Widths of the adapters of a layer of a 7B Llama."""
SHARES = {"qkv": 3 / 12.06, "output": 1 / 12.06, "gate_up": 2 * 2.6875 / 12.06, "down": 2.6875 / 12.06}
"""Part of a layer's weights that each linear layer has."""


@dataclass(frozen=True, slots=True)
class LayerLatency:
    """Latencies of the base operators of one decoder layer on one device of the tensor-parallel group, in seconds.

    Attributes:
        qkv_s: seconds of query, key and value projections with the norm before them.
        attention_s: seconds of attention itself.
        output_s: seconds of the output projection.
        gate_up_s: seconds of gate and up projections with the norm before them and the activation function.
        down_s: seconds of the down projection.
        all_reduce_s: seconds of one all-reduce of the hidden states; 0 leaves the all-reduces out (one device).
    """

    qkv_s: float
    attention_s: float
    output_s: float
    gate_up_s: float
    down_s: float
    all_reduce_s: float

    def of(self, operator: str) -> float:
        """Return the latency of a base operator, in seconds.

        Args:
            operator: "qkv", "attention", "output", "gate_up" or "down".
        """
        return float(getattr(self, f"{operator}_s"))


class AdapterLatency(NamedTuple):
    """What an adapter adds to one linear layer.

    Attributes:
        linear: the linear layer that it is attached to: "qkv", "output", "gate_up" or "down".
        latency_s: seconds of the adapter alone (LoRA: shrink and expand; in the backward pass also its weight
            gradients).
        add_s: seconds of adding its result to that of the base operator.
    """

    linear: str
    latency_s: float
    add_s: float = 0.0


def layer_graph(
    htask: str,
    latency: LayerLatency,
    adapters: Sequence[AdapterLatency] = (),
    *,
    direction: str = "forward",
    num_layers: int = 1,
) -> OperatorGraph:
    """Build the operator graph of equal decoder layers, one after another.

    Args:
        htask: name of the hTask, unique within a bucket.
        latency: latencies of the base operators for all tokens of the hTask, in this direction.
        adapters: its adapters, at most one at a linear layer.
        direction: the pass that the graph is of, "forward" or "backward".
        num_layers: number of layers, one after another.
    """
    operators: list[Operator] = []
    after: tuple[str, ...] = ()
    for number in range(num_layers):
        layer = f"layer{number if direction == 'forward' else num_layers - 1 - number}"
        prefix = layer if direction == "forward" else f"{layer}.backward"
        for operator in _PASSES[direction]:
            adapter = next((adapter for adapter in adapters if adapter.linear == operator), None)
            operators += _operator(f"{prefix}.{operator}", latency.of(operator), adapter, after)
            if operator in _ALL_REDUCE_AFTER[direction] and latency.all_reduce_s > 0:
                name = f"{prefix}.{operator}.all_reduce"
                operators.append(Operator(name, "communication", latency.all_reduce_s, (operators[-1].name,)))
            after = (operators[-1].name,)
    return OperatorGraph(htask, tuple(operators))


def _operator(name: str, latency_s: float, adapter: AdapterLatency | None, after: tuple[str, ...]) -> list[Operator]:
    """Return a base operator, its adapter and their Add; the last one holds the result."""
    base = Operator(name, "compute", latency_s, after)
    if adapter is None:
        return [base]
    attached = Operator(f"{name}.lora", "adapter", adapter.latency_s, after)
    return [base, attached, Operator(f"{name}.add", "compute", adapter.add_s, (base.name, attached.name))]


class Llama7B:
    """Passes through layers of a 7B Llama on a tensor parallel group, by the data sheet of its devices.

    Args:
        sheet: name of the data sheet.
        degree: devices of the group.
        link: the link between two of them.
    """

    def __init__(self, sheet: str, degree: int, link: Link) -> None:
        self.profile = analytic_profile(parse_devices(sheet).device, LLAMA_7B, degree)
        self.degree, self.link = degree, link

    def latency(self, num_tokens: float, length: float) -> LayerLatency:
        """Return the latencies of the base operators in one direction; in PEFT the same in both (M §3.3).

        Args:
            num_tokens: tokens of the pass.
            length: tokens of each sequence.
        """
        layer_s = 0.5 * float(self.profile.layer(num_tokens)) / self.degree
        return LayerLatency(
            **{f"{name}_s": share * layer_s for name, share in SHARES.items()},
            attention_s=0.5 * num_tokens / length * float(self.profile.attention(length)) / self.degree,
            all_reduce_s=float(all_reduce_s(self.link, self.degree, num_tokens * LLAMA_7B.hidden_size * 2)),
        )

    def adapters(self, num_tokens: float, rank: int) -> list[AdapterLatency]:
        """Return the adapters at all linear layers, in one direction."""
        return [
            AdapterLatency(linear, 0.5 * float(self.profile.adapter(rank, width / self.degree, num_tokens)))
            for linear, width in WIDTHS.items()
        ]
