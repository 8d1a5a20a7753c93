"""The central promise: training tasks together gives each what it would get alone.

The judge is plain PEFT in an ordinary loop (`mux_lab.judge`): losses within 1e-5 at every step, final weights
within 1e-4. What the judge cannot draw (dropout) is compared with runs of one task.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.task import Task, TaskStatus
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run, Verdict

FIELDS = {field.name for field in fields(MultiTaskTrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
"""The switch's name in newer and older transformers."""


def unequal_tasks(num_steps: int = 24) -> list[Task]:
    """Return five tasks that differ in everything that may differ; the longest takes `num_steps` steps."""
    all_linear = LoraConfig(r=4, target_modules="all-linear")
    attention = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_alpha=32)
    mlp = LoraConfig(r=16, target_modules=["gate_proj", "down_proj"], use_rslora=True)
    longest = LoraConfig(r=2, target_modules=["o_proj", "up_proj"], lora_alpha=1)
    single = LoraConfig(r=32, target_modules=["k_proj"])

    def task(name: str, config: LoraConfig, rows: Any, batch: int, rate: float, **settings: Any) -> Task:
        own = {"train_batch_size": batch, "learning_rate": rate, "lr_scheduler_type": "cosine", **settings}
        return Task(name=name, peft_config=config, train_dataset=rows, **own)

    linear = {"lr_scheduler_type": "linear", "max_steps": num_steps // 2, "warmup_steps": num_steps // 20}
    cosine = {"max_steps": 2 * num_steps // 3, "warmup_steps": num_steps // 12, "seed": 3}
    constant = {"lr_scheduler_type": "constant", "max_steps": num_steps // 3, "seed": 7}
    warm = {"lr_scheduler_type": "constant_with_warmup", "max_steps": num_steps, "warmup_steps": num_steps // 6}
    return [
        task("all", all_linear, lab.rows(1, 50, 5, 20), 4, 1e-3, **linear),
        task("attention", attention, lab.rows(2, 11, 10, 40), 3, 3e-3, **cosine),
        task("mlp", mlp, lab.rows(3, 20, 30, 60), 6, 1e-3, weight_decay=0.1, max_grad_norm=0.1, **constant),
        task("longest", longest, lab.rows(4, 7, 2, 9), 2, 1e-2, seed=0, **warm),
        task("single", single, lab.rows(5, 9, 25, 64), 1, 5e-4, max_steps=5 * num_steps // 12, shuffle=False, seed=11),
    ]


def train_unequal(folder: Path, recorder: Recorder | None = None, *, num_steps: int = 24, **arguments: Any) -> Run:
    return lab.train(unequal_tasks(num_steps), folder, recorder=recorder or Recorder(keep_weights=False), **arguments)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """All five tasks in one run with everything at its default."""
    return train_unequal(tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def verdicts(together: Run) -> dict[str, Verdict]:
    """Plain PEFT's result for each of the five."""
    return {task.name: lab.judge(together.trainer, task) for task in together.trainer.tasks}


def test_each_task_trains_as_plain_peft_would_train_it_alone(together: Run, verdicts: Mapping[str, Verdict]) -> None:
    lab.assert_as_judged(together, verdicts)
    assert set(together.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}
    for name, verdict in verdicts.items():  # they learn, so that equal trajectories mean something
        assert verdict.losses[0] != verdict.losses[-1]
        assert any("lora_B" in key and weight.abs().max() > 1e-4 for key, weight in verdict.weights.items()), name


@pytest.mark.slow
def test_sixty_steps_together_are_those_of_plain_peft_alone(tmp_path: Path) -> None:
    run = train_unequal(tmp_path, num_steps=60)
    assert len(run.losses["longest"]) == 60
    lab.assert_as_judged(run, {task.name: lab.judge(run.trainer, task) for task in run.trainer.tasks})


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_tokens_per_micro_batch": 64, "chunk_size": 16}, id="many micro-batches of chunks of 16"),
        pytest.param(
            {"pad_to_chunks": True, "chunk_size": 8, CHECKPOINTING: True, "max_tokens_per_micro_batch": 300},
            id="padded to chunks of 8, recomputed",
        ),
    ],
)
def test_how_the_stream_is_cut_changes_no_task(
    arguments: dict[str, Any], verdicts: Mapping[str, Verdict], tmp_path: Path
) -> None:
    lab.assert_as_judged(train_unequal(tmp_path, **arguments), verdicts)


def test_small_micro_batches_are_really_used(tmp_path: Path) -> None:
    trainer = lab.make_trainer(unequal_tasks(), tmp_path, max_tokens_per_micro_batch=64)
    assert trainer.plan().htasks[0].micro_batches > 5


def test_arrivals_departures_and_pauses_leave_the_others_alone(together: Run, tmp_path: Path) -> None:
    late = lab.small_task("late", data_seed=8, max_steps=12)
    later = lab.small_task("later", data_seed=9, rank=2, length=30)
    acts: dict[int, Any] = {
        3: lambda trainer: trainer.pause_task("mlp"),
        5: lambda trainer: trainer.register_tasks([late, later]),
        8: lambda trainer: trainer.remove_task("attention"),
        12: lambda trainer: trainer.resume_task("mlp"),
    }
    run = train_unequal(tmp_path / "run", Recorder(at_end=acts, keep_weights=False))
    assert len(run.losses["attention"]) == 8
    for name in ("all", "mlp", "longest", "single"):
        lab.assert_same(run, together, name, 1e-6)
    lab.assert_same(run, lab.train([late], tmp_path / "alone"), "late", 1e-6)


def test_adapter_dropout_drops_the_same_alone_and_together(tmp_path: Path) -> None:
    shared: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"]}
    tasks = [
        lab.small_task("a", data_seed=1, lora_dropout=0.1, **shared),
        lab.small_task("b", data_seed=2, lora_dropout=0.1, rank=8, length=7, seed=2, max_steps=5, **shared),
        lab.small_task("c", data_seed=3, lora_dropout=0.3, rank=2, length=20, seed=3, max_steps=10, **shared),
    ]
    together = lab.train(tasks, tmp_path / "together", max_tokens_per_micro_batch=50)
    for task in tasks:
        lab.assert_same(together, lab.train([task], tmp_path / task.name), task.name, 1e-6)
    without = lab.train([lab.small_task("a", data_seed=1, max_steps=3, **shared)], tmp_path / "none").losses["a"]
    assert together.losses["a"][0] == pytest.approx(without[0], rel=1e-6), "at first an adapter adds nothing"
    assert together.losses["a"][2] != pytest.approx(without[2], rel=1e-5), "it drops something"


def test_the_backbone_s_own_dropout_is_the_same_alone_and_together(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=lab.VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    assert config.attn_pdrop == config.embd_pdrop == config.resid_pdrop == 0.1

    def backbone() -> GPT2LMHeadModel:
        model = GPT2LMHeadModel(config)
        lab.fill(model, 1)
        return model

    tasks = [
        lab.small_task("a", data_seed=1, target_modules=["c_attn"], max_steps=5),
        lab.small_task("b", data_seed=2, target_modules=["c_attn", "c_fc"], length=17, seed=2, max_steps=6),
    ]
    together = lab.train(tasks, tmp_path / "together", model=backbone(), max_tokens_per_micro_batch=60)
    for task in tasks:
        lab.assert_same(together, lab.train([task], tmp_path / task.name, model=backbone()), task.name, 1e-6)


@pytest.mark.slow
def test_bf16_begins_where_fp32_begins_and_stays_finite(verdicts: Mapping[str, Verdict], tmp_path: Path) -> None:
    run = train_unequal(tmp_path, bf16=True)
    for name, verdict in verdicts.items():
        assert run.losses[name][0] == pytest.approx(verdict.losses[0], rel=1e-2)
        assert len(run.losses[name]) == len(verdict.losses)
        assert all(math.isfinite(loss) for loss in run.losses[name])
        for weight in run.weights(name).values():
            assert weight.isfinite().all()
            assert str(weight.dtype) == "torch.float32"
