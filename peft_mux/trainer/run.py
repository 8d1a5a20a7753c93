"""`Run`: the state of the present run that the parts of a trainer share; `RunPlans`: what its steps ask of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from transformers import TrainerState

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.saver import Saver
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.log.callbacks import RunCallbacks
from peft_mux.log.run_log import RunLog
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.scheduler.plan import Plan


class Run:
    """The state of a run that all parts share; each part keeps the rest of the state itself.

    Args:
        callbacks: the run's own callbacks, with its arguments, its state and its control.
        table: all tasks, with the state of each.
        layout: which process makes up which replica; a move to other replicas changes it.

    Attributes:
        args: the arguments that the trainer was given.
        state: the run's own `TrainerState`; its `global_step` counts steps of the run, not of a task.
        control: what callbacks ask of the run.
        log: takes every number and event.
        saver: writes adapters and states.
        processes: all processes of the run. They build the same trainer over the same tasks and agree on each step.
        is_in_train: whether `train` is between its first and its last step.
        is_updating: whether tasks are being updated. If a step was cut off meanwhile, some tasks have taken it and
            others have not, so that training can only resume from a saved state.
    """

    def __init__(self, callbacks: RunCallbacks, table: TaskTable, layout: ParallelLayout) -> None:
        self.callbacks, self.table, self.layout = callbacks, table, layout
        self.args, self.state, self.control = callbacks.args, callbacks.state, callbacks.control
        self.processes = Processes.of(self.args)
        is_quiet = self.args.log_level in ("warning", "error", "critical")
        self.log = RunLog(table, self.state, callbacks.log, is_shown=self.processes.is_main, is_quiet=is_quiet)
        self.saver = Saver(table, self.args, self.log, self.processes)
        self.is_in_train = self.is_updating = False

    @property
    def root(self) -> Path:
        """Folder of the run."""
        return output_folder(self.args)

    @property
    def replica(self) -> int:
        """Number of the replica that this process is part of, from 0."""
        return self.layout.place(self.processes.rank).replica

    def of_replicas(self, value: Any) -> list[Any]:
        """Gather a value from all processes if replicas share the rows; else return this one's."""
        return self.processes.gather(value) if self.layout.num_replicas > 1 else [value]


def output_folder(args: MultiTaskTrainingArguments) -> Path:
    """Return the folder of a run, which need not exist yet."""
    return Path(args.output_dir or "peft_mux_output")


def mark_main_process(state: TrainerState, args: MultiTaskTrainingArguments) -> None:
    """Set whether this process is the one that writes, in the state that callbacks get."""
    state.is_world_process_zero = args.process_index == 0
    state.is_local_process_zero = args.local_process_index == 0


class StepTime(NamedTuple):
    """What a step took on this process; zeros for no step.

    Attributes:
        plan: the plan that the step followed; `None` if there was none.
        num_tokens: tokens of the global batches of all tasks, on all processes.
        seconds: seconds that the passes and updates took.
        passes_s: seconds of these from the first pass to the end of the last one.
    """

    plan: Plan | None = None
    num_tokens: int = 0
    seconds: float = 0.0
    passes_s: float = 0.0


class RunPlans(Protocol):
    """Decides by plans which tasks share their passes, and turns a plan into the work of each step.

    `MultiTaskTrainer` takes `PlanFollower`, which plans with `peft_mux.planning` and learns from times.
    """

    def replan(self, resumed: Mapping[str, Any] | None = None) -> Plan:
        """Make another plan, follow it, and start the tasks that it admits.

        Args:
            resumed: what decided the last bits of the run that is resumed, by name, to plan as it did.
        """
        ...

    def replan_if_faster(self) -> bool:
        """Follow another plan if it is faster by measured times; every process calls this at once."""
        ...

    def next_works(self, num_steps: int = 1) -> list[StepWork]:
        """Return the next steps of all running tasks; fewer if rows cannot be read."""
        ...

    def smaller_work(self, work: StepWork, max_tokens: int) -> StepWork:
        """Return the same step in passes of at most `max_tokens`, and plan for such passes from now on."""
        ...

    def record_step(self, result: StepResult, seconds: float, *, num_steps: int = 1) -> StepTime:
        """Return what the last step took here, or each of several steps, if processes are still to compare it."""
        ...

    def compare_step(self, step: StepTime, slowest_s: float, process_s: Sequence[float]) -> None:
        """Compare a step with its plan, and the processes by the seconds of their passes."""
        ...
