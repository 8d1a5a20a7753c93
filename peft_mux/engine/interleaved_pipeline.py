"""`InterleavedPipelineExecutor`: the hTasks that an action of the pipeline holds go through the stage in turns.

An action stands for one micro-batch of a bucket, that is of one or several hTasks (M section 3.4). Their forwards run
in turns, and so do their backwards, a group at a time: its inputs are taken, its passes run, its results are handed
on, all in the order of the action. So neighbours see the messages that they expect. Micro-batches that share long
sequences wait for each other, and run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from peft_mux.data.chains import is_chained
from peft_mux.engine.chains import pass_backward
from peft_mux.engine.interleaved_pass import Interleaving
from peft_mux.engine.pipeline import Flight, PipelineExecutor
from peft_mux.engine.pipeline_messages import Key
from peft_mux.scheduler.pipeline_template import Action


class InterleavedPipelineExecutor(PipelineExecutor):
    """A pipeline whose stages are sharded.

    Attributes:
        interleaving: of this stage's model; one after another where it is `None`.

    Example:
        >>> executor = InterleavedPipelineExecutor(stage_model, plan, processes, sync=sync)  # doctest: +SKIP
        >>> executor.interleaving = Interleaving(stage_model.model, turn_links, width=2)  # doctest: +SKIP
    """

    interleaving: Interleaving | None = None

    def _forward(self, action: Action) -> None:
        micro_batches = self._slots[action.bucket, action.micro_batch]
        if self.interleaving is None or is_chained(micro_batches):
            super()._forward(action)
            return
        target = self._messages.target(action)
        flights = self._flights[action.bucket, action.micro_batch, action.chunk] = []
        for group in self._number_groups(range(len(micro_batches)), action):
            inputs = {number: self._take(action, number) for number in group}
            for number, flight in zip(group, self._forwards(action, inputs), strict=True):
                if torch.is_grad_enabled():
                    flights.append(flight)
                if target is None:
                    self._add_losses(micro_batches[number], flight.passed.output)
                else:
                    self._put(action, number, target, flight.passed.output.detach().to(self.model.dtype))

    def _forwards(self, action: Action, inputs: dict[int, torch.Tensor | None]) -> list[Flight]:
        """Run a group forward.

        Args:
            action: of the group.
            inputs: `[T, D]` of each number; `None` at place 0.
        """
        assert self.interleaving is not None, "the caller has looked"
        place, numbers = self.model.layout.place(action.stage, action.chunk), list(inputs)
        chains = [(self._slots[action.bucket, action.micro_batch][number],) for number in numbers]

        def forward(index: int) -> Flight:
            hidden_TD = inputs[numbers[index]]
            if hidden_TD is not None:
                hidden_TD.requires_grad_()
            with self.precision():
                passed = self.model.forward(place, chains[index][0].to(self.device), hidden_TD)
            return Flight(hidden_TD, passed, [])

        return self.interleaving.run(chains, forward, held=self._at(place))

    def _backward(self, action: Action) -> None:
        slot = action.bucket, action.micro_batch
        if self.interleaving is None or is_chained(self._slots[slot]):
            super()._backward(action)
            return
        target = self._messages.target(action)
        flights = self._flights.pop((*slot, action.chunk))
        for group in self._number_groups(list(self._messages.numbers(action)), action):
            gradients = [self._take_gradient(action, number) for number in group]

            def backward(index: int, group: Sequence[int] = group, gradients: list[Any] = gradients) -> None:
                output, gradient = flights[group[index]].passed.output, gradients[index]
                pass_backward(output, None if gradient is None else gradient.to(output.dtype), [])

            self.interleaving.run([(self._slots[slot][number],) for number in group], backward)
            if target is None:
                continue
            for number in group:
                hidden_TD = flights[number].hidden_TD
                assert hidden_TD is not None, "only place 0 has no input, and nobody before it"
                back = torch.zeros_like(hidden_TD) if hidden_TD.grad is None else hidden_TD.grad
                self._put(action, number, target, back)

    def _take_gradient(self, action: Action, number: int) -> torch.Tensor | None:
        """Return the gradient of an output, and free the output: that its gradient has come shows that it was taken."""
        gradient, source = self._take(action, number), self._messages.source(action)
        if source is not None:
            key = Key(action.bucket, action.micro_batch, number, source[1])
            self.links.outgoing["F", source[0]].release(key)
        return gradient

    def _number_groups(self, numbers: Sequence[int], action: Action) -> list[list[int]]:
        """Divide the passes of an action into groups, in their order: whom neighbours wait for is fixed.

        On a GPU those of one task are never in one group, as in `Interleaving.groups`.
        """
        assert self.interleaving is not None, "the caller has looked"
        micro_batches, may_repeat = self._slots[action.bucket, action.micro_batch], self.device.type == "cpu"
        groups: list[list[int]] = []
        seen: set[str] = set()
        for number in numbers:
            names = set(micro_batches[number].task_names)
            if not groups or len(groups[-1]) == self.interleaving.width or not (may_repeat or seen.isdisjoint(names)):
                groups.append([])
                seen = set()
            groups[-1].append(number)
            seen |= names
        return groups

    def _at(self, place: int) -> AbstractContextManager[Any]:
        """Let the model consist of a place for a whole group: each pass would put back what others still need."""
        return self.model._at(place)
