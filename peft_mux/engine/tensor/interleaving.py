"""`Interleaving`: micro-batches of several hTasks of a bucket go through one model in turns (M sections 3.4.2, 3.4.3).

Under tensor parallelism every layer ends in an all-reduce. While that of one hTask is under way, another hTask
computes, in forward and in backward, and in what is recomputed for the backward. `peft_mux.engine.tensor.turns` tells
whose turn it is.

Which passes make a group, and how many, is the plan's: passes of hTasks of one bucket, never of two
(`peft_mux.scheduler.subgraphs.groups`). The three cases of adapter fusion at run time:

1. Tasks within one hTask: their adapters of one site are one kernel launch or one loop of products on slices
   (`peft_mux.kernels.lora.group`), and their partial sums travel with the base operator's in one all-reduce.
2. HTasks within one bucket that hold one task each: not fused here. One kernel over two hTasks needs both of them at
   the same site at the same time, while turns keep them apart on purpose. The better of turns and of one hTask of both,
   which is case 1, is predicted to take no longer (`benchmarks/planner/case_two.py`), so the planner compares these.
3. Across buckets: never; their passes are never in one group.

On a GPU every pass has a CUDA stream of its own, collectives run on NCCL's, and a turn is a turn of launching. That
path has not been run on a GPU yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from peft_mux.engine.tensor.planned_turns import Chain, PlannedTurns
from peft_mux.engine.tensor.turn_links import TurnLinks
from peft_mux.engine.tensor.turns import Turns, TurnSpan
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.key_values import KeyValueStore
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import Stream
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.groups import turn_groups
from peft_mux.scheduler.subgraphs.passes import Latency, Stretch

T = TypeVar("T")
_STRIDE = 1 << 32
"""Distance between the dispatch numbers of two passes, so that no layer takes those of one for those of another."""


_MOST_REMEMBERED = 1024
"""Groups whose order of turns is kept."""


class Interleaving:
    """Runs groups of micro-batches in turns.

    Args:
        model: the model that the micro-batches go through.
        links: the links that its layers communicate through.
        width: most passes in a group before there is a plan to follow; each holds its activations from its forward to
            its backward.
        recomputes: whether activations are recomputed in the backward.

    Attributes:
        turns: what is followed of the plan.
        spans: beginning and end of each turn of the last group.
        decisions: the order of turns of each group of the last steps, newest last: index of the pass within its group
            and depth of its subgraph, as `peft_mux.scheduler.subgraphs.passes.turn_order` predicts it.

    Raises:
        ValueError: for a width below one.

    Example:
        >>> interleaving = Interleaving(model, links, width=2)  # doctest: +SKIP
        >>> for group in interleaving.groups(chains_of(work.micro_batches)):  # doctest: +SKIP
        ...     losses = interleaving.run(group, lambda index: forward_and_backward(group[index]))
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        links: TurnLinks,
        *,
        width: int = 1,
        recomputes: bool = False,
    ) -> None:
        """Remember the model and the links."""
        self.model, self.links, self.recomputes = model, links, recomputes
        self.turns = PlannedTurns(width=width)
        self.spans: list[TurnSpan] = []
        self.decisions: deque[tuple[tuple[int, int], ...]] = deque(maxlen=_MOST_REMEMBERED)
        self._streams: list[Any] = []

    def follow(self, plan: Plan) -> None:
        """Follow a plan from the next group on.

        Args:
            plan: tells how many passes take turns, in which buckets their hTasks are, and what their subgraphs take.
        """
        self.turns = PlannedTurns(plan)

    @property
    def may_repeat(self) -> bool:
        """Whether two passes of a group may be of one task."""
        # On a GPU their streams would add to the same gradients at one time.
        return self.model.device.type == "cpu"

    def groups(self, chains: Sequence[Chain]) -> list[tuple[Chain, ...]]:
        """Divide the chains of a step into groups.

        Args:
            chains: the chains of a step, in the order of the work.
        """
        passes = [self.turns.grouped(chain) for chain in chains]
        found = turn_groups(passes, self.turns.width, may_repeat=self.may_repeat)
        return [tuple(chains[index] for index in group) for group in found]

    def run(
        self,
        chains: Sequence[Chain],
        act: Callable[[int], T],
        *,
        held: AbstractContextManager[Any] | None = None,
        stretch: Stretch | None = None,
    ) -> list[T]:
        """Run something for each chain of a group, in turns.

        Args:
            chains: the chains of the group.
            act: runs the forward, the backward or both of the chain of an index; it is called in a thread for each.
            held: what all of them do to the model alike, for the time of the group.
            stretch: the part of the model that they go through; by default all of it, forward and backward.

        Returns:
            What `act` returned for each chain.

        Raises:
            BaseException: the error of the first chain that failed; the others have ended then.
        """
        with held or nullcontext():
            if len(chains) < 2:
                # Without threads: there is nobody to give a turn to.
                return [act(index) for index in range(len(chains))]
            through = stretch or self._whole
            return self._run_in_turns([self.turns.latency(chain, through) for chain in chains], act)

    @property
    def _whole(self) -> Stretch:
        return Stretch(self.model.backbone.config.get_text_config().num_hidden_layers, recomputes=self.recomputes)

    def _run_in_turns(self, latencies: Sequence[Latency], act: Callable[[int], T]) -> list[T]:
        state, indices = StreamState(self.model.stream), range(len(latencies))
        turns: Turns[T] = Turns(latencies, state)
        with ExitStack() as stack:
            stack.enter_context(_multiplexed_throughout(self.model))
            stack.enter_context(self.links.in_turns(turns))
            streams = stack.enter_context(self._side_streams(len(indices)))
            try:
                return turns.run([partial(_act_on, streams[index], act, index) for index in indices])
            finally:
                # Also after an error: the next pass must not take the dispatch numbers of one that was given up.
                state.count_dispatches()
                self.spans = turns.spans
                self.decisions.append(tuple((span.index, span.depth) for span in turns.spans))

    @contextmanager
    def _side_streams(self, count: int) -> Iterator[Sequence[Any]]:
        """Give each pass a CUDA stream that begins after what was launched, and ends before what will be."""
        if self.model.device.type != "cuda":
            yield [None] * count
            return
        while len(self._streams) < count:
            self._streams.append(torch.cuda.Stream(self.model.device))
        streams, current = self._streams[:count], torch.cuda.current_stream(self.model.device)
        for stream in streams:
            # A side stream sees what was launched before only if it waits for it; and the other way round at the end.
            stream.wait_stream(current)
        try:
            yield streams
        finally:
            for stream in streams:
                current.wait_stream(stream)


