"""`Turns`: several passes through one model; one computes while the communication of the others is under way.

The forward of a transformers model is one call that cannot be left in its midst. So every pass has a thread of its
own, and exactly one of them holds the baton and runs: a pass that needs the result of a communication gives the baton
away, and goes on when it gets it back.

    pass 0   | subgraph 0 |- all-reduce -|            | subgraph 1 |- all-reduce -|
    pass 1                | subgraph 0 |- all-reduce -|            | subgraph 1 |
                          ^ baton      ^ baton        ^ baton

Who gets it is decided by Algorithm 1 of M (section 3.4.2), by the `LaunchQueue` that plans are made with: of the
subgraphs that come next, one of the least depth, among these the longest; ties go to the pass given first. A subgraph
ends where its pass waits, so subgraphs are cut at the collectives that the modules of the tensor-parallel plan begin,
and are not traced. The order follows from depths and predicted latencies alone, never from a clock: all processes begin
their collectives in the same order, as backends require. When it is a pass's turn and its communication is still under
way, it waits for it.

What passes keep in common objects is taken out and put back at every turn (`SharedState`). Threads end with the
passes, also after an error or an interrupt.
"""

# MERGED: `TurnLinks`: the links of a tensor parallel rank, where whoever waits for an all-reduce gives its turn away.
# MERGED: It stands between the layers and any links (`peft_mux.kernels.cross_entropy.linear.TensorParallelLinks`), so
# MERGED: neither has to know of turns. Outside a group of passes it waits as they do.
# MERGED: `PlannedTurns`: what passes in turns follow of a plan: how many, of which buckets, and what their subgraphs
# MERGED: take.
# MERGED: `Interleaving`: micro-batches of several hTasks of a bucket go through one model in turns (M sections 3.4.2,
# MERGED: 3.4.3).
# MERGED: Under tensor parallelism every layer ends in an all-reduce. While that of one hTask is under way, another
# MERGED: hTask
# MERGED: computes, in forward and in backward, and in what is recomputed for the backward.
# MERGED: `peft_mux.engine.tensor.interleaving` tells
# MERGED: whose turn it is.
# MERGED: Which passes make a group, and how many, is the plan's: passes of hTasks of one bucket, never of two
# MERGED: (`peft_mux.scheduler.subgraphs.passes`). The three cases of adapter fusion at run time:
# MERGED: 1. Tasks within one hTask: their adapters of one site are one kernel launch or one loop of products on slices
# MERGED:    (`peft_mux.kernels.lora.group`), and their partial sums travel with the base operator's in one all-reduce.
# MERGED: 2. HTasks within one bucket that hold one task each: not fused here. One kernel over two hTasks needs both
# MERGED: of them at
# MERGED: the same site at the same time, while turns keep them apart on purpose. The better of turns and of one hTask
# MERGED: of both,
# MERGED: which is case 1, is predicted to take no longer (`benchmarks/planner/case_two.py`), so the planner compares
# MERGED: these.
# MERGED: 3. Across buckets: never; their passes are never in one group.
# MERGED: On a GPU every pass has a CUDA stream of its own, collectives run on NCCL's, and a turn is a turn of
# MERGED: launching. That
# MERGED: path has not been run on a GPU yet.

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.kernels.cross_entropy.linear import TensorParallelLinks, Waitable
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import KeyValueStore, Stream
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs.passes import GroupedPass, Latency, Stretch, latency_of, pass_times, turn_groups
from peft_mux.scheduler.subgraphs.schedule import LaunchQueue

T = TypeVar("T")


class SharedState(Protocol):
    """State that passes keep in objects that all of them use."""

    def fresh(self, index: int) -> Any:
        """Return the state that a pass finds when it begins, by its index."""

    def take(self) -> Any:
        """Return the state as it is now."""

    def put(self, value: Any) -> None:
        """Set the state to what `take` or `fresh` returned."""


