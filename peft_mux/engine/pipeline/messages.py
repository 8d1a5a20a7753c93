"""Which messages a template sends from stage to stage, in which order, and when each is known to have been taken.

All of it is read off the lists, which every process has; processes exchange nothing about messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.chains import is_chained
from peft_mux.engine.pipeline.plan import Slot
from peft_mux.scheduler.pipeline.launch import next_virtual_stage
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate


class Key(NamedTuple):
    """What both ends of a channel call a message.

    Attributes:
        bucket: bucket of the micro-batch in the template.
        micro_batch: number of the micro-batch within the bucket.
        number: which of the passes that the template's micro-batch stands for.
        chunk: which of the receiver's chunks the message is for.
    """

    bucket: int
    micro_batch: int
    number: int
    chunk: int


class Messages:
    """The messages of one step, as one stage sees them.

    Args:
        template: the template that all stages follow.
        slots: passes of each micro-batch of the template.
        stage: number of the stage whose view this is.
    """

    def __init__(self, template: PipelineTemplate, slots: Mapping[Slot, Sequence[MuxBatch]], stage: int) -> None:
        """Remember the step."""
        self._template, self._slots, self._stage = template, slots, stage

    def target(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) to which an action hands its result; `None` at the end of its way."""
        return self._neighbour(action.kind, action)

    def source(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) from which an action has its input; `None` where its way begins."""
        return self._neighbour("B" if action.kind == "F" else "F", action)

    def numbers(self, action: Action) -> Sequence[int]:
        """Return the passes of an action in the order in which it runs them: chains backward in reverse."""
        passes = self._slots[action.bucket, action.micro_batch]
        forward = range(len(passes))
        # A later part adds to the gradients of the keys and values of an earlier one, which therefore runs last.
        return forward[::-1] if action.kind == "B" and is_chained(passes) else forward

    def keys(self, action: Action, chunk: int) -> list[Key]:
        """Return the messages of an action that go to a chunk of the receiver, in order."""
        return [Key(action.bucket, action.micro_batch, number, chunk) for number in self.numbers(action)]

    def expected(self, kind: str, source: int, width: int) -> Iterator[tuple[Key, torch.Size]]:
        """Yield what another stage sends here, in its order, with shapes `[T, D]`.

        Args:
            kind: "F" for hidden states, "B" for gradients.
            source: number of the sending stage.
            width: D, width of the hidden states.
        """
        for action in self._template.actions[source]:
            target = self.target(action)
            if action.kind == kind and target is not None and target[0] == self._stage:
                passes = self._slots[action.bucket, action.micro_batch]
                for key in self.keys(action, target[1]):
                    yield key, torch.Size((passes[key.number].num_tokens, width))

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
