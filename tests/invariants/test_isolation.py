"""Nothing that one task does reaches another: not by content, poison, pauses, order, arrivals or draws.

Where shapes agree, "nothing" means no bit. Where they do not (a task leaves, so the stream is shorter), a
matrix product may sum in another order, and "nothing" means 1e-6 relative.

`golden_losses.json` holds 30 steps of `golden_run`. To rewrite it after an intended change of the arithmetic:

    PEFT_MUX_REWRITE_GOLDEN=1 python -m pytest tests/invariants/test_isolation.py -k golden
"""

from __future__ import annotations

import gc
import json
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import TaskFailedError
from peft_mux.kernels import philox
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab
from tests.invariants.mux_checks import (
    check_co_tenants_change_no_bit,
    check_paused_task_keeps_every_bit,
    check_poison_stays_with_its_task,
    poison_times,
    poisons,
    train_for_poison,
)
from tests.invariants.mux_lab import Recorder, Run
from tests.runs import assert_equal_weights, small_tasks, task_of, weights_in_plain_peft
from tests.runs import poison as poison_task

GOLDEN = Path(__file__).parent / "golden_losses.json"


def model_of(*names: str, rank: int = 4) -> MultiTaskPeftModel:
    """Return a model whose adapters already add something."""
    configs = {name: LoraConfig(r=rank + index, target_modules="all-linear") for index, name in enumerate(names)}
    model = MultiTaskPeftModel(lab.tiny_llama(), configs, verify=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in names:
            for parameter in model.task_parameters(name).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def batch_of(task_rows: dict[str, list[dict[str, list[int]]]]) -> MuxBatch:
    """Return one stream of the given rows."""
    features = [{"task": name, **row} for name, rows in task_rows.items() for row in rows]
    return ChunkPackingCollator()(features)


# ------------------------------------------------------- I1: content, no bit


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_tasks", "bf16"),
    [(2, True), (8, False), pytest.param(2, False, marks=SLOW), pytest.param(8, True, marks=SLOW)],
)
def test_no_bit_of_a_task_depends_on_its_co_tenants(num_tasks: int, bf16: bool, tmp_path: Path) -> None:
    check_co_tenants_change_no_bit(tmp_path, num_tasks=num_tasks, bf16=bf16)


