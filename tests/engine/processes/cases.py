"""Runs of several real processes for the tests of data parallelism: what each process does, and how they are started.

Processes are forked from one server that has imported everything, as imports take far longer than these runs. They meet
as those of `torchrun` do: through the environment, on 127.0.0.1, with gloo.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import TrainerCallback

from peft_mux import Task
from peft_mux.engine.processes import Processes
from tests.invariants import mux_lab as lab
from tests.paths import ROOT
from tests.shortcuts import take_shortcuts

TIMEOUT_S = 30
NUM_STEPS = 8


@dataclass
class Outcome:
    """What one process gave.

    Attributes:
        value: what its part returned; `None` where it raised or died.
        error: type and message of what it raised.
        printed: on standard output.
        seconds: that it ran.
        exit_code: of the process; negative for a signal.
    """

    value: Any = None
    error: str = ""
    printed: str = ""
    seconds: float = 0.0
    exit_code: int | None = None


@dataclass
class Part:
    """What a run showed to one process.

    Attributes:
        losses: of each task by its steps.
        weights: final ones of each task: as this process has them, or whole as the run saved them (`layout_cases`).
        statuses: final ones, with reasons.
        step: of the run.
        digests: of weights and optimizer state of each task after each step.
        norms: gradient norms of each task by its steps.
        num_bytes: that the last step added up.
        held: number of adapter elements of each task in this process.
        frozen: number of frozen elements in this process.
        written: what this process wrote on disk.
        report: of the trainer.
        pass_reports: planned against executed passes of each replica.
    """

    losses: dict[str, list[float]]
    weights: dict[str, dict[str, np.ndarray]]
    statuses: dict[str, tuple[str, str]]
    step: int
    digests: dict[str, list[str]] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    num_bytes: int = 0
    held: dict[str, int] = field(default_factory=dict)
    frozen: int = 0
    written: list[str] = field(default_factory=list)
    report: str = ""
    pass_reports: tuple[Any, ...] = ()


def assert_alike(parts: Sequence[Part]) -> None:
    """Assert that all processes went through the same bits at every step."""
    for rank, part in enumerate(parts[1:], start=1):
        for what in ("losses", "norms", "digests", "statuses", "step"):
            assert getattr(part, what) == getattr(parts[0], what), f"{what} of rank {rank} differ"


def assert_as_one(part: Part, one: Part, *, but: Sequence[str] = (), from_step: int = 0) -> None:
    """Assert that several processes have the result of one, except for some tasks; resumed ones from a step on."""
    names = [name for name in one.weights if name not in but]
    assert names == [name for name in part.weights if name not in but]
    assert part.step == one.step
    for name in names:
        assert part.statuses[name] == one.statuses[name]
        if len(one.losses[name]) > from_step:
            lab.assert_close(part.losses[name], one.losses[name][from_step:], 1e-5, name)
            if one.norms:
                lab.assert_close(part.norms[name], one.norms[name][from_step:], 1e-4, name)
        else:
            assert not part.losses.get(name), f"{name} had ended before step {from_step}"
        assert part.weights[name].keys() == one.weights[name].keys()
        for key, weight in one.weights[name].items():
            error = np.linalg.norm(part.weights[name][key] - weight)
            assert error <= 1e-4 * np.linalg.norm(weight), f"{name} {key}: {error}"


# ------------------------------------------------------------------- starting


def launch(world_size: int, part: Callable[..., Any], *arguments: Any, limit_s: float = 60.0) -> list[Outcome]:
    """Run `part(rank, *arguments)` in as many processes as asked for; end those that outlast the limit."""
    context = server()
    port = _free_port()
    running = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_worker, args=(sender, rank, world_size, port, part, arguments), daemon=True)
        process.start()
        sender.close()
        running.append((process, receiver))
    deadline = time.monotonic() + limit_s
    return [_outcome(process, receiver, deadline) for process, receiver in running]


def server() -> Any:
    """Return the context whose server has imported this module and trained; it reads its path from the environment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.lab", "tests.engine.processes.warm"])
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")  # autograd's threads for a GPU would not outlive a fork
        forkserver.ensure_running()
    return context


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return what the processes returned; fail with the first error."""
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(outcomes) if outcome.error]
    assert not errors, "\n".join(errors)
    assert all(outcome.exit_code == 0 for outcome in outcomes), [outcome.exit_code for outcome in outcomes]
    return [outcome.value for outcome in outcomes]


def _outcome(process: Any, receiver: Any, deadline: float) -> Outcome:
    outcome = Outcome()
    with contextlib.suppress(EOFError):
        if receiver.poll(max(0.1, deadline - time.monotonic())):
            outcome = receiver.recv()
        else:
            outcome.error = "still running at the limit"
            process.kill()
    process.join(10)
    outcome.exit_code = process.exitcode
    return outcome


def _worker(sender: Any, rank: int, world_size: int, port: int, part: Callable[..., Any], arguments: Any) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in names.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    take_shortcuts(pytest.MonkeyPatch(), is_rank=True)
    outcome, printed, started = Outcome(), io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stdout(printed):
            outcome.value = part(rank, *arguments)
    except BaseException as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.printed, outcome.seconds = printed.getvalue(), time.monotonic() - started
    sender.send(outcome)
    sender.close()
    if torch.distributed.is_initialized() and not outcome.error:
        torch.distributed.destroy_process_group()


def named_in(error: str) -> set[int]:
    """Return the ranks that an error names as the cause of what this process did not get."""
    cause = error.split("got no answer")[1].split(": ", 1)[1]
    return {int(rank) for rank in re.findall(r"rank (\d+)", cause)}


def connected(timeout_s: float = 60.0, device: torch.device | None = None) -> Processes:
    """Return this process among the others of its launch, connected."""
    torch.distributed.init_process_group("gloo")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    processes = Processes(rank, world_size, device=device, timeout_s=timeout_s)
    processes.connect()
    return processes


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# ---------------------------------------------------------------------- tasks


def five_tasks(**changed: Any) -> list[Task]:
    """Return tasks of unequal ranks, targets, batches, lengths, dropout and steps; one takes one row a step."""
    one, packed = {"max_steps": NUM_STEPS, **changed}, {"packing": True, "max_length": 12}
    return [
        lab.small_task("wide", data_seed=1, rank=16, length=9, lora_dropout=0.1, **one),
        lab.small_task("narrow", data_seed=2, rank=2, length=23, target_modules=["q_proj", "v_proj"], seed=5),
        lab.small_task("alone", data_seed=3, rank=4, length=31, train_batch_size=1, learning_rate=1e-3),
        # One of its weights has a gradient of almost zero, whose rounding AdamW would turn into an update of full size.
        lab.small_task(
            "large",
            data_seed=4,
            rank=8,
            length=14,
            train_batch_size=7,
            weight_decay=0.1,
            max_steps=6,
            adam_epsilon=1e-6,
        ),
        lab.small_task(
            "plain", data_seed=5, rank=3, length=5, train_batch_size=3, optim="sgd", learning_rate=0.1, **packed
        ),
    ]


# ---------------------------------------------------------------- what is run


def run(folder: Path, tasks: Sequence[Task], *, resume: bool = False, recorder: Any = None, **arguments: Any) -> Part:
    """Train, and return what it showed."""
    options = {"max_tokens_per_micro_batch": 64, "ddp_timeout": TIMEOUT_S, **arguments}
    recorder = recorder or lab.Recorder()
    trainer = lab.make_trainer(tasks, folder, recorder=recorder, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    weights = {run.name: lab.weights(trainer, run.name) for run in trainer.table}
    return Part(
        losses=recorder.losses,
        digests=recorder.digests,
        weights={name: {key: value.numpy() for key, value in own.items()} for name, own in weights.items()},
        statuses={run.name: (run.status.value, run.reason) for run in trainer.table},
        step=trainer.state.global_step,
        num_bytes=trainer._placement.executor.sync.num_bytes,
        report=trainer.report(),
    )


def in_separate_folders(rank: int, folder: Path) -> Part:
    """Train on machines without a shared disk: the same relative path, seen from other folders."""
    (folder / f"host-{rank}").mkdir(parents=True)
    os.chdir(folder / f"host-{rank}")
    return run(Path("run"), five_tasks(), save_strategy="steps")


def resume_five(rank: int, folder: Path) -> Part:
    """Resume the run of a folder."""
    return run(folder, five_tasks(), resume=True, save_strategy="steps", save_steps=2)


class _Repeater(lab.Recorder):
    """Gets SIGTERM again in the last save, as from a launcher that passes on what it got itself."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Send the signal."""
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


