"""A run from outside: evaluation, early stopping, callbacks, metrics and what is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EvalPrediction, TrainerCallback

from peft_mux import ConfigError, EarlyStopping, Task
from peft_mux.trainer import loop
from tests.invariants.mux_lab import VOCABULARY, Recorder, assert_bit_identical, make_trainer, rows, small_task, train
from tests.records import run_records as records
from tests.runs import Acts, assert_equal_weights, hearing, small_tasks, weights_in_plain_peft

HELD_OUT = rows(90, 3, 5, 9)


def scripted(values: Sequence[float]) -> Callable[[EvalPrediction], dict[str, float]]:
    """Return a `compute_metrics` that answers with the given scores, one after another."""
    left: Iterator[float] = iter(values)
    return lambda _: {"score": next(left)}


# ------------------------------------------------------------------ evaluation


def test_every_task_is_evaluated_on_its_own_rows_with_its_own_metrics(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {"one": [], "two": []}

    def metrics_of(name: str) -> Callable[[EvalPrediction], dict[str, float]]:
        def compute(prediction: EvalPrediction) -> dict[str, float]:
            seen[name].append((prediction.predictions.shape, prediction.label_ids))
            return {f"count_{name}": len(prediction.label_ids)}

        return compute

    held_out = {"one": rows(1, 3, 5, 9), "two": rows(2, 2, 4, 4)}
    tasks = [
        small_task(name, data_seed=5, max_steps=6, compute_metrics=metrics_of(name), eval_dataset=own, eval_steps=every)
        for (name, own), every in zip(held_out.items(), (2, 3), strict=True)
    ]
    shrinks: dict[str, Any] = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    tasks.append(small_task("none", data_seed=7, max_steps=6))
    tasks.append(
        small_task(
            "small",
            data_seed=5,
            max_steps=2,
            eval_dataset=held_out["one"],
            eval_steps=2,
            **shrinks,
            compute_metrics=lambda prediction: {"dimensions": float(prediction.predictions.ndim)},
        )
    )
    run = train(tasks, tmp_path)
    assert run.trainer.task_states["small"].log_history[-1]["eval_dimensions"] == 2, "logits are made small first"
    assert len(seen["one"]) == 3
    assert len(seen["two"]) == 2
    for name, own_rows in held_out.items():
        longest = max(len(row["input_ids"]) for row in own_rows)
        shape, labels = seen[name][0]
        assert shape == (len(own_rows), longest, VOCABULARY)
        padded = [[*row["input_ids"], *[-100] * (longest - len(row["input_ids"]))] for row in own_rows]
        assert labels.tolist() == padded
    steps = {name: [one["step"] for one in records(tmp_path, "eval") if one["task"] == name] for name in seen}
    assert steps == {"one": [2, 4, 6], "two": [3, 6]}
    logged = [entry for entry in run.trainer.task_states["one"].log_history if "eval_loss" in entry]
    assert [entry["eval_count_one"] for entry in logged] == [3, 3, 3]
    assert all(entry["eval_perplexity"] == pytest.approx(math.exp(entry["eval_loss"])) for entry in logged)
    assert not any("eval_count_two" in entry for entry in logged)


def test_an_evaluation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain = train([small_task("own", data_seed=1, lora_dropout=0.3, max_steps=4)], tmp_path / "a")
    seen: list[dict[str, float]] = []
    timed = TrainerCallback()
    timed.on_evaluate = lambda *_, metrics, **__: seen.append(metrics)  # type: ignore[method-assign]
    logged: list[dict[str, float]] = []
    timed.on_log = lambda *_, logs, **__: logged.append(logs)  # type: ignore[method-assign]
    evaluated: dict[str, Any] = {"eval_dataset": HELD_OUT, "eval_steps": 1, "eval_on_start": True, "callbacks": [timed]}
    task = small_task("own", data_seed=1, lora_dropout=0.3, max_steps=4, **evaluated)
    run = train([task], tmp_path / "b")
    assert_bit_identical(run, plain, "own")
    times = {"eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert all(times <= set(metrics) for metrics in [*seen, *(logs for logs in logged if "eval_loss" in logs)])
    assert logged[-1]["train_loss"] == pytest.approx(np.mean(run.losses["own"]))
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second"} <= set(logged[-1])
    assert seen
    assert not any("eval_runtime" in record for record in records(tmp_path / "b", "eval")), "logs have equal bits"


def test_an_evaluation_on_demand_gives_the_loss_of_the_present_adapter(tmp_path: Path) -> None:
    task = small_task("own", data_seed=1, max_steps=4, eval_dataset=HELD_OUT, eval_steps=4)
    trainer = train([task, small_task("other", data_seed=2, max_steps=4)], tmp_path).trainer
    (last,) = records(tmp_path, "eval")
    assert trainer.evaluate()["own/eval_loss"] == pytest.approx(last["eval_loss"], rel=1e-6)
    assert trainer.evaluate("own").keys() == {"own/eval_loss", "own/eval_perplexity"}
    with pytest.raises(
        ConfigError, match=r"tasks\.other\.eval_dataset must be held-out rows, to evaluate the task, got"
    ):
        trainer.evaluate("other")
    with pytest.raises(ConfigError, match=r'the task must be one of own, other, got "onw".*Did you mean "own"'):
        trainer.evaluate("onw")


# -------------------------------------------------------------- early stopping


def stopping_task(scores: Sequence[float], name: str = "own", *, max_steps: int = 20, **settings: Any) -> Task:
    rule = EarlyStopping(**{"metric": "score", "patience": 2, **settings})
    evaluated = {"eval_steps": 2, "eval_dataset": HELD_OUT, "compute_metrics": scripted(scores)}
    return small_task(name, data_seed=1, max_steps=max_steps, early_stopping=rule, **evaluated)


def test_early_stopping_ends_a_task_and_keeps_its_best_adapter(tmp_path: Path) -> None:
    other = stopping_task([1.0, 7.0, 2.0, 2.0], "other", max_steps=8, patience=50)
    run = train([stopping_task([1.0, 5.0, 4.0, 3.0, 9.0]), other], tmp_path, save_strategy="steps")
    own = run.trainer.table["own"]
    assert run.trainer.task_statuses == {"own": "stopped_early", "other": "succeeded"}
    assert_equal_weights(run.weights("other"), run.recorder.before["other"][4], "it goes back, too")
    assert own.step == 8
    assert own.reason == "score has not improved for 2 evaluations; best 5 at step 4"
    # the weights before the fifth step are those that the evaluation after the fourth has seen
    best = run.recorder.before["own"][4]
    assert_equal_weights(run.weights("own"), best)
    assert any(not torch.equal(run.recorder.before["own"][7][key], best[key]) for key in best)
    for file in ("own/adapter_model.safetensors", "own/best/adapter_model.safetensors"):
        assert_equal_weights(weights_in_plain_peft((tmp_path / file).parent), best)


def test_direction_delta_and_patience_decide_when_a_task_stops_and_a_first_nan_is_not_its_best(tmp_path: Path) -> None:
    tasks = [
        stopping_task([5.0, 4.0, 3.0, 3.5, 3.6], "smaller", greater_is_better=False),
        stopping_task([5.0, 5.05, 5.1, 5.15], "delta", min_delta=0.5),
        stopping_task([5.0, 6.0, 7.0, 6.0, 8.0, 7.0, 7.0], "greater"),
        stopping_task([5.0, 4.0], "impatient", patience=1),
        stopping_task([1.0, 2.0], "misspelt", metric="scor"),
        stopping_task([math.nan, 1.0, 2.0, 3.0], "nan", max_steps=8),
        stopping_task([math.nan] * 4, "never"),
    ]
    trainer = train(tasks, tmp_path, recorder=Recorder(keep_weights=False)).trainer
    found = {run.name: (run.status.value, run.step) for run in trainer.table}
    stopped = {"smaller": 10, "delta": 6, "greater": 14, "impatient": 4, "never": 4}
    wanted = {name: ("stopped_early", step) for name, step in stopped.items()}
    assert found == {**wanted, "misspelt": ("failed", 2), "nan": ("succeeded", 8)}
    assert trainer.table["nan"].best.value == 3.0
    assert trainer.table["never"].reason == "score was no finite number in any of 2 evaluations"
    assert 'got "scor"' in trainer.table["misspelt"].reason
    reason = trainer.table["misspelt"].reason
    assert "early_stopping.metric must be one of eval_loss, eval_perplexity, eval_score" in reason


# -------------------------------------------------------------------- callbacks


class Diary(TrainerCallback):
    """Writes down every event with the step that the state shows."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.rates: set[float] = set()

    def hear(self, event: str, args: Any, state: Any, control: Any, facts: dict[str, Any]) -> None:
        self.events.append((event, state.global_step))
        self.rates.add(args.learning_rate)
        assert event != "step_end" or None not in (facts["optimizer"], facts["lr_scheduler"])
        assert event != "evaluate" or "eval_loss" in facts["metrics"]
        self.logs += [facts["logs"]] if event == "log" else []


