"""A run that is interrupted and resumed continues as if nothing had happened, in every bit of every task."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset
from peft import LoraConfig

from peft_mux.task import EarlyStopping, Task, TaskStatus
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.records import run_records
from tests.runs import assert_equal_weights, crash, files_in, folder_of, poison, small_tasks, stop, train_until_crash

NAMES = ("epochs", "short", "stops", "fails", "stream")
POISONED_AT = 4


def stream_rows(seed: int) -> Iterator[dict[str, list[int]]]:
    yield from lab.rows(seed, 7, 9, 9)


def all_kinds() -> list[Task]:
    """Return one task of each kind that resuming must know to put back; the longest takes 9 steps."""
    stream = IterableDataset.from_generator(stream_rows, gen_kwargs={"seed": 5}).shuffle(seed=3, buffer_size=4)
    return [
        # Three epochs of three batches, the last of which is smaller; the schedule never stands still.
        lab.small_task(
            "epochs",
            data_seed=1,
            lora_dropout=0.3,
            max_steps=None,
            num_train_epochs=3,
            lr_scheduler_type="cosine",
            warmup_steps=2,
        ),
        # Two epochs of five packed rows.
        lab.small_task(
            "short",
            data_seed=2,
            length=17,
            rank=2,
            lora_dropout=0.1,
            max_steps=5,
            packing=True,
            max_length=40,
            train_batch_size=2,
        ),
        lab.small_task(
            "stops",
            data_seed=3,
            length=9,
            max_steps=20,
            eval_dataset=lab.rows(33, 3, 9, 9),
            eval_steps=2,
            early_stopping=EarlyStopping(patience=2, min_delta=100.0),
        ),
        lab.small_task("fails", data_seed=4, rank=3, max_steps=9),
        Task(
            name="stream",
            peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.2),
            train_dataset=stream,
            train_batch_size=4,
            learning_rate=3e-3,
            max_steps=8,
            weight_decay=0.1,
            seed=1,
        ),
    ]


def recorder(**acts: Any) -> Recorder:
    return Recorder(at_begin={POISONED_AT: poison("fails")}, **acts)


def saving(**options: Any) -> dict[str, Any]:
    return {"save_strategy": "steps", "save_steps": 1000, "logging_strategy": "steps", "logging_steps": 2, **options}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that is never interrupted."""
    run = lab.train(all_kinds(), tmp_path_factory.mktemp("whole"), recorder=recorder(), **saving())
    # If these were otherwise, the tests below would not test what they say.
    assert run.trainer.task_statuses == {
        "epochs": "succeeded",
        "short": "succeeded",
        "stops": "stopped_early",
        "fails": "failed",
        "stream": "succeeded",
    }
    steps = {name: len(run.losses[name]) for name in NAMES}
    assert steps == {"epochs": 9, "short": 5, "stops": 6, "fails": POISONED_AT + 1, "stream": 8}
    return run


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was interrupted after step 3."""
    folder = tmp_path_factory.mktemp("stopped")
    lab.train(all_kinds(), folder, recorder=recorder(at_end={3: stop}), **saving())
    return folder


@pytest.fixture
def stopped_copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def assert_ended_the_same(run: Run, whole: Run) -> None:
    """Assert that all that a run leaves behind is equal in every bit."""
    for name in NAMES:
        mine, theirs = run.trainer.table[name], whole.trainer.table[name]
        assert_equal_weights(run.weights(name), whole.weights(name), name)
        assert (mine.status, mine.reason, mine.step) == (theirs.status, theirs.reason, theirs.step)
        assert (mine.num_tokens, mine.best.state()) == (theirs.num_tokens, theirs.best.state())
        # Compared as text, as NaN is not equal to itself.
        assert repr(mine.last_loss) == repr(theirs.last_loss)
        saved = [folder_of(one) / name / "adapter_model.safetensors" for one in (run, whole)]
        assert saved[0].read_bytes() == saved[1].read_bytes(), name


def assert_went_the_same(run: Run, whole: Run, *, first: int) -> None:
    """Assert equal losses, weights and optimizer moments at each step from `first` (of the run) on."""
    for name in NAMES:
        losses, digests = whole.losses[name][first:], whole.recorder.digests[name][first:]
        assert [repr(loss) for loss in run.losses.get(name, [])] == [repr(loss) for loss in losses], name
        mine = run.recorder.digests.get(name, [])
        # "fails" has no moments after its failure, and NaN or restored weights: still equal.
        assert mine == digests, f"{name}: first difference at step {first + differing(mine, digests)}"


def differing(mine: list[str], theirs: list[str]) -> int:
    return next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs)))


@pytest.mark.parametrize("step", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 8))])
def test_a_run_stopped_at_any_step_ends_with_the_same_bits(step: int, whole: Run, tmp_path: Path) -> None:
    first = lab.train(all_kinds(), tmp_path, recorder=recorder(at_end={step: stop}), **saving())
    assert first.trainer.state.global_step == step, "it was not interrupted where it should be"
    second = lab.train(all_kinds(), tmp_path, recorder=recorder(), resume=True, **saving())
    assert_went_the_same(second, whole, first=step)
    assert_ended_the_same(second, whole)
    assert second.trainer.state.global_step == whole.trainer.state.global_step


@pytest.mark.parametrize(("crash_at", "saved_at"), [(8, 6), pytest.param(4, 3, marks=pytest.mark.slow)])
def test_a_run_that_crashed_goes_back_to_its_last_save_and_ends_with_the_same_bits(
    crash_at: int, saved_at: int, whole: Run, tmp_path: Path
) -> None:
    train_until_crash(all_kinds(), tmp_path, recorder(at_end={crash_at: crash}), **saving(save_steps=3))
    resumed = lab.train(all_kinds(), tmp_path, recorder=recorder(), resume=True, **saving(save_steps=3))
    assert_went_the_same(resumed, whole, first=saved_at)
    assert_ended_the_same(resumed, whole)


@pytest.mark.slow
def test_a_run_interrupted_again_and_again_ends_with_the_same_bits(whole: Run, tmp_path: Path) -> None:
    for number, step in enumerate((2, 5, 7)):
        act = recorder(at_end={step: stop})
        lab.train(all_kinds(), tmp_path, recorder=act, resume=number > 0, **saving(save_total_limit=1))
    last = lab.train(all_kinds(), tmp_path, recorder=recorder(), resume=True, **saving(save_total_limit=1))
    assert_ended_the_same(last, whole)


@pytest.mark.slow
def test_another_folder_can_be_resumed_from_and_stays_as_it_was(whole: Run, stopped: Path, tmp_path: Path) -> None:
    old, new = stopped, tmp_path / "new"
    before = files_in(old)
    act = recorder()
    trainer = lab.make_trainer(all_kinds(), new, recorder=act, **saving())
    trainer.train(resume_from_checkpoint=str(old))
    assert_went_the_same(Run(trainer, act), whole, first=3)
    assert_ended_the_same(Run(trainer, act), whole)
    assert files_in(old) == before


@pytest.mark.slow
def test_a_checkpoint_of_one_task_alone_is_not_mixed_into_the_saved_run(tmp_path: Path) -> None:
    # "a" has newer checkpoints than the record of the whole run; taking them would set it ahead of "b".
    def tasks() -> list[Task]:
        return [lab.small_task("a", data_seed=1, save_steps=1, lora_dropout=0.2), lab.small_task("b", data_seed=2)]

    wanted = lab.train(tasks(), tmp_path / "wanted", **saving(save_steps=3))
    train_until_crash(tasks(), tmp_path / "run", Recorder(at_end={6: crash}), **saving(save_steps=4))
    assert (tmp_path / "run" / "a" / "checkpoint-5").is_dir()
    resumed = lab.train(tasks(), tmp_path / "run", resume=True, **saving(save_steps=4))
    assert resumed.losses == {name: wanted.losses[name][4:] for name in "ab"}
    assert resumed.recorder.digests == {name: wanted.recorder.digests[name][4:] for name in "ab"}


def test_a_finished_run_resumes_to_nothing_left_to_do(whole: Run, tmp_path: Path) -> None:
    shutil.copytree(folder_of(whole), tmp_path / "run")
    again = lab.train(all_kinds(), tmp_path / "run", recorder=recorder(), resume=True, **saving())
    assert again.losses == {}
    assert_ended_the_same(again, whole)


def pause_b(trainer: Any) -> None:
    """Ask for a rest, and for the end of the run before another step."""
    trainer.pause_task("b")
    if trainer.state.global_step == 4:
        stop(trainer)


@pytest.mark.parametrize(
    "step", [pytest.param(2, id="steps before the end"), pytest.param(4, id="behind the last save")]
)
def test_a_paused_task_is_paused_still_after_resuming(step: int, tmp_path: Path) -> None:
    pause_and_stop = {4: stop, step: pause_b}
    lab.train(small_tasks("a", "b"), tmp_path, recorder=Recorder(at_end=pause_and_stop), **saving(save_steps=4))
    trainer = lab.make_trainer(small_tasks("a", "b"), tmp_path, recorder=(act := Recorder()), **saving())
    trainer.train(resume_from_checkpoint=True)
    assert trainer.task_statuses["b"] is TaskStatus.PAUSED
    assert trainer.table["b"].step == step
    assert set(act.losses) == {"a"}
    trainer.resume_task("b")
    trainer.train()
    assert trainer.task_statuses["b"] is TaskStatus.SUCCEEDED
    assert len(act.losses["b"]) == 8 - step


def test_what_callbacks_ask_for_at_a_step_that_is_saved_is_part_of_the_saved_state(tmp_path: Path) -> None:
    def tasks() -> list[Task]:
        return small_tasks("a", "b")

    def ask(trainer: Any) -> None:
        trainer.register_tasks([late])
        trainer.pause_task("b")

    late = lab.small_task("late", data_seed=3, max_steps=3)
    whole = lab.train(tasks(), tmp_path / "whole", recorder=Recorder(at_end={2: ask}), **saving(save_steps=2))
    train_until_crash(tasks(), tmp_path / "run", Recorder(at_end={2: ask, 3: crash}), **saving(save_steps=2))
    run = lab.train([*tasks(), late], tmp_path / "run", resume=True, **saving())
    assert run.trainer.task_statuses == {"a": "succeeded", "b": "paused", "late": "succeeded"}
    assert run.losses == {"a": whole.losses["a"][2:], "late": whole.losses["late"]}


def logged(run: Run) -> list[str]:
    """Return the records of `metrics.jsonl` about tasks, without their times; their order in a step has no meaning."""
    records = [{**record, "time": 0} for record in run_records(folder_of(run))]
    return sorted(json.dumps(record) for record in records if record["event"] in ("train", "eval", "status"))


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_the_order_in_which_tasks_are_given_changes_no_bit_and_the_metrics_file_has_each_step_once(
    step: int, whole: Run, stopped_copy: Path, tmp_path: Path
) -> None:
    folder = stopped_copy
    if step == 6:  # "short" ends after step 5, its last losses are logged after step 6
        folder = tmp_path / "later"
        lab.train(all_kinds(), folder, recorder=recorder(at_end={step: stop}), **saving())
    second = lab.train(all_kinds()[::-1], folder, recorder=recorder(), resume=True, **saving())
    # The order of the stream is part of its rounding, and of which tasks share a pass.
    assert [run.name for run in second.trainer.table] == list(NAMES)
    assert_went_the_same(second, whole, first=step)
    assert_ended_the_same(second, whole)
    assert logged(second) == logged(whole)
    for name in NAMES:
        history = [run.trainer.task_states[name].log_history for run in (second, whole)]
        assert repr(history[0]) == repr(history[1]), name
