"""`FailureNotices`: why a process no longer answers, as it wrote itself, or that it is gone.

A backend only tells that a connection broke or a time limit passed. So a process that fails leaves a notice in the
rendezvous store, and the others look for notices before they raise their own error.
"""

# MERGED: `Processes`: who takes part in a run, their process groups, and the few ways in which they communicate.
# MERGED: Everything else asks this value, never `torch.distributed`. Numbers, objects and what is to be saved go
# MERGED: through a gloo
# MERGED: group, on any device; gradients go through groups of the device's own backend: one of all processes, and one
# MERGED: for every
# MERGED: other set of ranks that has something to sum. All have the time limit of the run (`ddp_timeout`), which
# MERGED: `torch.distributed` would not know on CPUs.

from __future__ import annotations

import atexit
import json
import os
import socket
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import ProcessError

_POLL_S = 0.05
_MAX_CHARACTERS = 2000


class WaitingPlace(NamedTuple):
    """Where a process runs that others may come to wait for.

    Attributes:
        host: name of the machine.
        number: number of the process (its PID).
        space: PID namespace in which the number holds, as containers of one host have several; empty where that is
            not known.
    """

    host: str
    number: int
    space: str


class FailureNotices:
    """The notices that the processes of a run leave for one another when they fail.

    Args:
        rank: rank of this process.
        world_size: number of processes of the run.
        patience_s: seconds for which to look for the notices of others.

    Attributes:
        own_place: where this process runs.
    """

    _num_made = 0

    def __init__(self, rank: int, world_size: int, *, patience_s: float) -> None:
        """Open the store that the processes met in, and say where this one runs."""
        # Counted, so that runs of one process after another keep their notices apart: a store outlives a run.
        FailureNotices._num_made += 1
        self.rank, self.world_size, self.patience_s = rank, world_size, patience_s
        self.own_place = WaitingPlace(socket.gethostname(), os.getpid(), _process_space())
        self._places: list[WaitingPlace] = []
        self._has_posted = False
        self._store = dist.PrefixStore(
            f"peft_mux/{FailureNotices._num_made}", dist.distributed_c10d._get_default_store()
        )
        self._write(f"place/{rank}", self.own_place._asdict())

    def set_places(self, places: list[Any]) -> None:
        """Set where each process runs.

        Args:
            places: fields of a `WaitingPlace` of each process, by rank.
        """
        self._places = [WaitingPlace(*place) for place in places]

    def post_failure(self, error: BaseException) -> None:
        """Tell the others why this process fails; once, as what follows is only a consequence.

        Args:
            error: the error that ends this process's part of the run.
        """
        self._post_once({"failed": f"{type(error).__name__}: {error}"[:_MAX_CHARACTERS]})

    def explain(self, error: BaseException, timeout_s: float) -> str:
        """Return in a sentence what has become of the others; empty if it cannot be known.

        Args:
            error: the error that the backend raised.
            timeout_s: the time limit in seconds that may have passed, for the sentence.
        """
        # Whoever asks is alive and blames another one; it must not be blamed itself.
        self._post_once({"waiting": True})
        # A connection may break before the process at its other end has written why.
        deadline = time.monotonic() + self.patience_s
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        while True:
            notes = {rank: self._read(f"note/{rank}") for rank in others}
            causes = [
                f"{self._name(rank)} failed with {note['failed']}" for rank, note in notes.items() if "failed" in note
            ]
            silent = [rank for rank, note in notes.items() if not note]
            causes += [f"{self._name(rank)} has died" for rank in silent if self._is_dead(rank)]
            if causes:
                return f"{'; '.join(causes)}."
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if not silent:
            return ""
        names = ", ".join(self._name(rank) for rank in silent)
        if any(word in str(error).lower() for word in ("timed out", "timeout")):
            return f"no word of {names} within {timeout_s:g} s (args.ddp_timeout); it hangs, or needs longer than that."
        return f"no word of {names}; it has ended, or hangs ({error})."

    def _name(self, rank: int) -> str:
        place = self._place(rank)
        return f"rank {rank}" if place is None else f"rank {rank} (process {place.number} on {place.host})"

    def _place(self, rank: int) -> WaitingPlace | None:
        """Return where a process runs: as all exchanged it, or, before that, as it wrote into the store."""
        if not self._places:
            found = self._read(f"place/{rank}")
            return WaitingPlace(**found) if found else None
        return self._places[rank]

    def _is_dead(self, rank: int) -> bool:
        """Whether a process of this host is known to have ended."""
        place = self._place(rank)
        # A number of another host, or of another container, may here belong to a process of somebody else.
        if place is None or not place.space or place[::2] != self.own_place[::2]:
            return False
        # A zombie ("Z") still has its number: the launcher may not have collected it yet.
        try:
            stat = Path(f"/proc/{place.number}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return True
        return stat.rpartition(")")[2].split()[0] in "ZX"

    def _post_once(self, note: dict[str, Any]) -> None:
        if not self._has_posted:
            self._has_posted = True
            self._write(f"note/{self.rank}", note)

    def _write(self, key: str, note: dict[str, Any]) -> None:
        # Without the store, which goes with the process that holds it, there is nobody to tell.
        with suppress(RuntimeError):
            self._store.set(key, json.dumps(note))

    def _read(self, key: str) -> dict[str, Any]:
        """Return what was written under a key; empty if nothing was."""
        with suppress(RuntimeError):
            if self._store.check([key]):
                return json.loads(self._store.get(key))
        return {}


def _process_space() -> str:
    """Return the PID namespace of this process; empty where it cannot be read."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class Pending(NamedTuple):
    """An all-reduce that is under way.

    Attributes:
        work: the backend's handle; `None` where there was nothing to do.
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
        waited_s: seconds that this process has spent waiting for others.

    Example:
        >>> alone = Processes()
        >>> alone.is_main, alone.gather("word")
        (True, ['word'])
    """

    def __init__(
        self, rank: int = 0, world_size: int = 1, *, device: torch.device | None = None, timeout_s: float = 1800.0
    ) -> None:
        """Remember the numbers; communicate with nobody yet."""
        self.rank = rank
        self.world_size = world_size
        self.device = device or torch.device("cpu")
        self.timeout_s = timeout_s
        self.waited_s = 0.0
        self._notices: FailureNotices | None = None
        self._gloo_group: Any = None
        self._device_group: Any = None
        self._groups: dict[tuple[int, ...], Any] = {}
        self._opened: list[Any] = []

    @classmethod
    def of(cls, args: MultiTaskTrainingArguments) -> Processes:
        """Return the processes that a launcher has started, as accelerate sees them.

        Args:
            args: the arguments of the run.
        """
        return cls(args.process_index, args.world_size, device=args.device, timeout_s=float(args.ddp_timeout))

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.world_size == 1

    def connect(self) -> None:
        """Make the groups, once; every process must call this.

        Raises:
            ProcessError: if another process does not within the time limit.
        """
        if self.is_alone or self._gloo_group is not None:
            return
        timeout = timedelta(seconds=self.timeout_s)
        self._notices = FailureNotices(self.rank, self.world_size, patience_s=min(10.0, self.timeout_s))
        _connected.add(self)
        with self.communicating("the start"):
            self._gloo_group = dist.new_group(backend="gloo", timeout=timeout)
            self._device_group = self._gloo_group if self.device.type == "cpu" else dist.new_group(timeout=timeout)
            self._notices.set_places(self.gather(self._notices.own_place))

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
                with self.communicating("the start of a group"):
                    group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
                # Kept also where this process is no member, so that all know alike which sets are made already.
                self._groups[ranks] = group if self.rank in ranks else None

    def open_group(self, ranks: Sequence[int] | None = None) -> Any:
        """Return a new group, for communication beside that of gradients; every process of the run calls this.

        Args:
            ranks: ranks of its members; all by default.

        Returns:
            `None` for a process that is not in it.

        Raises:
            ProcessError: if another process does not within the time limit.
        """
        members = list(range(self.world_size) if ranks is None else ranks)
        with self.communicating("the start of a group"):
            group: Any = dist.new_group(members, timeout=timedelta(seconds=self.timeout_s))
        if self.rank not in members:
            return None
        self._opened.append(group)
        return group

    def close_group(self, group: Any) -> None:
        """Give up a group; nothing happens if all were given up because a process failed.

        Args:
            group: a group that `open_group` returned.
        """
        if not any(one is group for one in self._opened):
            return
        self._opened = [one for one in self._opened if one is not group]
        # NCCL would wait for its peers; its own watchdog ends them.
        if "gloo" in dist.get_backend(group):
            dist.destroy_process_group(group)

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank.

        Args:
            value: a small plain value of this process.
        """
        if self.is_alone:
            return [value]
        found: list[Any] = [None] * self.world_size
        with self.communicating("an exchange"):
            dist.all_gather_object(found, value, group=self._gloo_group)
        return found

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every process, by rank: the cheap way, for every step.

        Args:
            numbers: integers of at most 63 bits; as many on every process.
        """
        if self.is_alone:
            return [list(numbers)]
        # A tensor of a length that all know: objects would be pickled and take two collectives.
        own = torch.tensor(numbers, dtype=torch.int64)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        with self.communicating("the exchange before a step"):
            dist.all_gather(found, own, group=self._gloo_group)
        return [one.tolist() for one in found]

    def wait_for_all(self) -> None:
        """Go on when every process has come here."""
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
        found: list[Any] = [None]
        with self.communicating(f"the state of rank {source}"):
            dist.recv_object_list(found, src=source, group=self._gloo_group)
            value, num_bytes = found[0]
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
            cause = "" if self._notices is None else self._notices.explain(error, self.timeout_s)
            raise ProcessError(
                f"rank {self.rank} of {self.world_size} got no answer at {what}: {cause or error} Allowed: processes "
                "that all go on. See what the other one printed, start all of them anew, and go on from the last saved "
                "state with train(resume_from_checkpoint=True)."
            ) from error
        finally:
            self.waited_s += time.perf_counter() - started

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run what all processes run; the error of one ends the waiting of the others at once."""
        try:
            yield
        except BaseException as error:
            if not self.is_alone and self._notices is not None:
                # The notice first: once the connections break, the others look for one.
                self._notices.post_failure(error)
                self.close()
            raise

    def close(self) -> None:
        """Close the connections through gloo, so that nobody waits for this process any longer."""
        own = (self._gloo_group, self._device_group, *self._groups.values(), *self._opened)
        groups = {id(group): group for group in own if group is not None}
        self._gloo_group, self._device_group, self._groups, self._opened = None, None, {}, []
        # NCCL would wait for its peers; its own watchdog ends them, and the next exchange through gloo before that.
        for group in groups.values():
            if "gloo" in dist.get_backend(group):
                dist.destroy_process_group(group)


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
