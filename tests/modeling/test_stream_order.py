"""Tasks without rows in a pass are listed in it, so that passes of one set of tasks share tables and graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.stream import RowSegment
from peft_mux.modeling.stream_order import MAX_TASKS, StreamOrder


def order_of(*gone: str) -> StreamOrder:
    return StreamOrder(lambda name: int(name), lambda name: name not in gone)


def test_tasks_that_had_rows_stay_in_their_order() -> None:
    order = order_of()
    assert order.joined(("2", "5")) == ("2", "5")
    assert order.joined(("1", "3")) == ("1", "2", "3", "5")
    assert order.joined(("5",)) == ("1", "2", "3", "5")


def test_tasks_that_may_not_be_absent_are_left_out() -> None:
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
