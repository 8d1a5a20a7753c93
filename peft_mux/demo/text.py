"""The text that the demo's backbone is pre-trained on, made here from templates.

It is synthetic: a few dozen sentence templates filled with random words. It reads like a very dull picture
book about animals, places, weather, counting, colours and moods, and says nothing about real language or about
how a real model would learn. It exists so that the demo needs neither a network nor shipped weights.

Not here: the rows of the demo's tasks (`tasks.py`), which use the same words in other forms.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

WORDS: dict[str, tuple[str, ...]] = {
    "name": tuple("Anna Ben Clara David Emma Felix Grace Henry Iris Jack Lily Max Nora Oscar Paula Tom".split()),
    "animal": tuple("fox bear rabbit owl cat dog horse duck mouse frog goat wolf".split()),
    "place": tuple("kitchen garden forest market school library harbour castle village meadow tower barn".split()),
    "thing": tuple("apples pears shells stones coins eggs books keys stars cups".split()),
    "noun": tuple("moon river lamp stone apple bread cloud drum tree boat key star rose wind glass nest".split()),
    "colour": tuple("red blue green yellow black white brown golden".split()),
    "size": tuple("small big young old tiny tall".split()),
    "weather": tuple("cold windy sunny rainy foggy stormy snowy warm".split()),
    "day": tuple("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()),
    "season": tuple("spring summer autumn winter".split()),
    "clothes": tuple("coat hat scarf shirt cap dress".split()),
    "food": tuple("soup bread cheese cake fish rice honey salad".split()),
    "sport": tuple("football tennis chess hockey".split()),
    "instrument": tuple("drum flute piano violin guitar horn".split()),
    "motion": tuple("ran walked jumped hurried crept wandered".split()),
    "good": tuple("lovely fresh kind bright wonderful sweet clean gentle".split()),
    "bad": tuple("awful stale rude dull terrible bitter dirty broken".split()),
    "happy": tuple("happy glad proud cheerful".split()),
    "sad": tuple("sad angry upset lonely".split()),
    "time": ("in the morning", "at noon", "in the evening", "at night", "after the rain", "before lunch"),
    "need": ("thirsty", "hungry", "tired", "curious", "late", "lost"),
}
"""Words by kind; the demo's tasks use them too, so that the backbone has met every word of theirs."""

_TEMPLATES: dict[str, tuple[str, ...]] = {
    "animals": (
        "The {size} {colour} {animal} {motion} to the {place} because it was {need}.",
        "The {animal} was {need}, so it {motion} to the {place} {time}.",
        "A {size} {animal} and a {size} {animal} met in the {place}. The {animal} was {happy}.",
        "The {animal} lives near the {place}. It eats {food} and sleeps {time}.",
    ),
    "weather": (
        "On {day} it was {weather} in the {place}, so {name#1} wore a {colour} {clothes}.",
        "In {season} the wind is {weather} and the clouds are {colour}.",
        "It was {weather} {time}, and then it was {weather} again.",
    ),
    "colours": (
        "{name#1} has a {colour#1} {clothes#1}. The {clothes#1} is {colour#1}.",
        "The {noun#1} is {colour#1} and the {noun#2} is {colour#2}. Which is {colour#1}? The {noun#1}.",
        "{name#1} painted the {noun#1} {colour#1} {time}. Now the {noun#1} is {colour#1}.",
    ),
    "moods": (
        "The {food} was {good} and the music was {good}. {name#1} was {happy}.",
        "The {food} was {bad} and the room was {bad}. {name#1} was {sad}.",
        "{name#1} was {happy} because the {food} was {good}.",
        "{name#1} was {sad} because the {food} was {bad}.",
    ),
    "whereabouts": (
        "{name#1} went to the {place#1}. {name#2} went to the {place#2}. "
        "Where is {name#1}? {name#1} is in the {place#1}.",
        "{name#1} went to the {place#1}. {name#2} went to the {place#2}. "
        "Where is {name#2}? {name#2} is in the {place#2}.",
        "The {animal#1} is in the {place#1} and the {animal#2} is in the {place#2}. "
        "Who is in the {place#1}? The {animal#1}.",
    ),
    "echoes": (
        "{name#1} said: {noun#1} {noun#2} {noun#3}. {name#2} said: {noun#1} {noun#2} {noun#3}.",
        "Forwards: {noun#1} {noun#2} {noun#3}. Backwards: {noun#3} {noun#2} {noun#1}.",
        "Say {noun#1}, {noun#2}, {noun#1}, {noun#2}, {noun#1}.",
    ),
    "hobbies": (
        "{name#1} plays the {instrument#1} {time} and {name#2} plays {sport}.",
        "{name#1} lost the game of {sport} on {day}. {name#1} was {sad}.",
        "{name#1} won the game of {sport} on {day}. {name#1} was {happy}.",
        "We cooked {food} with {food} in the {place} {time}.",
    ),
}


def fill(template: str, rng: random.Random, words: Mapping[str, Sequence[str]] = WORDS) -> str:
    """Return a template with its placeholders replaced by random words.

    `{colour}` draws anew each time. `{colour#1}` draws once and is repeated; `{colour#1}` and `{colour#2}` differ.

    Args:
        template: text with placeholders named for the kinds of `words`.
        rng: source of randomness.
        words: the words of each kind.
    """
    drawn: dict[str, str] = {}

    def replacement(match: re.Match[str]) -> str:
        kind, label = match.group(1), match.group(0)
        if match.group(2) is None:
            return rng.choice(words[kind])
        if label not in drawn:
            taken = {word for other, word in drawn.items() if other.startswith(f"{{{kind}#")}
            drawn[label] = rng.choice([word for word in words[kind] if word not in taken])
        return drawn[label]

    text = re.sub(r"\{(\w+)(#\w+)?\}", replacement, template)
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def corpus(num_lines: int, seed: int = 0) -> list[str]:
    """Return lines of one to three template sentences about mixed subjects.

    Args:
        num_lines: how many.
        seed: the same seed gives the same lines.
    """
    rng = random.Random(f"corpus {seed}")
    kinds = [*_TEMPLATES, "counting"]
    return [_line(rng.choice(kinds), rng) for _ in range(num_lines)]


def _line(kind: str, rng: random.Random) -> str:
    if kind == "counting":
        return _counting(rng)
    return fill(rng.choice(_TEMPLATES[kind]), rng)


def _counting(rng: random.Random) -> str:
    first, second = rng.randint(1, 9), rng.randint(1, 9)
    template = rng.choice(
        (
            "{name#1} had FIRST {thing#1} and found SECOND more. Now {name#1} has SUM {thing#1}.",
            "FIRST {thing#1} and SECOND {thing#1} are SUM {thing#1}.",
            "After FIRST comes NEXT.",
        )
    )
    numbers = {"FIRST": first, "SECOND": second, "SUM": first + second, "NEXT": first + 1}
    for word, number in numbers.items():
        template = template.replace(word, str(number))
    return fill(template, rng)
