"""Tasks that differ only in seed and scaling: copies of the first one's adapter are what PEFT's injection makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from peft_mux.errors import ConfigError
from peft_mux.modeling import registry as arrivals
from peft_mux.modeling.adapters.copies import can_be_copied
from peft_mux.modeling.adapters.tuners import Tuners
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors, snapshot

COPIED: dict[str, dict[str, Any]] = {
    "plain": {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1},
    "patterns": {"r": 2, "target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 4}, "use_rslora": True},
    "embeddings": {"r": 3, "target_modules": ["embed_tokens", "v_proj"], "init_lora_weights": "gaussian"},
    "random": {"r": 2, "target_modules": r".*layers\.0.*q_proj", "init_lora_weights": False, "lora_alpha": 5},
}
INJECTED: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True, "target_modules": ["q_proj"]},
    "pissa": {"init_lora_weights": "pissa", "target_modules": ["q_proj"]},
    "biases": {"bias": "lora_only", "target_modules": ["q_proj"]},
    "modules": {"modules_to_save": ["norm"], "target_modules": ["q_proj"]},
    "tokens": {"trainable_token_indices": [1], "target_modules": ["q_proj"]},
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


def comparable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: comparable(one) for key, one in value.items()}
    return type(value), sorted(value) if isinstance(value, set) else str(value)


def layers(model: MultiTaskPeftModel) -> dict[str, Any]:
    """Return the attributes of every tuned layer other than tensors, and its modules, by the layer's name."""
    tuned = {name: one for name, one in model.backbone.named_modules() if isinstance(one, BaseTunerLayer)}
    plain = {name: {k: comparable(v) for k, v in vars(one).items() if type(v) is dict} for name, one in tuned.items()}
    modules = {name: [(key, set(vars(m)), m.training) for key, m in one.named_modules()] for name, one in tuned.items()}
    return {name: (plain[name], modules[name], repr(one)) for name, one in tuned.items()}


@pytest.mark.parametrize("fields", INJECTED.values(), ids=INJECTED)
def test_what_peft_keeps_elsewhere_than_in_entries_of_layers_is_never_copied(fields: dict[str, Any]) -> None:
    assert not can_be_copied(LoraConfig(**fields))
    assert not can_be_copied(IA3Config(target_modules=["v_proj"], feedforward_modules=[]))


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


