"""Profiles are measured on the package's own paths, stored by key, and bytes kept for backward are counted exactly."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.kernels.attention import MAX_HEAD_DIM
from peft_mux.kernels.cross_entropy.linear import block_rows
from peft_mux.kernels.lora.tables import MAX_JOINT_RANK, SegmentTables
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives import heads
from peft_mux.planning.model_shape import model_shape
from peft_mux.planning.profiling.activation_bytes import _COUNTED, _SavedStorages, count_activation_bytes_per_token
from peft_mux.planning.profiling.backbone import Stopwatch, _identity, _measure, profile_backbone
from peft_mux.planning.profiling.subject import RANKS, Subject
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.loads import (
    _MAX_JOINT_RANK,
    AdapterLoad,
    ModelShape,
    TaskLoad,
    loss_block_rows,
    weight_gradient_bytes,
)
from peft_mux.scheduler.costs.memory import activation_bytes_per_token
from peft_mux.scheduler.costs.profile import EAGER, SHORT_ROW_CHANNELS, Profile, analytic_profile, profile_text
from peft_mux.scheduler.plan import Link

LENGTHS = [40, 17, 60, 33]
CPU, FP32, BF16 = torch.device("cpu"), torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _nothing_is_counted_yet() -> None:
    _COUNTED.clear()


def a_backbone(num_layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=num_layers,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=211,
        max_position_embeddings=256,
        pad_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def a_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    # With a pad token, which transformers looks for where no attention mask is given.
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 211, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))  # type: ignore[arg-type]


def lora(rank: int, targets: str | list[str] = "all-linear") -> LoraConfig:
    return LoraConfig(r=rank, target_modules=targets, lora_dropout=0.0)


def a_model(backbone: nn.Module | None = None) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(
        backbone or a_backbone(), {"a": lora(8), "b": lora(4, ["q_proj", "v_proj"])}, verify=False
    )


def profiled(backbone: nn.Module, **options: Any) -> Profile:
    return profile_backbone(backbone, **{"device": "cpu", "dtype": FP32, "budget_s": 0.5, **options})


@pytest.fixture(scope="module")
def measured() -> Profile:
    # By the time of this process alone, because a busy machine would drown small parts in noise.
    return profiled(a_backbone(), budget_s=2.0, timer=time.process_time)


# -------------------------------------------------------------------- profile


def test_a_measured_profile_says_so_and_every_part_takes_time(measured: Profile) -> None:
    assert measured.source == "measured"
    parts = (measured.layer, measured.attention, measured.head, measured.embedding)
    # No time is compared with another: what else the machine does at the moment decides that, too.
    assert all(part(tokens) > 0 for part in parts for tokens in (16, 2048))
    assert all(measured.optimizer(parameters) > 0 for parameters in (10_000, 4_000_000))
    assert 0 < measured.forward_fraction < 1


def test_adapters_are_measured_for_every_rank_and_every_width_of_the_backbone(measured: Profile) -> None:
    assert measured.adapter.ranks == RANKS
    # q, k and v are computed together and count at their mean width: (128 + 96 + 96) / 3.
    assert measured.adapter.widths == pytest.approx((320 / 3, 128, 160))
    assert measured.adapter(4, 160, 16) >= 0
    assert measured.adapter(64, 160, 1024) > 0
    assert measured.utilization(8, 128, np.array([16, 1024]), grows=False) == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_a_stored_profile_is_read_again_and_measured_again_when_asked_or_damaged_or_of_other_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = a_backbone(1)
    first = profiled(backbone, folder=tmp_path)
    assert [path.stem for path in tmp_path.iterdir()] == [first.key]
    counted: list[int] = []
    monkeypatch.setattr(
        "peft_mux.planning.profiling.backbone._measure", lambda *given: counted.append(1) or _measure(*given)
    )
    assert profiled(backbone, folder=tmp_path) == first
    slow, fast = Link(2e-5, 1e9), Link(1e-5, 2e9)
    linked, again = (profiled(backbone, folder=tmp_path, link=link) for link in (slow, None))
    assert linked == again == replace(first, link=slow), "stored with the link"
    assert profiled(backbone, folder=tmp_path, link=fast).link == fast
    assert counted == []
    refreshed = profiled(backbone, folder=tmp_path, refresh=True)
    path = tmp_path / f"{first.key}.json"
    other = {**json.loads(refreshed.to_json()), "versions": [["torch", "0.1"]]}
    for text in ("{", json.dumps(other)):
        path.write_text(text, encoding="utf-8")
        measured_again = profiled(backbone, folder=tmp_path)
        assert Profile.from_json(path.read_text(encoding="utf-8")) == measured_again
    assert counted == [1, 1, 1]
    with pytest.raises(ValueError, match="budget_s must be more than 0, got 0"):
        profiled(backbone, budget_s=0)
    names = [_identity(a_backbone(layers), CPU, dtype) for layers, dtype in ((1, FP32), (2, FP32), (1, BF16))]
    assert len({str(own) for own in names}) == 3, "other shapes and dtypes have other keys"


def test_profiling_leaves_the_given_model_alone_and_needs_no_weights(measured: Profile) -> None:
    model = a_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention, gradients = model.backbone.config._attn_implementation, [p.grad for p in model.parameters()]
    profiled(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.backbone.config._attn_implementation == attention
    assert [p.grad for p in model.parameters()] == gradients
    with torch.device("meta"):
        described = a_backbone()
    profile = profiled(described)
    assert profile.key == measured.key
    assert profile.layer(256) > 0


# ---------------------------------------------------------------- stopwatch


def test_the_clock_warms_up_and_takes_medians_of_at_least_two() -> None:
    ticks = iter([0.0, 9.0, 10.0, 13.0, 20.0, 21.0])  # warm-up of 9 s, then 3 s and 1 s
    stopwatch = Stopwatch(CPU, 1.0, timer=lambda: next(ticks))
    assert stopwatch.measure(lambda: None, share=0.0) == [2.0]
    calls: list[str] = []
    Stopwatch(CPU, 1.0).measure(lambda: calls.append("a"), lambda: calls.append("b"), share=0.0)
    assert calls == ["a", "b"] * 3, "functions that are compared are taken in turns"


class SimulatedCard:
    """Clocks of a host that launches and of a device that computes what was launched."""

    def __init__(self) -> None:
        self.host_s = self.device_s = 0.0

    def launch(self, host_s: float, device_s: float) -> None:
        self.host_s += host_s
        self.device_s = max(self.host_s, self.device_s) + device_s

    def synchronize(self, device: object) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def event(self, *, enable_timing: bool) -> Any:
        made: Any = SimpleNamespace(at_s=0.0)
        made.record = lambda: setattr(made, "at_s", max(self.host_s, self.device_s))
        made.elapsed_time = lambda later: 1000 * (later.at_s - made.at_s)
        return made


def test_a_gpu_is_timed_without_the_host_that_launches_and_the_host_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    card = SimulatedCard()
    monkeypatch.setattr(torch.cuda, "Event", card.event)
    monkeypatch.setattr(torch.cuda, "synchronize", card.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: card.launch(0.0, cycles / 2e9))
    stopwatch = Stopwatch(torch.device("cuda"), 60.0, timer=lambda: card.host_s, wall=lambda: card.host_s)

    def run() -> None:
        for _ in range(50):
            card.launch(1e-4, 2e-5)

    assert stopwatch.measure(run, share=0.01) == pytest.approx([50 * 2e-5])
    assert stopwatch.measure(run, share=0.01, is_on_device=False) == pytest.approx([50 * 1e-4 + 2e-5])
    assert stopwatch.host_s(run) == pytest.approx(50 * 1e-4)
    assert Stopwatch(CPU, 1.0).host_s(run) == 0.0


def test_a_slow_device_is_measured_up_to_smaller_sizes_but_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def work(tokens: float) -> None:
        """Pretend to take a millisecond for every token; nothing else takes time."""
        now_s[0] += 1e-3 * tokens

    def loss(hidden: torch.Tensor, *others: object) -> torch.Tensor:
        work(len(hidden))
        return hidden.sum(1)

    monkeypatch.setattr("peft_mux.planning.profiling.backbone.linear_cross_entropy", loss)
    for name, runner in {
        "layers_runner": lambda self, tokens, **how: lambda: work(4 * tokens),
        "pass_runner": lambda self, lengths, names: lambda: work(sum(lengths)),
        "attention_runner": lambda self, lengths: lambda: work(sum(n * n for n in lengths) / 64),
        "group_runner": lambda self, group, batch, x, **how: lambda: work(batch.num_tokens),
        "update_runner": lambda self, count: lambda: work(count / 500),
    }.items():
        monkeypatch.setattr(Subject, name, runner)
    subject = Subject(a_backbone(4), device=CPU, dtype=FP32)
    stopwatch = Stopwatch(CPU, 60.0, timer=lambda: now_s[0], wall=lambda: now_s[0])
    profile = _measure(subject, stopwatch, _identity(a_backbone(4), CPU, FP32))
    assert now_s[0] <= 60
    assert profile.reach["adapter"] == 64
    assert profile.reach["optimizer"] < 4_000_000
    assert f"{profile.reach['adapter']:,.0f} of an adapter" in profile_text(profile)


# --------------------------------------------------------------------- memory


def really_kept_bytes(model: MultiTaskPeftModel, autocast: torch.dtype | None = None) -> int:
    """Count what a real forward saves; of weights that autocast has cast, nothing."""
    names = [model.tasks[number % len(model.tasks)] for number in range(len(LENGTHS))]
    rows = [{"task": name, "input_ids": [1] * length} for name, length in zip(names, LENGTHS, strict=True)]
    batch = ChunkPackingCollator()(rows)
    model.train()
    kept = _SavedStorages(model)
    weight_shapes = {tuple(p.shape) for p in model.parameters()} | {tuple(p.t().shape) for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        is_cast_weight = autocast is not None and tensor.dtype is autocast and tuple(tensor.shape) in weight_shapes
        return tensor if is_cast_weight else kept.keep(tensor)

    precision = torch.autocast("cpu", dtype=autocast, enabled=autocast is not None)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with precision, hooks, model.multiplexing(batch):
        hidden_TD = model.hidden_states(batch)
        heads.target_losses(hidden_TD, batch, model)
    return kept.num_bytes


def a_gemma() -> Gemma2ForCausalLM:
    """Return a model whose layers are of two kinds by turns, with attention as it is loaded by default."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "vocab_size": 97, "head_dim": 8}
    config = Gemma2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=None)  # type: ignore[arg-type]
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("backbone", [lambda: a_backbone(num_layers=7), a_gemma], ids=["llama", "gemma2"])
def test_layers_that_are_equal_are_counted_as_those_that_are_run(
    backbone: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(backbone())
    counted = count_activation_bytes_per_token(model, LENGTHS)
    monkeypatch.setattr("peft_mux.planning.profiling.activation_bytes.num_telling_layers", len)
    _COUNTED.clear()
    assert counted == count_activation_bytes_per_token(model, LENGTHS)


def test_counting_neither_needs_weights_nor_changes_the_model() -> None:
    model = a_model()
    with torch.device("meta"):
        described = a_model(a_backbone())
    described.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert count_activation_bytes_per_token(described, LENGTHS) == count_activation_bytes_per_token(model, LENGTHS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not described.training

    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize(("architecture", "dtype"), [("llama", FP32), ("gpt2", BF16)])
def test_bytes_counted_on_a_description_are_those_that_a_real_pass_keeps_under_autocast_and_without(
    architecture: str, dtype: torch.dtype
) -> None:
    backbone = (a_backbone() if architecture == "llama" else a_gpt2()).to(dtype)
    targets = "all-linear" if architecture == "llama" else ["c_attn", "c_proj", "c_fc"]
    model = MultiTaskPeftModel(backbone, {"a": lora(8, targets), "b": lora(4, targets)}, verify=False)  # type: ignore[arg-type]
    counted = count_activation_bytes_per_token(model, LENGTHS, autocast=BF16)
    assert counted * sum(LENGTHS) == pytest.approx(really_kept_bytes(model, BF16), rel=0.02)
    plain = count_activation_bytes_per_token(model, LENGTHS)
    assert plain * sum(LENGTHS) == pytest.approx(really_kept_bytes(model), rel=0.01)
    assert (counted == pytest.approx(plain, rel=0.01)) is (dtype is BF16)
    assert torch.is_autocast_enabled("cpu") is False


def test_with_checkpointing_inputs_of_layers_are_kept_and_one_layer_that_is_recomputed() -> None:
    model = a_model(a_backbone(num_layers=4))
    whole, less = (count_activation_bytes_per_token(model, LENGTHS, checkpointing=flag) for flag in (False, True))
    assert less == pytest.approx(4 * 64 * 4 + whole / 4)


def test_what_does_not_run_on_a_description_is_estimated_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()

    def fails(*given: object) -> None:
        raise NotImplementedError("this operator has no description")

    monkeypatch.setattr(heads, "target_losses", fails)
    with pytest.warns(UserWarning, match="estimated by formula.*this operator has no description"):
        estimated = count_activation_bytes_per_token(model, LENGTHS)
    shape = model_shape(model.backbone, model.backbone.config, dtype=FP32, activation_dtype=FP32)
    assert estimated == activation_bytes_per_token(shape, checkpointing=False)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_planner_knows_the_blocks_of_the_loss(device_type: str) -> None:
    for vocab_size in (97, 4096, 32_000, 151_936, 2_000_000):
        assert loss_block_rows(vocab_size, device_type) == block_rows(vocab_size, device_type)


def test_the_planner_knows_which_heads_have_kernels_for_short_rows() -> None:
    assert SHORT_ROW_CHANNELS == MAX_HEAD_DIM
    wide = replace(shape := ModelShape(32, 4096, 14336, 4096, 1024, 128256, 10**10, 2), head_dim=MAX_HEAD_DIM + 1)
    short, flash = (analytic_profile(DEVICES["H100-80GB"], one, execution=EAGER) for one in (shape, wide))
    assert short.attention(30) < flash.attention(30) == pytest.approx(flash.attention(100))
    assert short.attention(100) == flash.attention(100)


@pytest.mark.parametrize("lengths", [(1,), (512, 512), (513, 1, 700), (3, 4, 5), (100_000, 28_000)])
def test_the_planner_knows_the_sums_of_weight_gradients(lengths: tuple[int, ...]) -> None:
    tables = SegmentTables(lengths, [0] * len(lengths))
    loads = [TaskLoad(str(n), (length,), 1, (AdapterLoad(16, 8192),), 1) for n, length in enumerate(lengths)]
    counted = weight_gradient_bytes(loads, sum(lengths), 4096)
    allocated = tables.num_chunks * 16 * 4096 * 4  # `wgrad` makes fp32 [chunks, greatest rank, width]
    assert allocated <= counted <= allocated + (len(lengths) - 1) * 16 * 4096 * 4 + 16 * 4096 * 4
    assert _MAX_JOINT_RANK == MAX_JOINT_RANK
