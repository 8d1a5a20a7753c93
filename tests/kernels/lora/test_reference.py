"""Grouped LoRA: outputs and all gradients against plain autograd, for every shape that a stream can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.pytorch_utils import Conv1D

from peft_mux.kernels import philox
from peft_mux.kernels.lora.reference import LinearSlice, LoraSegment, grouped_lora_slices

PROPERTY = settings(deadline=None, max_examples=60)
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
D, K = 24, 40
WITH_AND_WITHOUT_DROPOUT = pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])


class Case(NamedTuple):
    """Arguments of one call, and the gradient that flows into its result."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    segments: tuple[LoraSegment, ...]
    factors: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    places: torch.Tensor
    dy: torch.Tensor

    def to(self, dtype: torch.dtype) -> Case:
        """Return fresh leaves of another type, contiguous."""

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            fresh = tensor.detach().to(dtype).clone(memory_format=torch.contiguous_format)
            return fresh.requires_grad_(tensor.requires_grad)

        return self._replace(
            x=leaf(self.x),
            weight=None if self.weight is None else leaf(self.weight),
            bias=None if self.bias is None else leaf(self.bias),
            factors=tuple((leaf(a), leaf(b)) for a, b in self.factors),
            dy=leaf(self.dy),
        )


def grouped_lora(case: Case) -> torch.Tensor:
    """Return the output of one layer."""
    layer = LinearSlice(case.weight, case.bias, K, case.segments, case.factors)
    (y,) = grouped_lora_slices(case.x, [layer], case.places)
    return y


def plain_lora(case: Case) -> torch.Tensor:
    """Return the same, written for reading and left to autograd."""
    y = case.x.new_zeros(len(case.x), K)
    if case.weight is not None:
        y = torch.nn.functional.linear(case.x, case.weight, case.bias)
    delta = torch.zeros_like(y)
    # Put together from rows and not masked: 0 * NaN would carry one task's NaN into another.
    for segment, (a, b) in zip(case.segments, case.factors, strict=True):
        rows = slice(segment.start, segment.end)
        x = case.x[rows]
        if segment.dropout:
            kept = philox.keep_mask(segment.seed, case.places[rows], D, segment.dropout)
            x = philox.dropped(x, kept, segment.dropout)
        added = segment.scale * (x @ a.t() @ b.t())
        delta = torch.cat((delta[: segment.start], added, delta[segment.end :]))
    return y + delta


def make_case(
    table: Sequence[tuple[int, int, int]],
    num_rows: int,
    *,
    base: str = "weight and bias",
    dropout: float = 0.0,
    x_gradient: bool = True,
    seed: int = 0,
) -> Case:
    """Return a random case in float64 for a table of (start, end, rank)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    segments = tuple(
        LoraSegment(start, end, scale=0.5 + 0.3 * index, dropout=dropout, seed=philox.draw_seed(index, 0, "layer"))
        for index, (start, end, _) in enumerate(table)
    )
    factors = tuple(
        (draw(rank, D, scale=D**-0.5).requires_grad_(), draw(K, rank, scale=rank**-0.5).requires_grad_())
        for _, _, rank in table
    )
    return Case(
        draw(num_rows, D).requires_grad_(x_gradient),
        draw(K, D, scale=D**-0.5) if "weight" in base else None,
        draw(K) if "bias" in base else None,
        segments,
        factors,
        torch.arange(num_rows) + 100,
        draw(num_rows, K),
    )


def results(function: Callable[[Case], torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    """Return the output and every gradient of one call."""
    y = function(case)
    found = {"y": y.detach()}
    if y.requires_grad:
        y.backward(case.dy)
    if case.x.requires_grad:
        # Autograd leaves unused tensors without gradient where the kernel says zero; both mean the same.
        found["dx"] = torch.zeros_like(case.x) if case.x.grad is None else case.x.grad
    for index, (a, b) in enumerate(case.factors):
        found[f"dA{index}"] = torch.zeros_like(a) if a.grad is None else a.grad
        found[f"dB{index}"] = torch.zeros_like(b) if b.grad is None else b.grad
    return found


def assert_right(found: dict[str, torch.Tensor], case: Case, tolerance: float) -> None:
    """Assert that results are those of float64: norms of the differences within a relative tolerance."""
    wanted = results(plain_lora, case.to(torch.float64))
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert tensor.shape == wanted[key].shape, key
        error, size = (tensor.double() - wanted[key]).norm(), wanted[key].norm()
        assert error <= tolerance * size, f"{key}: {error / size:.2e} of {tolerance:.0e}"


TABLES = {
    "one task": ([(0, 30, 8)], 30),
    "ragged ranks": ([(0, 11, 1), (11, 19, 64), (19, 40, 7), (40, 53, 32)], 53),
    "empty segments": ([(0, 0, 4), (0, 9, 3), (9, 9, 5), (9, 20, 6), (20, 20, 2)], 20),
    "gaps": ([(3, 9, 4), (14, 15, 2)], 20),
    "one token a task": ([(0, 1, 4), (1, 2, 16), (2, 3, 1)], 3),
    "no adapter": ([], 12),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("table", TABLES)
@WITH_AND_WITHOUT_DROPOUT
def test_forward_and_gradients_are_those_of_float64(table: str, dropout: float, dtype: torch.dtype) -> None:
    case = make_case(*TABLES[table], dropout=dropout)
    found = results(grouped_lora, case.to(dtype))
    assert all(tensor.dtype == dtype for tensor in found.values())
    assert_right(found, case, TOLERANCES[dtype])


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Draw segments in order, some empty, with gaps between them and a tail."""
    table, row = [], 0
    for _ in range(draw(st.integers(0, 6))):
        start = row + draw(st.sampled_from([0, 0, 1, 5]))
        row = start + draw(st.integers(0, 17))
        table.append((start, row, draw(st.integers(1, 64))))
    return table, max(1, row + draw(st.integers(0, 3)))


