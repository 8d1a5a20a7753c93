"""One contender in its own processes: trains a workload to its end, and says when each step ended.

Run by `runs.py`, under `torch.distributed.run` where there are several processes: `worker.py JOB`, in JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.harness import hand_over
from benchmarks.training.workloads import IGNORE_INDEX, Case, TaskWorkload, Workload


def main() -> None:
    """Do the job that the command line names; the first process hands over what it found."""
    job = json.loads(sys.argv[1])
    result = {"train": train, "hf": train_hf, "prepare": prepare}[job["kind"]](job)
    if result is not None:
        hand_over(result)


def train(job: dict[str, Any]) -> dict[str, Any] | None:
    """Train by peft_mux in the layout of the job's arguments; `None` on all processes but the first."""
    import torch
    from transformers import TrainerCallback

    torch.set_num_threads(1)
    ends_s: list[float] = []
    planned_s: list[float] = []
    counts: list[list[int]] = []
    trainer, workload = _trainer(job)

    class Ends(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends_s.append(time.perf_counter())
            counts.append([trainer.task_states[task.name].global_step for task in workload.tasks])
            steps = trainer._plans._steps
            planned_s.append(max(getattr(steps.shares, "expected_s", ()) or (0.0,)) if steps is not None else 0.0)

    trainer.add_callback(Ends())
    trainer.train()
    if not trainer._run.processes.is_main:
        return None
    losses = {
        task.name: [entry["loss"] for entry in trainer.task_states[task.name].log_history if "loss" in entry]
        for task in workload.tasks
    }
    return {"ends_s": ends_s, "planned_s": planned_s, "counts": counts, "losses": losses, "steps": workload.num_steps}


def train_hf(job: dict[str, Any]) -> dict[str, Any]:
    """Train by transformers' Trainer and PEFT, one task after another, with as many threads as the others have."""
    import torch

    from benchmarks.training.baselines import contender

    torch.set_num_threads(job["threads"])
    case = Case.from_json(job["case"])
    workload = _selected(case.workload(), job)
    run = contender("hf")(case.model.build, workload, job["records_losses"])
    return {"steps_s": run.steps_s, "losses": run.losses}


def prepare(job: dict[str, Any]) -> dict[str, Any]:
    """Save the backbone, measure its profile, and find the memory under which one process holds so many tokens."""
    import torch

    from peft_mux.planning.replica_facts import run_facts

    torch.set_num_threads(1)
    case = Case.from_json(job["case"])
    case.model.build().save_pretrained(job["backbone"])
    trainer, _ = _trainer(job)
    facts_of_model: dict[str, Any] = {}
    if job.get("profile"):
        profile = trainer.measure_profile(job["profile_s"])
        Path(job["profile"]).write_text(profile.to_json(), encoding="utf-8")
    if job.get("tokens"):
        facts = run_facts(trainer._plans.planner, trainer.table.plannable)
        facts_of_model["limit_gib"] = facts.memory.peak_bytes(facts.loads, job["tokens"]) / 2**30
    return facts_of_model


def _trainer(job: dict[str, Any]) -> tuple[Any, Workload]:
    from benchmarks.training.mux import trainer_for

    workload = _selected(Case.from_json(job["case"]).workload(), job)
    options = job.get("arguments", {})
    return trainer_for(lambda: job["backbone"], workload, job["folder"], job["records_losses"], **options), workload


def _selected(workload: Workload, job: dict[str, Any]) -> Workload:
    """Return the tasks of a job, its rows padded where it asks for that."""
    names = job.get("tasks") or [task.name for task in workload.tasks]
    tasks = [task for task in workload.tasks if task.name in names]
    if job.get("padded"):
        longest = max(len(row["input_ids"]) for task in tasks for row in task.rows)
        tasks = [_padded(task, longest) for task in tasks]
    return replace(workload, tasks=tuple(tasks))


def _padded(task: TaskWorkload, length: int) -> TaskWorkload:
    """Return a task whose rows are filled up at their end with tokens that are no targets, which no other sees."""
    rows = tuple(
        {
            "input_ids": row["input_ids"] + [0] * (length - len(row["input_ids"])),
            "labels": row["labels"] + [IGNORE_INDEX] * (length - len(row["labels"])),
        }
        for row in task.rows
    )
    return replace(task, rows=rows)


if __name__ == "__main__":
    main()
