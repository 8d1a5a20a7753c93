"""What the contenders of `benchmarks.training.throughput` train on: a random backbone and every task's tokenised rows.

Only the lengths of rows are real (from `../shared/data`, where it is present); token ids are random, as speed
does not depend on them. Not here: any training.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from benchmarks.paths import SHARED_DATA
from benchmarks.training.shapes import SHAPES, config_of
from benchmarks.training.timing import timed

IGNORE_INDEX = -100
MIXES = ("uniform", "nonuniform")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A backbone of random weights in fp32, built by every contender itself: a Llama of 29.5M parameters by default.

    With a `shape` of `benchmarks.training.shapes` it has the configuration of a published model, of whose layers it
    takes `num_layers`; the other sizes are then those of the shape (`of_shape`).
    """

    hidden_size: int = 512
    num_layers: int = 8
    intermediate_size: int = 1376
    num_heads: int = 8
    vocab_size: int = 4096
    max_tokens: int = 1024
    seed: int = 0
    shape: str = ""

    @classmethod
    def of_shape(cls, name: str, num_layers: int | None = None) -> ModelSpec:
        """Return the spec of a published shape, with its own number of layers by default."""
        shape = SHAPES[name]
        return cls(
            hidden_size=shape.fields["hidden_size"],
            num_layers=num_layers or shape.num_layers,
            intermediate_size=shape.fields["intermediate_size"],
            num_heads=shape.fields["num_attention_heads"],
            vocab_size=shape.fields["vocab_size"],
            shape=name,
        )

    @property
    def title(self) -> str:
        """The backbone in words, with how many of the published model's layers it has."""
        if not self.shape:
            return f"Llama, {self.num_layers} layers of {self.hidden_size}, vocabulary {self.vocab_size}, fp32"
        whole = SHAPES[self.shape].num_layers
        return f"shape of {self.shape}, {self.num_layers} of its {whole} layers, vocabulary {self.vocab_size}, fp32"

    def build(self) -> Any:
        """Return a new causal language model; equal weights at every call."""
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        torch.manual_seed(self.seed)
        if self.shape:
            return AutoModelForCausalLM.from_config(config_of(self.shape, self.num_layers, self.max_tokens))
        config = LlamaConfig(
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_layers,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            vocab_size=self.vocab_size,
            max_position_embeddings=self.max_tokens,
            pad_token_id=None,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config)


@dataclass(frozen=True, slots=True)
class TextSource:
    """Lengths of the rows of one data set of M Table 1, and what replaces it where the real text is absent.

    Attributes:
        name: name of the data set.
        max_tokens: number of tokens that longer rows are cut to; the pad length of the paper.
        mean_tokens: mean of the synthetic log-normal.
        std_tokens: standard deviation of the synthetic log-normal.
        min_tokens: least length of synthetic rows.
    """

    name: str
    max_tokens: int
    mean_tokens: float
    std_tokens: float
    min_tokens: int


SST2 = TextSource("sst2", 69, 29, 10, 10)
SOURCES = {
    "uniform": (SST2,),
    "nonuniform": (
        replace(SST2, max_tokens=64),
        TextSource("openbookqa", 128, 47, 12, 20),
        TextSource("rte", 256, 82, 43, 25),
    ),
}
RANKS = {"uniform": (8,), "nonuniform": (8, 16, 64)}
BATCH_SIZES = {"uniform": 8, "nonuniform": 4}


