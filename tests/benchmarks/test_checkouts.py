"""Two checkouts are timed side by side, and their losses compared to the last bit."""

from __future__ import annotations

import pytest

from benchmarks.paths import ROOT
from benchmarks.training.checkouts import main


@pytest.mark.nightly
def test_a_checkout_trains_to_the_same_losses_as_itself(capfd: pytest.CaptureFixture[str]) -> None:
    main(["--before", str(ROOT), "--steps", "2", "--warm", "1", "--mix", "uniform"])
    (line,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("uniform")]
    assert line.endswith("bit-equal losses")
    assert float(line.split("after / before")[1].split()[0]) > 0


@pytest.mark.nightly
def test_the_hosts_time_is_that_of_a_pass_that_launches_every_kernel(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    main(["--before", str(ROOT), "--steps", "2", "--warm", "1", "--mix", "host", "--layers", "2"])
    # Four groups (q/k/v, o, gate/up, down): S, y, dS, dx, dA and dB of each, except dx of the first group of all.
    launches = (2 * 6 * 4 - 1) / 2
    assert f"{launches:.1f} Triton launches a layer, {launches:.1f} Triton" in capfd.readouterr().out
