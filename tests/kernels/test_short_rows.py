"""Attention of short rows against float64, run by Triton's interpreter in a process of its own.

The interpreter multiplies bf16 wrongly, so this is fp32; `tests/ptx` runs the compiled code in bf16.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.children import run_script
from tests.kernels.interpreter import keep_patches

pytest.importorskip("triton")

NAN = float("nan")
CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "one key-value head for all": {"heads": (4, 1)},
    "as many key-value heads": {"heads": (3, 3), "channels": 8},
    "seven queries of a key-value head, odd channels": {"heads": (7, 1), "channels": 40},
    "128 channels": {"heads": (4, 2), "channels": 128, "lengths": (33, 17, 2)},
    "a window": {"window": 5},
    "a window of one token": {"window": 1},
    "a window as long as rows": {"window": 64},
    "every token sees every other": {"is_causal": False},
    "a window in both directions": {"is_causal": False, "window": 3},
    "another factor of scores": {"scaling": 0.7},
    "no row": {"lengths": ()},
}
LENGTHS = (1, 64, 0, 16, 65, 63, 30)


def inputs(
    heads: tuple[int, int] = (4, 2), channels: int = 16, lengths: tuple[int, ...] = LENGTHS, **options: Any
) -> tuple[list[torch.Tensor], torch.Tensor, dict[str, Any]]:
    """Return queries, keys, values and gradients of outputs; the bounds of rows; and the other arguments."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, channels) for count in (heads[0], heads[1], heads[1], heads[0])]
    # As in models: heads are parts of a wider tensor.
    wide = [torch.randn(tokens, count, channels + 8, generator=generator) for tokens, count, _ in shapes]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    return [x[..., :channels] for x in wide], bounds, {"is_causal": True, "window": None, "scaling": 0.3, **options}


def expected(tensors: list[torch.Tensor], bounds: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return outputs and gradients of rows of at most 64 tokens in float64; zeros for the others."""
    q, k, v, dout = (x.double() for x in tensors)
    found = [torch.zeros_like(x) for x in (q, q, k, v)]
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        if not 0 < end - begin <= 64:
            continue
        row = [x[begin:end].clone().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in row[1:])
        distance = torch.arange(end - begin)[:, None] - torch.arange(end - begin)
        window = options["window"] or 64
        seen = distance.abs() < window if not options["is_causal"] else (distance >= 0) & (distance < window)
        scores = torch.einsum("qhc,khc->hqk", row[0], keys) * options["scaling"]
        out = torch.einsum("hqk,khc->qhc", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
        gradients = torch.autograd.grad(out, row, dout[begin:end])
        for whole, part in zip(found, (out, *gradients), strict=True):
            whole[begin:end] = part.detach()
    return found


def attended(tensors: list[torch.Tensor], bounds: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
    """Return the same by the kernels; rows that they leave out are zeros."""
    from peft_mux.kernels.attention.short_rows import short_row_attention

    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = short_row_attention(q, k, v, bounds, **options)
    found = [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        if end - begin > 64:
            for x in found:
                x[begin:end] = 0.0
    return found


def main() -> None:
    """Print the error of each case, and whether rows have the bits that they have alone."""
    keep_patches()
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        pairs = zip(attended(*inputs(**case)), expected(*inputs(**case)), strict=True)
        found[name] = max(float((own - right).abs().max()) if own.numel() else 0.0 for own, right in pairs)
    tensors, bounds, options = inputs(lengths=(30, 40, 20))
    for x in tensors:
        x[:30] = NAN
        x[70:] = torch.inf
    beside = [x[30:70] for x in attended(tensors, bounds, options)]
    alone = attended([x[30:70] for x in tensors], torch.tensor([0, 40], dtype=torch.int32), options)
    found["beside NaN as alone"] = all(torch.equal(*pair) for pair in zip(beside, alone, strict=True))
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(run_script(__file__, TRITON_INTERPRET="1"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_float64(found: dict[str, Any], name: str) -> None:
    assert found[name] < 2e-5


@pytest.mark.slow
def test_a_row_next_to_nan_has_the_bits_that_it_has_alone(found: dict[str, Any]) -> None:
    assert found["beside NaN as alone"]


if __name__ == "__main__":
    main()
