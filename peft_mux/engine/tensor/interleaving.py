"""`Interleaving`: micro-batches of several hTasks of a bucket go through one model in turns (M sections 3.4.2, 3.4.3).

Under tensor parallelism every layer ends in an all-reduce. While that of one hTask is under way, another hTask
computes, in forward and in backward, and in what is recomputed for the backward. `peft_mux.engine.tensor.turns` tells
whose turn it is.

The three cases of adapter fusion, as far as they mean something at run time:

1. Tasks within one hTask: their adapters of one site are one kernel launch or one loop of products on slices
   (`peft_mux.kernels.lora.group`), and their partial sums travel with the base operator's in one all-reduce.
2. HTasks within one bucket that hold one task each: not fused here. One kernel over two hTasks needs both of them at
   the same site at the same time, while turns keep them apart on purpose; of two hTasks that gain more from sharing a
   kernel than from overlap, the planner makes one hTask, which is case 1.
3. Across buckets: never; their passes are never in one group.

On a GPU every pass has a CUDA stream of its own, collectives run on NCCL's, and a turn is a turn of launching. That
path has not been run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.tensor.turn_links import TurnLinks
from peft_mux.engine.tensor.turns import Latency, Turns, TurnSpan
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.key_values import KeyValueStore
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import Stream

T = TypeVar("T")
_STRIDE = 1 << 32
"""Distance between the dispatch numbers of two passes, so that no layer takes those of one for those of another."""


Chain = Sequence[MuxBatch]
"""Micro-batches that run as one: most often a single one, else those of long sequences (`peft_mux.data.chains`)."""


def interleaved_groups(chains: Sequence[Chain], width: int, *, may_repeat: bool = True) -> list[tuple[int, ...]]:
    """Divide the chains of a step into groups that go through the model in turns.

    A group takes chains of tasks that differ, as long as there are any, so that the order in which the gradients of a
    task add up stays that of the work. Then it takes those of the same tasks, if it may.

    Args:
        chains: the chains of a step, in the order of the work.
        width: largest number of chains in a group.
        may_repeat: whether two chains of a group may be of one task.

    Returns:
        For each group the indices of its chains; every one once, and those of a task in the order of the work.
    """
    left, groups = list(range(len(chains))), []
    while left:
        group: list[int] = []
        seen: set[str] = set()
        for index in left:
            names = {name for micro_batch in chains[index] for name in micro_batch.task_names}
            if len(group) < width and seen.isdisjoint(names):
                group.append(index)
            # Also the names of a chain that was passed over, lest a later chain of its task overtake it.
            seen |= names
        left = [index for index in left if index not in group]
        if may_repeat:
            group, left = group + left[: width - len(group)], left[width - len(group) :]
        groups.append(tuple(group))
    return groups


def latency_by_tokens(chain: Chain) -> Latency:
    """Return a latency in proportion to tokens: enough to order subgraphs of one depth where these are of one layer.

    They are not where passes are chains of different lengths or make their losses in different numbers of blocks; the
    order is then another than Algorithm 1's, and as good as any that all tensor parallel ranks keep to.

    Args:
        chain: the micro-batches that run as one.
    """
    num_tokens = float(max(micro_batch.num_tokens for micro_batch in chain))
    return lambda depth: num_tokens


class Interleaving:
    """Runs groups of micro-batches in turns.

    Args:
        model: the model that the micro-batches go through.
        links: the links that its layers communicate through.
        width: most passes in a group; each holds its activations from its forward to its backward.
        latency: predicted latencies of the subgraphs of a chain; the same on every tensor parallel rank.

    Attributes:
        spans: beginning and end of each turn of the last group.

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
        width: int,
        latency: Callable[[Chain], Latency] = latency_by_tokens,
    ) -> None:
        """Remember the model and the links."""
        if width < 1:
            raise ValueError(f"width is {width}; allowed: 1 or more passes in turns, 1 for one after another.")
        self.model, self.links, self.width, self.latency = model, links, width, latency
        self.spans: list[TurnSpan] = []
        self._streams: list[Any] = []

    def groups(self, chains: Sequence[Chain]) -> list[tuple[Chain, ...]]:
        """Divide the chains of a step into groups.

        Args:
            chains: the chains of a step, in the order of the work.
        """
        # On a GPU never two of one task: their streams would add to the same gradients at one time.
        may_repeat = self.model.device.type == "cpu"
        found = interleaved_groups(chains, self.width, may_repeat=may_repeat)
        return [tuple(chains[index] for index in group) for group in found]

    def run(
        self, chains: Sequence[Chain], act: Callable[[int], T], *, held: AbstractContextManager[Any] | None = None
    ) -> list[T]:
        """Run something for each chain of a group, in turns.

        Args:
            chains: the chains of the group.
            act: runs the forward, the backward or both of the chain of an index; it is called in a thread for each.
            held: what all of them do to the model alike, for the time of the group.

        Returns:
            What `act` returned for each chain.

        Raises:
            BaseException: the error of the first chain that failed; the others have ended then.
        """
        with held or nullcontext():
            if len(chains) < 2:
                # Without threads: there is nobody to give a turn to.
                return [act(index) for index in range(len(chains))]
            return self._run_in_turns([self.latency(chain) for chain in chains], act)

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
