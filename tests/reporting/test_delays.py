"""`Delays`: a task that makes the others wait is told of by what it took, not at every step, and in the end."""

from __future__ import annotations

from typing import Any

from peft_mux.reporting.run_log import CALL_LIMIT_S, SHARE_LIMIT, Delays


class Told:
    """Keeps what is told, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lines: list[str] = []
        self.records: list[dict[str, Any]] = []
        self.delays = Delays(self.lines.append, self._record, clock=lambda: self.now_s)

    def _record(self, event: str, **facts: Any) -> None:
        self.records.append({"event": event, **facts})

    def note(self, what: str, seconds: float, *, times: int = 1, every_s: float = 0.0) -> None:
        for _ in range(times):
            self.now_s += max(seconds, every_s)
            self.delays.note("slow", what, seconds)


def test_one_long_call_is_told_by_task_kind_and_seconds() -> None:
    told = Told()
    told.now_s = 1e6
    told.note("compute_metrics", 3 * CALL_LIMIT_S)
    assert told.lines == ["slow: its compute_metrics made the other tasks wait for 3.0 s (3.0 s in all)"]
    assert told.records == [
        {"event": "delay", "task": "slow", "what": "compute_metrics", "seconds": 3.0, "total_s": 3.0}
    ]


def test_many_short_calls_are_told_where_they_take_much_of_the_run() -> None:
    told = Told()
    told.note("callback", CALL_LIMIT_S / 4, times=3)
    assert told.lines == [], "less than a second in all"
    told.note("callback", CALL_LIMIT_S / 4, times=2)
    assert len(told.lines) == 1


def test_short_calls_that_take_little_of_the_run_are_not_told() -> None:
    told = Told()
    told.note("compute_metrics", 0.1, times=200, every_s=0.2 / SHARE_LIMIT)
    assert told.lines == []


def test_a_task_that_goes_on_is_told_of_each_time_its_total_has_doubled() -> None:
    told = Told()
    told.note("callback", 2.0, times=1000)
    totals = [record["total_s"] for record in told.records]
    assert totals == [2.0 * 2**power for power in range(10)]


def test_the_totals_name_each_kind_and_leave_out_tasks_that_cost_nothing() -> None:
    told = Told()
    told.note("callback", 2.0)
    told.note("train_dataset", 3.0)
    told.delays.note("quick", "callback", CALL_LIMIT_S / 2)
    told.records.clear()
    told.delays.record_totals()
    assert told.records == [
        {"event": "delay_total", "task": "slow", "total_s": 5.0, "callback_s": 2.0, "train_dataset_s": 3.0}
    ]


def test_a_task_that_leaves_is_told_of_once_more_and_forgotten() -> None:
    told = Told()
    told.note("callback", 2.0)
    told.records.clear()
    told.delays.forget("slow")
    told.delays.forget("slow")
    told.delays.record_totals()
    assert [(record["event"], record["total_s"]) for record in told.records] == [("delay_total", 2.0)]
    told.note("callback", 1.5)
    assert len(told.lines) == 2, "one that comes under its name begins anew"
