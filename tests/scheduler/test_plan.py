"""A plan is a value that travels as JSON and draws itself."""

from __future__ import annotations

import dataclasses
import json

import pytest

from peft_mux.scheduler.plan import Plan
from tests.scheduler.plan_cases import a_plan


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    assert Plan.from_json(a_plan().to_json()) == a_plan()


def test_a_plan_of_another_format_is_refused() -> None:
    data = {**json.loads(a_plan().to_json()), "format_version": 99}
    with pytest.raises(ValueError, match="format_version must be 4, got 99"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize("field", ["htasks", "memory", "template", "chunk_size"])
def test_a_plan_that_lacks_a_field_is_refused_by_its_name(field: str) -> None:
    data = json.loads(a_plan().to_json())
    del data[field]
    with pytest.raises(ValueError, match=f"plan must be what to_json wrote, but lacks or misnames a field .*{field}"):
        Plan.from_json(json.dumps(data))


def test_a_plan_whose_template_lacks_a_field_is_refused_by_its_name() -> None:
    data = json.loads(a_plan().to_json())
    del data["template"]["actions"]
    with pytest.raises(
        ValueError, match=r"template must be what to_dict wrote, but lacks or misnames a field \('actions'\)"
    ):
        Plan.from_json(json.dumps(data))


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_plan().chunk_size = 8  # type: ignore[misc]


def test_a_plan_draws_its_step_and_its_memory() -> None:
    drawn = a_plan().gantt(60)
    assert "A" in drawn
    assert "B" in drawn
    assert a_plan().timeline().makespan_s == pytest.approx(1.1)
    assert "stage 0" in a_plan().memory_bars()


def test_a_plan_without_tasks_has_no_timeline_and_says_so() -> None:
    empty = dataclasses.replace(a_plan(), htasks=(), shares=(), buckets=(), template=None, bucket_loads=())
    with pytest.raises(ValueError, match="the plan must have at least one running task to have a timeline, got none"):
        empty.gantt()
    assert Plan.from_json(empty.to_json()) == empty


def test_the_tokens_of_a_step_are_those_of_all_tasks() -> None:
    assert a_plan().tokens_per_step == 340.5
