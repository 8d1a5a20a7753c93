"""Groups of layers (q, k and v; gate and up) through the grouped kernels in Triton's interpreter.

`LoraGroup` is compared with float64 formulas, against itself in other company, and against how often it may read the
activations. The interpreter is chosen when Triton is first imported, so everything that needs it runs in one child
process: this file as a script. It prints JSON; the tests below read what they need of it.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from peft_mux.kernels import philox
from peft_mux.kernels.lora.group import Adapter, Base, KernelCall, LoraGroup
from peft_mux.kernels.lora.tables import SegmentTables
from peft_mux.modeling.adapters.lora.lora_kind import lora_slot
from peft_mux.modeling.slabs import TaskSlab
from tests.children import run_script
from tests.kernels.interpreter import keep_patches

pytestmark = pytest.mark.slow

NAN = float("nan")
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
STRANGER = "self_attn.o_proj"  # is in the same slab, where no task may write
STRANGER_GRADIENT = 7.0


class Task(NamedTuple):
    length: int
    ranks: tuple[int, ...]  # of each layer, 0 for none
    dropout: float = 0.0


class Case(NamedTuple):
    tasks: Sequence[Task]
    in_features: int = 40
    widths: tuple[int, ...] = (40, 24, 24)  # k and v narrower, as with grouped queries
    layout: str = "slab"  # or "apart"
    dy: str = "contiguous"
    x: str = "contiguous"
    bias: bool = False
    base: str = "random"  # or "none", or "selection" of columns of x
    prior: bool = False  # gradients that are there already
    chunk_rows: int = 32
    dtype: torch.dtype = torch.float32  # of activations and of the weights as kernels read them
    has_room: bool = False  # tables for more rows than there are
    trains: bool = True
    is_later: bool = False  # a pass through the same tables after one of other values


class Data(NamedTuple):
    """One task's own tensors; the same ones whichever tasks are in the stream."""

    task: Task
    x: torch.Tensor
    dys: tuple[torch.Tensor, ...]
    a: tuple[torch.Tensor | None, ...]
    b: tuple[torch.Tensor | None, ...]
    prior: tuple[tuple[torch.Tensor, torch.Tensor] | None, ...]
    scales: tuple[float, ...]
    step_seed: int
    places: torch.Tensor


def all_of(rank: int, layers: int = 3) -> tuple[int, ...]:
    return (rank,) * layers


MIXED = (
    Task(21, all_of(8)),
    Task(0, all_of(16)),
    Task(18, (24, 3, 4), 0.1),
    Task(1, all_of(3), 0.5),
    Task(9, (0, 64, 0)),
    Task(6, all_of(200)),
    Task(11, all_of(0)),
    Task(5, (4, 0, 20)),
)
COMPANY = (*MIXED[:5], *MIXED[6:])  # without the greatest rank, whose products take the interpreter long
PAIR = (Task(13, (8, 8)), Task(20, (4, 24), 0.2), Task(7, (0, 16)))
CASES = {
    "one layer": Case([Task(20, (8,)), Task(9, (24,), 0.2), Task(4, (0,))], widths=(48,)),
    "widths that are no multiples of eight": Case([Task(20, all_of(3)), Task(7, (4, 9, 3), 0.3)], 27, (21, 10, 5)),
    "ranks 3 to 200, dropout of some, tasks in some layers": Case(MIXED),
    "one giant and many tiny": Case([Task(80, all_of(8)), *[Task(1 + i % 3, all_of(3 + i)) for i in range(6)]]),
    "tasks in other layers each": Case([Task(7, (8, 0, 0)), Task(8, (0, 24, 0)), Task(9, (0, 0, 4), 0.2)]),
    "a layer without any adapter": Case([Task(12, (8, 0, 4)), Task(9, (4, 0, 24), 0.2)]),
    "no adapter at all": Case([Task(5, all_of(0)), Task(8, all_of(0))], bias=True),
    "no tokens": Case([Task(0, all_of(8)), Task(0, all_of(24), 0.1)], prior=True),
    "no segments": Case([]),
    "no base": Case(MIXED[:4], base="none"),
    "transposed dy": Case(PAIR, widths=(24, 40), dy="transposed"),
    "one number of dy for all": Case(PAIR, widths=(24, 40), dy="expanded"),
    "x with gaps between rows": Case(PAIR, widths=(24, 40), x="strided"),
    "gradients that accumulate": Case(COMPANY, prior=True),
    "adapters that lie apart": Case(COMPANY, layout="apart"),
    "only ranks above 16": Case([Task(20, (17,)), Task(9, (0,)), Task(20, (256,))], widths=(24,)),
    "tables with room": Case(COMPANY, has_room=True),
    "nothing trains": Case(PAIR, widths=(24, 40), layout="apart", trains=False),
    # Launches after the first are not looked for any more.
    "a later pass, transposed, with a bias": Case(
        PAIR, widths=(24, 40), x="transposed", dy="transposed", bias=True, prior=True, is_later=True
    ),
    "bf16": Case(MIXED, base="none", dtype=torch.bfloat16),
    "fp16": Case(MIXED[2:5], dtype=torch.float16),
}

