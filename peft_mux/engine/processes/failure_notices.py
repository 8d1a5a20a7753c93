"""`FailureNotices`: why a process no longer answers, as it wrote itself, or that it is gone.

A backend only tells that a connection broke or a time limit passed. So a process that fails leaves a notice in the
rendezvous store, and the others look for notices before they raise their own error.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

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
