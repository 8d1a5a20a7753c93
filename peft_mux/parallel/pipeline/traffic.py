"""`Traffic`: the messages between one stage and its neighbours while it runs its list of a template.

Every process has all lists, so destination and order of messages are known without communication. Gradients are sent
for the rows of tasks that have adapters in earlier stages, or for one row if there are none: the message also confirms
that the hidden states were received.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch, is_chained
from peft_mux.kernels.lora.reference import Rows, num_rows_in, spread_rows, take_rows
from peft_mux.parallel.pipeline.links import Expected, PipelineLinks
from peft_mux.parallel.pipeline.stage import StageModel
from peft_mux.scheduler.pipeline.list_scheduler import next_virtual_stage
from peft_mux.scheduler.plan import Action, PipelineTemplate, Slot

FIGURES_DTYPE = torch.float64
"""Dtype of losses and squared norms in messages, so that the layout changes sums by less than fp32 precision."""


class Key(NamedTuple):
    """Name of the message of one pass, the same at both ends of a channel.

    Attributes:
        slot: the micro-batch of the template.
        number: index of the pass within the template's micro-batch.
        chunk: which of the receiver's chunks the message is for.
    """

    slot: Slot
    number: int
    chunk: int


class StepEnd(NamedTuple):
    """The end of a bucket's step in a template of several, at which stages exchange losses and norms.

    Attributes:
        bucket: bucket of the template.
        step: step of the template.
    """

    bucket: int
    step: int


class StepEnds(NamedTuple):
    """The actions of a stage's list at which the steps of buckets end.

    Attributes:
        after: the end of a bucket's step, by its last backward.
        before: the same, by the first forward of the bucket's next step.
        last: ends of last steps, in the order of `after`.
    """

    after: dict[Action, StepEnd]
    before: dict[Action, StepEnd]
    last: list[StepEnd]

    @classmethod
    def of(cls, row: Sequence[Action]) -> StepEnds:
        """Read the list of a stage."""
        backwards = {StepEnd(action.bucket, action.step): action for action in row if action.kind == "B"}
        # In reverse, so that the first forward of a step is kept.
        forwards = {StepEnd(action.bucket, action.step): action for action in reversed(row) if action.kind == "F"}
        after = {action: end for end, action in backwards.items()}
        before = {action: StepEnd(end.bucket, end.step - 1) for end, action in forwards.items() if end.step > 0}
        ended = set(before.values())
        return cls(after, before, [after[action] for action in row if action in after and after[action] not in ended])


class Traffic:
    """Receives the inputs of a stage's actions from its neighbours, and sends them the results.

    Args:
        links: the channels to the other stages of the pipeline.
        stage: the stage of this process.
        template: the list of each stage.
        slots: the passes of each micro-batch of the template.
        num_tasks: in a window of steps, the number of tasks that step with each bucket.

    Attributes:
        slots: the passes of each micro-batch of the template.
        waited_s: seconds that `take` has waited since the caller set this to 0.
    """

    def __init__(
        self,
        links: PipelineLinks,
        stage: StageModel,
        template: PipelineTemplate,
        slots: Mapping[Slot, Sequence[MuxBatch]],
        num_tasks: Mapping[int, int] | None = None,
    ) -> None:
        """Tell each channel the messages until the next flush."""
        self.slots = slots
        self._links, self._stage, self._template = links, stage, template
        self._num_tasks = num_tasks or {}
        self.waited_s = 0.0
        for (kind, source), incoming in links.incoming.items():
            incoming.expect(self.expected(kind, source))
        self._proven_taken = {source: self.gradients_taken(source) for _, source in links.incoming}

    # ------------------------------------------------------------------ the messages of a template

    def target(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) that an action's result is sent to; `None` at the last virtual stage."""
        template = self._template
        return next_virtual_stage(action.kind, action.stage, action.chunk, template.num_stages, template.num_chunks)

    def source(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) that an action's input comes from; `None` at the first virtual stage."""
        template, way = self._template, "B" if action.kind == "F" else "F"
        return next_virtual_stage(way, action.stage, action.chunk, template.num_stages, template.num_chunks)

    def numbers(self, action: Action) -> Sequence[int]:
        """Return the passes of an action in the order in which it runs them: chains backward in reverse."""
        passes = self.slots[action.slot]
        forward = range(len(passes))
        # A later part adds to the gradients of the keys and values of an earlier one, which therefore runs last.
        return forward[::-1] if action.kind == "B" and is_chained(passes) else forward

    def expected(self, kind: str, source: int) -> Iterator[Expected]:
        """Yield the messages from another stage in order: tensors `[T, D]`, and figures `[2, N]` of N tasks.

        Losses and squared norms of a bucket's step are sent down the pipeline after its last gradient, and up before
        the first hidden states of its next step.

        Args:
            kind: "F" for hidden states, "B" for gradients.
            source: number of the sending stage.
        """
        here, row = self._stage.stage, self._template.actions[source]
        ends = StepEnds.of(row if self._num_tasks else ())
        figures_before = ends.before if kind == "F" and source == here - 1 else {}
        figures_after = ends.after if kind == "B" and source == here + 1 else {}
        last = ends.last if kind == "F" and source == here - 1 else []
        for action in row:
            yield from self._figures(figures_before.get(action))
            target = self.target(action)
            if action.kind == kind and target is not None and target[0] == here:
                for number in self.numbers(action):
                    rows, passed = self._sent_rows(action, number), self.slots[action.slot][number]
                    num_rows = passed.num_computed if rows is None else max(1, num_rows_in(rows))
                    shape = torch.Size((num_rows, self._stage.hidden_size))
                    yield Expected(Key(action.slot, number, target[1]), shape, self._stage.dtype)
            yield from self._figures(figures_after.get(action))
        for end in last:
            yield from self._figures(end)

    def _figures(self, end: StepEnd | None) -> Iterator[Expected]:
        if end is not None and end.bucket in self._num_tasks:
            yield Expected(end, torch.Size((2, self._num_tasks[end.bucket])), FIGURES_DTYPE)

    def gradients_taken(self, other: int) -> dict[Key, list[Key]]:
        """Return, for hidden states from a stage, the gradients that the stage has received before sending them.

        A stage runs its list in order, so a message confirms all earlier receives of its sender.

        Args:
            other: number of the sending stage.

        Returns:
            By the first message of each forward, the gradients that it confirms and no earlier message did.
        """
        proven: dict[Key, list[Key]] = {}
        taken: list[Key] = []
        here = self._stage.stage
        for action in self._template.actions[other]:
            source, target, numbers = self.source(action), self.target(action), self.numbers(action)
            if action.kind == "B" and source is not None and source[0] == here:
                taken += [Key(action.slot, number, action.chunk) for number in numbers]
            elif action.kind == "F" and target is not None and target[0] == here and len(numbers) and taken:
                # At the first message, as it proves the most the earliest: gradients are freed as soon as they are
                # known to be taken.
                proven[Key(action.slot, numbers[0], target[1])], taken = taken, []
        return proven

    def goes_back(self, action: Action, number: int) -> bool:
        """Return whether an earlier stage needs gradients of the input of one of a forward's passes."""
        virtual_stage = self._stage.layout.virtual_stage(action.stage, action.chunk)
        return self._stage.gradient_rows(virtual_stage, self.slots[action.slot][number]) != ()

    def _sent_rows(self, action: Action, number: int) -> tuple[Rows, ...] | None:
        """Return the rows of a result that are sent; `None` for all."""
        if action.kind == "F":
            return None
        virtual_stage = self._stage.layout.virtual_stage(action.stage, action.chunk)
        return self._stage.gradient_rows(virtual_stage, self.slots[action.slot][number])

    # ------------------------------------------------------------------ sending and receiving

    def put(self, action: Action, number: int, result_TD: torch.Tensor) -> None:
        """Start sending a result to the virtual stage that needs it.

        Args:
            action: the action that has produced the result; it must have a `target`.
            number: index of the pass within the action.
            result_TD: hidden states, or gradients of the action's input, `[T, D]`.
        """
        target, rows = self.target(action), self._sent_rows(action, number)
        assert target is not None, "the caller has asked for the target"
        if rows is not None:
            result_TD = take_rows(result_TD, rows) if rows else result_TD.new_zeros(1, result_TD.shape[1])
        self._links.outgoing[action.kind, target[0]].put(Key(action.slot, number, target[1]), result_TD)

    def take(self, action: Action, number: int) -> torch.Tensor | None:
        """Return an action's input `[T, D]`; `None` at virtual stage 0 forward and at the last one backward.

        Args:
            action: the action to run.
            number: index of the pass within the action.

        Raises:
            ProcessError: if the other stage fails, dies, or does not answer within the time limit.
        """
        source = self.source(action)
        if source is None:
            return None
        key = Key(action.slot, number, action.chunk)
        began = time.perf_counter()
        message = self._links.incoming[action.kind, source[0]].take(key)
        self.waited_s += time.perf_counter() - began
        if action.kind == "F":
            # gloo does not report when a send was received. These hidden states confirm that their sender has received
            # the gradients before them in its list, so these can be freed without blocking.
            for taken in self._proven_taken[source[0]].pop(key, ()):
                self._links.outgoing["B", source[0]].release(taken)
            return message
        # The gradient of an output has arrived, so the output was received, and waiting for its send returns.
        self._links.outgoing["F", source[0]].release(Key(action.slot, number, source[1]))
        passed = self.slots[action.slot][number]
        behind = self._stage.layout.virtual_stage(action.stage, action.chunk) + 1
        rows = self._stage.gradient_rows(behind, passed)
        if rows is None:
            return message
        # Gradients of rows that were not sent are 0.
        return spread_rows(message[: num_rows_in(rows)], rows, passed.num_computed)
