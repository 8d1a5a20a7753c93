"""Messages between the stages of a pipeline: non-blocking sends and receives of tensors whose shapes both ends know.

A channel leads one way between two processes and carries one kind of message, hidden states or their gradients. It is
a process group of its own, so that nothing on it waits for anything on another one: NCCL runs all that two processes
say to one another in a group as one queue, and a receive that waits there would hold up the send behind it.

Why nothing deadlocks, on gloo and NCCL alike. Sends never block an action: they are only waited for when their message
is known to have been taken, or when the step is over. So an action waits for its input alone. On a channel, messages
arrive in the order in which the sender's list sends them. The receiver posts its receives in that very order, which it
reads off the sender's list, so the k-th receive meets the k-th send; what comes earlier than it is needed is laid
aside. A template whose lists come to an end in simulation (`peft_mux.scheduler.pipeline.simulator.verify`), where
messages take any time and inputs are all that is waited for, therefore comes to an end here. So does one of several
steps: losses and norms of a bucket's step are sent down behind its last gradient and up before the first hidden states
of its next step (`peft_mux.engine.pipeline.barriers`), so that who waits for them waits for their sender as it would
for these.

How much lies in channels. One receive is posted ahead of the message that is needed now. An output is held by its
sender until its gradient has come back, which the activation bytes of a template count. A gradient, `[T, D]`, is held
until it is known to be taken: NCCL tells; gloo does not, so there it is held until hidden states come that its receiver
sent after taking it (`peft_mux.engine.pipeline.messages`), else to the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from peft_mux.engine.pipeline.messages import Expected
from peft_mux.engine.processes.processes import Processes

Key = Hashable
"""Name under which both ends of a channel know a message."""


class Outgoing(Protocol):
    """The sender's end of a channel."""

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Begin to send."""
        ...

    def release(self, key: Key) -> None:
        """Free a message that the receiver is known to have taken."""
        ...

    def flush(self) -> None:
        """Wait until everything has been taken."""
        ...


class Incoming(Protocol):
    """The receiver's end of a channel."""

    def expect(self, messages: Iterable[Expected], dtype: torch.dtype) -> None:
        """Take in what will be sent, in the sender's order."""
        ...

    def take(self, key: Key) -> torch.Tensor:
        """Return a message; wait for it if it is not here yet."""
        ...


