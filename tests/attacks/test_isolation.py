"""One of six tasks fails in every way that its own code, data, numbers or stream can: no bit of the others moves.

The others are compared with the run in which the attacked task is healthy, and with those in which it is removed
after some step: equal composition, equal bits.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import MultiTaskTrainer, PeftMuxError
from peft_mux.errors import ProcessError
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import ATTACKED, NUM_STEPS, OTHERS, Outcome, assert_same_others, sampled
from tests.attacks.isolation_attacks import (
    ARRIVALS,
    BLOCKED,
    CALLBACKS,
    DIVERGED,
    LEFT_BEHIND,
    METRICS,
    NUMBERS,
    OBJECTIVES,
    STREAMS,
    WRITTEN,
    Attack,
    OwnBaseError,
    acts_on_model,
    calls,
)
from tests.invariants import mux_lab as lab

ARRIVAL = 2  # step of the run before which an attacked task is registered

pytestmark = pytest.mark.timeout(120)


class References:
    """Runs in which nothing is attacked, made when they are first asked for.

    Args:
        folder: for their files.
    """

    def __init__(self, folder: Path) -> None:
        """Train nothing yet."""
        self._folder = folder
        self._known: dict[tuple[bool, int | None], Outcome] = {}

    def run(self, *, arrives: bool = False, leaves_after: int | None = None) -> Outcome:
        """Return the run in which the task that is attacked elsewhere is healthy, or leaves after a step of the run."""
        key = (arrives, leaves_after)
        if key not in self._known:
            self._known[key] = self._train(*key)
        return self._known[key]

    def like(self, run: Outcome, *, arrives: bool) -> Outcome | None:
        """Return the run whose other tasks went through the same bits, if there is one."""
        first = ARRIVAL if arrives else 0
        # On most machines shapes of this size round equally whatever other tasks run, so the first one is it.
        for leaves_after in (None, *range(first, NUM_STEPS + ARRIVAL + 1)):
            wanted = self.run(arrives=arrives, leaves_after=leaves_after)
            if all(run.digests.get(name) == wanted.digests[name] for name in OTHERS):
                return wanted
        return None

    def _train(self, arrives: bool, leaves_after: int | None) -> Outcome:
        tasks, at_begin, at_end = attacks.six_tasks(), {}, {}
        first = ARRIVAL if arrives else 0
        is_there = leaves_after is None or leaves_after > first
        own = next(task for task in tasks if task.name == ATTACKED)
        if arrives or not is_there:
            tasks.remove(own)
        if arrives and is_there:
            at_begin[ARRIVAL - 1] = lambda trainer: trainer.register_tasks([own])
        if is_there and leaves_after is not None and leaves_after < NUM_STEPS:
            at_end[leaves_after] = lambda trainer: trainer.remove_task(ATTACKED)
        folder = self._folder / f"{arrives}-{leaves_after}"
        return attacks.train(tasks, folder, at_begin=at_begin, at_end=at_end)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


def assert_failed(run: Outcome, attack: Attack, folder: Path) -> None:
    """Assert that the attacked task ended as it should, with its cause named and its last good adapter kept."""
    status, reason = run.statuses[ATTACKED], run.reasons[ATTACKED]
    assert status in attack.ends, f"{status}: {reason}"
    if status == "succeeded":
        return
    assert re.search(attack.blames, reason, re.IGNORECASE | re.DOTALL), reason
    weights = lab.weights(run.trainer, ATTACKED)
    assert all(torch.isfinite(weight).all() for weight in weights.values()), "its last good adapter is lost"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [record["status"] for record in records if record["event"] == "status" and record["task"] == ATTACKED]
    assert "succeeded" not in ends
    line = next(line for line in run.trainer.report().splitlines() if ATTACKED in line)
    assert status.split("_")[0] in line, line


@contextmanager
def nothing_escapes() -> Iterator[None]:
    """Turn what would end the test process into a failure of one test."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, OwnBaseError) as error:
        raise AssertionError(f"it ended the whole run: {error!r}") from error


def settings_of_process() -> tuple[Any, ...]:
    """Return settings whose change may not show in the bits of so small a run."""
    modes = torch.is_grad_enabled(), torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    return *modes, torch.get_num_threads(), torch.get_float32_matmul_precision(), os.getcwd()