REDRAWN: dict[str, dict[str, Any]] = COPIED | {
    "stabilised": {"r": 3, "target_modules": "all-linear", "use_rslora": True, "init_lora_weights": "gaussian"},
    # What is computed of draws is no draw, and alphas of single layers are not distinguished: PEFT injects these.
    "orthogonal": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "alphas": {"r": 2, "target_modules": ["q_proj", "up_proj"], "alpha_pattern": {"up_proj": 3}},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fields", REDRAWN.values(), ids=REDRAWN)
def test_a_copy_of_another_seed_and_scaling_is_what_peft_would_have_injected(
    fields: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs: dict[str, Any] = {
        name: LoraConfig(**fields | {"lora_alpha": alpha}) for name, alpha in zip("abc", (4, 5, 5), strict=True)
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
    drawn = [{key: value.tolist() for key, value in copied.task_parameters(name).items()} for name in "abc"]
    assert drawn[0] != drawn[1], "the seeds of the test give the same weights"
    assert drawn[0] == drawn[2]
    assert layers(copied) == layers(injected)
    assert {k: comparable(v.to_dict()) for k, v in copied.peft_config.items()} == {
        k: comparable(v.to_dict()) for k, v in injected.peft_config.items()
    }
    assert [*copied.task_parameters("c")] == [*injected.task_parameters("c")]


def test_where_draws_do_not_give_an_adapter_its_weights_peft_injects_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = LoraLayer.reset_lora_parameters

    def doubled(layer: Any, adapter: str, init: Any) -> None:
        plain(layer, adapter, init)
        if adapter in layer.lora_A:
            layer.lora_A[adapter].weight.data *= 2

    monkeypatch.setattr(LoraLayer, "reset_lora_parameters", doubled)
    configs = {name: LoraConfig(**COPIED["plain"]) for name in "ab"}
    injected = injected_model(monkeypatch, configs, seeds={"a": 1, "b": 2})
    counted = count_injections(monkeypatch)
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False, seeds={"a": 1, "b": 2})
    assert len(counted) == 1
    assert_same_tensors(model.task_parameters("b"), injected.task_parameters("b"))


def test_described_adapters_are_copies_whatever_their_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = count_injections(monkeypatch)
    configs = {name: LoraConfig(**COPIED["plain"] | {"lora_alpha": alpha}) for name, alpha in (("a", 4), ("b", 5))}
    model = MultiTaskPeftModel(tiny_llama().to("meta"), configs, verify=False, seeds={"a": 1, "b": 2})
    assert counted == []
    assert all(value.is_meta for value in model.task_parameters("b").values())


def test_the_numbers_that_come_after_registration_are_those_without_it() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    configs = {name: LoraConfig(**COPIED["plain"]) for name in "ab"}
    model = tiny_llama()
    torch.manual_seed(3)
    MultiTaskPeftModel(model, configs, verify=False, seeds={"a": 1, "b": 2})
    assert torch.equal(torch.rand(4), expected)


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


def test_where_a_later_task_is_refused_copies_leave_again() -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"a": LoraConfig(**COPIED["plain"])}, verify=False)
    before = [name for name, _ in model.named_parameters()]
    new = {name: LoraConfig(r=2, target_modules=["q_proj"]) for name in ("x", "y")}
    bad = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="corda")
    with pytest.raises(ConfigError, match="bad"):
        model.register_tasks(new | {"bad": bad}, are_checked=True)
    assert (model.tasks, [name for name, _ in model.named_parameters()]) == (("a",), before)


def test_a_fault_is_reported_of_each_of_several_equal_tasks() -> None:
    configs = {name: LoraConfig(target_modules=["nowhere"]) for name in ("x", "y")}
    assert_refused(configs, r"tasks\.x(.|\n)*tasks\.y")


# ---------------------------------------------------- where PEFT injects

SMALL = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"])


def test_adapters_of_all_tasks_are_in_fp32_on_a_backbone_in_half_precision() -> None:
    configs = dict.fromkeys("abc", SMALL)
    model = MultiTaskPeftModel(tiny_llama().to(torch.bfloat16), configs, verify=False)
    dtypes = {name: {weight.dtype for weight in model.task_parameters(name).values()} for name in configs}
    assert dtypes == {name: {torch.float32} for name in configs}


def test_peft_sees_one_adapter_at_a_time_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MultiTaskPeftModel(tiny_llama(), dict.fromkeys("abc", SMALL), verify=False)
    seen = []
    add = model.add_adapter

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append(sum(1 for _ in model.backbone.modules()))
        add(*args, **kwargs)

    monkeypatch.setattr(model, "add_adapter", watched)
    model.register_tasks({f"t{number}": SMALL for number in range(4)})
    assert len(set(seen)) == 1
    assert model.tasks == ("a", "b", "c", "t0", "t1", "t2", "t3")
    x = torch.arange(12)[None]
    assert model.task_view("t3")(input_ids=x).logits.isfinite().all()


def test_weights_are_laid_out_again_only_where_they_moved() -> None:
    model = MultiTaskPeftModel(tiny_llama(), dict.fromkeys("ab", SMALL), verify=False)
    before = {name: model.registry.slab_of(name) for name in model.tasks}
    model.to("cpu")
    assert all(model.registry.slab_of(name) is slab for name, slab in before.items())
    model.to(torch.float64)
    assert not any(model.registry.slab_of(name) is slab for name, slab in before.items())
    slab = model.registry.slab_of("a")
    next(iter(model.task_parameters("a").values())).data = torch.zeros(2, 16, dtype=torch.float64)
    model.to("cpu")
    assert model.registry.slab_of("a") is not slab, "one weight lies elsewhere"
