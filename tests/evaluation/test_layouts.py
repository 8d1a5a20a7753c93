"""Metrics of a task's own in any layout: from rows that replicas share, and the same on every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.trainer.evaluation import batches_of_replica
from tests.engine.processes.cases import launch, values
from tests.evaluation import layout_cases as cases
from tests.evaluation.layout_cases import Measured

pytestmark = pytest.mark.distributed
PP2 = {"pipeline_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2}),
    "unequal": (3, {"replicas": "<1,2>, <1,1>"}),
    "fsdp2 x pp2": (4, {**PP2, "shard_backbone": True, "pipeline_schedule": "interleaved_1f1b"}),
}
CASES = [pytest.param(name, marks=pytest.mark.nightly if "fsdp" in name else pytest.mark.slow) for name in LAYOUTS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return cases.train(0, tmp_path_factory.mktemp("alone"), {})


@pytest.fixture(scope="module")
def parts_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Measured]]:
    """Return what every process of a layout saw, which trains when it is first asked for."""

    @functools.cache
    def parts(layout: str) -> list[Measured]:
        size, arguments = LAYOUTS[layout]
        return values(launch(size, cases.train, tmp_path_factory.mktemp("parts"), arguments, limit_s=120))

    return parts


@pytest.mark.parametrize("layout", CASES)
def test_metrics_are_those_of_one_process_and_the_same_bits_on_all(
    layout: str, parts_of: Callable[[str], list[Measured]], alone: Measured
) -> None:
    assert len(alone.evaluations["well"]) == 4
    assert alone.evaluations["well"][0]["eval_nll"] == pytest.approx(
        alone.evaluations["well"][0]["eval_loss"], rel=1e-5
    )
    parts = parts_of(layout)
    for part in parts:
        assert part.evaluations == parts[0].evaluations
        assert part.evaluated == parts[0].evaluated
        for name, expected in alone.evaluations.items():
            assert len(part.evaluations[name]) == len(expected), name
            for found, wanted in zip(part.evaluations[name], expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5), name
        assert part.evaluated == pytest.approx(alone.evaluated, rel=1e-5)
        assert "well/eval_nll" in part.evaluated
        np.testing.assert_allclose(part.predicted.predictions, alone.predicted.predictions, rtol=1e-4, atol=1e-5)
        assert (part.predicted.label_ids == alone.predicted.label_ids).all()
        assert part.predicted.metrics["test_loss"] == pytest.approx(alone.predicted.metrics["test_loss"], rel=1e-5)
    # Only processes with logits call the functions of tasks.
    has_logits = {"tp2": (1, 1), "unequal": (0, 1, 1), "fsdp2 x pp2": (0, 1, 0, 1)}[layout]
    assert [part.num_calls for part in parts] == [has * alone.num_calls for has in has_logits]


@pytest.mark.parametrize("layout", CASES)
def test_metrics_that_fail_or_decline_end_their_task_on_every_process_with_one_reason(
    layout: str, parts_of: Callable[[str], list[Measured]], alone: Measured
) -> None:
    assert alone.statuses["broken"] == ("failed", "evaluation failed: ValueError: no such column")
    assert alone.statuses["odd"] == ("failed", "evaluation failed: KeyError: 'logits'")
    assert alone.statuses["declining"][0] == "stopped_early"
    assert {alone.statuses[name][0] for name in ("well", "shrunk", "plain")} == {"succeeded"}
    for part in parts_of(layout):
        assert part.statuses == alone.statuses


@pytest.mark.slow
def test_a_part_of_a_model_refuses_what_takes_all_of_it_and_says_what_to_do(
    parts_of: Callable[[str], list[Measured]],
) -> None:
    for stage in parts_of("unequal")[:2]:
        generate, forward, plain, merge = stage.refusals
        assert generate.startswith('task_view("well").generate needs a whole model')
        assert forward.startswith('task_view("well"), a forward pass needs a whole model')
        assert plain.startswith("a forward pass needs a whole model")
        for said in (generate, forward, plain):
            assert "got one of 2 pipeline stages" in said
        assert all("PeftModel.from_pretrained" in refusal for refusal in stage.refusals)
        assert merge.startswith("merge_and_unload")
    for shard in parts_of("tp2"):
        assert shard.refusals[0] == "done", "shards generate together"
        assert shard.refusals[1].startswith("logits of a head that is cut for tensor parallelism cannot have gradients")
        assert shard.refusals[3].startswith("merge_and_unload needs a whole backbone")
        assert "divided among processes" in shard.refusals[3]


@given(st.integers(0, 40), st.integers(1, 6))
def test_every_batch_is_evaluated_by_one_replica_and_all_have_equally_many_passes(
    num_batches: int, num_replicas: int
) -> None:
    batches: Any = [f"batch {number}" for number in range(num_batches)]
    shares = [list(batches_of_replica(batches, replica, num_replicas)) for replica in range(num_replicas)]
    own = [(number, batch) for share in shares for number, batch in share if number is not None]
    assert sorted(own) == list(enumerate(batches))
    assert {len(share) for share in shares} == {-(-num_batches // num_replicas)}
