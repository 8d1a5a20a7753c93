"""Prints the measurements behind two choices of the CPU path: skinny products, and lengths in attention.

python -m benchmarks.training.cpu_choices            about 20 s, one thread
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.modeling.attention.rectangles import build_layout


def best_of(run: Callable[[], object], *, repeats: int, calls: int) -> float:
    """Return the seconds of one call: the fastest of several rounds, as other work on the machine only slows."""
    run()
    rounds = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds)


def skinny_products(rows: int, rank: int, width: int) -> list[tuple[str, float, float]]:
    """Time the four products of a LoRA layer, rank last against rank first; microseconds a call."""
    x, dy = torch.randn(rows, width), torch.randn(rows, width)
    a, b = torch.randn(rank, width), torch.randn(width, rank)
    s_rows, s_ranks = torch.randn(rows, rank), torch.randn(rank, rows)
    pairs = {
        "S = x A^T": (lambda: x @ a.t(), lambda: a @ x.t()),
        "dS = dy B": (lambda: dy @ b, lambda: b.t().contiguous() @ dy.t()),
        "dB = dy^T S": (lambda: dy.t() @ s_rows, lambda: (s_ranks @ dy).t().contiguous()),
        "dA = dS^T x": (lambda: s_rows.t() @ x, lambda: s_ranks @ x),
    }
    return [
        (name, *(best_of(run, repeats=15, calls=40) * 1e6 for run in orientations))
        for name, orientations in pairs.items()
    ]


def attention_grouping(lengths: tuple[int, ...], heads: int, channels: int, step: int) -> tuple[int, int, float]:
    """Time forward and backward of one layer's attention with lengths rounded up to `step`: rectangles, rows, ms."""
    layout = build_layout(lengths, step, torch.device("cpu"))
    q, k, v = (torch.randn(layout.num_rows, heads, channels, requires_grad=True) for _ in range(3))

    def run() -> None:
        parts = []
        for rectangle in layout.rectangles:
            batch = (t[rectangle.rows].view(-1, rectangle.length, heads, channels).transpose(1, 2) for t in (q, k, v))
            parts.append(F.scaled_dot_product_attention(*batch, is_causal=True).transpose(1, 2).reshape(-1, heads))
        torch.cat(parts).sum().backward()

    return len(layout.rectangles), layout.num_rows, best_of(run, repeats=7, calls=3) * 1e3


def main() -> None:
    """Measure both choices and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=217, help="tokens of one task in a step")
    parser.add_argument("--width", type=int, default=512, help="features of a layer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for rank in (8, 64):
        print(f"\n{arguments.rows} rows, width {arguments.width}, rank {rank}: microseconds, rank last | rank first")
        for name, last, first in skinny_products(arguments.rows, rank, arguments.width):
            print(f"  {name:12s} {last:8.1f} | {first:8.1f}   {last / first:5.2f}x")
    draw = np.random.default_rng(0)
    for mix, low, high in (("uniform", 10, 70), ("nonuniform", 10, 256)):
        lengths = tuple(int(length) for length in draw.integers(low, high, size=64))
        print(f"\nattention, 64 sequences of {low}-{high} tokens ({mix}), 8 heads of 64: rectangles, rows, ms")
        for step in (1, 4, 8, 16, 32):
            rectangles, rows, milliseconds = attention_grouping(lengths, 8, 64, step)
            print(f"  lengths rounded up to {step:2d}: {rectangles:3d} {rows:6d} {milliseconds:8.2f}")


if __name__ == "__main__":
    main()
