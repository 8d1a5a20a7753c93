"""`InterleavedActions`: the hTasks that an action of the pipeline holds go through the stage in turns.

An action stands for one micro-batch of a bucket, that is of one or several hTasks (M section 3.4). Their forwards run
in turns, and so do their backwards, a group at a time: its inputs are taken, its passes run, its results are handed
on, all in the order of the action. So neighbours see the messages that they expect. Micro-batches that share long
sequences wait for each other, and run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from peft_mux.data.chains import is_chained
from peft_mux.engine.chain_pass import pass_backward
from peft_mux.engine.pipeline.actions import Flight, StageActions
from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.engine.tensor.interleaving import Interleaving
from peft_mux.scheduler.pipeline.template import Action
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.groups import neighbour_groups
from peft_mux.scheduler.subgraphs.passes import Direction, Stretch


class InterleavedActions(StageActions):
    """Actions whose passes run in turns, as under tensor parallelism they wait for sums.

    Args:
        model: the stage of this process, on its device.
        interleaving: runs the passes of this stage's model in turns, as many as the plan says.
        bf16: run under bfloat16 autocast.

    Attributes:
        interleaving: runs the passes of this stage's model in turns.

    Example:
        >>> interleaving = Interleaving(stage_model.model, turn_links, width=2)  # doctest: +SKIP
        >>> actions = InterleavedActions(stage_model, interleaving)  # doctest: +SKIP
        >>> executor = PipelineExecutor(stage_model, plan, processes, actions=actions)  # doctest: +SKIP
    """

    def __init__(self, model: StageModel, interleaving: Interleaving, *, bf16: bool = False) -> None:
        """Hold nothing in flight."""
        super().__init__(model, bf16=bf16)
        self.interleaving = interleaving

    def follow(self, plan: Plan) -> None:
        """Take the turns of another plan from the next step on."""
        self.interleaving.follow(plan)

    def forward(self, action: Action) -> None:
        """Run the passes of an action forward, a group in turns at a time."""
        micro_batches = self.slots[action.slot]
        if self._is_in_order(action):
            super().forward(action)
            return
        flights = self._flights[action.slot, action.chunk] = []
        for group in self._number_groups(range(len(micro_batches)), action):
            # All inputs before the passes run in turns: a pass that waited for a neighbour in its turn would hold the
            # baton.
            inputs = {number: self._input(action, number) for number in group}
            for number, flight in zip(group, self._forwards(action, inputs), strict=True):
                if torch.is_grad_enabled():
                    flights.append(flight)
                # In the order of the action, not in that in which turns ended: the receiver has posted its receives so.
                self._hand_on(action, number, flight.passed)

    def backward(self, action: Action) -> None:
        """Run the passes of an action backward, a group in turns at a time."""
        slot = action.slot
        if self._is_in_order(action):
            super().backward(action)
            return
        stretch = self._stretch(self._virtual_stage(action), "backward")
        flights = self._flights.pop((slot, action.chunk))
        for group in self._number_groups(list(self._traffic.numbers(action)), action):
            gradients = [self._traffic.take(action, number) for number in group]

            def backward(index: int, group: Sequence[int] = group, gradients: list[Any] = gradients) -> None:
                output, gradient = flights[group[index]].passed.output, gradients[index]
                pass_backward(output, None if gradient is None else gradient.to(output.dtype), [])

            chains = [(self.slots[slot][number],) for number in group]
            self.interleaving.run(chains, backward, stretch=stretch)
            for number in group:
                self._hand_back(action, number, flights[number])

    def _is_in_order(self, action: Action) -> bool:
        """Whether the passes of an action run one after another: by the plan, or as parts of long sequences."""
        return self.interleaving.turns.width == 1 or is_chained(self.slots[action.slot])

    def _forwards(self, action: Action, inputs: dict[int, torch.Tensor | None]) -> list[Flight]:
        """Run a group forward.

        Args:
            action: the action that the passes of the group belong to.
            inputs: `[T, D]` hidden states by number of the pass; `None` at virtual stage 0.
        """
        virtual_stage, numbers = self._virtual_stage(action), list(inputs)
        chains = [(self.slots[action.slot][number],) for number in numbers]

        def forward(index: int) -> Flight:
            hidden_TD = inputs[numbers[index]]
            with self.precision():
                passed = self.model.forward(virtual_stage, chains[index][0].to(self.device), hidden_TD)
            return Flight(hidden_TD, passed, [])

        # For the whole group at once: each pass by itself would put modules back that the others still need.
        stretch = self._stretch(virtual_stage, "forward")
        return self.interleaving.run(chains, forward, held=self.model.only(virtual_stage), stretch=stretch)

    def _stretch(self, virtual_stage: int, direction: Direction) -> Stretch:
        """Return the part of the model that the passes of an action go through."""
        layout = self.model.layout
        return Stretch(
            layout.layer_counts[virtual_stage],
            is_first=virtual_stage == 0,
            is_last=virtual_stage == layout.last_virtual_stage,
            recomputes=self.interleaving.recomputes,
            direction=direction,
        )

    def _number_groups(self, numbers: Sequence[int], action: Action) -> list[list[int]]:
        """Divide the passes of an action into groups, in their order: what neighbours wait for is fixed.

        Args:
            numbers: numbers of the passes, in the order in which they run.
            action: the action that they belong to.
        """
        turns, micro_batches = self.interleaving.turns, self.slots[action.slot]
        passes = [turns.grouped((micro_batches[number],)) for number in numbers]
        found = neighbour_groups(passes, turns.width, may_repeat=self.interleaving.may_repeat)
        return [[numbers[index] for index in group] for group in found]
