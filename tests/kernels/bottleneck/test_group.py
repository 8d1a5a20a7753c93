"""Bottlenecks of many tasks through the grouped kernels in Triton's interpreter.

`BottleneckGroup` is held against autograd in float64 and against itself in other company. The interpreter is chosen
when Triton is first imported, so everything that needs it runs in one child process: this file as a script. It prints
JSON; the tests below read what they need of it.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from peft_mux.kernels import philox
from peft_mux.kernels.bottleneck.group import CODES, Adapter, BottleneckGroup, Trained
from peft_mux.kernels.lora.tables import SegmentTables
from peft_mux.modeling.adapters.bottleneck.kind import BottleneckKind
from peft_mux.modeling.adapters.bottleneck.peft_tuner import ACTIVATIONS
from peft_mux.modeling.slabs import TaskSlab
from tests.children import run_script
from tests.kernels.interpreter import keep_patches

NAN = float("nan")
NAME = "model.layers.0.mlp.down_proj"
PRIOR = 0.5  # what gradients hold before


class Task(NamedTuple):
    length: int
    size: int  # of the bottleneck, 0 for none
    non_linearity: str = "gelu"
    dropout: float = 0.0
    down_bias: bool = True
    up_bias: bool = True


MIXED = (
    Task(21, 8, "relu"),
    Task(0, 16),
    Task(18, 24, "gelu", 0.1),
    Task(1, 3, "silu", 0.5, down_bias=False),
    Task(9, 64, "tanh", up_bias=False),
    Task(11, 0),
    Task(5, 5, "tanh", down_bias=False, up_bias=False),
    Task(70, 17, "silu"),
)
CASES: dict[str, tuple[Sequence[Task], int]] = {
    "sizes 3 to 64, all nonlinearities, dropout and biases of some": (MIXED, 48),
    "a width that is no multiple of eight": (MIXED[2:5], 27),
    "no biases": ((Task(9, 8, down_bias=False, up_bias=False), Task(7, 20, down_bias=False, up_bias=False)), 32),
    "one token": ((Task(1, 8),), 32),
    "dropout of every task": ((Task(15, 8, "relu", 0.5), Task(16, 32, "tanh", 0.05)), 32),
    "no tokens": ((Task(0, 8), Task(0, 24, "relu", 0.1)), 32),
    "a wide bottleneck": ((Task(6, 200),), 32),
}


class Data(NamedTuple):
    """One task's own tensors; the same ones whoever else is in the stream."""

    task: Task
    y: torch.Tensor
    dout: torch.Tensor
    parameters: dict[str, torch.Tensor]
    step_seed: int
    places: torch.Tensor


# ------------------------------------------------------------------------------ what the child computes


def task_data(index: int, task: Task, width: int) -> Data:
    generator = torch.Generator().manual_seed(100 + index)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    y, dout = normal(task.length, width), normal(task.length, width)
    parameters = {
        "bottleneck_down.weight": normal(task.size, width) / width**0.5,
        "bottleneck_down.bias": normal(task.size),
        "bottleneck_up.weight": normal(width, task.size) / max(task.size, 1) ** 0.5,
        "bottleneck_up.bias": normal(width),
    }
    kept = {"bottleneck_down.bias": task.down_bias, "bottleneck_up.bias": task.up_bias}
    parameters = {name: value for name, value in parameters.items() if kept.get(name, True) and task.size}
    places = torch.randint(0, 2**31, (task.length,), generator=generator)
    return Data(task, y, dout, parameters, philox.hash_seed("task", index, 7), places)


class Laid(NamedTuple):
    """A task's adapter where kernels find it, and its parameters with their gradients."""

    adapter: Adapter | None
    parameters: dict[str, torch.nn.Parameter]


