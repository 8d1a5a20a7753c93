"""The pipeline engine in one process: what stages hold, run, send, free and refuse.

Stages in real processes are in `tests/parallel/test_layouts.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from transformers import OlmoeConfig, OlmoeForCausalLM

from peft_mux.checkpoint.task_state import join_state, split_state
from peft_mux.engine.processes import Processes
from peft_mux.errors import CheckpointError, ConfigError, PlanError, UnsupportedModelError
from peft_mux.modeling.backbone.digests import weight_digests
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.pipeline import links
from peft_mux.parallel.pipeline.executor import PipelineExecutor
from peft_mux.parallel.pipeline.pipeline_plan import PipelinePlan
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel, is_converted, load_stage
from peft_mux.parallel.task_states import merge_states
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import Action, Slot
from tests.engine import lab
from tests.engine.lab import Case, plan_of
from tests.parallel.test_layouts import LONG, check_states

LAYOUT = StageLayout.of(lab.NUM_LAYERS, 2)
SEEDS = {name: index for index, name in enumerate(lab.FIRST)}


def stage_of_one(num_chunks: int = 1) -> StageModel:
    return StageModel(lab.mux_model(), StageLayout.of(lab.NUM_LAYERS, 1, num_chunks=num_chunks), 0)


# ------------------------------------------------------------------- training


def test_virtual_stages_of_one_process_train_as_the_whole_model(tmp_path: Path) -> None:
    case = Case("qwen3", "<1,1>", schedule="mux", num_chunks=3, **LONG)
    found, one = lab.train(case, tmp_path), lab.train(case.alone, tmp_path)
    assert found.held_bytes == 0
    for task, losses in one.losses.items():
        assert found.losses[task] == pytest.approx(losses, rel=1e-6), task
        assert found.norms[task] == pytest.approx(one.norms[task], rel=1e-5), task
        check_states(found.states[task], one.states[task], task, bound=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_by_name(off: Callable[[], Any]) -> None:
    executor = PipelineExecutor(stage_of_one(3), plan_of(1, "mux", 3), Processes())
    work = lab.step_work()
    for step in (lambda: executor.run(work), lambda: executor.run_window([work], lambda *_: ())):
        with (
            off(),
            pytest.raises(
                ConfigError,
                match=r"train must be called outside torch\.no_grad\(\) and torch\.inference_mode\(\),",
            ),
        ):
            step()


class SavedBytes:
    """Counts what autograd holds for backward passes."""

    def __init__(self) -> None:
        self.held = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        return _Saved(tensor, self)


class _Saved:
    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter, self._bytes = tensor.detach(), counter, tensor.numel() * tensor.element_size()
        counter.held += self._bytes

    def __del__(self) -> None:
        self._counter.held -= self._bytes


def test_a_stage_runs_its_list_and_holds_the_bytes_of_the_micro_batches_in_flight_and_no_more() -> None:
    executor = PipelineExecutor(stage_of_one(3), plan_of(1, "mux", 3), Processes())
    saved, held, expected, sizes = SavedBytes(), [0], [0], {}

    def watch(action: Action) -> None:
        place = action.bucket, action.micro_batch, action.chunk
        if action.kind == "F":
            sizes[place] = saved.held - held[-1]
        expected.append(expected[-1] + (sizes[place] if action.kind == "F" else -sizes[place]))
        held.append(saved.held)

    executor.on_action = watch
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda one: one.tensor):
        executor.run(lab.step_work())
    assert held == expected
    assert min(sizes.values()) >= 0 < max(held)
    row = executor.plan.template.actions[0]
    assert [span.action for span in executor.spans] == list(row)
    in_flight = list(itertools.accumulate(1 if action.kind == "F" else -1 for action in row))
    assert executor.most_in_flight == max(in_flight) > 1


def test_a_step_without_some_tasks_leaves_their_micro_batches_empty() -> None:
    executor = PipelineExecutor(stage_of_one(), plan_of(1), Processes())
    result = executor.run(lab.step_work(tasks=["d"]))
    assert result.losses.keys() == {"d"}
    assert (result.norms, executor.sync.num_bytes) == (None, 0), "without a sync nothing is summed"
    assert executor.run(lab.step_work(1, [])).losses == {}


@pytest.mark.parametrize(("device", "num_ahead"), [("cpu", 1), ("meta", 0)])
def test_a_receive_is_posted_ahead_on_a_cpu_alone_as_it_holds_up_other_devices(
    device: str, num_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[torch.Tensor] = []
    work = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(links.dist, "irecv", lambda tensor, **_: posted.append(tensor) or work)
    channel = links.Channel(1, object(), Processes(0, 2, device=torch.device(device)), "hidden states")
    channel.expect([links.Expected(number, torch.Size([4]), torch.float32) for number in range(3)])
    assert len(posted) == num_ahead
    for number in (1, 0, 2):  # in another order than they are sent
        channel.take(number)
        assert len(posted) == min(3, max(number, 1) + 1 + num_ahead)


# --------------------------------------------------------------------- stages


def test_a_layout_follows_the_way_of_a_micro_batch() -> None:
    layout = StageLayout.of(7, 2, num_chunks=2)
    assert [list(layout.layers_of(place)) for place in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert layout.virtual_stages_of(1) == (1, 3)
    with pytest.raises(
        ValueError,
        match=r"layers_per_stage must be at least 2 in each stage, one layer for each of its chunks, got",
    ):
        StageLayout.of(7, 4, num_chunks=2)


@pytest.mark.parametrize("kind", ["qwen3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("gpt2", "opt"))])
def test_a_stage_reads_its_own_weights_alone_and_draws_the_adapters_of_the_whole_model(
    kind: str, tmp_path: Path
) -> None:
    backbone = lab.backbone(kind)
    backbone.save_pretrained(tmp_path, max_shard_size="20KB")
    configs, digests = lab.adapters(backbone), {}
    for number in (0, 1):
        whole = MultiTaskPeftModel(lab.backbone(kind), configs, seeds=SEEDS, verify=False)
        expected = StageModel(whole, LAYOUT, number).model.backbone.state_dict()
        if number == 1:
            others = [path for path in sorted(tmp_path.glob("*.safetensors")) if holds_only_layers(path, range(2))]
            assert others
            for path in others:
                path.unlink()
            with pytest.raises((CheckpointError, FileNotFoundError)):
                load_stage(tmp_path, configs, LAYOUT, 0, seeds=SEEDS)
        loaded = load_stage(tmp_path, configs, LAYOUT, number, seeds=SEEDS).model.backbone
        found = loaded.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        digests |= weight_digests(loaded)
    assert digests == weight_digests(backbone)


def holds_only_layers(path: Path, layers: range) -> bool:
    with safe_open(path, framework="pt") as file:
        return all(
            any(f".{kind}.{layer}." in f".{key}" for kind in ("layers", "h") for layer in layers) for key in file.keys()
        )


def test_buffers_that_are_saved_are_read_as_well(tmp_path: Path) -> None:
    backbone = lab.backbone("llama")
    backbone.model.layers[3].register_buffer("balance", torch.arange(3.0))
    backbone.save_pretrained(tmp_path)
    original = type(backbone.model.layers[3]).__init__

    def with_buffer(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.register_buffer("balance", torch.zeros(3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backbone.model.layers[3]), "__init__", with_buffer)
        stage = load_stage(tmp_path, lab.adapters(backbone), LAYOUT, 1, seeds=SEEDS)
    # Layers 0 to 2 have none in the files; theirs stay as they were made.
    assert stage.model.backbone.model.layers[3].balance.tolist() == [0.0, 1.0, 2.0]


def test_folders_whose_tensors_transformers_converts_are_reported(tmp_path: Path) -> None:
    for kind, converts in (("mixtral", True), ("gpt_neox", True), ("phi3", False)):
        backbone = lab.backbone(kind)
        backbone.save_pretrained(tmp_path / kind)
        assert is_converted(tmp_path / kind, backbone) is converts


def test_a_folder_without_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    backbone = lab.backbone("llama")
    backbone.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        load_stage(tmp_path, lab.adapters(backbone), LAYOUT, 0)


def test_an_architecture_that_cannot_be_cut_is_refused_by_name() -> None:
    config = OlmoeConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None)
    configs = {"a": LoraConfig(target_modules=["q_proj"])}
    model = MultiTaskPeftModel(OlmoeForCausalLM(config), configs, verify=False)
    with pytest.raises(
        UnsupportedModelError,
        match=(
            r"OlmoeForCausalLM \(model type 'olmoe'\) cannot be cut into stages or shards; the model types that can "
            r"are apertus, arcee,.*llama.*shard_backbone=True"
        ),
    ):
        StageModel(model, StageLayout.of(2, 2), 0)


# ------------------------------------------------------------ plans, messages


def test_passes_are_spread_evenly_over_the_micro_batches_of_their_bucket() -> None:
    work = lab.step_work()
    slots = plan_of(2).slots(work.micro_batches)
    counts = {slot: [batch.task_names for batch in batches] for slot, batches in slots.items()}
    assert sum(map(len, counts.values())) == len(work.micro_batches)
    assert set(counts) == {Slot(0, k) for k in range(4)} | {Slot(1, k) for k in range(3)}
    for bucket, htasks in enumerate((("abc"), ("de"))):
        for number in range(lab.NUM_SLOTS[bucket]):
            assert all(set(names) <= set(htasks) for names in counts[Slot(bucket, number)])
    with pytest.raises(PlanError, match="Dispatch the step with the plan"):
        PipelinePlan(plan_of(2).template, (("a",), ("b",), ("c",)), lab.BUCKETS).slots(work.micro_batches)


def test_windows_pay_where_buckets_can_fill_the_bubbles_of_one_another() -> None:
    plan, loads = plan_of(2, "mux"), lab.loads_of(2)[:1]
    assert plan.gains_by_windows
    assert not replace(plan, loads=()).gains_by_windows, "nothing is predicted"
    assert not PipelinePlan(build_template(loads, "mux"), (("a",),), ((0,),), tuple(loads)).gains_by_windows


# --------------------------------------------------------------------- states


def step_once(model: MultiTaskPeftModel, optimizer: Any) -> None:
    generator = torch.Generator().manual_seed(5)
    model.registry.slab_of("a").bind_gradients()
    for _, parameter in sorted(model.task_parameters("a").items()):
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer.step(optimizer.gradient_norm())


@pytest.mark.parametrize("optim", ["adamw_torch", pytest.param("adafactor", marks=pytest.mark.slow)])
def test_a_state_by_name_continues_exactly_in_another_layout_with_any_optimizer(optim: str, tmp_path: Path) -> None:
    model, other = lab.mux_model(), lab.mux_model()
    optimizer, resumed = (lab.optimizer_of(one, "a", tmp_path, optim=optim) for one in (model, other))
    step_once(model, optimizer)
    state, parts = split_state(model.task_parameters("a"), optimizer), []
    for number in range(2):
        stage = StageModel(lab.mux_model(), LAYOUT, number).model
        own = lab.optimizer_of(stage, "a", tmp_path, optim=optim)
        join_state(state, stage.task_parameters("a"), own)
        parts.append(split_state(stage.task_parameters("a"), own))
    join_state(merge_states(parts), other.task_parameters("a"), resumed)
    for one, own in ((model, optimizer), (other, resumed)):
        step_once(one, own)
    for key, parameter in model.task_parameters("a").items():
        assert torch.equal(parameter, other.task_parameters("a")[key]), key
    del state.weights[next(iter(state.weights))]
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj\.lora_A\.weight must be a tensor of"):
        join_state(state, other.task_parameters("a"), resumed)
