"""Whole models through the grouped kernels, in Triton's interpreter, and through compiled graphs on slices.

The interpreter is chosen when Triton is first imported, so what needs it runs in one child process: this file as a
script. It prints which of the parts below failed, and how. Compiled graphs find the same operators without
Triton, so they are tested in the test process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch._dynamo.backends.debugging import aot_eager

from peft_mux import BottleneckConfig, ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.kernels.lora import group
from peft_mux.kernels.lora.group import Base
from peft_mux.modeling.adapters.lora import lora_pass
from peft_mux.modeling.stream import Stream
from tests.children import run_script
from tests.invariants.mux_lab import Recorder, relative, rows, small_task, tiny_llama, train
from tests.kernels.interpreter import keep_patches
from tests.modeling.adapters.passes import gradients_of

Result = tuple[torch.Tensor, dict[str, torch.Tensor]]
NUM_GROUPS = 8  # q/k/v, o, gate/up and down, in each of two layers


def config(rank: int, targets: str | list[str] = "all-linear", dropout: float = 0.0) -> LoraConfig:
    return LoraConfig(r=rank, target_modules=targets, lora_dropout=dropout, init_lora_weights=False)


def configs() -> dict[str, LoraConfig]:
    return {
        "a": config(8),
        "b": config(4, ["q_proj", "v_proj", "down_proj"]),
        "c": config(20, ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"], 0.2),
    }


def mux_model(names: str = "abc") -> MultiTaskPeftModel:
    """Return a model of all three tasks, or of some; a task's adapters are the same ones in each."""
    chosen = {name: value for name, value in configs().items() if name in names}
    return MultiTaskPeftModel(tiny_llama(), chosen, verify=False).train()


def batch(names: str = "abc", *lengths: int, step: int = 0) -> MuxBatch:
    data = [{"task": name, **rows(ord(name), 1, length, length)[0]} for name in names for length in lengths or (4, 7)]
    packed = ChunkPackingCollator()(data)
    return replace(packed, task_steps=(step,) * len(names), task_seeds=tuple(ord(name) + step for name in names))


def one_pass(model: MultiTaskPeftModel, packed: MuxBatch) -> Result:
    output = model(packed)
    output.losses.sum().backward()
    return output.losses.detach(), gradients_of(model)


def worst(result: Result, reference: Result) -> float:
    """Return the worst relative difference of losses and gradients; something huge for NaN."""
    assert result[1].keys() == reference[1].keys() != set()
    errors = [relative(result[0], reference[0]), *(relative(result[1][key], reference[1][key]) for key in result[1])]
    return max(error if error == error else 1e9 for error in errors)


def differing(result: Result, reference: Result) -> list[str]:
    """Return the names of what has other bits."""
    assert result[1].keys() == reference[1].keys() != set()
    found = [key for key in result[1] if not torch.equal(result[1][key], reference[1][key])]
    return found if torch.equal(result[0], reference[0]) else ["losses", *found]


# ------------------------------------------------------------------------------ what the child computes


def through_kernels(on: bool = True) -> None:
    lora_pass.runs_kernels = lambda device: on


@contextlib.contextmanager
def tables_made() -> Iterator[list[Any]]:
    """Yield a list that fills with the tables that are made."""
    made: list[Any] = []
    original = lora_pass.LoraGroup

    def making(*args: Any) -> Any:
        made.append(original(*args))
        return made[-1]

    lora_pass.LoraGroup = making
    try:
        yield made
    finally:
        lora_pass.LoraGroup = original


