"""A step that is cut off by a second Ctrl-C or a fault of the device: what follows is exact, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import CheckpointError, MultiTaskTrainer, Task
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.errors import ForcedInterrupt
from tests.invariants.mux_lab import make_trainer, small_task, train, weights
from tests.runs import assert_equal_weights


def tasks() -> list[Task]:
    return [small_task("one", data_seed=1, lora_dropout=0.2), small_task("two", data_seed=2)]


Final = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Final:
    """Return the weights that the tasks end with where nothing is cut off."""
    whole = train(tasks(), tmp_path_factory.mktemp("whole"))
    return {name: whole.weights(name) for name in ("one", "two")}


def assert_ended_with(trainer: MultiTaskTrainer, final: Final) -> None:
    assert trainer.task_statuses == dict.fromkeys(final, "succeeded")
    for name, theirs in final.items():
        assert_equal_weights(weights(trainer, name), theirs, name)


def cut_off_in_backward(trainer: MultiTaskTrainer, error: BaseException, step: int) -> None:
    """Raise an error in the middle of a step's backward pass, when the upper layer has its gradients already."""
    layer = trainer.model.backbone.model.layers[0]

    def fail(module: Any, inputs: Any, output: torch.Tensor) -> None:
        def raise_once(gradient: torch.Tensor) -> None:
            handle.remove()
            raise error

        if trainer.state.global_step == step and output.requires_grad:
            output.register_hook(raise_once)

    handle = layer.register_forward_hook(fail)


def cut_off_in_updates(monkeypatch: pytest.MonkeyPatch, error: BaseException, update: int) -> None:
    """Raise an error at the beginning of one task's update, when others may have been updated."""
    step: Callable[..., None] = TaskOptimizer.step
    updates: list[TaskOptimizer] = []

    def fail(self: TaskOptimizer, norm: torch.Tensor) -> None:
        updates.append(self)
        if len(updates) == update:
            raise error
        step(self, norm)

    monkeypatch.setattr(TaskOptimizer, "step", fail)


FAULT_OF_THE_DEVICE = RuntimeError("CUDA error: unspecified launch failure")


def test_a_trainer_whose_passes_were_cut_off_continues_as_if_they_had_not_been(tmp_path: Path, wanted: Final) -> None:
    trainer = make_trainer(tasks(), tmp_path)
    for step, error in ((3, ForcedInterrupt()), (5, FAULT_OF_THE_DEVICE)):
        cut_off_in_backward(trainer, error, step)
        with pytest.raises(type(error)):
            trainer.train()
        assert trainer.state.global_step == step
    gradients = [page.values.grad for page in trainer.model.registry.slab_of("one").pages]
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients), "something was left over"
    trainer.train()
    assert_ended_with(trainer, wanted)


def test_a_trainer_that_has_trained_resumes_from_the_state_on_the_disk(tmp_path: Path, wanted: Final) -> None:
    trainer = make_trainer(tasks(), tmp_path, save_strategy="steps", save_steps=2)
    cut_off_in_backward(trainer, FAULT_OF_THE_DEVICE, step=5)
    with pytest.raises(RuntimeError):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert_ended_with(trainer, wanted)


@pytest.mark.slow
def test_resuming_goes_back_even_where_every_task_has_ended_since(tmp_path: Path, wanted: Final) -> None:
    trainer = make_trainer(tasks(), tmp_path / "a", save_strategy="steps", save_steps=5)
    trainer.train()
    states = sorted((tmp_path / "a" / "state").iterdir())
    for path in states[1:]:  # as if the rest of the run had never been saved
        path.unlink()
    with torch.no_grad():
        for weight in trainer.model.task_parameters("one").values():
            weight.zero_()
    trainer.train(resume_from_checkpoint=True)
    assert_ended_with(trainer, wanted)


def test_updates_that_were_cut_off_are_not_gone_on_from_but_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: Final
) -> None:
    trainer = make_trainer(tasks(), tmp_path / "a", save_strategy="steps", save_steps=2)
    with monkeypatch.context() as patches:
        # Two tasks a step: the first one has taken the sixth step, the second has not.
        cut_off_in_updates(patches, ForcedInterrupt(), update=12)
        with pytest.raises(ForcedInterrupt):
            trainer.train()
    said = r"train must resume with train\(resume_from_checkpoint=True\) .*step 6 was cut off"
    with pytest.raises(CheckpointError, match=said):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert_ended_with(trainer, wanted)


@pytest.mark.slow
def test_the_argument_to_resume_is_for_the_first_training_of_a_trainer(tmp_path: Path) -> None:
    train(tasks(), tmp_path, save_strategy="steps", save_steps=3)
    (tmp_path / "state" / "run-00000008.json").unlink()
    trainer = make_trainer(tasks(), tmp_path, save_strategy="steps", save_steps=3, resume_from_checkpoint="True")
    trainer.args.resume_from_checkpoint = True  # type: ignore[assignment]
    trainer.train()
    ended = weights(trainer, "one")
    trainer.train()
    assert trainer.state.global_step == 8, "it did not go back to step 6"
    assert_equal_weights(weights(trainer, "one"), ended)


@pytest.mark.slow
def test_a_task_that_the_state_does_not_have_is_refused_where_its_first_weights_are_gone(tmp_path: Path) -> None:
    trainer = make_trainer(tasks()[:1], tmp_path, save_strategy="steps", save_steps=100)
    trainer.train()
    (tmp_path / "state").rename(tmp_path / "kept")
    (tmp_path / "state").mkdir()
    trainer.register_tasks([small_task("late", data_seed=3)])
    trainer.train()
    for path in (tmp_path / "state").iterdir():
        path.unlink()
    for path in (tmp_path / "kept").iterdir():
        path.rename(tmp_path / "state" / path.name)
    said = r"resume_from_checkpoint must have all tasks that have taken steps .*newest state does not have late"
    with pytest.raises(CheckpointError, match=said):
        trainer.train(resume_from_checkpoint=True)
