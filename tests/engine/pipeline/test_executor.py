"""The pipeline engine: stages in real processes give what one process gives, in the memory that the template allows."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors import safe_open
from transformers import OlmoeConfig, OlmoeForCausalLM

from peft_mux.checkpoint.task_state import TaskState, join_state, merge_states, split_state
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel, load_stage
from peft_mux.engine.pipeline.traffic import Key
from peft_mux.engine.processes import Processes
from peft_mux.errors import CheckpointError, ConfigError, PlanError, UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.pipeline.template import PipelineTemplate, Slot, build_template
from tests.engine.pipeline import stage_cases as cases
from tests.engine.processes.cases import run_in_session

FOUR = pytest.param(4, marks=pytest.mark.slow)
OF_TWO = "llama-1f1b llama-interleaved llama-poisoned gpt2-mux mistral-uneven".split()
OF_FOUR = ("llama-gpipe", "qwen-interleaved")
"""Of all cases, which one slow test runs."""
MEASURED = "llama-mux"
HANG_LIMIT_S = 3.0
SEEDS = {name: index for index, name in enumerate(cases.LENGTHS)}


# ------------------------------------------------------------------ processes


def require_success(folder: Path) -> None:
    for rank, code in enumerate(read(folder, "codes")):
        assert code == 0, (folder / f"output-{rank}.txt").read_text()[-3000:]


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / f"{name}.json").read_text())


@functools.cache
def alone(shape: str, poison: bool, bf16: bool, folder: Path) -> tuple[cases.Seen, dict[str, TaskState]]:
    return cases.train_alone(cases.Case(shape, poison=poison, bf16=bf16), folder)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipelines")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, home: Path) -> Iterator[dict[Any, Path]]:
    """Run the launches that selected tests ask for, once: processes take longer to start than to train."""
    beside = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    worlds = {2} | {item.callspec.params.get("world", 2) for item in beside}
    folders: dict[Any, Path] = {world: home / f"of-{world}" for world in sorted(worlds)}
    folders |= {how: home / how for how in ("dies", "hangs")}
    _, states = cases.train_alone(cases.CASES[MEASURED], home, cases.NUM_STEPS - 1)
    for world in worlds:
        folders[world].mkdir()
        for name, state in states.items():
            cases.write_state(state, folders[world] / f"start-{name}")
    last = [f"resume:{MEASURED}", f"memory:{MEASURED}"]
    of_two = {"world": 2, "items": [*(f"train:{name}" for name in OF_TWO), *last]}
    of_four = {"world": 4, "items": [*(f"train:{name}" for name in OF_FOUR), last[0], "memory:llama-interleaved"]}
    hangs = {"world": 2, "items": ["fall:llama-1f1b+hangs"], "timeout_s": HANG_LIMIT_S, "falls": True}
    dies = {"world": 4, "items": ["fall:llama-mux+dies"], "timeout_s": 20.0, "falls": True}
    groups = [
        [{**of_two, "folder": str(folders[2])}],
        [{**of_four, "folder": str(home / "of-4")}] if 4 in worlds else [],
        [{**hangs, "folder": str(folders["hangs"])}, {**dies, "folder": str(folders["dies"])}],
    ]
    run_in_session(cases.run_launches, groups, limit_s=280)
    for folder in folders.values():
        require_success(folder)
    yield folders
    alone.cache_clear()


def check_as_alone(folder: Path, name: str, world: int, home: Path) -> None:
    """Compare a case of a pipeline with one process."""
    case = cases.CASES[name]
    seen, states = alone(case.shape, case.poison, case.bf16, home)
    facts = [read(folder, f"{name}-{rank}") for rank in range(world)]
    assert all(fact["losses"] == facts[0]["losses"] and fact["norms"] == facts[0]["norms"] for fact in facts[1:]) or (
        case.poison and all(str(fact["losses"]) == str(facts[0]["losses"]) for fact in facts)
    )
    assert all(fact["failures"] == seen.failures for fact in facts)
    for task, losses in seen.losses.items():
        assert facts[0]["losses"][task] == pytest.approx(losses, rel=1e-5, nan_ok=True), task
        assert facts[0]["norms"][task] == pytest.approx(seen.norms[task], rel=1e-4, nan_ok=True), task
    for task, state in states.items():
        check_states(cases.read_state(folder / f"{name}-{task}"), state, task)


def check_states(found: TaskState, expected: TaskState, task: str) -> None:
    assert found.weights.keys() == expected.weights.keys()
    assert found.moments.keys() == expected.moments.keys()
    for key, weight in expected.weights.items():
        if weight.isfinite().all():
            assert (found.weights[key] - weight).norm() <= 1e-4 * weight.norm(), (task, key)
    for key, moments in expected.moments.items():
        for kind, moment in moments.items():
            assert (found.moments[key][kind] - moment).norm() <= 1e-4 * moment.norm(), (task, key, kind)
    assert found.settings == expected.settings
    assert found.schedule == expected.schedule


@pytest.mark.distributed
@pytest.mark.parametrize("name", OF_TWO)
def test_two_stages_give_the_losses_and_adapters_of_one_process(
    name: str, trained: dict[Any, Path], home: Path
) -> None:
    check_as_alone(trained[2], name, 2, home)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world", "name"), [(4, name) for name in OF_FOUR])
def test_four_stages_give_the_losses_and_adapters_of_one_process(
    world: int, name: str, trained: dict[Any, Path], home: Path
) -> None:
    check_as_alone(trained[world], name, world, home)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_every_schedule_on_every_shape_gives_the_result_of_one_process(world: int, home: Path) -> None:
    names = [name for name, case in cases.CASES.items() if case.layers_per_stage is None or world == 2]
    folder = home / f"all-{world}"
    items = [f"train:{name}" for name in names]
    run_in_session(cases.run_launches, [[{"world": world, "folder": str(folder), "items": items}]], limit_s=600)
    require_success(folder)
    for name in names:
        check_as_alone(folder, name, world, home)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "name"),
    [
        (2, "llama-1f1b"),
        (2, "llama-interleaved"),
        (2, "gpt2-mux"),
        pytest.param(4, "llama-gpipe", marks=pytest.mark.slow),
        pytest.param(4, "qwen-interleaved", marks=pytest.mark.slow),
    ],
)
def test_each_stage_runs_its_list_with_several_micro_batches_in_flight(
    world: int, name: str, trained: dict[Any, Path]
) -> None:
    template = cases.template_of(cases.CASES[name], world)
    for rank, row in enumerate(template.actions):
        fact = read(trained[world], f"{name}-{rank}")
        assert fact["ran"] == [str(action) for action in row]
        assert fact["most_in_flight"] == most_in_flight(template, rank) > 1 - rank
    if name == "llama-gpipe":
        assert read(trained[world], f"{name}-0")["most_in_flight"] == sum(cases.NUM_SLOTS)


def most_in_flight(template: PipelineTemplate, stage: int) -> int:
    held, most = 0, 0
    for action in template.actions[stage]:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


@pytest.mark.distributed
def test_a_poisoned_task_fails_on_all_stages_and_its_neighbours_continue_as_if_it_were_healthy(
    trained: dict[Any, Path], home: Path
) -> None:
    healthy, _ = alone("llama", False, False, home)
    for rank in range(2):
        fact = read(trained[2], f"llama-poisoned-{rank}")
        assert fact["failures"] == {cases.POISONED: "non_finite: loss is nan"}
        assert fact["non_finite"] == [cases.POISONED]
        assert read(trained[2], f"llama-1f1b-{rank}")["non_finite"] == []
        assert len(fact["losses"][cases.POISONED]) == 2
        for task in set(cases.LENGTHS) - {cases.POISONED}:
            assert fact["losses"][task] == pytest.approx(healthy.losses[task], rel=1e-6), task


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "name"), [(2, MEASURED), pytest.param(4, "llama-interleaved", marks=pytest.mark.slow)]
)
def test_the_bytes_that_a_stage_holds_never_exceed_those_of_the_template(
    world: int, name: str, trained: dict[Any, Path]
) -> None:
    for rank in range(world):
        fact = read(trained[world], f"memory-{name}-{rank}")
        assert min(size for _, size in fact["held"][:1]) > 0
        assert fact["held"] == fact["expected"]
        assert fact["held"][-1][1] == 0
        assert fact["peak"] <= max(size for _, size in fact["expected"])


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, FOUR])
def test_a_pipeline_resumes_where_one_process_stopped(world: int, trained: dict[Any, Path], home: Path) -> None:
    seen, _ = alone("llama", False, False, home)
    for rank in range(world):
        losses = read(trained[world], f"resume-{MEASURED}-{rank}")["losses"]
        for task, expected in seen.losses.items():
            assert losses[task] == pytest.approx(expected[-1:], rel=1e-5), task


@pytest.mark.distributed
def test_when_a_stage_dies_all_others_say_so_at_once(trained: dict[Any, Path]) -> None:
    for rank in range(3):
        fact = read(trained["dies"], f"dies-{rank}")
        assert fact["error"].startswith("ProcessError"), fact
        assert fact["seconds"] < 15.0
    assert "rank 3" in read(trained["dies"], "dies-2")["error"]


@pytest.mark.distributed
def test_when_a_stage_hangs_the_other_one_says_so_within_the_time_limit(trained: dict[Any, Path]) -> None:
    fact = read(trained["hangs"], "hangs-0")
    assert "no word from rank 1" in fact["error"]
    assert HANG_LIMIT_S * 0.9 < fact["seconds"] < 2 * HANG_LIMIT_S + 3.0  # it waits, and then asks for the error


# ---------------------------------------------------------------- one process


def plan_of(num_stages: int, schedule: Any = "1f1b", num_chunks: int = 1) -> PipelinePlan:
    template = build_template(cases.loads_of(num_stages, (1000, 700)), schedule, num_chunks=num_chunks)
    return PipelinePlan(template, cases.HTASKS, cases.BUCKETS)


@pytest.mark.parametrize("shape", ["llama", "qwen", "gpt2"])
def test_chunks_of_one_process_give_the_gradients_of_the_whole_model(shape: str) -> None:
    case = cases.Case(shape)
    whole, parts = cases.mux_model(case), cases.mux_model(case)
    work = cases.step_work(0, list(cases.LENGTHS))
    expected = cases.Alone(whole).run(work)
    stage = StageModel(parts, StageLayout.of(cases.NUM_LAYERS, 1, num_chunks=3), 0)
    found = PipelineExecutor(stage, plan_of(1, "mux", 3), Processes()).run(work)
    for name, loss in expected.losses.items():
        assert found.losses[name].item() == pytest.approx(loss.item(), rel=1e-6)
        for key, parameter in whole.task_parameters(name).items():
            torch.testing.assert_close(parts.task_parameters(name)[key].grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused_by_name(off: Callable[[], Any]) -> None:
    stage = StageModel(cases.mux_model(cases.Case("llama")), StageLayout.of(cases.NUM_LAYERS, 1, num_chunks=3), 0)
    plan = replace(plan_of(1, "mux", 3), loads=cases.loads_of(1, (1000, 700)))
    executor = PipelineExecutor(stage, plan, Processes())
    work = cases.step_work(0, list(cases.LENGTHS))
    for step in (lambda: executor.run(work), lambda: executor.run_window([work], lambda *_: ())):
        with (
            off(),
            pytest.raises(
                ConfigError,
                match=r"train must be called outside torch\.no_grad\(\) and torch\.inference_mode\(\),",
            ),
        ):
            step()


def test_stages_divide_all_layers_and_adapters() -> None:
    layout = StageLayout.of(cases.NUM_LAYERS, 2, num_chunks=2)
    whole = dict(cases.mux_model(cases.CASES["llama-mux"]).named_parameters())
    held = [
        dict(StageModel(cases.mux_model(cases.CASES["llama-mux"]), layout, s).model.named_parameters()) for s in (0, 1)
    ]
    assert held[0].keys().isdisjoint(held[1])
    assert held[0].keys() | held[1].keys() == whole.keys()
    for own in held:
        for name, parameter in own.items():
            assert torch.equal(parameter, whole[name])
    assert any("layers.4." in name for name in held[0])
    assert not any("layers.4." in name for name in held[1])


def test_a_layout_follows_the_way_of_a_micro_batch() -> None:
    layout = StageLayout.of(7, 2, num_chunks=2)
    assert [list(layout.layers_of(place)) for place in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]
    assert layout.virtual_stages_of(1) == (1, 3)
    with pytest.raises(
        ValueError,
        match=r"layers_per_stage must be at least 2 in each stage, one layer for each of its chunks, got",
    ):
        StageLayout.of(7, 4, num_chunks=2)


@pytest.mark.parametrize("shape", ["qwen", "gpt2"])
def test_a_stage_reads_its_own_weights_alone_and_draws_the_adapters_of_the_whole_model(
    shape: str, tmp_path: Path
) -> None:
    cases.backbone(shape).save_pretrained(tmp_path, max_shard_size="20KB")
    layout, configs = StageLayout.of(cases.NUM_LAYERS, 2), cases.adapters(shape)
    whole = MultiTaskPeftModel(cases.backbone(shape), configs, seeds=SEEDS, verify=False)
    expected = dict(StageModel(whole, layout, 1).model.named_parameters())
    removed = [path for path in sorted(tmp_path.glob("*.safetensors")) if holds_only_layers(path, range(4))]
    for path in removed:
        path.unlink()
    assert removed
    found = dict(load_stage(tmp_path, configs, layout, 1, seeds=SEEDS).model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises((CheckpointError, FileNotFoundError)):
        load_stage(tmp_path, configs, layout, 0, seeds=SEEDS)


def holds_only_layers(path: Path, layers: range) -> bool:
    with safe_open(path, framework="pt") as file:
        return all(
            any(f".{kind}.{layer}." in f".{key}" for kind in ("layers", "h") for layer in layers) for key in file.keys()
        )


def test_a_folder_without_safetensors_is_refused_by_name(tmp_path: Path) -> None:
    cases.backbone("llama").config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        load_stage(tmp_path, cases.adapters("llama"), StageLayout.of(cases.NUM_LAYERS, 2), 0)


def test_an_architecture_that_cannot_be_cut_is_refused_by_name() -> None:
    config = OlmoeConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=None)
    configs = {"a": LoraConfig(target_modules=["q_proj"])}
    model = MultiTaskPeftModel(OlmoeForCausalLM(config), configs, verify=False)
    with pytest.raises(
        UnsupportedModelError,
        match=(
            r"OlmoeForCausalLM \(model type 'olmoe'\) cannot be cut into stages or shards; the model types that can "
            "are apertus, arcee,.*llama"
        ),
    ):
        StageModel(model, StageLayout.of(2, 2), 0)


def test_passes_are_spread_evenly_over_the_micro_batches_of_their_bucket() -> None:
    work = cases.step_work(0, list(cases.LENGTHS))
    slots = plan_of(2).slots(work.micro_batches)
    counts = {slot: [batch.task_names for batch in batches] for slot, batches in slots.items()}
    assert sum(map(len, counts.values())) == len(work.micro_batches)
    assert set(counts) == {Slot(0, k) for k in range(4)} | {Slot(1, k) for k in range(3)}
    for bucket, htasks in enumerate((("abc"), ("de"))):
        for number in range(cases.NUM_SLOTS[bucket]):
            assert all(set(names) <= set(htasks) for names in counts[Slot(bucket, number)])
    with pytest.raises(PlanError, match="Dispatch the step with the plan"):
        PipelinePlan(plan_of(2).template, (("a",), ("b",), ("c",)), cases.BUCKETS).slots(work.micro_batches)


def test_a_step_without_some_tasks_leaves_their_micro_batches_empty() -> None:
    stage = StageModel(cases.mux_model(cases.CASES["llama-mux"]), StageLayout.of(cases.NUM_LAYERS, 1), 0)
    executor = PipelineExecutor(stage, plan_of(1), Processes())
    assert executor.run(cases.step_work(0, ["d"])).losses.keys() == {"d"}
    assert executor.run(cases.step_work(1, [])).losses == {}


def test_a_template_of_another_pipeline_is_refused() -> None:
    stage = StageModel(cases.mux_model(cases.CASES["llama-mux"]), StageLayout.of(cases.NUM_LAYERS, 1), 0)
    with pytest.raises(
        PlanError, match="the template must have 1 stages of 1 chunks, for which the model was cut, got 2 of 1"
    ):
        PipelineExecutor(stage, plan_of(2), Processes())


@pytest.mark.parametrize(("schedule", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("mux", 1), ("interleaved_1f1b", 2)])
def test_all_that_a_stage_takes_is_on_the_lists_of_its_neighbours_and_gradients_are_freed_once(
    schedule: str, num_chunks: int
) -> None:
    plan = plan_of(3, schedule, num_chunks)
    slots = plan.slots(cases.step_work(0, list(cases.LENGTHS)).micro_batches)
    for stage, row in enumerate(plan.template.actions):
        traffic = cases.traffic_of(plan.template, slots, stage)
        needed = [(a.kind, Key(a.slot, n, a.chunk)) for a in row if traffic.source(a) for n in traffic.numbers(a)]
        arriving = [(kind, one.key) for kind in "FB" for other in range(3) for one in traffic.expected(kind, other)]
        assert sorted(needed) == sorted(arriving)
        back = [(action, to[1]) for action in row if action.kind == "B" and (to := traffic.target(action))]
        sent = [Key(action.slot, number, chunk) for action, chunk in back for number in traffic.numbers(action)]
        freed = [key for other in range(3) for keys in traffic.gradients_taken(other).values() for key in keys]
        assert len(freed) == len(set(freed))
        assert set(freed) <= set(sent)
        if schedule != "mux":  # GPipe sends all hidden states before it takes gradients, which proves nothing
            assert bool(freed) == (schedule != "gpipe" and bool(sent))


def test_a_state_by_name_continues_exactly_in_another_layout(tmp_path: Path) -> None:
    case = cases.CASES["llama-mux"]
    model = cases.mux_model(case)
    optimizer = cases.optimizer_of(model, "a", tmp_path)
    cases.train(cases.Alone(model), model, {"a": optimizer}, steps=range(2))
    state = split_state(model.task_parameters("a"), optimizer)
    parts = []
    for number in range(2):
        stage = StageModel(cases.mux_model(case), StageLayout.of(cases.NUM_LAYERS, 2), number)
        own = cases.optimizer_of(stage.model, "a", tmp_path)
        join_state(state, stage.model.task_parameters("a"), own)
        parts.append(split_state(stage.model.task_parameters("a"), own))
    other = cases.mux_model(case)
    resumed = cases.optimizer_of(other, "a", tmp_path)
    join_state(merge_states(parts), other.task_parameters("a"), resumed)
    for one, own in ((model, optimizer), (other, resumed)):
        cases.train(cases.Alone(one), one, {"a": own}, steps=range(2, 4))
    for key, parameter in model.task_parameters("a").items():
        assert torch.equal(parameter, other.task_parameters("a")[key]), key
    del state.weights[next(iter(state.weights))]
    with pytest.raises(
        CheckpointError,
        match=r"base_model\.model\.model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight must be a tensor of",
    ):
        join_state(state, other.task_parameters("a"), resumed)


def test_spans_record_when_each_action_ran() -> None:
    stage = StageModel(cases.mux_model(cases.CASES["llama-mux"]), StageLayout.of(cases.NUM_LAYERS, 1), 0)
    executor = PipelineExecutor(stage, plan_of(1), Processes())
    begin = time.perf_counter()
    executor.run(cases.step_work(0, list(cases.LENGTHS)))
    assert [span.action for span in executor.spans] == list(executor.plan.template.actions[0])
    instants = [instant for span in executor.spans for instant in (span.start_s, span.end_s)]
    assert instants == sorted(instants)
    assert instants[-1] <= time.perf_counter() - begin
