"""Passes in turns: the order is Algorithm 1's, the results are those of one after another, and nothing is left over."""

from __future__ import annotations

import contextlib
import contextvars
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peft_mux.data.batch import chains_of
from peft_mux.engine.executor import Executor
from peft_mux.engine.processes import Processes
from peft_mux.modeling.adapters.lora.layer import MultiplexedLinear
from peft_mux.modeling.attention.packed import ATTENTION_NAME
from peft_mux.parallel.pipeline.executor import PipelineExecutor
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel
from peft_mux.parallel.tensor.interleaving import Interleaving, TurnLinks, Turns
from peft_mux.scheduler.subgraphs import Stretch, pass_times, turn_order
from tests.engine import lab
from tests.engine.processes import cases as parallel_cases
from tests.parallel.tensor import turn_cases as cases


def constant(latency: float) -> Callable[[int], float]:
    return lambda depth: latency


# ------------------------------------------------------------------ mechanism


def test_one_pass_runs_at_a_time_and_the_longest_of_equal_depth_begins() -> None:
    turns: Turns[str] = Turns([constant(1.0), constant(3.0), constant(2.0)])
    said: list[tuple[str, int]] = []
    running = threading.Lock()

    def speak(word: str) -> str:
        for depth in range(3):
            assert running.acquire(blocking=False), "two passes run at once"
            said.append((word, depth))
            time.sleep(0.001)
            running.release()
            turns.wait(lambda: None)
        return word

    assert turns.run([lambda: speak("short"), lambda: speak("long"), lambda: speak("middle")]) == [
        "short",
        "long",
        "middle",
    ]
    assert said == [(word, depth) for depth in range(3) for word in ("long", "middle", "short")]
    assert [(span.index, span.depth) for span in turns.spans] == [(i, depth) for depth in range(4) for i in (1, 2, 0)]


def test_an_interrupt_of_the_caller_ends_the_passes_even_those_that_catch_all_exceptions() -> None:
    turns: Turns[int] = Turns([constant(1.0), constant(1.0)])
    before, main = threading.active_count(), threading.main_thread().ident
    assert main is not None
    count = Counter[str]()

    def go(word: str) -> int:
        for number in range(2_000):
            count[word] += 1
            if word == "a" and number == 3:
                signal.pthread_kill(main, signal.SIGINT)
            with contextlib.suppress(Exception):
                turns.wait(lambda: time.sleep(0.001))
        return 0

    with pytest.raises(KeyboardInterrupt):
        turns.run([lambda: go("a"), lambda: go("b")])
    assert threading.active_count() == before
    assert 3 < count["a"] < 1_000


def test_passes_find_the_modes_of_their_caller() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="nothing")
    word.set("something")

    def modes() -> tuple[Any, ...]:
        names = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return *names, torch.is_inference_mode_enabled(), torch.get_num_threads(), word.get()

    def in_a_pass() -> tuple[Any, ...]:
        return Turns[Any]([constant(1.0)]).run([modes])[0]

    assert in_a_pass() == modes()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_a_pass() == modes()
    with torch.inference_mode():
        assert in_a_pass() == modes()


# --------------------------------------------------------------------- groups


def test_groups_are_of_one_bucket_of_the_plan_and_as_wide_as_it_says() -> None:
    links = TurnLinks(cases.LoggingLinks())
    interleaving = Interleaving(cases.linked_model(links), links)
    chains = cases.alone(lab.step_work().micro_batches)
    assert {len(group) for group in interleaving.groups(chains)} == {1}, "there is no plan yet"
    bucket_of = {"a": 0, "b": 0, "c": 1, "d": 0, "e": 0}
    interleaving.follow(cases.plan_of(((0, 2), (1,)), width=3))
    groups = [[chains[index] for index in group] for group in interleaving.groups(chains)]
    assert sorted(id(chain) for group in groups for chain in group) == sorted(map(id, chains))
    assert max(map(len, groups)) == 3
    for group in groups:
        assert len({bucket_of[name] for chain in group for name in chain[0].task_names}) == 1


# -------------------------------------------------------------------- results


