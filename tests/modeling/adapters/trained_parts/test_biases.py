"""A task's biases, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig

from peft_mux import MultiTaskPeftModel
from tests.invariants.mux_lab import VOCABULARY
from tests.modeling.adapters.alone import tiny_gpt2, together
from tests.modeling.adapters.cases import CASES_BY_NAME
from tests.modeling.adapters.passes import IDS, assert_refused
from tests.modeling.backbones import backbone_of, drawn

CONFIGS = {
    "all": LoraConfig(r=4, target_modules=["c_fc"], bias="all", fan_in_fan_out=True),
    "only": LoraConfig(r=3, target_modules=["c_fc", "c_proj"], bias="lora_only", fan_in_fan_out=True),
    "plain": LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "dora": LoraConfig(r=2, target_modules=["c_proj"], use_dora=True, bias="lora_only", fan_in_fan_out=True),
}

# A bias that all keys share does not move attention.
NO_EFFECT = ("attn.c_attn.bias", "attn.c_attn.base_layer.bias")


def test_copies_and_tuned_norms_next_to_biases_train_and_decay_as_with_trainer(tmp_path: Path) -> None:
    both = LoraConfig(r=2, target_modules=["c_fc"], bias="all", modules_to_save=["ln_f"], fan_in_fan_out=True)
    norms = LNTuningConfig(target_modules=["ln_2"])  # no name has "norm" in it: Trainer exempts nn.LayerNorm by type
    ran = together({"both": both, "plain": CONFIGS["plain"], "norms": norms}, tiny_gpt2, tmp_path)
    ran.assert_as_alone("norms")
    assert ran.saved("both").keys() == ran.saved_alone(ran.assert_as_alone("both", but=NO_EFFECT)).keys()


def test_without_adapters_biases_of_a_task_are_those_of_the_backbone() -> None:
    backbone = tiny_gpt2()
    with torch.no_grad():
        wanted = backbone.eval()(input_ids=IDS).logits
    model = MultiTaskPeftModel(backbone, CONFIGS, verify=False).eval()
    with torch.no_grad():
        for name, item in model.task_parameters("all").items():
            if name.endswith("bias"):
                item.fill_(float("nan"))
    model.select_adapter(model.adapter_of("all"))
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model.base_model(input_ids=IDS).logits, wanted)


def biased_llama() -> Any:
    """Return a Llama with a bias in every linear layer of its blocks."""
    return drawn(backbone_of("llama", vocab_size=VOCABULARY, attention_bias=True, mlp_bias=True))


ON_BIASED = {
    **{
        bias: LoraConfig(r=2, target_modules=["q_proj", "down_proj"], bias=bias)  # type: ignore[arg-type]
        for bias in ("all", "lora_only")
    },
    "IA3": IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    **{name: CASES_BY_NAME[name].make(0) for name in ("HRA", "LOHA", "MISS", "BEFT")},
}


@pytest.mark.slow
def test_biases_and_sliced_types_share_modules_and_arrive_in_mid_run(tmp_path: Path) -> None:
    ran = together(ON_BIASED, biased_llama, tmp_path, late=["lora_only", "IA3", "MISS"], max_steps=3)
    for name in ON_BIASED:
        ran.assert_as_alone(name)
    ran.assert_backbone_unchanged()


def test_a_bias_and_a_copy_of_one_module_are_refused() -> None:
    copies = LoraConfig(r=2, target_modules=["c_fc"], modules_to_save=["ln_f"])
    assert_refused(
        {"a": copies, "b": CONFIGS["all"]},
        r'tasks\.b\.peft_config\.bias must be a module that task "a" does not name in',
        tiny_gpt2(),
    )


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_of_a_backbone_without_any_are_refused(bias: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], bias=bias)  # type: ignore[arg-type]
    assert_refused(
        {"a": config}, r"tasks\.a\.peft_config\.bias must be 'none', because no such module of the backbone has a"
    )
