"""`Interleaving`: micro-batches of several hTasks of a bucket take turns in one model (M sections 3.4.2, 3.4.3).

With tensor parallelism every layer ends in an all-reduce. While one hTask waits for its all-reduce, another computes:
in forward, in backward, and in recomputation. The forward of a transformers model is one call that cannot be suspended,
so every pass has its own thread, and exactly one of them holds the baton and runs. A pass that needs the result of a
communication passes the baton on, and continues when it gets it back::

    pass 0   | subgraph 0 |- all-reduce -|            | subgraph 1 |- all-reduce -|
    pass 1                | subgraph 0 |- all-reduce -|            | subgraph 1 |
                          ^ baton      ^ baton        ^ baton

Algorithm 1 of M (section 3.4.2) decides which pass gets it, with the same `LaunchQueue` as the planner: of the next
subgraphs it selects those with the smallest depth, and among these the longest; ties go to the first pass. A subgraph
ends where its pass waits, so subgraphs are delimited by the collectives of the tensor-parallel plan and need no
tracing. The order depends only on depths and predicted latencies, never on a clock, so that all processes start their
collectives in the same order, as backends require. If it is a pass's turn while its communication is still pending, it
waits for it.

The state of a pass in the model's stream is swapped out and in at every turn. Threads end with their passes, even after
an error or an interrupt.

The plan determines which and how many passes form a group: passes of hTasks of one bucket, never of two
(`peft_mux.scheduler.subgraphs`). The three cases of adapter fusion at run time:

1. Tasks within one hTask: their adapters of one site are one kernel launch or one loop of products on slices
   (`peft_mux.kernels.lora.group`), and their partial sums travel with the base operator's in one all-reduce.
2. HTasks within one bucket that hold one task each: not fused here. One kernel over two hTasks needs both of them at
   the same site at the same time, while turns deliberately separate them. The better of interleaving and of one hTask
   with both tasks (case 1) is at most 5 % slower in simulation (`docs/log.md`), so the planner compares these two.
3. Across buckets: never, because their passes are never in one group.

On a GPU every pass has its own CUDA stream, collectives run on NCCL's stream, and a turn is a turn of launching. This
path has not been run on a GPU yet.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.executor import ChainRunner, RunChain
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import PassClock
from peft_mux.kernels.cross_entropy.linear import TensorParallelLinks, Waitable
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.stream import KeyValueStore, Stream
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.subgraphs import (
    Latency,
    LaunchQueue,
    Stretch,
    latency_of,
    neighbour_groups,
    pass_times,
    turn_groups,
)

T = TypeVar("T")

Chain = Sequence[MuxBatch]
"""Micro-batches that run together: usually a single one, or those of a long sequence (`peft_mux.data.batch`)."""

_STRIDE = 1 << 32
"""Distance between the dispatch numbers of two passes, so that layers do not confuse them."""

_MOST_REMEMBERED = 1024
"""Number of groups whose order of turns is kept."""


class Interleaving(ChainRunner):
    """Runs groups of micro-batches in turns.

    Args:
        model: the model that the micro-batches go through.
        links: the links that its layers communicate through.
        width: maximum number of passes in a group before there is a plan; each pass holds its activations from its
            forward to its backward.
        recomputes: whether activations are recomputed in the backward.
        processes: the processes of the run; by default this one is alone.

    Attributes:
        width: maximum number of passes in a group.
        spans: start and end of each turn of the last group.
        decisions: the order of turns of each group of the last steps, newest last: index of the pass within its group
            and depth of its subgraph, as `peft_mux.scheduler.subgraphs.turn_order` predicts it.

    Example:
        >>> interleaving = Interleaving(model, links, width=2)  # doctest: +SKIP
        >>> for group in interleaving.groups(chains_of(work.micro_batches)):  # doctest: +SKIP
        ...     losses = interleaving.run([chains[index] for index in group], forward_and_backward)
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        links: TurnLinks,
        *,
        width: int = 1,
        recomputes: bool = False,
        processes: Processes | None = None,
    ) -> None:
        """Start without a plan: all passes belong to one bucket, with latencies proportional to their tokens."""
        self.processes = processes or Processes()
        self.model, self.links, self.width, self.recomputes = model, links, width, recomputes
        self._parts: Sequence[Any] = ()
        self._htask_of: dict[str, int] = {}
        self._bucket_of: dict[int, int] = {}
        self.spans: list[TurnSpan] = []
        self.decisions: deque[tuple[tuple[int, int], ...]] = deque(maxlen=_MOST_REMEMBERED)
        self._streams: list[Any] = []

    def follow(self, plan: Plan) -> None:
        """Use a plan from the next group on: its group size, buckets, and latencies."""
        self.width = plan.passes_in_turns
        self._parts = () if plan.turns is None else plan.turns.parts
        self._htask_of = {name: index for index, htask in enumerate(plan.htasks) for name in htask.tasks}
        self._bucket_of = {index: number for number, bucket in enumerate(plan.buckets) for index in bucket}

    def groups(self, chains: Sequence[Chain], *, keeps_order: bool = False) -> list[tuple[int, ...]]:
        """Divide chains into groups; return the indices of each.

        Args:
            chains: the chains of a step, or of an action of a pipeline, in the order of the work.
            keeps_order: keep the order of the chains, because neighbouring stages expect messages in this order.
        """
        tasks = [[name for micro_batch in chain for name in micro_batch.task_names] for chain in chains]
        # On a GPU the streams of two passes of one task would add to the same gradients concurrently.
        may_repeat = self.model.device.type == "cpu"
        if keeps_order:
            return neighbour_groups(tasks, self.width, may_repeat=may_repeat)
        # All tasks of a chain belong to one hTask.
        buckets = [self._bucket_of.get(self._htask_of.get(names[0], -1), 0) if names else 0 for names in tasks]
        return turn_groups(tasks, buckets, self.width, may_repeat=may_repeat)

    def run_chains(
        self, chains: Sequence[Chain], run_chain: RunChain, clock: PassClock
    ) -> Iterator[tuple[MuxBatch, MuxOutput]]:
        """Run the chains of a step, those of a group in turns; the clock times groups."""
        for indices in self.groups(chains):
            group = [chains[index] for index in indices]
            # A single chain waits for each of its sums at once.
            waits = (lambda: self.processes.waited_s) if len(group) == 1 else None
            with clock.timing([micro_batch for chain in group for micro_batch in chain], waits):
                outputs = self.run(group, lambda number, group=group: run_chain(group[number]))
            for chain, passes in zip(group, outputs, strict=True):
                yield from zip(chain, passes, strict=True)

    def run(
        self,
        chains: Sequence[Chain],
        act: Callable[[int], T],
        *,
        held: AbstractContextManager[Any] | None = None,
        stretch: Stretch | None = None,
    ) -> list[T]:
        """Call a function for each chain of a group, in turns.

        Args:
            chains: the chains of the group.
            act: runs the forward, the backward or both of the chain with an index; called in one thread per chain.
            held: a context that modifies the model for all chains during the group.
            stretch: the part of the model that they go through; by default all of it, forward and backward.

        Returns:
            The result of `act` for each chain.

        Raises:
            BaseException: the error of the first chain that failed, after the others have ended.
        """
        with ExitStack() as stack:
            if held is not None:
                stack.enter_context(held)
            if len(chains) < 2:
                # No threads, because there is no other pass.
                return [act(index) for index in range(len(chains))]
            model, config, device = self.model, self.model.backbone.config, self.model.device
            whole = Stretch(config.get_text_config().num_hidden_layers, recomputes=self.recomputes)
            turns: Turns[T] = Turns([self.latency(chain, stretch or whole) for chain in chains], model.stream)
            # One attribute for all layers, which share these links and are unaware of turns.
            self.links.turns = turns
            stack.callback(setattr, self.links, "turns", None)
            # Set here for all passes, because each pass would restore it before the others have finished.
            stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
            config._attn_implementation = ATTENTION_NAME
            stack.enter_context(model.objectives.head.bypassed(model.backbone))
            streams: list[Any] = [None] * len(chains)
            if device.type == "cuda":
                self._streams += [torch.cuda.Stream(device) for _ in chains[len(self._streams) :]]
                streams, current = self._streams[: len(chains)], torch.cuda.current_stream(device)
                for stream in streams:
                    # A side stream must wait for earlier launches, and the current stream for the side streams at the
                    # end.
                    stream.wait_stream(current)
                    stack.callback(current.wait_stream, stream)

            def act_on_stream(index: int) -> T:
                with torch.cuda.stream(streams[index]):  # `None` stands for the device's own
                    return act(index)

            try:
                return turns.run([partial(act_on_stream, index) for index in range(len(chains))])
            finally:
                self.spans = turns.spans
                self.decisions.append(tuple((span.index, span.depth) for span in turns.spans))

    def latency(self, chain: Chain, stretch: Stretch) -> Latency:
        """Return the predicted latencies of the subgraphs of a chain, from the plan and the number of tokens.

        Without a plan they are proportional to tokens, which is enough to order subgraphs of the same layer. The
        micro-batches of a chain count as the largest of them, and a head counts as a language model head that no task
        adapts; other heads have a different number of sums. The order of turns may then differ from the predicted one,
        but any order is correct as long as all tensor parallel ranks use the same.

        Args:
            chain: the micro-batches that run as one.
            stretch: the part of the model that they go through.
        """
        largest = max(chain, key=lambda micro_batch: micro_batch.num_computed)
        index = self._htask_of.get(chain[0].task_names[0], -1) if chain[0].task_names else -1
        if not 0 <= index < len(self._parts):
            num_tokens = float(largest.num_computed)
            return lambda depth: num_tokens
        parts = self._parts[index].of_size(largest.num_computed, largest.target_offsets[-1])
        return latency_of(pass_times(parts, stretch))


