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


def test_equal_runs_are_equal() -> None:
    assert dict(verdicts({"one": shown(), "two": shown()}, {"two": shown(), "one": shown()})) == {
        "one": EQUAL,
        "two": EQUAL,
    }


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        (shown(math.nextafter(LOSS, 9.0)), "/logs/a/1/loss: 4.834095001220703 before, 4.834095001220704 after"),
        ({"statuses": {"a": "failed"}}, "/statuses/a: 'succeeded' before, 'failed' after"),
        ({"statuses": {}}, "/statuses/a: only before"),
        ({"statuses": {"a": "succeeded", "b": "failed"}}, "/statuses/b: only after"),
        ({"records": [{"event": "train"}]}, "trains to the same bits, but /records: 2 entries before, 1 after"),
        ({"output": [2.0, LOSS.hex(), {}]}, "/output/0: 2 before, 2.0 after"),
        ({"tensors": {}}, "/tensors/a/adapter_model.safetensors: only before"),
        ({"more": 1}, "trains to the same bits, but /more: only after"),
    ],
)
def test_every_kind_of_difference_is_reported(other: dict[str, Any], verdict: str) -> None:
    assert dict(verdicts({"one": shown()}, {"one": {**shown(), **other}})) == {"one": verdict}


def test_a_case_that_failed_or_was_not_run_is_never_equal() -> None:
    failed = {"failed": "ValueError: no"}
    assert dict(verdicts({"one": failed, "two": shown()}, {"one": dict(failed), "three": shown()})) == {
        "one": "before failed: ValueError: no; after failed: ValueError: no",
        "two": "not run after",
        "three": "not run before",
    }


# --------------------------------------------------------------------- resumed


def test_a_resumed_run_may_have_another_checkpoint_more_but_no_other_end() -> None:
    tensors = {**shown()["tensors"], "a/checkpoint-1/optimizer.safetensors": "2f"}
    resumed = {**shown(), "tensors": tensors, "records": []}
    elsewhere = {**resumed, "statuses": {"a": "failed"}}
    for found, verdict in (
        (resumed, EQUAL),
        ({**resumed, "output": [2, (4.0).hex(), {}]}, EQUAL),
        (elsewhere, "/statuses/a: 'succeeded' before, 'failed' after"),
        ({"failed": "CheckpointError: no"}, "after failed: CheckpointError: no"),
    ):
        judged = dict(verdicts({WHOLE: shown()}, {WHOLE: shown(), RESUMED: found}))
        assert judged == {WHOLE: EQUAL, "old checkpoint, resumed": verdict}


# --------------------------------------------------------------------- calling


@pytest.fixture
def checkouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give what three checkouts show, instead of running them."""
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


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the command."""
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *arguments])
    return compare_runs.main()


@pytest.mark.parametrize(("after", "code", "said"), [("new", 0, "equal\n"), ("odd", 1, "/logs/a/1/loss: ")])
@pytest.mark.usefixtures("checkouts")
def test_a_checkout_and_a_stored_run_are_compared_with_and_resumed(
    after: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert call(monkeypatch, "--before", "old", "--after", after) == code
    compared = capsys.readouterr().out
    assert f"planner mux               {said}" in compared
    assert "old checkpoint, resumed   " in compared
    file = str(tmp_path / "stored.json")
    assert call(monkeypatch, "--after", "old", "--write", file) == 0
    assert call(monkeypatch, "--against", file, "--after", after) == code
    assert capsys.readouterr().out == compared