def laid(d: Data) -> Laid:
    parameters = {f"{NAME}.{name}": torch.nn.Parameter(value.clone()) for name, value in d.parameters.items()}
    slab = TaskSlab(parameters, layout=BottleneckKind().slot)
    slab.bind_gradients()
    if not parameters:
        return Laid(None, {})
    for parameter in parameters.values():
        assert parameter.grad is not None
        parameter.grad.fill_(PRIOR)
    parts = []
    for name in ("down.weight", "up.weight", "down.bias", "up.bias"):
        parameter = parameters.get(f"{NAME}.bottleneck_{name}")
        factor = None if parameter is None else slab.factor(parameter, torch.float32)
        parts.append(None if factor is None else Trained(factor.values, factor.gradient))
    return Laid(Adapter(*parts, d.task.non_linearity, d.task.dropout), parameters)


def run_pass(data: Sequence[Data], width: int) -> list[dict[str, torch.Tensor]]:
    """Return what a pass gave: per task its rows and gradients."""
    tasks = [laid(d) for d in data]
    group = BottleneckGroup([task.adapter for task in tasks], NAME)
    tables = SegmentTables([d.task.length for d in data], [d.step_seed for d in data], block_rows=16, chunk_rows=32)
    places = torch.cat([torch.zeros(0, dtype=torch.int64), *[d.places for d in data]])
    y, dout = (torch.cat([torch.zeros(0, width), *parts]) for parts in zip(*[(d.y, d.dout) for d in data], strict=True))
    torch.use_deterministic_algorithms(True)  # fills with NaN whatever is allocated without values
    (out,), saved = group.forward(y, [], tables, places, num_columns=None)
    dy = group.backward([dout], y, saved, [], tables, places, needs_dx=True)
    torch.use_deterministic_algorithms(False)
    assert dy is not None
    results, start = [], 0
    for d, task in zip(data, tasks, strict=True):
        rows = slice(start, start := start + d.task.length)
        gradients = {name.removeprefix(f"{NAME}."): value.grad for name, value in task.parameters.items()}
        results.append({"out": out[rows].clone(), "dy": dy[rows].clone(), **gradients})
    return results


