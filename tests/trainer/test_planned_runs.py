"""A run follows its plan: policies, admission under a limit of memory, new plans, what is learnt from time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peft_mux import ConfigError, MultiTaskTrainer, Task
from peft_mux.engine.steps import StepSource
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.policies import POLICIES
from peft_mux.task import TaskStatus
from peft_mux.trainer.inputs import make_collator
from tests.invariants.mux_lab import Recorder, Run, assert_same, make_trainer, small_task, train
from tests.runs import folder_of


def three() -> list[Task]:
    return [
        small_task("a", data_seed=1, length=9, max_steps=4),
        small_task("b", data_seed=2, length=24, rank=8, max_steps=5),
        small_task("c", data_seed=3, length=5, max_steps=3, target_modules=["q_proj"]),
    ]


def limit_gib(tasks: list[Task], folder: Path) -> float:
    """Return a limit under which exactly these tasks fit together, with the smallest passes."""
    plan = make_trainer(tasks, folder, max_tokens_per_micro_batch=24).plan()
    return (plan.memory.peak_bytes + 1000) / 2**30


# --------------------------------------------------------------------- policies


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Return the run of each of the three tasks alone."""
    return {task.name: train([task], tmp_path_factory.mktemp(task.name)) for task in three()}


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> MultiTaskTrainer:
    """Return a trainer of the three tasks that is only asked for plans."""
    return make_trainer(three(), tmp_path_factory.mktemp("planned"))


@pytest.mark.parametrize(
    "policy", [pytest.param(name, marks=() if name in ("mux", "sequential") else pytest.mark.slow) for name in POLICIES]
)
def test_every_policy_trains_each_task_as_alone(policy: str, alone: dict[str, Run], tmp_path: Path) -> None:
    together = train(three(), tmp_path, planner=policy)
    for name, own in alone.items():
        assert_same(together, own, name, 1e-5)


@pytest.mark.parametrize("devices", [None, "1xA100-80GB"])
def test_a_plan_knows_what_each_of_its_tasks_would_take_alone(
    devices: str | None, planned: MultiTaskTrainer, tmp_path: Path
) -> None:
    plan = planned.plan(devices)
    for task, share in zip(three(), plan.shares, strict=True):
        own = make_trainer([task], tmp_path).plan(devices)
        assert share.alone_s == pytest.approx(own.step_s), share.name
        assert own.run_times is None
    assert len({share.alone_s for share in plan.shares}) == 3, "else they would tell nothing"
    assert plan.run_times is not None
    assert plan.run_times.in_turn_s == pytest.approx(sum(one.alone_s * one.num_steps for one in plan.shares))
    assert set(planned.task_statuses.values()) == {"waiting"}, "a plan that is only asked for starts nothing"


def test_sequential_tasks_run_one_after_another_in_the_order_of_priority(tmp_path: Path) -> None:
    tasks = three()
    tasks[2] = replace(tasks[2], priority=5)
    running: list[tuple[str, ...]] = []

    def look(trainer: MultiTaskTrainer) -> None:
        running.append(tuple(run.name for run in trainer.table.running))

    run = train(tasks, tmp_path, recorder=Recorder(at_begin=dict.fromkeys(range(12), look)), planner="sequential")
    assert running == [("c",)] * 3 + [("a",)] * 4 + [("b",)] * 5
    assert set(run.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}


# -------------------------------------------------------------------- admission


def test_a_task_that_does_not_fit_waits_with_a_reason_and_runs_when_another_ends(tmp_path: Path) -> None:
    first = small_task("first", data_seed=1, length=8, rank=64, max_steps=3)
    second = small_task("second", data_seed=2, length=8, rank=64, max_steps=4)
    limit = limit_gib([first], tmp_path / "x")
    seen: list[tuple[str, str]] = []

    def look(trainer: MultiTaskTrainer) -> None:
        seen.append((trainer.task_statuses["second"].value, trainer.table["second"].reason))

    recorder = Recorder(at_begin={1: look, 4: look})
    run = train([first, second], tmp_path / "run", recorder=recorder, memory_limit_gib=limit)
    assert seen[0][0] == "waiting"
    assert "iB too much next to first; runs when others end" in seen[0][1]
    assert seen[1] == ("running", "")
    assert run.trainer.task_states["second"].global_step == 4
    assert_same(run, train([second], tmp_path / "alone"), "second", 1e-5)