class TurnSpan(NamedTuple):
    """One turn of one pass, in seconds since the first turn began.

    Attributes:
        index: index of the pass.
        depth: depth of the subgraph that ran, from 0.
        start_s: when the pass got the baton.
        compute_start_s: when the communication that the pass needs had finished.
        end_s: when the pass handed the baton over.
    """

    index: int
    depth: int
    start_s: float
    compute_start_s: float
    end_s: float


class _Ended(BaseException):
    """Unwinds a pass after another one has failed; not an `Exception`, so that model code does not catch it."""


class Turns(Generic[T]):
    """Runs passes once, in turns.

    Each pass has its own state of the model's stream, except for counters and shared state; it is swapped out and in at
    every turn.

    Args:
        latencies: predicted latencies of the subgraphs of each pass.
        stream: the stream of the model, in its state between passes; by default there is none.

    Attributes:
        spans: start and end of each turn, in the order that Algorithm 1 decided.

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

    def __init__(self, latencies: Sequence[Latency], stream: Stream | None = None) -> None:
        assert stream is None or stream.is_idle, "a group begins between passes"
        self.spans: list[TurnSpan] = []
        self._latencies, self._stream = latencies, stream
        self._batons = [threading.Semaphore(0) for _ in latencies]
        self._states: list[dict[str, Any]] = []
        for index in range(len(latencies)):
            # Each pass gets unique dispatch numbers and its own store for long sequences: compiled layers look up their
            # rows by dispatch number, and interleaved passes are active at the same time.
            state = self._state()
            if stream is not None:
                state |= {"num_passes": stream.num_passes + (index + 1) * _STRIDE, "key_values": KeyValueStore()}
            self._states.append(state)
        self._depths = [0] * len(latencies)
        self._ready: LaunchQueue[int] = LaunchQueue()
        self._results: dict[int, T] = {}
        self._errors: list[BaseException] = []
        self._is_over = threading.Event()
        self._index_of_thread: dict[int, int] = {}
        self._turn_s = self._compute_s = self._begin_s = 0.0

    def run(self, passes: Sequence[Callable[[], T]]) -> list[T]:
        """Run the passes to completion; no thread is left when this returns or raises.

        Args:
            passes: one function per pass, as many as latencies; each is called in its own thread, with the caller's
                torch modes.

        Returns:
            The result of each of the functions.

        Raises:
            BaseException: the error of the first pass that failed; the others stop at their next wait.
        """
        assert len(passes) == len(self._latencies), "one latency for each pass"
        modes, state_between = _modes_of_caller(), self._state()
        threads = [
            # A copy of the context for each thread, because only one thread can enter a context.
            threading.Thread(
                target=contextvars.copy_context().run, args=(self._run_pass, index, work, modes), daemon=True
            )
            for index, work in enumerate(passes)
        ]
        try:
            for thread in threads:
                thread.start()
        except BaseException as error:
            self._errors.append(error)
        for index, thread in enumerate(threads):
            # A thread that never started counts as ended, so that it never gets the baton.
            if thread.is_alive():
                self._enqueue(index)
        self._begin_s = time.perf_counter()
        self._pass_baton()
        # Not by joining threads, because a thread whose join was interrupted counts as ended. An interrupt of the
        # caller stops the passes at their next wait.
        while not self._is_over.is_set():
            try:
                self._is_over.wait()
            except BaseException as interrupt:
                self._errors.insert(0, interrupt)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._stream is not None:
            vars(self._stream).update(state_between)
            # Even after an error, so that the next pass does not reuse the dispatch numbers of an aborted one.
            before = self._stream.num_passes
            self._stream.num_passes += sum((state["num_passes"] - before) % _STRIDE for state in self._states)
        if self._errors:
            raise self._errors[0]
        return [self._results[index] for index in range(len(passes))]

    def wait(self, wait: Callable[[], object]) -> None:
        """Pass the baton on before a result is needed; when it is back, wait for the result.

        Called by a pass, in forward or backward. Any other caller only waits.

        Args:
            wait: waits for a communication that this pass has started.
        """
        index = self._index_of_thread.get(threading.get_ident())
        if index is None:
            wait()
            return
        self._leave(index)
        self._depths[index] += 1
        # Done before the baton is passed on, because this pass may be the next one.
        self._enqueue(index)
        self._pass_baton()
        self._batons[index].acquire()
        self._enter(index)
        # Checked when the turn is back, so that only one thread at a time unwinds and changes the model.
        if self._errors:
            raise _Ended
        wait()
        self._compute_s = time.perf_counter()

    def _run_pass(self, index: int, work: Callable[[], T], modes: Callable[[], ExitStack]) -> None:
        """Run one pass from its first turn to its end, in its thread."""
        self._batons[index].acquire()
        self._index_of_thread[threading.get_ident()] = index
        self._enter(index)
        try:
            if not self._errors:
                with modes():
                    self._results[index] = work()
        except _Ended:
            pass
        except BaseException as error:
            # Stored, not raised, because the other passes must end first.
            self._errors.append(error)
        finally:
            self._leave(index)
            self._pass_baton()

    def _enqueue(self, index: int) -> None:
        """Queue the next subgraph of a pass, which has no pending dependencies because a pass is a chain."""
        depth = self._depths[index]
        self._ready.enqueue(index, depth=depth, latency_s=self._latencies[index](depth), group=index)

    def _pass_baton(self) -> None:
        """Wake the pass whose turn it is; only the holder of the baton calls this."""
        # Depends only on depths and predictions, never on which communication has finished, because all processes must
        # start their collectives in the same order.
        if self._ready:
            self._batons[self._ready.launch()].release()
        else:
            self._is_over.set()

    def _enter(self, index: int) -> None:
        """Begin a turn: restore the pass's state."""
        if self._stream is not None:
            vars(self._stream).update(self._states[index])
        self._turn_s = self._compute_s = time.perf_counter()

    def _leave(self, index: int) -> None:
        """End a turn: save the pass's state."""
        self._states[index] = self._state()
        instants = (self._turn_s, self._compute_s, time.perf_counter())
        self.spans.append(TurnSpan(index, self._depths[index], *(instant - self._begin_s for instant in instants)))

    def _state(self) -> dict[str, Any]:
        """Return the part of the stream's state that each pass has separately."""
        common = ("makers", "version", "num_attention_calls")
        return {} if self._stream is None else {k: v for k, v in vars(self._stream).items() if k not in common}


