"""A whole run in windows, which are not flushed between steps, is the run that is flushed, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.pipeline import window_cases as cases
from tests.engine.pipeline.window_cases import Shown
from tests.engine.processes.cases import launch, values


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [2, 4], ids=["pp2", "pp4"])
def test_a_run_in_windows_is_the_run_that_is_flushed_and_the_run_of_one_process(
    num_stages: int, tmp_path: Path
) -> None:
    parts = values(launch(num_stages, cases.run_all, tmp_path, num_stages, ["every_step", "auto"], limit_s=280))
    alone = cases.run(tmp_path, 1, "auto")
    for part in parts:
        for flushed, window, one in zip(part["every_step"], part["auto"], alone, strict=True):
            assert not flushed.windows
            assert max(window.windows) > 2, "nothing was left unflushed"
            check_equal(window, flushed)
            check_close(window, one)
    assert [shown.windows for shown in parts[0]["auto"]] == [shown.windows for shown in parts[-1]["auto"]]
    statuses = {name: status for name, (status, _) in parts[0]["auto"][-1].statuses.items()}
    ended = dict.fromkeys(["long", "short", "steady", "late"], "succeeded")
    assert statuses == {**ended, "wild": "failed"}
    assert "at step 1" in parts[-1]["auto"][0].statuses["wild"][1], "it failed within a window"


def check_equal(found: Shown, wanted: Shown) -> None:
    assert str(found.outcomes) == str(wanted.outcomes)
    assert found.statuses == wanted.statuses
    assert str(found.history) == str(wanted.history)
    assert found.step == wanted.step
    assert found.adapters.keys() == wanted.adapters.keys()
    for name, own in wanted.adapters.items():
        assert all(np.array_equal(found.adapters[name][key], weight) for key, weight in own.items()), name


def check_close(found: Shown, wanted: Shown) -> None:
    assert found.statuses == wanted.statuses
    for name, steps in wanted.outcomes.items():
        losses, norms = zip(*steps, strict=True)
        own_losses, own_norms = zip(*found.outcomes[name], strict=True)
        assert own_losses == pytest.approx(losses, rel=1e-5, nan_ok=True), name
        assert own_norms == pytest.approx(norms, rel=1e-4, nan_ok=True), name
    for name, own in wanted.adapters.items():
        found_flat, flat = (np.concatenate([one[key].ravel() for key in own]) for one in (found.adapters[name], own))
        assert np.linalg.norm(found_flat - flat) <= 1e-4 * np.linalg.norm(flat), name