def test_a_task_of_higher_priority_is_admitted_first(tmp_path: Path) -> None:
    low = small_task("low", data_seed=1, length=8, rank=64)
    high = small_task("high", data_seed=2, length=8, rank=64, priority=1)
    plan = make_trainer([low, high], tmp_path, memory_limit_gib=limit_gib([low], tmp_path / "x")).plan()
    assert [htask.tasks for htask in plan.htasks] == [("high",)]
    assert "low   waits:" in str(plan)


def test_what_cannot_fit_at_all_is_refused_before_training_with_the_cheapest_fixes(tmp_path: Path) -> None:
    trainer = make_trainer([small_task("own", data_seed=1, length=48, rank=64)], tmp_path, memory_limit_gib=0.0001)
    with pytest.raises(ConfigError) as refusal:
        trainer.train()
    said = str(refusal.value)
    assert "task 'own' alone needs" in said
    assert [number in said for number in ("1. ", "2. ", "3. ", "4. ")] == [True, True, True, False]
    assert said.count("not enough by itself") == 3
    assert said.count("iB") == 5, "what is needed, what is allowed, and what each of three fixes leads to"
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_fix_that_is_named_as_enough_is_enough(tmp_path: Path) -> None:
    def trainer(name: str, **options: Any) -> MultiTaskTrainer:
        task = small_task("own", data_seed=1, length=60, rank=1)
        return make_trainer([task], tmp_path / name, max_tokens_per_micro_batch=60, **options)

    whole, lean = (trainer(name, bf16=name == "lean").plan().memory.peak_bytes for name in ("whole", "lean"))
    limit = (whole + lean) / 2 / 2**30
    with pytest.raises(ConfigError, match=r"1\. bf16=True \([0-9.]+ .iB; "):
        trainer("refused", memory_limit_gib=limit).plan()
    assert trainer("fixed", memory_limit_gib=limit, bf16=True).plan().htasks


def passes_of_a_step(trainer: MultiTaskTrainer, plan: Plan) -> list[int]:
    work = StepSource(plan, make_collator(trainer.args)).next(list(trainer.table))
    return [micro_batch.num_tokens for micro_batch in work.micro_batches]


def test_no_pass_of_a_run_is_larger_than_what_fits_into_memory(tmp_path: Path) -> None:
    tasks = [small_task(name, data_seed=seed, length=24, train_batch_size=8) for name, seed in (("a", 1), ("b", 2))]
    free = make_trainer(tasks, tmp_path / "free")
    peaks = [
        make_trainer(tasks, tmp_path / str(bound), max_tokens_per_micro_batch=bound).plan().memory.peak_bytes
        for bound in (48, 96)
    ]
    limit_bytes = sum(peaks) // 2
    short = make_trainer(tasks, tmp_path / "short", memory_limit_gib=limit_bytes / 2**30)
    plan = short.plan()
    assert 48 <= plan.max_tokens_per_micro_batch < 96 < max(passes_of_a_step(free, free.plan()))
    assert max(passes_of_a_step(short, plan)) <= plan.max_tokens_per_micro_batch
    assert plan.memory.peak_bytes == plan.peak_bytes[0] <= limit_bytes
    assert f"passes hold at most {plan.max_tokens_per_micro_batch:,} tokens" in " ".join(plan.notes)