class NoState:
    """For passes that share nothing."""

    def fresh(self, index: int) -> None:
        """Return nothing."""

    def take(self) -> None:
        """Return nothing."""

    def put(self, value: Any) -> None:
        """Set nothing."""


class TurnSpan(NamedTuple):
    """One turn of one pass, in seconds since the first turn began.

    Attributes:
        index: index of the pass.
        depth: depth of the subgraph that ran, from 0.
        start_s: when the pass got the baton.
        compute_start_s: when the communication that the pass needs was over.
        end_s: when the pass gave the baton away.
    """

    index: int
    depth: int
    start_s: float
    compute_start_s: float
    end_s: float


class _Ended(BaseException):
    """Unwinds a pass after another one has failed; no `except Exception` of model code may stop it."""


class Turns(Generic[T]):
    """Runs passes once, in turns.

    Args:
        latencies: predicted latencies of the subgraphs of each pass.
        state: state that passes would disturb for each other; by default there is none.

    Attributes:
        spans: beginning and end of each turn, in order: what Algorithm 1 decided, and when it ran.

    Example:
        >>> turns = Turns([lambda depth: 1.0, lambda depth: 2.0])
        >>> said = []
        >>> def speak(word):
        ...     said.append(word)
        ...     turns.wait(lambda: None)
        ...     said.append(word)
        >>> _ = turns.run([lambda: speak("short"), lambda: speak("long")])
        >>> said
        ['long', 'short', 'long', 'short']
    """

    def __init__(self, latencies: Sequence[Latency], state: SharedState | None = None) -> None:
        """Make a baton for each pass."""
        self.spans: list[TurnSpan] = []
        self._latencies = latencies
        self._state: SharedState = state or NoState()
        self._batons = [threading.Semaphore(0) for _ in latencies]
        self._values = [self._state.fresh(index) for index in range(len(latencies))]
        self._depths = [0] * len(latencies)
        self._ready: LaunchQueue[int] = LaunchQueue()
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._is_over = threading.Event()
        self._index_of_thread: dict[int, int] = {}
        self._turn_s = self._compute_s = self._begin_s = 0.0

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run the passes to their ends; no thread is left when this returns or raises.

        Args:
            passes: functions that run a pass each, as many as latencies; each is called in a thread of its own, with
                the caller's modes of torch.

        Returns:
            What each of the functions returned.

        Raises:
            BaseException: the error of the first pass that failed; the others end at their next wait.
        """
        assert len(passes) == len(self._latencies), "one latency for each pass"
        # Torch keeps modes for each thread, and new threads begin with the defaults.
        modes, own = _Modes.here(), self._state.take()
        threads = [
            # A copy of the context each, as a context can be entered by one thread only.
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run_pass, index, work, modes), daemon=True
            )
            for index, work in enumerate(passes)
        ]
        self._start(threads)
        self._begin_s = time.perf_counter()
        self._pass_baton()
        self._wait_for_all()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        self._state.put(own)
        if self._errors:
            raise self._errors[0]
        return [self._results[index] for index in range(len(passes))]

    def wait(self, wait: Callable[[], object]) -> None:
        """Give the baton away before a result is needed; when it is back, wait for the result.

        Called by a pass, in forward or backward. Anybody else just waits.

        Args:
            wait: waits for a communication that this pass has begun.
        """
        index = self._index_of_thread.get(threading.get_ident())
        if index is None:
            wait()
            return
        self._leave(index)
        self._depths[index] += 1
        # Before the baton goes on: this pass may be the next one itself.
        self._enqueue(index)
        self._pass_baton()
        self._batons[index].acquire()
        self._enter(index)
        # Only once the turn is back: one thread at a time unwinds, so that no two change the model at once.
        if self._errors:
            raise _Ended
        wait()
        self._compute_s = time.perf_counter()

    # --------------------------------------------------------------- internal

    def _run_pass(self, index: int, work: Callable[[], T], modes: _Modes) -> None:
        """Run one pass from its first turn to its end; what its thread does."""
        self._batons[index].acquire()
        self._index_of_thread[threading.get_ident()] = index
        self._enter(index)
        try:
            if not self._errors:
                with modes.applied():
                    self._results[index] = work()
        except _Ended:
            pass
        except BaseException as error:
            # Kept, not raised: the other passes have to be woken and to end first.
            self._errors.append(error)
        finally:
            self._leave(index)
            self._pass_baton()

    def _start(self, threads: Sequence[threading.Thread]) -> None:
        """Start all threads; where that fails, those that live are to end."""
        try:
            for thread in threads:
                thread.start()
        except BaseException as error:
            self._errors.append(error)
        for index, thread in enumerate(threads):
            # A thread that never started counts as ended, or the baton would go to nobody.
            if thread.is_alive():
                self._enqueue(index)

    def _enqueue(self, index: int) -> None:
        """Take in the next subgraph of a pass: it has no pending dependencies, as a pass is a chain."""
        depth = self._depths[index]
        self._ready.enqueue(index, depth=depth, latency_s=self._latencies[index](depth), owner=index)

    def _pass_baton(self) -> None:
        """Wake the pass whose turn it is; only the holder of the baton calls this."""
        # From depths and predictions alone, never from which communication is over: all processes have to begin their
        # collectives in one order, and clocks differ.
        if self._ready:
            self._batons[self._ready.launch()].release()
        else:
            self._is_over.set()

    def _enter(self, index: int) -> None:
        """Begin a turn: put the pass's state back."""
        self._state.put(self._values[index])
        self._turn_s = self._compute_s = time.perf_counter()

    def _leave(self, index: int) -> None:
        """End a turn: take the pass's state out."""
        self._values[index] = self._state.take()
        instants = (self._turn_s, self._compute_s, time.perf_counter())
        self.spans.append(TurnSpan(index, self._depths[index], *(instant - self._begin_s for instant in instants)))

    def _wait_for_all(self) -> None:
        """Wait until no pass is left; an interrupt of the caller ends them at their next wait.

        Not by joining threads: one whose join was interrupted counts as ended from then on.
        """
        while not self._is_over.is_set():
            try:
                self._is_over.wait()
            except BaseException as interrupt:
                self._errors.insert(0, interrupt)


