"""Grouped LoRA: outputs and all gradients against plain autograd, for every shape that a stream can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


def grouped_lora(
    x_TD: torch.Tensor,
    weight_KD: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    segments: Sequence[LoraSegment],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    places: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """Return the output of one layer, as the reference takes its arguments."""
    (y,) = grouped_lora_slices(x_TD, [LinearSlice(weight_KD, bias_K, out_features, segments, factors)], places)
    return y


def reference_grouped_lora(
    x_TD: torch.Tensor,
    weight_KD: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    segments: Sequence[LoraSegment],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    places: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """Return what `grouped_lora_slices` returns for one layer, written for reading and left to autograd."""
    y = x_TD.new_zeros(len(x_TD), out_features)
    if weight_KD is not None:
        y = torch.nn.functional.linear(x_TD, weight_KD, bias_K)
    delta = torch.zeros_like(y)
    # Put together from rows and not masked: 0 * NaN would carry one task's NaN into another.
    for segment, (a, b) in zip(segments, factors, strict=True):
        rows = slice(segment.start, segment.end)
        x_g = x_TD[rows]
        if segment.dropout:
            kept = philox.keep_mask(segment.seed, places[rows], x_TD.shape[-1], segment.dropout)
            x_g = philox.dropped(x_g, kept, segment.dropout)
        added = segment.scale * (x_g @ a.t() @ b.t())
        delta = torch.cat((delta[: segment.start], added, delta[segment.end :]))
    return y + delta


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
        """Return fresh leaves of another type."""

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(dtype).clone().requires_grad_(tensor.requires_grad)

        return self._replace(
            x=leaf(self.x),
            weight=None if self.weight is None else leaf(self.weight),
            bias=None if self.bias is None else leaf(self.bias),
            factors=tuple((leaf(a), leaf(b)) for a, b in self.factors),
            dy=self.dy.to(dtype),
        )


def make_case(
    table: Sequence[tuple[int, int, int]],
    num_rows: int,
    *,
    with_weight: bool = True,
    with_bias: bool = True,
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
        draw(K, D, scale=D**-0.5) if with_weight else None,
        draw(K) if with_bias and with_weight else None,
        segments,
        factors,
        torch.arange(num_rows) + 100,
        draw(num_rows, K),
    )


def results(
    function: Callable[..., torch.Tensor], case: Case, dy: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the output and every gradient of one call."""
    y = function(case.x, case.weight, case.bias, case.segments, case.factors, places=case.places, out_features=K)
    found = {"y": y.detach()}
    if y.requires_grad:
        y.backward(case.dy if dy is None else dy)
    if case.x.grad is not None:
        found["dx"] = case.x.grad
    for index, (a, b) in enumerate(case.factors):
        # Autograd leaves an unused factor without gradient where the kernel says zero; both mean the same.
        found[f"dA{index}"] = torch.zeros_like(a) if a.grad is None else a.grad
        found[f"dB{index}"] = torch.zeros_like(b) if b.grad is None else b.grad
    return found


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Assert equal shapes, and norms of the differences within a tolerance relative to the second."""
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        other = wanted[key].to(torch.float64)
        assert tensor.shape == other.shape, key
        error, size = (tensor.to(torch.float64) - other).norm(), other.norm()
        assert error <= tolerance * size, f"{key}: {error / size:.2e} of {tolerance:.0e}"


TABLES = {
    "one task": ([(0, 30, 8)], 30),
    "ragged ranks": ([(0, 11, 1), (11, 19, 64), (19, 40, 7), (40, 53, 32)], 53),
    "empty segments": ([(0, 0, 4), (0, 9, 3), (9, 9, 5), (9, 20, 6), (20, 20, 2)], 20),
    "gaps": ([(3, 9, 4), (14, 15, 2)], 20),
    "one token a task": ([(0, 1, 4), (1, 2, 16), (2, 3, 1)], 3),
    "one token": ([(0, 1, 4)], 1),
    "no adapter": ([], 12),
}


@pytest.mark.parametrize("base", ["weight", "weight and bias", "adapters alone"])
@pytest.mark.parametrize("table", TABLES)
@WITH_AND_WITHOUT_DROPOUT
def test_forward_and_gradients_are_those_of_the_reference(table: str, base: str, dropout: float) -> None:
    rows, num_rows = TABLES[table]
    case = make_case(
        rows, num_rows, with_weight=base != "adapters alone", with_bias=base == "weight and bias", dropout=dropout
    )
    wanted = results(reference_grouped_lora, case.to(torch.float64))
    if table == "no adapter" and base == "adapters alone":
        wanted["dx"] = torch.zeros_like(case.x)  # autograd sees that nothing depends on x; the kernel says zero
    for dtype in (torch.float64, torch.float32):
        found = results(grouped_lora, case.to(dtype))
        assert all(tensor.dtype == dtype for tensor in found.values())
        assert_close(found, wanted, TOLERANCES[dtype])


@pytest.mark.parametrize("table", ["one task", "ragged ranks", "empty segments", "gaps"])
@WITH_AND_WITHOUT_DROPOUT
def test_bfloat16_is_as_near_to_float64_as_its_eight_bits_allow(table: str, dropout: float) -> None:
    case = make_case(*TABLES[table], dropout=dropout)
    wanted = results(reference_grouped_lora, case.to(torch.float64))
    found = results(grouped_lora, case.to(torch.bfloat16))
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert_close(found, wanted, TOLERANCES[torch.bfloat16])


@WITH_AND_WITHOUT_DROPOUT
def test_under_autocast_sums_are_in_bfloat16_and_gradients_in_the_type_of_the_weights(dropout: float) -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=dropout)
    wanted = results(reference_grouped_lora, case.to(torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(grouped_lora, case.to(torch.float32), dy=case.dy.to(torch.bfloat16))
    assert found["y"].dtype == torch.bfloat16
    assert all(tensor.dtype == torch.float32 for key, tensor in found.items() if key != "y")
    assert_close(found, wanted, TOLERANCES[torch.bfloat16])


def test_gradients_agree_with_finite_differences() -> None:
    case = make_case([(0, 3, 2), (4, 6, 3)], 6, dropout=0.3)
    flat = [case.x, *(factor for pair in case.factors for factor in pair)]

    def call(x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        pairs = tuple(zip(factors[::2], factors[1::2], strict=True))
        return grouped_lora(x, case.weight, case.bias, case.segments, pairs, places=case.places, out_features=K)

    assert torch.autograd.gradcheck(call, flat, fast_mode=True)


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
@given(tables(), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.1, 0.7]), st.integers(0, 2**16))
def test_any_table_of_segments_gives_the_reference(
    drawn: tuple[list[tuple[int, int, int]], int], with_bias: bool, x_gradient: bool, dropout: float, seed: int
) -> None:
    table, num_rows = drawn
    if dropout > 0.0:  # segments without rows have tests of their own above
        table = [(start, end, rank) for start, end, rank in table if end > start]
    case = make_case(table, num_rows, with_bias=with_bias, dropout=dropout, x_gradient=x_gradient, seed=seed)
    wanted = results(reference_grouped_lora, case.to(torch.float64))
    assert ("dx" in wanted) == x_gradient
    assert_close(results(grouped_lora, case.to(torch.float64)), wanted, TOLERANCES[torch.float64])
    assert_close(results(grouped_lora, case.to(torch.float32)), wanted, TOLERANCES[torch.float32])


@pytest.mark.parametrize("layout", ["transposed", "every second column", "expanded"])
def test_a_gradient_that_is_not_contiguous_is_read_right(layout: str) -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=0.3)
    dy = {
        "transposed": case.dy.t().contiguous().t(),
        "every second column": torch.stack((case.dy, -case.dy), dim=-1).flatten(1)[:, ::2],
        "expanded": case.dy[:1].expand(len(case.dy), K),
    }[layout]
    assert not dy.is_contiguous()
    wanted = results(reference_grouped_lora, case.to(torch.float64), dy.contiguous())
    assert_close(results(grouped_lora, case.to(torch.float64), dy), wanted, TOLERANCES[torch.float64])


def test_an_input_that_is_not_contiguous_is_read_right() -> None:
    case = make_case(*TABLES["ragged ranks"])
    x = case.x.detach().t().contiguous().t().requires_grad_()
    assert not x.is_contiguous()
    wanted = results(reference_grouped_lora, case.to(torch.float64))
    assert_close(results(grouped_lora, case._replace(x=x)), wanted, TOLERANCES[torch.float64])


def test_the_transposed_weight_of_a_conv1d_is_read_as_it_lies() -> None:
    layer = Conv1D(K, D).double()
    case = make_case(*TABLES["gaps"])
    transposed = case._replace(weight=layer.weight.detach().t(), bias=layer.bias.detach())
    assert not transposed.weight.is_contiguous()
    y = results(grouped_lora, transposed)["y"]
    assert torch.allclose(y[:3], layer(case.x[:3]).detach(), rtol=1e-12, atol=1e-12), "rows of no task"
    fresh = case.to(torch.float64)._replace(weight=layer.weight.detach().t().clone(), bias=layer.bias.detach())
    wanted = results(reference_grouped_lora, fresh)
    assert_close(results(grouped_lora, transposed._replace(**fresh_leaves(transposed))), wanted, 1e-12)


def fresh_leaves(case: Case) -> dict[str, object]:
    """Return leaves without gradients in them."""
    fresh = case.to(torch.float64)
    return {"x": fresh.x, "factors": fresh.factors}


def test_a_factor_without_gradient_gets_none() -> None:
    case = make_case([(0, 5, 3)], 5)
    a, b = case.factors[0]
    case = case._replace(factors=((a.detach(), b),))
    results(grouped_lora, case)
    assert case.factors[0][0].grad is None
    assert b.grad.norm() > 0


def test_the_frozen_weight_and_bias_get_no_gradient() -> None:
    case = make_case([(0, 5, 3)], 5)
    weight, bias = case.weight.clone().requires_grad_(), case.bias.clone().requires_grad_()
    results(grouped_lora, case._replace(weight=weight, bias=bias))
    assert weight.grad is None
    assert bias.grad is None


def test_rows_of_no_segment_get_the_base_alone() -> None:
    case = make_case([(3, 9, 4)], 20)
    y = results(grouped_lora, case)["y"]
    base = torch.nn.functional.linear(case.x, case.weight, case.bias).detach()
    outside = [0, 1, 2, *range(9, 20)]
    assert torch.equal(y[outside], base[outside])
    assert (y[3:9] - base[3:9]).abs().amin(dim=1).max() > 0


def test_no_argument_is_written_to() -> None:
    case = make_case(*TABLES["ragged ranks"], dropout=0.3)
    before = [tensor.detach().clone() for tensor in (case.x, case.weight, case.bias, case.places, case.dy)]
    factors = [factor.detach().clone() for pair in case.factors for factor in pair]
    results(grouped_lora, case)
    after = [case.x, case.weight, case.bias, case.places, case.dy]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(factors, (f for pair in case.factors for f in pair), strict=True))


# -------------------------------------------------------------- isolation


@pytest.mark.parametrize("where", ["activations", "factor A", "factor B", "gradient"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_poison_of_one_task_changes_no_bit_of_another(poison: float, where: str) -> None:
    table = [(0, 11, 4), (11, 19, 8), (19, 40, 7)]
    case = make_case(table, 40, dropout=0.3).to(torch.float32)
    healthy = results(grouped_lora, case)
    sick = make_case(table, 40, dropout=0.3).to(torch.float32)
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
    case = make_case([(0, 6, 4)], 6, with_bias=False, dropout=0.5)
    order = [4, 2, 5, 0, 3, 1]
    shuffled = case._replace(x=case.x.detach()[order], places=case.places[order])
    y = results(grouped_lora, case)["y"]
    assert torch.allclose(results(grouped_lora, shuffled)["y"], y[order], rtol=1e-12, atol=1e-12)
    moved = case._replace(places=case.places + 1)
    assert not torch.allclose(results(grouped_lora, moved)["y"], y)
