"""Every family that is cut: stages, shards and a sharded backbone in real processes train as one process does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.families import FAILING, FAMILIES, family_of
from tests.engine.families import family_cases as cases
from tests.engine.processes import cases as parallel_cases
from tools.architectures import page

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"
FAST = ("phi3", "mixtral")
OF_FOUR = ("granite", "gpt_neox", "opt", "qwen3_moe")
SLOW = tuple(kind for kind in FAMILIES if kind not in FAST)
ALL_PARTS = tuple(tuple(FAMILIES)[start : start + 15] for start in range(0, len(FAMILIES), 15))
PARTS = tuple(SLOW[start : start + 8] for start in range(0, len(SLOW), 8))


def check_as_alone(seen: cases.Seen, expected: cases.Seen) -> None:
    """Compare the results of a layout with one process."""
    for task, losses in expected.losses.items():
        assert seen.losses[task] == pytest.approx(losses, rel=1e-5), task
        assert seen.weights[task].keys() == expected.weights[task].keys()
        for key, weight in expected.weights[task].items():
            gap = np.linalg.norm(seen.weights[task][key] - weight)
            assert gap <= 1e-4 * np.linalg.norm(weight), (task, key)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    shown.cache_clear()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@functools.cache
def shown(kinds: tuple[str, ...], home: Path) -> dict[str, Any]:
    """Return what the first of two processes saw of each of some families; starting processes takes longer than one."""
    return parallel_cases.values(parallel_cases.launch(2, cases.conform, kinds, home, limit_s=600))[0]


@pytest.fixture(scope="module")
def of_four(home: Path) -> dict[str, Any]:
    return parallel_cases.values(parallel_cases.launch(4, cases.conform_of_four, OF_FOUR, home, limit_s=300))[0]


def check_in_two_processes(kind: str, together: tuple[str, ...], home: Path) -> None:
    """Compare stages, shards and a sharded backbone with one process."""
    expected, seen = cases.train_alone(kind, home), shown(together, home)[kind]
    for layout in ("pp", "tp", "fsdp"):
        check_as_alone(seen[layout], expected)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", FAST)
def test_a_family_trains_in_two_processes_as_in_one(kind: str, home: Path) -> None:
    check_in_two_processes(kind, FAST, home)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "together"), [(kind, part) for part in PARTS for kind in part], ids=SLOW)
def test_all_other_families_train_in_two_processes_as_in_one(kind: str, together: tuple[str, ...], home: Path) -> None:
    check_in_two_processes(kind, together, home)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", OF_FOUR)
def test_two_stages_of_two_shards_train_as_one_process_does(kind: str, of_four: dict[str, Any], home: Path) -> None:
    check_as_alone(of_four[kind], cases.train_alone(kind, home))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kinds", ALL_PARTS, ids=lambda kinds: f"{kinds[0]} to {kinds[-1]}")
def test_two_sharded_stages_train_every_family_as_one_process_does(kinds: tuple[str, ...], home: Path) -> None:
    launched = parallel_cases.launch(4, cases.conform_of_sharded_stages, kinds, home, limit_s=600)
    seen = parallel_cases.values(launched)[0]
    for kind in kinds:
        check_as_alone(seen[kind], cases.train_alone(kind, home))


def test_families_are_named_once_in_order_and_known_to_transformers() -> None:
    assert list(FAMILIES) == sorted(set(FAMILIES))
    assert {*FAMILIES, *FAILING} <= set(CONFIG_MAPPING)
    assert not set(FAMILIES) & set(FAILING)


@pytest.mark.parametrize("kind", FAILING)
def test_a_family_that_did_not_come_through_is_refused_with_the_reason_and_what_works(kind: str) -> None:
    model = type("Backbone", (), {"config": CONFIG_MAPPING[kind]()})()
    with pytest.raises(
        UnsupportedModelError,
        match=(r"cannot be cut into stages or shards, as .*shard_backbone=True"),
    ):
        family_of(model)


def test_the_page_of_architectures_is_what_the_command_writes() -> None:
    command = "python -m tools.architectures docs/architectures.md"
    assert PAGE.read_text(encoding="utf-8") == page(), f"run {command}"