def losses_and_gradients_are_those_of_products_on_slices_and_of_each_task_alone() -> None:
    through_kernels(False)
    on_slices = one_pass(mux_model(), batch())
    through_kernels()
    with tables_made() as made:
        together = one_pass(mux_model(), batch())
    assert len(made) == NUM_GROUPS, "not every group went through the kernels"
    assert len(together[1]) == 2 * 2 * (7 + 3 + 5)
    assert worst(together, on_slices) <= 1e-5
    for index, name in enumerate("abc"):
        mine = {key: value for key, value in together[1].items() if key.startswith(f"{name} ")}
        reference = together[0][index : index + 1], mine
        # In the same model: one without the layers that only others adapt would add up dx in another order.
        assert differing(one_pass(mux_model(), batch(name)), reference) == [], name
    checkpointed = mux_model()
    checkpointed.activation_checkpointing_enable()
    before = checkpointed.stream.num_passes
    assert differing(one_pass(checkpointed, batch()), together) == []
    assert checkpointed.stream.num_passes - before > 1, "nothing was recomputed"


def optimizer_steps_equal_those_of_products_on_slices() -> None:
    found: dict[str, list[Any]] = {"losses": [], "adapters": [], "tables": []}
    for on in (False, True):
        through_kernels(on)
        options: dict[str, Any] = {"train_batch_size": 2, "max_steps": 2}
        tasks = [
            small_task("a", data_seed=1, rank=8, length=5, **options),
            small_task("b", data_seed=2, rank=4, length=6, target_modules=["q_proj", "v_proj"], **options),
            small_task("c", data_seed=3, rank=20, length=4, target_modules=["k_proj", "up_proj"], **options),
            small_task("d", data_seed=4, rank=3, length=4, target_modules=["q_proj"], lora_dropout=0.3, **options),
        ]
        with tempfile.TemporaryDirectory() as folder, tables_made() as made, contextlib.redirect_stdout(sys.stderr):
            run = train(tasks, Path(folder), recorder=Recorder(keep_weights=False))
        found["tables"].append(len(made))
        found["losses"].append(run.losses)
        found["adapters"].append({name: run.weights(name) for name in "abcd"})
    assert found["tables"][0] == 0
    assert found["tables"][1] > 0
    slices, kernels = found["losses"]
    for name in "abcd":
        assert kernels[name] == pytest.approx(slices[name], rel=1e-5)
        assert len(set(slices[name])) == 2, "nothing was learnt"
        mine, theirs = (weights[name] for weights in found["adapters"])
        assert all(relative(theirs[key], mine[key]) <= 1e-4 for key in mine)


def under_autocast_copies_in_bf16_follow_the_weights_and_gradients_are_fp32() -> None:
    def loss(model: MultiTaskPeftModel) -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(packed).losses.float()

    packed = batch("ab", 5)
    through_kernels()
    model = mux_model("ab")
    with tables_made() as made, torch.autocast("cpu", torch.bfloat16):
        first = model(packed).losses
        first.sum().backward()
    parameters = [parameter for name in "ab" for parameter in model.task_parameters(name).values()]
    parts = [part for group in made for part in (group.joint, *group.layers) if part]
    assert {part.values.base.dtype for part in parts} == {torch.bfloat16}
    assert {parameter.grad.dtype for parameter in parameters} == {torch.float32}
    torch.optim.AdamW(parameters, lr=0.05).step()
    second = loss(model)
    assert relative(first.detach().float(), second) > 0.01
    through_kernels()
    fresh = mux_model("ab")
    with torch.no_grad():
        for name in "ab":
            for key, parameter in fresh.task_parameters(name).items():
                parameter.copy_(model.task_parameters(name)[key])
    assert torch.equal(second, loss(fresh))
    through_kernels(False)
    assert relative(second, loss(fresh)) <= 1e-2


