"""Which messages a template sends from stage to stage, in which order, and when each is known to have been taken.

All of it is read off the lists, which every process has; processes exchange nothing about messages.

A gradient is sent for the rows of tasks that have adapters further down, and for one row where there are none: that the
message comes also tells that the hidden states were taken.
"""

# MERGED: Messages between the stages of a pipeline: non-blocking sends and receives of tensors whose shapes both ends
# MERGED: know.
# MERGED: A channel leads one way between two processes and carries one kind of message, hidden states or their
# MERGED: gradients. It is
# MERGED: a process group of its own, so that nothing on it waits for anything on another one: NCCL runs all that two
# MERGED: processes
# MERGED: say to one another in a group as one queue, and a receive that waits there would hold up the send behind it.
# MERGED: Why nothing deadlocks, on gloo and NCCL alike. Sends never block an action: they are only waited for when
# MERGED: their message
# MERGED: is known to have been taken, or when the step is over. So an action waits for its input alone. On a channel,
# MERGED: messages
# MERGED: arrive in the order in which the sender's list sends them. The receiver posts its receives in that very
# MERGED: order, which it
# MERGED: reads off the sender's list, so the k-th receive meets the k-th send; what comes earlier than it is needed
# MERGED: is laid
# MERGED: aside. A template whose lists come to an end in simulation (`peft_mux.scheduler.pipeline.simulator.verify`),
# MERGED: where
# MERGED: messages take any time and inputs are all that is waited for, therefore comes to an end here. So does one of
# MERGED: several
# MERGED: steps: losses and norms of a bucket's step are sent down behind its last gradient and up before the first
# MERGED: hidden states
# MERGED: of its next step (`peft_mux.engine.pipeline.executor`), so that who waits for them waits for their sender as
# MERGED: it would
# MERGED: for these.
# MERGED: How much lies in channels. One receive is posted ahead of the message that is needed now. An output is held
# MERGED: by its
# MERGED: sender until its gradient has come back, which the activation bytes of a template count. A gradient, `[T,
# MERGED: D]`, is held
# MERGED: until it is known to be taken: NCCL tells; gloo does not, so there it is held until hidden states come that
# MERGED: its receiver
# MERGED: sent after taking it (`peft_mux.engine.pipeline.links`), else to the end of the step.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from peft_mux.data.batch import MuxBatch, is_chained
from peft_mux.engine.processes import Processes
from peft_mux.kernels.lora.reference import Rows, num_rows_in, spread_rows, take_rows
from peft_mux.scheduler.pipeline.launch import next_virtual_stage
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Slot


class Key(NamedTuple):
    """What both ends of a channel call a message.

    Attributes:
        bucket: bucket of the micro-batch in the template.
        micro_batch: number of the micro-batch within the bucket.
        number: which of the passes that the template's micro-batch stands for.
        chunk: which of the receiver's chunks the message is for.
        step: step of the template.
    """

    bucket: int
    micro_batch: int
    number: int
    chunk: int
    step: int = 0

    @classmethod
    def of(cls, slot: Slot, number: int, chunk: int) -> Key:
        """Return the name of the message of a pass of a micro-batch of the template."""
        return cls(slot.bucket, slot.micro_batch, number, chunk, slot.step)


class StepEnd(NamedTuple):
    """A bucket's step in a template of several, at whose end stages tell one another losses and norms.

    Attributes:
        bucket: bucket of the template.
        step: step of the template.
    """

    bucket: int
    step: int


class StepEnds:
    """Where in a stage's list the steps of buckets end.

    Attributes:
        after: the end of a bucket's step, by its last backward.
        before: likewise, by the first forward of the bucket's next step.
        last: ends of which there is no next step, in the order of `after`.
    """

    def __init__(self, row: Sequence[Action]) -> None:
        """Read a list."""
        backwards = {StepEnd(one.bucket, one.step): one for one in row if one.kind == "B"}
        # In reverse, so that of all forwards of a step the first one stays.
        forwards = {StepEnd(one.bucket, one.step): one for one in reversed(row) if one.kind == "F"}
        self.after = {one: end for end, one in backwards.items()}
        self.before = {one: StepEnd(end.bucket, end.step - 1) for end, one in forwards.items() if end.step > 0}
        ended = set(self.before.values())
        self.last = [self.after[one] for one in row if one in self.after and self.after[one] not in ended]


