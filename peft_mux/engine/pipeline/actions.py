"""`StageTraffic`: the hidden states and gradients that one stage takes from its neighbours and puts to them."""

# MERGED: `StageActions`: how the passes of an action of a stage's list are computed, one after another.
# MERGED: Between its forward and its backward, a micro-batch holds its input, its output, its autograd graph and the
# MERGED: passes of
# MERGED: its adapters; so what is in flight, and the memory that it takes, is what the template's list says.
# MERGED: `InterleavedActions`: the hTasks that an action of the pipeline holds go through the stage in turns.
# MERGED: An action stands for one micro-batch of a bucket, that is of one or several hTasks (M section 3.4). Their
# MERGED: forwards run
# MERGED: in turns, and so do their backwards, a group at a time: its inputs are taken, its passes run, its results
# MERGED: are handed
# MERGED: on, all in the order of the action. So neighbours see the messages that they expect. Micro-batches that
# MERGED: share long
# MERGED: sequences wait for each other, and run one after another.

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch, is_chained
from peft_mux.engine.executor import pass_backward
from peft_mux.engine.pipeline.links import Key, Messages, PipelineLinks
from peft_mux.engine.pipeline.stage import StageModel, StagePass
from peft_mux.engine.tensor.interleaving import Interleaving
from peft_mux.engine.work import StepSums
from peft_mux.modeling.model import MuxOutput
from peft_mux.modeling.stream import Kept, KeyValueStore
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.passes import Direction, Stretch, neighbour_groups


class StageTraffic:
    """What goes in and out of a stage while it runs its list of a template.

    Args:
        links: the channels to the other stages of the pipeline.
        model: the stage, for its number and for the shape and dtype of hidden states.
        template: the list of each stage.
        slots: the passes of each micro-batch of the template.
        num_tasks: number of tasks that step with each bucket, in a window.

    Attributes:
        waited_s: seconds that `take` has waited since the caller set this to 0.
    """

    def __init__(
        self,
        links: PipelineLinks,
        model: StageModel,
        template: PipelineTemplate,
        slots: Mapping[Slot, list[MuxBatch]],
        num_tasks: Mapping[int, int] | None = None,
    ) -> None:
        """Post the first receives of all that neighbours will send until the next flush."""
        self._links, self._messages = links, Messages(template, slots, model.stage, num_tasks, model.gradient_rows)
        self.waited_s = 0.0
        for (kind, source), incoming in links.incoming.items():
            # Receives in the order of the sender's list, which the template tells; on a channel messages have no names.
            incoming.expect(self._messages.expected(kind, source, model.hidden_size), model.dtype)
        self._proven_taken = {source: self._messages.gradients_taken(source) for _, source in links.incoming}

    def goes_on(self, action: Action) -> bool:
        """Whether the results of an action are put to another virtual stage."""
        return self._messages.target(action) is not None

    def numbers(self, action: Action) -> Sequence[int]:
        """Return the numbers of the passes of an action, in the order in which it has them."""
        return self._messages.numbers(action)

    def goes_back(self, action: Action, number: int) -> bool:
        """Whether a stage before this one needs gradients of the input of a forward; see `Messages.goes_back`."""
        return self._messages.goes_back(action, number)

    def put(self, action: Action, number: int, tensor: torch.Tensor) -> None:
        """Begin to send a result to the virtual stage that goes on with it.

        Args:
            action: the action whose result it is, one that `goes_on`.
            number: which of its passes.
            tensor: hidden states, or their gradient, `[T, D]`.
        """
        target = self._messages.target(action)
        assert target is not None, "the caller has asked whether it goes on"
        sent = self._messages.sent(action, number, tensor)
        self._links.outgoing[action.kind, target[0]].put(Key.of(action.slot, number, target[1]), sent)

    def take(self, action: Action, number: int) -> torch.Tensor | None:
        """Return an action's input, `[T, D]`; `None` at virtual stage 0 forward and at the last one backward.

        Args:
            action: the action that is to run.
            number: which of its passes.

        Raises:
            ProcessError: if the other stage fails, dies, or does not answer within the time limit.
        """
        source = self._messages.source(action)
        if source is None:
            return None
        key = Key.of(action.slot, number, action.chunk)
        began = time.perf_counter()
        tensor = self._links.incoming[action.kind, source[0]].take(key)
        self.waited_s += time.perf_counter() - began
        if action.kind == "F":
            # gloo does not tell when a send was taken. That these hidden states have come proves that their sender took
            # the gradients before them in its list, so these can be freed without blocking.
            for taken in self._proven_taken[source[0]].pop(key, ()):
                self._links.outgoing["B", source[0]].release(taken)
        else:
            # The gradient of an output has come, so the output itself was taken: waiting for its send returns.
            self._links.outgoing["F", source[0]].release(Key.of(action.slot, number, source[1]))
        return self._messages.received(action, number, tensor)

    def flush(self) -> None:
        """Wait until all that was put is taken.

        At the end of a list alone: within it, a wait for a send could wait for a stage that waits for this one.
        """
        self._links.flush()


