"""Whole models through the grouped kernels, in Triton's interpreter.

The interpreter is chosen when Triton is first imported, so what needs it runs in one child process: this file as a
script. It prints which of the parts below failed, and how.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux import BottleneckConfig, ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.kernels.lora import group
from peft_mux.modeling.adapters.lora import lora_pass
from tests.children import run_script
from tests.invariants.mux_lab import relative, rows, tiny_llama
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
        # Its gradients do not go down to the first layer.
        "d": replace(config(3, ["q_proj", "up_proj"]), layers_to_transform=[1]),
    }


def mux_model(names: str = "abcd") -> MultiTaskPeftModel:
    """Return a model of all tasks, or of some; a task's adapters are the same ones in each."""
    chosen = {name: value for name, value in configs().items() if name in names}
    return MultiTaskPeftModel(tiny_llama(), chosen, verify=False).train()


def batch(names: str = "abcd", *lengths: int, step: int = 0) -> MuxBatch:
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
    assert len(together[1]) == 2 * 2 * (7 + 3 + 5) + 2 * 2
    assert worst(together, on_slices) <= 1e-5
    for index, name in enumerate("abcd"):
        mine = {key: value for key, value in together[1].items() if key.startswith(f"{name} ")}
        reference = together[0][index : index + 1], mine
        # In the same model: one without the layers that only others adapt would add up dx in another order.
        assert differing(one_pass(mux_model(), batch(name)), reference) == [], name
    checkpointed = mux_model()
    checkpointed.activation_checkpointing_enable()
    before = checkpointed.stream.num_passes
    assert differing(one_pass(checkpointed, batch()), together) == []
    assert checkpointed.stream.num_passes - before > 1, "nothing was recomputed"
    through_kernels(False)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = one_pass(mux_model(), batch())
    through_kernels()
    with torch.autocast("cpu", torch.bfloat16):
        found = one_pass(mux_model(), batch())
    assert 0 < relative(found[0].float(), together[0]) < 0.02
    assert relative(found[0].float(), rounded[0].float()) < 0.01
    assert {gradient.dtype for gradient in found[1].values()} == {torch.float32}


def tables_are_made_again_when_tasks_change_and_kept_as_long_as_they_are_true() -> None:
    through_kernels()
    packed, model = batch("ab", 4), mux_model("ab")
    first = one_pass(model, packed)

    def losses(number: int) -> torch.Tensor:
        with tables_made() as made, torch.no_grad():
            result = model(packed).losses
        assert len(made) == number
        return result

    assert torch.equal(losses(0), first[0])
    model.register_tasks({"d": config(16, ["q_proj"])})
    assert torch.equal(losses(NUM_GROUPS), first[0])
    assert torch.equal(losses(0), first[0])
    model.remove_tasks(["d"])
    assert torch.equal(losses(NUM_GROUPS), first[0])
    # Memory moves, and the gradients that are there are added to.
    model.to("cpu")
    twice = one_pass(model, packed)
    assert worst(twice, (first[0], {key: 2 * value for key, value in first[1].items()})) <= 1e-5
    # A pass of fewer tasks is another composition, and uses the tables of all; the first one is remembered still.
    with tables_made() as made, torch.no_grad():
        model(batch("b", 4))
    assert made == []
    losses(0)
    model.double()
    assert relative(losses(0).float(), first[0]) <= 1e-6, "float64 is served by products on slices"


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
    on_slices = one_pass(model(), batch("abc"))
    through_kernels()
    with tables_made() as made:
        together = one_pass(model(), batch("abc"))
    assert worst(together, on_slices) <= 1e-5
    assert [len(group.apart) for group in made].count(1) >= 4, "two layers of each of two blocks"
    mine = together[0][:1], {key: value for key, value in together[1].items() if key.startswith("a ")}
    assert differing(one_pass(model(), batch("a")), mine) == []
    watched, seen = model(), []
    next(iter(watched.task_parameters("a").values())).register_hook(seen.append)
    assert worst(one_pass(watched, batch("abc")), on_slices) <= 1e-5
    assert len(seen) == 1


PARTS = (
    losses_and_gradients_are_those_of_products_on_slices_and_of_each_task_alone,
    tables_are_made_again_when_tasks_change_and_kept_as_long_as_they_are_true,
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


if __name__ == "__main__":
    main()
