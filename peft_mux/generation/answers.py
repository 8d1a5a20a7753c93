"""How a generated text is held against the text that a row asks for: metrics of single rows, averaged over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence


def normalised(text: str) -> str:
    """Return a text without what answers are not judged by: case, runs of white space, and a full stop at the end.

    Signs and articles stay, as "-5" is not "5", and "A" may be the letter of a choice.
    """
    return " ".join(text.casefold().split()).removesuffix(".")


def exact_match(completion: str, reference: str) -> float:
    """Return 1 where a completion is the reference, both normalised; else 0."""
    return float(normalised(completion) == normalised(reference))


def contains(completion: str, reference: str) -> float:
    """Return 1 where a completion has the reference in it, both normalised; else 0."""
    return float(normalised(reference) in normalised(completion))


def f1(completion: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of a completion's words, as SQuAD has it."""
    got, wanted = normalised(completion).split(), normalised(reference).split()
    if not got or not wanted:
        return float(got == wanted)
    shared = sum((Counter(got) & Counter(wanted)).values())
    return 2 * shared / (len(got) + len(wanted))


ANSWER_METRICS: dict[str, Callable[[str, str], float]] = {"exact_match": exact_match, "contains": contains, "f1": f1}
"""By name, the metrics of a completion and its reference, from 0 to 1."""


def mean_metric(name: str, completions: Sequence[str], references: Sequence[str]) -> float:
    """Return the mean of a metric of `ANSWER_METRICS` over rows; at least one row."""
    judge = ANSWER_METRICS[name]
    return sum(map(judge, completions, references)) / len(references)