CALM, DROPPING = Task(5, all_of(8)), Task(5, all_of(8), 0.3)
LAUNCHES: dict[str, tuple[tuple[Any, ...], tuple[int, int]]] = {
    "three layers": (([CALM, Task(4, all_of(24))], (16, 24, 24)), (1, 1)),
    "one layer": (([Task(5, (8,))], (24,)), (1, 1)),
    "two layers of three": (([Task(5, (8, 0, 8))], (16, 24, 24)), (1, 1)),
    "beside one that drops": (([CALM, DROPPING], (16, 24, 24)), (4, 1)),
    "all drop": (([DROPPING, DROPPING], (16, 24, 24)), (3, 1)),
    "apart": (([CALM], (16, 24, 24), "apart"), (3, 1)),
}
"""Arguments of `launches`, and how many of each kernel work on x or dx, and on y or dy."""


# ------------------------------------------------------------------------------ what the child computes


def task_data(index: int, case: Case) -> Data:
    task = case.tasks[index]
    generator = torch.Generator().manual_seed(100 + index)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def rounded(values: torch.Tensor) -> torch.Tensor:
        return values.to(case.dtype).float()

    x = normal(task.length, case.in_features).to(case.dtype)
    dys = tuple(normal(task.length, width).to(case.dtype) for width in case.widths)
    if case.dy == "expanded":
        # Of all tasks the same: it is one tensor that autograd expands.
        dys = tuple(torch.ones(task.length, width) for width in case.widths)
    a, b, prior = [], [], []
    for rank, width in zip(task.ranks, case.widths, strict=True):
        a.append(rounded(normal(rank, case.in_features) / case.in_features**0.5) if rank else None)
        b.append(rounded(normal(width, rank) / rank**0.5) if rank else None)
        there = normal(rank, case.in_features), normal(width, rank)
        prior.append(tuple(part * float(case.prior) for part in there) if rank else None)
    scales = tuple(0.5 + index + 0.25 * layer for layer in range(len(case.widths)))
    places = torch.randint(0, 2**31, (task.length,), generator=generator)
    return Data(task, x, dys, tuple(a), tuple(b), tuple(prior), scales, philox.hash_seed("task", index, 7), places)


def bases_of(case: Case) -> list[Base]:
    generator = torch.Generator().manual_seed(1)
    bases = []
    for width in case.widths:
        weight = torch.randn(width, case.in_features, generator=generator) / case.in_features**0.5
        weight = torch.eye(width, case.in_features) if case.base == "selection" else weight
        bias = torch.linspace(-1, 1, width).to(case.dtype) if case.bias else None
        bases.append(Base(None if case.base == "none" else weight.to(case.dtype), bias, width))
    return bases


class Laid(NamedTuple):
    """A task's adapters where kernels find them, and a look at everything of that memory that is not theirs."""

    adapters: list[Adapter | None]
    is_untouched: Callable[[], bool]


def in_slab(d: Data, case: Case) -> Laid:
    parameters = {}
    stranger = {"lora_A": torch.full((5, case.in_features), NAN), "lora_B": torch.full((7, 5), NAN)}
    for factor in ("lora_A", "lora_B"):
        for name, values in zip(LAYERS, d.a if factor == "lora_A" else d.b, strict=False):
            if values is not None:
                parameters[f"model.layers.0.{name}.{factor}.weight"] = torch.nn.Parameter(values.clone())
        parameters[f"model.layers.0.{STRANGER}.{factor}.weight"] = torch.nn.Parameter(stranger[factor])
    slab = TaskSlab(parameters, layout=lora_slot)
    slab.bind_gradients()
    (page,) = slab.pages
    adapters: list[Adapter | None] = []
    for index, prior in enumerate(d.prior):
        if prior is None:
            adapters.append(None)
            continue
        pair = [parameters[f"model.layers.0.{LAYERS[index]}.{factor}.weight"] for factor in ("lora_A", "lora_B")]
        for parameter, there in zip(pair, prior, strict=True):
            parameter.grad.copy_(there)
        a, b = (slab.factor(parameter, case.dtype) for parameter in pair)
        adapters.append(Adapter(a.values, b.values, a.gradient, b.gradient, d.scales[index], d.task.dropout))
    strangers = [parameters[f"model.layers.0.{STRANGER}.{factor}.weight"] for factor in stranger]
    for parameter in strangers:
        parameter.grad.fill_(STRANGER_GRADIENT)
    owned = sum(parameter.numel() for parameter in parameters.values())

    def is_untouched() -> bool:
        kept = all(bool((parameter.grad == STRANGER_GRADIENT).all()) for parameter in strangers)
        before = [parameter.grad.clone() for parameter in parameters.values()]
        for parameter in parameters.values():
            parameter.grad.fill_(1.0)
        gaps = page.values.grad.sum().item() == owned  # rows that fill a group of eight are zeros still
        for parameter, gradient in zip(parameters.values(), before, strict=True):
            parameter.grad.copy_(gradient)
        return kept and gaps

    return Laid(adapters, is_untouched)


