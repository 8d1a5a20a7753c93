"""Cross-entropy of a frozen head: against torch in float64, in blocks of any size, and without the logits in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.kernels.cross_entropy import linear as module
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


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_losses_and_gradient_are_those_of_torch(transform: str, bias: bool) -> None:
    hidden, head, targets = make(30, bias=bias, **TRANSFORMS[transform])
    weights = torch.linspace(-1, 2, 30, dtype=torch.float64)
    wanted = torch_losses(hidden, head, targets)
    found = linear_cross_entropy(hidden, head, targets)
    assert relative(found, wanted) < 1e-12
    assert relative(gradient(found, weights, hidden), gradient(wanted, weights, hidden)) < 1e-12


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


def test_gradients_agree_with_finite_differences() -> None:
    hidden, head, targets = make(7, scale=0.5, softcap=2.0)
    assert torch.autograd.gradcheck(lambda x: linear_cross_entropy(x, head, targets, rows_per_block=3), hidden)


@PROPERTY
@given(st.integers(1, 40), st.integers(1, 45), st.sampled_from(sorted(TRANSFORMS)), st.integers(0, 2**16))
def test_blocks_of_any_size_change_nothing(num_rows: int, rows_per_block: int, transform: str, seed: int) -> None:
    hidden, head, targets = make(num_rows, seed=seed, **TRANSFORMS[transform])
    weights = torch.arange(1.0, num_rows + 1, dtype=torch.float64)
    wanted = torch_losses(hidden, head, targets)
    found = linear_cross_entropy(hidden, head, targets, rows_per_block=rows_per_block)
    assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-11)
    assert torch.allclose(gradient(found, weights, hidden), gradient(wanted, weights, hidden), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_rows", [7, 8, 9, 15, 16, 17])
def test_the_first_and_the_last_row_of_each_block_are_right(num_rows: int) -> None:
    hidden, head, targets = make(num_rows)
    found = linear_cross_entropy(hidden, head, targets, rows_per_block=8)
    wanted = torch_losses(hidden, head, targets)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


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


def test_the_head_gets_no_gradient() -> None:
    hidden, head, targets = make(5)
    head = head._replace(weight=head.weight.requires_grad_(), bias=head.bias.requires_grad_())
    linear_cross_entropy(hidden, head, targets).sum().backward()
    assert head.weight.grad is None
    assert head.bias.grad is None
    assert hidden.grad.norm() > 0


def test_without_a_gradient_to_take_none_is_computed() -> None:
    hidden, head, targets = make(5)
    losses = linear_cross_entropy(hidden.detach(), head, targets)
    assert not losses.requires_grad
    assert torch.allclose(losses, torch_losses(hidden, head, targets).detach(), rtol=1e-12)


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


# ---------------------------------------------- ignored labels and tasks


def stream(*tasks: list[tuple[list[int], list[int]]]) -> Any:
    """Return a micro-batch of tasks, each a list of (input ids, labels)."""
    rows = [
        {"task": f"task{index}", "input_ids": ids, "labels": labels}
        for index, part in enumerate(tasks)
        for ids, labels in part
    ]
    return ChunkPackingCollator()(rows)


def task_means(hidden: torch.Tensor, head: Head, batch: Any) -> torch.Tensor:
    """Return each task's loss as the model computes it from hidden states."""
    losses = linear_cross_entropy(hidden[batch.target_rows], head, batch.labels[0][batch.target_rows], rows_per_block=2)
    counts = [end - start for start, end in pairwise(batch.target_offsets)]
    parts = zip(losses.split(counts), batch.loss_weights, strict=True)
    return torch.stack([part.sum() * weight for part, weight in parts])


def test_ignored_labels_carry_no_loss_and_each_task_has_the_mean_of_its_own() -> None:
    x = IGNORE_INDEX
    batch = stream(
        [([3, 4, 5, 6], [x, x, 5, 6]), ([7, 8, 9], [7, 8, 9])],
        [([10, 11, 12, 13, 14], [x, x, x, x, 14])],
    )
    hidden, head, _ = make(batch.num_tokens)
    found = task_means(hidden, head, batch)
    logits = hidden @ head.weight.t() + head.bias
    labels = batch.labels[0]
    wanted = torch.stack([F.cross_entropy(logits[:7], labels[:7]), F.cross_entropy(logits[7:], labels[7:])])
    assert batch.target_offsets == (0, 4, 5)
    assert torch.allclose(found, wanted, rtol=1e-12)
    for index, part in enumerate((slice(0, 7), slice(7, 12))):
        (mine,) = torch.autograd.grad(found[index], hidden, retain_graph=True)
        (theirs,) = torch.autograd.grad(wanted[index], hidden, retain_graph=True)
        assert torch.allclose(mine, theirs, rtol=1e-11, atol=1e-14)
        outside = torch.ones(12, dtype=torch.bool)
        outside[part] = False
        assert (mine[outside] == 0).all(), "the loss of one task reached the rows of the other"


