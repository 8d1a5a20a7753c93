"""Stages make and send no gradients that no adapter in them, or below them, needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, MultiTaskTrainingArguments
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.parallel.parallelize import register_parts
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel
from tests.modeling.adapters.alone import task
from tests.planning.cases import llama

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_LAYERS = 4
LOWEST = {"whole": 0, "second": 1, "upper": 2, "last": 3}


def configs() -> dict[str, LoraConfig]:
    layers = {name: list(range(lowest, NUM_LAYERS)) for name, lowest in LOWEST.items()}
    return {name: LoraConfig(r=2, target_modules=LINEAR, layers_to_transform=own) for name, own in layers.items()}


def whole_model() -> MultiTaskPeftModel:
    """Return a model whose factors B are not zero; the same one each time."""
    torch.manual_seed(0)
    model = MultiTaskPeftModel(llama(NUM_LAYERS), configs(), verify=False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in model.tasks:
            for _, weight in sorted(model.task_parameters(name).items()):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model.train()


def batch_of(names: tuple[str, ...]) -> Any:
    rng = np.random.default_rng(0)
    rows = [{"task": name, "input_ids": rng.integers(1, 90, size=12).tolist()} for name in names for _ in range(2)]
    return ChunkPackingCollator()(rows)


def two_stages() -> list[StageModel]:
    return [StageModel(whole_model(), StageLayout.of(NUM_LAYERS, 2), stage) for stage in range(2)]


def test_a_stage_knows_how_deep_the_tasks_lie_that_come_later(tmp_path: Path) -> None:
    model = two_stages()[1].model
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    configs = {
        name: LoraConfig(r=2, target_modules=LINEAR, layers_to_transform=[layer])
        for name, layer in {"late": 3, "absent": 1}.items()
    }
    tasks = resolve_tasks([task(name, config, 0) for name, config in configs.items()], args)
    register_parts(model, tasks, None)
    lowest = {name: model.stream.lowest_layers[model.adapter_of(name)] for name in model.tasks}
    assert lowest == {**LOWEST, "late": 3, "absent": 1}


@pytest.mark.parametrize(
    ("names", "num_rows"),
    [
        (("whole", "upper"), 24),
        (("second", "upper", "whole"), 48),
        (("upper", "last"), 0),
        (("whole", "second"), None),
    ],
    ids=str,
)
def test_a_stage_sends_back_the_gradients_of_tasks_that_have_adapters_further_down(
    names: tuple[str, ...], num_rows: int | None
) -> None:
    for stage in two_stages():
        rows = stage.gradient_rows(1, batch_of(names))
        assert (None if rows is None else sum(own.end - own.start for own in rows)) == num_rows
