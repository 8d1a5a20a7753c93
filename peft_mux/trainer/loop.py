"""Ends a run cleanly on Ctrl-C or SIGTERM: at the next step boundary, with everything saved; the second one forces."""

# MERGED: `MemoryShortage`: a step for which memory does not suffice is taken again in smaller passes.
# MERGED: `StepLoop`: the steps of a run, and what happens between them.

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from transformers.trainer_utils import TrainOutput

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.task_run import WindowSteps, steps_until_due
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.errors import ForcedInterrupt, MemoryBudgetError
from peft_mux.reporting.callbacks import hears_steps
from peft_mux.task import TaskStatus
from peft_mux.trainer.control import Control
from peft_mux.trainer.membership import Lifecycle, Membership
from peft_mux.trainer.opening import Opening
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.relocation import Relocation
from peft_mux.trainer.reporter import Reporter
from peft_mux.trainer.run import Run, write_task_files
from peft_mux.trainer.world import World


@contextmanager
def stop_at_signal(request_stop: Callable[[int], None], *, echo_s: float = 0.0) -> Iterator[None]:
    """Call `request_stop` at the first SIGINT or SIGTERM, and let the second have its usual effect.

    Signals can only be handled in the main thread; elsewhere this does nothing.

    Args:
        request_stop: called in the handler, with the number of the signal.
        echo_s: seconds within which a second one is taken for an echo of the first: of Ctrl-C, the processes of a
            launcher hear twice, from the terminal and from the launcher.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    asked_at: dict[int, float] = {}

    def force(number: int) -> None:
        signal.signal(number, before[number])
        # An error of its own: a task's code may raise KeyboardInterrupt too, which fails that task alone.
        if before[number] is signal.default_int_handler:
            raise ForcedInterrupt
        signal.raise_signal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # Told apart by number: a SIGTERM after a Ctrl-C is a first one of its kind, and asks for the same.
        if number not in asked_at:
            asked_at[number] = time.monotonic()
            request_stop(number)
        elif time.monotonic() - asked_at[number] >= echo_s:
            force(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        # The script that called has its own way with signals once training is over.
        for number, handler in before.items():
            signal.signal(number, handler)


_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""What torch says in a plain `RuntimeError` where the memory of a CPU is used up."""


class MemoryShortage:
    """Runs steps, and halves the tokens of passes where the device has no memory for them.

    A task's step does not depend on how its rows were cut into passes, so that nothing is lost but the time of the
    attempt; the smaller size is kept from then on, also in the states that are saved. Only where this process is alone:
    others would wait for the sums of a step that is begun anew.

    Args:
        run: the run under way.
        processes: the processes of the run.
        placement: the model of this process.
        plans: cuts the rows of a step into passes.
    """

    def __init__(self, run: Run, processes: Processes, placement: Placement, plans: PlanFollower) -> None:
        """Have enough memory so far."""
        self._run, self._processes, self._placement, self._plans = run, processes, placement, plans

    def run(self, work: StepWork, started: float) -> tuple[StepResult, float]:
        """Compute losses and gradients of a step.

        Args:
            work: the step.
            started: when it began, by `time.perf_counter`.

        Returns:
            What came of it, and when the attempt that succeeded began.

        Raises:
            MemoryBudgetError: if there is no memory for a pass of a single row.
        """
        while True:
            try:
                return self._placement.placed.executor.run(work), started
            except (RuntimeError, MemoryError) as error:
                if not self._processes.is_alone or not is_out_of_memory(error):
                    raise
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            # Behind the block: the traceback of the error holds the activations of the pass.
            work, started = self._smaller(work, reason), time.perf_counter()

    def _smaller(self, work: StepWork, reason: str) -> StepWork:
        self._forget_step()
        # By what a pass computes, which its bound counts: tokens that rows share are there once.
        largest = max(work.micro_batches, key=lambda micro_batch: micro_batch.num_computed)
        if len(largest.row_sequences) < 2 and not self._run.args.split_long_sequences:
            raise MemoryBudgetError(_too_long(largest, reason))
        most = max(1, largest.num_computed // 2)
        self._run.log.say(
            f"out of memory in a pass of {largest.num_computed:,} tokens ({reason}): the step is taken again, in passes"
            f" of at most {most:,} from now on"
        )
        self._run.log.event("out_of_memory", tokens=largest.num_computed, max_tokens=most, reason=reason)
        return self._plans.smaller_work(work, most)

    def _forget_step(self) -> None:
        """Drop all that the passes of a step have left, whose memory the next attempt needs."""
        for run in self._run.table:
            if run.optimizer is not None:
                run.optimizer.zero_gradients()
        model = self._placement.placed.model
        model.stream.key_values.clear()
        model.objectives.take_failures()
        gc.collect()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device, or the machine, has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error)


