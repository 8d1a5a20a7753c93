"""Which configurations there are to deploy, from a run's own facts."""

from __future__ import annotations

from dataclasses import replace

from peft_mux.scheduler.deployment.space import candidate_configs
from peft_mux.scheduler.parallel_layout import ParallelConfig
from tests.scheduler.replicas.cases import FACTS, ONE, SHAPE_7B, TWO


def test_candidates_have_shards_by_powers_of_two_and_every_depth_that_makes_the_largest_stage_smaller() -> None:
    assert candidate_configs(FACTS, 3) == (ONE, ParallelConfig(1, 2), TWO, ParallelConfig(1, 3))
    found = candidate_configs(FACTS, 16)
    assert {config.tp for config in found} == {1, 2, 4, 8, 16}
    # Of 32 layers nine stages have one with 4, as eight have; eleven have one with 3.
    assert [config.pp for config in found if config.tp == 1] == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]
    shallow = replace(FACTS, shape=replace(SHAPE_7B, num_layers=2))
    assert max(config.pp for config in candidate_configs(shallow, 16)) == 2
    no_shards = replace(FACTS, supports=lambda config: config.tp == 1)
    assert candidate_configs(no_shards, 4) == (ONE, *(ParallelConfig(1, depth) for depth in (2, 3, 4)))
    assert candidate_configs(replace(FACTS, supports=lambda config: False), 4) == ()


def test_on_many_devices_depths_are_powers_of_two_as_deployments_would_be_too_many() -> None:
    found = candidate_configs(FACTS, 64)
    assert {config.pp for config in found} == {1, 2, 4, 8, 16, 32}
    assert {config.tp for config in found} == {1, 2, 4, 8, 16, 32, 64}
