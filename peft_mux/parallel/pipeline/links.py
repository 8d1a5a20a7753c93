"""Channels between the stages of a pipeline: non-blocking sends and receives of tensors with known shapes.

A channel is one-way between two processes and carries one kind of message, hidden states or their gradients. Each
channel has its own process group, so that channels do not wait for each other: NCCL runs all communication of two
processes in a group as one queue, in which a waiting receive would block the sends after it.

NCCL connects the two ends of a channel at its first message, and blocks each process until its peer connects the same
channel. All channels are therefore connected when they are created, in an order that all processes share. If the first
step connected them, a stage could block on the hidden states of its neighbour while the neighbour blocks on its
gradients.

An action waits only for its input: sends never block an action; they are only waited for when their message is known to
have been received, or at the end of the step. On a channel, messages arrive in the order of the sender's list. The
receiver knows this list and posts its receives in the same order, so the k-th receive matches the k-th send; messages
that arrive before they are needed are kept. Therefore a template that finishes in simulation
(`peft_mux.scheduler.pipeline.simulator.verify`), where messages take any time and actions wait only for inputs, also
finishes over gloo. The same holds for a template of several steps: losses and norms of a bucket's step are sent down
after its last gradient and up before the first hidden states of its next step, so waiting for them means waiting for
the same sender.

Over NCCL this rests on more, and is tested only by an emulation over gloo. A receive is a kernel that waits on the
device for its message, and a host that waits for the whole device (as it may to allocate or pin memory) waits for this
kernel too. So a receive is launched when an action needs its message: all that the message depends on was launched
before. A send is a kernel that waits as well, for its receive. If the hosts of two neighbours wait for their devices at
the same time, each after a send that the other has not yet asked for, both hang until `ddp_timeout`. This could only
happen in the first steps, before the allocator has its memory. NCCL also needs a hardware queue for each of its streams
(`CUDA_DEVICE_MAX_CONNECTIONS`, see `docs/parallel.md`).

Memory of messages: on CPUs one receive is posted ahead of the message that is needed now. A sender holds an output
until its gradient has arrived, which the activation bytes of a template include. A gradient `[T, D]` is held until it
is known to be received. NCCL reports this. Gloo does not, so there it is held until hidden states arrive that its
receiver sent after receiving it (`Traffic.gradients_taken`), at the latest until the end of the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from peft_mux.engine.processes import Processes


class Expected(NamedTuple):
    """A message that a stage waits for.

    Attributes:
        key: name of the message, the same at both ends.
        shape: its shape.
        dtype: its dtype.
    """

    key: Hashable
    shape: torch.Size
    dtype: torch.dtype


class Channel:
    """One end of a channel; if a process is both ends, it keeps the messages.

    Args:
        peer: global rank of the process at the other end.
        group: process group of the two processes; `None` if this process is both ends.
        processes: the processes of the run, for errors that name the cause.
        what: description of the channel for error messages.
    """

    def __init__(self, peer: int, group: Any, processes: Processes, what: str) -> None:
        self._peer, self._group, self._processes, self._what = peer, group, processes, what
        self._messages: dict[Hashable, tuple[torch.Tensor, Any]] = {}
        self._expected: deque[Expected] = deque()
        self._posts_ahead = processes.device.type == "cpu"

    # ------------------------------------------------------------------ the sender's end

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Start sending; the tensor is kept until it is known to have been received."""
        if self._group is None:
            self._messages[key] = tensor, None
            return
        for old in [old for old, (_, work) in self._messages.items() if work.is_completed()]:
            del self._messages[old]  # NCCL knows; gloo does not until it is waited for
        tensor = tensor.contiguous()
        with self._processes.communicating(self._what):
            # Kept with the handle, because the backend reads this memory until the message is received.
            self._messages[key] = tensor, dist.isend(tensor, dst=self._peer, group=self._group)

    def release(self, key: Hashable) -> None:
        """Free a message that is known to have been received."""
        if self._group is not None and key in self._messages:
            with self._processes.communicating(self._what):
                self._messages.pop(key)[1].wait()

    def flush(self) -> None:
        """Wait until all messages have been received."""
        for key in list(self._messages):
            self.release(key)

    # ------------------------------------------------------------------ the receiver's end

    def expect(self, messages: Iterable[Expected]) -> None:
        """Set the messages to expect until the next flush, in the sender's order; on a CPU post the first receive."""
        if self._group is not None:
            assert not self._expected, "all messages of a step are taken before the next one"
            assert not self._messages, "all messages of a step are taken before the next one"
            self._expected.extend(messages)
            self._post_ahead()

    def take(self, key: Hashable) -> torch.Tensor:
        """Return a message, waiting for it if necessary.

        Raises:
            ProcessError: if the sender has failed, died or hangs.
        """
        # Receives are matched by order, so none may be skipped; messages that arrive early are kept.
        while key not in self._messages:
            assert self._expected, f"{key} is not on the sender's list"
            self._post()
        tensor, work = self._messages.pop(key)
        if work is not None:
            # Posted before the wait, so that the next message can arrive while this one is pending or in use.
            self._post_ahead()
            with self._processes.communicating(self._what):
                work.wait()
        return tensor

    def _post_ahead(self) -> None:
        # On a GPU a receive waits on the device, for a message that may depend on what this host has yet to launch.
        if self._posts_ahead:
            self._post()

    def _post(self) -> None:
        """Post the receive of the next message on the list, if there is one."""
        if self._expected:
            key, shape, dtype = self._expected.popleft()
            # The shape is known from the plan, so it need not be sent.
            tensor = torch.empty(shape, dtype=dtype, device=self._processes.device)
            with self._processes.communicating(self._what):
                self._messages[key] = tensor, dist.irecv(tensor, src=self._peer, group=self._group)


