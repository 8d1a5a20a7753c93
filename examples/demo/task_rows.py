"""Six small tasks of different nature, length, rank and rate; held-out rows never occur in training."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.demo import sentences

Row = dict[str, str]
_NUM_EVAL_ROWS = 64


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A task of the demo.

    Attributes:
        name: name of the task.
        train_rows: rows to train on.
        eval_rows: held-out rows, none of which occurs in training.
        rank: rank of the task's adapter.
        learning_rate: learning rate of the task's optimizer.
        batch_size: number of rows of an optimizer step.
        target_modules: linear layers that the adapter acts on.
        has_answers: whether rows have one right completion, so that accuracy means something.
    """

    name: str
    train_rows: list[Row]
    eval_rows: list[Row]
    rank: int
    learning_rate: float
    batch_size: int
    target_modules: str | list[str]
    has_answers: bool


def demo_tasks(seed: int = 0) -> list[DemoTask]:
    """Return the six tasks."""
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    table: tuple[tuple[str, Callable[[random.Random], Row], int, float, int, Any, bool], ...] = (
        ("mood", _mood, 4, 3e-3, 16, "all-linear", True),
        ("kind", _kind, 8, 3e-3, 16, "all-linear", True),
        ("yes-or-no", _yes_or_no, 16, 3e-3, 16, "all-linear", True),
        ("action", _action, 8, 4e-3, 16, ["gate_proj", "up_proj", "down_proj", "v_proj"], True),
        ("last-action", _last_action, 32, 2e-3, 8, "all-linear", True),
        ("story", _story, 64, 3e-3, 4, attention, False),
    )
    return [
        _task(random.Random(f"{seed}/{name}"), name, make, rank, rate, batch, targets, closed)
        for name, make, rank, rate, batch, targets, closed in table
    ]


def _task(
    rng: random.Random,
    name: str,
    make: Callable[[random.Random], Row],
    rank: int,
    rate: float,
    batch: int,
    targets: Any,
    closed: bool,
) -> DemoTask:
    rows: dict[str, Row] = {}
    # Small spaces of rows (sums) run out of new ones, so the draws are bounded.
    for _ in range(20_000):
        row = make(rng)
        rows.setdefault("".join(row.values()), row)
        if len(rows) == 1_000 + _NUM_EVAL_ROWS:
            break
    unique = list(rows.values())
    rng.shuffle(unique)
    return DemoTask(name, unique[_NUM_EVAL_ROWS:], unique[:_NUM_EVAL_ROWS], rank, rate, batch, targets, closed)


def _mood(rng: random.Random) -> Row:
    is_good = rng.random() < 0.5
    word = rng.choice(sentences.GOOD if is_good else sentences.BAD)
    thing, place, name = rng.choice(sentences.THINGS), rng.choice(sentences.PLACES), rng.choice(sentences.NAMES)
    return {
        "prompt": f"{name} said that the {thing} in the {place} was {word}. So {name} was",
        "completion": " happy" if is_good else " unhappy",
    }


_KINDS = {
    "animal": sentences.ANIMALS,
    "food": sentences.FOODS,
    "weather": sentences.WEATHERS,
    "thing": sentences.THINGS,
}


def _kind(rng: random.Random) -> Row:
    kind = rng.choice(list(_KINDS))
    prompt = f"{sentences.sentence(rng)} What is {rng.choice(_KINDS[kind])}? A kind of"
    return {"prompt": prompt, "completion": f" {kind}"}


def _yes_or_no(rng: random.Random) -> Row:
    asked, kind = rng.choice(list(_KINDS)), rng.choice(list(_KINDS))
    kind = asked if rng.random() < 0.4 else kind
    prompt = f"{rng.choice(sentences.NAMES)} asked: is {rng.choice(_KINDS[kind])} a kind of {asked}?"
    return {"prompt": prompt, "completion": " yes" if kind == asked else " no"}


_ACTIONS = {
    "giving": lambda rng: (
        f"{rng.choice(sentences.NAMES)} gave the {rng.choice(sentences.THINGS)} to {rng.choice(sentences.NAMES)}."
    ),
    "eating": lambda rng: (
        f"{rng.choice(sentences.NAMES)} ate {rng.choice(sentences.FOODS)} with {rng.choice(sentences.NAMES)}."
    ),
    "running": lambda rng: f"The {rng.choice(sentences.ANIMALS)} ran to the {rng.choice(sentences.PLACES)}.",
    "counting": lambda rng: f"{rng.choice(sentences.NAMES)} counted {rng.choice(sentences.NUMBERS)} stones.",
}


def _action(rng: random.Random) -> Row:
    action = rng.choice(list(_ACTIONS))
    return {"prompt": f"{_ACTIONS[action](rng)} This is about", "completion": f" {action}"}


def _last_action(rng: random.Random) -> Row:
    action = rng.choice(list(_ACTIONS))
    prompt = f"{sentences.story(rng, 4)} {_ACTIONS[action](rng)} At last this is about"
    return {"prompt": prompt, "completion": f" {action}"}


def _story(rng: random.Random) -> Row:
    hero = rng.choice(sentences.NAMES)
    middle = sentences.story(rng, rng.randint(3, 8))
    return {"text": f"Once {hero} went to the {rng.choice(sentences.PLACES)}. {middle} Then {hero} slept. The end."}


def last_token_ids(logits: Any, labels: Any) -> Any:
    """Shrink logits to the predicted token ids (`preprocess_logits_for_metrics`)."""
    del labels
    return logits.argmax(dim=-1)


def exact_match(prediction: Any) -> dict[str, float]:
    """Return the share of rows whose every target token is predicted (`compute_metrics`)."""
    guesses = np.asarray(prediction.predictions)[:, :-1]
    targets = np.asarray(prediction.label_ids)[:, 1:]
    right = (guesses == targets) | (targets == IGNORE_INDEX)
    return {"accuracy": float(right.all(axis=1).mean())}
