"""`Processes`: who takes part in a run, their process groups, and the few ways in which they communicate.

Everything else uses this class, never `torch.distributed`. Numbers, objects and states to save go through a gloo group,
on any device; gradients go through groups of the device's own backend: one of all processes, and one for every other
set of ranks that has something to sum. All have the time limit of the run (`ddp_timeout`), which `torch.distributed`
would not know on CPUs.

A backend only reports that a connection broke or a time limit passed. So a process that fails leaves a note in the
rendezvous store, and the others look for notes before they raise their own error. One that is killed leaves none; on
the same host the others see that it has ended. Under torchrun a process that fails also writes the error file from
which the launcher reports the first failure.

A process may notice late that another one has failed. gloo closes a connection only when nothing refers to its group
any more, often when the process ends. NCCL does not notice a broken connection at all: its kernels wait on the device
until the time limit, and the host waits for the device. So a thread looks for notes every second. When another process
has failed, it finds the cause, because the store may be gone later, and it aborts this process's groups of NCCL.
NCCL also connects a group at its first message, for which it allocates memory. All groups are connected when they are
made, in one order on all processes, as an allocation may wait for kernels that wait for another process.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ProcessError

_POLL_S = 0.05
_MAX_CHARACTERS = 2000
_MOST_GRACE_S = 5.0
_MOST_PATIENCE_S = 10.0
_WATCH_S = 1.0


class Pending(NamedTuple):
    """A sum, or a broadcast, in progress.

    Attributes:
        work: the backend's handle; `None` if there was nothing to do.
        processes: the processes of the run, which explain an error of the backend.
        what: what is summed, in words for error messages.
    """

    work: Any
    processes: Processes
    what: str = "the sum of gradients"

    def wait(self) -> None:
        """Wait for the sum; on a GPU the stream waits, not the host.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.work is not None:
            with self.processes.communicating(self.what):
                self.work.wait()


