"""What surrounds PEFT's injection: adapters of other tasks are hidden from it, and back in their order afterwards."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer

from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.copies import HiddenAdapters, only_adapter
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import tiny_llama

TARGETS = ["q_proj", "embed_tokens"]


def model_of(*names: str) -> MultiTaskPeftModel:
    configs = {name: LoraConfig(r=2, target_modules=TARGETS) for name in names}
    return MultiTaskPeftModel(tiny_llama(), configs, verify=False)


def held(model: MultiTaskPeftModel) -> dict[str, list[str]]:
    """Return the internal ids that each tuned layer holds, in order."""
    found = {}
    for name, module in model.backbone.named_modules():
        if isinstance(module, LoraLayer):
            dictionaries: list[Any] = [module.lora_A, module.lora_B, module.lora_dropout, module.lora_embedding_A]
            found[name] = [list(one.keys()) for one in dictionaries if len(one)]
    return found


def test_hidden_adapters_come_back_as_the_same_objects_in_the_same_order() -> None:
    model = model_of("a", "b", "c")
    before, parameters = held(model), dict(model.named_parameters())
    with HiddenAdapters(model.backbone):
        assert all(ids == [] for ids in held(model).values())
        assert not any("lora_" in name for name, _ in model.named_parameters())
    assert held(model) == before
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())


def test_adapters_of_all_tasks_are_in_fp32_on_a_backbone_in_half_precision() -> None:
    configs = {name: LoraConfig(r=2, target_modules=TARGETS) for name in ("a", "b", "c")}
    model = MultiTaskPeftModel(tiny_llama().to(torch.bfloat16), configs, verify=False)
    dtypes = {name: {weight.dtype for weight in model.task_parameters(name).values()} for name in configs}
    assert dtypes == {name: {torch.float32} for name in configs}


@pytest.mark.parametrize("fails", [False, True])
def test_one_adapter_stays_alone_and_all_come_back_in_their_order(fails: bool) -> None:
    model = model_of("a", "b", "c")
    before, parameters, own = held(model), dict(model.named_parameters()), model.adapters["b"]
    with suppress(RuntimeError), only_adapter(model.backbone, own):
        assert all(ids == [own] for layer in held(model).values() for ids in layer)
        if fails:
            raise RuntimeError
    assert held(model) == before
    after = dict(model.named_parameters())
    assert list(after) == list(parameters)
    assert all(after[name] is parameter for name, parameter in parameters.items())


def test_peft_sees_one_adapter_at_a_time_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("a", "b", "c")
    seen = []
    add = model.add_adapter

    def watched(*args: Any, **kwargs: Any) -> None:
        seen.append(sum(1 for _ in model.backbone.modules()))
        add(*args, **kwargs)

    monkeypatch.setattr(model, "add_adapter", watched)
    model.register_tasks({f"t{number}": LoraConfig(r=2, target_modules=TARGETS) for number in range(4)})
    assert len(set(seen)) == 1
    assert model.tasks == ("a", "b", "c", "t0", "t1", "t2", "t3")
    x = torch.arange(12)[None]
    assert model.task_view("t3")(input_ids=x).logits.isfinite().all()


def test_weights_are_laid_out_again_only_where_they_moved() -> None:
    model = model_of("a", "b")
    before = {name: model.registry.slab_of(name) for name in model.tasks}
    model.to("cpu")
    assert all(model.registry.slab_of(name) is slab for name, slab in before.items())
    model.to(torch.float64)
    assert not any(model.registry.slab_of(name) is slab for name, slab in before.items())
    slab = model.registry.slab_of("a")
    next(iter(model.task_parameters("a").values())).data = torch.zeros(2, 16, dtype=torch.float64)
    model.to("cpu")
    assert model.registry.slab_of("a") is not slab, "one weight lies elsewhere"


def test_a_newcomer_that_peft_refuses_leaves_nothing_and_takes_its_companions_along() -> None:
    model = model_of("a", "b")
    before, names = held(model), [name for name, _ in model.named_parameters()]
    odd = LoraConfig(r=2, target_modules=TARGETS, exclude_modules="(")
    with pytest.raises(ConfigError, match=r"tasks\.odd"):
        model.register_tasks({"good": LoraConfig(r=2, target_modules=TARGETS), "odd": odd})
    assert (held(model), [name for name, _ in model.named_parameters()]) == (before, names)
