"""The loss over a vocabulary in shards is that of the whole head, row by row; a window draws what the whole does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from peft_mux.kernels import philox
from peft_mux.kernels.cross_entropy.linear import Head, VocabParallelCrossEntropy, linear_cross_entropy

ROWS, HIDDEN, VOCABULARY = 13, 8, 37


class Board:
    """Where shards in threads put what they add up."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[Any] = [None] * size
        self.num_sums = 0


class Links:
    """One shard's links."""

    def __init__(self, index: int, board: Board) -> None:
        self.index, self.size, self._board = index, len(board.slots), board

    def all_reduce(self, tensor: torch.Tensor) -> Links:
        self._board.slots[self.index] = tensor.detach().clone()
        self._board.barrier.wait()
        tensor.copy_(torch.stack(self._board.slots).sum(dim=0))
        self._board.num_sums += self.index == 0
        self._board.barrier.wait()
        return self

    def wait(self) -> None:
        """Return at once: the sum is there."""


def on_shards(size: int, part: Callable[[Links, slice], Any]) -> tuple[list[Any], int]:
    """Run each shard with its words in a thread; return what they gave, and how many sums they made."""
    board = Board(size)
    words = [slice(VOCABULARY * index // size, VOCABULARY * (index + 1) // size) for index in range(size)]
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(part, Links(index, board), words[index]) for index in range(size)]
        return [future.result() for future in futures], board.num_sums


def inputs(*, bias: bool = True, scale: float = 1.0, softcap: float | None = None) -> tuple[Any, Head, Any, Any]:
    """Return hidden states, the whole head, targets, and what flows back into the losses."""
    generator = torch.Generator().manual_seed(5)
    draw = {"generator": generator, "dtype": torch.float64}
    head = Head(
        torch.randn(VOCABULARY, HIDDEN, **draw), torch.randn(VOCABULARY, **draw) if bias else None, scale, softcap
    )
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    return torch.randn(ROWS, HIDDEN, **draw), head, targets, torch.randn(ROWS, **draw)


def losses_and_gradient(hidden: torch.Tensor, weights: torch.Tensor, loss: Callable[[Any], Any]) -> Any:
    """Return the losses of rows, and the gradient of what they were computed from."""
    own = hidden.clone().requires_grad_()
    losses = loss(own)
    (losses * weights).sum().backward()
    return losses.detach(), own.grad


def part_of(head: Head, words: slice) -> Head:
    return head._replace(weight=head.weight[words], bias=None if head.bias is None else head.bias[words])


def on_words(hidden: torch.Tensor, head: Head, targets: torch.Tensor, weights: torch.Tensor, size: int) -> Any:
    """Return losses and gradients of all shards of a head, and how many sums they made."""

    def part(links: Links, words: slice) -> Any:
        place: dict[str, Any] = {"first": words.start, "vocab_size": VOCABULARY, "links": links}
        own = part_of(head, words)
        return losses_and_gradient(
            hidden, weights, lambda x: linear_cross_entropy(x, own, targets, rows_per_block=5, **place)
        )

    return on_shards(size, part)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"scale": 0.25}, {"softcap": 3.0, "scale": 2.0}], ids=str)
def test_losses_and_gradients_are_those_of_the_whole_head(size: int, options: dict[str, Any]) -> None:
    hidden, head, targets, weights = inputs(**options)
    expected = losses_and_gradient(
        hidden, weights, lambda x: F.cross_entropy(head.logits(x), targets, reduction="none")
    )
    found, num_sums = on_words(hidden, head, targets, weights, size)
    for losses, gradient in found:
        torch.testing.assert_close(losses, expected[0], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradient, expected[1], rtol=1e-11, atol=1e-12)
        assert torch.equal(losses, found[0][0]), "the same bits on all shards"
    assert num_sums == 3 + 1, "one for each block of rows, one for the gradient"


def test_losses_from_logits_give_every_shard_the_gradient_of_its_words() -> None:
    hidden, head, targets, weights = inputs()
    logits = head.logits(hidden)
    expected = losses_and_gradient(logits, weights, lambda x: F.cross_entropy(x, targets, reduction="none"))

    def part(links: Links, words: slice) -> Any:
        loss = lambda x: VocabParallelCrossEntropy.apply(x, targets, words.start, links)  # noqa: E731 - short
        return losses_and_gradient(logits[:, words], weights, loss)

    found, _ = on_shards(3, part)
    for losses, _ in found:
        torch.testing.assert_close(losses, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in found], dim=1), expected[1])


def test_a_row_that_is_not_finite_harms_no_other() -> None:
    hidden, head, targets, weights = inputs()
    poisoned = hidden.clone()
    poisoned[4], poisoned[7] = float("nan"), float("inf")

    healthy, spoilt = (on_words(rows, head, targets, weights, 2)[0][1] for rows in (hidden, poisoned))
    others = [row for row in range(ROWS) if row not in (4, 7)]
    assert not spoilt[0][[4, 7]].isfinite().any()
    assert all(torch.equal(one[others], other[others]) for one, other in zip(healthy, spoilt, strict=True))


@pytest.mark.parametrize(("first", "end"), [(0, 16), (16, 37), (5, 6), (13, 30), (0, 37)])
def test_dropout_in_a_window_draws_what_the_whole_activation_draws(first: int, end: int) -> None:
    places = torch.tensor([3, 900, 17])
    seed = philox.draw_seed(1, 2, "layer")
    whole = philox.keep_mask(seed, places, 37, 0.4)
    found = philox.keep_mask(seed, places, end - first, 0.4, philox.Window(first, 37))
    assert torch.equal(found, whole[:, first:end])
    assert 0 < whole.sum() < whole.numel()