# ------------------------------------------------------------- I2: poison


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that all poisoned runs are compared with."""
    return train_for_poison(tmp_path_factory.mktemp("healthy"), Recorder())


FAST_POISONS = {("nan weights", "middle"), ("infinite weights", "last"), ("rate of 1e30", "first")}
FAST_POISONS |= {("nan gradient", "middle")}


@pytest.mark.parametrize(
    ("poison", "when"),
    [
        pytest.param(poison, when, marks=() if (poison, when) in FAST_POISONS else SLOW)
        for poison in poisons()
        for when in poison_times()
    ],
)
def test_poison_stays_with_its_task(poison: str, when: str, healthy: Run, tmp_path: Path) -> None:
    run = check_poison_stays_with_its_task(tmp_path, poison=poison, when=when, healthy=healthy)
    assert_equal_weights(weights_in_plain_peft(tmp_path / "poisoned" / "b"), run.weights("b"))


def test_poison_with_policy_stop_ends_the_run(tmp_path: Path) -> None:
    recorder = Recorder(at_begin={3: poison_task("b")})
    run = lab.train(small_tasks("a", "b"), tmp_path, recorder=recorder, quarantine_policy="stop")
    assert run.trainer.task_statuses == {"a": "running", "b": "failed"}
    assert len(run.losses["a"]) == 4


def test_failed_tasks_are_counted_in_the_result_or_raise_at_the_end(tmp_path: Path) -> None:
    bad = lab.small_task("b", data_seed=2, learning_rate=1e30)
    tasks, args = [*small_tasks("a"), bad], MultiTaskTrainingArguments(str(tmp_path / "run"), report_to="none")
    output = MultiTaskTrainer(lab.tiny_llama(), args, tasks).train()
    assert math.isnan(output.training_loss)
    assert output.metrics["failed_tasks"] == 1
    args = MultiTaskTrainingArguments(str(tmp_path / "raising"), report_to="none", raise_on_failure=True)
    trainer = MultiTaskTrainer(lab.tiny_llama(), args, tasks)
    with pytest.raises(TaskFailedError, match=r"^tasks failed: b \(non_finite.*\)\. All others have ended"):
        trainer.train()
    assert (tmp_path / "raising" / "a" / "adapter_model.safetensors").is_file()
    assert "--merge a " in trainer.report()
    assert f'{tmp_path / "raising" / "b"}"' not in trainer.report(), "what has failed is not offered"


# ----------------------------------------------------- I4: backbone frozen


def test_no_bit_of_the_backbone_changes(tmp_path: Path) -> None:
    before = lab.backbone_tensors(lab.tiny_llama())
    tasks = [
        lab.small_task("a", data_seed=1, weight_decay=0.5),
        lab.small_task("b", data_seed=2, target_modules=["embed_tokens", "q_proj"]),
        lab.small_task("c", data_seed=3, target_modules=["lm_head", "v_proj"], lora_dropout=0.1),
    ]
    run = lab.train(tasks, tmp_path)
    after = lab.backbone_tensors(run.trainer.model.backbone)
    assert after.keys() == before.keys()
    changed = [key for key in before if lab.digest({"": before[key]}) != lab.digest({"": after[key]})]
    assert not changed
    assert all(loss != run.losses["a"][0] for loss in run.losses["a"][1:]), "nothing was trained"


# ------------------------------------------------- I5: who owns what


def test_the_step_of_a_task_changes_exactly_its_own_weights(tmp_path: Path) -> None:
    tasks = [lab.small_task(name, data_seed=seed) for seed, name in enumerate("abc")]
    changed: dict[str, set[str]] = {}

    def step_each(trainer: MultiTaskTrainer) -> None:
        for name in "abc":
            everything = {key: value.detach().clone() for key, value in trainer.model.state_dict().items()}
            states = {other: lab.digest(lab.moments(trainer, other)) for other in "abc"}
            for parameter in trainer.model.parameters():
                parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
            optimizer = trainer.table[name].optimizer
            assert optimizer is not None
            optimizer.step(optimizer.gradient_norm())
            now = trainer.model.state_dict()
            changed[name] = {key for key in now if not torch.equal(now[key], everything[key])}
            assert {o for o in "abc" if lab.digest(lab.moments(trainer, o)) != states[o]} == {name}
        for parameter in trainer.model.parameters():
            parameter.grad = None

    run = lab.train(tasks, tmp_path, recorder=Recorder(at_end={3: step_each}))
    for name in "abc":
        adapter = run.trainer.model.adapter_of(name)
        assert changed[name] == {key for key in run.trainer.model.state_dict() if f".{adapter}." in key}


# ------------------------------------------------------- I6: idle tasks


def test_a_paused_task_keeps_every_bit(tmp_path: Path) -> None:
    check_paused_task_keeps_every_bit(tmp_path)


# ------------------------------------------------------- I7: order


def test_the_order_of_tasks_does_not_matter(tmp_path: Path) -> None:
    tasks = [
        lab.small_task("a", data_seed=1, length=9),
        lab.small_task("b", data_seed=2, length=17, rank=8, target_modules=["q_proj", "up_proj"], max_steps=6),
        lab.small_task("c", data_seed=3, length=30, rank=2, seed=5, max_steps=10),
    ]
    first = lab.train(tasks, tmp_path / "abc")
    other = lab.train([tasks[index] for index in (1, 2, 0)], tmp_path / "bca")
    for name in "abc":
        lab.assert_same(other, first, name, 1e-6)


# ------------------------------------------------------- I8: slots used again


def test_a_task_that_is_removed_and_registered_again_begins_afresh(tmp_path: Path) -> None:
    again = lab.small_task("b", data_seed=2, max_steps=6)
    fresh: dict[str, Any] = {}

    def look(trainer: MultiTaskTrainer) -> None:
        fresh.update(weights=lab.weights(trainer, "b"), moments=lab.moments(trainer, "b"), step=trainer.table["b"].step)

    recorder = Recorder(
        at_end={
            3: lambda trainer: trainer.remove_task("b"),
            5: lambda trainer: trainer.register_tasks([again]),
        },
        at_begin={5: look},
    )
    tasks = [lab.small_task("a", data_seed=1, max_steps=20), lab.small_task("b", data_seed=2, max_steps=6)]
    run = lab.train(tasks, tmp_path, recorder=recorder)
    assert fresh["step"] == 0
    assert fresh["moments"] == {}
    assert all(not weight.any() for key, weight in fresh["weights"].items() if "lora_B" in key)
    assert lab.digest(fresh["weights"]) == lab.digest(recorder.before["b"][0]), "not the first initial weights"
    lab.assert_close(run.losses["b"][3:], lab.train([again], tmp_path / "alone").losses["b"], 1e-6, "b")


def _census(trainer: MultiTaskTrainer) -> dict[str, int]:
    model = trainer.model
    return {
        "modules": sum(1 for _ in model.modules()),
        "parameters": sum(1 for _ in model.parameters()),
        "elements": sum(p.numel() for p in model.parameters()),
        "adapters": len(model.peft_config),
        "tasks": len(model.tasks),
        "task parameters": sum(1 for _ in model.registry.parameters()),
        "runs": len(list(trainer.table)),
    }


def test_eight_arrivals_and_departures_leave_nothing_in_the_model(tmp_path: Path) -> None:
    censuses: list[dict[str, int]] = []

    def arrive(trainer: MultiTaskTrainer) -> None:
        censuses.append(_census(trainer))
        number = len(censuses)
        trainer.register_tasks([lab.small_task(f"guest{number}", data_seed=number, rank=1 + number % 5, max_steps=9)])

    def depart(trainer: MultiTaskTrainer) -> None:
        trainer.remove_task(f"guest{len(censuses)}")

    at_end: dict[int, Callable[[MultiTaskTrainer], None]] = {}
    for cycle in range(9):
        at_end[2 * cycle + 1], at_end[2 * cycle + 2] = arrive, depart
    host = lab.small_task("host", data_seed=99, max_steps=20)
    run = lab.train([host], tmp_path, recorder=Recorder(at_end=at_end, keep_weights=False))
    assert len(censuses) == 9
    assert all(census == censuses[0] for census in censuses)
    assert run.losses.keys() == {"host", *(f"guest{number}" for number in range(1, 10))}


class _Rows(list):  # type: ignore[type-arg]
    """Rows that can be watched."""


def _watched_weights(trainer: MultiTaskTrainer, name: str) -> list[weakref.ref[Any]]:
    """Watch the weights of a task, without keeping them."""
    return [weakref.ref(weight) for weight in trainer.model.task_parameters(name).values()]


def test_the_weights_and_rows_of_a_departed_task_are_freed(tmp_path: Path) -> None:
    guest_rows = _Rows(lab.rows(5, 8, 6, 12))
    watched: list[weakref.ref[Any]] = [weakref.ref(guest_rows)]
    alive: list[bool] = []

    def look(trainer: MultiTaskTrainer) -> None:
        gc.collect()
        alive.append(any(watch() is not None for watch in watched))

    def depart(trainer: MultiTaskTrainer) -> None:
        watched.extend(_watched_weights(trainer, "guest"))
        look(trainer)
        trainer.remove_task("guest")

    recorder = Recorder(at_begin={6: look}, at_end={4: depart})
    tasks = [lab.small_task("host", data_seed=1), task_of("guest", guest_rows)]
    trainer = lab.make_trainer(tasks, tmp_path, recorder=recorder)
    del tasks, guest_rows
    trainer.train()
    assert alive == [True, False]


def test_the_name_of_the_last_task_can_be_used_again(tmp_path: Path) -> None:
    trainer = lab.make_trainer([lab.small_task("a", data_seed=1)], tmp_path)
    trainer.remove_task("a")
    trainer.register_tasks([lab.small_task("a", data_seed=2)])
    trainer.train()
    assert trainer.task_statuses == {"a": TaskStatus.SUCCEEDED}


# ------------------------------------------------------- I9: draws


def test_the_draws_of_a_task_do_not_depend_on_how_many_tasks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draws(num_tasks: int) -> dict[tuple[int, int], str]:
        seen: dict[tuple[int, int], str] = {}
        original = philox.keep_mask

        def spy(seed: int, places: torch.Tensor, num_columns: int, probability: float, *window: Any) -> torch.Tensor:
            mask = original(seed, places, num_columns, probability, *window)
            for place, row in zip(places.tolist(), mask, strict=True):
                bits = lab.digest({"": row})
                assert seen.setdefault((seed, place), bits) == bits, "forward and backward draw differently"
            return mask

        drops: dict[str, Any] = {"lora_dropout": 0.2, "target_modules": ["q_proj", "down_proj"]}
        tasks = [
            lab.small_task(f"t{index}", data_seed=index, seed=index, length=7, max_steps=2, **drops)
            for index in range(num_tasks)
        ]
        trainer = lab.make_trainer(tasks, tmp_path / str(num_tasks), max_tokens_per_micro_batch=40)
        with monkeypatch.context() as patch:
            patch.setattr(philox, "keep_mask", spy)
            trainer.train()
        return seen

    alone, three = draws(1), draws(3)
    assert len(alone) == 2 * 2 * 2 * 4 * 7, "one draw for each layer, module, step and token"
    assert len(three) == 3 * len(alone), "two tasks share a draw"
    assert all(three[key] == bits for key, bits in alone.items())


# ------------------------------------------------------- I10: samples


def test_a_changed_sample_changes_no_other_logit() -> None:
    model = model_of("a", "b").eval()
    task_rows = {"a": lab.rows(1, 4, 3, 20), "b": lab.rows(2, 3, 3, 33)}
    before = model.sequence_logits(batch_of(task_rows))
    places = [(name, index) for name, rows in task_rows.items() for index in range(len(rows))]
    for changed, (name, index) in enumerate(places):
        altered = {task: [dict(row) for row in rows] for task, rows in task_rows.items()}
        ids = altered[name][index]["input_ids"]
        altered[name][index]["input_ids"] = [1 + token % (lab.VOCABULARY - 1) for token in ids]
        after = model.sequence_logits(batch_of(altered))
        same = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
        assert same == [place != changed for place in range(len(places))]


# ------------------------------------------------------- N1: determinism


def golden_run(folder: Path) -> dict[str, list[float]]:
    """Return the losses of 30 steps of three unequal tasks with everything switched on."""
    tasks = [
        lab.small_task("a", data_seed=1, max_steps=30, lr_scheduler_type="cosine", warmup_steps=3),
        lab.small_task(
            "b", data_seed=2, max_steps=30, rank=8, length=21, seed=2, lora_dropout=0.1, target_modules=["o_proj"]
        ),
        lab.small_task("c", data_seed=3, max_steps=30, rank=2, length=33, target_modules=["v_proj"], weight_decay=0.1),
    ]
    return lab.train(tasks, folder, recorder=Recorder(keep_weights=False), max_tokens_per_micro_batch=160).losses


@pytest.fixture(scope="module")
def golden_losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The golden run, once for all tests."""
    return golden_run(tmp_path_factory.mktemp("golden"))


@SLOW
def test_two_runs_of_one_seed_agree_in_all_digits(golden_losses: dict[str, list[float]], tmp_path: Path) -> None:
    again = golden_run(tmp_path)
    for name, losses in golden_losses.items():
        assert list(map(repr, losses)) == list(map(repr, again[name]))


def test_the_losses_are_those_of_the_golden_file(golden_losses: dict[str, list[float]]) -> None:
    if os.environ.get("PEFT_MUX_REWRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(golden_losses, indent=1) + "\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert golden_losses.keys() == golden.keys()
    for name, wanted in golden.items():
        assert len(wanted) == 30
        lab.assert_close(golden_losses[name], wanted, 1e-4, name)
