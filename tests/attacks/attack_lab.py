"""What the attacks share: the smallest backbone that trains, six tasks, one of which is attacked, and checks
afterwards.

`PEFT_MUX_ATTACKS` says how many of its attacks a test runs: "full" for all (`make attack`), otherwise
as many as `make test` and CI have time for.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from tests.invariants import mux_lab as lab

COUNT = "attacks"
"""Name of the property in which a test that makes several attacks says how many: `record_property(COUNT, number)`."""

IS_FULL = os.environ.get("PEFT_MUX_ATTACKS") == "full"
# With 34 rows of a task in a pass, matrix products round equally whatever other tasks run.
VOCABULARY, LENGTH, BATCH, NUM_STEPS = 64, 17, 2, 6
OTHERS = ("one", "two", "three", "four", "five")
ATTACKED = "attacked"

Entry = TypeVar("Entry")


def how_many(*, usually: int, full: int) -> int:
    """Return the count of attacks that this run of the suite takes."""
    return full if IS_FULL else usually


def sampled(entries: Sequence[Entry], *, fast: int, ci: int | None = None) -> list[Any]:
    """Return the entries as parameters of a test: some always, some marked slow, and all where all are asked for.

    Args:
        entries: all attacks; those that are taken lie evenly among them.
        fast: how many of them are taken always.
        ci: how many of them, these among them, are taken where slow tests are; all by default.
    """
    numbers = range(len(entries))
    in_ci = numbers if ci is None else _evenly(numbers, ci)
    always = _evenly(in_ci, fast)
    return [
        pytest.param(entries[number], id=_name(entries[number]), marks=[] if number in always else [pytest.mark.slow])
        for number in (numbers if IS_FULL else in_ci)
    ]


def _evenly(numbers: Sequence[int], count: int) -> list[int]:
    count = min(count, len(numbers))
    return [numbers[index * len(numbers) // count] for index in range(count)]


def _name(entry: Any) -> str:
    return str(getattr(entry, "name", entry))


# ------------------------------------------------------------------------ what trains


@cache
def _nano_llama(num_layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    lab.fill(model, 0)
    return model


def nano_llama(num_layers: int = 1) -> LlamaForCausalLM:
    """Return a fresh copy of the backbone: one layer or more, hidden 16, vocabulary 64, fp32."""
    return copy.deepcopy(_nano_llama(num_layers))


@cache
def words_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of some words, with a chat template."""
    words = ["<unk>", "<eos>", *"a b c d e f g h hello good bad user assistant : .".split()]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    return fast


def rows(seed: int, count: int = 6, length: int = LENGTH) -> list[dict[str, list[int]]]:
    """Return rows of random tokens of one length, so that shapes do not depend on content."""
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(1, VOCABULARY, size=length).tolist()} for _ in range(count)]


def nano_task(name: str, seed: int = 0, **settings: Any) -> Task:
    """Return a small task; `settings` are fields of `Task` to set."""
    options: dict[str, Any] = {
        "peft_config": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1),
        "train_dataset": rows(seed),
        "train_batch_size": BATCH,
        "learning_rate": 3e-3,
        "max_steps": NUM_STEPS,
        "seed": 1 + seed,
        **settings,
    }
    return Task(name=name, **options)


def six_tasks(**settings: Any) -> list[Task]:
    """Return five tasks and, in their middle, the one that is attacked; `settings` are its own."""
    others = [nano_task(name, 10 + number) for number, name in enumerate(OTHERS)]
    return [*others[:3], nano_task(ATTACKED, 1, **settings), *others[3:]]


class Watcher(lab.Recorder):
    """Keeps losses and digests of all tasks; `digests` of weights and optimizer state after each step."""


def make_trainer(
    tasks: Sequence[Task], folder: Path, *, watcher: Any = None, model: Any = None, **arguments: Any
) -> MultiTaskTrainer:
    """Return a quiet trainer whose plan is the same in every run: all tasks together in each pass."""
    options = {
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "planner": "together",
        **arguments,
    }
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    trainer = MultiTaskTrainer(
        nano_llama() if model is None else model,
        args,
        list(tasks),
        processing_class=words_tokenizer(),
        callbacks=[] if watcher is None else [watcher],
    )
    if watcher is not None:
        watcher.trainer = trainer
    return trainer


# ------------------------------------------------------------------------ what a run leaves


@dataclass
class Outcome:
    """The outcome of a run.

    Attributes:
        losses: of each task by its own steps.
        digests: of weights and optimizer state of each task after each of its steps.
        weights: digest of the final weights of each task that is in the model.
        statuses: final ones.
        reasons: why tasks ended as they did.
        trainer: that ran it.
    """

    losses: dict[str, list[float]]
    digests: dict[str, list[str]]
    weights: dict[str, str]
    statuses: dict[str, str]
    reasons: dict[str, str]
    trainer: Any = field(repr=False, default=None)


def outcome_of(trainer: MultiTaskTrainer, watcher: Watcher) -> Outcome:
    """Return the outcome of a finished run."""
    runs = list(trainer.table)
    return Outcome(
        losses=watcher.losses,
        digests=watcher.digests,
        weights={run.name: lab.digest(lab.weights(trainer, run.name)) for run in runs},
        statuses={run.name: run.status.value for run in runs},
        reasons={run.name: run.reason for run in runs},
        trainer=trainer,
    )


def train(
    tasks: Sequence[Task],
    folder: Path,
    *,
    at_begin: Mapping[int, Callable[[Any], Any]] | None = None,
    at_end: Mapping[int, Callable[[Any], Any]] | None = None,
    resume: bool = False,
    **arguments: Any,
) -> Outcome:
    """Train, acting before and after the given steps; return the outcome."""
    watcher = Watcher(at_begin=at_begin or {}, at_end=at_end or {})
    trainer = make_trainer(tasks, folder, watcher=watcher, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return outcome_of(trainer, watcher)


def assert_same_others(run: Outcome, wanted: Outcome) -> None:
    """Assert that all tasks but the attacked one took the same steps, to the last bit, and succeeded."""
    for name in OTHERS:
        assert run.statuses[name] == "succeeded", f"{name}: {run.statuses[name]}: {run.reasons[name]}"
        assert run.losses[name] == wanted.losses[name], f"losses of {name} differ"
        assert run.digests[name] == wanted.digests[name], f"weights or optimizer state of {name} differ"
        assert run.weights[name] == wanted.weights[name], f"final weights of {name} differ"