@dataclass(frozen=True, slots=True)
class _Modes:
    """Modes that torch keeps for each thread, and that a pass has to find as its caller has them.

    Default hooks on saved tensors and dispatch modes of the caller do not reach the passes: torch hands out neither.
    """

    grad: bool
    inference: bool
    autocast: dict[str, tuple[bool, torch.dtype]]
    caches_casts: bool
    stream: Any

    @classmethod
    def here(cls) -> _Modes:
        """Return the modes of this thread."""
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
            torch.is_autocast_cache_enabled(),
            torch.cuda.current_stream() if "cuda" in kinds else None,
        )

    def applied(self) -> ExitStack:
        """Return a context in which this thread has the same modes."""
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(self.inference))
        stack.enter_context(torch.set_grad_enabled(self.grad))
        # On a GPU all backward passes would share one thread of autograd's, where the first to wait stops the others.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for kind, (enabled, dtype) in self.autocast.items():
            mode = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.caches_casts)
            stack.enter_context(mode)
        if self.stream is not None:
            stack.enter_context(torch.cuda.device(self.stream.device))
            stack.enter_context(torch.cuda.stream(self.stream))
        return stack


class _AllReduceInTurns(NamedTuple):
    """An all-reduce that is under way."""

    pending: Waitable
    links: TurnLinks

    def wait(self) -> None:
        """Return when the sum is there, and it is this pass's turn."""
        self.links.waiting(self.pending.wait)


