"""Tasks that differ only in seed and scaling: copies of the first one's adapter are what PEFT's injection makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft.tuners.lora import LoraLayer

from peft_mux.modeling import registry as arrivals
from peft_mux.modeling.adapters.lora.config import can_be_copied
from peft_mux.modeling.adapters.tuners import Tuners
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors, snapshot

COPIED: dict[str, dict[str, Any]] = {
    "plain": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1},
    "patterns": {"r": 2, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 4}, "use_rslora": True},
    "embeddings": {"r": 3, "target_modules": ["embed_tokens", "v_proj"], "init_lora_weights": "gaussian"},
    "random": {"r": 2, "target_modules": r".*layers\.0.*q_proj", "init_lora_weights": False, "lora_alpha": 5},
    "stabilised": {"r": 3, "target_modules": "all-linear", "use_rslora": True, "init_lora_weights": "gaussian"},
    # What is computed of draws is no draw, and alphas of single layers are not distinguished: PEFT injects these.
    "orthogonal": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "alphas": {"r": 2, "target_modules": ["q_proj", "up_proj"], "alpha_pattern": {"up_proj": 3}},
}


def injected_model(
    monkeypatch: pytest.MonkeyPatch, configs: dict[str, Any], backbone: Any = None, **options: Any
) -> MultiTaskPeftModel:
    """Return a model all of whose adapters PEFT has injected."""
    with monkeypatch.context() as patch:
        patch.setattr(arrivals, "can_be_copied", lambda config: False)
        return MultiTaskPeftModel(backbone or tiny_llama(), configs, verify=False, **options)


def count_injections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by an adapter's id whenever PEFT injects one in addition to the first."""
    counted: list[str] = []
    inject = Tuners.inject

    def counting(tuners: Tuners, model: Any, adapter: str, config: Any) -> None:
        counted.append(adapter)
        inject(tuners, model, adapter, config)

    monkeypatch.setattr(Tuners, "inject", counting)
    return counted


def layers(model: MultiTaskPeftModel) -> list[Any]:
    """Return what LoRA's layers hold besides weights."""
    tuned: list[Any] = [one for one in model.backbone.modules() if isinstance(one, LoraLayer)]
    return [(one.r, one.lora_alpha, one.scaling, one.use_rslora, one.training, repr(one)) for one in tuned]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_dora": True},
        {"init_lora_weights": "pissa"},
        {"bias": "lora_only"},
        {"modules_to_save": ["norm"]},
        {"trainable_token_indices": [1]},
    ],
)
def test_what_peft_keeps_elsewhere_than_in_entries_of_layers_is_never_copied(fields: dict[str, Any]) -> None:
    assert can_be_copied(LoraConfig(target_modules=["q_proj"]))
    assert not can_be_copied(LoraConfig(target_modules=["q_proj"], **fields))


def test_copies_share_no_memory_and_leave_one_by_one() -> None:
    configs = {name: LoraConfig(**COPIED["plain"]) for name in ("a", "b", "c")}
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False)
    before = snapshot(model.task_parameters("c"))
    with torch.no_grad():
        for parameter in model.task_parameters("a").values():
            parameter.fill_(float("nan"))
    model.remove_tasks(["a"])
    assert_same_tensors(model.task_parameters("c"), before)
    model.remove_tasks(["b", "c"])
    assert not any("lora" in name and "t00" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize("name", COPIED)
def test_a_copy_of_another_seed_and_scaling_is_what_peft_would_have_injected(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, dtype = COPIED[name], torch.bfloat16 if name in ("embeddings", "stabilised") else torch.float32
    configs: dict[str, Any] = {
        task: LoraConfig(**fields | {"lora_alpha": alpha}) for task, alpha in zip("abc", (4, 5, 5), strict=True)
    }
    configs = {"a": configs.pop("a"), "other": IA3Config(target_modules=["v_proj"], feedforward_modules=[]), **configs}
    seeds = {"a": 1, "b": 2, "c": 1}
    injected = injected_model(monkeypatch, configs, backbone=tiny_llama().to(dtype), seeds=seeds)
    counted = count_injections(monkeypatch)
    copied = MultiTaskPeftModel(tiny_llama().to(dtype), configs, verify=False, seeds=seeds)
    is_injected = "alpha_pattern" in fields or fields.get("init_lora_weights") == "orthogonal"
    assert len(counted) == 1 + is_injected, "adapters of IA3 are injected in any case"
    theirs, ours = dict(injected.named_parameters()), dict(copied.named_parameters())
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        assert torch.equal(ours[key], value)
        assert (ours[key].dtype, ours[key].stride()) == (value.dtype, value.stride())
        assert ours[key].requires_grad == value.requires_grad
    drawn = [{key: value.tolist() for key, value in copied.task_parameters(task).items()} for task in "abc"]
    assert {item.dtype for item in copied.task_parameters("b").values()} == {torch.float32}, (
        "whatever the backbone's is"
    )
    assert drawn[0] != drawn[1], "the seeds of the test give the same weights"
    assert drawn[0] == drawn[2]
    assert layers(copied) == layers(injected)


def test_tasks_of_a_later_call_are_drawn_by_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = {name: LoraConfig(**COPIED["plain"]) for name in ("a", "b")}
    seeds = {"a": 1, "b": 2}
    copied = MultiTaskPeftModel(tiny_llama(), configs, verify=False, seeds=seeds)
    injected = injected_model(monkeypatch, configs, seeds=seeds)
    with torch.no_grad():
        for parameter in copied.task_parameters("a").values():
            parameter.fill_(7.0)  # as training does
    for model in (copied, injected):
        model.register_tasks({"late": LoraConfig(**COPIED["plain"])}, seeds={"late": 1})
    for name in ("b", "late"):
        assert_same_tensors(copied.task_parameters(name), injected.task_parameters(name))


def test_a_fault_is_reported_of_each_of_several_equal_tasks() -> None:
    configs = {name: LoraConfig(target_modules=["nowhere"]) for name in ("x", "y")}
    assert_refused(configs, r"tasks\.x(.|\n)*tasks\.y")
