"""Six small tasks of different nature, length, rank and rate; held-out rows never occur in training."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.data.batch import IGNORE_INDEX
from peft_mux.demo import text

Row = dict[str, str]
_NUM_EVAL_ROWS = 64


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A task of the demo.

    Attributes:
        name: of the task.
        train_rows: to train on.
        eval_rows: held out.
        rank: of its adapter.
        learning_rate: of its optimizer.
        batch_size: rows of an optimizer step.
        target_modules: of its adapter.
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
        ("sentiment", _sentiment, 4, 4e-3, 16, "all-linear", True),
        ("copy", _copy, 8, 4e-3, 16, "all-linear", True),
        ("sums", _sums, 16, 4e-3, 16, "all-linear", True),
        ("topic", _topic, 8, 3e-3, 8, ["gate_proj", "up_proj", "down_proj"], True),
        ("owner", _owner, 32, 3e-3, 16, "all-linear", True),
        ("story", _story, 64, 2e-3, 4, attention, False),
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


def _sentiment(rng: random.Random) -> Row:
    is_good = rng.random() < 0.5
    words = rng.sample(text.GOOD if is_good else text.BAD, 2)
    prompt = f"Review: The {rng.choice(text.THINGS)} in the {rng.choice(text.PLACES)} was {words[0]} and {words[1]}.\nMood:"
    return {"prompt": prompt, "completion": " glad" if is_good else " sad"}


def _copy(rng: random.Random) -> Row:
    words = " ".join(rng.choice(text.THINGS + text.ANIMALS) for _ in range(rng.randint(2, 4)))
    return {"prompt": f"Say again: {words}\nAgain:", "completion": f" {words}"}


def _sums(rng: random.Random) -> Row:
    first, second = rng.randint(0, 6), rng.randint(0, 6)
    name = rng.choice(text.NAMES)
    thing = rng.choice(text.THINGS)
    prompt = f"{name} has {text.NUMBERS[first]} and {text.NUMBERS[second]} of the {thing}.\nTogether:"
    return {"prompt": prompt, "completion": f" {text.NUMBERS[first + second]}"}


def _topic(rng: random.Random) -> Row:
    topic, words = rng.choice((("animals", text.ANIMALS), ("food", text.FOODS), ("weather", text.WEATHERS)))
    sentences = [text.story(rng, 1)] + [f"There was {word} in the {rng.choice(text.PLACES)}." for word in rng.sample(words, 3)]
    return {"prompt": " ".join(sentences) + "\nTopic:", "completion": f" {topic}"}


def _owner(rng: random.Random) -> Row:
    names, things = rng.sample(text.NAMES, 3), rng.sample(text.THINGS, 3)
    facts = " ".join(f"{name} has a {rng.choice(text.COLOURS)} {thing}." for name, thing in zip(names, things, strict=True))
    asked = rng.randrange(3)
    return {"prompt": f"{facts} Who has the {things[asked]}?\nAnswer:", "completion": f" {names[asked]}"}


def _story(rng: random.Random) -> Row:
    hero = rng.choice(text.NAMES)
    middle = text.story(rng, rng.randint(3, 8))
    return {"text": f"Once {hero} went to the {rng.choice(text.PLACES)}. {middle} Then {hero} slept. The end."}


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