def gradients_stop_at_the_lowest_adapter_of_a_task() -> None:
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    low, high = config(8), LoraConfig(r=4, target_modules=linear, layers_to_transform=[1])
    packed, begin, found = batch("abc", 5, 8), Stream.reset_adapter_tracking, {}
    heights: dict[str, int] = {"stops": 0, "goes down": 0}
    plain_add = Base.add_input_gradient
    for how, begins in (("stops", begin), ("goes down", lambda stream: None)):

        def noted(base: Base, dx_TD: torch.Tensor, dy_TK: torch.Tensor, how: str = how) -> None:
            heights[how] += len(dx_TD) if base.needed is None else sum(end - start for start, end in base.needed)
            plain_add(base, dx_TD, dy_TK)

        through_kernels()
        model = MultiTaskPeftModel(tiny_llama(), {"a": high, "b": low, "c": high}, verify=False).train()
        with torch.no_grad():
            for name in "abc":
                for weight in model.task_parameters(name).values():
                    weight.add_(0.05)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "reset_adapter_tracking", begins)
            patch.setattr(Base, "add_input_gradient", noted)
            found[how] = one_pass(model, packed)
    assert worst(found["stops"], found["goes down"]) <= 1e-6
    assert heights["stops"] < 0.8 * heights["goes down"], "products with frozen weights are made for the others alone"


def tables_are_made_again_when_tasks_change_and_kept_as_long_as_they_are_true() -> None:
    through_kernels()
    packed = batch("ab", 4)
    model = mux_model("ab")

    def results(number: int) -> Result:
        for name in "ab":
            model.registry.slab_of(name).drop_gradients()
        with tables_made() as made:
            result = one_pass(model, packed)
        assert len(made) == number
        return result

    def losses(number: int) -> torch.Tensor:
        with tables_made() as made, torch.no_grad():
            result = model(packed).losses
        assert len(made) == number
        return result

    first = results(NUM_GROUPS)
    assert torch.equal(losses(0), first[0])
    model.register_tasks({"d": config(16, ["q_proj"])})
    assert torch.equal(losses(NUM_GROUPS), first[0])
    assert torch.equal(losses(0), first[0])
    model.remove_tasks(["d"])
    assert torch.equal(losses(NUM_GROUPS), first[0])
    model.to("cpu")
    assert differing(results(NUM_GROUPS), first) == [], "memory has moved"
    # A pass of fewer tasks is another composition, and uses the tables of all; the first one is remembered still.
    with tables_made() as made, torch.no_grad():
        model(batch("b", 4))
    assert made == []
    losses(0)
    model.double()
    assert relative(losses(0).float(), first[0]) <= 1e-6, "float64 is served by products on slices"


def gradients_that_are_there_when_the_model_moves_are_added_to() -> None:
    through_kernels()
    model, packed = mux_model("b"), batch("b", 4)
    once = one_pass(model, packed)
    model.to("cpu")
    twice = one_pass(model, packed)
    assert worst(twice, (once[0], {key: 2 * value for key, value in once[1].items()})) <= 1e-5


def adapters_whose_gradients_are_watched_are_served_by_products_on_slices() -> None:
    through_kernels()
    packed = batch("b", 4)
    unwatched = one_pass(mux_model("b"), packed)
    for way in ("hook", "post-accumulate hook"):
        model, seen = mux_model("b"), []
        key, parameter = next(
            (key, parameter)
            for key, parameter in model.task_parameters("b").items()
            if "layers.1.self_attn.v_proj.lora_A" in key
        )
        if way == "hook":
            parameter.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        else:
            parameter.register_post_accumulate_grad_hook(lambda owner, seen=seen: seen.append(owner.grad.clone()))
        with tables_made() as made:
            result = one_pass(model, packed)
        assert [relative(gradient, unwatched[1][f"b {key}"]) <= 1e-5 for gradient in seen] == [True]
        # Of the groups of q and v, and of down, in each of two layers: only the watched one leaves the kernels.
        assert len(made) == 3
        assert worst(result, unwatched) <= 1e-5
    model, seen = mux_model("b"), []
    one_pass(model, packed)
    next(iter(model.task_parameters("b").values())).register_hook(seen.append)
    one_pass(model, packed)
    assert len(seen) == 1, "a hook that comes after the first pass"


