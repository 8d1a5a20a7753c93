"""The comparison of two checkouts finds every difference; nothing is trained here."""

from __future__ import annotations

import copy
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.invariants import compare_runs
from tests.invariants.compare_runs import EQUAL, HALF, RESUMED, WHOLE, verdicts

LOSS = 4.834095001220703


def shown(loss: float = LOSS) -> dict[str, Any]:
    """Return what a case shows."""
    return {
        "statuses": {"a": "succeeded"},
        "logs": {"a": [{"step": 1, "loss": (5.0).hex()}, {"step": 2, "loss": loss.hex()}]},
        "output": [2, loss.hex(), {}],
        "tensors": {"a/adapter_model.safetensors": "0f", "a/checkpoint-2/optimizer.safetensors": "1f"},
        "records": [{"event": "train"}, {"event": "run"}],
    }


def changed(**other: Any) -> dict[str, Any]:
    """Return what a case shows with other fields."""
    return {**shown(), **other}


def test_equal_runs_are_equal() -> None:
    assert dict(verdicts({"one": shown(), "two": shown()}, {"two": shown(), "one": shown()})) == {
        "one": EQUAL,
        "two": EQUAL,
    }


def test_one_bit_of_one_loss_is_a_difference() -> None:
    found = dict(verdicts({"one": shown()}, {"one": shown(math.nextafter(LOSS, 9.0))}))
    assert found == {"one": "/logs/a/1/loss: 4.834095001220703 before, 4.834095001220704 after"}


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ({"statuses": {"a": "failed"}}, "/statuses/a: 'succeeded' before, 'failed' after"),
        ({"statuses": {}}, "/statuses/a: only before"),
        ({"statuses": {"a": "succeeded", "b": "failed"}}, "/statuses/b: only after"),
        ({"records": [{"event": "train"}]}, "trains to the same bits, but /records: 2 entries before, 1 after"),
        ({"output": [2.0, LOSS.hex(), {}]}, "/output/0: 2 before, 2.0 after"),
        ({"output": None}, "/output: [2, '0x1.3561d00000000p+2', {}] before, None after"),
        ({"tensors": {}}, "/tensors/a/adapter_model.safetensors: only before"),
        ({"more": 1}, "trains to the same bits, but /more: only after"),
    ],
)
def test_every_kind_of_difference_is_reported(other: dict[str, Any], verdict: str) -> None:
    assert dict(verdicts({"one": shown()}, {"one": changed(**other)})) == {"one": verdict}


def test_long_values_are_reported_in_short() -> None:
    (found,) = dict(verdicts({"one": {"text": "x" * 999}}, {"one": {"text": "y" * 999}})).values()
    assert len(found) < 300


def test_a_case_that_failed_in_the_same_way_on_both_is_not_equal() -> None:
    failed = {"failed": "ValueError: no"}
    assert dict(verdicts({"one": failed}, {"one": dict(failed)})) == {
        "one": "before failed: ValueError: no; after failed: ValueError: no"
    }
    assert dict(verdicts({"one": shown()}, {"one": failed})) == {"one": "after failed: ValueError: no"}


def test_a_case_that_one_checkout_has_not_run_is_not_equal() -> None:
    found = dict(verdicts({"one": shown(), "two": shown()}, {"one": shown(), "three": shown()}))
    assert found == {"one": EQUAL, "two": "not run after", "three": "not run before"}


# --------------------------------------------------------------------- resumed


def after_resuming(**other: Any) -> dict[str, str]:
    """Return the verdicts where a run was resumed."""
    tensors = {**shown()["tensors"], "a/checkpoint-1/optimizer.safetensors": "2f"}
    resumed = changed(tensors=tensors, records=[], **other)
    return dict(verdicts({WHOLE: shown()}, {WHOLE: shown(), RESUMED: resumed}))


def test_a_resumed_run_may_have_another_checkpoint_more() -> None:
    assert after_resuming() == {WHOLE: EQUAL, "old checkpoint, resumed": EQUAL}


def test_a_resumed_run_that_ends_elsewhere_is_found() -> None:
    found = after_resuming(output=[2, (4.0).hex(), {}])
    assert found["old checkpoint, resumed"].startswith("/output/1: 4.834095001220703 before, 4.0 after")


def test_a_run_that_could_not_be_resumed_is_not_equal() -> None:
    found = dict(verdicts({WHOLE: shown()}, {WHOLE: shown(), RESUMED: {"failed": "CheckpointError: no"}}))
    assert found["old checkpoint, resumed"] == "after failed: CheckpointError: no"


# --------------------------------------------------------------------- calling


@pytest.fixture
def checkouts(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Return what checkouts show by their names, instead of running them."""
    known = {"old": {WHOLE: shown()}, "new": {WHOLE: shown()}, "odd": {WHOLE: shown(4.0)}}

    def run(checkout: Path, folder: Path, half: Path | None = None) -> dict[str, Any]:
        (folder / HALF / "a").mkdir(parents=True)
        (folder / HALF / "a" / "file.bin").write_bytes(b"\x00\xff" + checkout.name.encode())
        found = copy.deepcopy(known[checkout.name])
        if half is not None:
            assert (half / "a" / "file.bin").read_bytes() == b"\x00\xffold"
            found[RESUMED] = found[WHOLE]
        return found

    monkeypatch.setattr(compare_runs, "run_checkout", run)
    return known


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the command."""
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *arguments])
    return compare_runs.main()


@pytest.mark.usefixtures("checkouts")
def test_the_command_says_equal_and_ends_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--before", "old", "--after", "new") == 0
    assert capsys.readouterr().out.split("\n") == [
        "planner mux               equal",
        "old checkpoint, resumed   equal",
        "",
    ]


@pytest.mark.usefixtures("checkouts")
def test_the_command_fails_on_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "--before", "old", "--after", "odd") == 1
    assert "planner mux               /logs/a/1/loss: " in capsys.readouterr().out


@pytest.mark.parametrize(("after", "code"), [("new", 0), ("odd", 1)])
@pytest.mark.usefixtures("checkouts")
def test_a_stored_run_is_compared_with_and_resumed(
    after: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = str(tmp_path / "stored.json")
    assert call(monkeypatch, "--after", "old", "--write", file) == 0
    assert call(monkeypatch, "--against", file, "--after", after) == code


@pytest.mark.usefixtures("checkouts")
def test_the_command_asks_for_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        call(monkeypatch)