@PROPERTY
@given(
    tables(),
    st.sampled_from(["weight", "weight and bias", "adapters alone"]),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 0.7]),
    st.integers(0, 2**16),
)
def test_any_table_of_segments_on_any_base_gives_the_same(
    drawn: tuple[list[tuple[int, int, int]], int], base: str, x_gradient: bool, dropout: float, seed: int
) -> None:
    case = make_case(*drawn, base=base, dropout=dropout, x_gradient=x_gradient, seed=seed)
    assert_right(results(grouped_lora, case.to(torch.float64)), case, TOLERANCES[torch.float64])


@WITH_AND_WITHOUT_DROPOUT
def test_under_autocast_sums_are_in_bfloat16_and_gradients_in_the_type_of_the_weights(dropout: float) -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=dropout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(grouped_lora, case.to(torch.float32)._replace(dy=case.dy.to(torch.bfloat16)))
    assert found["y"].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for key, tensor in found.items() if key != "y")
    assert_right(found, case, TOLERANCES[torch.bfloat16])


LAYOUTS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "dy transposed": lambda case: {"dy": case.dy.t().contiguous().t()},
    "dy in every second column": lambda case: {"dy": torch.stack((case.dy, -case.dy), dim=-1).flatten(1)[:, ::2]},
    "dy expanded": lambda case: {"dy": case.dy[:1].expand(len(case.dy), K)},
    "x transposed": lambda case: {"x": case.x.detach().t().contiguous().t().requires_grad_()},
    "the weight of a Conv1D": lambda case: {"weight": Conv1D(K, D).double().weight.detach().t()},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_that_are_not_contiguous_are_read_right(layout: str) -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=0.3)
    changed = LAYOUTS[layout](case)
    assert not any(tensor.is_contiguous() for tensor in changed.values())
    case = case._replace(**changed)
    assert_right(results(grouped_lora, case), case, TOLERANCES[torch.float64])


def test_what_is_frozen_gets_no_gradient_and_no_argument_is_written_to() -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=0.3)
    a, b = case.factors[0]
    weight, bias = case.weight.clone().requires_grad_(), case.bias.clone().requires_grad_()
    case = case._replace(weight=weight, bias=bias, factors=((a.detach(), b), *case.factors[1:]))
    arguments = [case.x, weight, bias, case.places, case.dy, *(factor for pair in case.factors for factor in pair)]
    before = [tensor.detach().clone() for tensor in arguments]
    results(grouped_lora, case)
    assert weight.grad is bias.grad is case.factors[0][0].grad is None
    assert b.grad.norm() > 0
    assert all(map(torch.equal, before, arguments))


# -------------------------------------------------------------- isolation


@pytest.mark.parametrize("where", ["activations", "factor A", "factor B", "gradient"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_of_one_task_changes_no_bit_of_another(poison: float, where: str) -> None:
    case = make_case([(0, 11, 4), (11, 19, 8), (19, 40, 7)], 40, dropout=0.3).to(torch.float32)
    healthy = results(grouped_lora, case)
    sick = case.to(torch.float32)
    with torch.no_grad():
        {
            "activations": sick.x[11:19],
            "factor A": sick.factors[1][0],
            "factor B": sick.factors[1][1],
            "gradient": sick.dy[11:19],
        }[where].fill_(poison)
    found = results(grouped_lora, sick)
    others = [*range(11), *range(19, 40)]
    for key in ("y", "dx"):
        assert torch.equal(found[key][others], healthy[key][others]), key
    for key in ("dA0", "dB0", "dA2", "dB2"):
        assert torch.equal(found[key], healthy[key]), key
    assert not all(found[key].isfinite().all() for key in ("y", "dx", "dA1", "dB1")), "the poison did nothing"


def test_dropout_follows_the_places_and_not_the_rows() -> None:
    case = make_case([(0, 6, 4)], 6, base="weight", dropout=0.5)
    order = [4, 2, 5, 0, 3, 1]
    shuffled = case._replace(x=case.x.detach()[order], places=case.places[order])
    y = results(grouped_lora, case)["y"]
    assert torch.allclose(results(grouped_lora, shuffled)["y"], y[order], rtol=1e-12, atol=1e-12)
    moved = case._replace(places=case.places + 1)
    assert not torch.allclose(results(grouped_lora, moved)["y"], y)