@pytest.mark.slow
def test_memory_is_kept_for_the_longest_row_and_all_passes_of_a_row_that_is_cut(tmp_path: Path) -> None:
    short_rows = [{"input_ids": [5, 6, 7, 8]}] * 40
    peaks = []
    for rows in (short_rows, [*short_rows, {"input_ids": [5] * 60}]):
        task = replace(small_task("own", data_seed=1, train_batch_size=2), train_dataset=rows)
        peaks.append(make_trainer([task], tmp_path).plan().memory.activation_bytes)
    assert peaks[1] == pytest.approx(peaks[0] * 60 / 8, rel=0.01), "although a typical batch lacks it"

    def kept(length: int, **arguments: object) -> int:
        tasks = [small_task("a", data_seed=1, length=length), small_task("b", data_seed=2, length=4)]
        options = {"max_tokens_per_micro_batch": 16, "planner": "together", **arguments}
        return make_trainer(tasks, tmp_path, **options).plan().memory.peak_bytes

    assert kept(17, split_long_sequences=True) > kept(17)
    assert kept(15, split_long_sequences=True) == kept(15)


# ------------------------------------------------------------ new plans


def test_the_plan_is_made_again_when_tasks_arrive_leave_pause_and_end(tmp_path: Path) -> None:
    held: list[set[str]] = []

    def look(trainer: MultiTaskTrainer) -> None:
        assert trainer._plans.current is not None
        held.append({name for htask in trainer._plans.current.htasks for name in htask.tasks})

    late = small_task("late", data_seed=9, max_steps=6)
    acts: dict[int, Any] = {
        1: lambda trainer: trainer.register_tasks([late]),
        2: lambda trainer: trainer.pause_task("b"),
        3: lambda trainer: trainer.resume_task("b"),
        4: lambda trainer: trainer.remove_task("late"),
    }
    train(three(), tmp_path, recorder=Recorder(at_begin=dict.fromkeys(range(6), look), at_end=acts))
    assert held == [
        {"a", "b", "c"},
        {"a", "b", "c", "late"},
        {"a", "c", "late"},  # b pauses
        {"a", "b", "late"},  # c has ended, b is back
        {"b"},  # a has ended, late was removed
        {"b"},
    ]


# --------------------------------------------------------------- time and profile


def test_a_profile_from_a_file_is_planned_with(planned: MultiTaskTrainer, tmp_path: Path) -> None:
    analytic = planned.plan()
    profile = planned._plans.planner.profile
    assert profile is not None
    slower = replace(profile, layer=profile.layer.scaled(100.0), source="measured")
    path = tmp_path / "profile.json"
    path.write_text(slower.to_json(), encoding="utf-8")
    assert Profile.from_json(slower.to_json()) == slower
    plan = make_trainer(three(), tmp_path / "b", cost_profile=str(path)).plan()
    assert plan.step_s > 10 * analytic.step_s
    assert "profile measured on this device" in str(plan)
    assert "analytic profile, not measured" in str(analytic)


def test_a_plan_for_other_devices_is_a_pipeline_and_needs_none_of_them(planned: MultiTaskTrainer) -> None:
    plan = planned.plan(devices="2xA100-80GB")
    remark = "measured on CPUs only"  # its error bands are those of CPUs
    assert any(remark in note for note in plan.notes)
    assert not any(remark in note for note in planned.plan().notes)
    assert plan.num_stages == 2
    assert plan.device == "2 x A100-80GB"
    assert (planned.plan().max_tokens_per_micro_batch, plan.max_tokens_per_micro_batch) == (4096, 16384)
    assert plan.gantt(60).count("stage") >= 2
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ConfigError, match=r"devices: .*A100-80GB"):
        planned.plan(devices="4xA1000")


def test_the_plan_that_a_run_follows_is_in_its_folder(alone: dict[str, Run]) -> None:
    trainer = alone["a"].trainer
    written = Plan.from_json((folder_of(alone["a"]) / "plan.json").read_text(encoding="utf-8"))
    assert [htask.tasks for htask in written.htasks] == [("a",)]
    assert trainer.plan().htasks == ()
