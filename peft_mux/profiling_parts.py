"""The measurements of a profile, part by part: which shapes are run, and what is taken off what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.kernels.linear_cross_entropy import Head, linear_cross_entropy
from peft_mux.modeling.attention import AttentionStream
from peft_mux.modeling.layers import LinearGroup
from peft_mux.profiling_clock import Clock
from peft_mux.profiling_subject import RANKS, Subject

_TOKENS = (16, 64, 256, 1024, 2048)
_LENGTHS = (16, 64, 128, 256, 512, 1024)
_ADAPTER_TOKENS = (16, 64, 256, 1024)
_TARGETS = (16, 64, 256, 1024, 2048)
_PARAMETERS = (10_000, 100_000, 1_000_000, 4_000_000)
_ATTENTION_TOKENS = 1024

Points = tuple[list[float], list[float]]
"""Counts and seconds."""


@dataclass(frozen=True, slots=True)
class SmallPass:
    """One whole pass, and what was in it.

    Attributes:
        rank: of all adapters.
        names: of the tasks.
        lengths: of each task's one sequence.
        seconds: forward and backward.
    """

    rank: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    seconds: float


class PartTimes:
    """Runs the parts of a subject.

    Args:
        subject: the layers.
        clock: of the measurement.
    """

    def __init__(self, subject: Subject, clock: Clock) -> None:
        """Remember both."""
        self.subject = subject
        self.clock = clock

    def layers(self) -> tuple[Points, Points, float]:
        """Return one layer's seconds over tokens, those of what surrounds the layers, and the part of the forward."""
        layer_s, embedding_s, counts, forward_s = [], [], [], 0.5
        for tokens in self._affordable(_TOKENS, part=0.25):
            whole, around, forward = self.clock.measure_all(
                [
                    self.subject.layers_run(tokens),
                    self.subject.layers_run(tokens, has_layers=False),
                    self.subject.layers_run(tokens, forward_only=True),
                ],
                share=0.2 / len(_TOKENS),
            )
            counts.append(float(tokens))
            embedding_s.append(around)
            layer_s.append(max(whole - around, 0.0) / self.subject.num_layers)
            forward_s = forward / whole
        return (counts, layer_s), (counts, embedding_s), min(max(forward_s, 0.1), 0.9)

    def attention(self) -> tuple[Points, float]:
        """Return seconds of one sequence's attention product over its length, and those of a further call."""
        counts, seconds = [], []
        for length in self._affordable(_LENGTHS, part=0.1):
            count = max(1, _ATTENTION_TOKENS // length)
            counts.append(float(length))
            seconds.append(self.clock.measure(self._attention_run([length] * count), share=0.01) / count)
        mixed = [16 * number for number in range(1, 9)]
        together_s = self.clock.measure(self._attention_run(mixed), share=0.02)
        expected_s = float(np.interp(mixed, counts, seconds).sum())
        return (counts, seconds), max(together_s - expected_s, 0.0) / len(mixed)

    def adapters(self) -> tuple[Sequence[float], Sequence[float], Sequence[float], Any, Any]:
        """Return ranks, widths, tokens, and [ranks, widths, tokens] of seconds alone and of utilisation.

        Adapters of several tasks run together, and on a GPU also one alone: n of them that take as long as m
        one after another keep m / n of the device busy each.
        """
        subject, groups = self.subject, self._groups_of_one_layer()
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
            seconds.append(self.clock.measure(run, share=0.015))
        return counts, seconds

    def optimizer(self) -> Points:
        """Return seconds of one task's update over its parameters."""
        counts, seconds = [], []
        for count in self._affordable(_PARAMETERS, part=0.05):
            counts.append(float(count))
            seconds.append(self.clock.measure(self._update_run(count), share=0.01))
        return counts, seconds

    def small_pass(self) -> SmallPass:
        """Return seconds of a whole pass of two short sequences, in which overheads weigh most."""
        rank, lengths = RANKS[0], (16, 32)
        names = tuple(f"r{rank}_{number}" for number in range(len(lengths)))
        return SmallPass(rank, names, lengths, self.clock.measure(self.subject.pass_run(lengths, names), share=0.02))

    def step_overhead_s(self) -> float:
        """Return seconds of collating a step of some tasks."""
        names = [name for name in self.subject.model.tasks[:4] for _ in range(8)]
        return self.clock.measure(lambda: self.subject.batch([64] * len(names), names), share=0.01)

    # ---------------------------------------------------------------- internal

    def _affordable(self, points: Sequence[int], *, part: float) -> Any:
        """Yield points in ascending order; from the third on only those that should fit into a part of the budget.

        A point is taken to need what the one before it needed at the fewest repetitions, times the ratio of the two.
        """
        clock, before, needed_s = self.clock, 0, 0.0
        end_left_s = max(0.0, clock.left_s - part * clock.budget_s)
        for number, point in enumerate(points):
            if number >= 2 and clock.left_s - needed_s * point / before < end_left_s:
                return
            least_s = clock.least_s
            yield point
            before, needed_s = point, clock.least_s - least_s

    def _groups_of_one_layer(self) -> list[LinearGroup]:
        """Return the groups of the first layer, and of further layers those of a width that the first has not."""
        groups = self.subject.groups()
        count = len(groups) // self.subject.num_layers
        known = {_width(group) for group in groups[:count]}
        others = {_width(group): group for group in reversed(groups[count:]) if _width(group) not in known}
        return groups[:count] + list(others.values())

    def _attention_run(self, lengths: Sequence[int]) -> Callable[[], None]:
        subject = self.subject
        batch = subject.batch(lengths, [subject.model.tasks[0]] * len(lengths))
        stream = AttentionStream(subject.model.stream, batch, subject.model._module_names)
        assert subject.attention_call is not None, "layers are run before attention"
        tensors = []
        for shape in subject.attention_call[1]:
            x = torch.randn(1, sum(lengths), shape[1], shape[3], device=subject.device, dtype=subject.dtype)
            tensors.append(x.transpose(1, 2).requires_grad_())

        def run() -> None:
            with subject.model.multiplexing(batch):
                out = subject.attend(tensors[0], tensors[1], tensors[2], stream)
            torch.autograd.grad(out, tensors, torch.ones_like(out))

        return run

    def _adapter_times(
        self, groups: Sequence[LinearGroup], rank: int, tokens: int, share: float
    ) -> dict[str, list[float]]:
        """Return seconds of all groups, of one adapter of each linear layer: "together" with others, and "alone"."""
        subject = self.subject
        names = [f"r{rank}_{number}" for number in range(subject.tasks_per_rank)]
        together = self._groups_s(groups, names, tokens, share)
        if subject.device.type == "cpu":
            each = [seconds / len(names) for seconds in together]
            return {"together": each, "alone": each}
        return {"together": together, "alone": self._groups_s(groups, names[:1], tokens, share)}

    def _groups_s(self, groups: Sequence[LinearGroup], names: Sequence[str], tokens: int, share: float) -> list[float]:
        """Return seconds of the adapters of each group, less what is there without adapters."""
        batch = self.subject.batch([tokens] * len(names), names)
        seconds = []
        for group in groups:
            layer: Any = group.members[0].module
            x = torch.randn(batch.num_tokens, layer.in_features, device=self.subject.device, dtype=self.subject.dtype)
            with_s, without_s = self.clock.measure_all(
                [self._group_run(group, batch, x), self._group_run(group, batch, x, has_adapters=False)],
                share=share / len(groups),
            )
            seconds.append(max(with_s - without_s, 0.0))
        return seconds

    def _group_run(
        self, group: LinearGroup, batch: Any, x_TD: torch.Tensor, *, has_adapters: bool = True
    ) -> Callable[[], None]:
        model = self.subject.model
        x_TD = x_TD.requires_grad_()
        layers: list[Any] = [member.module for member in group.members]
        gradients = [x_TD.new_ones(len(x_TD), layer.out_features) for layer in layers]

        def run() -> None:
            for layer in layers:
                layer._disable_adapters = not has_adapters
            with model.multiplexing(batch), self.subject.precision():
                torch.autograd.backward(group.outputs(x_TD), gradients, inputs=[x_TD])
            for layer in layers:
                layer._disable_adapters = False

        return run

    def _update_run(self, count: int) -> Callable[[], None]:
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


def _width(group: LinearGroup) -> float:
    """Return input plus output features of a group's linear layers, in the mean."""
    layers: list[Any] = [member.module for member in group.members]
    return sum(layer.in_features + layer.out_features for layer in layers) / len(layers)