def apart(d: Data, case: Case) -> Laid:
    adapters: list[Adapter | None] = []
    edges = []

    def padded(values: torch.Tensor) -> torch.Tensor:
        """Return rows in memory of their own: zeros up to the next group of eight, and NaNs behind."""
        size = -(-len(values) // 8) * 8
        memory = torch.full((size + 8, values.shape[1]), NAN)
        memory[:size] = 0.0
        memory[: len(values)] = values
        edges.append((memory, len(values), size))
        return memory[: len(values)]

    for a, b, prior, scale in zip(d.a, d.b, d.prior, d.scales, strict=True):
        if a is None or b is None or prior is None:
            adapters.append(None)
            continue
        gradients = [padded(part) for part in (prior[0], prior[1].t())] if case.trains else [None, None]
        adapters.append(Adapter(padded(a), padded(b.t()), *gradients, scale, d.task.dropout))

    def is_untouched() -> bool:
        return all(bool((m[rank:size] == 0).all() and m[size:].isnan().all()) for m, rank, size in edges)

    return Laid(adapters, is_untouched)


def spread(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same values in another layout."""
    if how == "transposed":
        return tensor.t().contiguous().t()
    if how == "strided":
        wide = torch.full((len(tensor), tensor.shape[1] + 12), NAN)
        wide[:, 5:-7] = tensor
        return wide[:, 5:-7]
    if how == "expanded":
        assert (tensor == 1).all()
        return tensor[:1, :1].expand_as(tensor)
    return tensor


def cat(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, width)


class Pass(NamedTuple):
    """What a pass over some tasks gave: per task its rows and gradients."""

    results: list[dict[str, torch.Tensor]]
    is_untouched: bool


def run_pass(
    data: Sequence[Data],
    case: Case,
    *,
    before: Sequence[Data] = (),
) -> Pass:
    """Return what a pass gives; `before` is of the same tasks, and passes through the same tables first."""
    laid = [in_slab(d, case) if case.layout == "slab" else apart(d, case) for d in data]
    layers = [[task.adapters[index] for task in laid] for index in range(len(case.widths))]
    group = LoraGroup(layers, [f"model.layers.0.{name}" for name in LAYERS[: len(case.widths)]])
    lengths, seeds = [d.task.length for d in data], [d.step_seed for d in data]
    room: dict[str, Any] = {"max_tokens": sum(lengths) + 40} if case.has_room else {}
    tables = SegmentTables(lengths, seeds, block_rows=16, chunk_rows=case.chunk_rows, **room)
    places = torch.cat([torch.zeros(0, dtype=torch.int64), *[d.places for d in data]])
    call = KernelCall(group, bases_of(case), tables, places)
    for rows in (before, data) if before else (data,):
        x = spread(cat([d.x for d in rows], case.in_features), case.x)
        dys = [spread(cat([d.dys[i] for d in rows], width), case.dy) for i, width in enumerate(case.widths)]
        forget_gradients(laid, data)
        with poisoned():
            ys, saved = call.forward(x)
            dx = call.backward(dys, x, saved, needs_dx=True)
    assert dx is not None
    assert [y.shape for y in ys] == [(len(x), width) for width in case.widths]
    results, start = [], 0
    for d, task in zip(data, laid, strict=True):
        rows = slice(start, start + d.task.length)
        result = {"dx": dx[rows].clone()}
        for index, adapter in enumerate(task.adapters):
            result[f"y{index}"] = ys[index][rows].clone()
            if adapter is not None and case.trains:
                result[f"dA{index}"], result[f"dB{index}"] = adapter.da_RD.clone(), adapter.db_RK.t().clone()
        results.append(result)
        start += d.task.length
    return Pass(results, all(task.is_untouched() for task in laid))


def forget_gradients(laid: Sequence[Laid], data: Sequence[Data]) -> None:
    """Set all gradients to what is there before a pass."""
    for task, d in zip(laid, data, strict=True):
        for adapter, prior in zip(task.adapters, d.prior, strict=True):
            if adapter is not None and adapter.da_RD is not None and prior is not None:
                adapter.da_RD.copy_(prior[0])
                adapter.db_RK.copy_(prior[1].t())


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill with NaN whatever is allocated without values."""
    torch.use_deterministic_algorithms(True)
    try:
        fresh = torch.empty(3), torch.zeros(3).new_empty(3), torch.empty_like(torch.zeros(3))
        assert all(tensor.isnan().all() for tensor in fresh)
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def wanted(d: Data, case: Case) -> dict[str, torch.Tensor]:
    """Return the same by the formulas, in float64."""
    x = d.x.double()
    result = {"dx": torch.zeros_like(x)}
    for index, base in enumerate(bases_of(case)):
        dy = d.dys[index].double()
        y = torch.zeros(d.task.length, base.out_features, dtype=torch.float64)
        if base.weight_KD is not None:
            y += x @ base.weight_KD.double().t()
            result["dx"] += dy @ base.weight_KD.double()
        if base.bias_K is not None:
            y += base.bias_K.double()
        a, b, prior, scale = d.a[index], d.b[index], d.prior[index], d.scales[index]
        if a is not None and b is not None and prior is not None:
            mask = torch.ones_like(x)
            if d.task.dropout:
                seed = d.step_seed ^ philox.hash_seed(f"model.layers.0.{LAYERS[index]}")
                keep = philox.keep_mask(seed, d.places, case.in_features, d.task.dropout)
                mask = keep.double() * philox.keep_scale(d.task.dropout)
            s, ds = (x * mask) @ a.double().t(), scale * (dy @ b.double())
            y += scale * (s @ b.double().t())
            result["dx"] += mask * (ds @ a.double())
            if case.trains:
                result[f"dA{index}"] = ds.t() @ (x * mask) + prior[0].double()
                result[f"dB{index}"] = scale * (dy.t() @ s) + prior[1].double()
        result[f"y{index}"] = y
    return result


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the relative Frobenius error; something huge for NaN, which else compares false with everything."""
    difference, norm = (got.double() - reference).norm().item(), reference.norm().item()
    value = difference / norm if norm else difference
    return value if value == value else 1e9


def report_of(case: Case) -> dict[str, Any]:
    data = [task_data(index, case) for index in range(len(case.tasks))]
    # What a first pass has left anywhere is not what a later one has to give.
    others = [d._replace(x=d.x + 1.0, dys=tuple(dy * 2.0 for dy in d.dys)) for d in data]
    done = run_pass(data, case, before=others if case.is_later else ())
    worst: dict[str, float] = {}
    for d, result in zip(data, done.results, strict=True):
        references = wanted(d, case)
        assert references.keys() == result.keys()
        for name, reference in references.items():
            kind = name.rstrip("012")
            worst[kind] = max(worst.get(kind, 0.0), error(result[name], reference))
    return {"errors": worst, "untouched": done.is_untouched}


def same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of what differs."""
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def company() -> dict[str, dict[str, list[str]]]:
    """Return, for every task, which of its tensors have other bits than among all tasks.

    The frozen product is the matrix library's, which may add up in another order for another number of rows; a base
    that selects columns of x leaves it nothing to add up.
    """
    case = Case(COMPANY, base="selection", bias=True)
    data = [task_data(index, case) for index in range(len(COMPANY))]
    together = run_pass(data, case).results
    backwards = run_pass(data[::-1], case).results[::-1]
    calm = [d for d in data if not d.task.dropout]
    without_dropout = dict(zip(map(id, calm), run_pass(calm, case).results, strict=True))
    found: dict[str, dict[str, list[str]]] = {}
    for index, d in enumerate(data):
        found[str(index)] = {
            "alone": same_bits(together[index], run_pass([d], case).results[0]),
            "in another order": same_bits(together[index], backwards[index]),
        }
        if not d.task.dropout:
            found[str(index)]["without neighbours that drop"] = same_bits(together[index], without_dropout[id(d)])
    for spoilt in (0, 2):  # one that works in joint launches, and one with dropout
        broken = data.copy()
        mine = data[spoilt]
        broken[spoilt] = mine._replace(
            x=mine.x * NAN,
            dys=tuple(dy * NAN for dy in mine.dys),
            a=tuple(None if a is None else a * NAN for a in mine.a),
        )
        beside = run_pass(broken, case).results
        for index in range(len(data)):
            if index != spoilt:
                found[str(index)][f"beside NaNs of task {spoilt}"] = same_bits(together[index], beside[index])
        # They do reach the task itself, but where an element of dx was dropped.
        assert all(beside[spoilt][name].isnan().any(1).all() for name in ("y0", "dx", "dA0"))
    return found


def launches(tasks: Sequence[Task], widths: tuple[int, ...], layout: str = "slab") -> dict[str, int]:
    """Return how often each launcher reads x or dy, or writes dx or y, in a pass and its backward."""
    from peft_mux.kernels.lora import launch as kernels

    case = Case(tasks, in_features=33, widths=widths, layout=layout)  # no other tensor has 33 columns
    counts: Counter[str] = Counter()
    originals = {name: getattr(kernels, name) for name in ("shrink", "expand", "wgrad")}

    def counted(name: str, activation: int) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            side = "in" if args[activation].shape[1] == 33 else "out"
            counts[f"{name} {side}"] += 1
            originals[name](*args, **kwargs)

        return launch

    try:
        for name, activation in (("shrink", 0), ("expand", 2), ("wgrad", 1)):
            setattr(kernels, name, counted(name, activation))
        run_pass([task_data(index, case) for index in range(len(tasks))], case)
    finally:
        for name, original in originals.items():
            setattr(kernels, name, original)
    return dict(counts)


def dy_of_another_dtype() -> str:
    case = Case(PAIR[:1], widths=(24, 40))
    data = [task_data(0, case)]
    doubles = [data[0]._replace(dys=tuple(dy.double() for dy in data[0].dys))]
    try:
        run_pass(doubles, case, before=data)
    except ValueError as reason:
        return str(reason)
    return "taken"


def main() -> None:
    torch.set_num_threads(1)
    keep_patches()
    report = {
        "cases": {name: report_of(case) for name, case in CASES.items()},
        "company": company(),
        "counts": {name: launches(*arguments) for name, (arguments, _) in LAUNCHES.items()},
        "dy of another dtype": dy_of_another_dtype(),
    }
    print(json.dumps(report))


# ------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def report() -> dict:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return json.loads(run_script(__file__, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_float64_and_nothing_else_is_written(report: dict, name: str) -> None:
    errors, limit = report["cases"][name]["errors"], 1e-5 if CASES[name].dtype == torch.float32 else 1e-2
    assert errors.keys() >= ({"y", "dx"} if CASES[name].tasks else set())
    has_gradients = CASES[name].trains and any(any(task.ranks) for task in CASES[name].tasks)
    assert errors.keys() >= ({"dA", "dB"} if has_gradients else set())
    assert all(value <= limit for value in errors.values()), errors
    assert report["cases"][name]["untouched"], "memory next to the gradients of the group"


def test_a_gradient_of_another_dtype_is_refused_in_a_later_pass_too(report: dict) -> None:
    assert (
        "activations and S must have the same dtype, bf16, fp16 or fp32, got torch.float64 and torch.float32"
        in report["dy of another dtype"]
    )


@pytest.mark.parametrize("index", range(len(COMPANY)))
def test_a_task_gets_the_same_bits_in_any_company(report: dict, index: int) -> None:
    differing = report["company"][str(index)]
    assert {"alone", "in another order"} <= differing.keys()
    assert len(differing) >= 3  # with NaNs in other rows, at least of one other
    assert differing == {way: [] for way in differing}


@pytest.mark.parametrize("name", LAUNCHES)
def test_one_launch_serves_all_layers_except_of_tasks_with_dropout_or_apart_which_read_x_for_each(
    report: dict, name: str
) -> None:
    for_x, for_layers = LAUNCHES[name][1]
    of_x = dict.fromkeys(("shrink in", "expand in", "wgrad in"), for_x)
    assert report["counts"][name] == of_x | dict.fromkeys(("expand out", "shrink out", "wgrad out"), for_layers)


def test_a_rank_that_kernels_do_not_serve_is_refused() -> None:
    adapter = Adapter(torch.zeros(257, 8), torch.zeros(257, 8), None, None, 1.0, 0.0)
    with pytest.raises(ValueError, match="the largest rank must be 1 to 256, got 257"):
        LoraGroup([[adapter]], ["layer"])


if __name__ == "__main__":
    main()