@dataclass(frozen=True, slots=True)
class Flight:
    """A micro-batch between its forward and its backward at one virtual stage.

    Attributes:
        hidden_TD: `[T, D]` input, whose gradient goes back to the stage before; `None` at virtual stage 0.
        passed: what the forward gave, with its autograd graph.
        kept: keys and values that later parts of the micro-batch's sequences read.
    """

    hidden_TD: torch.Tensor | None
    passed: StagePass
    kept: list[Kept]


class StageActions:
    """Computes the actions of a stage, and holds what is between its forward and its backward.

    Args:
        model: the stage of this process, on its device.
        bf16: run under bfloat16 autocast.

    Attributes:
        slots: the passes of each micro-batch of the template that is run.
        sums: takes what the passes of the present action give.
    """

    def __init__(self, model: StageModel, *, bf16: bool = False) -> None:
        """Hold nothing in flight."""
        self.model, self.bf16 = model, bf16
        self.device = model.model.device
        self.slots: Mapping[Slot, list[MuxBatch]] = {}
        self.sums = StepSums(model.model, (), self.device)
        self._flights: dict[tuple[Slot, int], list[Flight]] = {}

    def follow(self, plan: Plan) -> None:
        """Compute by another plan from the next step on."""

    def begin(self, slots: Mapping[Slot, list[MuxBatch]], traffic: StageTraffic) -> None:
        """Let actions be of other passes from now on.

        Args:
            slots: the passes of each micro-batch of the template.
            traffic: takes what neighbours send, and puts to them what they wait for.
        """
        self.slots, self._traffic = slots, traffic
        self.drop()  # a step that failed may have left something

    def drop(self) -> None:
        """Forget what is in flight: the graphs would outlive an error."""
        self._flights.clear()
        self._key_values.clear()

    @property
    def num_in_flight(self) -> int:
        """Number of micro-batches between a forward and its backward, each virtual stage for itself."""
        return len(self._flights)

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def forward(self, action: Action) -> None:
        """Run the passes of an action forward, each handed on as soon as it is done."""
        flights = self._flights[action.slot, action.chunk] = []
        for number, micro_batch in enumerate(self.slots[action.slot]):
            hidden_TD = self._input(action, number)
            with self._key_values.recording() as kept, self.precision():
                passed = self.model.forward(self._virtual_stage(action), micro_batch.to(self.device), hidden_TD)
            if torch.is_grad_enabled():
                flights.append(Flight(hidden_TD, passed, kept))
            self._hand_on(action, number, passed)

    def backward(self, action: Action) -> None:
        """Run the passes of an action backward."""
        flights = self._flights.pop((action.slot, action.chunk))
        for number in self._traffic.numbers(action):
            flight = flights[number]
            output, gradient = flight.passed.output, self._traffic.take(action, number)
            gradient = torch.ones_like(output) if gradient is None else gradient.to(output.dtype)
            self._pass_backward(action, flight, gradient)
            self._key_values.release(flight.kept)
            self._hand_back(action, number, flight)

    def _input(self, action: Action, number: int) -> torch.Tensor | None:
        """Take the hidden states that a pass reads; `None` at virtual stage 0."""
        hidden_TD = self._traffic.take(action, number)
        if hidden_TD is None:
            return None
        # A leaf: its gradient is what goes back to the stage before.
        return hidden_TD.requires_grad_(self._goes_back(action, number))

    def _goes_back(self, action: Action, number: int) -> bool:
        """Whether a pass is run backward down to its input."""
        return self._traffic.goes_back(action, number)

    def _pass_backward(self, action: Action, flight: Flight, gradient: torch.Tensor) -> None:
        """Run the backward of one pass of an action."""
        pass_backward(flight.passed.output, gradient, flight.kept)

    def _hand_on(self, action: Action, number: int, passed: StagePass) -> None:
        """Put what a forward gave to the stage that goes on with it; losses of the last one are added up."""
        if self._traffic.goes_on(action):
            # Both ends know one dtype, that of the residual stream; under autocast a layer may return another one.
            self._traffic.put(action, number, passed.output.detach().to(self.model.dtype))
        else:
            tasks = self.slots[action.slot][number].task_names
            self.sums.add(MuxOutput(passed.output.detach(), tasks, passed.statistics))

    def _hand_back(self, action: Action, number: int, flight: Flight) -> None:
        """Put the gradient of a pass's input to the stage before; nothing at virtual stage 0."""
        if self._traffic.goes_on(action):
            assert flight.hidden_TD is not None, "only virtual stage 0 has no input, and nobody before it"
            back = flight.hidden_TD.grad
            # Zeros rather than nothing: the stage before has posted a receive, whether or not any task wants the
            # gradient.
            self._traffic.put(action, number, torch.zeros_like(flight.hidden_TD) if back is None else back)

    def _virtual_stage(self, action: Action) -> int:
        return self.model.layout.virtual_stage(action.stage, action.chunk)

    @property
    def _key_values(self) -> KeyValueStore:
        return self.model.model.stream.key_values


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