class Outbox:
    """Sends to another process.

    Args:
        target: global rank of the receiver.
        group: process group of the two processes.
        processes: the processes of the run, for errors that name the cause.
        what: what is sent, in words for error messages.
    """

    def __init__(self, target: int, group: Any, processes: Processes, what: str) -> None:
        """Start empty."""
        self._target, self._group, self._processes = target, group, processes
        self._what = f"sending {what} to rank {target}"
        self._sends: dict[Key, tuple[torch.Tensor, Any]] = {}

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Begin to send; the tensor is kept until it is known to have been taken."""
        for old in [old for old, (_, work) in self._sends.items() if work.is_completed()]:
            del self._sends[old]  # NCCL knows; gloo does not until it is waited for
        tensor = tensor.contiguous()
        with self._processes.communicating(self._what):
            # Held beside the handle: the backend reads this memory until the message is taken.
            self._sends[key] = tensor, dist.isend(tensor, dst=self._target, group=self._group)

    def release(self, key: Key) -> None:
        """Free a message that the receiver is known to have taken."""
        with self._processes.communicating(self._what):
            if key in self._sends:
                self._sends.pop(key)[1].wait()

    def flush(self) -> None:
        """Wait until everything has been taken."""
        for key in list(self._sends):
            self.release(key)


class Inbox:
    """Receives from another process.

    Args:
        source: global rank of the sender.
        group: process group of the two processes.
        processes: the processes of the run, for errors that name the cause.
        what: what is received, in words for error messages.
    """

    def __init__(self, source: int, group: Any, processes: Processes, what: str) -> None:
        """Expect nothing yet."""
        self._source, self._group, self._processes = source, group, processes
        self._what = f"the arrival of {what} from rank {source}"
        self._expected: deque[Expected] = deque()
        self._posted: dict[Key, tuple[torch.Tensor, Any]] = {}
        self._dtype = torch.float32

    def expect(self, messages: Iterable[Expected], dtype: torch.dtype) -> None:
        """Take in what will be sent, in the sender's order, and post the receive of the first message.

        Args:
            messages: each message until the next flush.
            dtype: dtype of those that do not say it.
        """
        assert not self._expected, "all messages of a step are taken before the next one"
        assert not self._posted, "all messages of a step are taken before the next one"
        self._expected.extend(messages)
        self._dtype = dtype
        self._post()

    def take(self, key: Key) -> torch.Tensor:
        """Return a message; wait for it if it is not here yet.

        Raises:
            ProcessError: if the sender has failed, died or hangs.
        """
        # What arrives earlier than it is needed stays in `_posted`: receives are matched by order, so none may be
        # skipped.
        while key not in self._posted:
            assert self._expected, f"{key} is not on the sender's list"
            self._post()
        tensor, work = self._posted.pop(key)
        # Before the wait: the next message can then arrive while this one is still under way, or computed on.
        self._post()
        with self._processes.communicating(self._what):
            work.wait()
        return tensor

    def _post(self) -> None:
        """Post the receive of the next message on the list, if there is one."""
        if self._expected:
            key, shape, dtype = self._expected.popleft()
            # The shape is known from the plan, so no message has to announce it.
            tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._processes.device)
            with self._processes.communicating(self._what):
                self._posted[key] = tensor, dist.irecv(tensor, src=self._source, group=self._group)


class Shelf:
    """Both ends of a channel that leads from a process to itself: chunks of a pipeline of one process."""

    def __init__(self) -> None:
        """Start empty."""
        self._tensors: dict[Key, torch.Tensor] = {}

    def put(self, key: Key, tensor: torch.Tensor) -> None:
        """Lay a message down."""
        self._tensors[key] = tensor

    def take(self, key: Key) -> torch.Tensor:
        """Pick a message up."""
        return self._tensors.pop(key)

    def release(self, key: Key) -> None:
        """Do nothing: who takes a message has it."""

    def flush(self) -> None:
        """Do nothing."""

    def expect(self, messages: Iterable[Expected], dtype: torch.dtype) -> None:
        """Do nothing: order and shapes do not matter here."""


class PipelineLinks:
    """All channels of one process of a pipeline.

    Args:
        pipelines: global ranks of the stages of every pipeline of the run, this process's among them.
        num_chunks: virtual stages of a process; with several, the last stage also sends to the first.
        processes: the processes of the run; `torch.distributed` is initialised.

    Attributes:
        stage: number of this process's stage.
        device: device of this process.
        outgoing: senders' ends, by kind of message ("F" or "B") and receiving stage.
        incoming: receivers' ends, by kind of message and sending stage.

    Raises:
        ProcessError: if another process does not come within the time limit.
        ValueError: if this process is not in exactly one of the pipelines.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], num_chunks: int, processes: Processes) -> None:
        """Make the groups: every process makes all of them, also those of others, as `new_group` wants it."""
        own = [ranks for ranks in pipelines if processes.rank in ranks]
        if len(own) != 1:
            raise ValueError(
                f"pipelines are {[list(ranks) for ranks in pipelines]}; allowed: rank {processes.rank} in exactly one."
            )
        self._ranks, self._processes = tuple(own[0]), processes
        self.stage, self.device = self._ranks.index(processes.rank), processes.device
        self._groups: list[Any] = []
        self._whole_pipeline: Any = None
        self.outgoing: dict[tuple[str, int], Outgoing] = {}
        self.incoming: dict[tuple[str, int], Incoming] = {}
        for ranks in pipelines:
            is_own = processes.rank in ranks
            if len(ranks) > 1:
                group = self._group(ranks)
                self._whole_pipeline = group if is_own else self._whole_pipeline
            for kind, source, target in channels(len(ranks), num_chunks):
                # A group for each way and kind: in a shared one, a receive that waits would hold up the send behind it.
                group = None if source == target else self._group([ranks[source], ranks[target]])
                if is_own:
                    self._open(kind, source, target, group)

    def _open(self, kind: str, source: int, target: int, group: Any) -> None:
        what = "hidden states" if kind == "F" else "gradients"
        if source == target:
            shelf = Shelf()
            self.outgoing[kind, target], self.incoming[kind, source] = shelf, shelf
        elif self.stage == source:
            self.outgoing[kind, target] = Outbox(self._ranks[target], group, self._processes, what)
        elif self.stage == target:
            self.incoming[kind, source] = Inbox(self._ranks[source], group, self._processes, what)

    def _group(self, ranks: Sequence[int]) -> Any:
        timeout = timedelta(seconds=self._processes.timeout_s)
        with self._processes.communicating("the start of the pipeline"):
            group = dist.new_group(list(ranks), timeout=timeout)
        if self._processes.rank in ranks:
            self._groups.append(group)
        return group

    def flush(self) -> None:
        """Wait until all messages have been taken."""
        for outgoing in self.outgoing.values():
            outgoing.flush()

    def broadcast(self, tensor: torch.Tensor, stage: int) -> None:
        """Broadcast a tensor from one stage to all others of the pipeline, in place.

        Args:
            tensor: contiguous tensor on the device, of one shape on all stages.
            stage: number of the stage whose values all get.
        """
        if self._whole_pipeline is not None:
            with self._processes.communicating("the losses of a step"):
                dist.broadcast(tensor, src=self._ranks[stage], group=self._whole_pipeline)

    def close(self) -> None:
        """Break the connections, so that nobody waits for this process any longer."""
        groups, self._groups = self._groups, []
        # NCCL would wait for its peers; its own watchdog ends them.
        for group in groups:
            if "gloo" in dist.get_backend(group):
                dist.destroy_process_group(group)


def channels(num_stages: int, num_chunks: int) -> list[tuple[str, int, int]]:
    """Return every channel of a pipeline as (kind, sender, receiver), in one order for all processes.

    Args:
        num_stages: S, number of processes of the pipeline.
        num_chunks: number of virtual stages of each process.
    """
    ways = [(stage, stage + 1) for stage in range(num_stages - 1)]
    if num_chunks > 1:
        ways.append((num_stages - 1, 0))
    # In one order everywhere, as every process makes all groups and `new_group` is matched by order.
    forwards = [("F", source, target) for source, target in ways]
    return forwards + [("B", target, source) for source, target in ways]