@dataclass(frozen=True, slots=True)
class TaskWorkload:
    """One task: its adapter and its rows, in the order in which they are trained on.

    Attributes:
        name: name of the task.
        source: name of the data set whose lengths the rows have.
        rank: rank of the adapter.
        seed: fixes the adapter's first weights.
        batch_size: number of rows of an optimizer step.
        rows: `{"input_ids", "labels"}`; the first label is always masked, so that every count of labels is a
            count of targets, whichever way a contender counts.
        objective: the loss, by its name in peft_mux; those but "sft" have rows of their own.
    """

    name: str
    source: str
    rank: int
    seed: int
    batch_size: int
    rows: tuple[dict[str, Any], ...]
    objective: str = "sft"

    @property
    def batches(self) -> list[tuple[dict[str, Any], ...]]:
        """The rows of each optimizer step."""
        starts = range(0, len(self.rows), self.batch_size)
        return [self.rows[start : start + self.batch_size] for start in starts]

    def lora_config(self) -> Any:
        """Return the task's `peft.LoraConfig`: all linear layers, no dropout."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank,
            target_modules="all-linear",
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """All tasks of one measurement.

    Attributes:
        mix: "uniform" or "nonuniform", see `make_workload`.
        tasks: the tasks, in the order in which all contenders take them.
        num_steps: number of optimizer steps of each task.
        length_source: where the lengths come from, for reports.
        learning_rate: rate of all tasks; high, so that two steps are enough to tell a wrong update from a right one.
    """

    mix: str
    tasks: tuple[TaskWorkload, ...]
    num_steps: int
    length_source: str
    learning_rate: float = 5e-3

    def to_tasks(self) -> list[Any]:
        """Return the tasks as `MultiTaskTrainer` takes them, with rows in the given order."""
        from peft_mux import Task

        return [
            Task(
                name=workload.name,
                peft_config=workload.lora_config(),
                train_dataset=list(workload.rows),
                train_batch_size=workload.batch_size,
                learning_rate=self.learning_rate,
                max_steps=self.num_steps,
                shuffle=False,
                seed=workload.seed,
                objective=workload.objective,
            )
            for workload in self.tasks
        ]

    @property
    def num_tokens(self) -> int:
        """Number of real tokens of all tasks and steps."""
        return sum(len(row["input_ids"]) for task in self.tasks for row in task.rows)

    @property
    def num_timed_tokens(self) -> int:
        """Number of real tokens of the steps that are timed."""
        batches = [batch for task in self.tasks for batch in timed(task.batches)]
        return sum(len(row["input_ids"]) for batch in batches for row in batch)


@dataclass(frozen=True, slots=True)
class Case:
    """What one measurement is made on; plain values, so that it can be handed to another process.

    Attributes:
        mix: "uniform" or "nonuniform", see `make_workload`.
        num_tasks: number of tasks.
        num_steps: number of optimizer steps of each task.
        model: shapes of the backbone.
        batch_size: number of sequences per optimizer step of a task; by default that of the mix.
        rank: rank of all adapters; by default those of the mix.
    """

    mix: str
    num_tasks: int
    num_steps: int
    model: ModelSpec
    batch_size: int | None = None
    rank: int | None = None

    def workload(self) -> Workload:
        """Return the tasks with the rows that the seed draws."""
        return make_workload(
            self.mix,
            num_tasks=self.num_tasks,
            num_steps=self.num_steps,
            vocab_size=self.model.vocab_size,
            batch_size=self.batch_size,
            rank=self.rank,
        )

    def to_json(self) -> str:
        """Return the case as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "model": ModelSpec(**values["model"])})


