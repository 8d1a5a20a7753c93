"""A plan is a value that prints and travels as JSON; its memory estimate follows the terms of M Eq. 5."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.memory import ModelShape, activation_bytes_per_token, estimate_memory
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.values import HTask, TaskShare, Waiting

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=64,
    intermediate_size=160,
    attention_size=64,
    key_value_size=32,
    vocab_size=500,
    backbone_bytes=1_000_000,
    activation_bytes=4,
)
LOADS = (
    BucketLoad(name="hTask 1", forward_s=(0.2,), backward_s=(0.3,), activation_bytes=(1000,), num_micro_batches=2),
    BucketLoad(name="hTask 2", forward_s=(0.04,), backward_s=(0.06,), activation_bytes=(300,), num_micro_batches=1),
)
TEMPLATE = build_template(LOADS, "1f1b")


def a_plan() -> Plan:
    memory = estimate_memory(SHAPE, [100, 200], max_tokens=256, checkpointing=False, block_bytes=10_000)
    return Plan(
        htasks=(HTask(("sql", "tales"), 2, 150.25, 0.5), HTask(("sums",), 1, 40.0, 0.1)),
        shares=(
            TaskShare("sql", 8, 100.5, 30, 100),
            TaskShare("tales", 4, 200.0, 10, 200),
            TaskShare("sums", 2, 40.0, 5, 50),
        ),
        max_tokens_per_micro_batch=256,
        chunk_size=64,
        pad_to_chunks=False,
        memory=memory,
        device="cpu",
        buckets=((0,), (1,)),
        template=TEMPLATE,
        bucket_loads=LOADS,
        step_s=1.25,
        peak_bytes=(memory.peak_bytes,),
        limit_bytes=2**30,
        profile_source="analytic",
        waiting=(Waiting("late", "0.10 GiB too much beside sql; runs when others end"),),
        notes=("sql: 3 of 40 rows are cut",),
    )


def test_a_plan_comes_back_from_json_as_it_was() -> None:
    assert Plan.from_json(a_plan().to_json()) == a_plan()


def test_a_plan_of_another_format_is_refused() -> None:
    data = {**json.loads(a_plan().to_json()), "format_version": 99}
    with pytest.raises(ValueError, match="format_version: got 99; allowed: 4"):
        Plan.from_json(json.dumps(data))


def test_a_plan_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_plan().chunk_size = 8  # type: ignore[misc]


def test_a_printed_plan_shows_each_task_under_its_htask_and_every_note() -> None:
    lines = str(a_plan()).splitlines()
    assert lines[0] == "plan  3 tasks on cpu, 2 hTasks, chunks of 64 tokens"
    (sums,) = [line.split() for line in lines if line.startswith("  sums")]
    assert sums == ["sums", "2", "2", "40", "5", "50"]
    assert "  hTask 1: 2 passes a step of about 150 tokens (at most 256), 500 ms each" in lines
    assert "  late   waits: 0.10 GiB too much beside sql; runs when others end" in lines
    assert any(
        line.startswith("time (analytic profile, not measured)  1.25 s a step (order of magnitude), 272")
        for line in lines
    )
    assert any(line.startswith("memory (analytic estimate)  peak ") and "iB +-15 %: " in line for line in lines)
    assert lines[-1] == "note  sql: 3 of 40 rows are cut"


def test_a_plan_says_what_its_steps_take_one_task_after_another_and_together() -> None:
    plan = a_plan()
    assert plan.run_times is None, "times alone were not asked for"
    assert "one after another" not in str(plan)
    assert "run" not in json.loads(plan.to_json())["forecast"]
    shares = [
        dataclasses.replace(share, alone_s=seconds)
        for share, seconds in zip(plan.shares, (1.0, 0.75, 0.5), strict=True)
    ]
    plan = dataclasses.replace(plan, shares=tuple(shares))
    # 30, 10 and 5 steps: 5 of all three, 5 of two of them, 20 of one. Of the 1 s that company saves, each brings half.
    together_s = 5 * 1.25 + 5 * (1.75 - 0.5) + 20 * 1.0
    words = "        one after another 40 s   together 32.5 s   1.2x (estimate), without the tasks that wait"
    assert words in str(plan).splitlines()
    assert words.strip() in plan._repr_html_()
    assert json.loads(plan.to_json())["forecast"]["run"] == {
        "in_turn_s": 40.0,
        "together_s": together_s,
        "ratio": 40.0 / together_s,
    }
    assert Plan.from_json(plan.to_json()) == plan
    alone = dataclasses.replace(plan, shares=plan.shares[:1])
    assert "one after another" not in str(alone), "a single task has nothing to be compared with"


def test_a_task_is_explained_with_its_company_and_its_share() -> None:
    told = a_plan().explain("sql")
    assert told.startswith("sql shares its passes with tales (hTask 1 of 2).")
    assert "2 passes of about 150 tokens" in told
    assert "1 s of the step's 1.25 s" in told
    assert "it trains 100 parameters" in told.lower()
    assert "has its passes to itself" in a_plan().explain("sums")
    assert a_plan().explain("late") == "late waits: 0.10 GiB too much beside sql; runs when others end"


def test_a_task_that_a_plan_does_not_know_is_refused_with_those_it_knows() -> None:
    with pytest.raises(ValueError, match="task is 'sqll'; allowed: sql, tales, sums, late"):
        a_plan().explain("sqll")


def test_a_diff_tells_who_comes_goes_and_changes_company() -> None:
    before = a_plan()
    after = dataclasses.replace(
        before,
        htasks=(HTask(("sql",), 2, 50.0, 0.2), HTask(("tales", "late"), 1, 240.0, 0.4)),
        shares=(*before.shares[:2], TaskShare("late", 1, 40.0, 5, 10)),
        waiting=(),
        step_s=1.0,
    )
    assert before.diff(before) == ""
    assert before.diff(after).splitlines() == [
        "+ late starts",
        "- sums leaves",
        "~ sql shares its passes with nobody, before with tales",
        "~ tales shares its passes with late, before with sql",
        "~ step_s: 1.25 s -> 1 s",
    ]
    assert after.diff(before).splitlines()[:2] == ["+ sums starts", f"- late waits: {before.waiting[0].reason}"]


def test_a_plan_draws_its_step_and_its_memory() -> None:
    drawn = a_plan().gantt(60)
    assert "A" in drawn
    assert "B" in drawn
    assert a_plan().timeline().makespan_s == pytest.approx(1.1)
    assert "stage 0" in a_plan().memory_bars()


def test_a_plan_without_tasks_has_no_timeline_and_says_so() -> None:
    empty = dataclasses.replace(a_plan(), htasks=(), shares=(), buckets=(), template=None, bucket_loads=())
    with pytest.raises(ValueError, match="no running task"):
        empty.gantt()
    assert Plan.from_json(empty.to_json()) == empty


def test_the_tokens_of_a_step_are_those_of_all_tasks() -> None:
    assert a_plan().tokens_per_step == 340.5


def test_the_backbone_counts_once_and_every_adapter_with_its_optimizer_state() -> None:
    one, many = (
        estimate_memory(SHAPE, sizes, max_tokens=256, checkpointing=False, block_bytes=0)
        for sizes in ([100], [100] * 9)
    )
    assert one.backbone_bytes == many.backbone_bytes == 1_000_000
    assert one.adapter_bytes == 100 * (4 + 4 + 8 + 4), "weight, gradient, two moments, last good copy; all in fp32"
    assert many.adapter_bytes == 9 * one.adapter_bytes
    parts = dataclasses.astuple(many)
    assert many.peak_bytes == sum(parts)


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_activations_grow_with_the_tokens_of_a_pass_and_with_nothing_else(few: int, more: int) -> None:
    first, second = (
        estimate_memory(SHAPE, [10], max_tokens=tokens, checkpointing=False, block_bytes=0)
        for tokens in (few, few + more)
    )
    per_token = activation_bytes_per_token(SHAPE, checkpointing=False)
    assert second.activation_bytes - first.activation_bytes == more * per_token


def test_checkpointing_keeps_one_row_a_layer_and_one_layer_at_a_time() -> None:
    kept = activation_bytes_per_token(SHAPE, checkpointing=True)
    layer = activation_bytes_per_token(SHAPE, checkpointing=False) // SHAPE.num_layers
    assert kept == SHAPE.num_layers * SHAPE.hidden_size * 4 + layer
