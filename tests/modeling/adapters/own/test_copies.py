"""A task's copies of modules, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import ConfigError
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.alone import tied_llama, together
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors, packed, snapshot

CONFIGS = {
    "head": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]),
    "plain": LoraConfig(r=5, target_modules="all-linear"),
    "most": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm", "lm_head"]),
    "dora": LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, modules_to_save=["norm"]),
}


def test_no_task_has_adapters_in_anothers_copy() -> None:
    backbone = MultiTaskPeftModel(tiny_llama(), CONFIGS, verify=False).backbone
    wrappers = {name: item for name, item in backbone.named_modules() if isinstance(item, ModulesToSaveWrapper)}
    assert len(wrappers["lm_head"].modules_to_save) == 2
    assert not any("lora_" in name for item in wrappers.values() for name, _ in item.named_modules())


def test_where_weights_are_tied_a_copy_is_not(tmp_path: Path) -> None:
    configs = {name: CONFIGS[name] for name in ("head", "most", "plain")}
    ran = together(configs, tied_llama, tmp_path, max_steps=3)
    for name in configs:
        ran.assert_as_alone(name)


def test_tasks_with_copies_come_and_go() -> None:
    backbone = tiny_llama()
    plain = snapshot(backbone.state_dict())
    model = MultiTaskPeftModel(backbone, {"plain": CONFIGS["plain"]}, verify=False)
    model.register_tasks({"most": CONFIGS["most"]})
    model.register_tasks({"head": CONFIGS["head"]})
    together_ = model(packed("plain", "most", "head")[0]).losses
    model.remove_tasks(["most"])
    assert torch.allclose(model(packed("plain", "head")[0]).losses, together_[[0, 2]], rtol=1e-6)
    assert_same_tensors(model.unload().state_dict(), plain)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("mlp", "contains other modules"),
        ("q_proj", "is a linear layer, which other tasks adapt"),
        ("lm_heat", "lm_head"),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(wanted: str, said: str) -> None:
    config = LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=[wanted])
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.modules_to_save.*{said}")


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (LoraConfig(r=2, target_modules=["lm_head"]), "target_modules"),
        (LoraConfig(r=2, target_modules=r".*(lm_head|q_proj)"), "target_modules"),
        (
            LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"lm_head": [1]}),
            "trainable_token_indices",
        ),
    ],
)
def test_two_ways_to_train_one_module_are_refused_in_one_call_and_in_two(other: LoraConfig, field: str) -> None:
    said = rf'tasks\.b\.peft_config\.{field} must be a module that task "a" does not name .*, got lm_head'
    assert_refused({"a": CONFIGS["head"], "b": other}, said)
    model = MultiTaskPeftModel(tiny_llama(), {"a": CONFIGS["head"]}, verify=False)
    with pytest.raises(ConfigError, match=said):
        model.register_tasks({"b": other})
    assert model.tasks == ("a",)
    assert model(packed("a")[0]).losses.isfinite().all()


def test_what_is_asked_for_after_adapters_is_refused_too() -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"a": LoraConfig(r=2, target_modules=["lm_head"])}, verify=False)
    with pytest.raises(
        ConfigError,
        match=r'tasks\.b\.peft_config\.modules_to_save must be a module that task "a" does not name in',
    ):
        model.register_tasks({"b": CONFIGS["head"]})
