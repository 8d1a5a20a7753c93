"""What one of the two processes of `benchmarks.processes.flush` does: one stage, steps with flushes and without."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from benchmarks.processes.pipeline_worker import Worker
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.work import StepWork
from peft_mux.scheduler.pipeline.launch import BucketLoad
from peft_mux.scheduler.pipeline.simulator import build_window, simulate
from peft_mux.scheduler.pipeline.template import build_template


class FlushWorker(Worker):
    """One stage of the pipeline."""

    def measure_flushes(self, num_steps: int) -> list[dict[str, Any]]:
        """Return the seconds of steps with each number of micro-batches, by round.

        Args:
            num_steps: steps of a window.
        """
        return [self._measure_flushes(count, num_steps) for count in self.settings.micro_batches]

    def _measure_flushes(self, count: int, num_steps: int) -> dict[str, Any]:
        work = self.work(count)
        loads = self._profiled(work, count)
        template = build_template(loads, "mux", links=self.link)
        tasks = tuple((name,) for name in self.settings.tasks)
        buckets = tuple((index,) for index in range(len(tasks)))
        self.executor.follow(PipelinePlan(template, tasks, buckets, tuple(loads), self.link))
        ways = {"flushed_s": self._flushed, "window_s": self._window}
        self.executor.sync = self.sync
        self._flushed([work])  # with it the processes exchange what each holds
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(self.settings.rounds + 1):
            for way in list(ways)[:: 1 if number % 2 else -1]:
                seconds = self._timed(ways[way], [work] * num_steps)
                if number:  # the first round is a warm-up
                    found[way].append(seconds)
        window = build_window(template, loads, num_steps, links=self.link)
        return {
            **found,
            "num_micro_batches": count,
            "planned_flushed_s": simulate(template, loads, links=self.link).makespan_s,
            "planned_window_s": simulate(window, loads, links=self.link).step_s,
        }

    def _profiled(self, work: StepWork, count: int) -> list[BucketLoad]:
        seen = self._latencies()
        for _ in range(5):
            self.profile(work, seen)
        return self.measured_loads(count, seen)[0]

    def _timed(self, way: Any, works: Sequence[StepWork]) -> float:
        """Return the seconds from the first start to the last end, by the clock of the machine."""
        self.processes.wait_for_all()
        begin_s = time.perf_counter()
        way(works)
        found = self.processes.gather((begin_s, time.perf_counter()))
        return max(end for _, end in found) - min(begin for begin, _ in found)

    def _flushed(self, works: Sequence[StepWork]) -> None:
        for work in works:
            norms = self.executor.run(work).norms
            assert norms is not None, "stages hold parts"
            self._step_all(norms)

    def _window(self, works: Sequence[StepWork]) -> None:
        def update(step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]) -> Collection[str]:
            del step, losses
            self._step_all(norms)
            return ()

        self.executor.run_window(works, update)

    def _step_all(self, norms: Mapping[str, torch.Tensor]) -> None:
        for name, norm in norms.items():
            self.optimizers[name].step(norm)
