"""Prompts in several processes that share the rows of a step: the same bits everywhere, and the result of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.processes import cases
from tests.engine.processes.cases import Part, launch, values
from tests.engine.processes.test_data_parallel import assert_alike, assert_as_one
from tests.modeling.adapters.prompts.prompt_cases import task_of
from tests.modeling.adapters.prompts.test_classifiers import task_of as classifier_of
from tests.modeling.test_architectures import bert_classifier, filled

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def train(rank: int, folder: Path) -> Part:
    """Train prompts of different forms together with LoRA."""
    return cases.run(folder, [task_of(form, max_steps=4) for form in ("prompt", "mlp", "cpt", "prefix", "lora")])


def test_two_processes_train_prompts_to_the_result_of_one(tmp_path: Path) -> None:
    parts = values(launch(2, train, tmp_path / "two"))
    assert_alike(parts)
    assert_as_one(parts[0], train(0, tmp_path / "one"))


def train_classifiers(rank: int, folder: Path) -> Part:
    """Train prompts of different forms, and LoRA, each with a head of its own."""
    tasks = [classifier_of("Bert", form, max_steps=4) for form in ("prompt", "mlp", "prefix", "lora")]
    return cases.run(folder, tasks, model=filled(bert_classifier))


def test_two_processes_train_prompts_that_classify_to_the_result_of_one(tmp_path: Path) -> None:
    parts = values(launch(2, train_classifiers, tmp_path / "two"))
    assert_alike(parts)
    assert_as_one(parts[0], train_classifiers(0, tmp_path / "one"))
