"""Runs whose evaluations generate, in this process or in several: a tiny Llama of words that learns to answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig

from peft_mux import GenerateOptions, MultiTaskTrainer, Task
from tests.data.test_tokenize import words_tokenizer
from tests.records import run_records
from tests.runs import trainer_of

PROMPTS = ("the cat sat on", "a dog ran", "the mat", "a cat ran home on a", "the dog")
WANTED = {"cats": "yes", "dogs": "no home"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "metrics": ("exact_match", "contains", "f1")}


def rows(task: str) -> list[dict[str, str]]:
    """Return rows that all have one answer, except the last: the first one's prompt with another answer."""
    answers = [f" {WANTED[task]}"] * len(PROMPTS)
    found = [{"prompt": prompt, "completion": answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    return [*found, {"prompt": PROMPTS[0], "completion": " mat"}]


def task(name: str, **settings: Any) -> Task:
    """Return a task that learns its answer in a few steps and is evaluated every other one."""
    config = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1)
    data = {"peft_config": config, "train_dataset": rows(name)[:-1], "eval_dataset": rows(name)}
    training = {"train_batch_size": 5, "learning_rate": 2e-2, "max_steps": 12, "seed": 1}
    evaluation = {"eval_generate": GenerateOptions(**OPTIONS), "eval_steps": 4}
    return Task(**{"name": name, **data, **training, **evaluation, **settings})


def trainer(tasks: list[Task], folder: Path, *, tokenizer: Any = None, **arguments: Any) -> MultiTaskTrainer:
    """Return a quiet trainer of the tasks."""
    options = {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, **arguments}
    return trainer_of(folder, tasks, tokenizer=tokenizer or words_tokenizer(), **options)


def evaluations(made: MultiTaskTrainer, name: str) -> list[dict[str, float]]:
    """Return what was logged of each evaluation of a task."""
    history = made.task_states[name].log_history
    return [{key: entry[key] for key in entry if key.startswith("eval_")} for entry in history if "eval_loss" in entry]


def completions(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the completions of a task that a run has written down."""
    return [record for record in run_records(folder, "completion") if record["task"] == name]


def train(rank: int, folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train two tasks, one with a metric that fails at its third evaluation; return what this process saw."""
    calls: list[int] = []

    def count(prompts: list[str], texts: list[str], references: list[str]) -> dict[str, float]:
        calls.append(len(texts))
        if len(calls) == 3:
            raise ValueError("no more")
        return {"rows": len(texts)}

    tasks = [task("cats"), task("dogs", eval_generate=GenerateOptions(**{**OPTIONS, "metrics": [count, "f1"]}))]
    made = trainer(tasks, folder, ddp_timeout=30, **arguments)
    made.train()
    return {
        "evaluations": {name: evaluations(made, name) for name in WANTED},
        "statuses": {run.name: (run.status.value, run.reason) for run in made.table},
        "evaluated": made.evaluate("cats"),
        "calls": calls,
    }