def assert_isolated(attack: Attack, references: References, folder: Path) -> None:
    """Attack one of six tasks from the first step on."""
    run, refusal, before = None, "", settings_of_process()
    try:
        with nothing_escapes():
            tasks = attacks.six_tasks(**attack.settings())
            run = attacks.train(tasks, folder, at_begin=attack.at_begin, **attack.arguments)
    except PeftMuxError as error:
        refusal = str(error)
    finally:
        attack.cleanup()
    assert settings_of_process() == before
    if run is None:
        assert attack.may_be_refused, refusal
        assert f"tasks.{ATTACKED}" in refusal, refusal
        return
    wanted = references.like(run, arrives=False)
    if wanted is None:
        wanted = references.run()
    assert_same_others(run, wanted)
    assert_failed(run, attack, folder)


@pytest.mark.parametrize(
    "attack",
    [
        *sampled(NUMBERS, fast=3, ci=9),
        *sampled(METRICS, fast=3, ci=11),
        *sampled(CALLBACKS, fast=5, ci=20),
        *sampled(OBJECTIVES, fast=5, ci=16),
        *sampled(STREAMS, fast=3, ci=10),
        *sampled(BLOCKED, fast=1),
        *sampled(LEFT_BEHIND, fast=5, ci=25),
    ],
)
def test_a_fault_of_one_task_reaches_no_other(
    attack: Attack, references: References, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert_isolated(attack, references, Path("run"))


@pytest.mark.parametrize("attack", sampled(DIVERGED, fast=2, ci=14))
def test_a_task_of_any_kind_that_diverges_reaches_no_other(attack: Attack, tmp_path: Path) -> None:
    # Its rows and passes are others than those of the references, so its own healthy run is what counts.
    wanted = attacks.train(attacks.six_tasks(**attack.settings()), tmp_path / "healthy")
    assert wanted.statuses[ATTACKED] == "succeeded", wanted.reasons[ATTACKED]
    run = attacks.train(attacks.six_tasks(**attack.settings()), tmp_path / "run", at_begin=attack.at_begin)
    assert_same_others(run, wanted)
    assert_failed(run, attack, tmp_path / "run")


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("what", ["callback", pytest.param("compute_metrics", marks=pytest.mark.slow), "objective"])
def test_a_write_to_what_all_share_ends_the_run_and_names_the_task(what: str, name: str, tmp_path: Path) -> None:
    act = WRITTEN[name]
    own = calls("on_step_end", lambda *_, model, **__: (act(model), None)[1])()
    settings = own if what == "callback" else acts_on_model(what, act)
    with pytest.raises(ProcessError, match=rf"^tasks\.{ATTACKED}: its {what} has changed .* written in place"):
        attacks.train(attacks.six_tasks(**settings), tmp_path)


FORGED = "\x1b[2J\x1b]0;all is well\x07<script>x</script>\ntwo: failed\rthree: failed\u2028four: failed"


def test_the_text_of_an_error_is_no_line_of_the_run_and_moves_no_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = next(one for one in CALLBACKS if one.name == "a callback that raises in on_step_end")
    settings = attack.settings()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError(FORGED)

    settings["callbacks"][0].on_step_end = fail
    settings["compute_metrics"] = lambda _: {FORGED: 1.0}
    run = attacks.train(attacks.six_tasks(**settings), tmp_path, save_strategy="steps", save_steps=3)
    said = f"{capsys.readouterr().out}{run.trainer.report()}"
    assert "all is well" in said
    assert "\x1b" not in said
    assert not [line for line in said.splitlines() if re.match("(two|three|four): failed", line)]
    assert "<script>x" not in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_task_object_or_an_interval_that_changes_while_the_run_trains_ends_no_task(tmp_path: Path) -> None:
    tasks = attacks.six_tasks()

    def change(trainer: MultiTaskTrainer) -> None:
        object.__setattr__(tasks[0], "name", "two")
        trainer.args.logging_steps = 0  # never

    run = attacks.train(tasks, tmp_path / "run", at_begin={2: change}, logging_strategy="steps", logging_steps=1)
    assert set(run.statuses.items()) == {(name, "succeeded") for name in (*OTHERS, ATTACKED)}

    def spoil(trainer: MultiTaskTrainer) -> None:
        trainer.args.logging_steps = "often"

    with pytest.raises(PeftMuxError, match="logging_steps and save_steps must be finite numbers, got 'often'"):
        attacks.train(attacks.six_tasks(), tmp_path / "spoilt", at_begin={2: spoil}, logging_strategy="steps")


def test_padding_has_no_token_that_its_task_does_not_have(tmp_path: Path) -> None:
    model = attacks.nano_llama()
    model.get_input_embeddings().weight.data[0] = torch.nan
    tasks = attacks.six_tasks(train_dataset=[{"input_ids": [1, 0, 2]}] * 6)
    run = attacks.train(tasks, tmp_path, model=model, pad_to_chunks=True, chunk_size=8)
    assert run.statuses == {**dict.fromkeys(OTHERS, "succeeded"), ATTACKED: "failed"}


class Endless:
    """A stream of one row without end."""

    def __init__(self, row: Any) -> None:
        self.row = row

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(self.row)


@pytest.mark.parametrize(
    ("dataset", "row"),
    [("eval_dataset", {"input_ids": [1, 2]}), ("train_dataset", {"input_ids": [1, 2], "labels": [-100, -100]})],
)
def test_endless_rows_that_are_refused_are_read_no_further(dataset: str, row: Any, tmp_path: Path) -> None:
    with pytest.raises(PeftMuxError, match="data_timeout_s"):
        attacks.make_trainer([attacks.nano_task("endless", data_timeout_s=0.2, **{dataset: Endless(row)})], tmp_path)
    for thread in threading.enumerate():
        if "tasks.endless" in thread.name:
            thread.join(20)
            assert not thread.is_alive()


# ------------------------------------------------------------------------ while the others train


def assert_isolated_on_arrival(attack: Attack, references: References, folder: Path) -> None:
    """Register the attacked task while the five others train."""
    tasks = [task for task in attacks.six_tasks() if task.name != ATTACKED]
    refusals: list[PeftMuxError] = []
    handles: list[Any] = []

    def arrive(trainer: MultiTaskTrainer) -> None:
        try:
            handles.append(trainer.register_tasks([attacks.nano_task(ATTACKED, 1, **attack.settings())]))
        except PeftMuxError as error:
            refusals.append(error)

    try:
        with nothing_escapes():
            run = attacks.train(tasks, folder, at_begin={ARRIVAL - 1: arrive}, **attack.arguments)
    finally:
        attack.cleanup()
    wanted = references.like(run, arrives=True)
    assert_same_others(run, wanted or references.run(arrives=True))
    if ATTACKED in run.statuses:
        assert_failed(run, attack, folder)
    else:
        refusals += [error for handle in handles for error in _refusal_of(handle)]
        assert refusals, "it is neither there nor refused"
        assert f"tasks.{ATTACKED}" in str(refusals[0])


def _refusal_of(handle: Any) -> list[PeftMuxError]:
    with suppress(AttributeError):  # nothing that could be asked
        try:
            handle.result(timeout=0)
        except PeftMuxError as error:
            return [error]
    return []


@pytest.mark.parametrize(
    "attack",
    [
        *sampled(ARRIVALS, fast=3, ci=12),
        *sampled([*STREAMS, *NUMBERS[-6:], *METRICS[:6], *CALLBACKS[:6], *CALLBACKS[18:26]], fast=2, ci=6),
    ],
)
def test_a_task_that_arrives_while_the_others_train_reaches_none_of_them(
    attack: Attack, references: References, tmp_path: Path
) -> None:
    assert_isolated_on_arrival(attack, references, tmp_path)


# ------------------------------------------------------------------------ the tests can fail


@pytest.mark.slow
def test_a_task_that_reaches_another_is_found(references: References, tmp_path: Path) -> None:
    def reach(trainer: MultiTaskTrainer) -> None:
        next(iter(trainer.model.task_parameters("two").values())).data[0] += 1e-6

    run = attacks.train(attacks.six_tasks(), tmp_path, at_begin={3: reach})
    assert references.like(run, arrives=False) is None
