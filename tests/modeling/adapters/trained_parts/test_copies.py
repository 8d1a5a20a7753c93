"""A task's copies of modules, next to tasks that have none, compared with plain PEFT alone."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import ConfigError
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors, packed, snapshot

CONFIGS = {
    "head": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"]),
    "plain": LoraConfig(r=5, target_modules="all-linear"),
    "most": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm", "lm_head"]),
    "dora": LoraConfig(r=2, target_modules=["v_proj"], use_dora=True, modules_to_save=["norm"]),
}


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
        ("embed_out", r"got 'embed_out'\. This backbone has model\.embed_tokens and lm_head"),
        ("nrom", r'Did you mean "norm"\? This backbone has'),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(wanted: str, said: str) -> None:
    config = LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=[wanted])
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.modules_to_save.*{said}")


HEAD = LoraConfig(r=2, target_modules=["lm_head"])


@pytest.mark.parametrize(
    ("first", "second", "field"),
    [
        (CONFIGS["head"], HEAD, "target_modules"),
        (CONFIGS["head"], LoraConfig(r=2, target_modules=r".*(lm_head|q_proj)"), "target_modules"),
        (
            CONFIGS["head"],
            LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"lm_head": [1]}),
            "trainable_token_indices",
        ),
        (HEAD, CONFIGS["head"], "modules_to_save"),
    ],
)
def test_two_ways_to_train_one_module_are_refused_in_one_call_and_in_two(
    first: LoraConfig, second: LoraConfig, field: str
) -> None:
    said = rf'tasks\.b\.peft_config\.{field} must be a module that task "a" does not name .*, got lm_head'
    assert_refused({"a": first, "b": second}, said)
    model = MultiTaskPeftModel(tiny_llama(), {"a": first}, verify=False)
    with pytest.raises(ConfigError, match=said):
        model.register_tasks({"b": second})
    assert model.tasks == ("a",)
    assert model(packed("a")[0]).losses.isfinite().all()
