"""The list of a backbone's layers, and which of them are equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig

from peft_mux.modeling.backbone.modules import find_layers, first_layers, kinds_of_layers, num_telling_layers
from peft_mux.modeling.model import MultiTaskPeftModel

NUM_LAYERS = 12
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": NUM_LAYERS,
}


def described(name: str) -> Any:
    """Return a small causal language model without weights, of the class of configuration of a name."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**SIZES))


def tuned(backbone: Any, **options: Any) -> list[int]:
    """Return the kinds of the layers of a backbone with two tasks; the second has these options."""
    first = LoraConfig(r=4, target_modules=["o_proj", "down_proj"])
    second = LoraConfig(**{"r": 2, "target_modules": ["o_proj", "down_proj"], **options})
    MultiTaskPeftModel(backbone, {"first": first, "second": second}, verify=False)
    found = find_layers(backbone)
    assert found is not None
    return kinds_of_layers(backbone, list(found.layers))


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("LlamaConfig", [0] * 12),
        ("Gemma2Config", [0, 1] * 6),
        ("Gemma3TextConfig", [0, 0, 0, 0, 0, 1] * 2),
        ("DeepseekV3Config", [0] * 3 + [1] * 9),
    ],
)
def test_layers_of_one_kind_are_known_as_such_with_adapters_and_without(name: str, kinds: list[int]) -> None:
    backbone = described(name)
    found = find_layers(backbone)
    assert found is not None
    assert kinds_of_layers(backbone, list(found.layers)) == kinds
    assert tuned(backbone, target_modules=["o_proj"]) == kinds


@pytest.mark.parametrize(
    ("options", "other"),
    [({"layers_to_transform": [0, 5]}, [0, 5]), ({"rank_pattern": {"layers.7.mlp.down_proj": 3}}, [7])],
)
def test_layers_whose_adapters_differ_are_of_different_kinds(options: dict[str, Any], other: list[int]) -> None:
    kinds = tuned(described("LlamaConfig"), **options)
    assert {index for index, kind in enumerate(kinds) if kind == kinds[other[0]]} == set(other)
    assert len(set(kinds)) == 2


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_the_fewest_first_layers_that_include_every_kind_are_chosen(kinds: Sequence[int]) -> None:
    def tells(count: int) -> bool:
        """Whether each layer that is left out has one of its kind among those that are not, behind the first."""
        return set(kinds[count:]) <= set(kinds[1:count])

    assert num_telling_layers(kinds) == next(count for count in range(1, len(kinds) + 1) if tells(count))


def test_a_backbone_has_its_first_layers_only_for_the_time_of_the_block() -> None:
    backbone = described("LlamaConfig")
    layers = list(backbone.model.layers)
    with first_layers(backbone, 3):
        assert list(backbone.model.layers) == layers[:3]
        assert backbone.config.num_hidden_layers == 3
    assert list(backbone.model.layers) == layers
    assert backbone.config.num_hidden_layers == NUM_LAYERS


@pytest.mark.parametrize("count", [0, NUM_LAYERS, NUM_LAYERS + 1])
def test_all_layers_stay_where_all_are_asked_for(count: int) -> None:
    backbone = described("LlamaConfig")
    with first_layers(backbone, count):
        assert len(backbone.model.layers) == NUM_LAYERS
