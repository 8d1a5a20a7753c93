"""A whole trainer over any layout of processes trains what one process would: losses, norms and saved adapters."""

from __future__ import annotations

import logging
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from peft_mux import ConfigError
from peft_mux.parallel.layout import parse_layout
from peft_mux.planning.replica_facts import run_facts
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.parallel_layout import ParallelConfig
from tests.engine.processes.cases import Part, assert_alike, assert_as_one, launch, values
from tests.invariants import mux_lab as lab
from tests.parallel.replicas import layout_cases as cases
from tests.records import run_records

pytestmark = pytest.mark.distributed
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder with a backbone."""
    return cases.saved_backbone("llama", tmp_path_factory.mktemp("backbone") / "llama")


@pytest.fixture(scope="module")
def alone(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Return the result of one process."""
    return cases.train_five(0, tmp_path_factory.mktemp("alone"), backbone, "llama", {})


PP2 = {"pipeline_parallel_size": 2}
TP2 = {"tensor_parallel_size": 2}
CHAINS = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}


@SLOW
def test_two_stages_train_to_the_result_of_one_process_and_each_holds_its_own_layers_and_adapters_alone(
    alone: Part, tmp_path: Path
) -> None:
    arguments = {**PP2, "pipeline_schedule": "1f1b"}
    # A model that is given as an object, and cut as one that is loaded.
    parts = values(launch(2, cases.train_five, tmp_path, None, "llama", arguments, limit_s=120))
    one = alone
    assert_alike(parts)
    assert_as_one(parts[0], one)
    assert sum(part.frozen for part in parts) == one.frozen
    assert max(part.frozen for part in parts) < 0.6 * one.frozen
    stages = [line for line in parts[0].report.splitlines() if "replica 1 of 1, stage" in line]
    assert [line[-len("stage 1 of 2") :] for line in stages] == ["stage 1 of 2", "stage 2 of 2"]
    assert all(int(line.split()[4].replace(",", "")) > 0 for line in stages)
    for name in one.held:
        assert [part.held[name] for part in parts] == [one.held[name] // 2] * 2


@pytest.fixture(scope="module")
def alone_with_changes(backbone: str, tmp_path_factory: pytest.TempPathFactory) -> Part:
    """Return the results of one process for tasks that come, go and pause."""
    return cases.train_with_comings_and_goings(0, tmp_path_factory.mktemp("changes"), backbone, {})


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        pytest.param(2, {}, id="dp2", marks=SLOW),
        pytest.param(2, {**PP2, "pipeline_schedule": "gpipe"}, id="pp2, gpipe", marks=SLOW),
        pytest.param(
            3,
            {"pad_to_chunks": True, "chunk_size": 8, "gradient_checkpointing": True},
            id="dp3, padded chunks, recomputed",
            marks=SLOW,
        ),
        pytest.param(4, {**PP2, **TP2, "interleaved_passes": 2}, id="tp2 x pp2, passes in turns", marks=SLOW),
        pytest.param(4, {"replicas": "<2,1>, <1,1>x2", **CHAINS}, id="unequal shards, long rows cut", marks=SLOW),
        pytest.param(
            4,
            {**PP2, "shard_backbone": True, "gradient_checkpointing": True, "pipeline_schedule": "interleaved_1f1b"},
            id="fsdp2 x pp2, two chunks a process, recomputed",
            marks=SLOW,
        ),
        pytest.param(3, {"replicas": "<1,2>, <1,1>"}, id="unequal replicas of stages", marks=NIGHTLY),
        pytest.param(2, {**TP2, "interleaved_passes": 3, "planner": "interleaved"}, id="tp2 in turns", marks=NIGHTLY),
        pytest.param(4, {**PP2, "shard_backbone": True, **CHAINS}, id="fsdp2 x pp2, long rows cut", marks=NIGHTLY),
    ],
)
def test_tasks_train_come_go_and_pause_in_any_layout_as_in_one_process(
    world_size: int,
    arguments: dict[str, Any],
    backbone: str,
    alone_with_changes: Part,
    tmp_path: Path,
) -> None:
    part = cases.train_with_comings_and_goings
    parts = values(launch(world_size, part, tmp_path, backbone, arguments, limit_s=120))
    assert_alike(parts)
    assert "large" not in parts[0].statuses
    assert_as_one(parts[0], alone_with_changes)
    if "gpipe" in arguments.values():  # the task that adapts the first layer alone
        assert parts[1].held["first"] == 0
    if "replicas" in arguments:  # the cost of dividing the rows is reported
        (dispatch,) = run_records(tmp_path, "dispatch")
        assert dispatch["num_steps"] == parts[0].step
        assert 0 <= dispatch["hidden_share"] <= 1


