"""Metrics of a task's own in any layout: from rows that replicas share, and the same on every process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.processes.cases import launch, values
from tests.evaluation import layout_cases as cases
from tests.evaluation.layout_cases import Measured

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow

PP2 = {"pipeline_parallel_size": 2}
LAYOUTS = {
    "pp2": (2, {**PP2, "pipeline_schedule": "interleaved_1f1b"}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "unequal": (3, {"replicas": "<1,2>, <1,1>"}),
    "dp3": (3, {}),
    "fsdp2": (2, {"shard_backbone": True}),
    "fsdp2 x pp2": (4, {**PP2, "shard_backbone": True}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return cases.train(0, tmp_path_factory.mktemp("alone"), {})


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Measured]]:
    """Return what every process of each layout saw."""
    root = tmp_path_factory.mktemp("parts")
    return {
        name: values(launch(size, cases.train, root / name, arguments, limit_s=120))
        for name, (size, arguments) in LAYOUTS.items()
    }


@SLOW
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_one_process_and_the_same_bits_on_all(
    layout: str, parts: dict[str, list[Measured]], alone: Measured
) -> None:
    assert len(alone.evaluations["well"]) == 4
    assert alone.evaluations["well"][0]["eval_nll"] == pytest.approx(
        alone.evaluations["well"][0]["eval_loss"], rel=1e-5
    )
    for part in parts[layout]:
        assert part.evaluations == parts[layout][0].evaluations
        assert part.evaluated == parts[layout][0].evaluated
        for name, expected in alone.evaluations.items():
            assert len(part.evaluations[name]) == len(expected), name
            for found, wanted in zip(part.evaluations[name], expected, strict=True):
                assert found == pytest.approx(wanted, rel=1e-5), name
        assert part.evaluated == pytest.approx(alone.evaluated, rel=1e-5)
        assert "well/eval_nll" in part.evaluated


@SLOW
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_that_fail_or_decline_end_their_task_on_every_process_with_one_reason(
    layout: str, parts: dict[str, list[Measured]], alone: Measured
) -> None:
    assert alone.statuses["broken"] == ("failed", "evaluation failed: ValueError: no such column")
    assert alone.statuses["odd"] == ("failed", "evaluation failed: KeyError: 'logits'")
    assert alone.statuses["declining"][0] == "stopped_early"
    assert {alone.statuses[name][0] for name in ("well", "shrunk", "plain")} == {"succeeded"}
    for part in parts[layout]:
        assert part.statuses == alone.statuses


@SLOW
def test_only_processes_with_logits_call_the_functions_of_tasks(
    parts: dict[str, list[Measured]], alone: Measured
) -> None:
    calls = {layout: [part.num_calls for part in own] for layout, own in parts.items()}
    assert calls == {
        "pp2": [0, alone.num_calls],
        "tp2": [alone.num_calls] * 2,
        "unequal": [0, alone.num_calls, alone.num_calls],
        "dp3": [alone.num_calls] * 3,
        "fsdp2": [alone.num_calls] * 2,
        "fsdp2 x pp2": [0, alone.num_calls] * 2,
    }


@pytest.mark.parametrize("arguments", [PP2, pytest.param({}, marks=SLOW)], ids=["stages", "replicas"])
def test_a_classifier_in_parts_has_the_metrics_of_one_process(arguments: dict[str, int], tmp_path: Path) -> None:
    one = cases.train_classifier(0, tmp_path / "one", {})
    parts = values(launch(2, cases.train_classifier, tmp_path / "two", arguments, limit_s=120))
    assert [len(part.evaluations["sorted"]) for part in parts] == [3, 3]
    for part in parts:
        for found, wanted in zip(part.evaluations["sorted"], one.evaluations["sorted"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5, abs=1e-7)
            assert "eval_logit" in found


@SLOW
def test_a_stage_refuses_what_takes_all_layers_and_says_what_to_do(parts: dict[str, list[Measured]]) -> None:
    for part in parts["pp2"]:
        generate, forward, plain, merge = part.refusals
        assert generate.startswith('task_view("well").generate needs a whole model')
        assert forward.startswith('task_view("well"), a forward pass needs a whole model')
        assert plain.startswith("a forward pass needs a whole model")
        for said in (generate, forward, plain):
            assert "got one of 2 pipeline stages" in said
        assert all("PeftModel.from_pretrained" in refusal for refusal in part.refusals)
        assert merge.startswith("merge_and_unload")


@SLOW
def test_shards_generate_together_and_refuse_to_merge(parts: dict[str, list[Measured]]) -> None:
    for part in parts["tp2"]:
        assert part.refusals[0] == "done"
        assert part.refusals[1].startswith("logits of a head that is cut for tensor parallelism cannot have gradients")
        assert part.refusals[3].startswith("merge_and_unload needs a whole backbone")
        assert "divided among processes" in part.refusals[3]
