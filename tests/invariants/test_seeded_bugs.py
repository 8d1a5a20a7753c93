"""Proof that the invariants can fail: bugs that systems of this kind have had, each put in and each found.

Every check passes on the product (here, or in the test that owns it) and must raise `AssertionError` on the
bug.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from peft_mux import storage
from peft_mux.data.dataset import TaskLoader
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.errors import CheckpointError
from peft_mux.kernels.lora.reference import LinearSlice
from peft_mux.modeling.adapters import files as adapters
from peft_mux.modeling.adapters.lora import layer as layers
from peft_mux.task import TaskStatus
from tests.invariants import mux_checks as checks

Bug = Callable[[pytest.MonkeyPatch], None]
Check = Callable[[Path], Any]


def clip_all_tasks_together(patch: pytest.MonkeyPatch) -> None:
    """One gradient norm over all tasks: a task with large gradients shrinks the steps of the others."""
    apply = TaskTable.apply

    def apply_with_one_norm(table: TaskTable, result: Any) -> None:
        optimizers = [run.optimizer for run in table.running if run.optimizer is not None]
        gradients = [p.grad for optimizer in optimizers for p in optimizer.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        patch.setattr(TaskOptimizer, "gradient_norm", lambda optimizer: norm)
        apply(table, result)

    patch.setattr(TaskTable, "apply", apply_with_one_norm)


def multiply_by_masks(patch: pytest.MonkeyPatch) -> None:
    """Every adapter on every row, times 0 or 1: 0 * NaN is NaN, so one task's NaN reaches all tasks."""

    def masked_lora(
        x_TD: torch.Tensor, slices: Sequence[LinearSlice], places: torch.Tensor, needed: Any = None
    ) -> tuple[torch.Tensor, ...]:
        ys = []
        for part in slices:
            assert part.weight_KD is not None
            y = F.linear(x_TD, part.weight_KD, part.bias_K)
            for segment, (a, b) in zip(part.segments, part.factors, strict=True):
                mask = torch.zeros(len(x_TD), 1)
                mask[segment.start : segment.end] = 1.0
                y = y + mask * (segment.scale * (x_TD @ a.t() @ b.t()))
            ys.append(y)
        return tuple(ys)

    patch.setattr(layers, "grouped_lora_slices", masked_lora)


def step_idle_tasks_too(patch: pytest.MonkeyPatch) -> None:
    """One optimizer over all tasks: momentum and weight decay move a task that had no gradient."""
    apply = TaskTable.apply

    def apply_to_all(table: TaskTable, result: Any) -> None:
        apply(table, result)
        for run in table:
            if run.status is TaskStatus.PAUSED and run.optimizer is not None:
                for parameter in run.optimizer.parameters:
                    parameter.grad = torch.zeros_like(parameter)
                run.optimizer.optimizer.step()

    patch.setattr(TaskTable, "apply", apply_to_all)


def begin_with_the_first_epoch_again(patch: pytest.MonkeyPatch) -> None:
    """Epochs counted from the start of the process: a resumed run repeats the order of the first epoch."""
    plain = TaskLoader.batch

    def batch(loader: TaskLoader, step: int) -> TaskBatch:
        epoch, place = divmod(step, loader.steps_per_epoch)
        first = vars(loader).setdefault("first_epoch", epoch)
        rows = loader.order(epoch - first)[place * loader.batch_size : (place + 1) * loader.batch_size]
        return TaskBatch(loader.task, step, loader.seed, tuple(loader.dataset[int(row)] for row in rows))

    def sample_batches(loader: TaskLoader, num_batches: int) -> list[TaskBatch]:
        return [plain(loader, step) for step in range(min(num_batches, loader.steps_per_epoch))]

    patch.setattr(TaskLoader, "batch", batch)
    # Plans read the first batches of the first epoch, in a resumed run too.
    patch.setattr(TaskLoader, "sample_batches", sample_batches)


def trust_every_checkpoint(patch: pytest.MonkeyPatch) -> None:
    """The manifest is not checked: a file that exists counts as complete."""
    patch.setattr(
        storage, "verify_folder", lambda folder, **_: storage.unsealed_json(folder / "manifest.json")["facts"]
    )


def write_in_place(patch: pytest.MonkeyPatch) -> None:
    """No scratch folder, no flush and no rename: the old checkpoint is gone before the new one is there."""

    def write_folder(final: Path, fill: Callable[[Path], None], *, facts: Mapping[str, Any]) -> None:
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        (final / "manifest.json").write_bytes(storage.sealed_json({"facts": dict(facts), "files": {}}))
        try:
            fill(final)
        except OSError as error:
            raise CheckpointError(str(error)) from error

    patch.setattr(storage, "write_folder", write_folder)


def export_by_prefix(patch: pytest.MonkeyPatch) -> None:
    """Tensors selected by a prefix of the task's name: t1 takes tensors of t10."""

    def adapter_state(model: Any, adapter: str) -> dict[str, torch.Tensor]:
        names = {model.adapter_of(name): name for name in model.tasks}
        picked = {}
        for key, value in model.state_dict().items():
            owners = [part for part in key.split(".") if part in names]
            if owners and names[owners[0]].startswith(names[adapter]):
                picked[key.replace(f".{owners[0]}", "")] = value
        return picked

    patch.setattr(adapters, "adapter_state", adapter_state)


BUGS: list[tuple[Bug, Check, str]] = [
    (clip_all_tasks_together, checks.check_co_tenants_change_no_bit, "of a differ"),
    (multiply_by_masks, checks.check_poison_stays_with_its_task, "of a differ"),
    (step_idle_tasks_too, checks.check_paused_task_keeps_every_bit, "a paused task has moved"),
    (
        begin_with_the_first_epoch_again,
        checks.check_resumed_run_sees_the_same_rows,
        "went on with other rows",
    ),
    (trust_every_checkpoint, checks.check_torn_checkpoint_is_never_taken, "the torn checkpoint was taken"),
    (write_in_place, checks.check_interrupted_save_leaves_the_old_checkpoint, "the old checkpoint is torn"),
    (export_by_prefix, checks.check_export_is_exactly_the_task_s, "t1: .* tensors"),
]
"""Each bug, the check that finds it, and what that check says."""
# The first three checks pass in test_isolation.py; the others belong to no other test of this folder.
OWN_CHECKS = [check for _, check, _ in BUGS[3:]]


@pytest.mark.parametrize("check", OWN_CHECKS, ids=lambda check: check.__name__)
def test_the_check_passes_on_the_product(check: Check, tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(("bug", "check", "says"), BUGS, ids=[bug.__name__ for bug, _, _ in BUGS])
def test_the_check_finds_the_bug(
    bug: Bug, check: Check, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=says):
        check(tmp_path)


def test_masks_that_multiply_are_right_as_long_as_nothing_is_poisoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the bug above would be found because it is wrong, not because it passes poison on.
    multiply_by_masks(monkeypatch)
    checks.check_co_tenants_change_no_bit(tmp_path)