def stopped_by_a_signal(rank: int, folder: Path) -> Part:
    """Train with checkpoints; the last process gets SIGTERM in step 5, and all processes get it in the last save."""
    is_last = rank == int(os.environ["WORLD_SIZE"]) - 1
    acts = {4: lambda trainer: os.kill(os.getpid(), signal.SIGTERM)} if is_last else {}
    recorder = _Repeater(at_begin=acts)
    return run(folder, five_tasks(), recorder=recorder, save_strategy="steps", save_steps=2)


def killed(rank: int, folder: Path, victim: int) -> Part:
    """Train with checkpoints; one process is killed before its sixth step, and another is slow to see who has ended."""
    if 0 < rank != victim:
        status = psutil.Process.status
        psutil.Process.status = lambda process: time.sleep(0.3) or status(process)  # type: ignore[method-assign]
    acts = {5: lambda trainer: os.kill(os.getpid(), signal.SIGKILL)} if rank == victim else {}
    recorder = lab.Recorder(at_begin=acts)
    return run(folder, five_tasks(), recorder=recorder, save_strategy="steps", save_steps=2)


def hung(rank: int, folder: Path, timeout_s: int) -> Part:
    """Train; the last process hangs for much longer than the time limit."""
    acts = {3: lambda trainer: time.sleep(4 * timeout_s)} if rank == 1 else {}
    return run(folder, five_tasks(), recorder=lab.Recorder(at_begin=acts), ddp_timeout=timeout_s)


