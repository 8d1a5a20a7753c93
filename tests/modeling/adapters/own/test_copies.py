"""A task's copies of modules, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import ModulesToSaveWrapper

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.errors import ConfigError
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.alone import tied_llama, together

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


def batch_of(*names: str) -> Any:
    rows = lab.rows(2, 1, 8, 8)[0]["input_ids"]
    return ChunkPackingCollator()([{"task": name, "input_ids": rows} for name in names])


def test_tasks_with_copies_come_and_go() -> None:
    backbone = tiny_llama()
    plain = {name: item.clone() for name, item in backbone.state_dict().items()}
    model = MultiTaskPeftModel(backbone, {"plain": CONFIGS["plain"]}, verify=False)
    model.register_tasks({"most": CONFIGS["most"]})
    model.register_tasks({"head": CONFIGS["head"]})
    together_ = model(batch_of("plain", "most", "head")).losses
    model.remove_tasks(["most"])
    assert torch.allclose(model(batch_of("plain", "head")).losses, together_[[0, 2]], rtol=1e-6)
    back = model.unload()
    assert back.state_dict().keys() == plain.keys()
    assert all(torch.equal(back.state_dict()[name], item) for name, item in plain.items())


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
    with pytest.raises(ConfigError, match=rf"tasks\.a\.peft_config\.modules_to_save.*{said}"):
        MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False)


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
    with pytest.raises(ConfigError, match=said):
        MultiTaskPeftModel(tiny_llama(), {"a": CONFIGS["head"], "b": other}, verify=False)
    model = MultiTaskPeftModel(tiny_llama(), {"a": CONFIGS["head"]}, verify=False)
    with pytest.raises(ConfigError, match=said):
        model.register_tasks({"b": other})
    assert model.tasks == ("a",)
    assert model(batch_of("a")).losses.isfinite().all()


def test_what_is_asked_for_after_adapters_is_refused_too() -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"a": LoraConfig(r=2, target_modules=["lm_head"])}, verify=False)
    with pytest.raises(
        ConfigError,
        match=r'tasks\.b\.peft_config\.modules_to_save must be a module that task "a" does not name in',
    ):
        model.register_tasks({"b": CONFIGS["head"]})
