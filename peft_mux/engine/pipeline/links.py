"""Channels between the stages of a pipeline: non-blocking sends and receives of tensors whose shapes both ends know.

A channel leads one way between two processes and carries one kind of message, hidden states or their gradients. It has
a process group of its own, so nothing on it waits for anything on another one: NCCL runs everything that two processes
exchange in a group as one queue, and a receive that waits there would hold up the send behind it.

Why there are no deadlocks, on gloo and NCCL: sends never block an action; they are only waited for when their message
is known to have been taken, or when the step is over. So an action waits for its input alone. On a channel, messages
arrive in the order in which the sender's list sends them. The receiver reads this order off the sender's list and posts
its receives in it, so the k-th receive meets the k-th send; messages that arrive before they are needed are kept. A
template whose lists end in simulation (`peft_mux.scheduler.pipeline.simulator.verify`), where messages take any time
and actions wait for inputs only, therefore ends here too. So does a template of several steps: losses and norms of a
bucket's step are sent down behind its last gradient and up before the first hidden states of its next step, so waiting
for them means waiting for the same sender as for these.

How much memory messages take: one receive is posted ahead of the message that is needed now. An output is held by its
sender until its gradient has come back, which the activation bytes of a template count. A gradient `[T, D]` is held
until it is known to be taken. NCCL reports that; gloo does not, so there it is held until hidden states come that its
receiver sent after taking it (`Traffic.gradients_taken`), at the latest to the end of the step.
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
    """One end of a channel; a process that is both ends of one keeps the messages.

    Args:
        peer: global rank of the process at the other end.
        group: process group of the two processes; `None` if this process is both ends.
        processes: the processes of the run, for errors that name the cause.
        what: what the channel does, in words for error messages.
    """

    def __init__(self, peer: int, group: Any, processes: Processes, what: str) -> None:
        """Start empty."""
        self._peer, self._group, self._processes, self._what = peer, group, processes, what
        self._messages: dict[Hashable, tuple[torch.Tensor, Any]] = {}
        self._expected: deque[Expected] = deque()

    # ------------------------------------------------------------------ the sender's end

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Begin to send; the tensor is kept until it is known to have been taken."""
        if self._group is None:
            self._messages[key] = tensor, None
            return
        for old in [old for old, (_, work) in self._messages.items() if work.is_completed()]:
            del self._messages[old]  # NCCL knows; gloo does not until it is waited for
        tensor = tensor.contiguous()
        with self._processes.communicating(self._what):
            # Held together with the handle: the backend reads this memory until the message is taken.
            self._messages[key] = tensor, dist.isend(tensor, dst=self._peer, group=self._group)

    def release(self, key: Hashable) -> None:
        """Free a message that the receiver is known to have taken."""
        if self._group is not None and key in self._messages:
            with self._processes.communicating(self._what):
                self._messages.pop(key)[1].wait()

    def flush(self) -> None:
        """Wait until everything has been taken."""
        for key in list(self._messages):
            self.release(key)

    # ------------------------------------------------------------------ the receiver's end

    def expect(self, messages: Iterable[Expected]) -> None:
        """Take in all messages until the next flush, in the sender's order, and post the receive of the first one."""
        if self._group is not None:
            assert not self._expected, "all messages of a step are taken before the next one"
            assert not self._messages, "all messages of a step are taken before the next one"
            self._expected.extend(messages)
            self._post()

    def take(self, key: Hashable) -> torch.Tensor:
        """Return a message; wait for it if it is not here yet.

        Raises:
            ProcessError: if the sender has failed, died or hangs.
        """
        # Receives are matched by order, so none may be skipped; what arrives before it is needed is kept.
        while key not in self._messages:
            assert self._expected, f"{key} is not on the sender's list"
            self._post()
        tensor, work = self._messages.pop(key)
        if work is not None:
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
        outgoing: senders' ends, by kind of message ("F" or "B") and receiving stage.
        incoming: receivers' ends, by kind of message and sending stage.

    Raises:
        ProcessError: if another process does not come within the time limit.
        ValueError: if this process is not in exactly one of the pipelines.
    """

    def __init__(self, pipelines: Sequence[Sequence[int]], num_chunks: int, processes: Processes) -> None:
        """Make the groups of all pipelines: `new_group` is collective over the whole run, and matched by order."""
        own = [ranks for ranks in pipelines if processes.rank in ranks]
        if len(own) != 1:
            raise ValueError(
                f"pipelines are {[list(ranks) for ranks in pipelines]}; allowed: rank {processes.rank} in exactly one."
            )
        self._ranks, self._processes = tuple(own[0]), processes
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
                # A group for each way and kind: in a shared one, a receive that waits would hold up the send behind it.
                group = None if source == target else self._open([ranks[source], ranks[target]])
                if processes.rank not in ranks:
                    continue
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

    def _open(self, ranks: Sequence[int]) -> Any:
        group = self._processes.open_group(ranks)
        if group is not None:
            self._groups.append(group)
        return group

    def flush(self) -> None:
        """Wait until all messages have been taken."""
        for outgoing in self.outgoing.values():
            outgoing.flush()

    def broadcast(self, tensor: torch.Tensor, stage: int) -> None:
        """Broadcast a contiguous tensor from one stage to all others of the pipeline, in place."""
        if self._whole_pipeline is not None:
            with self._processes.communicating("the losses of a step"):
                dist.broadcast(tensor, src=self._ranks[stage], group=self._whole_pipeline)

    def close(self) -> None:
        """Break the connections, so that no other stage waits for this process any longer."""
        groups, self._groups = self._groups, []
        for group in groups:
            self._processes.close_group(group)
