"""Spreads are the target's logit less the mean logit, row by row, whatever the head, and in shards as in one piece."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peft_mux.kernels.cross_entropy import linear as spreads
from peft_mux.kernels.cross_entropy.linear import Head, linear_spreads
from tests.kernels.cross_entropy.test_vocab_parallel import VOCABULARY, inputs, losses_and_gradient, on_shards, part_of

HEADS: list[dict[str, Any]] = [{}, {"bias": False}, {"scale": 0.3}, {"softcap": 5.0, "scale": 0.3, "bias": False}]


def plain_spreads(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    logits = head.logits(hidden)
    logprobs = logits.log_softmax(dim=1)
    return logprobs.gather(1, targets[:, None]).squeeze(1) - logprobs.mean(dim=1)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", HEADS, ids=str)
def test_parts_of_shards_add_up_to_the_spreads_and_gradients_of_all_logits(
    options: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spreads, "block_rows", lambda *_: 4)
    monkeypatch.setattr(spreads, "_WORDS_AT_ONCE", 10)
    hidden, head, targets, weights = inputs(**options)

    def part(links: Any, words: slice) -> Any:
        own, place = part_of(head, words), {"first": words.start, "vocab_size": VOCABULARY} if size > 1 else {}
        return losses_and_gradient(hidden, weights, lambda x: linear_spreads(x, own, targets, **place))

    parts, _ = on_shards(size, part)
    wanted = losses_and_gradient(hidden, weights, lambda x: plain_spreads(x, head, targets))
    for mine, theirs in zip(map(sum, zip(*parts, strict=True)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_the_nan_of_a_row_stays_in_it_and_no_row_is_none(softcap: float | None) -> None:
    hidden, head, targets, weights = inputs(softcap=softcap)
    sick = hidden.clone()
    sick[3] = float("nan")
    found, healthy = (
        losses_and_gradient(x, weights, lambda x: linear_spreads(x, head, targets)) for x in (sick, hidden)
    )
    others = [row for row in range(len(hidden)) if row != 3]
    for mine, theirs in zip(found, healthy, strict=True):
        assert torch.equal(mine[others], theirs[others])
    assert found[0][3].isnan()
    assert linear_spreads(hidden[:0], head, targets[:0]).shape == (0,)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_bf16_rounds_no_more_than_its_products(softcap: float | None) -> None:
    hidden, head, targets, _ = inputs(bias=False, softcap=softcap)
    low = head._replace(weight=head.weight.bfloat16())
    found = linear_spreads(hidden.bfloat16(), low, targets)
    wanted = plain_spreads(hidden.bfloat16().double(), head._replace(weight=low.weight.double()), targets)
    assert found.dtype == torch.float32
    assert (found.double() - wanted).abs().max() < 0.02 * wanted.abs().max()
