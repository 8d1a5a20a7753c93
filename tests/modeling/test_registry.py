"""`TaskRegistry` and `StreamOrder` alone: no model, no PEFT injection."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn

from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.registry import TaskRegistry
from peft_mux.modeling.stream import MAX_TASKS, RowSegment, StreamOrder

NAME_OF_A, NAME_OF_B = "layer.q_proj.lora_A.weight", "layer.q_proj.lora_B.weight"


def test_what_lies_here_of_whole_tensors_is_written_or_nothing() -> None:
    registry = TaskRegistry()
    registry.add("a", LoraConfig(r=2))
    registry.adopt("a", {NAME_OF_A: nn.Parameter(torch.ones(2, 6)), NAME_OF_B: nn.Parameter(torch.ones(4, 2))})
    registry.pieces["a", NAME_OF_A] = Piece((2, 12), 1, ((6, 12),))
    whole = {NAME_OF_A: torch.arange(24.0).view(2, 12), NAME_OF_B: torch.zeros(4, 2)}
    for wrong, said in (
        ({NAME_OF_A: whole[NAME_OF_A]}, r"layer\.q_proj\.lora_B\.weight must be the whole tensor of .*, got nothing"),
        ({**whole, NAME_OF_A: torch.zeros(2, 6)}, r"the registered adapter, \[2, 12\], got shape \[2, 6\]"),
    ):
        with pytest.raises(CheckpointError, match=rf'task "a": .*{said}'):
            registry.place_whole("a", wrong)
    assert (registry["a"].parameters[NAME_OF_A] == 1.0).all()
    registry.place_whole("a", whole)
    assert torch.equal(registry["a"].parameters[NAME_OF_A], whole[NAME_OF_A][:, 6:])
    assert not registry["a"].parameters[NAME_OF_B].any()


# --------------- tasks without rows are listed in a pass, so that passes of one set share tables and graphs


def order_of(*gone: str) -> StreamOrder:
    return StreamOrder(lambda name: int(name), lambda name: name not in gone)


def test_tasks_that_had_rows_stay_in_their_order_except_such_as_may_not_be_absent() -> None:
    order = order_of()
    assert order.joined(("2", "5")) == ("2", "5")
    assert order.joined(("1", "3")) == ("1", "2", "3", "5")
    assert order.joined(("5",)) == ("1", "2", "3", "5")
    order = order_of("2")
    order.joined(("1", "2"))
    assert order.joined(("1",)) == ("1",)


def test_streams_in_another_order_and_too_many_tasks_stay_alone() -> None:
    order = order_of()
    order.joined(("1", "2"))
    assert order.joined(("3", "1")) == ("3", "1")
    order.joined(tuple(map(str, range(MAX_TASKS))))
    assert order.joined((str(MAX_TASKS),)) == (str(MAX_TASKS),)


def test_an_absent_adapter_is_an_empty_segment_and_a_pass_may_have_no_rows() -> None:
    slabs: dict[str, Any] = {
        name: SimpleNamespace(number=number, pages=[], watched=list) for number, name in enumerate("abc")
    }
    groups = LoraGroups(slabs.get)
    assert groups.with_absent(()) == ()
    groups.with_absent((RowSegment("a", 0, 4, 1, 1), RowSegment("c", 4, 6, 1, 1)))
    found = groups.with_absent((RowSegment("b", 0, 3, 1, 1), RowSegment("c", 3, 5, 1, 1)))
    assert [(one.adapter, one.start, one.end) for one in found] == [("a", 0, 0), ("b", 0, 3), ("c", 3, 5)]
