"""Plans for several replicas and for stages of a run's own pipeline: shares, cuts, templates, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peft_mux import ConfigError, MultiTaskTrainer, Task
from peft_mux.data.packing.passes import even_shares
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.planning import planner as planning_module
from peft_mux.planning.loads import typical_lengths
from peft_mux.planning.planner import Planner
from peft_mux.scheduler.plan import Plan
from peft_mux.trainer.inputs import make_collator
from tests.invariants.mux_lab import make_trainer, small_task
from tests.planning.cases import llama


def three() -> list[Task]:
    return [
        small_task("a", data_seed=1, length=9),
        small_task("b", data_seed=2, length=24, rank=8),
        small_task("c", data_seed=3, length=5, target_modules=["q_proj"]),
    ]


def planner_of(trainer: MultiTaskTrainer, num_replicas: int = 1) -> Planner:
    return Planner(
        trainer.model,
        trainer._placement.source,
        trainer.args,
        make_collator(trainer.args, trainer.processing_class),
        num_replicas,
    )


def test_replicas_divide_each_global_batch_and_the_plan_is_that_of_the_busiest(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, planner="interleaved")
    runs = list(trainer.table)
    alone, divided = (planner_of(trainer, number).plan(runs) for number in (1, 3))
    lengths = [typical_lengths(run.loader.sample_lengths, run.hyper.train_batch_size) for run in runs]
    tokens = [
        [sum(lengths[task][row] for row in rows) for task, rows in enumerate(share)]
        for share in even_shares(lengths, 3)
    ]
    busiest = max(tokens, key=sum)
    for task, run in enumerate(runs):
        (htask,) = [htask for htask in divided.htasks if htask.tasks == (run.name,)]
        assert htask.micro_batches * htask.tokens_per_micro_batch == pytest.approx(busiest[task])
        for replica, own in enumerate(divided.passes):
            assert sum(one.tokens for one in own if one.tasks == (run.name,)) == tokens[replica][task]
    assert divided.step_s < alone.step_s
    assert divided.shares == alone.shares, "what a task brings into a step of all replicas stays the same"
    assert "divided among 3 replicas" in str(divided)
    assert "replicas" not in str(alone)
    assert Plan.from_json(divided.to_json()) == divided
    assert json.loads(divided.to_json())["num_replicas"] == 3


def test_a_plan_for_the_own_pipeline_tells_how_the_backbone_is_cut(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(5), memory_limit_gib=1.0)
    plan = planner_of(trainer).plan(list(trainer.table), num_stages=2)
    assert (plan.num_stages, plan.layers_per_stage, plan.device) == (2, (3, 2), "2 x cpu")
    assert plan.limit_bytes == 2**30
    assert plan.template is not None
    layout = StageLayout.of(5, 2, num_chunks=plan.template.num_chunks, layers_per_stage=plan.layers_per_stage)
    assert layout.layer_counts == (3, 2)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.memory.peak_bytes == max(plan.peak_bytes)


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)])
def test_a_baselines_template_is_built_over_the_same_buckets(schedule: str, num_chunks: int, tmp_path: Path) -> None:
    model = llama(4)
    own = make_trainer(three(), tmp_path / "own", model=model)
    other = make_trainer(three(), tmp_path / "other", model=llama(4), pipeline_schedule=schedule)
    planned, baseline = (planner_of(one).plan(list(one.table), num_stages=2) for one in (own, other))
    assert planned.template is not None
    assert baseline.template is not None
    assert (baseline.buckets, baseline.htasks) == (planned.buckets, planned.htasks)
    assert (baseline.template.schedule, baseline.template.num_chunks) == (schedule, num_chunks)
    assert baseline.step_s >= planned.step_s * (1 - 1e-9) or num_chunks > 1


def test_a_model_that_is_cut_is_planned_as_it_was_whole(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    planner = planner_of(trainer)
    whole = planner.plan(list(trainer.table), num_stages=2)
    StageModel(trainer.model, StageLayout.of(4, 2), stage=1)
    assert planner.plan(list(trainer.table), num_stages=2) == whole


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(("arguments", "most"), [({}, 2), ({"pipeline_schedule": "interleaved_1f1b"}, 1)])
def test_more_stages_than_the_backbone_has_layers_for_are_refused(
    arguments: dict[str, str], most: int, tmp_path: Path
) -> None:
    trainer = make_trainer(three(), tmp_path, **arguments)
    with pytest.raises(ConfigError, match=rf"plan: devices asks for 4 stages; allowed: 1 to {most}, .*fewer stages"):
        trainer.plan(devices="4xA40")
    with pytest.raises(ConfigError, match="plan: pipeline_parallel_size asks for 3 stages"):
        planner_of(trainer).plan(list(trainer.table), num_stages=3)


def test_what_no_pipeline_can_hold_is_refused_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: object, **__: object) -> None:
        raise ValueError("bucket 'bucket 1' on stage 0: one micro-batch holds 9 bytes; allowed: 5.")

    monkeypatch.setattr(planning_module, "plan_tasks", nothing_fits)
    with pytest.raises(ConfigError, match=r"plan: bucket 'bucket 1' on stage 0.* Raise memory_limit_gib, take more"):
        make_trainer(three(), tmp_path).plan(devices="2xA40")
