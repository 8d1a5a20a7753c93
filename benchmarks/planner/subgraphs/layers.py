"""`layer_graph`: the operator graph of decoder layers under Megatron tensor parallelism, from operator latencies.

    forward    qkv, attention, output, all-reduce, gate_up, down, all-reduce
    backward   down, gate_up, all-reduce, output, attention, qkv, all-reduce

Column-parallel linear layers (qkv, gate_up) need an all-reduce in the backward pass, row-parallel ones (output, down)
in the forward pass. Every linear layer with adapters is three operators: the base operator and the adapters read the
same input, and Add sums them before the all-reduce, because the factors of the adapter are cut like the layer and
so its partial results travel with those of the base operator (M Figure 11). Norms, residuals and activation functions
belong to the operator that they follow. Gradients of adapter factors that all devices hold are summed once a step and
are not part of these graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph

LINEARS = ("qkv", "output", "gate_up", "down")
# Megatron-LM's cut: row-parallel layers add up results in the forward pass, column-parallel ones gradients of their
# input in the backward pass.
_ALL_REDUCE_AFTER = {"forward": ("output", "down"), "backward": ("gate_up", "qkv")}
_PASSES = {
    "forward": ("qkv", "attention", "output", "gate_up", "down"),
    "backward": ("down", "gate_up", "output", "attention", "qkv"),
}


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


@dataclass(frozen=True, slots=True)
class AdapterLatency:
    """What one task's adapter adds to one linear layer.

    Attributes:
        task: name of the task whose adapter it is.
        linear: the linear layer that it is attached to: "qkv", "output", "gate_up" or "down".
        latency_s: seconds of the adapter alone (LoRA: shrink and expand; in the backward pass also its weight
            gradients).
        add_s: seconds of adding its result to that of the base operator.
        utilization: share of the device that the adapter fills, 0 to 1 (u_a of M Eq. 3).
        type: the type of the adapter; adapters of different types are never fused with each other.
        launch_s: the part of `latency_s` that is launches, which one kernel for several adapters has once.
    """

    task: str
    linear: str
    latency_s: float
    add_s: float = 0.0
    utilization: float = 1.0
    type: str = "lora"
    launch_s: float = 0.0


def layer_graph(
    htask: str,
    latency: LayerLatency,
    adapters: Sequence[AdapterLatency] = (),
    *,
    tasks: Sequence[str],
    direction: str = "forward",
    num_layers: int = 1,
) -> OperatorGraph:
    """Build the operator graph of equal decoder layers, one after another.

    Args:
        htask: name of the hTask, unique within a bucket.
        latency: latencies of the base operators for all tokens of the hTask, in this direction.
        adapters: the adapters of all its tasks; a task may have none or several at a linear layer.
        tasks: names of the tasks that the hTask fuses.
        direction: the pass that the graph is of, "forward" or "backward".
        num_layers: number of layers, one after another.
    """
    operators: list[Operator] = []
    after: tuple[str, ...] = ()
    for number in range(num_layers):
        # The two directions run at different times, so their adapters must not share a site.
        layer = f"layer{number if direction == 'forward' else num_layers - 1 - number}"
        prefix = layer if direction == "forward" else f"{layer}.backward"
        for operator in _PASSES[direction]:
            chosen = [adapter for adapter in adapters if adapter.linear == operator]
            with_all_reduce = operator in _ALL_REDUCE_AFTER[direction] and latency.all_reduce_s > 0
            operators += _operator(f"{prefix}.{operator}", latency.of(operator), chosen, after)
            if with_all_reduce:
                name = f"{prefix}.{operator}.all_reduce"
                operators.append(Operator(name, "communication", latency.all_reduce_s, (operators[-1].name,)))
            after = (operators[-1].name,)
    return OperatorGraph(htask, tuple(tasks), tuple(operators))


def _operator(
    name: str, latency_s: float, adapters: Sequence[AdapterLatency], after: tuple[str, ...]
) -> list[Operator]:
    """Return a base operator, its adapters and their Add; the last one holds the result."""
    base = Operator(name, "compute", latency_s, after)
    if not adapters:
        return [base]
    attached = [
        Operator(
            f"{name}.{adapter.type}.{adapter.task}",
            "adapter",
            adapter.latency_s,
            after,
            utilization=adapter.utilization,
            site=f"{name}.{adapter.type}",
            launch_s=adapter.launch_s,
        )
        for adapter in adapters
    ]
    inputs = (name, *(operator.name for operator in attached))
    return [base, *attached, Operator(f"{name}.add", "compute", sum(adapter.add_s for adapter in adapters), inputs)]
