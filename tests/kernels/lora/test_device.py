"""Launches of grouped LoRA kernels in Triton's interpreter: what they draw and write.

What they compute is compared with float64 where layers use them, in `test_group.py`.
First of all runs the kernel by which a card is tried; it raises unless it writes what it should.

The interpreter is chosen when Triton is first imported, so everything that needs it runs in one child process: this
file as a script. It prints JSON; the tests below read what they need of it.
"""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
import torch

from peft_mux.kernels import philox
from peft_mux.kernels.availability import try_kernel
from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables
from tests.children import run_script
from tests.kernels.interpreter import keep_patches

MODULE_SEED = philox.hash_seed("layers.3.q_proj")
NAN = float("nan")


# ------------------------------------------------------------------------------ what the child computes


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values with rows further apart, and NaNs between them."""
    wide = torch.full((len(tensor), tensor.shape[1] + 12), NAN, dtype=tensor.dtype)
    wide[:, 5 : 5 + tensor.shape[1]] = tensor
    return wide[:, 5 : 5 + tensor.shape[1]]


def drawn_probabilities(width: int) -> list[float]:
    """Return probabilities whose threshold is the own draw of an element of each of the first eight columns."""
    places = torch.randint(0, 2**31, (24,), generator=torch.Generator().manual_seed(1))
    key = philox.hash_seed("task", 5) ^ MODULE_SEED
    words = philox.philox(key, places[:, None] * -(-width // 8) + torch.arange(-(-width // 8)))
    draws = torch.stack((words & 0xFFFF, words >> 16), dim=-1).permute(1, 2, 0, 3).reshape(24, -1)
    return [draws[column, column].item() / 65536 for column in range(8)]


def masks(width: int, probability: float) -> dict[str, bool]:
    """Return whether each kernel's mask is that of `philox`, read off products with units."""
    from peft_mux.kernels.lora import launch as kernels

    rows, step_seed = 24, philox.hash_seed("task", 5)
    places = torch.randint(0, 2**31, (rows,), generator=torch.Generator().manual_seed(1))
    expected = philox.keep_mask(step_seed ^ MODULE_SEED, places, width, probability)
    drop: dict[str, Any] = {"places": places, "module_seed": MODULE_SEED, "scaled": False}
    tables = SegmentTables([rows], [step_seed], block_rows=16, chunk_rows=32)
    ones = torch.ones(rows, width)

    wide = RankTable([width], [1.0], dropouts=[probability])
    s = torch.zeros(rows, wide.num_columns)
    kernels.shrink(ones, whole(torch.eye(width)), s, tables, wide, **drop)

    single = RankTable([1], [1.0], dropouts=[probability])
    dx = torch.full((rows, width), NAN)
    kernels.expand(torch.ones(rows, 8), whole(torch.ones(1, width)), dx, tables, single, **drop)

    square = RankTable([rows], [1.0], dropouts=[probability])
    gradient = torch.full((rows, width), NAN)
    kernels.wgrad(torch.eye(rows), ones, whole(gradient), tables, square, **drop)

    scaled = expected.float() * philox.keep_scale(probability)
    return {
        "shrink": torch.equal(s[:, :width], scaled),
        "expand": torch.equal(dx, scaled),
        "wgrad": torch.equal(gradient, scaled),
        "mixed": bool(expected.any() and not expected.all()),
    }


def whole(factor: torch.Tensor, num_segments: int = 1) -> Factors:
    return Factors([factor, *[None] * (num_segments - 1)], factor.shape[1])


def main() -> None:
    torch.set_num_threads(1)
    keep_patches()
    try_kernel(torch.device("cpu"))
    torch.manual_seed(0)
    report = {
        "masks": {
            f"{width} {p}": masks(width, p)
            for width, p in ((64, 0.1), (100, 0.5), (5, 0.5), *((20, p) for p in drawn_probabilities(20)))
        },
        "updated": updated(),
        "columns": columns_of_s(),
    }
    print(json.dumps(report))


def updated() -> dict[str, bool]:
    """Return whether tables rewritten in place give the bits of new tables, also between rows that are not adjacent."""
    from peft_mux.kernels.lora import launch as kernels

    fixed = SegmentTables([50, 1, 2], [1, 2, 3], block_rows=16, chunk_rows=32, max_tokens=64)
    address = fixed.tile_row.data_ptr()
    fixed.update([30, 0, 34], [5, 6, 2**64 - 1])
    fresh = SegmentTables([30, 0, 34], [5, 6, 2**64 - 1], block_rows=16, chunk_rows=32)
    ranks = RankTable([40, 8, 4], [2.0, 1.0, 0.5], dropouts=[0.5, 0.0, 0.1])
    x, w, places = torch.randn(64, 24), torch.randn(52, 24), torch.arange(64)
    results = []
    for tables, laid in ((fixed, strided), (fresh, torch.clone)):
        s, gradient, y = laid(torch.zeros(64, 40)), torch.full((52, 24), NAN), laid(torch.full((64, 24), NAN))
        x = laid(x)
        factors, gradients = (Factors(t.split([40, 8, 4]), 24) for t in (w, gradient))
        kernels.shrink(x, factors, s, tables, ranks, scaled=True, places=places)
        kernels.expand(s, factors, y, tables, ranks, scaled=True)
        kernels.wgrad(s, x, gradients, tables, ranks, scaled=True, places=places)
        results.append((s, y, gradient))
    equal = [torch.equal(left, right) for left, right in zip(*results, strict=True)]
    finite = all(bool(tensor.isfinite().all()) for tensor in results[0])
    same_memory = address == fixed.tile_row.data_ptr()
    return {"S": equal[0], "y": equal[1], "gradient": equal[2], "finite": finite, "same memory": same_memory}


def columns_of_s() -> dict[str, bool]:
    """Return what shrink does to columns of S: a rank's own, those that fill eight, all others."""
    from peft_mux.kernels.lora import launch as kernels

    tables, ranks = SegmentTables([4, 4], [0, 0]), RankTable([3, 0], [1.0, 1.0], s_columns=[8, 0])
    s = torch.full((8, 24), NAN)
    kernels.shrink(torch.ones(8, 16), whole(torch.ones(3, 16), 2), s, tables, ranks, scaled=False)
    nothing = torch.ones(8, 24, dtype=torch.bool)
    nothing[:4, 8:16] = False
    return {
        "own": bool((s[:4, 8:11] == 16).all()),
        "filled with zeros": bool((s[:4, 11:16] == 0).all()),
        "others untouched": bool(s[nothing].isnan().all()),
    }


# ------------------------------------------------------------------------------ the tests


@pytest.fixture(scope="module")
def report() -> dict:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    return json.loads(run_script(__file__, TRITON_INTERPRET="1"))


@pytest.mark.parametrize("kernel", ["shrink", "expand", "wgrad"])
def test_masks_are_those_of_the_reference_bit_for_bit_and_a_draw_that_equals_the_threshold_is_kept(
    report: dict, kernel: str
) -> None:
    assert all(equal["mixed"] for equal in report["masks"].values())
    assert {name: equal[kernel] for name, equal in report["masks"].items()} == dict.fromkeys(report["masks"], True)


def test_tables_that_are_rewritten_in_place_give_the_bits_of_new_ones_wherever_rows_lie(report: dict) -> None:
    assert report["updated"] == dict.fromkeys(("S", "y", "gradient", "finite", "same memory"), True)


def test_shrink_writes_whole_groups_of_eight_columns_and_no_others(report: dict) -> None:
    assert report["columns"] == dict.fromkeys(("own", "filled with zeros", "others untouched"), True)


if __name__ == "__main__":
    main()