def _too_long(micro_batch: MuxBatch, reason: str) -> str:
    name = micro_batch.task_names[0]
    return (
        f"tasks.{name}: a pass of one row of {micro_batch.num_tokens:,} tokens does not fit into memory ({reason}); "
        "allowed: rows that do. Set max_length, gradient_checkpointing=True, bf16=True or split_long_sequences=True,"
        " or quantise the backbone; then go on with train(resume_from_checkpoint=True)."
    )


class StepLoop:
    """Takes steps of all running tasks until every task has ended or is paused.

    Args:
        run: the run under way.
        world: all processes of the run, which take every step together.
        placement: the model of this process.
        plans: the plan that is followed.
        collator: packs the rows on which finished tasks are proven.
        lifecycle: tells of tasks that start, end or fail.
        membership: lets tasks come and go between steps.
        relocation: moves the run to other replicas between steps.
        reporter: logs, evaluates, and tells what training came to.
        opening: brings the run to where its next step can be taken.
        control: takes what other processes ask of the run through its folder.
    """

    def __init__(
        self,
        run: Run,
        *,
        world: World,
        placement: Placement,
        plans: PlanFollower,
        collator: ChunkPackingCollator,
        lifecycle: Lifecycle,
        membership: Membership,
        relocation: Relocation,
        reporter: Reporter,
        opening: Opening,
        control: Control,
    ) -> None:
        """Take no step yet."""
        self._run, self._world, self._placement, self._plans = run, world, placement, plans
        self._collator, self._lifecycle, self._membership = collator, lifecycle, membership
        self._relocation, self._reporter, self._opening, self._control = relocation, reporter, opening, control
        self._memory = MemoryShortage(run, world.processes, placement, plans)
        self._num_stream_tokens = 0

    def train(self, resume: str | bool | None) -> TrainOutput:
        """Train until every task has ended or is paused.

        Args:
            resume: what to go on from; see `Opening.connect`.
        """
        # From the first moment on: what other threads ask for while the model loads waits for the first step too.
        with self._membership.queue.training(self._membership.finish_commands):
            # Connected first, so that the others hear of it at once if the folder is somebody else's.
            resume = self._opening.connect(resume)
            self._opening.check_resumed(resume)
            with self._run.saver.keep_folder(self._run.root, goes_on=not resume):
                self._opening.check_folder(resume)
                return self._train(resume)

    def _train(self, resume: str | bool | None) -> TrainOutput:
        self._opening.open(resume)
        # Timed from here on: loading and planning are no training.
        run, processes = self._run, self._world.processes
        started, waited_before_s = time.perf_counter(), processes.waited_s
        first_token, first_step = self._num_stream_tokens, run.state.global_step
        try:
            with stop_at_signal(run.interrupt, echo_s=0.0 if processes.is_alone else 2.0):
                self._opening.begin()
                with self._control.listening(is_alone=processes.is_alone):
                    self._take_steps()
        except Exception:
            run.log.end_trackers()
            raise
        finally:
            run.log.progress.stop()
            run.is_in_train = False
        seconds, waited_s = time.perf_counter() - started, processes.waited_s - waited_before_s
        self._lifecycle.settle(processes)
        # The last step need not be a multiple of `save_steps`.
        if not run.saver.is_current:
            self._save()
        run.hub.wait()
        run.callbacks.call_task_events()
        return self._reporter.finish(
            seconds, waited_s, self._num_stream_tokens - first_token, run.state.global_step - first_step
        )

    def _take_steps(self) -> None:
        """Take steps, and all that is due between two of them, until no process takes another one."""
        self._run.callbacks.begin_training(self._run.table)
        # Callbacks may have asked for tasks in on_train_begin, and others before it.
        self._membership.apply_commands()
        self._tell_changes()
        while self._agree_on_step():
            self._reporter.evaluate_new()
            if not self._run.table.running:  # what they were evaluated with has failed them
                continue
            num_steps = self._num_steps_in_window()
            stepping = self._call_step_begin()
            if num_steps > 1:
                self._take_window(num_steps)
            else:
                self.step()
            self._after_step(stepping)
            # Before processes compare their tasks: every one of them has the same ones by then, or the run ends.
            self._membership.apply_commands()
            self._tell_changes()

    def _tell_changes(self) -> None:
        """Tell callbacks what has become of tasks, and do what they ask for then."""
        while self._run.callbacks.call_task_events():
            self._membership.apply_commands()

    def step(self) -> None:
        """Take one step of every running task, without anything that happens between two steps."""
        started = time.perf_counter()
        self._run_step(self._plans.next_work(), started)

    def _run_step(self, work: StepWork, started: float) -> None:
        result, started = self._memory.run(work, started)
        self._run.is_updating = True
        self._run.table.apply(result)
        # `apply` has waited for the device, so this is the time of the step and not of its launches.
        self._plans.record_step_time(result, time.perf_counter() - started)
        self._run.state.global_step += 1
        self._run.is_updating = False
        self._num_stream_tokens += result.num_stream_tokens

    def _take_window(self, num_steps: int) -> None:
        """Take several steps between which a pipeline is not flushed, and in which nothing is due but at the last one.

        Callbacks are told of all of them, one by one, behind the last; none of them hears single steps.
        """
        started, table, executor = time.perf_counter(), self._run.table, self._placement.placed.executor
        works = self._plans.next_works(num_steps)
        if len(works) == 1:
            self._run_step(works[0], started)
            return
        assert isinstance(executor, PipelineExecutor), "others take one step at a time"
        steps = WindowSteps(table, len(works))
        self._run.is_updating = True
        results = executor.run_window(works, steps.update)
        for number, result in enumerate(results):
            steps.count(number, result)
            self._run.state.global_step += 1
            self._num_stream_tokens += result.num_stream_tokens
            if number + 1 < len(results):
                self._run.callbacks.call("on_step_end")
                self._call_step_begin()
        self._run.is_updating = False
        seconds = (time.perf_counter() - started) / len(results)
        self._plans.record_step_time(_mean(results), seconds, num_steps=len(results))

    # ------------------------------------------------------------------ before a step

    def _num_steps_in_window(self) -> int:
        """Return how many steps are taken before all processes look at the run again, the same number on all."""
        executor = self._placement.placed.executor
        if self._run.args.pipeline_flush != "auto" or not isinstance(executor, PipelineExecutor):
            return 1
        # Elsewhere gradients are summed over processes. By the layout, which all know alike: unlike replicas would not
        # all come to the exchange.
        replicas = self._world.layout.replicas
        if len(replicas) > 1 or any(one.tp > 1 for one in replicas):
            return 1
        # Callbacks are those of each process, and may be told and ask for other things on each.
        num_steps = min(one[0] for one in self._world.processes.exchange([self._num_steps_here()]))
        names = [run.name for run in self._run.table.running]
        return num_steps if num_steps > 1 and executor.gains_by_windows(names) else 1

    def _num_steps_here(self) -> int:
        """Return how many steps this process could take before something of its own is due."""
        run = self._run
        tasks, control = run.table.running, run.control
        callbacks = [*run.callbacks.handler.callbacks, *(one for own in tasks for one in own.task.callbacks)]
        # A stream reads ahead of a single step.
        has_streams = any(own.loader.steps_per_epoch is None for own in tasks)
        is_asked = control.should_log or control.should_evaluate or control.should_save
        if has_streams or is_asked or any(map(hears_steps, callbacks)):
            return 1
        return steps_until_due(tasks, run.args, run.state.global_step, last_step_s=self._world.slowest_s)

    def _agree_on_step(self) -> bool:
        """Return whether all processes take another step; what another process has stopped is stopped here.

        This is also where the run moves to other replicas, as all processes stand between the same two steps.
        """
        wants_stop = self._world.agree_on_tasks(
            self._run.state.global_step,
            wants_stop=self._run.control.should_training_stop,
            replicas=self._relocation.target,
            last_step_s=self._plans.last_step_s,
            last_passes_s=self._plans.last_passes_s,
            num_commands=len(self._membership.queue.labels),
        )
        # Each process has a time of its own, and all must plan alike.
        self._plans.observe_step_time(self._world.slowest_s, self._world.passes_s)
        self._membership.apply_shared_commands()
        self._lifecycle.handle_changes()
        # Before it is known whether there is another step: a task that callbacks register takes it.
        self._tell_changes()
        # With those that the endings of other tasks have made room for.
        self._world.compare_new_tasks(self._placement.model)
        takes_step = bool(self._run.table.running) and not wants_stop
        # After the endings of other processes, as it is tasks that have come or gone that make a move pay.
        if takes_step and self._relocation.move_if_asked():
            self._plans.replan()
        elif takes_step:
            self._plans.replan_if_faster()
        return takes_step

    def _call_step_begin(self) -> list[str]:
        """Tell callbacks that a step begins; return the tasks that take it."""
        self._run.callbacks.call("on_step_begin")
        for run in self._run.table.running:
            self._run.log.callbacks[run.name].step_begins()
        return [run.name for run in self._run.table.running]

    # ------------------------------------------------------------------ after a step

    def _after_step(self, names: Sequence[str]) -> None:
        """Do what is due after a step, in this order: callbacks, logs, evaluations, endings, files.

        Args:
            names: the tasks that have just stepped.
        """
        self._run.callbacks.call("on_step_end")
        for name in names:
            # A task that failed in this step was not stepped.
            if self._run.table[name].status is TaskStatus.RUNNING:
                self._run.log.callbacks[name].step_ends()
        self._placement.note_own_losses()
        # Before evaluating: replicas share the held-out rows, so all must evaluate the same tasks.
        self._agree_on_requests()
        self._reporter.log_if_due()
        self._reporter.evaluate_if_due(names)
        # Again, as on_evaluate may have stopped a task or asked for a save on one process alone.
        self._agree_on_requests()
        # Before changes are told, which is where a task that has taken all its steps succeeds.
        self._quarantine_broken_endings()
        self._lifecycle.handle_changes()
        # After the endings, so that a state which is resumed from knows them.
        self._save_if_due(names)
        self._run.log.advance()

    def _agree_on_requests(self) -> None:
        """Bring what callbacks did on single processes to all, where what follows needs every one of them.

        What callbacks did is to end a task, or to ask for an evaluation or a save; `_agree_on_step` sees to stopping.
        """
        if self._world.processes.is_alone:
            return
        control = self._run.control
        asked = control.should_save, control.should_evaluate
        control.should_save, control.should_evaluate = self._world.agree_on_requests(self._run.state.global_step, asked)

    def _quarantine_broken_endings(self) -> None:
        """Fail the tasks whose last update left weights without a finite loss; other updates are tested by the next."""
        # An update is judged by the loss of the step after it, which the last update does not have.
        ended = {run.name: run for run in self._run.table.running if run.step >= run.num_steps}
        if not ended:
            return
        batches = [run.loader.batch(run.step - 1) for run in ended.values()]
        micro_batches = self._collator.micro_batches(batches, max_tokens=self._plans.max_tokens)
        broken = self._placement.placed.executor.non_finite_tasks(micro_batches)
        # Why losses of their own have failed in this pass, which each process knows of its own rows alone.
        failures = self._placement.placed.model.objectives.take_failures()
        reasons = {name: text for own in self._world.processes.gather(failures) for name, text in own.items()}
        for name in broken:
            non_finite = f"non_finite: loss after the last step, {ended[name].step - 1}"
            ended[name].quarantine(reasons.get(name, non_finite))

    def _save_if_due(self, names: Sequence[str]) -> None:
        """Save all tasks if the run calls for it, or else those that have just stepped and call for it themselves."""
        # A state of the run holds one of each running task, so none is written beside it.
        if self._run.saver.is_due() or self._run.control.should_save:
            self._run.control.should_save = False
            self._save()
        else:
            self._run.saver.save_due_tasks(list(names))

    def _save(self) -> None:
        """Save all tasks that have not ended, and tell callbacks if that went well."""
        if self._run.saver.save_run():
            for run in self._run.table.running:
                self._run.log.callbacks[run.name].call("on_save")
            self._run.callbacks.call("on_save")
            if self._run.saver.is_writer and self._run.args.push_to_hub:
                for run in self._run.table.running:
                    write_task_files(self._run, run)
                self._run.hub.saved(self._run.table.running)


def _mean(results: Sequence[StepResult]) -> StepResult:
    """Return the last of several steps with the mean tokens of all of them."""
    names = results[-1].num_tokens
    return replace(
        results[-1], num_tokens={name: sum(one.num_tokens[name] for one in results) // len(results) for name in names}
    )
