"""`TaskRegistry` alone: no model, no PEFT injection."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig
from torch import nn

from peft_mux.errors import CheckpointError
from peft_mux.modeling.registry import TaskRegistry
from peft_mux.modeling.sharding import Piece

NAME_OF_A, NAME_OF_B = "layer.q_proj.lora_A.weight", "layer.q_proj.lora_B.weight"


def factors(rank: int, fill: float = 1.0) -> dict[str, nn.Parameter]:
    return {
        NAME_OF_A: nn.Parameter(torch.full((rank, 6), fill)),
        NAME_OF_B: nn.Parameter(torch.full((4, rank), 2 * fill)),
    }


def registry_of(*names: str) -> TaskRegistry:
    registry = TaskRegistry()
    for number, name in enumerate(names):
        config = LoraConfig(r=2 + number)
        registry.add(name, config)
        registry.adopt(name, factors(2 + number, 1.0 + number))
    return registry


def test_a_task_without_parameters_here_has_a_slab_that_nothing_reads() -> None:
    registry, config = TaskRegistry(), LoraConfig(r=2)
    registry.add("elsewhere", config)
    registry.adopt("elsewhere", {}, torch.device("cpu"))
    registry.slab_of("elsewhere").bind_gradients()
    assert list(registry.parameters()) == []


def test_what_lies_here_of_whole_tensors_is_written_or_nothing() -> None:
    registry = registry_of("a")
    registry.pieces["a", NAME_OF_A] = Piece((2, 12), 1, ((6, 12),))
    whole = {NAME_OF_A: torch.arange(24.0).view(2, 12), NAME_OF_B: torch.zeros(4, 2)}
    with pytest.raises(
        CheckpointError,
        match=r'task "a": layer\.q_proj\.lora_B\.weight must be the whole tensor of .*, got nothing',
    ):
        registry.place_whole("a", {NAME_OF_A: whole[NAME_OF_A]})
    with pytest.raises(
        CheckpointError,
        match=(
            r'task "a": layer\.q_proj\.lora_A\.weight must be the whole tensor of the registered adapter, \[2, 12\], '
            r"got shape \[2, 6\]"
        ),
    ):
        registry.place_whole("a", {**whole, NAME_OF_A: torch.zeros(2, 6)})
    assert (registry.parameters_of("a")[NAME_OF_A] == 1.0).all()
    registry.place_whole("a", whole)
    assert torch.equal(registry.parameters_of("a")[NAME_OF_A], whole[NAME_OF_A][:, 6:])
    assert not registry.parameters_of("a")[NAME_OF_B].any()


def test_the_configuration_as_given_is_remembered() -> None:
    registry = TaskRegistry()
    config = LoraConfig(r=2, target_modules=["q_proj"])
    registry.add("a", config)
    config.r = 3
    assert registry.was_given("a", LoraConfig(r=2, target_modules=["q_proj"]))
    assert not registry.was_given("a", config)
