"""A task's own callbacks, metrics, optimizers, streams and datasets: what fails it alone, and what it costs others.

`tests/attacks` has every way to fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux import DataError, Task
from peft_mux.log import recorders
from tests.invariants.mux_lab import Recorder, assert_bit_identical, make_trainer, rows, small_task, train
from tests.records import run_records as records
from tests.runs import Acts, assert_ended_with_the_same_weights, raising, stops_after, task_of

HELD_OUT = rows(90, 3, 5, 9)


def good() -> Task:
    return small_task("good", data_seed=1, lora_dropout=0.2, eval_dataset=HELD_OUT, eval_steps=3)


def bad_task(name: str = "bad", **settings: Any) -> Task:
    return small_task(name, data_seed=2, eval_dataset=HELD_OUT, **settings)


def stream_task(stream: Any, name: str = "bad", **settings: Any) -> Task:
    return task_of(name, stream, LoraConfig(r=4, target_modules=["q_proj"]), **{"learning_rate": 1e-3, **settings})


# -------------------------------------------------------- callbacks, metrics and optimizers


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no such column")])
def test_outside_of_training_what_metrics_raise_is_the_caller_s(error: BaseException, tmp_path: Path) -> None:
    trainer = make_trainer([bad_task(eval_steps=0, compute_metrics=raising(error))], tmp_path)
    with pytest.raises(type(error)) as caught:
        trainer.evaluate("bad")
    assert caught.value is error


def test_a_hook_and_a_schedule_that_fail_and_what_callbacks_spoil_reach_no_other_task(tmp_path: Path) -> None:
    def hook(optimizer: Any, **_: Any) -> None:
        optimizer.register_step_post_hook(raising(SystemExit(3)))

    def break_schedule(lr_scheduler: Any, **_: Any) -> None:
        lr_scheduler.step = raising(OverflowError("too large"))

    def spoil(args: Any, model: Any, state: Any, **_: Any) -> None:
        state.log_history.append(object())  # a copy
        args.learning_rate, args.logging_steps = "fast", 0
        args.lr_scheduler_kwargs.clear()
        model.eval()
        torch.set_grad_enabled(False)

    acts = {"hook": hook, "schedule": break_schedule, "spoilt": spoil}
    tasks = [bad_task(name, callbacks=[Acts(act, step=3)]) for name, act in acts.items()]
    alone = train([good()], tmp_path / "alone", planner="interleaved")
    options: dict[str, Any] = {"logging_strategy": "steps", "logging_steps": 1, "lr_scheduler_kwargs": {}}
    run = train([good(), *tasks], tmp_path / "run", planner="interleaved", **options)
    reasons = {name: run.trainer.table[name].reason for name in acts}
    assert "the optimizer failed at step 3: SystemExit" in reasons["hook"]
    assert "learning_rate: the schedule raises OverflowError: too large at step 4" in reasons["schedule"]
    assert run.trainer.task_statuses["good"] == "succeeded"
    assert_bit_identical(run, alone, "good")
    assert torch.is_grad_enabled()
    history = run.trainer.task_states["spoilt"].log_history
    assert [entry["step"] for entry in history] == list(range(1, len(history) + 1))


def test_what_own_code_costs_the_others_is_reported_by_task_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Every call passes a limit of nothing; each one is reported once its task's total has doubled.
    monkeypatch.setattr(recorders, "CALL_LIMIT_S", 0.0)
    slow = (
        bad_task("callback", callbacks=[Acts(lambda **_: None, step=3)]),
        bad_task("compute_metrics", eval_steps=1, compute_metrics=lambda _: {"f": 1.0}),
        stream_task(rows(5, 100, 12, 12), "train_dataset"),
        bad_task("objective", objective=lambda outputs: outputs.nll_M),
    )
    train([small_task("good", data_seed=1), *slow], tmp_path)
    printed = capsys.readouterr().out
    for name in (task.name for task in slow):
        assert name in {record["what"] for record in records(tmp_path, "delay") if record["task"] == name}
        (total,) = (record for record in records(tmp_path, "delay_total") if record["task"] == name)
        assert total[f"{name}_s"] > 0
        assert f"{name}: its" in printed


# ------------------------------------------------------------------ streams and datasets


@pytest.mark.parametrize("split", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(3)])
def test_rows_that_cannot_be_read_are_refused_by_task_split_and_kind(
    split: str, error: BaseException, tmp_path: Path
) -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            raise error

    for given, row in ((Rows(raising(error)), " row 0 cannot be read"), (Stream(), "")):
        good_rows = rows(1, 4, 5, 5)
        task = stream_task(given) if split == "train_dataset" else stream_task(good_rows, eval_dataset=given)
        with pytest.raises(DataError, match=rf"^tasks\.bad\.{split}{row}: {type(error).__name__}: {error}"):
            make_trainer([task], tmp_path)


def test_a_stream_is_read_once_from_its_start_to_its_end(tmp_path: Path) -> None:
    starts: list[int] = []

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            starts.append(1)
            yield from rows(5, 100, 12, 12)

    late = small_task("late", data_seed=3, max_steps=3)
    recorder = Recorder(at_begin={2: lambda trainer: trainer.register_tasks([late])})
    train([good(), stream_task(Rows())], tmp_path, recorder=recorder)
    assert len(starts) == 1, "plans are made again, and the last step is proven, without reading it again"


def test_the_rows_of_the_next_step_are_read_during_the_present_one(tmp_path: Path) -> None:
    third_step = threading.Event()

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            for number, row in enumerate(rows(5, 100, 12, 12)):
                if number == 8:
                    third_step.set()
                yield row

    waited: list[bool] = []
    # Not asked for before the third step; without reading ahead this would wait in vain.
    wait = Acts(lambda **_: waited.append(third_step.wait(60)), step=2)
    train([small_task("good", data_seed=1, callbacks=[wait]), stream_task(Rows())], tmp_path)
    assert waited == [True]


def test_a_stream_that_was_read_ahead_continues_with_the_right_row_after_a_resume(tmp_path: Path) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield from rows(5, 13, 12, 12)

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    whole = train([stream_task(Rows())], tmp_path / "a")
    first = train([stream_task(Rows())], tmp_path / "b", recorder=stops_after(3), **options)
    rest = train([stream_task(Rows(), data_timeout_s=30.0)], tmp_path / "b", resume=True, **options)
    assert len(first.losses["bad"]) == 3
    assert first.losses["bad"] + rest.losses["bad"] == whole.losses["bad"]
    assert_ended_with_the_same_weights(rest, whole, "bad")


class Rows:
    """A dataset with a length, whose rows are made when they are read."""

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.make()


def test_ctrl_c_while_rows_are_tokenised_is_the_user_s(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        make_trainer([stream_task(Rows(raising(KeyboardInterrupt())))], tmp_path)
