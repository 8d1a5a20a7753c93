"""Bottlenecks of many tasks in one pass: outputs and every gradient against autograd in float64, and NaN neighbours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft_mux.modeling.adapters.bottleneck.kind import Bottleneck, BottleneckSegment, grouped_bottlenecks
from peft_mux.modeling.adapters.bottleneck.peft_tuner import ACTIVATIONS

from peft_mux.kernels import philox

WIDTH, NUM_ROWS = 6, 15
PLACES = torch.arange(100, 100 + NUM_ROWS)
SEGMENTS = (
    BottleneckSegment(0, 4, "relu", 0.0, 0),
    BottleneckSegment(4, 5, "gelu", 0.3, 11),
    BottleneckSegment(7, 11, "silu", 0.0, 0),
    BottleneckSegment(11, 15, "tanh", 0.5, 13),
)
"""Rows 5 and 6 belong to a task without an adapter here."""
BIASES = ((True, True), (False, True), (True, False), (False, False))


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, list[Bottleneck]]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    y, own = draw(NUM_ROWS, WIDTH), []
    for size, (down, up) in enumerate(BIASES, start=1):
        biases = draw(size), draw(WIDTH)
        own.append(
            Bottleneck(draw(size, WIDTH), biases[0] if down else None, draw(WIDTH, size), biases[1] if up else None)
        )
    return y, own


def written_out(y: torch.Tensor, own: list[Bottleneck]) -> torch.Tensor:
    rows = list(y.unbind())
    for segment, adapter in zip(SEGMENTS, own, strict=True):
        part = y[segment.start : segment.end]
        kept = philox.keep_mask(segment.seed, PLACES[segment.start : segment.end], WIDTH, segment.dropout)
        read = torch.where(kept, part * philox.keep_scale(segment.dropout), 0.0) if segment.dropout else part
        hidden = read @ adapter.down_MK.t() + (0 if adapter.down_bias_M is None else adapter.down_bias_M)
        added = ACTIVATIONS[segment.non_linearity](hidden) @ adapter.up_KM.t()
        added = added + (0 if adapter.up_bias_K is None else adapter.up_bias_K)
        rows[segment.start : segment.end] = (part + added).unbind()
    return torch.stack(rows)


def leaves(y: torch.Tensor, own: list[Bottleneck]) -> list[torch.Tensor]:
    return [y, *(item for adapter in own for item in adapter if item is not None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_and_gradients_are_those_of_the_formula(dtype: torch.dtype) -> None:
    wanted_y, wanted_own = tensors(torch.float64)
    wanted = written_out(wanted_y, wanted_own)
    y, own = tensors(dtype)
    got = grouped_bottlenecks(y, PLACES, SEGMENTS, own)
    weights = torch.linspace(-1, 1, NUM_ROWS * WIDTH, dtype=torch.float64).view(NUM_ROWS, WIDTH)
    (wanted * weights).sum().backward()
    (got * weights.to(dtype)).sum().backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert torch.allclose(got.double(), wanted, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(leaves(y, own), leaves(wanted_y, wanted_own), strict=True):
        assert torch.allclose(mine.grad.double(), theirs.grad, rtol=tolerance, atol=tolerance)  # type: ignore[union-attr]


def test_no_gradient_of_the_frozen_output_is_computed_where_none_is_needed() -> None:
    y, own = tensors(torch.float64)
    wanted_y, wanted_own = tensors(torch.float64)
    grouped_bottlenecks(y.detach(), PLACES, SEGMENTS, own).square().sum().backward()
    written_out(wanted_y, wanted_own).square().sum().backward()
    assert y.grad is None
    for mine, theirs in zip(leaves(y, own)[1:], leaves(wanted_y, wanted_own)[1:], strict=True):
        assert torch.allclose(mine.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("poisoned", range(len(SEGMENTS)))
def test_nan_of_one_task_reaches_no_other_and_moves_no_bit_of_it(poisoned: int) -> None:
    def run(poison: bool) -> tuple[torch.Tensor, list[Any]]:
        y, own = tensors(torch.float32)
        if poison:
            with torch.no_grad():
                own[poisoned].down_MK[0, 0] = float("nan")
        out = grouped_bottlenecks(y, PLACES, SEGMENTS, own)
        out.square().sum().backward()
        return out, [y, *own]

    (out, (y, *own)), (healthy, (healthy_y, *healthy_own)) = run(True), run(False)
    hit = slice(SEGMENTS[poisoned].start, SEGMENTS[poisoned].end)
    others = [row for row in range(NUM_ROWS) if not hit.start <= row < hit.stop]
    assert bool(out[hit].isnan().any())
    assert torch.equal(out[others], healthy[others])
    assert torch.equal(y.grad[others], healthy_y.grad[others])
    for number, (mine, theirs) in enumerate(zip(own, healthy_own, strict=True)):
        for item, wanted in zip(mine, theirs, strict=True):
            assert number == poisoned or item is None or torch.equal(item.grad, wanted.grad)


def test_a_task_alone_has_the_bits_that_it_has_beside_others() -> None:
    y, own = tensors(torch.float32)
    together = grouped_bottlenecks(y, PLACES, SEGMENTS, own)
    for segment, adapter in zip(SEGMENTS, own, strict=True):
        rows = slice(segment.start, segment.end)
        moved = segment._replace(start=0, end=segment.end - segment.start)
        assert torch.equal(grouped_bottlenecks(y[rows], PLACES[rows], [moved], [adapter]), together[rows])


def test_under_autocast_the_frozen_layer_says_which_dtype() -> None:
    y, own = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = grouped_bottlenecks(y.bfloat16(), PLACES, SEGMENTS, own)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16
    assert y.grad is not None
    assert own[0].down_MK.grad is not None
    assert own[0].down_MK.grad.dtype == torch.float32
    assert torch.allclose(out.float(), grouped_bottlenecks(y, PLACES, SEGMENTS, own), atol=0.3, rtol=0.05)
