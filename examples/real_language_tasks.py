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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from peft import LoraConfig

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

DEFAULT_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
MAX_LENGTH = 256  # tokens; this model's vocabulary is so small that a token is one or two letters
MAX_CHARACTERS = 450  # about as much


@dataclass(frozen=True)
class Source:
    """Where a task's rows come from, and how they are trained on."""

    name: str
    train_file: str
    eval_file: str | None  # None: the last rows of train_file are held out
    rank: int
    batch_size: int
    learning_rate: float


SOURCES = (
    Source("sst2", "sst2.train", "sst2.dev", rank=8, batch_size=16, learning_rate=5e-3),
    Source("openbookqa", "openbookqa.train", "openbookqa.test", rank=16, batch_size=16, learning_rate=5e-3),
    Source("rte", "rte.train", "rte.dev", rank=4, batch_size=8, learning_rate=3e-3),
    Source("shakespeare", "tinyshakespeare", None, rank=32, batch_size=8, learning_rate=5e-3),
    Source("instruct", "instruct", None, rank=8, batch_size=8, learning_rate=3e-3),
)


@dataclass(frozen=True)
class Result:
    """Held-out loss of one task: untrained, trained with the others, trained alone."""

    name: str
    before: float
    together: float
    alone: float

    @property
    def difference(self) -> float:
        """Of together and alone, relative to alone."""
        return abs(self.together - self.alone) / self.alone


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file; plain text is cut to its start, which a prompt with its completion must not be."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"text": row["text"][:MAX_CHARACTERS]} if "text" in row else row for row in rows]


def make_tasks(data: Path, sources: Sequence[Source], *, max_steps: int, num_eval_rows: int) -> list[Task]:
    tasks = []
    for source in sources:
        train = read_rows(data / "text" / f"{source.train_file}.jsonl")
        if source.eval_file is None:
            train, held_out = train[:-num_eval_rows], train[-num_eval_rows:]
        else:
            held_out = read_rows(data / "text" / f"{source.eval_file}.jsonl")[:num_eval_rows]
        tasks.append(
            Task(
                name=source.name,
                peft_config=LoraConfig(r=source.rank, lora_alpha=2 * source.rank, target_modules="all-linear"),
                train_dataset=train,
                eval_dataset=held_out,
                train_batch_size=source.batch_size,
                learning_rate=source.learning_rate,
                max_steps=max_steps,
                seed=7,
            )
        )
    return tasks


def train(model: Path, tasks: list[Task]) -> tuple[dict[str, float], dict[str, float]]:
    """Train tasks on one backbone; return their held-out losses before and after."""
    with tempfile.TemporaryDirectory() as folder:
        args = MultiTaskTrainingArguments(
            output_dir=folder,
            save_strategy="no",
            report_to="none",
            logging_steps=25,
            lr_scheduler_type="cosine",
            max_length=MAX_LENGTH,
            # Cutting would take the completion away, the only part of such a row that is trained on.
            overlong_policy="drop",
        )
        trainer = MultiTaskTrainer(str(model), args, tasks)
        print(trainer.plan())
        before = trainer.evaluate()
        trainer.train()
        after = trainer.evaluate()
    losses = [{task.name: values[f"{task.name}/eval_loss"] for task in tasks} for values in (before, after)]
    return losses[0], losses[1]


def compare(
    data: Path, sources: Sequence[Source] = SOURCES, *, max_steps: int = 100, num_eval_rows: int = 100
) -> list[Result]:
    """Train all tasks together, then each alone; return what came of it."""
    model = data / "stories260K"
    tasks = make_tasks(data, sources, max_steps=max_steps, num_eval_rows=num_eval_rows)
    before, together = train(model, tasks)
    alone = {task.name: train(model, [task])[1][task.name] for task in tasks}
    return [Result(task.name, before[task.name], together[task.name], alone[task.name]) for task in tasks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder with stories260K/ and text/")
    parser.add_argument("--max-steps", type=int, default=100, help="of each task")
    arguments = parser.parse_args()
    if not (arguments.data / "stories260K").is_dir():
        parser.error(f"--data: got {arguments.data}; allowed: a folder with stories260K/ and text/*.jsonl.")
    results = compare(arguments.data, max_steps=arguments.max_steps)
    print(f"\n{'held-out loss':<14} {'before':>8} {'together':>9} {'alone':>9} {'difference':>11}")
    for result in results:
        print(
            f"{result.name:<14} {result.before:>8.4f} {result.together:>9.4f} {result.alone:>9.4f} "
            f"{result.difference:>11.1e}"
        )


if __name__ == "__main__":
    main()