def _modes_of_caller() -> Callable[[], ExitStack]:
    """Return a context that sets the caller's thread-local torch modes in another thread.

    The caller's default saved-tensor hooks and dispatch modes are not copied, because torch does not expose them.
    """
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
    caches_casts = torch.is_autocast_cache_enabled()
    has_grad, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream() if "cuda" in kinds else None

    def applied() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(torch.inference_mode(is_inference))
        stack.enter_context(torch.set_grad_enabled(has_grad))
        # On a GPU all backward passes would share one autograd thread, in which the first one to wait blocks the
        # others.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for kind, (enabled, dtype) in autocast.items():
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches_casts))
        if stream is not None:
            stack.enter_context(torch.cuda.device(stream.device))
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return applied


class TurnLinks:
    """Links of a tensor parallel rank on which a wait for an all-reduce ends the turn of a pass.

    They wrap the links that communicate, so that neither these nor the layers depend on turns. Outside a group of
    passes they wait immediately.

    Args:
        links: the links that communicate.

    Attributes:
        index: rank of this process within its tensor parallel group.
        size: number of ranks in the group.
        turns: the passes that are currently interleaved; `None` outside a group.

    Example:
        >>> links = TurnLinks(TensorLinks(layout.tensor_groups, processes))  # doctest: +SKIP
        >>> parallel = TensorParallelModel(model, links)  # doctest: +SKIP
    """

    def __init__(self, links: TensorParallelLinks) -> None:
        """Store the links; without turns, waits are passed through."""
        self.links, self.index, self.size = links, links.index, links.size
        self.turns: Turns[Any] | None = None

    def all_reduce(self, tensor: torch.Tensor) -> Waitable:
        """Start to replace a contiguous tensor by its sum over the group."""
        return _PendingInTurns(self.links.all_reduce(tensor), self)


class _PendingInTurns(NamedTuple):
    """A pending all-reduce."""

    pending: Waitable
    links: TurnLinks

    def wait(self) -> None:
        """Wait until the sum is complete and it is this pass's turn."""
        turns = self.links.turns
        if turns is None:
            self.pending.wait()
        else:
            turns.wait(self.pending.wait)