def poisoned(rank: int, folder: Path) -> Part:
    """Train; on the last process alone the weights of one task become NaN before step 4."""

    def spoil(trainer: Any) -> None:
        for weight in trainer.model.task_parameters("wide").values():
            weight.data.fill_(float("nan"))

    acts = {3: spoil} if rank == 1 else {}
    return run(folder, five_tasks(), recorder=lab.Recorder(at_begin=acts))


def with_another_configuration(rank: int, folder: Path) -> Part:
    """Train; rank 1 has another rate in one task and another seed of the run."""
    tasks = five_tasks(learning_rate=1e-2 if rank == 1 else 1e-3)
    return run(folder, tasks, seed=7 if rank == 1 else 42)


def with_other_weights(rank: int, folder: Path) -> Part:
    """Train; rank 1 has another last value in the output head."""
    model = lab.tiny_llama()
    model.lm_head.weight.data[-1, -1] += rank
    trainer = lab.make_trainer(five_tasks(), folder, model=model, ddp_timeout=TIMEOUT_S)
    trainer.train()
    raise AssertionError("trained on two backbones")


def failing_alone(rank: int, folder: Path, error_file: str) -> Part:
    """Train; a callback of the run raises on rank 1 alone, under a launcher that asks for a file of its error."""
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(folder / error_file)

    def fail(trainer: Any) -> None:
        raise OSError("the disk of rank 1 is full")

    return run(folder, five_tasks(), recorder=lab.Recorder(at_end={3: fail} if rank == 1 else {}))


def waiting_for_the_device(rank: int) -> None:
    """Fail on rank 1; on the others the device waits for it until groups are aborted, as in a collective of NCCL."""
    released = threading.Event()
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: released.wait(TIMEOUT_S))
    with pytest.MonkeyPatch.context() as patch:
        # A device without numbers; its groups are of gloo.
        patch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        patch.setattr(torch, "Event", lambda device: event)
        patch.setattr("peft_mux.engine.processes._end", lambda group: released.set())
        processes = connected(device=torch.device("meta"))
        with processes.together():
            if rank == 1:
                raise OSError("the disk of rank 1 is full")
            processes.wait_for_device()