def wanted(d: Data, width: int) -> dict[str, torch.Tensor]:
    """Return the same by the formula, differentiated in float64."""
    y = d.y.double().requires_grad_()
    own = {name: value.double().requires_grad_() for name, value in d.parameters.items()}
    out = y
    if own:
        read = y
        if d.task.dropout:
            keep = philox.keep_mask(d.step_seed ^ philox.hash_seed(NAME), d.places, width, d.task.dropout)
            read = y * keep * philox.keep_scale(d.task.dropout)
        before = read @ own["bottleneck_down.weight"].t() + own.get("bottleneck_down.bias", 0.0)
        after = ACTIVATIONS[d.task.non_linearity](before)
        out = y + after @ own["bottleneck_up.weight"].t() + own.get("bottleneck_up.bias", 0.0)
    (out * d.dout.double()).sum().backward()
    gradients = {name: value.grad + PRIOR for name, value in own.items()}
    return {"out": out.detach(), "dy": y.grad, **gradients}  # type: ignore[dict-item]


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative Frobenius error; something huge for NaN, which else compares false with everything."""
    difference, norm = (got.double() - reference).norm().item(), reference.norm().item()
    value = difference / norm if norm else difference
    return value if value == value else 1e9


def errors_of(tasks: Sequence[Task], width: int) -> dict[str, float]:
    data = [task_data(index, task, width) for index, task in enumerate(tasks)]
    worst: dict[str, float] = {}
    for d, result in zip(data, run_pass(data, width), strict=True):
        references = wanted(d, width)
        assert references.keys() == result.keys()
        for name, reference in references.items():
            worst[name] = max(worst.get(name, 0.0), error(result[name], reference))
    return worst


def differing(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def company() -> dict[str, dict[str, list[str]]]:
    """Return, for every task, what of it has other bits than among all tasks."""
    width = 40
    data = [task_data(index, task, width) for index, task in enumerate(MIXED)]
    together = run_pass(data, width)
    backwards = run_pass(data[::-1], width)[::-1]
    calm = [index for index, d in enumerate(data) if not d.task.dropout]
    without_dropout = dict(zip(calm, run_pass([data[index] for index in calm], width), strict=True))
    found: dict[str, dict[str, list[str]]] = {}
    for index, d in enumerate(data):
        others = {
            # Of a task without an adapter nothing would be computed.
            "alone": run_pass([d], width)[0] if d.task.size else together[index],
            "in another order": backwards[index],
            "without neighbours that drop": without_dropout.get(index, together[index]),
        }
        found[str(index)] = {name: differing(together[index], other) for name, other in others.items()}
    for spoilt in (0, 2):
        broken = data.copy()
        mine = data[spoilt]
        nans = {name: value * NAN for name, value in mine.parameters.items()}
        broken[spoilt] = mine._replace(y=mine.y * NAN, dout=mine.dout * NAN, parameters=nans)
        beside = run_pass(broken, width)
        for index in range(len(data)):
            if index != spoilt:
                found[str(index)][f"beside NaNs of task {spoilt}"] = differing(together[index], beside[index])
        assert all(value.isnan().any() for value in beside[spoilt].values() if value.numel()), "they do reach the task"
    return found


def extremes() -> dict[str, list[float]]:
    """Return the nonlinearities and their slopes as kernels compute them, at small, great and no numbers."""
    from peft_mux.kernels.bottleneck import launch as own
    from peft_mux.kernels.bottleneck.biases import biases_of

    values = torch.tensor([0.0, 1e-6, -1e-3, 0.2, 0.26, -0.3, 3.0, -9.0, 60.0, -60.0, -300.0, 300.0, NAN, 1e-20, 5, -5])
    tables, rank = SegmentTables([1], [0], block_rows=16, chunk_rows=32), torch.tensor([16], dtype=torch.int32)
    worst = {}
    for name, code in CODES.items():
        p, h, dp, again = values[None].clone(), torch.empty(1, 16), torch.ones(1, 16), torch.empty(1, 16)
        codes = torch.tensor([code], dtype=torch.int32)
        own.activate(p, h, tables, rank, codes, biases_of([None], values), {})
        own.derivative(p, dp, again, tables, rank, codes, {})
        exact = values.double().requires_grad_()
        ACTIVATIONS[name](exact).sum().backward()
        after = ACTIVATIONS[name](exact.detach())
        assert torch.equal(h.isnan(), values.isnan()[None])
        assert torch.equal(h, again) or bool(h.isnan().any())
        finite = ~values.isnan()
        scale = after.abs().clamp(min=1e-20)  # relative, so that small numbers keep their digits
        far = values < -4.9  # there GELU and SiLU are differences of near-equal numbers, in torch too
        relative = ((h[0].double() - after) / torch.where(far, after.abs().clamp(min=1.0), scale))[finite]
        slope = (dp[0].double() - exact.grad)[finite]  # type: ignore[operator]
        worst[name] = [relative.abs().max().item(), slope.abs().max().item()]
    return worst


def main() -> None:
    torch.set_num_threads(1)
    keep_patches()
    cases = {name: errors_of(tasks, width) for name, (tasks, width) in CASES.items()}
    print(json.dumps({"cases": cases, "company": company(), "extremes": extremes()}))


# ------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return json.loads(run_script(__file__, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_formula(report: dict[str, Any], name: str) -> None:
    errors = report["cases"][name]
    assert errors
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_a_task_has_the_same_bits_in_any_company(report: dict[str, Any], index: int) -> None:
    assert report["company"][str(index)]
    assert all(differs == [] for differs in report["company"][str(index)].values()), report["company"][str(index)]


@pytest.mark.parametrize("name", CODES)
def test_nonlinearities_keep_their_digits_near_zero_and_far_away(report: dict[str, Any], name: str) -> None:
    of_values, of_slopes = report["extremes"][name]
    assert of_values < 1e-5
    assert of_slopes < 1e-5


def test_every_nonlinearity_that_a_configuration_may_name_has_a_number() -> None:
    assert CODES.keys() == ACTIVATIONS.keys()
    assert sorted(CODES.values()) == list(range(len(CODES)))


def test_a_bottleneck_that_is_wider_than_kernels_allow_is_refused() -> None:
    (task,) = [laid(task_data(0, Task(3, 257), 32))]
    with pytest.raises(ValueError, match="largest bottleneck has 257 features; allowed: 1 to 256"):
        BottleneckGroup([task.adapter], NAME)


if __name__ == "__main__":
    main()