class TurnLinks:
    """Links whose all-reduces are waited for in turns.

    Args:
        links: the links that communicate.

    Attributes:
        links: the links that communicate.
        waiting: how an all-reduce is waited for; it is called with a function that waits.

    Example:
        >>> links = TurnLinks(TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> parallel = cut_model(model, links)  # doctest: +SKIP
    """

    def __init__(self, links: TensorParallelLinks) -> None:
        """Wait as the links do, until `in_turns` says otherwise."""
        self.links = links
        self.waiting: Callable[[Callable[[], object]], None] = _at_once

    @property
    def index(self) -> int:
        """Rank of this process within its tensor parallel group."""
        return self.links.index

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.links.size

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Begin to replace a tensor by its sum over the group.

        Args:
            tensor: contiguous tensor on the device, of one shape on every rank.
        """
        return _AllReduceInTurns(self.links.all_reduce(tensor), self)

    @contextmanager
    def in_turns(self, turns: Turns[Any]) -> Iterator[None]:
        """Let passes give their turns away for the time of the `with` block.

        Args:
            turns: decides which pass runs when one of them waits.
        """
        # One attribute for all layers: they hold these links, and none of them knows of turns.
        self.waiting = turns.wait
        try:
            yield
        finally:
            self.waiting = _at_once


def _at_once(wait: Callable[[], object]) -> None:
    wait()


Chain = Sequence[MuxBatch]
"""Micro-batches that run as one: most often a single one, else those of long sequences (`peft_mux.data.batch`)."""


class PlannedTurns:
    """The turns of one plan.

    Args:
        plan: the plan that is followed; `None` where there is none yet, and passes are of one bucket.
        width: the most passes in turns where there is no plan.

    Attributes:
        width: the most passes of a group.

    Raises:
        ValueError: for a width below one.
    """

    def __init__(self, plan: Plan | None = None, width: int = 1) -> None:
        """Read the plan."""
        self.width = width if plan is None else plan.passes_in_turns
        if self.width < 1:
            raise ValueError(f"width is {self.width}; allowed: 1 or more passes in turns, 1 for one after another.")
        self._parts = () if plan is None or plan.turns is None else plan.turns.parts
        htasks, buckets = ((), ()) if plan is None else (plan.htasks, plan.buckets)
        self._htask_of = {name: index for index, htask in enumerate(htasks) for name in htask.tasks}
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}

    def grouped(self, chain: Chain) -> GroupedPass:
        """Return a chain as grouping looks at it.

        Args:
            chain: the micro-batches that run as one, which are of one hTask.
        """
        names = tuple(dict.fromkeys(name for micro_batch in chain for name in micro_batch.task_names))
        index = self._htask(chain)
        return GroupedPass(0 if index is None else self._bucket_of.get(index, 0), names)

    def latency(self, chain: Chain, stretch: Stretch | None) -> Latency:
        """Return the predicted latencies of the subgraphs of a chain: the plan's, for as many tokens as there are.

        Where no plan tells them they are in proportion to tokens, which is enough to order subgraphs of one depth that
        are of one layer. The micro-batches of a chain count as the largest of them, and a head counts as one of words
        that no task adapts: others make more sums, or fewer. Turns then have another order than the one that would be
        predicted with all that is known, and one as good as any that all tensor parallel ranks keep to.

        Args:
            chain: the micro-batches that run as one.
            stretch: the part of the model that they go through; `None` where that is not known.
        """
        largest = max(chain, key=lambda micro_batch: micro_batch.num_computed)
        index = self._htask(chain)
        if index is None or index >= len(self._parts) or stretch is None:
            num_tokens = float(largest.num_computed)
            return lambda depth: num_tokens
        parts = self._parts[index].of_size(largest.num_computed, largest.target_offsets[-1])
        return latency_of(pass_times(parts, stretch))

    def _htask(self, chain: Chain) -> int | None:
        return self._htask_of.get(chain[0].task_names[0]) if chain[0].task_names else None


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
