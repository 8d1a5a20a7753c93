"""One of several processes is killed, stopped or different from the rest, or a task fails on it alone, in every layout.

No process waits beyond the time limit, every one ends with an error that names the culprit, and where the fault is a
task's own, the other tasks end as if nothing had happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.attacks import rank_cases as cases
from tests.attacks.attack_lab import ATTACKED, OTHERS, sampled
from tests.attacks.rank_cases import FATAL, ISOLATED, SHORT_TIMEOUT_S, TIMEOUT_S, Part
from tests.engine.processes.cases import Outcome, launch, values
from tests.invariants import mux_lab as lab

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(300)]

LIMIT_S = 120.0
"""For all processes of a launch together."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 replicas": (2, {}),
    "2 stages": (2, {"pipeline_parallel_size": 2}),
    "2 cuts": (2, {"tensor_parallel_size": 2}),
    "2 shards": (2, {"shard_backbone": True}),
    "2 replicas of 2 stages": (4, {"pipeline_parallel_size": 2}),
    "2 replicas of 2 cuts": (4, {"tensor_parallel_size": 2}),
}


@dataclass(frozen=True)
class Attack:
    """A fault, in a layout, on its last process."""

    fault: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.layout}"


def attacks_of(faults: Any) -> list[Attack]:
    # Mixed, so that a sample has faults of every kind in layouts of every kind.
    pairs = list(product(faults, LAYOUTS))
    return [Attack(*pair) for pair in sorted(pairs, key=_by_turns)]


def _by_turns(pair: tuple[str, ...]) -> int:
    return sum(map(ord, "".join(pair))) * 7919 % 1009


class Healthy:
    """Runs without a fault, one a layout, made when they are first asked for."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model, self._known = folder, model, {}

    def of(self, layout: str) -> Part:
        if layout not in self._known:
            world_size, arguments = LAYOUTS[layout]
            folder = self.folder / layout
            parts = values(launch(world_size, cases.healthy, folder, self.model, arguments, limit_s=LIMIT_S))
            self._known[layout] = parts[0]
        return self._known[layout]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return cases.saved_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def healthy(model: str, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    return Healthy(tmp_path_factory.mktemp("healthy"), model)


@pytest.mark.parametrize("attack", sampled(attacks_of(ISOLATED), fast=0, ci=7))
def test_a_task_that_fails_on_one_process_fails_on_all_and_the_others_continue(
    attack: Attack, model: str, healthy: Healthy, tmp_path: Path
) -> None:
    world_size, arguments = LAYOUTS[attack.layout]
    victim = world_size - 1
    outcomes = launch(world_size, cases.isolated, tmp_path, model, arguments, attack.fault, victim, limit_s=LIMIT_S)
    wanted = healthy.of(attack.layout)
    for part in values(outcomes):
        assert part.statuses[ATTACKED] == "failed", part
        assert part.reasons[ATTACKED]
        for name in OTHERS[:2]:
            assert part.statuses[name] == "succeeded", part.reasons[name]
            lab.assert_close(part.losses[name], wanted.losses[name], 1e-6, name)


@pytest.mark.parametrize("attack", sampled(attacks_of(FATAL), fast=0, ci=4))
def test_a_process_that_is_lost_or_unlike_the_others_ends_them_by_name(
    attack: Attack, model: str, tmp_path: Path
) -> None:
    world_size, arguments = LAYOUTS[attack.layout]
    victim = world_size - 1
    outcomes = launch(world_size, cases.fatal, tmp_path, model, arguments, attack.fault, victim, limit_s=LIMIT_S)
    for rank, outcome in enumerate(outcomes):
        if rank == victim and attack.fault in ("killed", "stopped"):
            assert outcome.exit_code == -9
            continue
        assert_named(outcome, rank, victim, attack)
    named = [outcome for outcome in outcomes if f"rank {victim}" in outcome.error]
    assert named, "the first to notice knows who it is"


def assert_named(outcome: Outcome, rank: int, victim: int, attack: Attack) -> None:
    """Assert that a process has ended in time, with an error that names the culprit."""
    assert outcome.error != "still running at the limit", f"rank {rank} hangs"
    if rank == victim and attack.fault == "a callback of the run that raises":
        assert outcome.error.startswith("OSError"), outcome.error
        return
    assert outcome.error.startswith(("ProcessError", "ConfigError")), outcome
    # Of a process that stands still, others may hear late: from those that have noticed, and ended since.
    has_heard = attack.fault == "stopped" and "has died" in outcome.error
    # One that is late finds that the others have ended.
    has_heard |= rank == victim and attack.fault == "late"
    assert f"rank {victim}" in outcome.error or has_heard, outcome.error
    limit_s = SHORT_TIMEOUT_S + 10 if attack.fault in ("stopped", "late") else 2 * TIMEOUT_S
    assert outcome.seconds < limit_s, f"{outcome.seconds} s"


@pytest.mark.parametrize("layout", sampled(list(LAYOUTS), fast=0, ci=1))
def test_a_full_disk_of_the_process_that_writes_ends_no_process(
    layout: str, model: str, healthy: Healthy, tmp_path: Path
) -> None:
    world_size, arguments = LAYOUTS[layout]
    outcomes = launch(world_size, cases.with_a_full_disk, tmp_path, model, arguments, limit_s=LIMIT_S)
    wanted = healthy.of(layout)
    for part in values(outcomes):
        assert part.losses == wanted.losses
        assert "succeeded" not in part.statuses.values(), "no adapter could be written"
