"""Checks that both the invariant tests and the seeded bugs run: the product passes them, a bug must not.

Each raises `AssertionError` when its invariant does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file

from peft_mux import storage
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import WEIGHTS_NAME
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import TaskStatus
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.runs import SAVING, stop, stops_after

STEPS = 8
_TIMES = {"first": 0, "middle": 4, "last": STEPS - 1}


def check_co_tenants_change_no_bit(folder: Path, *, num_tasks: int = 2, bf16: bool = False) -> None:
    """Check that other rows, seeds and rates of co-tenants of equal shapes leave every bit of a task."""

    def train(variant: int) -> Run:
        own = lab.small_task("a", data_seed=1, max_grad_norm=0.1, max_steps=6)
        others = [
            lab.small_task(
                f"b{index}",
                data_seed=100 * variant + index,
                length=5 + 4 * index,
                seed=variant + index,
                rank=1 + index,
                learning_rate=1e-3 * 10**variant,
                max_grad_norm=0.1,
                max_steps=6,
            )
            for index in range(1, num_tasks)
        ]
        tasks = [*others[: num_tasks // 2], own, *others[num_tasks // 2 :]]
        return lab.train(tasks, folder / f"variant{variant}", bf16=bf16, recorder=Recorder(watched=["a"]))

    first, second = train(1), train(2)
    lab.assert_bit_identical(first, second, "a")
    assert first.losses["b1"] != second.losses["b1"], "the co-tenants did not change"


# ----------------------------------------------------------------- poison


def _poison_weights(value: float) -> Callable[[MultiTaskTrainer], None]:
    def poison(trainer: MultiTaskTrainer) -> None:
        for key, parameter in trainer.model.task_parameters("b").items():
            if "lora_B" in key:
                parameter.data.fill_(value)

    return poison


def _poison_rate(trainer: MultiTaskTrainer) -> None:
    optimizer = trainer.table["b"].optimizer
    assert optimizer is not None
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 1e30


def _poison_gradient(trainer: MultiTaskTrainer) -> None:
    parameter = list(trainer.model.task_parameters("b").values())[3]
    handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])


_POISONS: dict[str, tuple[Callable[[MultiTaskTrainer], None], int]] = {
    "nan weights": (_poison_weights(math.nan), 0),
    "infinite weights": (_poison_weights(math.inf), 0),
    "rate of 1e30": (_poison_rate, 1),
    "nan gradient": (_poison_gradient, 0),
}
"""How to poison task b, and after how many more steps it shows."""


def poisons() -> list[str]:
    """Return the names of the poisons."""
    return list(_POISONS)


def poison_times() -> list[str]:
    """Return the steps at which a task is poisoned."""
    return list(_TIMES)


def train_for_poison(folder: Path, recorder: Recorder) -> Run:
    """Train b, which is to be poisoned, and a, which must not notice."""
    tasks = [
        lab.small_task("b", data_seed=2, length=9, rank=8, max_steps=STEPS),
        lab.small_task("a", data_seed=1, max_steps=STEPS + 3),
    ]
    return lab.train(tasks, folder, recorder=recorder, **SAVING)


def check_poison_stays_with_its_task(
    folder: Path, *, poison: str = "nan weights", when: str = "middle", healthy: Run | None = None
) -> Run:
    """Check that a is bit-identical up to b's failure, within 1e-6 after, and b ends last good.

    Args:
        folder: for the runs.
        poison: one of `poisons()`.
        when: one of `poison_times()`.
        healthy: `train_for_poison` without poison; trained here where absent.

    Returns:
        The poisoned run, written to `folder / "poisoned"`.
    """
    act, delay = _POISONS[poison]
    step = _TIMES[when]
    healthy = healthy or train_for_poison(folder / "healthy", Recorder())
    poisoned = train_for_poison(folder / "poisoned", Recorder(at_begin={step: act}))
    failed_at = step + delay
    lab.assert_bit_identical(poisoned, healthy, "a", steps=failed_at + 1)
    lab.assert_same(poisoned, healthy, "a", 1e-6)
    _check_failed(poisoned, healthy, failed_at)
    return poisoned


def _check_failed(poisoned: Run, healthy: Run, failed_at: int) -> None:
    assert poisoned.trainer.task_statuses["a"] is TaskStatus.SUCCEEDED
    run = poisoned.trainer.table["b"]
    assert run.status is TaskStatus.FAILED, f"b is {run.status}"
    assert "non_finite" in run.reason
    assert run.step == failed_at
    # After the last step, a closing forward pass gives the loss, which no step records.
    is_reported = "gradient" in run.reason or "after the last step" in run.reason
    assert is_reported or not math.isfinite(poisoned.losses["b"][-1])
    final = poisoned.weights("b")
    assert all(torch.isfinite(weight).all() for weight in final.values())
    # The last weights whose loss and gradients were all finite: those that the step before began with.
    good = healthy.recorder.before["b"][max(failed_at - 1, 0)]
    assert all(torch.equal(final[key], good[key]) for key in good), "not the last good adapter"


# ------------------------------------------------------------ idle, resumed


def check_paused_task_keeps_every_bit(folder: Path) -> None:
    """Check that 20 steps of its neighbour change no bit of a paused task's weights and optimizer state."""
    states: list[str] = []

    def keep(trainer: MultiTaskTrainer) -> None:
        states.append(lab.digest(lab.task_tensors(trainer, "idle")))
        assert lab.moments(trainer, "idle"), "the task has no optimizer state to keep"

    recorder = Recorder(at_end={3: lambda trainer: (keep(trainer), trainer.pause_task("idle"))[0], 23: keep})
    tasks = [
        lab.small_task("idle", data_seed=1, weight_decay=0.1, max_steps=30),
        lab.small_task("busy", data_seed=2, max_steps=24),
    ]
    run = lab.train(tasks, folder, recorder=recorder)
    assert len(run.losses["busy"]) == 24
    assert run.trainer.table["idle"].step == 3
    assert len(states) == 2
    assert states[0] == states[1], "a paused task has moved"


