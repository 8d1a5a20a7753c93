"""Texts against what rows ask for."""

from __future__ import annotations

import pytest

from peft_mux.modeling.generation.options import ANSWER_METRICS, mean_metric


@pytest.mark.parametrize(
    ("completion", "reference", "exact", "inside", "overlap"),
    [
        (" Yes.\n", "yes", 1, 1, 1),
        ("it is  Yes", "yes", 0, 1, 0.5),
        ("-5", "5", 0, 1, 0),
        ("The", "A", 0, 0, 0),
        ("", "", 1, 1, 1),
        ("", "no", 0, 0, 0),
        ("a b b c", "b b d", 0, 0, 4 / 7),
        ("STRASSE", "straße", 1, 1, 1),
    ],
)
def test_answers_are_judged_without_case_space_and_a_full_stop(
    completion: str, reference: str, exact: float, inside: float, overlap: float
) -> None:
    found = [ANSWER_METRICS[name](completion, reference) for name in ("exact_match", "contains", "f1")]
    assert found == pytest.approx([exact, inside, overlap])


def test_a_metric_is_the_mean_over_rows() -> None:
    assert mean_metric("exact_match", ["a", "b", "c", "d"], ["a", "b", "c", "x"]) == 0.75