class PipelineLinks:
    """All channels of one process of a pipeline.

    Args:
        pipelines: global ranks of the stages of every pipeline of the run, this process's among them.
        num_chunks: virtual stages of a process; with several, the last stage also sends to the first.
        processes: the processes of the run; `torch.distributed` is initialised.

    Attributes:
        stage: number of this process's stage.
        outgoing: sending ends, by kind of message ("F" or "B") and receiving stage.
        incoming: receiving ends, by kind of message and sending stage.

    Raises:
        ProcessError: if another process does not join within the time limit.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], num_chunks: int, processes: Processes) -> None:
        """Create the groups of all pipelines: `new_group` is collective over the whole run, and matched by order."""
        self._ranks, self._processes = next(tuple(ranks) for ranks in pipelines if processes.rank in ranks), processes
        self.stage = self._ranks.index(processes.rank)
        self._groups: list[Any] = []
        self._whole_pipeline: Any = None
        self.outgoing: dict[tuple[str, int], Channel] = {}
        self.incoming: dict[tuple[str, int], Channel] = {}
        for ranks in pipelines:
            if len(ranks) > 1:
                group = self._open(ranks)
                self._whole_pipeline = group if processes.rank in ranks else self._whole_pipeline
            ways = [(stage, stage + 1) for stage in range(len(ranks) - 1)]
            if num_chunks > 1:
                ways.append((len(ranks) - 1, 0))
            forwards = [("F", source, target) for source, target in ways]
            for kind, source, target in [*forwards, *(("B", target, source) for source, target in ways)]:
                # A group per direction and kind: in a shared one, a waiting receive would block the sends after it.
                group = None if source == target else self._open([ranks[source], ranks[target]], connects=False)
                if processes.rank not in ranks:
                    continue
                if group is not None:
                    self._connect(group, ranks[source], ranks[target])
                what = "hidden states" if kind == "F" else "gradients"
                if source == target:
                    both = Channel(ranks[source], None, processes, what)
                    self.outgoing[kind, target], self.incoming[kind, source] = both, both
                elif self.stage == source:
                    sending = f"sending {what} to rank {ranks[target]}"
                    self.outgoing[kind, target] = Channel(ranks[target], group, processes, sending)
                elif self.stage == target:
                    arrival = f"the arrival of {what} from rank {ranks[source]}"
                    self.incoming[kind, source] = Channel(ranks[source], group, processes, arrival)

    def _open(self, ranks: Sequence[int], *, connects: bool = True) -> Any:
        group = self._processes.open_group(ranks, connects=connects)
        if group is not None:
            self._groups.append(group)
        return group

    def _connect(self, group: Any, source: int, target: int) -> None:
        """Exchange one number on a channel, so that NCCL connects it now."""
        number, is_source = torch.zeros(1, device=self._processes.device), self._processes.rank == source
        with self._processes.communicating(f"the channel from rank {source} to rank {target}"):
            work = dist.isend(number, dst=target, group=group) if is_source else dist.irecv(number, source, group=group)
            assert work is not None, "this process is in the group"
            work.wait()

    def flush(self) -> None:
        """Wait until all messages have been received."""
        for outgoing in self.outgoing.values():
            outgoing.flush()

    def broadcast(self, tensor: torch.Tensor, stage: int) -> None:
        """Broadcast a contiguous tensor from one stage to all others of the pipeline, in place."""
        if self._whole_pipeline is not None:
            with self._processes.communicating("the losses of a step"):
                dist.broadcast(tensor, src=self._ranks[stage], group=self._whole_pipeline)

    def close(self) -> None:
        """Close the connections, so that no other stage keeps waiting for this process."""
        groups, self._groups = self._groups, []
        for group in groups:
            self._processes.close_group(group)
