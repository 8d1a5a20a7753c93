"""Our methods as plain PEFT uses them: several adapters, switched, deleted, saved, loaded, in half precision too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from transformers import GPT2Config, GPT2LMHeadModel

from peft_mux import BottleneckConfig, ConfigError, DiffPruningConfig
from tests.children import run_script
from tests.invariants.mux_lab import tiny_llama

IDS = torch.arange(12)[None]
CONFIGS = [BottleneckConfig(bottleneck_size=4), DiffPruningConfig(target_modules="all-linear", structured=True)]


def perturb(model: Any) -> None:
    """Move all that trains away from where it begins."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("config", CONFIGS)
def test_adapters_are_added_switched_and_taken_out(config: PeftConfig) -> None:
    bare = logits(tiny_llama())
    model = get_peft_model(tiny_llama(), copy.deepcopy(config))
    assert torch.equal(logits(model), bare), "a new adapter changes nothing"
    perturb(model)
    first = logits(model)
    model.add_adapter("second", copy.deepcopy(config))
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    assert torch.equal(logits(model), bare)
    assert all(".second" in name for name, item in model.named_parameters() if item.requires_grad)
    model.set_adapter("default")
    assert torch.equal(logits(model), first)
    unloaded = model.unload()
    assert torch.equal(logits(unloaded), bare)
    assert [name for name, _ in unloaded.named_parameters()] == [name for name, _ in tiny_llama().named_parameters()]


@pytest.mark.parametrize("config", [BottleneckConfig(), DiffPruningConfig(target_modules=["c_attn", "mlp.c_proj"])])
def test_layers_that_keep_their_weight_transposed_are_adapted_too(config: PeftConfig) -> None:
    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)).eval()
    bare = logits(base)
    model = get_peft_model(copy.deepcopy(base), config)
    assert torch.equal(logits(model), bare)
    perturb(model)
    own = logits(model)
    assert not torch.allclose(own, bare)
    if isinstance(config, DiffPruningConfig):
        assert torch.allclose(logits(model.merge_and_unload()), own, atol=1e-5)


@pytest.mark.parametrize("make", [BottleneckConfig, DiffPruningConfig])
def test_a_target_that_is_no_linear_layer_is_refused(make: Callable[..., PeftConfig]) -> None:
    with pytest.raises(
        ConfigError, match=r"target_modules must be linear layers, got model\.embed_tokens \(Embedding\)"
    ):
        get_peft_model(tiny_llama(), make(target_modules=["embed_tokens"]))


@pytest.mark.parametrize(
    ("make", "fields", "allowed"),
    [
        (BottleneckConfig, {"bottleneck_size": 0}, "an integer of at least 1"),
        (BottleneckConfig, {"reduction_factor": 0.5}, "at least 1"),
        (BottleneckConfig, {"bottleneck_size": 8, "reduction_factor": 8}, "None where bottleneck_size is set"),
        (BottleneckConfig, {"non_linearity": "swish"}, "'relu', 'gelu', 'silu', 'tanh'"),
        (BottleneckConfig, {"adapter_dropout": 1.0}, r"\[0, 1\)"),
        (BottleneckConfig, {"up_bias": 1}, "True or False"),
        (BottleneckConfig, {"target_modules": "x", "layers_to_transform": [0]}, "where target_modules is a string"),
        (DiffPruningConfig, {"target_sparsity": 0.7}, "at most 0.5"),
        (DiffPruningConfig, {"l0_weight": float("nan")}, "at least 0"),
        (DiffPruningConfig, {"structured": "rows"}, "True or False"),
        (DiffPruningConfig, {"alpha_init": 1e9}, "from -50 to 50"),
        (DiffPruningConfig, {"concrete_lower": 0.0}, "without 0"),
        (DiffPruningConfig, {"concrete_upper": 1}, "above 1"),
        (DiffPruningConfig, {"kept": {"x": -1}}, "an integer of at least 0"),
    ],
)
def test_a_field_is_refused_by_name_where_it_is_written(
    make: Callable[..., PeftConfig], fields: dict[str, Any], allowed: str
) -> None:
    *_, name = fields
    with pytest.raises(ConfigError, match=rf"^{make.__name__}\.{name}.* must be .*{allowed}.*, got "):
        make(**fields)


# ------------------------------------------ PEFT's as soon as `peft_mux` is imported, whichever comes first

TYPES = {"BOTTLENECK": BottleneckConfig, "DIFF_PRUNING": DiffPruningConfig}


@pytest.mark.parametrize("name", TYPES)
def test_a_type_is_a_member_like_any_other(name: str) -> None:
    peft_type = PeftType(name)
    assert peft_type is PeftType[name] is getattr(PeftType, name)
    assert (peft_type.name, peft_type.value, str(peft_type.value), peft_type == name) == (name, name, name, True)
    assert list(PeftType).count(peft_type) == 1
    assert copy.deepcopy(peft_type) is peft_type is pickle.loads(pickle.dumps(peft_type))
    assert PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] is TYPES[name]
    assert TYPES[name]().peft_type is peft_type
    assert PEFT_TYPE_TO_TUNER_MAPPING[peft_type].prefix == f"{name.lower()}_"


_FRESH = """
import importlib.util, sys, peft_mux
assert "torch" not in sys.modules and "peft" not in sys.modules, "the import is no longer light"
# A look at PEFT and a reload of ours change nothing.
assert importlib.util.find_spec("peft") is not None
importlib.reload(peft_mux)
from peft import PeftConfig, PeftType
names = [PeftConfig.from_pretrained(folder).__class__.__name__ for folder in sys.argv[1:]]
# As a later PEFT might have it: types of these names, which are not ours.
from peft_mux.adapters.registration import own_peft_type
assert own_peft_type("BOTTLENECK") is PeftType.BOTTLENECK
foreign = own_peft_type("LORA")
assert (foreign.value, PeftType.LORA.value, own_peft_type("LORA") is foreign) == ("MUX_LORA", "LORA", True)
print(" ".join(names))
"""


@pytest.mark.slow
def test_plain_peft_reads_our_files_in_a_process_that_imported_us_first(tmp_path: Path) -> None:
    folders = []
    for name, config in TYPES.items():
        config(target_modules=["o_proj"]).save_pretrained(str(tmp_path / name))
        folders.append(str(tmp_path / name))
    (tmp_path / "fresh.py").write_text(_FRESH)
    assert run_script(tmp_path / "fresh.py", *folders).split() == ["BottleneckConfig", "DiffPruningConfig"]