for _event in ("train_begin", "step_begin", "step_end", "log", "evaluate", "train_end"):
    setattr(Diary, f"on_{_event}", hearing(_event))


def test_callbacks_of_a_task_see_its_own_steps_in_order(tmp_path: Path) -> None:
    short, long = Diary(), Diary()
    evaluated: dict[str, Any] = {"eval_dataset": HELD_OUT, "eval_steps": 2}
    tasks = [
        small_task("short", data_seed=1, max_steps=2, learning_rate=1e-3, callbacks=[short]),
        small_task("long", data_seed=2, max_steps=4, learning_rate=2e-3, callbacks=[long], **evaluated),
    ]
    train(tasks, tmp_path, logging_strategy="steps", logging_steps=2)
    assert [event for event in long.events if event[0] != "step_begin"] == [
        *(("train_begin", 0), ("step_end", 1)),
        *(("step_end", 2), ("log", 2), ("log", 2), ("evaluate", 2)),  # the evaluation logs too
        *(("step_end", 3), ("step_end", 4), ("log", 4), ("log", 4), ("evaluate", 4), ("log", 4), ("train_end", 4)),
    ]
    ends = [("train_begin", 0), ("step_end", 1), ("step_end", 2), ("log", 2), ("log", 2), ("train_end", 2)]
    assert [event for event in short.events if event[0] != "step_begin"] == ends
    assert [step for event, step in short.events if event == "step_begin"] == [0, 1]
    assert short.rates == {1e-3}
    assert long.rates == {2e-3}
    assert {"loss", "grad_norm", "learning_rate"} <= short.logs[0].keys(), "plain keys, as in a run of its own"
    assert not any("/" in key for log in [*short.logs, *long.logs] for key in log)


