"""Liger's kernels in the backbone, as compiled for GPUs and run on the CPU: proven on the model, and only there."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import transformers
from peft import LNTuningConfig, LoraConfig
from torch import nn
from transformers.models.llama import modeling_llama

if importlib.util.find_spec("triton") is None or importlib.util.find_spec("liger_kernel") is None:
    pytest.skip("needs Triton and Liger", allow_module_level=True)

from peft_mux.modeling.backbone import liger
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.pretended_cuda.launches import Argument, arguments_of
from tests.ptx.device import ptx_on_cpu
from tests.ptx.test_training import PRESENT, losses_and_gradients, off_by, small_llama

pytestmark = pytest.mark.timeout(900)
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "head_dim": 16,
}
FAMILIES: dict[str, Any] = {
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=16)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, sliding_window=16)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, sliding_window=16)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, bos_token_id=1, eos_token_id=2)),
}


def model_of(backbone: Any, **configs: Any) -> MultiTaskPeftModel:
    configs = configs or {"a": LoraConfig(r=4, target_modules="all-linear")}
    return MultiTaskPeftModel(backbone.requires_grad_(False), configs, verify=False).train()


@pytest.mark.slow
def test_a_training_pass_with_liger_is_as_near_to_float64_as_torch_in_bf16() -> None:
    right_losses, right = losses_and_gradients(small_llama(1, torch.float64))
    _, plain = losses_and_gradients(small_llama(1, torch.bfloat16))
    model = small_llama(1, torch.bfloat16)
    with ptx_on_cpu(90) as launches:
        assert liger.fuse_layers(model) == ""
        losses, found = losses_and_gradients(model)
    for kernel in ("_rms_norm_forward_kernel", "_rms_norm_backward_kernel", "_triton_rope", "_swiglu_backward_kernel"):
        assert launches.counts[kernel] >= 2, "in the trial, and in the pass"
    for name in PRESENT:
        assert off_by(found[name], right[name]) <= 1.1 * off_by(plain[name], right[name]), name
        assert abs(losses[name] - right_losses[name]) <= 2e-3, name


def test_numbers_of_tokens_choose_no_variant_of_a_kernel() -> None:
    from liger_kernel.ops import rms_norm, rope

    liger.fuse_layers(small_llama(1, torch.bfloat16))
    for kernel, sizes in (
        (rope._triton_rope, {"sl"}),
        (rms_norm._rms_norm_backward_kernel, {"n_rows", "rows_per_program"}),
    ):
        for size in (1, 16, 17):
            found = arguments_of(kernel, {param.name: size for param in kernel.params})
            assert {Argument(name, "i32", 0) for name in sizes} <= set(found)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_are_fused_and_proven(family: str) -> None:
    torch.manual_seed(0)
    model = model_of(FAMILIES[family]().to(torch.bfloat16))
    with ptx_on_cpu(90) as launches:
        assert liger.fuse_layers(model) == ""
    assert launches.counts["_rms_norm_backward_kernel"] > 0
    assert launches.counts["_triton_rope"] > 0
    assert any("glu" in kernel for kernel in launches.counts)


@pytest.mark.slow
def test_only_the_modules_of_one_model_change_and_they_change_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import monkey_patch

    before, layer_norm, apply = dict(vars(modeling_llama)), nn.LayerNorm, monkey_patch._apply_liger_kernel_to_instance

    def apply_as_to_models_with_images(model: Any, **options: Any) -> None:
        apply(model, **options)
        modeling_llama.nn.LayerNorm = object

    monkeypatch.setattr(monkey_patch, "_apply_liger_kernel_to_instance", apply_as_to_models_with_images)
    model, other = small_llama(1, torch.bfloat16), small_llama(1, torch.bfloat16)
    with ptx_on_cpu(90):
        assert liger.fuse_layers(model, {"rope": False}) == ""
    assert {key: value for key, value in vars(modeling_llama).items() if before.get(key) is not value} == {}
    assert nn.LayerNorm is layer_norm
    assert liger.is_fused(model.backbone)
    assert not liger.is_fused(other.backbone)
    layer = model.backbone.model.layers[0]
    assert type(layer.mlp) is not modeling_llama.LlamaMLP
    assert type(layer.self_attn) is modeling_llama.LlamaAttention, "rope was switched off"
    norm = copy.deepcopy(layer.input_layernorm)
    assert norm.forward.__self__ is norm, "a copy computes with its own weight"
    assert type(model.unload().model.layers[0].mlp) is modeling_llama.LlamaMLP


@pytest.mark.slow
def test_kernels_with_other_results_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import monkey_patch

    def wrong(module: nn.Module, **options: Any) -> None:
        module.forward = (lambda self, x: x * self.weight).__get__(module)

    monkeypatch.setattr(monkey_patch, "_patch_rms_norm_module", wrong)
    model = small_llama(1, torch.bfloat16)
    with ptx_on_cpu(90):
        reason = liger.fuse_layers(model)
    assert "with Liger its logits differ by" in reason
    assert not liger.is_fused(model.backbone)


def test_what_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from liger_kernel.transformers import monkey_patch

    apply = monkey_patch._apply_liger_kernel_to_instance

    def apply_and_fail(model: Any, **options: Any) -> None:
        apply(model, **options)
        assert "forward" in vars(model.model.norm)
        raise AttributeError("no such layer")

    model, other = small_llama(1, torch.bfloat16), small_llama(1, torch.bfloat16)
    before = [dict(vars(module)) for module in other.backbone.modules()]
    reason = liger.fuse_layers(model)  # tensors of a CPU, and no driver
    assert reason.startswith("Liger fails on this model (")
    assert not liger.is_fused(model.backbone)
    monkeypatch.setattr(monkey_patch, "_apply_liger_kernel_to_instance", apply_and_fail)
    assert liger.fuse_layers(other) == "Liger fails on this model (AttributeError: no such layer)"
    assert [dict(vars(module)) for module in other.backbone.modules()] == before
    assert not liger.is_fused(other.backbone)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=97))
    assert liger.fuse_layers(model_of(gpt2)) == "Liger has no kernels for models of type gpt2"


def norms_and_factors() -> MultiTaskPeftModel:
    """Return a model with a task that trains norms, one that trains copies of them, and one with LoRA."""
    torch.manual_seed(0)
    backbone = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16)
    model = model_of(
        backbone,
        narrow=LNTuningConfig(target_modules=["input_layernorm"]),
        with_dropout=LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["post_attention_layernorm"]),
        wide=LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    torch.manual_seed(1)
    for name in model.tasks:
        for parameter in model.task_parameters(name).values():
            with torch.no_grad():
                parameter.add_((0.1 * torch.randn(parameter.shape)).to(parameter.dtype))
    return model


@pytest.mark.slow
def test_modules_that_tasks_adapt_are_still_called_through_their_adapters() -> None:
    plain_losses, plain = losses_and_gradients(norms_and_factors())
    model = norms_and_factors()
    with ptx_on_cpu(90):
        assert liger.fuse_layers(model) == ""
        losses, found = losses_and_gradients(model)
    layer = model.backbone.model.layers[0]
    assert "_plain_class" not in vars(type(layer.input_layernorm))
    assert hasattr(type(layer.input_layernorm.base_layer), "_plain_class")
    assert hasattr(type(layer.post_attention_layernorm.original_module), "_plain_class")
    assert hasattr(type(model.backbone.model.norm), "_plain_class")
    for name in PRESENT:
        assert plain[name].norm() > 0
        assert off_by(found[name], plain[name]) < 0.03, name
        assert abs(losses[name] - plain_losses[name]) < 0.01, name
    model.register_tasks({"late": LNTuningConfig(target_modules=["model.norm"])}, seeds={"late": 1})
    (own,) = model.task_parameters("late").values()
    assert own.data_ptr() != model.backbone.model.norm.base_layer.weight.data_ptr()
