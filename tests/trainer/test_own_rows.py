"""What a task's own streams and datasets may do to the others: nothing, whatever they raise or never give."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from peft_mux import DataError, MultiTaskTrainer, Task
from tests.invariants.mux_lab import Recorder, Run, make_trainer, rows, small_task, train
from tests.trainer.neighbours import (
    Stream,
    check_all_fail_alone,
    check_fails_alone,
    good,
    raising,
    recursing,
    stream_task,
    train_alone,
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train_alone(tmp_path_factory.mktemp("alone"))


# ---------------------------------------------------------------------- streams


def test_a_stream_that_goes_wrong_fails_its_task_alone(alone: Run, tmp_path: Path) -> None:
    ends: list[tuple[Callable[[], Any], str]] = [
        (raising(OSError("the disk is gone")), "data: OSError: the disk is gone"),
        (raising(KeyError("x")), "data: KeyError: 'x'"),
        (raising(SystemExit(3)), "data: SystemExit: 3"),
        (raising(KeyboardInterrupt("mine")), "data: KeyboardInterrupt: mine"),
        (raising(DataError("no row")), "data: no row"),
        (recursing, "data: RecursionError: "),
        (lambda: None, "data: tasks.bad6.train_dataset row 9 must be a dict of columns, got NoneType"),
        (lambda: ["the"], "data: tasks.bad7.train_dataset row 9 must be a dict of columns, got list"),
        (lambda: {"input_ids": None}, "row 9 column input_ids must be a list of integers, got None"),
        (lambda: {"input_ids": [5, 1000]}, "row 9 column input_ids must be ids from 0 to"),
    ]
    tasks = [(stream_task(Stream(then), f"bad{number}"), reason) for number, (then, reason) in enumerate(ends)]
    run = check_all_fail_alone(tasks, tmp_path, alone)
    assert {run.trainer.table[task.name].step for task, _ in tasks} == {2}, "the steps before the bad row are taken"


def test_a_stream_that_blocks_fails_its_task_after_the_time_limit_and_the_others_continue(
    alone: Run, tmp_path: Path
) -> None:
    goes_on = threading.Event()

    def block() -> Any:
        goes_on.wait(60)
        return {"input_ids": [1, 2]}

    try:
        task = stream_task(Stream(block), data_timeout_s=0.2)
        check_fails_alone(
            task,
            tmp_path,
            alone,
            (
                "data: tasks.bad.train_dataset must deliver all rows of a step within data_timeout_s, got no "
                "rows for 0.2 s"
            ),
        )
    finally:
        goes_on.set()


def test_a_stream_is_read_once_from_its_start_to_its_end(tmp_path: Path) -> None:
    starts: list[int] = []

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            starts.append(1)
            yield from rows(5, 100, 12, 12)

    late = small_task("late", data_seed=3, max_steps=3)
    recorder = Recorder(at_begin={2: lambda trainer: trainer.register_tasks([late])})
    train([good(), stream_task(Rows())], tmp_path, recorder=recorder)
    assert len(starts) == 1, "plans are made anew, and the last step is proven, without reading it again"


def test_the_rows_of_the_next_step_are_read_during_the_present_one(tmp_path: Path) -> None:
    third_step = threading.Event()

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            for number, row in enumerate(rows(5, 100, 12, 12)):
                if number == 8:
                    third_step.set()
                yield row

    waited: list[bool] = []

    class Wait(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                # Asked for by nobody before the third step; without reading ahead this would wait in vain.
                waited.append(third_step.wait(60))

    train([small_task("good", data_seed=1, callbacks=[Wait()]), stream_task(Rows())], tmp_path)
    assert waited == [True]


def test_a_stream_that_was_read_ahead_continues_with_the_right_row_after_a_resume(tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield from rows(5, 13, 12, 12)

    def stop(trainer: MultiTaskTrainer) -> None:
        trainer.control.should_training_stop = True

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train([good(), stream_task(Rows())], tmp_path / "a")
    first = train([good(), stream_task(Rows())], tmp_path / "b", recorder=Recorder(at_end={3: stop}), **options)
    rest = train([good(), stream_task(Rows(), data_timeout_s=30.0)], tmp_path / "b", resume=True, **options)
    assert len(first.losses["bad"]) == 3
    for name in ("good", "bad"):
        assert first.losses[name] + rest.losses[name] == whole.losses[name]
        assert all(torch.equal(value, whole.weights(name)[key]) for key, value in rest.weights(name).items())


@pytest.mark.parametrize("row", [None, {"input_ids": [1, 500]}], ids=["None", "outside the vocabulary"])
def test_an_arrival_whose_first_rows_are_bad_is_refused_where_it_is_registered(row: Any, tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield {"input_ids": [1, 2]}
            yield row

    def ask(trainer: MultiTaskTrainer) -> None:
        with pytest.raises(DataError, match=r"tasks\.bad\.train_dataset row 1"):
            trainer.register_tasks([stream_task(Rows())])

    run = train([good()], tmp_path, recorder=Recorder(at_begin={2: ask}))
    assert run.trainer.task_statuses == {"good": "succeeded"}


@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
def test_a_stream_that_raises_in_its_first_row_is_refused_by_task_split_and_kind(split: str, tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            raise OSError("no such share")

    task = stream_task(Rows()) if split == "train_dataset" else stream_task(rows(1, 4, 5, 5), eval_dataset=Rows())
    with pytest.raises(DataError, match=rf"^tasks\.bad\.{split}: OSError: no such share$"):
        make_trainer([task], tmp_path)


# -------------------------------------------------- datasets that fail while they are tokenised


class Failing:
    """A dataset with a length, of which one row cannot be read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 3:
            raise self.error
        return {"input_ids": [1, 2, 3]}


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("torn"), SystemExit(3)])
@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
def test_a_dataset_that_raises_is_refused_by_task_split_and_row(
    error: BaseException, split: str, tmp_path: Path
) -> None:
    datasets = {"train_dataset": rows(1, 4, 5, 5), "eval_dataset": rows(1, 4, 5, 5), split: Failing(error)}
    task = Task(name="own", peft_config=LoraConfig(r=2, target_modules=["q_proj"]), max_steps=1, **datasets)
    with pytest.raises(DataError, match=rf"tasks\.own\.{split} row 3 cannot be read: {type(error).__name__}"):
        make_trainer([task], tmp_path)


def test_ctrl_c_while_rows_are_tokenised_is_the_user_s(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trainer([stream_task(Failing(KeyboardInterrupt()))], tmp_path)


def test_a_dataset_that_knows_no_end_is_read_as_far_as_its_length(tmp_path: Path) -> None:
    class Endless(Failing):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": [1, 2, 3]}

    trainer = make_trainer([stream_task(Endless(ValueError()))], tmp_path)
    assert trainer.table["bad"].loader.report.num_rows == 5
