"""`Placement` and `Opening` alone: from a description to a model that trains, without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import CheckpointError
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.tasks.resolved import resolve_tasks
from peft_mux.engine.tasks.setup import make_task_runs
from peft_mux.task import TaskStatus
from peft_mux.trainer.opening import Opening
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World
from tests.invariants.mux_lab import small_task, tiny_llama
from tests.trainer.parts import Calls, FakePlans, make_run


def placement_of(run: Run, model: Any = None) -> Placement:
    source = BackboneSource(tiny_llama() if model is None else model, run.args, None, {})
    return Placement(run, World(run.args, run.table), source, source.describe([own.resolved for own in run.table]))


def no_stages() -> Any:
    raise AssertionError("there are no stages here")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """The folder of a saved backbone."""
    tiny_llama().save_pretrained(tmp_path / "backbone")
    return str(tmp_path / "backbone")


def test_weights_are_loaded_once_and_everybody_is_told(tmp_path: Path, folder: str) -> None:
    placement, told = placement_of(make_run(tmp_path / "run"), folder), []
    placement.subscribe(lambda: told.append(placement.model))
    assert not placement.is_placed
    assert placement.model.backbone.device.type == "meta"
    placed = placement.materialise(no_stages)
    assert placement.materialise(no_stages) is placed
    assert placement.model is placement.outline is placed.model
    assert placed.model.backbone.device.type == "cpu"
    assert placed.model.training
    assert [id(model) for model in told] == [id(told[0]), id(placed.model)]


def test_a_started_task_has_an_optimizer_over_its_own_parameters(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    placement = placement_of(run)
    model = placement.materialise(no_stages).model
    placement.start(run.table["a"])
    assert run.table["a"].status is TaskStatus.RUNNING
    assert run.table["b"].status is TaskStatus.WAITING
    optimizer = run.table["a"].optimizer
    assert optimizer is not None
    assert optimizer.slab is model.registry.slab_of("a"), "it steps the pages that the parameters are views of"
    assert run.table["a"].state.is_world_process_zero
    assert "a" in run.log.callbacks


def test_tasks_come_and_go_in_the_model_and_in_the_list(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    placement = placement_of(run)
    placement.materialise(no_stages)
    late = resolve_tasks([small_task("late", data_seed=5)], run.args)
    placement.check(late)
    placement.register(make_task_runs(late, run.args, None, placement.source.config))
    assert placement.model.tasks == ("a", "b", "late")
    placement.remove("a")
    assert placement.model.tasks == ("b", "late")
    assert [task.name for task in placement.tasks] == ["b", "late"]


def test_a_model_that_was_let_go_of_is_held_by_nobody_and_can_be_described_anew(tmp_path: Path, folder: str) -> None:
    run = make_run(tmp_path / "run")
    placement, told = placement_of(run, folder), []
    placement.materialise(no_stages)
    placement.start(run.table["a"])
    placement.subscribe(lambda: told.append(placement.model))
    layout = placement.part.layout
    target = placement.part_for_layout(layout)
    placement.release_model()
    assert told[-1] is None
    assert placement.outline is None
    assert run.table["a"].optimizer is None
    assert run.table["a"].last_good is None
    placement.describe_part(target)
    assert not placement.is_placed
    assert told[-1].tasks == ("a", "b")
    weights = placement.materialise(no_stages).model.backbone.state_dict()
    assert not any(weight.is_meta for weight in weights.values())


def opening_of(run: Run, calls: Calls) -> tuple[Opening, Placement]:
    placement = placement_of(run)
    plans: Any = FakePlans(run, calls)
    return Opening(run, World(run.args, run.table), placement, plans), placement


def test_a_run_that_is_opened_has_a_folder_a_plan_and_says_so(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path / "run", save_strategy="steps", disable_tqdm=True), Calls()
    opening, placement = opening_of(run, calls)
    opening.open(None)
    assert placement.is_placed
    assert calls == ["replan"]
    assert not run.is_in_train
    opening.begin()
    assert run.is_in_train
    assert run.saver.folder is not None
    assert {"config.json", "plan.json", "state"} <= {path.name for path in run.root.iterdir()}


def test_a_run_that_saves_nothing_opens_no_folder_of_states(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", disable_tqdm=True)
    opening, _ = opening_of(run, Calls())
    opening.open(None)
    assert run.saver.folder is None
    assert not (run.root / "state").exists()


def test_there_must_be_something_to_resume_from(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", save_strategy="steps", disable_tqdm=True)
    opening, _ = opening_of(run, Calls())
    with pytest.raises(CheckpointError, match="holds no state of a run"):
        opening.open(True)
    assert not run.is_in_train


def test_resuming_puts_every_task_back_where_the_newest_state_left_it(tmp_path: Path) -> None:
    first = make_run(tmp_path / "run", save_strategy="steps", disable_tqdm=True)
    opening, placement = opening_of(first, Calls())
    opening.open(None)
    for own in first.table:
        placement.start(own)
    first.state.global_step, first.table["a"].step = 5, 3
    with torch.no_grad():
        next(iter(placement.model.task_parameters("a").values())).fill_(0.25)
    assert first.saver.save_run()

    second = make_run(tmp_path / "run", save_strategy="steps", disable_tqdm=True)
    opening, placement = opening_of(second, Calls())
    opening.open(True)
    assert second.state.global_step == 5
    assert [own.step for own in second.table] == [3, 0]
    assert bool((next(iter(placement.model.task_parameters("a").values())) == 0.25).all())
