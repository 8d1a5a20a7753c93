"""Whole runs: prompts beside LoRA on one backbone, each as plain PEFT trains it alone."""

from __future__ import annotations

from pathlib import Path

from tests.invariants import mux_lab as lab
from tests.modeling.adapters.prompts.prompt_cases import PROMPTS, judge, task_of


def test_every_prompt_beside_lora_trains_as_plain_peft_trains_it_alone(tmp_path: Path) -> None:
    tasks = [task_of(form) for form in (*PROMPTS, "lora")]
    run = lab.train(tasks, tmp_path)
    verdicts = {task.name: judge(run.trainer, task) for task in tasks}
    lab.assert_as_judged(run, verdicts)
    for name, verdict in verdicts.items():
        assert verdict.losses[-1] != verdict.losses[0], f"{name} has learned something"
