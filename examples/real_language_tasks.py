"""Five real text tasks on a real, tiny language model: trained together, and each alone with the same seeds.

The model is stories260K (a Llama of 260,032 parameters that has read TinyStories), the tasks are sentiment, science
questions, entailment, plain Shakespeare and instructions. What this shows: every adapter learns its task, and sharing
the backbone changes none of them.

python examples/real_language_tasks.py [--data FOLDER] [--max-steps 100]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from peft import LoraConfig

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

# Name: rows to train on, held-out rows (none: the last of the others), and what Task is given.
SOURCES = {
    "sst2": ("sst2.train", "sst2.dev", 8, {"train_batch_size": 16, "learning_rate": 5e-3}),
    "openbookqa": ("openbookqa.train", "openbookqa.test", 16, {"train_batch_size": 16, "learning_rate": 5e-3}),
    "rte": ("rte.train", "rte.dev", 4, {"train_batch_size": 8, "learning_rate": 3e-3}),
    "shakespeare": ("tinyshakespeare", None, 32, {"train_batch_size": 8, "learning_rate": 5e-3}),
    "instruct": ("instruct", None, 8, {"train_batch_size": 8, "learning_rate": 3e-3}),
}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; plain text is cut to its start, which a prompt with its completion must not be."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"text": row["text"][:450]} if "text" in row else row for row in rows]


def make_task(data: Path, name: str, *, max_steps: int, num_eval_rows: int) -> Task:
    train_file, eval_file, rank, settings = SOURCES[name]
    train = read_rows(data / "text" / f"{train_file}.jsonl")
    if eval_file is None:
        train, held_out = train[:-num_eval_rows], train[-num_eval_rows:]
    else:
        held_out = read_rows(data / "text" / f"{eval_file}.jsonl")[:num_eval_rows]
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    settings = {"train_dataset": train, "eval_dataset": held_out, "max_steps": max_steps, "seed": 7, **settings}
    return Task(name=name, peft_config=adapter, **settings)


def train(model: Path, tasks: list[Task]) -> tuple[dict[str, float], dict[str, float]]:
    """Train tasks on one backbone; return their held-out losses before and after."""
    with tempfile.TemporaryDirectory() as folder:
        # Cutting long rows would take the completion away, the only part of them that is trained on.
        rows = {"max_length": 256, "overlong_policy": "drop"}
        args = MultiTaskTrainingArguments(folder, save_strategy="no", lr_scheduler_type="cosine", **rows)
        trainer = MultiTaskTrainer(str(model), args, tasks)
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    losses = [{task.name: metrics[f"{task.name}/eval_loss"] for task in tasks} for metrics in (before, after)]
    return losses[0], losses[1]


def compare(data: Path, *, max_steps: int = 100, num_eval_rows: int = 100) -> dict[str, dict[str, float]]:
    """Return held-out losses by task: before, after training together, and after training alone."""
    tasks = [make_task(data, name, max_steps=max_steps, num_eval_rows=num_eval_rows) for name in SOURCES]
    before, together = train(data / "stories260K", tasks)
    alone = {task.name: train(data / "stories260K", [task])[1][task.name] for task in tasks}
    return {name: {"before": before[name], "together": together[name], "alone": alone[name]} for name in before}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=shared, help="folder with stories260K/ and text/")
    parser.add_argument("--max-steps", type=int, default=100, help="of each task")
    arguments = parser.parse_args()
    if not (arguments.data / "stories260K").is_dir():
        parser.error(f"--data must be a folder with stories260K/ and text/*.jsonl, got {arguments.data}.")
    for name, losses in compare(arguments.data, max_steps=arguments.max_steps).items():
        print(f"{name:<12} held-out loss:", ", ".join(f"{when} {loss:.4f}" for when, loss in losses.items()))
