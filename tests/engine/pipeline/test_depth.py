"""Stages make and send no gradients that no adapter in them, or below them, needs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, MultiTaskTrainingArguments
from peft_mux.engine.parallelize import register_tasks
from peft_mux.engine.pipeline import executor as pipeline
from peft_mux.engine.pipeline.links import Channel
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.pipeline.traffic import Traffic
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.engine.work import StepSums
from peft_mux.modeling.stream import Stream
from peft_mux.scheduler.pipeline.launch import BucketLoad
from peft_mux.scheduler.pipeline.template import PipelineTemplate, Slot, build_template
from tests.kernels.lora.watching import rows_left_out
from tests.modeling.adapters.alone import task
from tests.planning.cases import llama

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
NUM_LAYERS = 4
LOWEST = {"whole": 0, "second": 1, "upper": 2, "last": 3}
Gradients = dict[str, torch.Tensor]


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


def gradients_of(models: list[MultiTaskPeftModel], names: tuple[str, ...]) -> Gradients:
    return {
        f"{name} {key}": weight.grad.clone()
        for model in models
        for name in names
        for key, weight in model.task_parameters(name).items()
        if weight.grad is not None
    }


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return rows_left_out(monkeypatch)


def test_a_stage_knows_how_deep_the_tasks_lie_that_come_later(tmp_path: Path) -> None:
    model = two_stages()[1].model
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    configs = {
        name: LoraConfig(r=2, target_modules=LINEAR, layers_to_transform=[layer])
        for name, layer in {"late": 3, "absent": 1}.items()
    }
    tasks = resolve_tasks([task(name, config, 0) for name, config in configs.items()], args)
    register_tasks(model, tasks, is_whole=False, tensor_parallel=None)
    lowest = {name: model.stream.lowest_layers[model.adapter_of(name)] for name in model.tasks}
    assert lowest == {**LOWEST, "late": 3, "absent": 1}


# ------------------------------------------------------------------- messages


class Noted(Channel):
    """A channel within this process that records the rows of each message and what was expected."""

    def __init__(self) -> None:
        super().__init__(0, None, Processes(), "noted")
        self.sent: list[int] = []
        self.expected: list[int] = []

    def put(self, key: Any, tensor: torch.Tensor) -> None:
        self.sent.append(len(tensor))
        super().put(key, tensor)

    def expect(self, messages: Any) -> None:
        self.expected = [one.shape[0] for one in messages]


def template_of_one_pass() -> PipelineTemplate:
    load = BucketLoad(name="one", forward_s=(1.0, 1.0), activation_bytes=(1, 1), num_micro_batches=1)
    return build_template([load], "1f1b")


def through_two_stages(names: tuple[str, ...]) -> tuple[Gradients, Noted]:
    """Return the gradients of a pass whose stages speak by messages, and the channel of gradients."""
    stages = two_stages()
    template, slots = template_of_one_pass(), {Slot(0, 0): [batch_of(names)]}
    up, down = Noted(), Noted()
    links: list[Any] = [
        SimpleNamespace(stage=0, incoming={("B", 1): down}, outgoing={("F", 1): up}),
        SimpleNamespace(stage=1, incoming={("F", 0): up}, outgoing={("B", 0): down}),
    ]
    plan = PipelinePlan(template, (names,), ((0,),))
    with mock.patch.object(pipeline, "PipelineLinks", side_effect=links):
        executors = [pipeline.PipelineExecutor(stage, plan, Processes()) for stage in stages]
    traffics = [Traffic(link, stage, template, slots) for link, stage in zip(links, stages, strict=True)]
    forwards, backwards = zip(*template.actions, strict=True)
    for executor, traffic, action in zip(executors, traffics, forwards, strict=True):
        executor.model.prepare_pass(names)
        executor._forward(action, traffic, StepSums(executor.model, names, executor.device))
    for executor, traffic, action in reversed(list(zip(executors, traffics, backwards, strict=True))):
        executor._backward(action, traffic)
    return gradients_of([stage.model for stage in stages], names), down


@pytest.mark.parametrize(
    ("names", "rows_sent"),
    [
        pytest.param(("whole", "upper"), 24, marks=pytest.mark.slow),
        (("second", "upper", "whole"), 48),
        (("upper", "last"), 1),
    ],
    ids=str,
)
def test_stages_send_back_the_gradients_of_tasks_that_have_adapters_further_down(
    names: tuple[str, ...], rows_sent: int, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, down = through_two_stages(names)
    assert down.sent == down.expected == [rows_sent], "one row where none is needed: it confirms what was received"
    assert sum(left_out) > 0, "some product was made for some rows alone"
    left_out.clear()
    monkeypatch.setattr(StageModel, "gradient_rows", lambda stage, virtual_stage, batch: None)
    monkeypatch.setattr(Stream, "reset_adapter_tracking", lambda stream, first_layer: None)
    wanted, down = through_two_stages(names)
    assert down.sent == down.expected == [24 * len(names)]
    assert not any(left_out)
    assert found.keys() == wanted.keys()
    assert {key.split()[0] for key in found} == set(names)
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-7)


def test_a_pass_is_not_run_backward_below_all_of_its_adapters(
    left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = through_two_stages(("upper", "last"))
    assert {key.split()[0] for key in found} == {"upper", "last"}
    products = len(left_out)
    left_out.clear()
    monkeypatch.setattr(Traffic, "goes_back", lambda traffic, action, number: True)
    through_two_stages(("upper", "last"))
    assert len(left_out) == products + 1, "the queries, keys and values of the lowest adapted layer"
