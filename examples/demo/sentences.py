"""Generated English-like text: sentences from templates over a small vocabulary.

It is synthetic and says nothing about the world. It gives a backbone something regular to learn within seconds, on a
machine without network, so that adapters on top have something to build on.
"""

from __future__ import annotations

import random

NAMES = "Tom Mia Ben Ana Leo Eva Sam Ida Max Zoe Kim Ned".split()
COLOURS = "red blue green black white yellow".split()
THINGS = "ball cup hat book lamp key drum kite coin ring".split()
ANIMALS = "dog cat bird horse fox fish".split()
PLACES = "garden kitchen forest school market river".split()
FOODS = "bread soup apple cake rice plum".split()
WEATHERS = "rain snow wind sun fog storm".split()
GOOD = "lovely bright funny warm brilliant gentle clever".split()
BAD = "dull cold boring sad broken ugly noisy".split()
MOODS = "happy unhappy tired hungry".split()
KINDS = "animal food weather thing".split()
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


def sentence(rng: random.Random) -> str:
    """Return one sentence, made from a random template."""
    name, other = rng.sample(NAMES, 2)
    pick = rng.choice
    templates = (
        f"{name} has a {pick(COLOURS)} {pick(THINGS)} in the {pick(PLACES)}.",
        f"The {pick(ANIMALS)} ran to the {pick(PLACES)} and {name} saw it.",
        f"{name} gave the {pick(THINGS)} to {other}.",
        f"In the {pick(PLACES)} there was {pick(WEATHERS)} all day.",
        f"{name} ate {pick(FOODS)} with {other}.",
        f"The {pick(THINGS)} was {pick(GOOD)} and {name} was glad.",
        f"The {pick(THINGS)} was {pick(BAD)} and {name} was not glad.",
        f"{name} counted {pick(NUMBERS)} {pick(ANIMALS)} tracks and {pick(NUMBERS)} {pick(COLOURS)} stones.",
        f"{name} was {pick(MOODS)} and {other} was {pick(MOODS)}.",
        f"There is a kind of {pick(KINDS)} that lives in the {pick(PLACES)}.",
    )
    return pick(templates)


def story(rng: random.Random, num_sentences: int) -> str:
    """Return random sentences, joined by blanks."""
    return " ".join(sentence(rng) for _ in range(num_sentences))


def corpus(num_lines: int, seed: int = 0) -> list[str]:
    """Return lines of a few sentences each, for tokenizer and backbone."""
    rng = random.Random(seed)
    return [story(rng, rng.randint(2, 6)) for _ in range(num_lines)]