@NIGHTLY
@pytest.mark.timeout(600)
def test_sixteen_processes_train_to_the_result_of_one_in_the_layout_that_is_planned_for_them(
    backbone: str, tmp_path: Path
) -> None:
    def planned(**limit: Any) -> Any:
        model, folder = cases.backbone("llama"), tmp_path / "plan"
        return lab.make_trainer(cases.unlike_tasks(), folder, model=model, max_tokens_per_micro_batch=64, **limit)

    devices, trainer = parse_devices("2x8xA100-40GB"), planned()
    facts = run_facts(trainer._plans.planner, trainer.table.plannable, devices)
    limit_gib = facts.memory.peak_bytes(facts.loads, 24) / 2**30  # no device holds the long row
    layout = parse_layout(planned(memory_limit_gib=limit_gib).plan_deployment(devices).replicas)
    assert layout.world_size == 16
    assert len(set(layout.replicas)) > 1, "some replicas for long rows, others for short ones"
    arguments = {"replicas": str(layout), "ddp_timeout": 120}
    parts = values(launch(16, cases.train_unlike, tmp_path / "many", backbone, arguments, limit_s=400))
    assert_alike(parts)
    assert_as_one(parts[0], cases.train_unlike(0, tmp_path / "one", backbone, {}))


@pytest.mark.parametrize(
    ("before", "world_size", "after"),
    [
        pytest.param({}, 3, {"replicas": "<1,1>, <1,2>"}, id="dp2, then unequal replicas", marks=SLOW),
        pytest.param({"shard_backbone": True}, 4, {**PP2, "shard_backbone": True}, id="fsdp2, then x pp2", marks=SLOW),
        pytest.param(PP2, 1, {}, id="pp2, then one process", marks=NIGHTLY),
        pytest.param(TP2, 4, {**PP2, **TP2}, id="tp2, then tp2 x pp2", marks=NIGHTLY),
    ],
)
def test_any_layout_resumes_from_the_state_of_any_other(
    before: dict[str, Any],
    world_size: int,
    after: dict[str, Any],
    backbone: str,
    alone: Part,
    tmp_path: Path,
) -> None:
    step = 3
    values(launch(2, cases.train_and_stop, tmp_path, backbone, before, step, limit_s=120))
    parts = values(launch(world_size, cases.go_on, tmp_path, backbone, after, limit_s=120))
    assert_alike(parts)
    assert_as_one(parts[0], alone, from_step=step)


@NIGHTLY
def test_replicas_are_planned_again_for_the_processes_that_are_left(backbone: str, alone: Part, tmp_path: Path) -> None:
    trainer = lab.make_trainer(
        cases.tasks_of("llama"), tmp_path / "plan", model=backbone, max_tokens_per_micro_batch=64
    )
    facts = run_facts(trainer._plans.planner, trainer.table.plannable)
    limit_gib = 0.99 * facts.least_bytes(ParallelConfig(1, 1)) / 2**30  # no process holds a whole model
    arguments = {"replicas": "auto", "memory_limit_gib": limit_gib}
    values(launch(4, cases.train_and_stop, tmp_path, backbone, arguments, 3, limit_s=120))
    parts = values(launch(2, cases.go_on, tmp_path, backbone, arguments, limit_s=120))
    assert max(part.frozen for part in parts) < alone.frozen
    assert_alike(parts)
    assert_as_one(parts[0], alone, from_step=3)
    with pytest.raises(ConfigError, match=r'must have as many processes as the run \(1\).*set args.replicas="auto"'):
        cases.go_on(0, tmp_path, backbone, {"replicas": "<1,2>"})


@pytest.mark.parametrize(
    ("world_size", "arguments", "replicas"),
    [
        pytest.param(3, {}, ["<1,3>x1", "<2,1>x1, <1,1>x1", "<1,1>x3"], id="unlike replicas", marks=SLOW),
        pytest.param(
            4,
            {"shard_backbone": True},
            ["<1,2>x2", "<1,1>x4", "<1,2>x2"],
            id="stages that share their weights, and back",
            marks=NIGHTLY,
        ),
    ],
)
def test_a_run_that_moves_to_other_replicas_trains_as_if_it_had_not(
    world_size: int, arguments: dict[str, Any], replicas: list[str], backbone: str, tmp_path: Path
) -> None:
    part, root = cases.train_and_move, tmp_path / "several"
    one = part(0, tmp_path / "one", backbone, {}, {})
    options, moves = {"replicas": replicas[0], **arguments}, {2: replicas[1], 5: replicas[2]}
    parts = values(launch(world_size, part, root, backbone, options, moves, limit_s=120))
    assert_alike(parts)
    assert_as_one(parts[0], one)
    found = [(event["before"], event["replicas"]) for event in run_records(root, "redeployed")]
    assert found == list(pairwise(replicas))


