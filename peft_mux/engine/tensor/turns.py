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

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

from peft_mux.scheduler.subgraphs.launcher import LaunchQueue
from peft_mux.scheduler.subgraphs.passes import Latency

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