def _act_on(stream: Any, act: Callable[[int], T], index: int) -> T:
    """Act while kernels are launched on a stream; `None` stands for the device's own."""
    with torch.cuda.stream(stream):
        return act(index)


class StreamState:
    """The state of a model's `Stream` during a pass: all but what it counts or keeps for every pass.

    Args:
        stream: the stream of a model, between passes.
    """

    _COMMON = ("makers", "version", "num_attention_calls")

    def __init__(self, stream: Stream) -> None:
        """Remember the state of the idle stream."""
        assert stream.is_idle, "a group begins between passes"
        self.stream = stream
        self._counts: dict[int, int] = {}
        self._idle = self.take()

    def fresh(self, index: int) -> dict[str, Any]:
        """Return an idle stream; dispatches of a pass get numbers, and long sequences a place, that no other has."""
        number = self._idle["num_passes"] + (index + 1) * _STRIDE
        # Compiled layers look their rows up by dispatch number, and passes in turns are under way at one time.
        return {**self._idle, "num_passes": number, "key_values": KeyValueStore()}

    def take(self) -> dict[str, Any]:
        """Return the state of the stream."""
        index, count = divmod(self.stream.num_passes, _STRIDE)
        self._counts[index] = count
        return {name: value for name, value in vars(self.stream).items() if name not in self._COMMON}

    def put(self, value: dict[str, Any]) -> None:
        """Set the state of the stream again."""
        vars(self.stream).update(value)

    def count_dispatches(self) -> None:
        """Let the stream go on counting after those of all passes."""
        before, *after = (self._counts[index] for index in sorted(self._counts))
        self.stream.num_passes = before + sum(count - before for count in after)


@contextmanager
def _multiplexed_throughout(model: MultiTaskPeftModel) -> Iterator[None]:
    """Set for all passes what each would set and put back by itself, before the others are done."""
    config = model.backbone.config
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        with model.objectives.head.bypassed(model.backbone):
            yield
    finally:
        config._attn_implementation = before
