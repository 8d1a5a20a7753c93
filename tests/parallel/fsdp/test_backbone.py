"""Frozen weights divided among real processes (FSDP2): what each holds and receives, and every type of PEFT.

What is trained in such layouts is compared with one process in `tests/parallel/test_layouts.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftType
from torch.distributed.tensor import DTensor

from peft_mux.adapters.prompt_kind import PromptKind
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.fsdp import ShardedBackbone, shard_backbone
from tests.engine import lab
from tests.engine.lab import Case
from tests.engine.processes.cases import connected, launch, values
from tests.invariants.mux_lab import rows, small_task, tiny_llama
from tests.modeling.adapters.cases import CASES
from tests.modeling.adapters.test_kinds import perturbed
from tests.packing.even_rows import even_rows
from tests.parallel.replicas import layout_cases

pytestmark = pytest.mark.distributed
SHARDED = Case(layout="<1,1>x2", sharded=True, apart=True)


def bytes_per_pass(backbone: ShardedBackbone) -> int:
    """Return the bytes of frozen weights that each of two processes receives in one forward and backward.

    A unit of weights `[K_i, ...]` over two processes brings the other shard of `ceil(K_i / 2)` rows each.
    """
    units = {id(unit) for unit in backbone.forward_units()}
    total, stack = 0, [*backbone.forward_units(), *backbone.backward_units()]
    while stack:
        module = stack.pop()
        for item in module.parameters(recurse=False):
            if isinstance(item, DTensor):
                total += -(-item.shape[0] // 2) * (item.numel() // item.shape[0]) * item.element_size()
        stack += [child for child in module.children() if id(child) not in units]
    return total


def gathered(rank: int) -> dict[str, Any]:
    """Return what a step of unequal passes brings to a process, and whether weights are freed after their layer."""
    engine = lab.Engine(SHARDED, connected(20.0))
    work, whole = engine.work(0, lab.FIRST), engine.sharded
    assert whole is not None
    read: list[torch.Tensor] = []
    layers: Any = engine.model.backbone.base_model.layers
    layers[1].mlp.register_forward_pre_hook(lambda module, _: read.append(module.down_proj.base_layer.weight))
    freed: list[bool] = []
    layers[3].register_forward_hook(lambda *_: freed.append(read[-1].untyped_storage().size() == 0))
    before = whole.num_bytes
    engine.executor.run(work)
    facts = {"received": whole.num_bytes - before, "closed form": bytes_per_pass(whole), "own": len(work.micro_batches)}
    engine.close()
    return {**facts, "freed": freed}


@pytest.mark.slow
def test_a_step_receives_the_layers_twice_and_the_ends_once_for_each_pass_of_the_process_with_most() -> None:
    found = values(launch(2, gathered))
    layer = 4 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32)  # bytes: q, o; k, v; gate, up, down; norms
    end, norm = 4 * 62 * 32, 4 * 32  # 61 tokens are padded to 62
    most = max(one["own"] for one in found)
    assert min(one["own"] for one in found) < most
    for one in found:
        assert one["closed form"] == (2 * 4 * layer + 2 * end + 2 * norm) // 2
        assert one["received"] == most * one["closed form"]
        assert one["freed"] == [True] * one["own"]


def test_a_model_whose_layers_cannot_be_told_is_refused() -> None:
    model: Any = MultiTaskPeftModel(lab.backbone("llama"), {"a": LoraConfig(target_modules=["q_proj"])}, verify=False)
    model.backbone.config.num_hidden_layers = 7
    with pytest.raises(
        UnsupportedModelError,
        match="LlamaForCausalLM must keep its 7 decoder layers in one list with shard_backbone=True",
    ):
        ShardedBackbone(model, Processes(), mesh=None)  # type: ignore[arg-type]


def bytes_moved(rank: int, folder: Path) -> tuple[int, int]:
    """Return the bytes of frozen weights that a process has of its own, and those that it moves to its device."""
    moved: list[int] = []
    to = MultiTaskPeftModel.to

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        moved.append(sum(item.nbytes for item in self.backbone.parameters() if not isinstance(item, DTensor)))
        moved.append(sum(item.to_local().nbytes for item in self.backbone.parameters() if isinstance(item, DTensor)))
        return to(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MultiTaskPeftModel, "to", noted)
        task = small_task("a", data_seed=1, max_steps=1)
        layout_cases.train(folder, layout_cases.backbone("llama"), [task], shard_backbone=True)
    rest, shards = moved
    return shards, rest


@pytest.mark.slow
def test_a_model_moves_to_a_device_when_only_its_shards_and_adapters_are_left(tmp_path: Path) -> None:
    whole = sum(item.nbytes for item in layout_cases.backbone("llama").parameters())
    for shards, rest in values(launch(2, bytes_moved, tmp_path)):
        assert 0.49 * whole <= shards <= 0.51 * whole
        assert 0 < rest < 0.25 * whole, "only adapters are left to move"


# ---------------------------------------------------------------------- types


def model_of(types: list[str]) -> MultiTaskPeftModel:
    configs = {f"{name.lower()}": CASES[PeftType[name]].make(0) for name in types}
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False)
    for name in model.tasks:
        perturbed(model.task_parameters(name), 1)
    return model.train()


def one_step(model: MultiTaskPeftModel, executor: Any, rank: int, world_size: int) -> dict[str, Any]:
    batches = []
    for number, name in enumerate(model.tasks):
        ids = [np.asarray(row["input_ids"]) for row in rows(number, 3, 4, 11)]
        batches.append(TaskBatch(name, 0, seed=1, sequences=tuple(TokenSequence(i, i, k) for k, i in enumerate(ids))))
    own = even_rows(batches, world_size)
    micro = ChunkPackingCollator().micro_batches(batches, max_tokens=200, only=own[rank])
    result = executor.run(StepWork(model.tasks, tuple(micro), {b.task: b.num_tokens for b in batches}))
    return {
        name: (float(result.losses[name]), {k: p.grad.numpy().copy() for k, p in model.task_parameters(name).items()})
        for name in model.tasks
    }


def step_sharded(rank: int, types: list[str]) -> dict[str, Any]:
    model = model_of(types)
    processes = connected(20.0)
    sync, whole = GradientSync(model, processes, is_deferred=True), shard_backbone(model, processes)
    return one_step(model, Executor(model, sync=sync, runner=whole), rank, 2)


@pytest.mark.slow
def test_two_processes_with_a_part_of_the_backbone_give_every_type_the_result_of_one() -> None:
    # Prompts are refused there.
    types = [one.name for one, kind in KINDS.items() if one is not PeftType.LORA and not isinstance(kind, PromptKind)]
    model = model_of(types)
    wanted = one_step(model, Executor(model), 0, 1)
    for part in values(launch(2, step_sharded, types)):
        for name, (loss, gradients) in wanted.items():
            assert part[name][0] == pytest.approx(loss, rel=1e-5), name
            for key, gradient in gradients.items():
                np.testing.assert_allclose(part[name][1][key], gradient, atol=1e-5, rtol=1e-4, err_msg=f"{name} {key}")
