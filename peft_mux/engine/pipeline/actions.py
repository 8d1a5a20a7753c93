"""`StageActions`: how the passes of an action of a stage's list are computed, one after another.

Between its forward and its backward, a micro-batch holds its input, its output, its autograd graph and the passes of
its adapters; so what is in flight, and the memory that it takes, is what the template's list says.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.chain_pass import pass_backward
from peft_mux.engine.pipeline.stage import StageModel, StagePass
from peft_mux.engine.pipeline.traffic import StageTraffic
from peft_mux.engine.step_sums import StepSums
from peft_mux.modeling.key_values import Kept, KeyValueStore
from peft_mux.modeling.packed_forward import MuxOutput
from peft_mux.scheduler.pipeline.template import Action, Slot
from peft_mux.scheduler.plan import Plan


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