class Processes:
    """The processes of a run, as this one sees them.

    Args:
        rank: rank of this process, from 0.
        world_size: number of processes of the run.
        device: device of this process; the CPU by default.
        timeout_s: seconds that a process waits for another.

    Attributes:
        is_main: whether this process prints and writes.
        is_alone: whether there is no other process.
        waited_s: seconds that this process has spent waiting for others.

    Example:
        >>> alone = Processes()
        >>> alone.is_main, alone.gather("word")
        (True, ['word'])
    """

    _num_connected = 0

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, device: torch.device | None = None, timeout_s: float = 1800.0
    ) -> None:
        """Remember the numbers; do not communicate yet."""
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self.is_main, self.is_alone = rank == 0, world_size == 1
        self.device = device or torch.device("cpu")
        self.waited_s = 0.0
        self._last_s = time.perf_counter()
        self._store: Any = None
        self._has_left_note = False
        self._places: list[tuple[str, int]] = []
        self._gloo_group: Any = None
        self._device_group: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._opened: list[Any] = []
        self._is_closed = threading.Event()
        self._is_aborted = self._is_together = False
        self._cause = ""

    @classmethod
    def of(cls, args: MultiTaskTrainingArguments) -> Processes:
        """Return the processes that a launcher has started, as accelerate sees them."""
        return cls(args.process_index, args.world_size, device=args.device, timeout_s=float(args.ddp_timeout))

    def connect(self) -> None:
        """Make the groups, once; every process must call this.

        Raises:
            ProcessError: if another process does not within the time limit.
        """
        if self.is_alone or self._gloo_group is not None:
            return
        # Counted, so that runs of one process after another keep their notes apart: a store outlives a run.
        Processes._num_connected += 1
        prefix = f"peft_mux/{Processes._num_connected}"
        self._store = dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        _connected.add(self)
        timeout = timedelta(seconds=self.timeout_s)
        with self.communicating("the start"):
            self._gloo_group = dist.new_group(backend="gloo", timeout=timeout)
        # By rank, kept by each process, as the store may be gone when they are needed.
        self._places = self.gather((_own_space(), os.getpid()))
        is_cpu = self.device.type == "cpu"
        self._device_group = self._gloo_group if is_cpu else self._new_group(range(self.world_size))
        self._is_closed.clear()
        arguments = weakref.ref(self), self._is_closed
        threading.Thread(target=_watch, args=arguments, name="peft_mux failures", daemon=True).start()

    def create_groups(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Make groups for sets of ranks, each once; a set of one rank or of all needs none.

        Args:
            sets: sets of ascending ranks, the same on every process; all processes call this, as `new_group` is
                collective over the whole run.

        Raises:
            ProcessError: if another process does not within the time limit.
        """
        for ranks in sets:
            if 1 < len(ranks) < self.world_size and ranks not in self._groups:
                # Kept also if this process is no member, so that all know which sets are made already.
                self._groups[ranks] = self._new_group(ranks)

    def open_group(self, ranks: Sequence[int] | None = None, *, connects: bool = True) -> Any:
        """Return a new group, for communication apart from that of gradients; every process of the run calls this.

        Args:
            ranks: ranks of its members; all by default.
            connects: connect it for collectives. NCCL connects sends and receives separately, at the first of them.

        Returns:
            The group; `None` for a process that is not in it.

        Raises:
            ProcessError: if another process does not within the time limit.
        """
        group = self._new_group(range(self.world_size) if ranks is None else ranks, connects=connects)
        if group is not None:
            self._opened.append(group)
        return group

    def _new_group(self, ranks: Sequence[int], *, connects: bool = True) -> Any:
        with self.communicating("the start of a group"):
            group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
            if self.rank not in ranks:
                return None
            if connects:
                dist.all_reduce(torch.zeros(1, device=self.device), group=group)
        return group

    def close_group(self, group: Any) -> None:
        """Close a group that `open_group` returned; nothing happens if a failure has closed all of them."""
        if not any(opened is group for opened in self._opened):
            return
        self._opened = [opened for opened in self._opened if opened is not group]
        _end(group)

    def gather(self, value: Any) -> list[Any]:
        """Return a small plain value of every process, by rank."""
        if self.is_alone:
            return [value]
        values: list[Any] = [None] * self.world_size
        with self.communicating("an exchange"):
            dist.all_gather_object(values, value, group=self._gloo_group)
        return values

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return integers of at most 63 bits of every process, by rank, as many of each: the cheap way, for every step.

        Tensors of a known length travel in one collective, while objects would be pickled and take two.
        """
        if self.is_alone:
            return [list(numbers)]
        sent = torch.tensor(numbers, dtype=torch.int64)
        received = [torch.empty_like(sent) for _ in range(self.world_size)]
        with self.communicating("the exchange before a step"):
            dist.all_gather(received, sent, group=self._gloo_group)
        return [numbers_of_rank.tolist() for numbers_of_rank in received]

    def wait_for_all(self) -> None:
        """Block until every process reaches this call."""
        self.exchange([0])

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...] | None = None) -> Pending:
        """Begin to replace a tensor by its sum over processes; all must begin their sums in the same order.

        Args:
            tensor: contiguous tensor on the device, of one shape on every process that takes part.
            ranks: ranks that take part, this one among them; all by default. For others, `create_groups` comes first.
        """
        if self.is_alone or (ranks is not None and len(ranks) == 1):
            return Pending(None, self)
        group = self._device_group if ranks is None or len(ranks) == self.world_size else self._groups[ranks]
        with self.communicating("the sum of gradients"):
            return Pending(dist.all_reduce(tensor, group=group, async_op=True), self)

    def reduce(self, tensor: torch.Tensor, target: int) -> Pending:
        """Begin to replace a tensor of one process by its sum over all; it is undefined on the others afterwards.

        Args:
            tensor: contiguous tensor on the device, of one shape on every process.
            target: rank of the process that gets the sum.
        """
        with self.communicating("the sum of gradients"):
            return Pending(dist.reduce(tensor, dst=target, group=self._device_group, async_op=True), self)

    def broadcast(self, tensor: torch.Tensor, source: int) -> Pending:
        """Begin to replace a tensor by the one of another process; all must begin in the same order.

        Args:
            tensor: contiguous tensor on the device, of one shape on every process.
            source: rank of the process that sends its tensor.
        """
        with self.communicating("the weights of a task"):
            work = dist.broadcast(tensor, src=source, group=self._device_group, async_op=True)
            return Pending(work, self, "the weights of a task")

    def send(self, value: Any, buffer: torch.Tensor, target: int) -> None:
        """Send a value and a buffer to another process, and wait until they are taken.

        Args:
            value: a small plain value.
            buffer: uint8 `[bytes]`, contiguous, on the CPU.
            target: rank of the process that calls `receive`.
        """
        with self.communicating(f"handing a state to rank {target}"):
            # The size goes with the words; an empty buffer is not sent at all, as both ends then know.
            dist.send_object_list([(value, buffer.numel())], dst=target, group=self._gloo_group)
            if buffer.numel():
                dist.send(buffer, dst=target, group=self._gloo_group)

    def receive(self, source: int) -> tuple[Any, torch.Tensor]:
        """Return the value and the buffer, uint8 `[bytes]`, that another process sends here.

        Args:
            source: rank of the process that calls `send`.
        """
        received: list[Any] = [None]
        with self.communicating(f"the state of rank {source}"):
            dist.recv_object_list(received, src=source, group=self._gloo_group)
            value, num_bytes = received[0]
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
            if num_bytes:
                dist.recv(buffer, src=source, group=self._gloo_group)
        return value, buffer

    @contextmanager
    def communicating(self, what: str) -> Iterator[None]:
        """Turn what the backend raises into an error that says which process is the cause; count the time as waiting.

        Args:
            what: what is communicated, in words for the error.
        """
        started = time.perf_counter()
        try:
            yield
        except ProcessError:
            raise
        except RuntimeError as error:  # also what torch.distributed derives from it
            cause = self._cause_of(error, started - self._last_s)
            raise ProcessError(
                f"rank {self.rank} of {self.world_size} got no answer at {what}: {cause or error} See what the "
                "other processes printed, start all of them again, and resume from the last saved state with "
                "train(resume_from_checkpoint=True)."
            ) from error
        finally:
            self._last_s = time.perf_counter()
            self.waited_s += self._last_s - started

    def wait_for_device(self) -> None:
        """Wait until the device has done what was launched; on CPUs nothing is left to do.

        Raises:
            ProcessError: if another process has failed or died, so that what the device has computed means nothing.
        """
        if self.is_alone or self.device.type == "cpu":
            return
        event = torch.Event(self.device)
        event.record()
        event.synchronize()
        if self._is_aborted:
            with self.communicating("the results of a step"):
                raise RuntimeError("another process has failed.")

    def _sees_failure(self) -> bool:
        """Return whether another process has failed; then also keep the cause, and abort the groups of NCCL."""
        if self.device.type == "cpu" and not self._is_together:
            return False  # the others may have done all that they were to do
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        try:
            has_failed = any(self._has_ended(rank) or self._store.check([str(rank)]) for rank in others)
        except RuntimeError:
            has_failed = True  # the store has gone with rank 0, which holds it
        if not has_failed:
            return False
        if self.device.type != "cpu":
            self._is_aborted = True
            for group in self._device_groups():
                _end(group)
        self._cause, _ = self._read_notes()
        if self._cause:
            with suppress(RuntimeError):
                self._store.set(f"done/{self.rank}", "")
        return True

    def _device_groups(self) -> list[Any]:
        all_groups = (self._device_group, *self._groups.values(), *self._opened)
        groups = {id(group): group for group in all_groups if group is not None and group is not self._gloo_group}
        return list(groups.values())

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all processes run; the error of one ends the waiting of the others at once."""
        self._is_together = True
        try:
            yield
        except BaseException as error:
            if self._store is not None:
                # The note first: once the connections break, the others look for one.
                self._leave_note(f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS])
                with suppress(RuntimeError):
                    self._store.set(f"done/{self.rank}", "")  # this process knows its error: it reads no notes any more
                self.close()
                if "TORCHELASTIC_ERROR_FILE" in os.environ:
                    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                    with suppress(Exception):  # such as a full disk: the error itself must get out
                        get_error_handler().record_exception(error)
                if self.rank == 0:
                    self._wait_for_readers()
            raise
        finally:
            self._is_together = False

    def _wait_for_readers(self) -> None:
        """Keep the store, which ends with rank 0, until the others have read its notes, but not for long."""
        deadline = time.monotonic() + min(_MOST_GRACE_S, self.timeout_s)
        with suppress(RuntimeError):
            for rank in range(1, self.world_size):
                while not self._has_ended(rank) and not self._store.check([f"done/{rank}"]):
                    if time.monotonic() > deadline:
                        return
                    time.sleep(_POLL_S)

    def _leave_note(self, note: str) -> None:
        """Tell the others why this process fails, or "" if it blames another one; once, as the rest follows from it."""
        if not self._has_left_note:
            self._has_left_note = True
            # The store disappears with the process that holds it.
            with suppress(RuntimeError):
                self._store.set(str(self.rank), note)

    def _cause_of(self, error: BaseException, busy_s: float) -> str:
        """Return a sentence that says which process has failed, and why; empty if that cannot be known.

        Args:
            error: what the backend has raised.
            busy_s: seconds from the exchange before to this one, in which this process did not answer.
        """
        if self._store is None:
            return ""
        if busy_s > self.timeout_s:
            late = f"did not answer for {busy_s:.0f} s, longer than args.ddp_timeout={self.timeout_s:g}"
            self._leave_note(f"ProcessError: it {late}")
            return f"rank {self.rank} itself {late}. Make its callbacks and metrics faster, or raise ddp_timeout."
        # A process that asks is alive, and must not be blamed itself.
        self._leave_note("")
        cause, silent = (self._cause, []) if self._cause else self._read_notes()
        if cause or not silent:
            return cause
        names = ", ".join(f"rank {rank}" for rank in silent)
        if any(word in str(error).lower() for word in ("timed out", "timeout")):
            return (
                f"no word from {names} within {self.timeout_s:g} s (args.ddp_timeout); a process hangs, or needs longer"
                " than that."
            )
        return f"no word from {names} ({error})."

    def _read_notes(self) -> tuple[str, list[int]]:
        """Wait for notes; return which processes have failed and why, "" if none has, and those without a note."""
        # A connection may break before the process at its other end has written its note.
        deadline = time.monotonic() + min(_MOST_PATIENCE_S, self.timeout_s)
        notes: dict[int, str] = {}
        silent = [rank for rank in range(self.world_size) if rank != self.rank]
        while silent:
            # Before notes are read: a process may leave one and end in between.
            ended = {rank for rank in silent if self._has_ended(rank)}
            for rank in silent:
                try:
                    if self._store.check([str(rank)]):
                        notes[rank] = self._store.get(str(rank)).decode()
                except RuntimeError:
                    # The store has gone with rank 0, which holds it. Others may have ended since, for that reason.
                    ended &= {0}
            silent = [rank for rank in silent if rank not in notes]
            causes = [f"rank {rank} failed with {note}" for rank, note in notes.items() if note]
            causes += [f"rank {rank} has died" for rank in silent if rank in ended]
            if causes:
                return f"{'; '.join(causes)}.", silent
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        return "", silent

    def _has_ended(self, rank: int) -> bool:
        """Return whether a process is known to have ended; those of other hosts and containers are not known."""
        if not self._places:
            return False
        space, number = self._places[rank]
        if not space or space != _own_space():
            return False
        try:
            # A zombie still has its number: the launcher may not have collected it yet.
            return psutil.Process(number).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True

    def close(self) -> None:
        """Close the connections, so that neither another process nor this one's device waits any longer."""
        self._is_closed.set()
        groups = [*self._device_groups(), *([] if self._gloo_group is None else [self._gloo_group])]
        self._gloo_group, self._device_group, self._groups, self._opened = None, None, {}, []
        for group in groups:
            _end(group)


def _watch(reference: weakref.ref[Processes], is_closed: threading.Event) -> None:
    """Look every second whether another process has failed, until one has or these are closed or forgotten."""
    while not is_closed.wait(_WATCH_S):
        processes = reference()
        if processes is None or processes._sees_failure():
            return
        del processes


def _end(group: Any) -> None:
    """Close a group: abort NCCL's, which would wait for its peers, and whose kernels would hold the device up."""
    if "gloo" in dist.get_backend(group):
        dist.destroy_process_group(group)
    else:
        group.abort()


def _own_space() -> str:
    """Return the host and the PID namespace in which the number of this process holds; "" if they are not known."""
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_connected: weakref.WeakSet[Processes] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Close connections while the interpreter is whole.

    A thread of gloo lets go of the tensors of the last exchange some time after it; where that is within the end of the
    interpreter, which these tensors need, the process aborts though all is done. Without a group its threads end.
    """
    if not dist.is_available():
        return
    for processes in list(_connected):
        processes.close()
    if _connected and dist.is_initialized() and "gloo" in dist.get_backend():
        dist.destroy_process_group()