def test_a_task_without_any_target_has_loss_zero_and_gradient_zero() -> None:
    x = IGNORE_INDEX
    batch = stream([([3, 4, 5], [x, x, x])], [([6, 7, 8], [6, 7, 8])])
    hidden, head, _ = make(6)
    losses = task_means(hidden, head, batch)
    assert losses[0].item() == 0.0
    assert losses[1].item() > 0.0
    (found,) = torch.autograd.grad(losses.sum(), hidden)
    assert (found[:3] == 0).all()
    assert found[3:5].norm() > 0


def test_a_stream_where_everything_is_masked_has_losses_of_zero() -> None:
    x = IGNORE_INDEX
    hidden, head, _ = make(5)
    losses = task_means(hidden, head, stream([([3, 4, 5], [x, x, x])], [([6, 7], [x, x])]))
    assert losses.tolist() == [0.0, 0.0]
    assert (torch.autograd.grad(losses.sum(), hidden)[0] == 0).all()


def test_the_label_of_a_first_token_is_never_a_target() -> None:
    batch = stream([([3], [3]), ([4, 5], [4, 5])])
    assert batch.labels[0][batch.target_rows].tolist() == [5]


# ------------------------------------------------------------------ memory


def allocated_bytes(function: Callable[[], Any], least: int) -> tuple[list[int], Any]:
    """Return the allocations of so many bytes and more in a call, and what it returns."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = function()
    # Negative where memory is given back.
    sizes = [event.nbytes() for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [size for size in sizes if size >= least], result


class LargestOutput(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def sizes_of(function: Any, num_rows: int, vocabulary: int, **kwargs: Any) -> int:
    """Return the elements of the largest tensor of a forward and backward pass, the head itself not counted."""
    hidden = torch.randn(num_rows, 4, requires_grad=True)
    head = Head(torch.randn(vocabulary, 4), torch.randn(vocabulary), scale=0.5, softcap=3.0)
    targets = torch.randint(vocabulary, (num_rows,))
    with LargestOutput() as mode:
        function(hidden, head, targets, **kwargs).sum().backward()
    return mode.largest


def test_the_logits_of_the_whole_stream_never_exist() -> None:
    rows, vocabulary, block = 640, 1000, 32
    assert sizes_of(torch_losses, rows, vocabulary) >= rows * vocabulary, "the check sees logits"
    assert sizes_of(linear_cross_entropy, rows, vocabulary, rows_per_block=block) == block * vocabulary


@pytest.mark.parametrize(("scale", "softcap", "times"), [(1.0, None, 1), (0.5, None, 1), (0.5, 3.0, 2)])
def test_the_logits_of_a_block_are_held_once_and_twice_with_the_slope_of_a_cap(
    scale: float, softcap: float | None, times: int
) -> None:
    head = Head(torch.randn(1000, 4), torch.randn(1000), scale, softcap)
    hidden = torch.randn(40, 4, requires_grad=True)
    targets = torch.randint(1000, (40,))
    sizes, _ = allocated_bytes(lambda: linear_cross_entropy(hidden, head, targets).sum().backward(), 1000 * 40 * 4)
    assert sizes == [1000 * 40 * 4] * times


@pytest.mark.parametrize("bias", [torch.ones(1000), None])
def test_the_logits_of_all_blocks_are_in_one_memory(bias: torch.Tensor | None) -> None:
    head, hidden = Head(torch.randn(1000, 4), bias), torch.randn(100, 4, requires_grad=True)
    targets = torch.randint(1000, (100,))
    compute = functools.partial(linear_cross_entropy, hidden, head, targets, rows_per_block=40)
    sizes, losses = allocated_bytes(compute, 1000 * 20 * 4)
    assert sizes == [1000 * 40 * 4], "and not one for each of three blocks"
    blocks = zip(hidden.split(40), targets.split(40), strict=True)
    assert torch.equal(losses, torch.cat([linear_cross_entropy(rows, head, own) for rows, own in blocks]))


def test_the_default_block_bounds_the_logits_whatever_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_SIZES", {"cpu": module.BlockSizes(16, 2**15, 2**16)})
    largest = [sizes_of(linear_cross_entropy, rows, 1000) for rows in (100, 400, 1600)]
    assert largest == [32_000] * 3


@pytest.mark.parametrize(
    ("vocabulary", "device", "rows"),
    [
        (4096, "cpu", 1024),
        (32_000, "cpu", 384),
        (151_936, "cpu", 384),
        (262_144, "cpu", 384),
        (2_000_000, "cpu", 67),
        (10_000_000, "cpu", 16),
        (32_000, "cuda", 2048),
        (151_936, "cuda", 1024),
        (262_144, "cuda", 1024),
        (2_000_000, "cuda", 128),
    ],
)
def test_a_block_has_rows_enough_to_compute_fast_as_long_as_its_logits_keep_to_a_bound(
    vocabulary: int, device: str, rows: int
) -> None:
    assert block_rows(vocabulary, device) == rows