def kernels_in_a_compiled_graph_give_the_same_bits() -> None:
    through_kernels()
    packed = batch("ab", 4)
    eager = one_pass(mux_model("ab"), packed)
    model, count = mux_model("ab"), Counting()
    mlp = model.backbone.model.layers[1].mlp
    mlp.forward = torch.compile(mlp.forward, backend=count, fullgraph=True)
    with tables_made() as made:
        assert differing(one_pass(model, packed), eager) == []
    assert (len(count.operators), len(made)) == (1, NUM_GROUPS)


def bottlenecks_go_through_the_same_kernels() -> None:
    def model() -> MultiTaskPeftModel:
        options: dict[str, Any] = {"init_weights": False}
        found = {
            "a": BottleneckConfig(bottleneck_size=3, non_linearity="relu", **options),
            "b": LoraConfig(r=4, target_modules=["o_proj", "q_proj"], init_lora_weights=False),
            "c": BottleneckConfig(
                bottleneck_size=20, adapter_dropout=0.3, up_bias=False, target_modules=["o_proj"], **options
            ),
        }
        return MultiTaskPeftModel(tiny_llama(), found, verify=False).train()  # type: ignore[arg-type]

    through_kernels(False)
    on_slices = one_pass(model(), batch())
    through_kernels()
    with tables_made() as made:
        together = one_pass(model(), batch())
    assert worst(together, on_slices) <= 1e-5
    assert [len(group.layers) for group in made].count(1) >= 4, "two layers of each of two blocks"
    mine = together[0][:1], {key: value for key, value in together[1].items() if key.startswith("a ")}
    assert differing(one_pass(model(), batch("a")), mine) == []
    watched, seen = model(), []
    next(iter(watched.task_parameters("a").values())).register_hook(seen.append)
    assert worst(one_pass(watched, batch()), on_slices) <= 1e-5
    assert len(seen) == 1


PARTS = (
    losses_and_gradients_are_those_of_products_on_slices_and_of_each_task_alone,
    optimizer_steps_equal_those_of_products_on_slices,
    under_autocast_copies_in_bf16_follow_the_weights_and_gradients_are_fp32,
    gradients_stop_at_the_lowest_adapter_of_a_task,
    tables_are_made_again_when_tasks_change_and_kept_as_long_as_they_are_true,
    gradients_that_are_there_when_the_model_moves_are_added_to,
    adapters_whose_gradients_are_watched_are_served_by_products_on_slices,
    kernels_in_a_compiled_graph_give_the_same_bits,
    bottlenecks_go_through_the_same_kernels,
)


def main() -> None:
    torch.set_num_threads(1)
    keep_patches()
    faults = {}
    for part in PARTS:
        try:
            part()
        except Exception:
            faults[part.__name__] = traceback.format_exc()
    print(json.dumps(faults))


# ------------------------------------------------------------------------------ the tests


class Counting:
    """A backend of `torch.compile` that computes eagerly, and keeps the names of our operators in each graph."""

    def __init__(self) -> None:
        self.operators: list[list[str]] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: Sequence[torch.Tensor]) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes]
        self.operators.append([name for name in names if name.startswith("peft_mux")])
        return aot_eager(graph, examples)


def test_adapters_that_are_too_wide_for_kernels_are_computed_task_by_task_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = {"wide": config(20), "narrow": config(4)}
    model = MultiTaskPeftModel(tiny_llama(), wide, verify=False).train()
    packed = ChunkPackingCollator()([{"task": name, **rows(1, 1, 6, 6)[0]} for name in wide])
    on_slices = one_pass(model, packed)
    model.zero_grad()
    monkeypatch.setattr(lora_pass, "runs_kernels", lambda device: True)
    monkeypatch.setattr(group, "MAX_RANK", 16)  # the widest layer of the tiny model bounds ranks, below 256
    lora_pass.say_once.cache_clear()
    with pytest.warns(UserWarning, match=r"task by task: the largest rank must be 1 to 16.*got 20"):
        result = one_pass(model, packed)
    assert differing(result, on_slices) == []


