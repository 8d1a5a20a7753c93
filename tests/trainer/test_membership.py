"""`Membership` alone: commands of any thread wait for the step boundary, and what is refused changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux import CheckpointError, ConfigError
from peft_mux.task import TaskStatus
from peft_mux.trainer.membership import Membership
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World
from tests.invariants.mux_lab import small_task
from tests.trainer.parts import Calls, FakePlacement, FakePlans, lines, make_run, start_all


class Told:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def handle_changes(self) -> None:
        self.calls.note("tell")


def membership_of(run: Run, calls: Calls, refuses: Exception | None = None) -> Membership:
    placement: Any = FakePlacement(calls, refuses)
    plans: Any = FakePlans(run, calls)
    lifecycle: Any = Told(calls)
    return Membership(run, World(run.args, run.table), placement, plans, lifecycle)


@contextmanager
def training(membership: Membership) -> Iterator[None]:
    """Let the run train for the time of the block, without steps; what waits at its end is not done."""
    with membership.queue.training(lambda failed: False):
        yield


def names(run: Run) -> list[str]:
    return [own.name for own in run.table]


def test_before_training_tasks_come_and_go_at_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    membership = membership_of(run, calls)
    membership.register([small_task("c", data_seed=3)])
    membership.remove("a", save=False)
    assert names(run) == ["b", "c"]
    assert calls == [("check", "c"), ("register", "c"), ("forget", "a"), ("remove", "a")]


def test_while_a_run_trains_commands_wait_for_the_step_boundary_and_plan_anew_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    membership = membership_of(run, calls)
    with training(membership):
        arrival = membership.register([small_task("c", data_seed=3)])
        pause = membership.pause("a")
        assert names(run) == ["a", "b"]
        assert run.table["a"].status is TaskStatus.RUNNING
        assert not arrival.done()
        assert not pause.done()
        membership.apply_commands()
    assert names(run) == ["a", "b", "c"]
    assert run.table["a"].status is TaskStatus.PAUSED
    assert arrival.result() is pause.result() is None
    assert calls == [("check", "c"), ("register", "c"), "replan", "tell"]
    membership.apply_commands()
    assert calls[-2:] == ["replan", "tell"], "nothing was asked for since"
    assert len(calls) == 4


def test_a_paused_task_goes_on_where_it_was_and_one_that_waited_waits_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    membership = membership_of(run, Calls())
    membership.pause("a")
    assert run.table["a"].status is TaskStatus.PAUSED, "no plan starts it"
    assert run.table.plannable == [run.table["b"]]
    membership.resume("a")
    assert run.table["a"].status is TaskStatus.WAITING
    start_all(run)
    optimizer: Any = object()
    run.table["a"].optimizer = optimizer
    membership.pause("a")
    membership.resume("a")
    assert run.table["a"].status is TaskStatus.RUNNING


@pytest.mark.parametrize("ask", ["pause", "resume"])
def test_who_asks_for_a_rest_of_a_task_that_has_ended_is_told_that_it_has(tmp_path: Path, ask: str) -> None:
    run = make_run(tmp_path)
    start_all(run)
    membership = membership_of(run, Calls())
    with training(membership):
        answer = getattr(membership, ask)("a")
        run.table["a"].status = TaskStatus.SUCCEEDED
        membership.apply_commands()
    with pytest.raises(ConfigError, match=r'got task "a", which has ended \(succeeded\)'):
        answer.result()
    assert lines(run) == [f'{ask} a: not done: got task "a", which has ended (succeeded); allowed: one that has not.']


def test_an_arrival_that_peft_refuses_late_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    membership = membership_of(run, calls, refuses=ConfigError("tasks.c.peft_config: PEFT refuses it"))
    with training(membership):
        answer = membership.register([small_task("c", data_seed=3)])
        membership.apply_commands()
        membership.register([small_task("c", data_seed=3)])  # the name is free again
    assert names(run) == ["a", "b"]
    assert lines(run) == ["register c: not done: tasks.c.peft_config: PEFT refuses it"]
    with pytest.raises(ConfigError, match="PEFT refuses it"):
        answer.result()


def test_before_training_the_same_refusal_is_an_error(tmp_path: Path) -> None:
    membership = membership_of(make_run(tmp_path), Calls(), refuses=ConfigError("PEFT refuses it"))
    with pytest.raises(ConfigError, match="PEFT refuses it"):
        membership.register([small_task("c", data_seed=3)])


def test_a_name_that_is_on_its_way_is_taken(tmp_path: Path) -> None:
    membership = membership_of(make_run(tmp_path), Calls())
    with training(membership):
        membership.register([small_task("c", data_seed=3)])
        with pytest.raises(ConfigError, match='"c"'):
            membership.register([small_task("c", data_seed=4)])


def test_of_two_callers_of_one_name_at_one_time_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    membership = membership_of(run, Calls())
    both_are_here = threading.Barrier(2)

    def slow_check(tasks: Any) -> None:
        # Where both look before either takes the name, both come through here at one time.
        with suppress(threading.BrokenBarrierError):
            both_are_here.wait(0.5)

    monkeypatch.setattr(membership._placement, "check", slow_check)
    outcomes: list[object] = []

    def ask(seed: int) -> None:
        try:
            outcomes.append(membership.register([small_task("c", data_seed=seed)]))
        except ConfigError as error:
            outcomes.append(error)

    with training(membership):
        callers = [threading.Thread(target=ask, args=(seed,)) for seed in (1, 2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert sorted(isinstance(outcome, ConfigError) for outcome in outcomes) == [False, True]


def test_a_task_that_is_on_its_way_may_be_removed_and_paused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    membership = membership_of(run, Calls())
    with training(membership):
        membership.register([small_task("c", data_seed=3), small_task("d", data_seed=4)])
        answers = membership.remove("c", save=False), membership.pause("d")
        membership.apply_commands()
    assert [answer.result() for answer in answers] == [None, None]
    assert names(run) == ["a", "b", "d"]
    assert run.table["d"].status is TaskStatus.PAUSED


def test_commands_of_other_threads_wait_until_every_process_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    start_all(run)
    membership = membership_of(run, Calls())
    world: Any = membership._world
    world.processes.world_size = 2
    elsewhere: list[str] = []
    monkeypatch.setattr(world, "shared_commands", lambda labels: [label for label in labels if label in elsewhere])
    with training(membership):
        membership.pause("a")  # as a callback asks, in the thread that trains
        other = threading.Thread(target=lambda: membership.pause("b"))
        other.start()
        other.join()
        membership.apply_commands()
        membership.apply_shared_commands()
        assert [own.status for own in run.table] == ["paused", "running"]
        elsewhere.append("pause b")
        membership.apply_shared_commands()
        assert [own.status for own in run.table] == ["paused", "paused"]


def test_a_task_that_cannot_be_written_stays_unless_its_adapter_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    membership = membership_of(run, calls)
    folder: Any = SimpleNamespace(
        note_removed=lambda name, reason, step: None, records=lambda: [None], amend_record=lambda: None
    )
    run.saver.folder = folder
    monkeypatch.setattr(run.saver, "save_adapter", lambda name: False)
    with training(membership):
        kept = membership.remove("a", save=True)
        membership.apply_commands()
        assert names(run) == ["a", "b"]
        assert run.table["a"].status is TaskStatus.RUNNING
        given_up = membership.remove("a", save=False)
        membership.apply_commands()
    with pytest.raises(CheckpointError, match=r'"a", whose adapter could not be written, so that it stays'):
        kept.result()
    assert given_up.result() is None
    assert names(run) == ["b"]


@pytest.mark.parametrize("ask", ["remove", "pause", "resume"])
def test_unknown_names_are_refused_with_the_closest_one(tmp_path: Path, ask: str) -> None:
    membership = membership_of(make_run(tmp_path, names=("sentiment",)), Calls())
    options = {"save": True} if ask == "remove" else {}
    with pytest.raises(ConfigError, match=r'got task "sentimnet"; allowed: sentiment'):
        getattr(membership, ask)("sentimnet", **options)


def test_a_task_that_is_removed_twice_departs_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    membership = membership_of(run, calls)
    with training(membership):
        first, second = membership.remove("a", save=False), membership.remove("a", save=False)
        membership.apply_commands()
    assert first.exception() is None
    assert isinstance(second.exception(), ConfigError)
    assert calls.count(("remove", "a")) == 1
    assert names(run) == ["b"]