@pytest.mark.parametrize(("width", "recomputes"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_passes_in_turns_give_the_bits_of_passes_one_after_another(width: int, recomputes: bool) -> None:
    batches, alone, logged = lab.step_work().micro_batches, cases.LoggingLinks(), cases.LoggingLinks(0.002)
    num_threads = threading.active_count()
    links = TurnLinks(logged)
    model, other = cases.linked_model(alone, recomputes=recomputes), cases.linked_model(links, recomputes=recomputes)
    for _ in range(2):  # gradients add up over two steps; what a group leaves behind would harm the second one
        losses, gradients = cases.one_after_another(model, batches)
        found, own = cases.run_in_turns(other, links, batches, width)
        assert all(torch.equal(one, two) for one, two in zip(losses, found, strict=True))
        assert own.keys() == gradients.keys()
        assert [key for key in own if not torch.equal(own[key], gradients[key])] == []
    assert logged.most_in_flight == width, "while one computes, the sums of the others are in transit"
    assert Counter(logged.log) == Counter(alone.log)
    assert other.stream.num_passes == model.stream.num_passes
    assert other.stream.is_idle
    assert other.backbone.config._attn_implementation != ATTENTION_NAME
    assert not any(forward.group.are_apart for forward in multiplexed(other))
    assert threading.active_count() <= num_threads  # threads of other tests may have ended


def multiplexed(model: Any) -> list[MultiplexedLinear]:
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return [forward for forward in forwards if isinstance(forward, MultiplexedLinear)]


@pytest.mark.parametrize("recomputes", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_nan_of_one_task_stays_its_own(recomputes: bool) -> None:
    batches = lab.step_work().micro_batches
    results = []
    for is_poisoned in (False, True):
        links = TurnLinks(cases.LoggingLinks())
        model = cases.linked_model(links, recomputes=recomputes)
        if is_poisoned:
            cases.poison(model)
        results.append(cases.run_in_turns(model, links, batches, 3))
    (losses, gradients), (found, own) = results
    for micro_batch, loss, other in zip(batches, losses, found, strict=True):
        assert other.isnan().all() if cases.POISONED in micro_batch.task_names else torch.equal(loss, other)
    harmed = {name for (name, key), gradient in own.items() if not torch.equal(gradient, gradients[name, key])}
    assert harmed == {cases.POISONED}


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_after_an_error_in_a_pass_the_model_is_as_before(recomputes: bool) -> None:
    batches = lab.step_work().micro_batches
    links = TurnLinks(cases.LoggingLinks())
    model = cases.linked_model(links, recomputes=recomputes)
    interleaving = Interleaving(model, links, width=2)
    group = [(batches[index],) for index in interleaving.groups(cases.alone(batches))[0]]
    layer = model.backbone.model.layers[1].self_attn.o_proj
    calls: list[int] = []

    def fail_at_the_second(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) == (4 if recomputes else 2):  # the fourth call is in a recomputation, within a backward
            raise OSError("no more memory")
        return output

    handle = layer.register_forward_hook(fail_at_the_second)
    with pytest.raises(OSError, match="no more memory"):
        interleaving.run(group, lambda index: cases.one_pass(model, group[index][0]))
    handle.remove()
    assert model.stream.is_idle
    assert model.backbone.config._attn_implementation != ATTENTION_NAME
    for name in model.tasks:
        model.registry.slab_of(name).drop_gradients()
    _, own = cases.run_in_turns(model, links, batches, 2)
    _, gradients = cases.one_after_another(cases.whole_model(recomputes=recomputes), batches)
    assert [key for key in gradients if not torch.equal(own[key], gradients[key])] == []


@pytest.mark.parametrize("recomputes", [False, True])
def test_passes_take_the_turns_that_the_scheduler_predicts_for_the_groups_of_a_plan(recomputes: bool) -> None:
    links = TurnLinks(cases.LoggingLinks())
    model, plan, batches = cases.linked_model(links, recomputes=recomputes), cases.plan_of(((0, 2), (1,)), 2), []
    interleaving = Interleaving(model, links, recomputes=recomputes)
    interleaving.follow(plan)
    by_index = []
    for group in cases.groups_of(interleaving, lab.step_work().micro_batches):
        interleaving.run(group, lambda index, group=group: cases.one_pass(model, group[index][0]))
        batches.append(len(group))
        if len(group) < 2:
            continue
        sizes = [(own.task_names, own.num_tokens, len(own.target_rows)) for (own,) in group]
        parts = [plan.turns.parts[plan.htask_of(names[0]) or 0].of_size(*size) for names, *size in sizes]  # type: ignore[union-attr]
        passes = [pass_times(one, Stretch(lab.NUM_LAYERS, recomputes=recomputes)) for one in parts]
        order, decided = turn_order(passes), list(interleaving.decisions[-1])
        # Only the layers have links, not the head, which the last turn of a real pass does without.
        depth = max(depth for _, depth in decided)
        assert [turn for turn in decided if turn[1] < depth] == [turn for turn in order if turn[1] < depth]
        without_head = pass_times(parts[0], Stretch(lab.NUM_LAYERS, is_last=False, recomputes=recomputes))
        if any("a" in names for names, *_ in sizes):  # which adapts all layers
            assert depth == max(span.depth for span in interleaving.spans) == len(without_head) - 1
        by_index.append(sorted(decided, key=lambda turn: turn[::-1]) == decided)
    assert batches == [2, 2, 2, 2], "two passes a turn of one bucket of two hTasks, and of one alone"
    assert not all(by_index), "latencies decide"


# ------------------------------------------------------------------ executors


def gradients_of(model: Any) -> dict[tuple[str, str], torch.Tensor]:
    return {key: value for key, value in cases.gradients(model).items() if value.any()}


def test_chains_of_long_sequences_run_in_turns_with_others() -> None:
    work = lab.step_work(tasks=["b", "c"], case=lab.Case(splits=True))
    chains = chains_of(work.micro_batches)
    assert max(map(len, chains)) > 1, "a long sequence is split"
    assert len(chains) > 1
    logged = cases.LoggingLinks()
    links = TurnLinks(logged)
    model, other = cases.linked_model(links), cases.whole_model()
    executor = Executor(model, runner=Interleaving(model, links, width=2))
    found, expected = executor.run(work), Executor(other).run(work)
    assert found.losses == expected.losses
    own, gradients = gradients_of(model), gradients_of(other)
    assert own.keys() == gradients.keys()
    assert [key for key in own if not torch.equal(own[key], gradients[key])] == []
    assert logged.most_in_flight == 2
    assert model.stream.key_values.num_bytes == 0


@pytest.mark.parametrize(("num_chunks", "recomputes"), [(1, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_an_action_of_the_pipeline_runs_its_htasks_in_turns(num_chunks: int, recomputes: bool) -> None:
    plan, work = lab.plan_of(1, "mux", num_chunks), lab.step_work()
    layout = StageLayout.of(lab.NUM_LAYERS, 1, num_chunks=num_chunks)
    logged = cases.LoggingLinks()
    links = TurnLinks(logged)
    model, other = lab.mux_model(), lab.mux_model()
    if recomputes:
        model.activation_checkpointing_enable()
    cases.link(model, links)
    stage = StageModel(model, layout, 0)
    executor = PipelineExecutor(stage, plan, Processes(), interleaving=Interleaving(model, links, width=3))
    plain = PipelineExecutor(StageModel(other, layout, 0), plan, Processes())
    found, expected = executor.run(work), plain.run(work)
    assert [span.action for span in executor.spans] == [span.action for span in plain.spans]
    assert logged.most_in_flight > 1
    for name, loss in expected.losses.items():
        assert torch.equal(found.losses[name], loss)
    own = gradients_of(model)
    for key, gradient in gradients_of(other).items():  # an action has several micro-batches of one task
        torch.testing.assert_close(own[key], gradient, rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------- real processes


@pytest.mark.slow
@pytest.mark.distributed
def test_an_error_in_a_pass_of_one_shard_ends_the_passes_of_the_other() -> None:
    failed, other = parallel_cases.launch(2, cases.failing_in_turns, 2)
    assert failed.value == ("OSError", "no more memory", 1)
    kind, message, num_threads = other.value
    assert kind == "ProcessError"
    assert "rank 1 of 2 got no answer at a sum over the shards" in message
    assert "rank 0" in message.split("Allowed")[0], "it says whose fault it is"
    assert num_threads == 1
