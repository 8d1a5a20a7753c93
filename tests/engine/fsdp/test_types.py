"""Every type that a sharded backbone takes (FSDP2): two processes give the result of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from peft import PeftType

from peft_mux import MultiTaskPeftModel
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from tests.engine.fsdp import cases as fsdp
from tests.engine.processes.cases import launch, values
from tests.invariants.mux_lab import rows, tiny_llama
from tests.modeling.adapters.cases import CASES
from tests.modeling.adapters.test_kinds import perturbed
from tests.packing.even_rows import even_rows

pytestmark = pytest.mark.distributed


def mux_model(types: list[str]) -> MultiTaskPeftModel:
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
    model = mux_model(types)
    executor, _ = fsdp.make_executor(model, rank, 2)
    return one_step(model, executor, rank, 2)


@pytest.mark.slow
def test_two_processes_with_a_part_of_the_backbone_give_every_type_the_result_of_one() -> None:
    # Prompts are refused there.
    types = [one.name for one, kind in KINDS.items() if one is not PeftType.LORA and not isinstance(kind, PromptKind)]
    model = mux_model(types)
    wanted = one_step(model, Executor(model), 0, 1)
    for part in values(launch(2, step_sharded, types)):
        for name, (loss, gradients) in wanted.items():
            assert part[name][0] == pytest.approx(loss, rel=1e-5), name
            for key, gradient in gradients.items():
                np.testing.assert_allclose(part[name][1][key], gradient, atol=1e-5, rtol=1e-4, err_msg=f"{name} {key}")
