"""Every type that stages take: two stages give what the whole model gives, and begin with the same adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftType

from peft_mux import MultiTaskPeftModel, MultiTaskTrainingArguments
from peft_mux.data.batch import MuxBatch
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.modeling.adapters.files import adapter_state, saved_key
from peft_mux.modeling.adapters.kind import KINDS, Category
from peft_mux.parallel.layout import divided_kind_faults
from peft_mux.parallel.parallelize import register_parts
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel, load_stage
from peft_mux.scheduler.parallel_layout import ParallelLayout
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import task
from tests.modeling.adapters.cases import CASES
from tests.modeling.adapters.test_kinds import packed, perturbed

LAYOUT = StageLayout.of(2, 2)


def staged_types() -> list[PeftType]:
    stages = ParallelLayout.of(2, pp=2)
    sliced = (Category.SLICED, Category.WEIGHT_SPACE)
    return [
        one
        for one, kind in KINDS.items()
        if kind.entry.category in sliced and not divided_kind_faults(kind, stages, "a")
    ]


def configs() -> dict[str, PeftConfig]:
    names = "abcdefghijklmnopqrstuvwxyz"
    return {names[number]: CASES[one].make(0) for number, one in enumerate(staged_types())}


def mux_model() -> MultiTaskPeftModel:
    seeds = {name: ord(name) for name in configs()}
    model = MultiTaskPeftModel(tiny_llama(), configs(), seeds=seeds, verify=False)
    for name in model.tasks:
        perturbed(model.task_parameters(name), ord(name))
    return model


def passed(stages: list[StageModel], batch: MuxBatch) -> torch.Tensor:
    for stage in stages:
        stage.model.prepare_pass(batch.task_names)
    hidden = stages[0].forward(0, batch, None).output
    received = hidden.detach().requires_grad_()
    losses = stages[1].forward(1, batch, received).output
    losses.sum().backward()
    hidden.backward(received.grad)
    return losses


def test_types_that_train_on_stages_have_no_more_in_their_files_than_the_weights_that_stages_gather() -> None:
    assert len(staged_types()) >= 10
    model = mux_model()
    for name in model.tasks:
        keys = adapter_state(model, model.adapter_of(name)).keys()
        assert keys == {saved_key(key) for key in model.task_parameters(name)}, name


def test_two_stages_give_the_losses_and_gradients_of_the_whole_model_to_every_type() -> None:
    whole, batch = mux_model(), packed(*configs())[0]
    wanted = whole(batch).losses
    wanted.sum().backward()
    stages = [StageModel(mux_model(), LAYOUT, number) for number in range(2)]
    assert passed(stages, batch).tolist() == pytest.approx(wanted.tolist(), rel=1e-6)
    for name in whole.tasks:
        held: dict[str, Any] = {}
        for stage in stages:
            held |= stage.model.task_parameters(name)
        assert held.keys() == whole.task_parameters(name).keys()
        for key, parameter in whole.task_parameters(name).items():
            assert relative(held[key].grad, parameter.grad) <= 1e-5, f"{whole.peft_config} {key}"


@pytest.mark.slow
def test_a_stage_draws_the_adapters_of_the_whole_model_from_a_folder_and_when_tasks_join(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    seeds = {name: ord(name) for name in configs()}
    whole = MultiTaskPeftModel(tiny_llama(), configs(), seeds=seeds, verify=False)
    joined = StageModel(
        MultiTaskPeftModel(tiny_llama(), {"z": CASES[PeftType.LORA].make(0)}, verify=False), LAYOUT, 1
    ).model
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    tasks = resolve_tasks([task(name, config, 0, seed=seeds[name]) for name, config in configs().items()], args)
    register_parts(joined, tasks, None)
    stages = [load_stage(tmp_path, configs(), LAYOUT, number, seeds=seeds).model for number in range(2)]
    for model, layer in ((stages[0], 0), (stages[1], 1), (joined, 1)):
        for name in whole.tasks:
            own = model.task_parameters(name)
            assert own
            assert all(f".layers.{layer}." in key for key in own)
            assert all(torch.equal(item, whole.task_parameters(name)[key]) for key, item in own.items()), name