def make_workload(
    mix: str,
    *,
    num_tasks: int,
    num_steps: int,
    vocab_size: int,
    batch_size: int | None = None,
    rank: int | None = None,
) -> Workload:
    """Draw the rows of every task; more steps only add rows to those of fewer steps.

    Args:
        mix: "uniform" (all tasks sst2, rank 8, global batch 8) or "nonuniform" (sst2, openbookqa and rte in
            turn, ranks 8, 16 and 64, global batch 4), after M §5.1.
        num_tasks: number of tasks to draw.
        num_steps: number of optimizer steps of each task.
        vocab_size: token ids are uniform below this.
        batch_size: sequences per optimizer step; by default that of the mix.
        rank: rank of all adapters; by default those of the mix.
    """
    rows_per_task = num_steps * (batch_size or BATCH_SIZES[mix])
    sources, ranks = SOURCES[mix], (rank,) if rank else RANKS[mix]
    is_real = (SHARED_DATA / "text").is_dir() and (SHARED_DATA / "gpt2-tokenizer").is_dir()
    tasks = []
    for index in range(num_tasks):
        source = sources[index % len(sources)]
        draw = random.Random(f"0-{mix}-{index}")
        lengths = _real_lengths(source) if is_real else _synthetic_lengths(source)
        rows = tuple(_row(draw.choice(lengths), vocab_size, draw) for _ in range(rows_per_task))
        # Shifted once per cycle of sources, so that each data set meets each rank.
        own_rank = ranks[(index + index // len(sources)) % len(ranks)]
        tasks.append(
            TaskWorkload(f"{source.name}-{index}", source.name, own_rank, 100 + index, rows_per_task // num_steps, rows)
        )
    text = "GPT-2 BPE lengths of real rows" if is_real else "seeded synthetic log-normal lengths"
    return Workload(mix, tuple(tasks), num_steps, f"{text} ({', '.join(source.name for source in sources)})")


def random_workload(
    name: str,
    *,
    ranks: Sequence[int],
    batch_sizes: Sequence[int],
    num_steps: int,
    vocab_size: int,
    length_of: Callable[[random.Random], int],
    learning_rate: float = 1e-3,
) -> Workload:
    """Return tasks of random rows, all tokens of which but the first are targets.

    Args:
        name: of the workload; fixes the draws.
        ranks: rank of each task.
        batch_sizes: rows of a step of each task.
        num_steps: steps of each task.
        vocab_size: token ids are 1 to below this.
        length_of: draws the length of a row.
        learning_rate: of all tasks.
    """
    tasks = []
    for index, (rank, batch_size) in enumerate(zip(ranks, batch_sizes, strict=True)):
        draw, rows = random.Random(f"{name}-{index}"), []
        for _ in range(num_steps * batch_size):
            ids = draw.choices(range(1, vocab_size), k=length_of(draw))
            rows.append({"input_ids": ids, "labels": [IGNORE_INDEX, *ids[1:]]})
        tasks.append(TaskWorkload(f"task-{index}", "random", rank, 100 + index, batch_size, tuple(rows)))
    return Workload(name, tuple(tasks), num_steps, "random rows", learning_rate)


def _row(num_tokens: int, vocab_size: int, draw: random.Random) -> dict[str, list[int]]:
    input_ids = [draw.randrange(vocab_size) for _ in range(num_tokens)]
    return {"input_ids": input_ids, "labels": [IGNORE_INDEX, *input_ids[1:]]}


@cache
def gpt2_tokenizer() -> Any:
    """Return GPT-2's tokenizer from the folder of the real inputs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = SHARED_DATA / "gpt2-tokenizer"
    tokenizer = Tokenizer(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@cache
def _real_lengths(source: TextSource) -> list[int]:
    """Return the tokens of each row of a data set, end of sequence included."""
    tokenizer = gpt2_tokenizer()
    lines = (SHARED_DATA / "text" / f"{source.name}.train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    prompts = tokenizer.encode_batch([row["prompt"] for row in rows])
    completions = tokenizer.encode_batch([row["completion"] for row in rows])
    pairs = zip(prompts, completions, strict=True)
    return [min(len(prompt.ids) + len(completion.ids) + 1, source.max_tokens) for prompt, completion in pairs]


@cache
def _synthetic_lengths(source: TextSource) -> list[int]:
    spread = np.log1p((source.std_tokens / source.mean_tokens) ** 2)
    draw = np.random.default_rng(0)
    drawn = draw.lognormal(np.log(source.mean_tokens) - spread / 2, np.sqrt(spread), size=2000)
    return np.clip(np.rint(drawn), source.min_tokens, source.max_tokens).astype(int).tolist()