def waiting_for_a_process_that_waited_for_another(rank: int) -> None:
    """Fail on rank 1; rank 0 learns of it and keeps a handle of its group with rank 2, which waits for rank 0 alone."""
    processes = connected()
    processes.create_groups([(0, 2)])
    with pytest.MonkeyPatch.context() as patch, processes.together():
        # Rank 0 stays until the others know the cause.
        patch.setattr("peft_mux.engine.processes._MOST_GRACE_S", TIMEOUT_S)
        if rank == 1:
            raise OSError("the disk of rank 1 is full")
        kept = processes.all_reduce(torch.ones(1), (0, 2))
        kept.wait()
        if rank == 0:
            processes.gather(0)
        processes.all_reduce(torch.ones(1), (0, 2)).wait()


class FailsOnce(TrainerCallback):
    """A task's own callback that raises on one process."""

    def __init__(self, event: str, rank: int) -> None:
        """Remember where."""
        self.rank = rank
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3 and int(os.environ["RANK"]) == self.rank:
            raise ValueError("no such metric")


class BlockingStream:
    """A stream that gives nothing more on rank 1 after ten rows."""

    def __init__(self, rank: int) -> None:
        """Remember the process."""
        self.rank = rank

    def __iter__(self) -> Any:
        """Yield rows."""
        for number, row in enumerate(lab.rows(11, 1000, 6, 12)):
            if number == 10 and self.rank == 1:
                threading.Event().wait()
            yield row


def with_a_stream_that_blocks(rank: int, folder: Path) -> Part:
    """Train five tasks together with another whose stream blocks on rank 1."""
    config, data = five_tasks()[0].peft_config, BlockingStream(rank)
    options: dict[str, Any] = {"train_batch_size": 4, "max_steps": NUM_STEPS, "learning_rate": 1e-3}
    blocked = Task(name="blocked", peft_config=config, train_dataset=data, data_timeout_s=1.0, **options)
    return run(folder, [*five_tasks(), blocked])


def watched(rank: int, folder: Path) -> Part:
    """Train with checkpoints and everything printed; write down what this process writes below the folder."""
    written: list[str] = []
    opened_to_write = os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def hook(event: str, details: tuple[Any, ...]) -> None:
        changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
        writes = event == "open" and isinstance(details[2], int) and bool(details[2] & opened_to_write)
        if (changes or writes) and str(folder) in str(details[0]):
            written.append(f"{event} {details[0]}")

    sys.addaudithook(hook)
    tasks = five_tasks(eval_dataset=lab.rows(3, 3, 5, 9), eval_steps=4)
    part = run(
        folder,
        tasks,
        save_strategy="steps",
        save_steps=2,
        logging_strategy="steps",
        logging_steps=2,
        disable_tqdm=False,
    )
    part.written = written
    return part


def asked_by_threads(rank: int, folder: Path) -> Part:
    """Train; a thread of each process makes the same requests at its own time, and one request that no other process
    makes."""
    answers: list[Any] = []

    def begin(trainer: Any) -> None:
        def ask() -> None:
            time.sleep(0.05 * rank)
            answers.append(
                trainer.register_tasks([lab.small_task("late", data_seed=9, rank=4, length=11, max_steps=4)]).result(
                    timeout=TIMEOUT_S
                )
            )
            answers.append(trainer.pause_task("narrow" if rank == 0 else "large"))

        threading.Thread(target=ask, daemon=True).start()

    def wait_for_arrival(trainer: Any) -> None:
        # No process ends its run before the task has come.
        time.sleep(0.1)

    acts = dict.fromkeys(range(1, NUM_STEPS), wait_for_arrival)
    part = run(folder, five_tasks(), recorder=lab.Recorder(at_begin={1: begin}, at_end=acts))
    assert answers[0] is None, "it came"
    refusal = answers[1].exception(timeout=TIMEOUT_S)
    part.report = "" if refusal is None else str(refusal)
    return part


def waiting_when_the_last_one_fails(rank: int, folder: Path) -> Part:
    """Train one task after another; the first one's own callback raises on rank 1 alone."""
    first = lab.small_task("first", data_seed=8, max_steps=NUM_STEPS, callbacks=[FailsOnce("on_step_end", 1)])
    second = lab.small_task("second", data_seed=9, max_steps=3)
    return run(folder, [first, second], planner="sequential")
