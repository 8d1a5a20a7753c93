"""`TrainingLoop`: the steps of a run, and what happens between them.

`MultiTaskTrainer.train` calls `step` until it returns False. All processes do the same, in this order::

    agree         stop? tasks that ended elsewhere; commands of other threads; endings; a move or another plan
    evaluate      tasks that are about to take their first step (`eval_on_start`)
    train_step    rows -> micro-batches -> forward and backward -> optimizer steps
    after a step  callbacks, logs, evaluations, endings, files; commands of callbacks
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.records import task_settings
from peft_mux.engine.agreement import Agreement, require_consistent, tensors_digest
from peft_mux.engine.memory_shortage import run_within_memory
from peft_mux.engine.tasks.active_task import ActiveTask, UpdateOutcome, run_interval
from peft_mux.engine.work import StepWork
from peft_mux.errors import ForcedInterrupt
from peft_mux.log.callbacks import hears_steps
from peft_mux.task import TaskStatus
from peft_mux.trainer.evaluation import TaskEvaluator
from peft_mux.trainer.membership import Membership
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run, RunPlans, StepTime


class TrainingLoop:
    """Takes the steps of all running tasks, and does what is due between them.

    Args:
        run: the present run.
        placement: the model of this process.
        plans: the plan that is followed, the work of each step, and what it took.
        membership: adds and removes tasks between steps, and handles those that end.
        evaluator: evaluates tasks on their held-out rows.
        move_if_asked: moves the run to other replicas if that was asked for or pays off; returns whether it moved.

    Attributes:
        num_stream_tokens: tokens that went through the backbone of this process so far, padding included.
    """

    def __init__(
        self,
        run: Run,
        placement: Placement,
        plans: RunPlans,
        membership: Membership,
        evaluator: TaskEvaluator,
        move_if_asked: Callable[[], bool],
    ) -> None:
        self._run, self._placement, self._plans = run, placement, plans
        self.membership, self.evaluator, self._move_if_asked = membership, evaluator, move_if_asked
        self._last_step = StepTime()
        self._agreement = Agreement(run.processes)
        self._compared: set[str] = set()
        self.num_stream_tokens = 0

    def step(self) -> bool:
        """Take the next step of the run, or a window of steps, and do what is due around it.

        Returns:
            False if all processes stop here instead.
        """
        if not self.agree_on_step():
            return False
        self.evaluator.evaluate_new()
        if not self._run.table.running:  # their evaluation has failed them
            return True
        num_steps = self.num_steps_in_window()
        stepping = self.call_step_begin()
        if num_steps > 1:
            self.take_window(num_steps)
        else:
            self.train_step()
        self.after_step(stepping)
        self.call_task_events()
        return True

    def train_step(self, work: StepWork | None = None) -> None:
        """Take one step of every running task: the rows of its batch, forward and backward, its optimizer step.

        Args:
            work: the micro-batches of the step; by default they are read now.
        """
        run = self._run
        started = time.perf_counter()
        result, lost_s = run_within_memory(
            self._placement.executor,
            work or self._plans.next_works()[0],
            run.table,
            smaller_work=self._plans.smaller_work,
            cuts_rows=run.args.split_long_sequences,
            say=run.log.say,
            record=run.log.event,
        )
        self._call_all("on_pre_optimizer_step", result.losses)
        if self._placement.part.has_keepers:  # keepers send weights, so all processes must step the same tasks
            self._apply_endings(self._agreement.on_tasks(run.state.global_step, run.table, wants_stop=False)[0])
        steps = {name: loss for name, loss in result.losses.items() if run.table[name].status is TaskStatus.RUNNING}
        result = replace(result, losses=steps, norms=result.norms and {name: result.norms[name] for name in steps})
        run.processes.wait_for_device()
        run.is_updating = True
        self._placement.part.apply(run.table, result)
        # `apply` has waited for the device, so this is the time of the step and not of its launches.
        self._last_step = self._plans.record_step(result, time.perf_counter() - started - lost_s)
        run.state.global_step += 1
        run.is_updating = False
        self.num_stream_tokens += result.num_stream_tokens
        self._call_all("on_optimizer_step", steps)

    def _call_all(self, event: str, names: Iterable[str]) -> None:
        """Call an event of the run's callbacks, and of those of tasks that run."""
        self._run.callbacks.call(event)
        for task in map(self._run.table.__getitem__, names):
            if task.status is TaskStatus.RUNNING:
                # Trainer counts a step after `on_optimizer_step`.
                task.state.global_step = task.step - (event == "on_optimizer_step")
                self._run.log.callbacks[task.name].call(event)
                task.state.global_step = task.step

    def take_window(self, num_steps: int) -> None:
        """Take several steps without flushing the pipeline between them; something is due only at the last one.

        Each bucket of tasks steps when its own passes are done. Callbacks are called for all steps, one by one, after
        the last; none of them listens to single steps.
        """
        run, table, executor = self._run, self._run.table, self._placement.executor
        started = time.perf_counter()
        works = self._plans.next_works(num_steps)
        if len(works) == 1:  # the rows of the next step could not be read
            self.train_step(works[0])
            return
        outcomes: list[dict[str, UpdateOutcome]] = [{} for _ in works]
        stopped: set[str] = set()

        def update(step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]) -> frozenset[str]:
            """Step the tasks of a bucket; return all tasks that take no further step in the window."""
            run.processes.wait_for_device()
            alive = {name: loss for name, loss in losses.items() if name not in stopped}
            updated = table.update(alive, [norms[name] for name in alive])
            outcomes[step].update(updated)
            stopped.update(name for name, task in updated.items() if not task.is_stepped or task.rate_failure)
            return frozenset(stopped)

        run.is_updating = True
        results = executor.run_window(works, update)
        for number, result in enumerate(results):
            # In stream order, whichever bucket was done first.
            table.count(result, {name: outcomes[number][name] for name in result.losses if name in outcomes[number]})
            run.state.global_step += 1
            self.num_stream_tokens += result.num_stream_tokens
            if number + 1 < len(results):
                run.callbacks.call("on_step_end")
                self.call_step_begin()
        run.is_updating = False
        seconds = (time.perf_counter() - started) / len(results)
        last = results[-1]
        means = {name: sum(result.num_tokens[name] for result in results) // len(results) for name in last.num_tokens}
        self._last_step = self._plans.record_step(replace(last, num_tokens=means), seconds, num_steps=len(results))

    # ------------------------------------------------------------------ before a step

    def agree_on_step(self) -> bool:
        """Return whether all processes take another step, after stops on one process were applied to all.

        All processes are between the same two steps here, so the run also moves to other replicas, and changes its
        plan.

        Raises:
            ConfigError: on every process, if a task that runs for the first time has other settings or initial weights
                on one of them.
        """
        run, plans, agreement, target = self._run, self._plans, self._agreement, self._placement.target
        last, self._last_step = self._last_step, StepTime()
        if run.saver.lock is not None:
            run.saver.lock.renew()
        endings, wants_stop = agreement.on_tasks(
            run.state.global_step,
            run.table,
            wants_stop=run.control.should_training_stop,
            replicas="" if target is None else str(target.layout),
            last_step_s=last.seconds,
            last_passes_s=last.passes_s,
            num_commands=len(self.membership.queue.labels()),
            requests=self.membership.queue.labels(of_callbacks=True),
        )
        self._apply_endings(endings)
        # Each process has measured its own time, and all must make the same plan.
        plans.compare_step(last, agreement.slowest_s, agreement.passes_s)
        self.membership.apply_shared_commands(has_commands=agreement.has_commands)
        self.membership.handle_changes()
        # Before it is known whether there is another step: a task that callbacks register takes it.
        self.call_task_events()
        new = [task for task in run.table.running if task.name not in self._compared]
        if new and not run.processes.is_alone:
            self._compared |= {task.name for task in new}
            facts: dict[str, Any] = {task.name: task_settings(task) for task in new}
            # In other layouts processes hold different parts of the weights, which cannot be compared.
            if run.layout.is_data_parallel:
                for task in new:
                    parameters = self._placement.model.task_parameters(task.name)
                    weights = {name: weight.data for name, weight in parameters.items()}
                    facts[task.name]["initial weights (digest)"] = tensors_digest(weights)
            require_consistent(run.processes, {"tasks": facts})
        takes_step = bool(run.table.running) and not wants_stop
        # After the endings of other processes, as tasks that come or go make a move pay.
        if takes_step and not self._move_if_asked():
            plans.replan_if_faster()
        return takes_step

    def _apply_endings(self, endings: Mapping[str, tuple[TaskStatus, str]]) -> None:
        """End the tasks here that have ended on another process, for the same reason."""
        for name, (status, reason) in endings.items():
            task = self._run.table[name]
            if status is TaskStatus.FAILED:
                task.quarantine(reason)
            else:
                task.end(status, reason)

    def call_task_events(self) -> None:
        """Call the callbacks of tasks whose status has changed, and carry out their requests."""
        while self._run.callbacks.call_task_events():
            self.membership.apply_commands()

    def call_step_begin(self) -> list[str]:
        """Call the callbacks of a step that begins; return the tasks that take it."""
        self._run.callbacks.call("on_step_begin")
        for task in self._run.table.running:
            self._run.log.callbacks[task.name].step_begins()
        return [task.name for task in self._run.table.running]

    def num_steps_in_window(self) -> int:
        """Return how many steps are taken before all processes look at the run again, the same number on all."""
        run, executor = self._run, self._placement.executor
        if run.args.pipeline_flush != "auto" or executor.most_steps == 1:
            return 1
        # Elsewhere gradients are summed over processes. Decided by the layout, which all processes know: unequal
        # replicas would not all take part in the exchange.
        if len(run.layout.replicas) > 1 or any(replica.tp > 1 for replica in run.layout.replicas):
            return 1
        tasks, control = run.table.running, run.control
        callbacks = [
            *run.callbacks.handler.callbacks,
            *(callback for task in tasks for callback in task.task.callbacks),
        ]
        # A stream reads ahead of a single step.
        has_streams = any(task.loader.steps_per_epoch is None for task in tasks)
        is_asked = control.should_log or control.should_evaluate or control.should_save
        num_steps = 1
        if not (has_streams or is_asked or any(map(hears_steps, callbacks))):
            num_due = steps_until_due(tasks, run.args, run.state.global_step, last_step_s=self._agreement.slowest_s)
            num_steps = min(num_due, executor.most_steps)
        # Callbacks may differ between processes, and ask for different things.
        num_steps = min(number for (number,) in run.processes.exchange([num_steps]))
        return num_steps if num_steps > 1 and executor.gains_by_windows([task.name for task in tasks]) else 1

    # ------------------------------------------------------------------ after a step

    def after_step(self, names: Sequence[str]) -> None:
        """Do what is due after a step, in this order: callbacks, logs, evaluations, endings, files.

        Args:
            names: the tasks that have just stepped.
        """
        run = self._run
        run.callbacks.call("on_step_end")
        for name in names:
            # A task that failed in this step was not stepped.
            if run.table[name].status is TaskStatus.RUNNING:
                run.log.callbacks[name].step_ends()
        seconds_by_task = self._placement.model.objectives.own_seconds
        for name, seconds in seconds_by_task.items():
            run.log.note_user_code(name, "objective", seconds)
        seconds_by_task.clear()
        # Before evaluating: replicas share the held-out rows, so all must evaluate the same tasks.
        self._agree_on_requests()
        run.log.losses_if_due(run.args, run.control)
        self.evaluator.evaluate_if_due(names)
        # Again, as on_evaluate may have stopped a task or asked for a save on one process alone.
        self._agree_on_requests()
        # Before changes are reported, which is where a task that has taken all its steps succeeds.
        self.evaluator.quarantine_broken_endings()
        self.membership.handle_changes()
        # After the endings, so that a state that is resumed from knows them. A state of the run holds one of each
        # running task, so no other one is written next to it.
        if run.saver.is_due() or run.control.should_save:
            run.control.should_save = False
            # What callbacks have asked for at this step is part of its state: a killed run would not ask again.
            self.membership.apply_commands()
            self.save()
        else:
            asking = {name for name in names if run.log.callbacks[name].control.should_save}
            for task in run.saver.save_due_tasks(names, asking):
                run.log.callbacks[task.name].call("on_save")
        run.log.advance()
        every = run.args.torch_empty_cache_steps
        if every and run.state.global_step % every == 0:
            clear_device_cache()

    def _agree_on_requests(self) -> None:
        """Apply to all processes what callbacks did on one: they end a task, or ask for an evaluation or a save.

        A request to stop waits for `agree_on_step`, where all processes stop together.
        """
        run = self._run
        if run.processes.is_alone:
            return
        requests = self.membership.queue.labels(of_callbacks=True)
        endings, _ = self._agreement.on_tasks(run.state.global_step, run.table, wants_stop=False, requests=requests)
        self._apply_endings(endings)
        controls = [run.control, *(run.log.callbacks[task.name].control for task in run.table.running)]
        wishes = [(control, kind) for control in controls for kind in ("should_log", "should_evaluate", "should_save")]
        everywhere = run.processes.exchange([int(getattr(control, kind)) for control, kind in wishes])
        for (control, kind), asks in zip(wishes, zip(*everywhere, strict=True), strict=True):
            setattr(control, kind, any(asks))

    def save(self) -> None:
        """Save all tasks that have not ended, and call callbacks if that went well."""
        run = self._run
        for observer in run.log.observers:
            observer.on_saving()
        if not run.saver.save_run():
            return
        for observer in run.log.observers:
            observer.on_saved(run.table.running)
        for task in run.table.running:
            run.log.callbacks[task.name].call("on_save")
        run.callbacks.call("on_save")


LONGEST_WINDOW_S = 10.0
"""Seconds that a window may take: requests to stop, add or remove tasks wait for its end."""


def steps_until_due(
    tasks: Sequence[ActiveTask], args: MultiTaskTrainingArguments, global_step: int, *, last_step_s: float
) -> int:
    """Return after how many steps something is due: a log, an evaluation, a file, the end of a task, or a check.

    Args:
        tasks: the tasks that take the steps.
        args: the arguments of the run.
        global_step: steps that the run has taken.
        last_step_s: seconds of the last step on the slowest process, the same on all processes; 0 if not known yet.
    """
    due_after = [int(LONGEST_WINDOW_S / last_step_s) if last_step_s > 0 else 1]
    if args.logging_strategy != "no" and args.logging_first_step and global_step == 0:
        due_after.append(1)
    intervals = []  # each with the steps that were taken so far
    for strategy, interval in ((args.logging_strategy, args.logging_steps), (args.save_strategy, args.save_steps)):
        if strategy == "steps":
            intervals.append((run_interval(interval, tasks), global_step))
        elif strategy == "epoch":
            intervals += [(task.steps_per_epoch, task.step) for task in tasks]
    for task in tasks:
        due_after.append(task.num_steps - task.step)
        intervals += [(task.save_every, task.step), (task.eval_every, task.step)]
    due_after += [every - step % every for every, step in intervals if every > 0]
    return max(1, min(due_after))


@contextmanager
def stop_at_signal(request_stop: Callable[[int], None], *, echo_s: float = 0.0) -> Iterator[Callable[[], None]]:
    """Call `request_stop` at the first SIGINT or SIGTERM, and let the second have its usual effect.

    Signals can only be handled in the main thread; elsewhere this does nothing.

    Args:
        request_stop: called in the handler, with the number of the signal.
        echo_s: seconds within which a second one counts as an echo of the first: the processes of a launcher get Ctrl-C
            twice, from the terminal and from the launcher.

    Yields:
        What lets signals have their usual effect before the block ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    asked_at: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # By number: a SIGTERM after a Ctrl-C is the first one of its kind, and asks for the same.
        if number not in asked_at:
            asked_at[number] = time.monotonic()
            request_stop(number)
        elif time.monotonic() - asked_at[number] >= echo_s:
            signal.signal(number, before[number])
            # A separate exception: a task's code may raise KeyboardInterrupt too, which fails only that task.
            if before[number] is signal.default_int_handler:
                raise ForcedInterrupt
            signal.raise_signal(number)

    def restore() -> None:
        # The script that called handles signals in its own way after training.
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield restore
    finally:
        restore()
