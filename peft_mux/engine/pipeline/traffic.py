"""`StageTraffic`: the hidden states and gradients that one stage takes from its neighbours and puts to them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.pipeline.links import PipelineLinks
from peft_mux.engine.pipeline.messages import Key, Messages
from peft_mux.engine.pipeline.stage import StageModel
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot


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
