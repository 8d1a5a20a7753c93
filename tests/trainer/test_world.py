"""`World` alone, of one process: it costs nothing and agrees with itself; layouts that cannot be are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux import ConfigError
from peft_mux.engine.layout import ParallelLayout, layout_of_text
from peft_mux.trainer.world import World
from tests.trainer.parts import make_run, start_all


def test_one_process_stops_when_it_was_asked_to_and_shares_its_commands_with_itself(tmp_path: Path) -> None:
    run, model = make_run(tmp_path), None
    world: Any = World(run.args, run.table)
    start_all(run)
    assert not world.agree_on_tasks(0, wants_stop=False, last_step_s=0.5)
    assert world.slowest_s == 0.5
    assert world.shared_commands(["pause a"]) == [], "none waited when the processes agreed"
    assert world.agree_on_tasks(0, wants_stop=True, num_commands=1)
    assert world.shared_commands(["pause a"]) == ["pause a"]
    world.compare_new_tasks(model)


def test_commands_are_shared_as_often_as_every_process_has_them_and_in_the_order_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    world: Any = World(run.args, run.table)
    everywhere = [["pause b", "pause a", "pause a", "remove b"], ["pause a", "pause a", "resume a", "pause b"]]
    monkeypatch.setattr(world.processes, "gather", lambda labels: everywhere)
    world.agree_on_tasks(0, wants_stop=False, num_commands=4)
    assert world.shared_commands(everywhere[0]) == ["pause b", "pause a", "pause a"]


def test_the_wishes_of_one_process_are_everybodys(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert World(run.args, run.table).agree_on_requests(0, (True, False)) == [True, False]


def test_the_record_of_one_process_tells_what_it_did(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    world = World(run.args, run.table)
    assert world.records == ()
    (record,) = world.gather_records(100, 2.0, 0.5)
    assert (record.rank, record.tokens, record.seconds, record.waited_seconds) == (0, 100, 2.0, 0.5)
    assert record.peak_bytes > 0
    assert record.part == "replica 1 of 1"
    assert world.records == (record,)


def test_two_samples_of_one_weight_that_differ_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    world = World(run.args, run.table)
    monkeypatch.setattr(world.processes, "gather", lambda own: [{"w": "1", "v": "2"}, {"w": "3"}])
    with pytest.raises(ConfigError, match=r"rank 1: model.frozen weights \(digest\) of w"):
        world.compare_frozen_weights("Llama", {})


def test_a_world_can_be_laid_out_anew(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    world = World(run.args, run.table)
    layout = ParallelLayout.parse("<1,1>")
    world.set_layout(layout)
    assert world.layout is layout


def test_a_layout_that_one_process_cannot_be_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.args.tensor_parallel_size = 2
    with pytest.raises(ConfigError, match="in a run of 1 processes"):
        World(run.args, run.table)


@pytest.mark.parametrize("text", ["<1,1>x99999999999", "<999999,1>", "<1,1000000>x2"])
def test_replicas_by_the_million_are_refused_before_they_fill_the_memory(text: str) -> None:
    with pytest.raises(ConfigError, match=r"args.replicas is .*; allowed: numbers of at most 5 digits"):
        layout_of_text(text, 2)
