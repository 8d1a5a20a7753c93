"""Prints the measurements behind choices of the CPU path: skinny products, lengths in attention, blocks of the loss.

python -m benchmarks.training.cpu_choices                 about 5 minutes, one thread
python -m benchmarks.training.cpu_choices --threads 2     the same on two
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.harness import in_turns
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.kernels.cross_entropy.linear import Head, block_rows, linear_cross_entropy
from peft_mux.modeling.attention.rows import build_layout


def best_of(run: Callable[[], object], *, repeats: int, calls: int) -> float:
    """Return the seconds of one call: the fastest of several rounds, as other work on the machine only slows."""

    def all_calls() -> None:
        for _ in range(calls):
            run()

    return min(in_turns({"run": all_calls}, repeats, time.perf_counter)["run"]) / calls


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


def loss_blocks(vocab_size: int, width: int, sizes: Sequence[int], targets: int = 768) -> list[tuple[int, float]]:
    """Return the Gflop/s of the loss and its gradient in blocks of so many rows, the least time of three."""
    head = Head(torch.randn(vocab_size, width) * 0.02)
    hidden, labels = torch.randn(targets, width, requires_grad=True), torch.randint(0, vocab_size, (targets,))
    found = []
    for rows in sizes:
        run = partial(linear_cross_entropy, hidden, head, labels, rows_per_block=rows)
        found.append((rows, 4 * targets * width * vocab_size / best_of(run, repeats=3, calls=1) / 1e9))
    return found


def main() -> None:
    """Measure the choices and print a table of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=217, help="tokens of one task in a step")
    parser.add_argument("--width", type=int, default=512, help="features of a layer")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
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
    print("\nloss of 768 targets, 1024 features: Gflop/s with so many rows a block")
    with keeping_freed_memory(torch.device("cpu")):  # as in training
        _print_loss_blocks()


def _print_loss_blocks() -> None:
    for words in (4096, 32_768, 128_256, 151_936, 262_144):
        rates = "  ".join(
            f"{rows}: {rate:.0f}" for rows, rate in loss_blocks(words, 1024, (27, 64, 128, 256, 384, 768))
        )
        print(f"  {words:7d} words: {rates}; chosen {block_rows(words, 'cpu')}")


if __name__ == "__main__":
    main()
