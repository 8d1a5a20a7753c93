"""Tasks of different losses train in any layout as in one process, and with unlike types of PEFT each as if alone."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import (
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
)

from peft_mux import BottleneckConfig, DiffPruningConfig
from tests.engine.losses import cases
from tests.engine.losses.cases import Trained
from tests.engine.processes.cases import launch, values
from tests.invariants import mux_lab as lab
from tests.parallel.replicas.layout_cases import Watcher, backbone, saved_backbone

SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
FEW = ["q_proj", "v_proj"]
ADAPTERS = {
    "sft": LoraConfig(r=2, target_modules="all-linear", use_dora=True),
    "smoothed": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "ipo": MissConfig(r=4, target_modules=FEW),
    "orpo": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "kto": OFTConfig(oft_block_size=8, target_modules=FEW),
    "apo": BottleneckConfig(bottleneck_size=4, target_modules=["o_proj", "down_proj"]),
    "weighted": LoHaConfig(r=2, target_modules=FEW),
    "policy": VeraConfig(r=8, target_modules=FEW),
    "dynamic": LNTuningConfig(target_modules=["input_layernorm"]),
    "own": DiffPruningConfig(target_modules=FEW),
    "taught": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}
"""Tasks of other names have LoRA."""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Return the results of all tasks together in one process."""
    return cases.train_all(0, tmp_path_factory.mktemp("one"), None, {})


def assert_as(found: Trained, wanted: Trained, name: str, *, losses: float = 1e-5, weights: float = 1e-4) -> None:
    """Assert that a task has the same results in two runs: losses, metrics, evaluations, adapter."""
    lab.assert_close(found.laid_out.losses[name], wanted.laid_out.losses[name], losses, name)
    mine, theirs = found.laid_out.weights[name], wanted.laid_out.weights[name]
    assert mine.keys() == theirs.keys()
    for key, weight in theirs.items():
        error = np.linalg.norm(mine[key] - weight) / max(np.linalg.norm(weight), 1e-12)
        assert error <= weights, f"{name} {key}: {error}"
    assert len(found.logs[name]) == len(wanted.logs[name])
    for own, other in zip(found.logs[name], wanted.logs[name], strict=True):
        assert own.keys() == other.keys()
        # Before the first update, only rounding decides which of two answers has the higher reward.
        no_rewards = max(abs(other.get(f"rewards/{answer}", 1.0)) for answer in ("chosen", "rejected")) < 2e-5
        for key, value in other.items():
            if key == "rewards/accuracies" and no_rewards:
                continue
            assert math.isclose(own[key], value, rel_tol=1e-4, abs_tol=2e-5), f"{name} {key}: {own[key]}, not {value}"


def train_with_unlike_adapters(folder: Path, names: Collection[str]) -> Trained:
    # Adam divides gradients by their size, so where they are nearly 0 the last bits would decide.
    chosen = [
        replace(task, peft_config=ADAPTERS.get(task.name, task.peft_config), adam_epsilon=1e-6)
        for task in cases.all_tasks()
        if task.name in names
    ]
    return cases.observed(folder, backbone("llama"), chosen, Watcher(), max_tokens_per_micro_batch=400)


NAMES = [task.name for task in cases.all_tasks()]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_with_unlike_adapters(tmp_path_factory.mktemp("together"), NAMES)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name == "dpo" else SLOW) for name in NAMES])
def test_a_task_trains_with_others_of_other_losses_and_types_as_it_does_alone(
    name: str, together: Trained, tmp_path: Path
) -> None:
    alone = train_with_unlike_adapters(tmp_path, [name])
    assert_as(together, alone, name)
    steps = [entry for entry in together.logs[name] if "loss" in entry]
    assert len({entry["loss"] for entry in steps}) == cases.STEPS
    if name == "smoothed":
        assert all(entry["nll"] != entry["loss"] for entry in steps)
    if name in ("dpo", "ipo", "orpo", "simpo", "kto", "apo", "warm"):
        # A batch of KTO may have no good answer, and then no rewards of good answers.
        assert sum("rewards/chosen" in entry for entry in steps) >= cases.STEPS - 1
    assert all(math.isfinite(value) for entry in alone.logs[name] for value in entry.values())


PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
LAYOUTS = [
    pytest.param(2, {}, True, id="dp2", marks=SLOW),
    pytest.param(2, {**PP2, "pipeline_schedule": "interleaved_1f1b"}, True, id="pp2, two chunks", marks=SLOW),
    pytest.param(3, {"replicas": "<1,2>, <1,1>"}, True, id="unequal replicas of stages", marks=SLOW),
    pytest.param(2, {**TP2, "interleaved_passes": 2}, False, id="tp2, passes in turns", marks=SLOW),
    pytest.param(2, {"shard_backbone": True}, False, id="fsdp2", marks=SLOW),
    pytest.param(4, {**PP2, "shard_backbone": True}, False, id="fsdp2 x pp2", marks=NIGHTLY),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "arguments", "has_words"), LAYOUTS)
def test_every_loss_trains_in_a_layout_as_in_one_process(
    world_size: int, arguments: dict[str, Any], has_words: bool, one: Trained, tmp_path: Path
) -> None:
    folder, options = saved_backbone("llama", tmp_path / "backbone"), {"has_words": has_words}
    run = launch(world_size, cases.train_all, tmp_path / "run", folder, arguments, None, options, limit_s=180)
    parts = values(run)
    for part in parts[1:]:
        assert part.laid_out.losses == parts[0].laid_out.losses
        assert part.logs == parts[0].logs
    # A difference of two log-probabilities loses bits, because shards sum in another order.
    weights = 2e-4 if "tensor_parallel_size" in arguments else 1e-4
    assert parts[0].logs.keys() == {name for name in one.logs if has_words or name not in ("taught", "curious")}
    for name in parts[0].logs:
        assert_as(parts[0], one, name, weights=weights)
    policy = parts[0].logs["policy"]
    assert {"kl", "clip_ratio/low_mean"} <= policy[0].keys()
    assert any("eval_kl" in entry for entry in policy)


@SLOW
@pytest.mark.distributed
def test_a_function_that_fails_on_all_processes_fails_its_task_alone_and_every_process_says_why(
    one: Trained, tmp_path: Path
) -> None:
    names, options = ["policy", "own"], {"has_words": False, "is_broken": True}
    for part in values(launch(2, cases.train_all, tmp_path, None, {}, names, options, limit_s=120)):
        assert part.laid_out.statuses["own"][0] == "failed"
        assert "objective: ValueError: no such reward" in part.laid_out.statuses["own"][1]
        assert_as(part, one, "policy")


@SLOW
def test_a_task_that_turns_nan_is_quarantined_and_reaches_no_other(one: Trained, tmp_path: Path) -> None:
    def poison(trainer: Any) -> None:
        next(iter(trainer.model.task_parameters("kto").values())).data.fill_(float("nan"))

    found = cases.observed(tmp_path, backbone("llama"), cases.all_tasks(), Watcher(at_begin={2: poison}))
    status, reason = found.laid_out.statuses["kto"]
    assert (status, reason.split(":")[0]) == ("failed", "non_finite")
    for other in found.logs.keys() - {"kto"}:
        assert_as(found, one, other)


@SLOW
def test_a_resumed_run_ends_with_the_same_bits(one: Trained, tmp_path: Path) -> None:
    def stop(trainer: Any) -> None:
        trainer.control.should_training_stop = True

    options = {"save_strategy": "steps", "save_steps": 100}  # a run that is stopped is saved
    cases.observed(tmp_path, backbone("llama"), cases.all_tasks(), Watcher(at_end={2: stop}), **options)
    resumed = cases.observed(tmp_path, backbone("llama"), cases.all_tasks(), Watcher(), resume=True, **options)
    for name in resumed.logs:
        assert 0 < len(resumed.laid_out.losses[name]) < cases.STEPS
        assert resumed.laid_out.losses[name] == one.laid_out.losses[name][-len(resumed.laid_out.losses[name]) :]
        for key, weight in one.laid_out.weights[name].items():
            assert np.array_equal(resumed.laid_out.weights[name][key], weight), f"{name} {key}"
