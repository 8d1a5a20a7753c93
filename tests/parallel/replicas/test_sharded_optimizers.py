"""`shard_optimizer` and `reduce_dtype`: results equal those of replicas that keep everything; what is kept and sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from peft_mux import ConfigError, MultiTaskTrainingArguments
from peft_mux.parallel.layout import check_layout, parse_layout
from tests.engine.processes.cases import Part, launch, values
from tests.invariants import mux_lab as lab
from tests.parallel.replicas import layout_cases as cases

pytestmark = pytest.mark.distributed
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly


class Kept(NamedTuple):
    """What a run showed to one process, the elements of optimizer states that it kept after step 2, and bytes sent."""

    laid: Part
    moments: dict[str, int]
    num_bytes: int
    said: list[str]


def train(rank: int, folder: Path, arguments: dict[str, Any], case: str = "") -> Kept:
    kept: dict[str, int] = {}
    sent: list[int] = []

    def look(trainer: Any) -> None:
        for run in trainer.table:
            states = [] if run.optimizer is None else run.optimizer.optimizer.state.values()
            kept[run.name] = sum(
                item.numel()
                for state in states
                for item in state.values()
                if isinstance(item, torch.Tensor) and item.dim()
            )
        sent.append(trainer._placement.executor.sync.num_bytes)

    def spoil(trainer: Any) -> None:
        """Spoil the weights of one task, and the optimizer of another on its keeper."""

        def hook(*given: Any) -> None:
            raise ValueError("no more steps")

        with torch.no_grad():
            next(iter(trainer.model.task_parameters("b").values())).fill_(torch.nan)
        trainer.table["c"].optimizer.optimizer.register_step_pre_hook(hook)

    def arrive(trainer: Any) -> None:
        trainer.register_tasks([lab.small_task("late", data_seed=9, max_steps=2)])

    def stop(trainer: Any) -> None:
        trainer.control.should_training_stop = True

    begin = {1: arrive, 2: spoil} if case == "changes" else {}
    ends = {2: look} if case != "stop" else {2: stop}
    watcher = cases.Watcher(at_begin=begin, at_end=ends)
    optim = "sgd" if case == "changes" else "adamw_torch"
    tasks = [
        lab.small_task("a", data_seed=1, rank=2, lora_dropout=0.1, max_steps=5, optim=optim),
        lab.small_task("b", data_seed=2, rank=8, length=13, max_steps=5),
        lab.small_task("c", data_seed=3, rank=4, length=9, max_steps=4, weight_decay=0.1, max_grad_norm=0.01),
    ]
    resume = arguments.pop("resume", False)
    laid = cases.train(folder, cases.backbone("llama"), tasks, watcher=watcher, resume=resume, **arguments)
    return Kept(laid, kept, sent[0] if sent else 0, laid.report.splitlines())


def run(folder: Path, world_size: int, case: str = "", **arguments: Any) -> list[Kept]:
    return values(launch(world_size, train, folder, arguments, case, limit_s=120))


def assert_same(found: Part, wanted: Part, *, first: int = 0, bound: float = 0.0) -> None:
    """Assert that losses from a step on, and final adapters, are equal in every bit, or within a bound."""
    assert found.statuses == wanted.statuses
    assert found.weights.keys() == wanted.weights.keys()
    for name, weights in wanted.weights.items():
        if bound:
            lab.assert_close(found.losses[name], wanted.losses[name][first:], bound, name)
        else:  # as text, as NaN is not equal to itself
            assert repr(found.losses[name]) == repr(wanted.losses[name][first:]), name
        for key, weight in weights.items():
            assert lab.relative(torch.from_numpy(found.weights[name][key]), torch.from_numpy(weight)) <= bound, key


SHARDED = {"shard_optimizer": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Kept]:
    """Return what two replicas show that keep all states."""
    return run(tmp_path_factory.mktemp("plain"), 2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> list[Kept]:
    """Return what two replicas show that divide the states."""
    return run(tmp_path_factory.mktemp("sharded"), 2, **SHARDED)


@SLOW
@pytest.mark.parametrize("case", ["", "changes"])
def test_two_replicas_end_with_the_same_bits_as_with_all_states_on_both(
    case: str, plain: list[Kept], sharded: list[Kept], tmp_path: Path
) -> None:
    found = run(tmp_path / "sharded", 2, case, **SHARDED) if case else sharded
    for mine, theirs in zip(found, run(tmp_path / "plain", 2, case) if case else plain, strict=True):
        assert_same(mine.laid, theirs.laid)
        assert repr(mine.laid.norms) == repr(theirs.laid.norms)
    statuses = found[0].laid.statuses
    assert found[1].laid.statuses == statuses
    failed = {name for name, (status, _) in statuses.items() if status == "failed"}
    assert failed == ({"b", "c"} if case else set()), statuses
    if case:
        assert "no more steps" in statuses["c"][1]


@SLOW
def test_each_state_is_on_one_process_and_no_more_is_sent(plain: list[Kept], sharded: list[Kept]) -> None:
    found = sharded
    for name, total in plain[0].moments.items():
        assert sorted(one.moments[name] for one in found) == [0, total]
    assert found[0].moments["a"] > 0, "ranks are chosen by what they keep so far"
    assert found[1].moments["b"] > found[0].moments["a"]
    kept = [sum(one.moments.values()) for one in found]
    assert max(kept) < 0.6 * sum(plain[0].moments.values()), "the largest task is on one, the two others on the other"
    assert found[0].num_bytes == plain[0].num_bytes + 4 * 3, "a norm for each task"


@pytest.mark.parametrize(
    "resumed",
    [
        pytest.param({**SHARDED}, id="sharded", marks=NIGHTLY),
        pytest.param({}, id="whole", marks=SLOW),
        pytest.param({"pipeline_parallel_size": 2}, id="stages", marks=NIGHTLY),
    ],
)
def test_a_run_resumes_with_and_without_sharded_states(
    resumed: dict[str, Any], plain: list[Kept], tmp_path: Path
) -> None:
    run(tmp_path / "cut", 2, "stop", **SHARDED)
    rest = run(tmp_path / "cut", 2, resume=True, **resumed)[0].laid
    assert_same(rest, plain[0].laid, first=2, bound=1e-4 if "pipeline_parallel_size" in resumed else 0.0)


@SLOW
def test_gradients_in_bf16_are_half_the_bytes_and_near_those_in_fp32(plain: list[Kept], tmp_path: Path) -> None:
    for arguments in ({}, SHARDED):
        rounded = run(tmp_path / f"bf16{len(arguments)}", 2, reduce_dtype="bfloat16", **arguments)
        figures = 4 * (3 + 3 * len(arguments))  # losses and norms, in fp32
        assert rounded[0].num_bytes - figures == (plain[0].num_bytes - 4 * 3) // 2
        assert rounded[0].laid.weights.keys() == plain[0].laid.weights.keys()
        for name, losses in plain[0].laid.losses.items():
            lab.assert_close(rounded[0].laid.losses[name], losses, 2e-2, name)
            assert rounded[0].laid.norms[name] != plain[0].laid.norms[name]
            lab.assert_close(rounded[0].laid.norms[name], plain[0].laid.norms[name], 2e-2, name)


@pytest.mark.parametrize(
    ("layout", "settings", "got"),
    [
        ("<1,2>x2", {}, "True with replicas <1,2>x2"),
        ("<2,1>, <1,1>x2", {}, "True with replicas <2,1>x1, <1,1>x2"),
        ("<1,1>x2", {"redeploy": True}, "True with redeploy=True"),
    ],
)
def test_layouts_that_divide_states_already_refuse_it(layout: str, settings: dict[str, Any], got: str) -> None:
    args = MultiTaskTrainingArguments("runs/a", use_cpu=True, shard_optimizer=True, **settings)
    with pytest.raises(ConfigError, match=r"args\.shard_optimizer must be False .*, got ") as caught:
        check_layout(parse_layout(layout), is_quantized=False, args=args, tasks=[], backbone=cases.backbone("llama"))
    assert got in str(caught.value)
