"""Cross-entropy of a frozen head: against torch in float64, in blocks of any size, and without the logits in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from peft_mux.kernels.cross_entropy.linear import Head, block_rows, linear_cross_entropy
from tests.kernels.cross_entropy.cases import TRANSFORMS, relative

PROPERTY = settings(deadline=None, max_examples=60)
D, V = 16, 53


def make(
    num_rows: int, *, bias: bool = True, seed: int = 0, **transform: Any
) -> tuple[torch.Tensor, Head, torch.Tensor]:
    """Return random hidden states, a head and targets, in float64."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    offset = torch.randn(V, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(V, (num_rows,), generator=generator)
    return hidden.requires_grad_(), Head(weight, offset, **transform), targets


def in_dtype(dtype: torch.dtype, hidden: torch.Tensor, head: Head) -> tuple[torch.Tensor, Head]:
    """Return fresh hidden states and a head of another dtype."""
    bias = None if head.bias is None else head.bias.to(dtype)
    return hidden.detach().to(dtype).requires_grad_(), head._replace(weight=head.weight.to(dtype), bias=bias)


def torch_losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses by torch's own functions, without the head's methods."""
    logits = hidden @ head.weight.t() * head.scale
    if head.bias is not None:
        logits = (hidden @ head.weight.t() + head.bias) * head.scale
    if head.softcap is not None:
        logits = head.softcap * torch.tanh(logits / head.softcap)
    return F.cross_entropy(logits, targets, reduction="none")


def gradient(losses: torch.Tensor, weights: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return d (weights * losses) / d hidden."""
    (found,) = torch.autograd.grad((losses * weights).sum(), hidden)
    return found


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precision_is_near_to_float64(dtype: torch.dtype, tolerance: float, transform: str) -> None:
    hidden, head, targets = make(60, **TRANSFORMS[transform])
    hidden, head = in_dtype(dtype, hidden, head)
    exact, exact_head = in_dtype(torch.float64, hidden, head)
    found, wanted = linear_cross_entropy(hidden, head, targets), torch_losses(exact, exact_head, targets)
    assert found.dtype == torch.float32
    assert relative(found, wanted) < tolerance
    ones = torch.ones(60)
    got = gradient(found, ones, hidden)
    assert got.dtype == dtype
    assert relative(got, gradient(wanted, ones, exact)) < tolerance


@PROPERTY
@given(
    st.integers(1, 40),
    st.none() | st.integers(1, 45),
    st.sampled_from(sorted(TRANSFORMS)),
    st.booleans(),
    st.integers(0, 2**16),
)
def test_in_blocks_of_any_size_losses_and_gradient_are_those_of_torch(
    num_rows: int, rows_per_block: int | None, transform: str, bias: bool, seed: int
) -> None:
    hidden, head, targets = make(num_rows, bias=bias, seed=seed, **TRANSFORMS[transform])
    weights = torch.linspace(-1, 2, num_rows, dtype=torch.float64)
    wanted = torch_losses(hidden, head, targets)
    found = linear_cross_entropy(hidden, head, targets, rows_per_block=rows_per_block)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(
        gradient(found, weights, hidden), gradient(wanted, weights, hidden), rtol=1e-10, atol=1e-10
    )


def test_no_row_at_all_gives_no_loss_and_a_gradient_of_nothing() -> None:
    hidden, head, targets = make(0)
    losses = linear_cross_entropy(hidden, head, targets)
    assert losses.shape == (0,)
    assert gradient(losses, torch.ones(0), hidden).shape == (0, D)


def test_huge_logits_do_not_overflow() -> None:
    hidden, head, targets = make(20)
    hidden, head = in_dtype(torch.float32, hidden * 1e4, head)
    losses = linear_cross_entropy(hidden, head, targets)
    assert losses.isfinite().all()
    assert losses.max() > 1e4
    assert gradient(losses, torch.ones(20), hidden).isfinite().all()


def test_the_head_gets_no_gradient_and_without_one_to_take_none_is_computed() -> None:
    hidden, head, targets = make(5)
    head = head._replace(weight=head.weight.requires_grad_(), bias=head.bias.requires_grad_())
    linear_cross_entropy(hidden, head, targets).sum().backward()
    assert head.weight.grad is head.bias.grad is None
    assert hidden.grad.norm() > 0
    assert not linear_cross_entropy(hidden.detach(), head, targets).requires_grad


def test_a_poisoned_row_changes_no_bit_of_another() -> None:
    hidden, head, targets = make(30)
    sick = hidden.detach().clone()
    sick[11] = torch.nan
    sick.requires_grad_()
    others = [row for row in range(30) if row != 11]
    losses, sick_losses = (linear_cross_entropy(x, head, targets, rows_per_block=8) for x in (hidden, sick))
    assert sick_losses[11].isnan()
    assert torch.equal(losses[others], sick_losses[others])
    mine, theirs = (gradient(part, torch.ones(30), x) for part, x in ((losses, hidden), (sick_losses, sick)))
    assert theirs[11].isnan().all()
    assert torch.equal(mine[others], theirs[others])


def test_autocast_is_switched_off_inside() -> None:
    hidden, head, targets = make(30)
    hidden, head = in_dtype(torch.float32, hidden, head)
    wanted = linear_cross_entropy(hidden, head, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear_cross_entropy(hidden, head, targets), wanted)


# ------------------------------------------------------------------ memory


def allocated_bytes(function: Callable[[], Any], least: int) -> tuple[list[int], Any]:
    """Return the allocations of so many bytes and more in a call, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    # Negative where memory is given back.
    sizes = [event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [size for size in sizes if size >= least], result


@pytest.mark.parametrize("bias", [torch.ones(1000), None])
@pytest.mark.parametrize(("softcap", "block", "times"), [(None, 40, 1), (3.0, 100, 2)])
def test_the_logits_of_all_blocks_are_in_one_memory_and_the_slope_of_a_cap_is_held_next_to_them(
    softcap: float | None, block: int, times: int, bias: torch.Tensor | None
) -> None:
    head, hidden = Head(torch.randn(1000, 4), bias, 0.5, softcap), torch.randn(100, 4, requires_grad=True)
    targets = torch.randint(1000, (100,))
    compute = functools.partial(linear_cross_entropy, hidden, head, targets, rows_per_block=block)
    sizes, losses = allocated_bytes(compute, 1000 * 20 * 4)
    assert [size for size in sizes if size > 0] == [1000 * block * 4] * times
    blocks = zip(hidden.split(block), targets.split(block), strict=True)
    assert torch.equal(losses, torch.cat([linear_cross_entropy(rows, head, own) for rows, own in blocks]))


@pytest.mark.parametrize(
    ("vocabulary", "device", "rows"),
    [
        (32_000, "cpu", 384),
        (151_936, "cpu", 384),
        (10_000_000, "cpu", 16),
        (32_000, "cuda", 2048),
        (262_144, "cuda", 1024),
    ],
)
def test_a_block_has_rows_enough_to_compute_fast_as_long_as_its_logits_keep_to_a_bound(
    vocabulary: int, device: str, rows: int
) -> None:
    assert block_rows(vocabulary, device) == rows
