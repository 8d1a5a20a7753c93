"""A task's biases, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from peft_mux import MultiTaskPeftModel
from tests.invariants.mux_lab import VOCABULARY
from tests.modeling.adapters.alone import tiny_gpt2, together
from tests.modeling.adapters.cases import CASES_BY_NAME
from tests.modeling.adapters.passes import IDS, assert_refused, assert_same_tensors
from tests.modeling.backbones import NO_BERT_DROPOUT, backbone_of, classifier_of, drawn

CONFIGS = {
    "all": LoraConfig(r=4, target_modules=["c_fc"], bias="all", fan_in_fan_out=True),
    "only": LoraConfig(r=3, target_modules=["c_fc", "c_proj"], bias="lora_only", fan_in_fan_out=True),
    "plain": LoraConfig(r=2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "dora": LoraConfig(r=2, target_modules=["c_proj"], use_dora=True, bias="lora_only", fan_in_fan_out=True),
}


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
    with torch.no_grad(), model.without_adapters():
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


def test_biases_and_sliced_types_share_modules_and_arrive_in_mid_run(tmp_path: Path) -> None:
    ran = together(ON_BIASED, biased_llama, tmp_path, late=["lora_only", "IA3", "MISS"], max_steps=3)
    for name in ON_BIASED:
        ran.assert_as_alone(name)
    ran.assert_backbone_unchanged()


@pytest.mark.parametrize(("name", "bias"), [("bert", "all"), ("roberta", "lora_only"), ("gpt2", "all")])
def test_an_adapter_with_copies_next_to_its_biases_has_the_keys_of_peft_and_is_exchanged_with_it(
    name: str, bias: Any, tmp_path: Path
) -> None:
    def base() -> Any:
        return tiny_gpt2() if name == "gpt2" else drawn(classifier_of(name, **NO_BERT_DROPOUT, vocab_size=VOCABULARY))

    options: dict[str, Any] = {"target_modules": ["query"], "task_type": "SEQ_CLS"}
    if name == "gpt2":
        options = {"target_modules": ["c_fc"], "fan_in_fan_out": True, "modules_to_save": ["ln_f"]}
    config = LoraConfig(r=2, bias=bias, **options)
    judge = get_peft_model(base(), copy.deepcopy(config)).eval()
    with torch.no_grad():
        for item in [one for one in judge.parameters() if one.requires_grad]:
            item.add_(0.1)
        wanted = judge(input_ids=IDS).logits
    judge.save_pretrained(str(tmp_path / "theirs" / "a"))
    model = MultiTaskPeftModel.from_pretrained(base(), tmp_path / "theirs", verify=False).eval()
    model.save_pretrained(tmp_path / "ours")
    theirs, ours = (load_file(tmp_path / which / "a" / "adapter_model.safetensors") for which in ("theirs", "ours"))
    assert_same_tensors(ours, theirs)
    again = PeftModel.from_pretrained(base(), str(tmp_path / "ours" / "a")).eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS).logits, wanted)
        assert torch.allclose(model.task_view("a")(input_ids=IDS).logits, wanted, rtol=1e-5, atol=1e-6)


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