def check_resumed_run_sees_the_same_rows(folder: Path) -> None:
    """Check that a run resumed in its third epoch continues as the uninterrupted one, to the bit."""

    tasks = [lab.small_task("a", data_seed=1, max_steps=10), lab.small_task("b", data_seed=2, seed=5, max_steps=10)]
    whole = lab.train(tasks, folder / "whole")
    lab.train(tasks, folder / "parts", recorder=stops_after(7), **SAVING)
    resumed = lab.train(tasks, folder / "parts", resume=True, **SAVING)
    for name in "ab":
        assert resumed.losses[name] == whole.losses[name][7:], f"{name} went on with other rows"
        assert lab.digest(resumed.weights(name)) == lab.digest(whole.weights(name))


# -------------------------------------------------------------- checkpoints


def check_torn_checkpoint_is_never_taken(folder: Path) -> None:
    """Check that a resume passes over a checkpoint whose file has the right size but not its content."""
    tasks = [lab.small_task("a", data_seed=1, max_steps=9)]
    halves: dict[str, torch.Tensor] = {}

    def keep(trainer: MultiTaskTrainer) -> None:
        halves.update(lab.weights(trainer, "a"))

    saving = {"save_strategy": "steps", "save_steps": 2}
    lab.train(tasks, folder, recorder=Recorder(at_end={2: keep, 4: stop}), **saving)
    newest = folder / "a" / "checkpoint-4" / WEIGHTS_NAME
    content = newest.read_bytes()
    # What a crash leaves when the name reached the disk before the data: the full size, and zeros for a tail.
    newest.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))

    trainer = lab.make_trainer(tasks, folder, recorder=None, **saving)
    trainer._opening.open(True)
    assert trainer.table["a"].step == 2, "the torn checkpoint was taken"
    assert lab.digest(lab.weights(trainer, "a")) == lab.digest(halves)


def check_interrupted_save_leaves_the_old_checkpoint(folder: Path) -> None:
    """Check that a save that dies halfway leaves the old one and nothing that looks like a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = MultiTaskPeftModel(lab.tiny_llama(), {"a": LoraConfig(r=2, target_modules=["q_proj"])}, verify=False)
    RunFolder(folder, model)
    target = folder / "checkpoint-2"

    def fill(scratch: Path) -> None:
        model.save_task("a", scratch)

    def die(scratch: Path) -> None:
        (scratch / WEIGHTS_NAME).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    storage.write_folder(target, fill, facts={"task": "a", "step": 2})
    for path in (target, folder / "checkpoint-3"):
        try:
            storage.write_folder(path, die, facts={"task": "a", "step": 2})
        except CheckpointError:
            continue
        raise AssertionError("a failed save was reported as done")
    try:
        storage.verify_folder(target, expect={"task": "a", "step": 2})
    except CheckpointError as error:
        raise AssertionError(f"the old checkpoint is torn: {error}") from error
    assert storage.numbered_folders(folder) == [2]
    assert not (folder / "checkpoint-3").exists()


# ------------------------------------------------------------------- export


def check_export_is_exactly_the_task_s(folder: Path) -> None:
    """Check, for names with a common beginning: each file holds exactly its task's tensors under PEFT's keys."""
    configs = {
        "t1": LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        "t10": LoraConfig(r=3, target_modules=["q_proj", "k_proj"]),
        "t100": LoraConfig(r=5, target_modules=["gate_proj"]),
    }
    model = MultiTaskPeftModel(lab.tiny_llama(), configs, verify=False)
    with torch.no_grad():
        for number, name in enumerate(configs, start=1):
            for parameter in model.task_parameters(name).values():
                parameter.fill_(number)
    for name in configs:
        model.save_task(name, folder / name)
        saved, own = load_file(folder / name / WEIGHTS_NAME), model.task_parameters(name)
        assert saved.keys() == own.keys(), f"{name}: {len(saved)} tensors instead of {len(own)}"
        assert all(torch.equal(saved[key], own[key]) for key in own), f"{name}: another task's tensors"
