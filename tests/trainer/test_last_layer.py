"""Runs whose last layer computes the rows alone that losses read: as plain PEFT has them, and as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peft import IA3Config, LoraConfig

from peft_mux import Task
from tests.invariants import mux_lab as lab
from tests.runs import LORA, task_of


def completions(seed: int, count: int = 10, prompt: int = 14) -> list[dict[str, list[int]]]:
    """Return rows of a prompt, which is not trained on, and one to six tokens that are."""
    rng, rows = np.random.default_rng(seed), []
    for size in rng.integers(1, 7, size=count):
        ids = rng.integers(1, lab.VOCABULARY, size=prompt + int(size)).tolist()
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return rows


def tasks() -> list[Task]:
    # Of inputs that are dropped throughout a step, gradients are rounding; with less, AdamW makes whole steps of it.
    dropped = LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.2)
    own = {"a": LORA, "b": dropped, "c": LoraConfig(r=2, use_dora=True)}
    found = [
        task_of(name, completions(number), config, max_steps=5, adam_epsilon=1e-5)
        for number, (name, config) in enumerate(own.items())
    ]
    scaled = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    return [*found, task_of("d", completions(7), scaled, max_steps=3, adam_epsilon=1e-5)]


def test_each_task_is_trained_as_plain_peft_trains_it_alone(tmp_path: Path) -> None:
    heights: dict[int, set[int]] = {0: set(), -1: set()}

    def watch(trainer: Any) -> None:
        for place, found in heights.items():
            mlp = trainer.model.backbone.model.layers[place].mlp
            mlp.register_forward_hook(lambda _, given, out, found=found: found.add(out.shape[1]))

    run = lab.train(tasks(), tmp_path, recorder=lab.Recorder(at_begin={0: watch}))
    assert run.trainer.model.last_layer.reason is None
    assert max(heights[-1]) < 0.5 * max(heights[0]), "fewer rows meet the last MLP"
    # What is dropped is drawn by other rules in plain PEFT.
    judged = [task for task in tasks() if task.name != "b"]
    lab.assert_as_judged(run, {task.name: lab.judge(run.trainer, task) for task in judged})


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """Return a run whose last layer computes all rows, in whole steps."""
    return lab.train(tasks(), tmp_path_factory.mktemp("wide"), last_layer_at_targets=False)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_tokens_per_micro_batch": 48, "gradient_checkpointing": True}, marks=pytest.mark.slow),
        {"split_long_sequences": True, "max_tokens_per_micro_batch": 32, "chunk_size": 4},
    ],
    ids=str,
)
def test_runs_are_those_in_which_it_computes_all_rows(settings: dict[str, Any], wide: lab.Run, tmp_path: Path) -> None:
    narrow = lab.train(tasks(), tmp_path, last_layer_at_targets=True, **settings)
    for name in "abcd":
        lab.assert_close(narrow.losses[name], wide.losses[name], 1e-5, name)
        for key, weight in narrow.weights(name).items():
            assert lab.relative(weight, wide.weights(name)[key]) <= 1e-4, f"{name} {key}"