@SLOW
def test_moving_on_one_process_alone_is_an_error_on_every_one(backbone: str, tmp_path: Path) -> None:
    outcomes = launch(2, cases.move_on_one, tmp_path, backbone, limit_s=120)
    for outcome in outcomes:
        assert outcome.error.startswith("ProcessError")
        assert "replicas to move to" in outcome.error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": "<1,2>, <1,2>"}, r"args\.replicas must have as many processes as the run \(1\), got <1,2>x2,"),
        ({"replicas": "two"}, "degrees of each replica"),
        ({"replicas": "<1,1>", "tensor_parallel_size": 2}, r"args\.replicas must be left out with"),
        ({"pipeline_parallel_size": 3}, "Start 3 processes or a multiple"),
    ],
)
def test_a_layout_that_does_not_fit_the_processes_is_refused_by_field(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        cases.train(tmp_path, cases.backbone("llama"), cases.tasks_of("llama"), **arguments)


@SLOW
def test_a_run_moves_by_itself_when_tasks_come_and_that_pays(backbone: str, tmp_path: Path) -> None:
    arguments = {**PP2, "redeploy": True}
    parts = values(launch(2, cases.train_and_be_moved, tmp_path, backbone, arguments, limit_s=120))
    assert_alike(parts)
    assert {status for status, _ in parts[0].statuses.values()} == {"succeeded"}
    assert parts[1].held == parts[0].held
    moves = run_records(tmp_path, "redeployed")
    assert [(move["before"], move["replicas"], move["run_step"]) for move in moves] == [("<1,2>x1", "<1,1>x2", 2)]


@pytest.mark.parametrize(
    ("model", "arguments", "said"),
    [
        ("object", {"save_strategy": "steps"}, "a hub id or folder"),
        ("folder", {"save_strategy": "no"}, 'save_strategy="no"'),
    ],
)
def test_a_run_that_cannot_move_is_refused_before_it_begins(
    model: str, arguments: dict[str, Any], said: str, backbone: str, tmp_path: Path
) -> None:
    given = backbone if model == "folder" else cases.backbone("llama")
    with pytest.raises(ConfigError, match=said):
        cases.train(tmp_path, given, cases.tasks_of("llama"), redeploy=True, **arguments)


@SLOW
@pytest.mark.parametrize("arguments", [pytest.param({}, id="dp2"), pytest.param(TP2, id="tp2", marks=NIGHTLY)])
def test_what_callbacks_do_on_one_process_is_done_on_all(
    arguments: dict[str, Any], backbone: str, alone: Part, tmp_path: Path
) -> None:
    part = cases.train_with_failing_callbacks
    for one in values(launch(2, part, tmp_path, backbone, arguments, limit_s=120)):
        for event in cases.EVENTS:
            status, reason = one.statuses[event]
            assert status == "failed"
            assert "rank 1" in reason or "no such metric" in reason
        assert_as_one(one, alone, but=cases.EVENTS)
    assert (tmp_path / "state" / "run-00000004.json").is_file()


def warnings_on_machines_of_two(rank: int, folder: Path, replicas: str) -> list[str]:
    """Return the warnings of a run whose ranks are on machines of two."""
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("peft_mux").addHandler(handler)
    cases.train(folder, cases.backbone("llama"), [lab.small_task("a", data_seed=1, max_steps=1)], replicas=replicas)
    return [line for line in said if "are on two machines" in line]


@SLOW
def test_a_tensor_parallel_group_on_two_machines_is_named(tmp_path: Path) -> None:
    shown = values(launch(3, warnings_on_machines_of_two, tmp_path / "split", "<1,1>, <2,1>"))
    assert len(shown[0]) == 1
    assert "ranks 1 to 2 share layers but are on two machines of 2 ranks" in shown[0][0]
    assert "List replicas with larger tensor parallel degrees first" in shown[0][0]
    assert shown[1:] == [[], []]
    assert values(launch(3, warnings_on_machines_of_two, tmp_path / "whole", "<2,1>, <1,1>")) == [[], [], []]