def test_a_callback_of_the_run_stops_the_run_and_sees_keys_with_task_names(tmp_path: Path) -> None:
    seen: list[set[str]] = []
    trainer = make_trainer(small_tasks("a", "b"), tmp_path, logging_strategy="steps", logging_steps=2)
    trainer.add_callback(Acts(lambda logs, **_: seen.append(set(logs)), event="on_log"))
    trainer.add_callback(Acts(lambda control, **_: setattr(control, "should_training_stop", True), step=4))
    assert trainer.train().global_step == 4
    assert trainer.task_statuses == {"a": "running", "b": "running"}
    keys = {f"{name}/{key}" for name in "ab" for key in ("loss", "grad_norm", "learning_rate")}
    assert seen[:-1] == [{*keys, "run/memory_gib"}, {*keys, "run/memory_gib", "run/tokens_per_second"}]
    assert {"run/train_runtime", "run/train_steps_per_second", "a/train_loss", "b/train_loss"} <= seen[-1]
    trainer.train()
    assert {run.step for run in trainer.table} == {8}, "a second call continues where the first one stopped"


# ---------------------------------------------------------------------- metrics


def test_every_line_of_the_metrics_is_json_with_task_step_and_loss(tmp_path: Path) -> None:
    tasks = [
        small_task("one", data_seed=1, max_steps=6),
        small_task("two", data_seed=2, max_steps=4, eval_dataset=HELD_OUT, eval_steps=2),
    ]
    run = train(tasks, tmp_path, logging_strategy="steps", logging_steps=2, logging_first_step=True)
    lines = records(tmp_path)
    trained = [line for line in lines if line["event"] == "train"]
    logged = [("one", 1), ("two", 1), ("one", 2), ("two", 2), ("one", 4), ("two", 4), ("one", 6)]
    assert [(line["task"], line["step"]) for line in trained] == logged
    for line in trained[2:]:
        losses = run.losses[line["task"]][1 if line["step"] == 2 else line["step"] - 2 : line["step"]]
        assert line["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-9), "the mean since the last line"
        assert line["run_step"] == line["step"]
        assert line["grad_norm"] > 0
        assert line["num_tokens"] == sum(
            run.trainer.table[line["task"]].loader.batch(step).num_tokens for step in range(line["step"])
        )
    assert [line["step"] for line in lines if line["event"] == "eval"] == [2, 4]
    statuses = [(line["task"], line["status"]) for line in lines if line["event"] == "status"]
    assert statuses == [("two", "succeeded"), ("one", "succeeded")]
    assert [line["event"] for line in lines[-2:]] == ["run", "passes"]
    assert lines[-2]["run_step"] == 6


def test_what_is_returned_reported_and_printed_names_every_task_and_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks, cleared = [small_task("alpha", data_seed=1, max_steps=2), small_task("beta", data_seed=2, max_steps=4)], []
    monkeypatch.setattr(loop, "clear_device_cache", lambda: cleared.append(trainer.state.global_step))
    logging = {"logging_strategy": "steps", "logging_steps": 2}
    trainer = make_trainer(tasks, tmp_path, disable_tqdm=False, torch_empty_cache_steps=2, **logging)
    output = trainer.train()
    assert cleared == [2, 4]
    logs = [[one["loss"] for one in trainer.task_states[name].log_history] for name in ("alpha", "beta")]
    losses = [sum(own) / len(own) for own in logs]
    assert output.global_step == 4
    assert [output.metrics[f"{name}/train_loss"] for name in ("alpha", "beta")] == pytest.approx(losses)
    assert output.training_loss == pytest.approx(sum(losses) / 2)
    assert output.metrics["train_tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert "alpha: succeeded" in printed
    assert "beta: succeeded" in printed
    assert f"step 2  alpha {trainer.task_states['alpha'].log_history[0]['loss']:.4f}" in printed
    assert all(name in trainer.report() for name in ("alpha", "beta"))
