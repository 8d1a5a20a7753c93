"""Which messages a template sends from stage to stage, in which order, and when each is known to have been taken.

All of it is read off the lists, which every process has; processes exchange nothing about messages.

A gradient is sent for the rows of tasks that have adapters further down, and for one row where there are none: that the
message comes also tells that the hidden states were taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.chains import is_chained
from peft_mux.kernels.lora.slices import Rows, num_rows_in, spread_rows, take_rows
from peft_mux.scheduler.pipeline.launch import next_virtual_stage
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot


class Key(NamedTuple):
    """What both ends of a channel call a message.

    Attributes:
        bucket: bucket of the micro-batch in the template.
        micro_batch: number of the micro-batch within the bucket.
        number: which of the passes that the template's micro-batch stands for.
        chunk: which of the receiver's chunks the message is for.
        step: step of the template.
    """

    bucket: int
    micro_batch: int
    number: int
    chunk: int
    step: int = 0

    @classmethod
    def of(cls, slot: Slot, number: int, chunk: int) -> Key:
        """Return the name of the message of a pass of a micro-batch of the template."""
        return cls(slot.bucket, slot.micro_batch, number, chunk, slot.step)


class StepEnd(NamedTuple):
    """A bucket's step in a template of several, at whose end stages tell one another losses and norms.

    Attributes:
        bucket: bucket of the template.
        step: step of the template.
    """

    bucket: int
    step: int


class StepEnds:
    """Where in a stage's list the steps of buckets end.

    Attributes:
        after: the end of a bucket's step, by its last backward.
        before: likewise, by the first forward of the bucket's next step.
        last: ends of which there is no next step, in the order of `after`.
    """

    def __init__(self, row: Sequence[Action]) -> None:
        """Read a list."""
        backwards = {StepEnd(one.bucket, one.step): one for one in row if one.kind == "B"}
        # In reverse, so that of all forwards of a step the first one stays.
        forwards = {StepEnd(one.bucket, one.step): one for one in reversed(row) if one.kind == "F"}
        self.after = {one: end for end, one in backwards.items()}
        self.before = {one: StepEnd(end.bucket, end.step - 1) for end, one in forwards.items() if end.step > 0}
        ended = set(self.before.values())
        self.last = [self.after[one] for one in row if one in self.after and self.after[one] not in ended]


class Expected(NamedTuple):
    """A message that a stage waits for.

    Attributes:
        key: name of the message.
        shape: its shape.
        dtype: its dtype; `None` for that of hidden states.
    """

    key: Key | StepEnd
    shape: torch.Size
    dtype: torch.dtype | None = None


GradientRows = Callable[[int, MuxBatch], tuple[Rows, ...] | None]
"""Of a virtual stage and a micro-batch, the rows of its input whose gradients go back (`StageModel.gradient_rows`)."""


def _all_rows(virtual_stage: int, batch: MuxBatch) -> None:
    """Let all gradients go back."""


FIGURES_DTYPE = torch.float64
"""Dtype of losses and squared norms on their way: sums must not depend on the cut by more than fp32 shows."""


class Messages:
    """The messages of a template, as one stage sees them.

    Args:
        template: the template that all stages follow.
        slots: passes of each micro-batch of the template.
        stage: number of the stage whose view this is.
        num_tasks: number of tasks that step with a bucket, for buckets whose stages tell one another losses and norms
            at the ends of their steps; none by default.
        gradient_rows: the rows whose gradients go back; all by default.
    """

    def __init__(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, Sequence[MuxBatch]],
        stage: int,
        num_tasks: Mapping[int, int] | None = None,
        gradient_rows: GradientRows = _all_rows,
    ) -> None:
        """Remember the steps."""
        self._template, self._slots, self._stage = template, slots, stage
        self._gradient_rows = gradient_rows
        self._num_tasks = num_tasks or {}

    def target(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) to which an action hands its result; `None` at the end of its way."""
        return self._neighbour(action.kind, action)

    def source(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) from which an action has its input; `None` where its way begins."""
        return self._neighbour("B" if action.kind == "F" else "F", action)

    def numbers(self, action: Action) -> Sequence[int]:
        """Return the passes of an action in the order in which it runs them: chains backward in reverse."""
        passes = self._slots[action.slot]
        forward = range(len(passes))
        # A later part adds to the gradients of the keys and values of an earlier one, which therefore runs last.
        return forward[::-1] if action.kind == "B" and is_chained(passes) else forward

    def keys(self, action: Action, chunk: int) -> list[Key]:
        """Return the messages of an action that go to a chunk of the receiver, in order."""
        return [Key.of(action.slot, number, chunk) for number in self.numbers(action)]

    def expected(self, kind: str, source: int, width: int) -> Iterator[Expected]:
        """Yield what another stage sends here, in its order: tensors `[T, D]`, and figures `[2, N]` of N tasks.

        Losses and squared norms of a bucket's step come down the pipeline behind its last gradient, and go up before
        the first hidden states of its next step.

        Args:
            kind: "F" for hidden states, "B" for gradients.
            source: number of the sending stage.
            width: D, width of the hidden states.
        """
        ends = StepEnds(self._template.actions[source]) if self._num_tasks else None
        goes_up, comes_down = kind == "F" and source == self._stage - 1, kind == "B" and source == self._stage + 1
        for action in self._template.actions[source]:
            if ends is not None and goes_up:
                yield from self._figures(ends.before.get(action))
            target = self.target(action)
            if action.kind == kind and target is not None and target[0] == self._stage:
                passes = self._slots[action.slot]
                for key in self.keys(action, target[1]):
                    yield Expected(key, torch.Size((self._num_rows(action, passes[key.number]), width)))
            if ends is not None and comes_down:
                yield from self._figures(ends.after.get(action))
        if ends is not None and goes_up:
            for end in ends.last:
                yield from self._figures(end)

    def sent(self, action: Action, number: int, result_TD: torch.Tensor) -> torch.Tensor:
        """Return what is sent of a result: of gradients `[R, D]`, the rows that go back, one at least.

        Args:
            action: the action whose result it is.
            number: which of its passes.
            result_TD: hidden states, or gradients of the action's input.
        """
        rows = self._rows_back(action, self._slots[action.slot][number])
        if rows is None:
            return result_TD
        return take_rows(result_TD, rows) if rows else result_TD.new_zeros(1, result_TD.shape[1])

    def received(self, action: Action, number: int, message: torch.Tensor) -> torch.Tensor:
        """Return an action's input `[T, D]` from what was sent of it; gradients of rows that were not sent are 0.

        Args:
            action: the action whose input it is.
            number: which of its passes.
            message: what has come.
        """
        if action.kind == "F":
            return message
        passed = self._slots[action.slot][number]
        rows = self._gradient_rows(self._virtual_stage(action) + 1, passed)
        if rows is None:
            return message
        return spread_rows(message[: num_rows_in(rows)], rows, passed.num_computed)

    def goes_back(self, action: Action, number: int) -> bool:
        """Whether a stage before the one of a forward needs gradients of its input.

        Args:
            action: a forward.
            number: which of its passes.
        """
        return self._gradient_rows(self._virtual_stage(action), self._slots[action.slot][number]) != ()

    def _num_rows(self, action: Action, passed: MuxBatch) -> int:
        """Return how many rows an action sends of what it makes of a pass."""
        rows = self._rows_back(action, passed)
        return passed.num_computed if rows is None else max(1, num_rows_in(rows))

    def _rows_back(self, action: Action, passed: MuxBatch) -> tuple[Rows, ...] | None:
        return self._gradient_rows(self._virtual_stage(action), passed) if action.kind == "B" else None

    def _virtual_stage(self, action: Action) -> int:
        return action.chunk * self._template.num_stages + action.stage

    def _figures(self, end: StepEnd | None) -> Iterator[Expected]:
        if end is not None and end.bucket in self._num_tasks:
            yield Expected(end, torch.Size((2, self._num_tasks[end.bucket])), FIGURES_DTYPE)

    def gradients_taken(self, other: int) -> dict[Key, list[Key]]:
        """Return, for hidden states that come from a stage, which gradients that stage has taken by then.

        A stage runs its list in order, so what it sends proves all that stands before it.

        Args:
            other: number of the sending stage.

        Returns:
            By the first message of each forward, the gradients that it proves and no earlier one did.
        """
        proven: dict[Key, list[Key]] = {}
        taken: list[Key] = []
        for action in self._template.actions[other]:
            source, target = self.source(action), self.target(action)
            if action.kind == "B" and source is not None and source[0] == self._stage:
                taken += self.keys(action, action.chunk)
            elif action.kind == "F" and target is not None and target[0] == self._stage:
                messages = self.keys(action, target[1])
                if messages and taken:
                    # At the first message, as it proves the most the earliest: gradients are freed as soon as they are
                    # known to be taken.
                    proven[messages[0]], taken = taken, []
        return proven

    def _neighbour(self, way: str, action: Action) -> tuple[int, int] | None:
        template = self._template
        return next_virtual_stage(way, action.stage, action.chunk, template.num_stages, template.num_chunks)
