"""The benchmark of shared prefixes: set-ups have the prefixes that they state, and both sides do equal work."""

from __future__ import annotations

import pytest

from benchmarks.harness import UnequalWorkError
from benchmarks.paths import SHARED_DATA
from benchmarks.training.prefixes import measure
from benchmarks.training.prefixes.__main__ import cells
from benchmarks.training.prefixes.rows import SET_UPS, SetUp, batches
from benchmarks.training.workloads import ModelSpec

pytestmark = pytest.mark.skipif(not (SHARED_DATA / "text").is_dir(), reason="needs the texts of ../shared/data")
TINY = ModelSpec(hidden_size=16, num_layers=1, intermediate_size=16, num_heads=2, max_tokens=2048)
LEAST_GAIN = {"as it is": 1.0, "preamble": 1.15, "system": 1.5, "4-shot": 3.0, "options": 2.5, "a row a turn": 2.0}


def named(name: str) -> SetUp:
    (found,) = (one for one in SET_UPS if one.name == name)
    return found


@pytest.mark.parametrize("kind", LEAST_GAIN)
def test_rows_of_a_set_up_share_a_prefix_as_far_as_its_name_promises(kind: str) -> None:
    for set_up in SET_UPS:
        if set_up.name.startswith(kind):
            found = batches(set_up, 2, 1)
            assert measure.ideal_gain(found)[1] >= LEAST_GAIN[kind], set_up.name


def test_both_sides_are_measured_on_equal_losses() -> None:
    name = "DPO: instruct"
    found = measure.measure(named(name), TINY, num_tasks=1, rounds=1, with_hf=True, with_memory=False)
    assert 1.0 < found.computed <= found.ideal
    assert found.gain > 0
    assert (found.hf_s is None) == (found.trl_s is None) == (named(name).objective != "sft")
    assert cells(found)[0] == name


def test_a_difference_of_losses_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    take = measure.Steps.take

    def wrong(self: measure.Steps) -> dict[str, float]:
        return {name: loss * (1.0 if self.trainer.args.share_prefixes else 1.1) for name, loss in take(self).items()}

    monkeypatch.setattr(measure.Steps, "take", wrong)
    with pytest.raises(UnequalWorkError, match="as it is: sst2, step 0, and share_prefixes=False: losses"):
        measure.measure(named("as it is: sst2"), TINY, num_tasks=1, rounds=1, with_hf=False, with_memory=False)
