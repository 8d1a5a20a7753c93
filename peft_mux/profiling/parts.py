"""The measurements of a profile, part by part: which shapes are run, and what is taken off what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.kernels.cross_entropy.linear import Head, linear_cross_entropy
from peft_mux.modeling.adapters.kind import LayerGroup
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.profiling.stopwatch import Stopwatch
from peft_mux.profiling.subject import RANKS, Subject

_TOKENS = (16, 64, 256, 1024, 2048)
_LENGTHS = (16, 64, 128, 256, 512, 1024)
_ADAPTER_TOKENS = (16, 64, 256, 1024)
_TARGETS = (16, 64, 256, 1024, 2048)
_PARAMETERS = (10_000, 100_000, 1_000_000, 4_000_000)
_ATTENTION_TOKENS = 1024

Points = tuple[list[float], list[float]]
"""Counts (of tokens, targets or parameters) and the seconds that each takes."""


@dataclass(frozen=True, slots=True)
class SmallPass:
    """One whole pass, and what was in it.

    Attributes:
        rank: rank of all adapters in it.
        names: names of the tasks in it.
        lengths: number of tokens of each task's one sequence.
        seconds: how long forward and backward took.
    """

    rank: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    seconds: float


class PartTimes:
    """Times the parts of a subject.

    Args:
        subject: the layers that are run.
        stopwatch: times them, and keeps the budget of the whole measurement.
    """

    def __init__(self, subject: Subject, stopwatch: Stopwatch) -> None:
        """Keep what to run and what to time it with."""
        self.subject = subject
        self.stopwatch = stopwatch

    def layers(self) -> tuple[Points, Points, float]:
        """Return one layer's seconds over tokens, those of what surrounds the layers, and the part of the forward."""
        layer_s, embedding_s, counts, forward_s = [], [], [], 0.5
        for tokens in self._affordable(_TOKENS, part=0.25):
            whole, around, forward = self.stopwatch.measure_all(
                [
                    self.subject.layers_runner(tokens),
                    self.subject.layers_runner(tokens, has_layers=False),
                    self.subject.layers_runner(tokens, forward_only=True),
                ],
                share=0.2 / len(_TOKENS),
            )
            counts.append(float(tokens))
            embedding_s.append(around)
            # Measured in turns, so that what lies around the layers is taken off under the same noise.
            layer_s.append(max(whole - around, 0.0) / self.subject.num_layers)
            forward_s = forward / whole
        # Of the largest shape, in which noise weighs least, and within bounds that any noise must respect.
        return (counts, layer_s), (counts, embedding_s), min(max(forward_s, 0.1), 0.9)

    def attention(self) -> tuple[Points, float]:
        """Return seconds of one sequence's attention product over its length, and those of a further call."""
        counts, seconds = [], []
        for length in self._affordable(_LENGTHS, part=0.1):
            # As many tokens at every length: one short sequence alone would tell of the launch rather than of the
            # product.
            count = max(1, _ATTENTION_TOKENS // length)
            counts.append(float(length))
            seconds.append(self.stopwatch.measure(self._attention_runner([length] * count), share=0.01) / count)
        # In steps of 16, to which attention rounds lengths up: so each of these is a call of its own.
        mixed = [16 * number for number in range(1, 9)]
        together_s = self.stopwatch.measure(self._attention_runner(mixed), share=0.02)
        expected_s = float(np.interp(mixed, counts, seconds).sum())
        return (counts, seconds), max(together_s - expected_s, 0.0) / len(mixed)

    def adapters(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Any, Any]:
        """Return ranks, widths, tokens, and [ranks, widths, tokens] of seconds alone and of utilisation.

        Adapters of several tasks run together, and on a GPU also one alone: n of them that take as long as m
        one after another keep m / n of the device busy each.
        """
        subject, groups = self.subject, self._groups_of_one_layer()
        # So that the base products, many times longer, do not drown the adapters in noise.
        subject.drop_base_weights()
        widths = sorted({_width(group) for group in groups})
        shape = len(RANKS), len(widths), len(_ADAPTER_TOKENS)
        alone_s, utilization = np.zeros(shape), np.ones(shape)
        share = 0.2 / (len(RANKS) * len(_ADAPTER_TOKENS))
        tokens: list[float] = []
        for t, count in enumerate(self._affordable(_ADAPTER_TOKENS, part=0.25)):
            tokens.append(float(count))
            for r, rank in enumerate(RANKS):
                times = self._adapter_times(groups, rank, count, share)
                for w, width in enumerate(widths):
                    own = [number for number, group in enumerate(groups) if _width(group) == width]
                    linears = sum(len(groups[number].members) for number in own)
                    # A group is launched as one, so its time is shared out among its layers.
                    together, alone = (sum(times[kind][n] for n in own) / linears for kind in ("together", "alone"))
                    alone_s[r, w, t] = alone
                    if subject.device.type == "cuda":
                        utilization[r, w, t] = np.clip(
                            together / (subject.tasks_per_rank * max(alone, 1e-9)), 0.01, 1.0
                        )
        return RANKS, widths, tokens, alone_s[..., : len(tokens)], utilization[..., : len(tokens)]

    def head(self) -> Points:
        """Return seconds of output head and loss over targets."""
        module = self.subject.model.backbone.get_output_embeddings()
        if module is None:  # a classifier, whose heads are small
            return [1.0], [0.0]
        weight = getattr(module, "base_layer", module).weight.detach()
        counts, seconds = [], []
        for count in self._affordable(_TARGETS, part=0.1):
            hidden = torch.randn(count, weight.shape[1], device=weight.device, dtype=weight.dtype, requires_grad=True)
            targets = torch.zeros(count, dtype=torch.int64, device=weight.device)

            def run(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
                linear_cross_entropy(hidden, Head(weight, None, 1.0, None), targets).sum().backward()

            counts.append(float(count))
            seconds.append(self.stopwatch.measure(run, share=0.015))
        return counts, seconds

    def optimizer(self) -> Points:
        """Return seconds of one task's update over its parameters."""
        counts, seconds = [], []
        for count in self._affordable(_PARAMETERS, part=0.05):
            counts.append(float(count))
            seconds.append(self.stopwatch.measure(self._update_runner(count), share=0.01))
        return counts, seconds

    def small_pass(self) -> SmallPass:
        """Return seconds of a whole pass of two short sequences, in which overheads weigh most."""
        rank, lengths = RANKS[0], (16, 32)
        names = tuple(f"r{rank}_{number}" for number in range(len(lengths)))
        return SmallPass(
            rank, names, lengths, self.stopwatch.measure(self.subject.pass_runner(lengths, names), share=0.02)
        )

    def step_overhead_s(self) -> float:
        """Return seconds of collating a step of some tasks."""
        names = [name for name in self.subject.model.tasks[:4] for _ in range(8)]
        return self.stopwatch.measure(lambda: self.subject.batch([64] * len(names), names), share=0.01)

    def _affordable(self, points: Sequence[int], *, part: float) -> Any:
        """Yield points in ascending order; from the third on only those that should fit into a part of the budget.

        A point is taken to need what the one before it needed at the fewest repetitions, times the ratio of the two.
        """
        stopwatch, before, needed_s = self.stopwatch, 0, 0.0
        remaining_at_end_s = max(0.0, stopwatch.remaining_s - part * stopwatch.budget_s)
        for number, point in enumerate(points):
            # The two smallest always: a line through fewer points tells no slope.
            if number >= 2 and stopwatch.remaining_s - needed_s * point / before < remaining_at_end_s:
                return
            least_s = stopwatch.least_s
            yield point
            before, needed_s = point, stopwatch.least_s - least_s

    def _groups_of_one_layer(self) -> list[LayerGroup]:
        """Return the groups of the first layer, and of further layers those of a width that the first has not."""
        groups = self.subject.linear_groups()
        count = len(groups) // self.subject.num_layers
        known = {_width(group) for group in groups[:count]}
        others = {_width(group): group for group in reversed(groups[count:]) if _width(group) not in known}
        return groups[:count] + list(others.values())

    def _attention_runner(self, lengths: Sequence[int]) -> Callable[[], None]:
        """Return a function that runs one layer's attention product over sequences, forward and backward."""
        subject = self.subject
        batch = subject.batch(lengths, [subject.model.tasks[0]] * len(lengths))
        stream = AttentionStream(subject.model.stream, batch, subject.model.module_names)
        assert subject.attention_call is not None, "layers are run before attention"
        tensors = []
        for shape in subject.attention_call[1]:
            x = torch.randn(1, sum(lengths), shape[1], shape[3], device=subject.device, dtype=subject.dtype)
            tensors.append(x.transpose(1, 2).requires_grad_())

        def run() -> None:
            with subject.model.packed.multiplexing(batch):
                out = subject.run_attention(tensors[0], tensors[1], tensors[2], stream)
            torch.autograd.grad(out, tensors, torch.ones_like(out))

        return run

    def _adapter_times(
        self, groups: Sequence[LayerGroup], rank: int, tokens: int, share: float
    ) -> dict[str, list[float]]:
        """Return seconds of all groups, of one adapter of each linear layer: "together" with others, and "alone"."""
        subject = self.subject
        names = [f"r{rank}_{number}" for number in range(subject.tasks_per_rank)]
        together = self._seconds_of_groups(groups, names, tokens, share)
        if subject.device.type == "cpu":
            each = [seconds / len(names) for seconds in together]
            return {"together": each, "alone": each}
        return {"together": together, "alone": self._seconds_of_groups(groups, names[:1], tokens, share)}

    def _seconds_of_groups(
        self, groups: Sequence[LayerGroup], names: Sequence[str], tokens: int, share: float
    ) -> list[float]:
        """Return seconds of the adapters of each group, less what is there without adapters."""
        batch = self.subject.batch([tokens] * len(names), names)
        seconds = []
        for group in groups:
            layer: Any = group.members[0].module
            x = torch.randn(batch.num_tokens, layer.in_features, device=self.subject.device, dtype=self.subject.dtype)
            with_s, without_s = self.stopwatch.measure_all(
                [self._group_runner(group, batch, x), self._group_runner(group, batch, x, has_adapters=False)],
                share=share / len(groups),
            )
            seconds.append(max(with_s - without_s, 0.0))
        return seconds

    def _group_runner(
        self, group: LayerGroup, batch: Any, x_TD: torch.Tensor, *, has_adapters: bool = True
    ) -> Callable[[], None]:
        """Return a function that runs a group of linear layers, forward and backward."""
        model = self.subject.model
        x_TD = x_TD.requires_grad_()
        layers: list[Any] = [member.module for member in group.members]
        gradients = [x_TD.new_ones(len(x_TD), layer.out_features) for layer in layers]

        def run() -> None:
            for layer in layers:
                layer._disable_adapters = not has_adapters
            with model.packed.multiplexing(batch), self.subject.precision():
                torch.autograd.backward(group.outputs(x_TD), gradients, inputs=[x_TD])
            for layer in layers:
                layer._disable_adapters = False

        return run

    def _update_runner(self, count: int) -> Callable[[], None]:
        """Return a function that does to one page what a step of a task does."""
        page = nn.Parameter(torch.zeros(count, device=self.subject.device))
        page.grad = torch.full_like(page, 1e-3)
        copy = page.detach().clone()
        optimizer = torch.optim.AdamW([page], lr=1e-4)

        def run() -> None:
            nn.utils.get_total_norm([page.grad])  # type: ignore[list-item]
            torch._foreach_copy_([copy], [page.detach()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return run


def _width(group: LayerGroup) -> float:
    """Return input plus output features of a group's linear layers, in the mean."""
    layers: list[Any] = [member.module for member in group.members]
    return sum(layer.in_features + layer.out_features for layer in layers) / len(layers)