@pytest.fixture(scope="module")
def faults() -> dict[str, str]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return json.loads(run_script(__file__, TRITON_INTERPRET="1").splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS, ids=[part.__name__ for part in PARTS])
def test_through_kernels(part: Callable[[], None], faults: dict[str, str]) -> None:
    assert part.__name__ not in faults, faults[part.__name__]


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def three_steps(model: Any, eager: MultiTaskPeftModel, counting: Counting) -> list[int]:
    """Take three passes with new seeds and steps; return how many graphs there were after each."""
    graphs = []
    for step in range(3):
        packed = batch(step=step)
        output, wanted = model(packed), eager(packed)
        (output.losses.sum() + wanted.losses.sum()).backward()
        assert relative(output.losses.detach(), wanted.losses.detach()) <= 1e-6, f"step {step}"
        graphs.append(len(counting.operators))
    return graphs


@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_block_is_one_graph_that_serves_every_step() -> None:
    eager, compiled, counting = mux_model(), mux_model(), Counting()
    for layer in compiled.backbone.model.layers:
        layer.mlp.forward = torch.compile(layer.mlp.forward, backend=counting, fullgraph=True)
    graphs = three_steps(compiled, eager, counting)
    assert graphs == [2, 2, 2]
    assert counting.operators == [["peft_mux.lora_group"] * 2] * 2  # gate and up, and down
    assert worst((torch.ones(1), gradients_of(compiled)), (torch.ones(1), gradients_of(eager))) <= 1e-6


# A block, compiled whole, is among the fast tests.
@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_dynamo")
def test_a_compiled_model_is_not_compiled_again_by_new_seeds_and_steps() -> None:
    eager, compiled, counting = mux_model(), mux_model(), Counting()
    graphs = three_steps(torch.compile(compiled, backend=counting), eager, counting)
    assert graphs == [graphs[0]] * 3
    assert sum(map(len, counting.operators)) >= NUM_GROUPS
    assert worst((torch.ones(1), gradients_of(compiled)), (torch.ones(1), gradients_of(eager))) <= 1e-6


def opened(model: MultiTaskPeftModel, packed: MuxBatch, name: str) -> tuple[Any, ...]:
    """Return arguments of `lora_group` for a group, in a pass that is open."""
    group = next(
        forward.group
        for module_name, module in model.backbone.named_modules()
        if module_name.endswith(name) and (forward := module.__dict__.get("forward")) is not None
    )
    current = model.stream.passes["LORA"]
    assert current is not None
    x = torch.randn(packed.num_tokens, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    widths = [member.module.out_features for member in group.members]
    return x, current.anchor, current.handle, group.number, widths, group.num_columns


@pytest.mark.parametrize("name", ["layers.0.self_attn.q_proj", "layers.1.self_attn.o_proj"])
def test_the_forward_operator_keeps_the_rules_of_operators(name: str) -> None:
    model, packed = mux_model(), batch()
    model.prepare_pass(packed.task_names)
    with model.multiplexing(packed):
        checks = torch.library.opcheck(torch.ops.peft_mux.lora_group.default, opened(model, packed, name))
    assert set(checks.values()) == {"SUCCESS"}
    assert len(checks) == 4


def test_the_backward_operator_keeps_the_rules_of_operators() -> None:
    model, packed = mux_model(), batch()
    model.prepare_pass(packed.task_names)
    with model.multiplexing(packed), torch.no_grad():
        x, anchor, handle, number, widths, columns = opened(model, packed, "layers.0.self_attn.q_proj")
        *ys, saved = torch.ops.peft_mux.lora_group(x, anchor, handle, number, widths, columns)
        dys = [torch.ones_like(y) for y in ys]
        arguments = (dys, x.detach(), saved, handle, number)
        # It adds to gradients that no argument stands for, and is not differentiated again, so nothing is registered
        # with autograd that could be checked.
        checks = torch.library.opcheck(
            torch.ops.peft_mux.lora_group_backward.default,
            arguments,
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )
    assert set(checks.values()) == {"SUCCESS"}


if __name__ == "__main__":
    main()
