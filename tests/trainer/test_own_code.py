"""What a task's own code may do to the others: nothing, and what it costs them is told.

The task beside it trains as if alone, to the last bit: with `planner="interleaved"` it has passes of its own.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from peft_mux import ConfigError, DataError, EarlyStopping, MultiTaskTrainer, Task
from peft_mux.reporting import delays
from tests.invariants.mux_lab import Recorder, Run, assert_bit_identical, make_trainer, rows, small_task, train

HELD_OUT = rows(90, 3, 5, 9)
BREAKS_AT = 9
"""Row at which streams go wrong: in the third step of four rows."""


def records(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def good() -> Task:
    return small_task("good", data_seed=1, lora_dropout=0.2, eval_dataset=HELD_OUT, eval_steps=3)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train([good()], tmp_path_factory.mktemp("alone"), planner="interleaved")


def check_fails_alone(bad: Task, folder: Path, alone: Run, *reasons: str, **arguments: Any) -> Run:
    """Train a task that goes wrong beside one that does not; return the run."""
    run = train([good(), bad], folder, planner="interleaved", save_strategy="steps", save_steps=2, **arguments)
    assert run.trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    for reason in reasons:
        assert reason in run.trainer.table["bad"].reason
    assert_bit_identical(run, alone, "good")
    assert (folder / "bad" / "adapter_model.safetensors").is_file(), "the last good adapter is kept"
    return run


# ---------------------------------------------------------------------- streams


class Stream:
    """Rows until a function is asked for the next one."""

    def __init__(self, then: Callable[[], Any]) -> None:
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        yield from rows(5, BREAKS_AT, 12, 12)
        yield self.then()
        yield from rows(6, 100, 12, 12)


def stream_task(stream: Any, **settings: Any) -> Task:
    options = {"train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-3, **settings}
    return Task(name="bad", peft_config=LoraConfig(r=4, target_modules=["q_proj"]), train_dataset=stream, **options)


def recursing() -> Any:
    return recursing()


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("then", "reason"),
    [
        pytest.param(raising(OSError("the disk is gone")), "data: OSError: the disk is gone", id="OSError"),
        pytest.param(raising(KeyError("x")), "data: KeyError: 'x'", id="KeyError"),
        pytest.param(raising(SystemExit(3)), "data: SystemExit: 3", id="SystemExit"),
        pytest.param(raising(KeyboardInterrupt("mine")), "data: KeyboardInterrupt: mine", id="KeyboardInterrupt"),
        pytest.param(raising(DataError("no row")), "data: no row", id="DataError"),
        pytest.param(recursing, "data: RecursionError: ", id="RecursionError"),
        pytest.param(lambda: None, "data: tasks.bad.train_dataset row 9: got NoneType", id="None"),
        pytest.param(lambda: ["the"], "data: tasks.bad.train_dataset row 9: got list", id="list"),
        pytest.param(lambda: {"input_ids": None}, "row 9 column input_ids: got None", id="malformed"),
    ],
)
def test_a_stream_that_goes_wrong_fails_its_task_alone(
    then: Callable[[], Any], reason: str, alone: Run, tmp_path: Path
) -> None:
    run = check_fails_alone(stream_task(Stream(then)), tmp_path, alone, reason)
    assert run.trainer.table["bad"].step == 2, "the steps before the bad row are taken"


def test_a_stream_that_blocks_fails_its_task_after_the_time_limit_and_the_others_go_on(
    alone: Run, tmp_path: Path
) -> None:
    goes_on = threading.Event()

    def block() -> Any:
        goes_on.wait(60)
        return {"input_ids": [1, 2]}

    try:
        task = stream_task(Stream(block), data_timeout_s=0.2)
        check_fails_alone(task, tmp_path, alone, "data: tasks.bad.train_dataset: got no rows for 0.2 s")
    finally:
        goes_on.set()


def test_a_stream_trains_as_a_list_of_its_rows_does(tmp_path: Path) -> None:
    found = rows(5, 40, 12, 12)

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield from found

    streamed = train([good(), stream_task(Rows())], tmp_path / "a")
    listed = train([good(), stream_task(found, shuffle=False)], tmp_path / "b")
    for name in ("good", "bad"):
        assert_bit_identical(streamed, listed, name)


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


def test_a_stream_that_was_read_ahead_goes_on_with_the_right_row_after_a_resume(tmp_path: Path) -> None:
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


def test_a_blocked_arrival_is_refused_after_its_time_limit(tmp_path: Path) -> None:
    goes_on = threading.Event()

    class Rows:
        def __iter__(self) -> Iterator[Any]:
            goes_on.wait(60)
            yield {"input_ids": [1, 2]}

    trainer = make_trainer([good()], tmp_path, data_timeout_s=0.1)
    try:
        with pytest.raises(DataError, match=r"tasks\.bad\.train_dataset: got no rows for 0\.1 s"):
            trainer.register_tasks([stream_task(Rows())])
    finally:
        goes_on.set()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "60", True])
def test_a_time_limit_that_is_none_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.bad\.data_timeout_s: got .*a finite number of seconds above 0"):
        stream_task(Stream(dict), data_timeout_s=value)
    with pytest.raises(ConfigError, match=r"args\.data_timeout_s: got"):
        make_trainer([good()], tmp_path, data_timeout_s=value)


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
    with pytest.raises(DataError, match=rf"tasks\.own\.{split} row 3: got {type(error).__name__}"):
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


# -------------------------------------------------------------------- callbacks


class Does(TrainerCallback):
    """Does something at the end of its third step."""

    def __init__(self, act: Callable[..., Any]) -> None:
        self.act = act

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(args=args, state=state, control=control, **kwargs) if state.global_step == 3 else None


def bad_task(**settings: Any) -> Task:
    return small_task("bad", data_seed=2, eval_dataset=HELD_OUT, **settings)


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        pytest.param(raising(ValueError("no such column")), "ValueError: no such column", id="ValueError"),
        pytest.param(raising(SystemExit(3)), "SystemExit: 3", id="SystemExit"),
        pytest.param(raising(KeyboardInterrupt()), "KeyboardInterrupt", id="KeyboardInterrupt"),
        pytest.param(recursing, "RecursionError", id="RecursionError"),
        pytest.param(lambda: "done", "TypeError: got str as its answer", id="a text for its answer"),
        pytest.param(lambda: 7, "TypeError: got int as its answer", id="a number for its answer"),
    ],
)
def test_a_callback_that_fails_or_answers_rubbish_fails_its_task_alone(
    act: Callable[[], Any], reason: str, alone: Run, tmp_path: Path
) -> None:
    task = bad_task(callbacks=[Does(lambda **_: act())])
    check_fails_alone(task, tmp_path, alone, f"a callback failed in on_step_end: {reason}")


def spoil_state(state: Any, **_: Any) -> None:
    state.log_history = None
    state.global_step = "three"


def spoil_history(state: Any, **_: Any) -> None:
    state.log_history.append(object())
    for entry in state.log_history[:-1]:
        entry.clear()


def spoil_arguments(args: Any, **_: Any) -> None:
    args.learning_rate = "fast"
    args.logging_steps = 0
    args.lr_scheduler_kwargs.clear()


def spoil_modes(model: Any, **_: Any) -> None:
    model.eval()
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("spoil", [spoil_state, spoil_history, spoil_arguments, spoil_modes])
def test_what_a_callback_writes_to_what_it_is_given_reaches_nobody_else(
    spoil: Callable[..., None], alone: Run, tmp_path: Path
) -> None:
    run = train(
        [good(), bad_task(callbacks=[Does(spoil)])],
        tmp_path,
        planner="interleaved",
        logging_strategy="steps",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_kwargs={},
    )
    assert torch.is_grad_enabled()
    assert run.trainer.task_statuses["good"] == "succeeded"
    assert_bit_identical(run, alone, "good")
    # What it spoils for itself may fail it; a history that it was shown is a copy.
    history = run.trainer.task_states["bad"].log_history
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, len(history) + 1))
    assert json.dumps(history)


# ---------------------------------------------------------------------- metrics


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("mine"), ZeroDivisionError("nothing")])
@pytest.mark.parametrize("function", ["compute_metrics", "preprocess_logits_for_metrics"])
def test_metrics_that_fail_in_training_fail_their_task_alone(
    function: str, error: BaseException, alone: Run, tmp_path: Path
) -> None:
    functions = {"compute_metrics": lambda _: {"f": 1.0}, function: lambda *_: raising(error)()}
    check_fails_alone(
        bad_task(eval_steps=3, **functions), tmp_path, alone, f"evaluation failed: {type(error).__name__}: {error}"
    )


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no such column")])
def test_outside_of_training_what_metrics_raise_is_the_caller_s(error: BaseException, tmp_path: Path) -> None:
    trainer = make_trainer([bad_task(eval_steps=0, compute_metrics=lambda _: raising(error)())], tmp_path)
    with pytest.raises(type(error)) as caught:
        trainer.evaluate("bad")
    assert caught.value is error


@pytest.mark.parametrize("answer", [None, 7, ["f"], {"f": "high"}, {7: 1.0}, {"f": None}])
def test_metrics_that_are_none_fail_their_task_alone(answer: Any, alone: Run, tmp_path: Path) -> None:
    check_fails_alone(bad_task(eval_steps=3, compute_metrics=lambda _: answer), tmp_path, alone, "evaluation failed: ")


def test_a_diverged_task_that_stops_early_fails_alone_and_keeps_usable_weights(alone: Run, tmp_path: Path) -> None:
    task = bad_task(learning_rate=1e30, eval_steps=1, early_stopping=EarlyStopping(patience=1))
    run = check_fails_alone(task, tmp_path, alone, "non_finite: the loss of its evaluation is nan at step 1")
    assert all(weight.isfinite().all() for weight in run.weights("bad").values())


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_metric_that_is_never_a_number_stops_its_task_alone(score: float, alone: Run, tmp_path: Path) -> None:
    rule = EarlyStopping(metric="score", patience=2)
    task = bad_task(eval_steps=1, compute_metrics=lambda _: {"score": score}, early_stopping=rule)
    run = train([good(), task], tmp_path, planner="interleaved", save_strategy="steps", save_steps=2)
    assert run.trainer.task_statuses == {"good": "succeeded", "bad": "stopped_early"}
    assert run.trainer.table["bad"].reason == "score was no finite number in any of 2 evaluations"
    assert_bit_identical(run, alone, "good")


@pytest.mark.parametrize("event", ["on_log", "on_evaluate"])
def test_a_task_that_a_callback_fails_at_its_last_evaluation_has_failed(event: str, tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        pass

    callback = Fails()
    setattr(callback, event, lambda *_, metrics=None, **__: raising(ValueError("no"))())
    scores = iter([2.0, 1.0, 0.0])
    task = bad_task(
        eval_steps=1,
        compute_metrics=lambda _: {"score": next(scores)},
        early_stopping=EarlyStopping(metric="score", patience=1),
        callbacks=[callback],
    )
    trainer = train([good(), task], tmp_path).trainer
    assert trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    assert trainer.table["bad"].reason == f"a callback failed in {event}: ValueError: no"


def test_metrics_that_a_callback_takes_away_are_its_own_copy(tmp_path: Path) -> None:
    class Clears(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics.clear()

    rule = EarlyStopping(metric="score", patience=1)
    settings = {"compute_metrics": lambda _: {"score": float("nan")}, "early_stopping": rule, "callbacks": [Clears()]}
    trainer = train([good(), bad_task(eval_steps=1, **settings)], tmp_path).trainer
    assert trainer.task_statuses == {"good": "succeeded", "bad": "stopped_early"}


# ------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(3), KeyboardInterrupt()])
def test_a_hook_of_its_optimizer_that_fails_fails_its_task_alone(
    error: BaseException, alone: Run, tmp_path: Path
) -> None:
    def fail(*_: Any) -> None:
        raise error

    task = bad_task(callbacks=[Does(lambda optimizer, **_: optimizer.register_step_post_hook(fail) and None)])
    check_fails_alone(task, tmp_path, alone, f"the optimizer failed at step 3: {type(error).__name__}")


def test_a_schedule_that_fails_on_its_way_fails_its_task_alone(alone: Run, tmp_path: Path) -> None:
    def break_schedule(lr_scheduler: Any, **_: Any) -> None:
        lr_scheduler.step = raising(OverflowError("too large"))

    task = bad_task(callbacks=[Does(break_schedule)])
    check_fails_alone(task, tmp_path, alone, "learning_rate: the schedule raises OverflowError: too large at step 4")


# ------------------------------------------------------------------ what it costs


def test_what_own_code_costs_the_others_is_told_by_task_and_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Every call passes a limit of nothing; each one is told once its task's total has doubled.
    monkeypatch.setattr(delays, "CALL_LIMIT_S", 0.0)
    slow = {
        "callback": bad_task(callbacks=[Does(lambda **_: None)]),
        "compute_metrics": bad_task(eval_steps=1, compute_metrics=lambda _: {"f": 1.0}),
        "train_dataset": stream_task(Stream(lambda: {"input_ids": [1, 2]})),
    }
    for what, task in slow.items():
        train([small_task("good", data_seed=1), task], tmp_path / what)
        kinds = {record["what"] for record in records(tmp_path / what, "delay") if record["task"] == "bad"}
        assert what in kinds
        (total,) = (record for record in records(tmp_path / what, "delay_total") if record["task"] == "bad")
        assert total[f"{what}_s"] > 0
        assert "bad: its" in caplog.text