class Expected(NamedTuple):
    """A message that a stage waits for.

    Attributes:
        key: name of the message.
        shape: its shape.
        dtype: its dtype; `None` for that of hidden states.
    """

    key: Key | StepEnd
    shape: torch.Size
    dtype: torch.dtype | None = None


GradientRows = Callable[[int, MuxBatch], tuple[Rows, ...] | None]
"""Of a virtual stage and a micro-batch, the rows of its input whose gradients go back (`StageModel.gradient_rows`)."""


def _all_rows(virtual_stage: int, batch: MuxBatch) -> None:
    """Let all gradients go back."""


FIGURES_DTYPE = torch.float64
"""Dtype of losses and squared norms on their way: sums must not depend on the cut by more than fp32 shows."""


class Messages:
    """The messages of a template, as one stage sees them.

    Args:
        template: the template that all stages follow.
        slots: passes of each micro-batch of the template.
        stage: number of the stage whose view this is.
        num_tasks: number of tasks that step with a bucket, for buckets whose stages tell one another losses and norms
            at the ends of their steps; none by default.
        gradient_rows: the rows whose gradients go back; all by default.
    """

    def __init__(
        self,
        template: PipelineTemplate,
        slots: Mapping[Slot, Sequence[MuxBatch]],
        stage: int,
        num_tasks: Mapping[int, int] | None = None,
        gradient_rows: GradientRows = _all_rows,
    ) -> None:
        """Remember the steps."""
        self._template, self._slots, self._stage = template, slots, stage
        self._gradient_rows = gradient_rows
        self._num_tasks = num_tasks or {}

    def target(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) to which an action hands its result; `None` at the end of its way."""
        return self._neighbour(action.kind, action)

    def source(self, action: Action) -> tuple[int, int] | None:
        """Return the (stage, chunk) from which an action has its input; `None` where its way begins."""
        return self._neighbour("B" if action.kind == "F" else "F", action)

    def numbers(self, action: Action) -> Sequence[int]:
        """Return the passes of an action in the order in which it runs them: chains backward in reverse."""
        passes = self._slots[action.slot]
        forward = range(len(passes))
        # A later part adds to the gradients of the keys and values of an earlier one, which therefore runs last.
        return forward[::-1] if action.kind == "B" and is_chained(passes) else forward

    def keys(self, action: Action, chunk: int) -> list[Key]:
        """Return the messages of an action that go to a chunk of the receiver, in order."""
        return [Key.of(action.slot, number, chunk) for number in self.numbers(action)]

    def expected(self, kind: str, source: int, width: int) -> Iterator[Expected]:
        """Yield what another stage sends here, in its order: tensors `[T, D]`, and figures `[2, N]` of N tasks.

        Losses and squared norms of a bucket's step come down the pipeline behind its last gradient, and go up before
        the first hidden states of its next step.

        Args:
            kind: "F" for hidden states, "B" for gradients.
            source: number of the sending stage.
            width: D, width of the hidden states.
        """
        ends = StepEnds(self._template.actions[source]) if self._num_tasks else None
        goes_up, comes_down = kind == "F" and source == self._stage - 1, kind == "B" and source == self._stage + 1
        for action in self._template.actions[source]:
            if ends is not None and goes_up:
                yield from self._figures(ends.before.get(action))
            target = self.target(action)
            if action.kind == kind and target is not None and target[0] == self._stage:
                passes = self._slots[action.slot]
                for key in self.keys(action, target[1]):
                    yield Expected(key, torch.Size((self._num_rows(action, passes[key.number]), width)))
            if ends is not None and comes_down:
                yield from self._figures(ends.after.get(action))
        if ends is not None and goes_up:
            for end in ends.last:
                yield from self._figures(end)

    def sent(self, action: Action, number: int, result_TD: torch.Tensor) -> torch.Tensor:
        """Return what is sent of a result: of gradients `[R, D]`, the rows that go back, one at least.

        Args:
            action: the action whose result it is.
            number: which of its passes.
            result_TD: hidden states, or gradients of the action's input.
        """
        rows = self._rows_back(action, self._slots[action.slot][number])
        if rows is None:
            return result_TD
        return take_rows(result_TD, rows) if rows else result_TD.new_zeros(1, result_TD.shape[1])

    def received(self, action: Action, number: int, message: torch.Tensor) -> torch.Tensor:
        """Return an action's input `[T, D]` from what was sent of it; gradients of rows that were not sent are 0.

        Args:
            action: the action whose input it is.
            number: which of its passes.
            message: what has come.
        """
        if action.kind == "F":
            return message
        passed = self._slots[action.slot][number]
        rows = self._gradient_rows(self._virtual_stage(action) + 1, passed)
        if rows is None:
            return message
        return spread_rows(message[: num_rows_in(rows)], rows, passed.num_computed)

    def goes_back(self, action: Action, number: int) -> bool:
        """Whether a stage before the one of a forward needs gradients of its input.

        Args:
            action: a forward.
            number: which of its passes.
        """
        return self._gradient_rows(self._virtual_stage(action), self._slots[action.slot][number]) != ()

    def _num_rows(self, action: Action, passed: MuxBatch) -> int:
        """Return how many rows an action sends of what it makes of a pass."""
        rows = self._rows_back(action, passed)
        return passed.num_computed if rows is None else max(1, num_rows_in(rows))

    def _rows_back(self, action: Action, passed: MuxBatch) -> tuple[Rows, ...] | None:
        return self._gradient_rows(self._virtual_stage(action), passed) if action.kind == "B" else None

    def _virtual_stage(self, action: Action) -> int:
        return action.chunk * self._template.num_stages + action.stage

    def _figures(self, end: StepEnd | None) -> Iterator[Expected]:
        if end is not None and end.bucket in self._num_tasks:
            yield Expected(end, torch.Size((2, self._num_tasks[end.bucket])), FIGURES_DTYPE)

    def gradients_taken(self, other: int) -> dict[Key, list[Key]]:
        """Return, for hidden states that come from a stage, which gradients that stage has taken by then.

        A stage runs its list in order, so what it sends proves all that stands before it.

        Args:
            other: number of the sending stage.

        Returns:
            By the first message of each forward, the gradients that it proves and no earlier one did.
        """
        proven: dict[Key, list[Key]] = {}
        taken: list[Key] = []
        for action in self._template.actions[other]:
            source, target = self.source(action), self.target(action)
            if action.kind == "B" and source is not None and source[0] == self._stage:
                taken += self.keys(action, action.chunk)
            elif action.kind == "F" and target is not None and target[0] == self._stage:
                messages = self.keys(action, target[1])
                if messages and taken:
                    # At the first message, as it proves the most the earliest: gradients are freed as soon as they are
                    # known to be taken.
                    proven[messages[0]], taken = taken, []
        return proven

    def _neighbour(self, way: str, action: Action) -> tuple[int, int] | None:
        template = self._template
        return next_virtual_stage(way, action.stage, action.chunk, template.num_stages, template.num_chunks)


"""Name under which both ends of a channel know a message."""


class Outgoing(Protocol):
    """The sender's end of a channel."""

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Begin to send."""
        ...

    def release(self, key: Hashable) -> None:
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

    def take(self, key: Hashable) -> torch.Tensor:
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
        self._sends: dict[Hashable, tuple[torch.Tensor, Any]] = {}

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Begin to send; the tensor is kept until it is known to have been taken."""
        for old in [old for old, (_, work) in self._sends.items() if work.is_completed()]:
            del self._sends[old]  # NCCL knows; gloo does not until it is waited for
        tensor = tensor.contiguous()
        with self._processes.communicating(self._what):
            # Held beside the handle: the backend reads this memory until the message is taken.
            self._sends[key] = tensor, dist.isend(tensor, dst=self._target, group=self._group)

    def release(self, key: Hashable) -> None:
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
        self._posted: dict[Hashable, tuple[torch.Tensor, Any]] = {}
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

    def take(self, key: Hashable) -> torch.Tensor:
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
        self._tensors: dict[Hashable, torch.Tensor] = {}

    def put(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Lay a message down."""
        self._tensors[key] = tensor

    def take(self, key: Hashable) -> torch.Tensor:
        """Pick a message up."""
        return self._tensors.pop(key)

    def release(self, key: Hashable) -> None:
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
