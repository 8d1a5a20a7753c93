"""`InterleavedPipelineExecutor`: the hTasks that an action of the pipeline holds go through the stage in turns.

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
from peft_mux.engine.pipeline.executor import Flight, PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.tensor.interleaving import Interleaving
from peft_mux.scheduler.pipeline.template import Action
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.groups import neighbour_groups
from peft_mux.scheduler.subgraphs.passes import Direction, Stretch


class InterleavedPipelineExecutor(PipelineExecutor):
    """A pipeline whose stages run the passes of an action in turns, as under tensor parallelism they wait for sums.

    Args:
        model: the stage of this process, on its device, in training mode.
        plan: the plan to follow.
        processes: the processes of the run; `torch.distributed` is initialised where there are several stages.
        interleaving: runs the passes of this stage's model in turns; by default they run one after another.
        **options: further options of `PipelineExecutor`.

    Attributes:
        interleaving: runs the passes of this stage's model in turns; `None` where they run one after another.

    Example:
        >>> interleaving = Interleaving(stage_model.model, turn_links, width=2)  # doctest: +SKIP
        >>> executor = InterleavedPipelineExecutor(
        ...     stage_model, plan, processes, sync=sync, interleaving=interleaving
        ... )  # doctest: +SKIP
    """

    def __init__(
        self,
        model: StageModel,
        plan: Plan | PipelinePlan,
        processes: Processes,
        *,
        interleaving: Interleaving | None = None,
        **options: Any,
    ) -> None:
        """Open the channels."""
        self.interleaving = interleaving  # first, as it follows the plan too
        super().__init__(model, plan, processes, **options)

    def follow(self, plan: Plan | PipelinePlan) -> None:
        """Follow another plan from the next step on, its turns too.

        Args:
            plan: the plan of the run, or the part of it that a pipeline follows, which tells nothing of turns.

        Raises:
            PlanError: if its template is of another pipeline than the model was cut for.
        """
        super().follow(plan)
        if self.interleaving is not None and isinstance(plan, Plan):
            self.interleaving.follow(plan)

    @property
    def _in_turns(self) -> Interleaving | None:
        """What runs passes in turns; `None` where the plan has them one after another."""
        return None if self.interleaving is None or self.interleaving.turns.width == 1 else self.interleaving

    def _forward(self, action: Action) -> None:
        micro_batches = self._slots[action.slot]
        if self._in_turns is None or is_chained(micro_batches):
            super()._forward(action)
            return
        flights = self._flights[action.slot, action.chunk] = []
        for group in self._number_groups(range(len(micro_batches)), action):
            # All inputs before the passes run in turns: a pass that waited for a neighbour in its turn would hold the
            # baton.
            inputs = {number: self._traffic.take(action, number) for number in group}
            for number, flight in zip(group, self._forwards(action, inputs), strict=True):
                if torch.is_grad_enabled():
                    flights.append(flight)
                # In the order of the action, not in that in which turns ended: the receiver has posted its receives so.
                self._hand_on(action, number, flight.passed)

    def _forwards(self, action: Action, inputs: dict[int, torch.Tensor | None]) -> list[Flight]:
        """Run a group forward.

        Args:
            action: the action that the passes of the group belong to.
            inputs: `[T, D]` hidden states by number of the pass; `None` at virtual stage 0.
        """
        assert self.interleaving is not None, "the caller has looked"
        virtual_stage = self.model.layout.virtual_stage(action.stage, action.chunk)
        numbers = list(inputs)
        chains = [(self._slots[action.slot][number],) for number in numbers]

        def forward(index: int) -> Flight:
            hidden_TD = inputs[numbers[index]]
            if hidden_TD is not None:
                hidden_TD.requires_grad_()
            with self.precision():
                passed = self.model.forward(virtual_stage, chains[index][0].to(self.device), hidden_TD)
            return Flight(hidden_TD, passed, [])

        # For the whole group at once: each pass by itself would put modules back that the others still need.
        stretch = self._stretch(virtual_stage, "forward")
        return self.interleaving.run(chains, forward, held=self.model.only(virtual_stage), stretch=stretch)

    def _stretch(self, virtual_stage: int, direction: Direction) -> Stretch:
        """Return the part of the model that the passes of an action go through."""
        assert self.interleaving is not None, "the caller has looked"
        layout = self.model.layout
        return Stretch(
            layout.layer_counts[virtual_stage],
            is_first=virtual_stage == 0,
            is_last=virtual_stage == layout.last_virtual_stage,
            recomputes=self.interleaving.recomputes,
            direction=direction,
        )

    def _backward(self, action: Action) -> None:
        slot = action.slot
        if self.interleaving is None or self._in_turns is None or is_chained(self._slots[slot]):
            super()._backward(action)
            return
        stretch = self._stretch(self.model.layout.virtual_stage(action.stage, action.chunk), "backward")
        flights = self._flights.pop((slot, action.chunk))
        for group in self._number_groups(list(self._traffic.numbers(action)), action):
            gradients = [self._traffic.take(action, number) for number in group]

            def backward(index: int, group: Sequence[int] = group, gradients: list[Any] = gradients) -> None:
                output, gradient = flights[group[index]].passed.output, gradients[index]
                pass_backward(output, None if gradient is None else gradient.to(output.dtype), [])

            chains = [(self._slots[slot][number],) for number in group]
            self.interleaving.run(chains, backward, stretch=stretch)
            for number in group:
                self._hand_back(action, number, flights[number])

    def _number_groups(self, numbers: Sequence[int], action: Action) -> list[list[int]]:
        """Divide the passes of an action into groups, in their order: what neighbours wait for is fixed.

        Args:
            numbers: numbers of the passes, in the order in which they run.
            action: the action that they belong to.
        """
        assert self.interleaving is not None, "the caller has looked"
        turns, micro_batches = self.interleaving.turns, self._slots[action.slot]
        passes = [turns.grouped((micro_batches[number],)) for number in numbers]
        found = neighbour_groups(passes, turns.width, may_repeat=self.interleaving.may_repeat)
        return [[numbers[index] for index in group] for group in found]
