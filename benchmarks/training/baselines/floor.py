"""The floor: the same packed tokens through the frozen backbone, forward and input gradients, nothing else.

No adapters, no optimizer, no padding. It is what the cost of multiplexing is measured against (`mux /
floor`), so it is written to be fast, and uses nothing of peft_mux but what the process does with freed memory: a slow
product must not be able to raise its own limit.

Sequences lie sorted by length, so those of equal length form a rectangle of the stream that attention reads
in place, one scaled-dot-product call per length. The loss is taken on target rows alone, in blocks, with its
gradient computed while the block's logits are at hand. The gradient flows down to the input embeddings, which
is slightly more than a LoRA run needs (it may stop at the first layer's adapters).

Shape letters: T tokens, M target rows, H heads, C channels of a head, D hidden features, n sequences of
length L.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from benchmarks.training.baselines import ModelFactory
from benchmarks.training.timing import Run, now_s, timed
from benchmarks.training.workloads import IGNORE_INDEX, TaskWorkload, Workload
from peft_mux.engine.allocator import keeping_freed_memory

ATTENTION_NAME = "benchmark_floor"
MAX_TOKENS = 4096
"""Tokens of one forward and backward pass; 512 to 4096 were measured to differ by less than the noise."""
_ROWS_PER_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Sequences of all tasks, shortest first, without padding.

    Attributes:
        input_ids: token ids `[1, T]`.
        position_ids: positions `[1, T]`, restarting at each sequence.
        rectangles: number n and length L of the sequences of each length, in the order of the stream.
        target_rows: the positions that predict something, `[M]`.
        targets: the token that each of them predicts, `[M]`.
        weights: 1 / number of targets of the task's global batch, `[M]`.
        task_of_target: index of the task of each of them, `[M]`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rectangles: tuple[tuple[int, int], ...]
    target_rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor
    task_of_target: torch.Tensor


def run_floor(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Run all steps of all tasks through the frozen backbone.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks and their rows.
        record_losses: whether to keep the loss of each task at its first step, where adapters still add nothing.
    """
    AttentionInterface.register(ATTENTION_NAME, rectangle_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
    backbone = model_factory().requires_grad_(False)
    backbone.set_attn_implementation(ATTENTION_NAME)
    backbone.train()
    with keeping_freed_memory(torch.device("cpu")):
        return _run_steps(backbone, workload, record_losses)


def _run_steps(backbone: Any, workload: Workload, record_losses: bool) -> Run:
    losses, clock_s = {}, [now_s()]
    for step in range(workload.num_steps):
        losses_N = torch.zeros(len(workload.tasks))
        for packed in pack(workload.tasks, step, MAX_TOKENS):
            weighted_M = forward_and_backward(backbone, packed)
            if record_losses and step == 0:
                losses_N.index_add_(0, packed.task_of_target, weighted_M)
        if record_losses and step == 0:
            losses = {task.name: [loss] for task, loss in zip(workload.tasks, losses_N.tolist(), strict=True)}
        clock_s.append(now_s())
    steps_s = [end - begin for begin, end in pairwise(clock_s)]
    return Run(sum(steps_s), workload.num_timed_tokens, sum(timed(steps_s)), losses)


def forward_and_backward(backbone: Any, packed: PackedTokens) -> torch.Tensor:
    """Compute the gradient of the input embeddings; return the weighted losses `[M]`."""
    embeddings = backbone.get_input_embeddings()(packed.input_ids).requires_grad_()
    hidden_TD = backbone.model(
        inputs_embeds=embeddings,
        position_ids=packed.position_ids,
        use_cache=False,
        floor_rectangles=packed.rectangles,
    ).last_hidden_state[0]
    hidden_MD = hidden_TD.index_select(0, packed.target_rows)
    weighted_M = _WeightedLosses.apply(hidden_MD, backbone.lm_head.weight, packed.targets, packed.weights)
    weighted_M.sum().backward()
    assert embeddings.grad is not None, "the gradient did not reach the input embeddings"
    return weighted_M.detach()


def pack(tasks: tuple[TaskWorkload, ...], step: int, max_tokens: int) -> list[PackedTokens]:
    """Put the rows of one step of all tasks into streams of at most `max_tokens` tokens, shortest first."""
    sequences = []
    for index, task in enumerate(tasks):
        rows = task.batches[step]
        num_targets = sum(label != IGNORE_INDEX for row in rows for label in row["labels"][1:])
        sequences += [(row, index, 1 / num_targets) for row in rows]
    sequences.sort(key=lambda sequence: len(sequence[0]["input_ids"]))
    streams: list[list[Any]] = [[]]
    num_tokens = 0
    for sequence in sequences:
        length = len(sequence[0]["input_ids"])
        if streams[-1] and num_tokens + length > max_tokens:
            streams.append([])
            num_tokens = 0
        streams[-1].append(sequence)
        num_tokens += length
    return [_packed(stream) for stream in streams]


def _packed(sequences: list[tuple[dict[str, list[int]], int, float]]) -> PackedTokens:
    lengths = [len(row["input_ids"]) for row, _, _ in sequences]
    sizes = torch.tensor(lengths)
    input_ids = torch.tensor([token for row, _, _ in sequences for token in row["input_ids"]])
    labels = torch.tensor([label for row, _, _ in sequences for label in [*row["labels"][1:], IGNORE_INDEX]])
    target_rows = (labels != IGNORE_INDEX).nonzero().squeeze(1)

    def of_targets(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values).repeat_interleave(sizes)[target_rows]

    return PackedTokens(
        input_ids=input_ids[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        rectangles=tuple((count, length) for length, count in Counter(lengths).items()),
        target_rows=target_rows,
        targets=labels[target_rows],
        weights=of_targets([weight for _, _, weight in sequences]),
        task_of_target=of_targets([index for _, index, _ in sequences]),
    )


def rectangle_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    floor_rectangles: tuple[tuple[int, int], ...] = (),
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally within each sequence: `[1, H, T, C]` to `[1, T, H, C]`, without masks or copies."""
    assert attention_mask is None, "packed tokens need no mask"
    assert floor_rectangles, "the model does not hand its arguments on to attention"
    sizes = [count * length for count, length in floor_rectangles]
    # split, not slices: it concatenates once in the backward pass; each slice would fill a whole stream.
    parts = zip(*(x[0].transpose(0, 1).split(sizes) for x in (query, key, value)), strict=True)
    outputs = []
    for (count, length), qkv in zip(floor_rectangles, parts, strict=True):
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in qkv)
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[None], None


class _WeightedLosses(torch.autograd.Function):
    """Weighted negative log-likelihood of each target row; the gradient is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        head: torch.Tensor,
        targets_M: torch.Tensor,
        weights_M: torch.Tensor,
    ) -> torch.Tensor:
        gradient_MD, losses_M = torch.empty_like(hidden_MD), torch.empty_like(weights_M)
        for start in range(0, len(hidden_MD), _ROWS_PER_BLOCK):
            rows = slice(start, start + _ROWS_PER_BLOCK)
            targets, weights = targets_M[rows, None], weights_M[rows, None]
            log_probabilities = F.log_softmax(hidden_MD[rows] @ head.T, dim=-1)
            losses_M[rows] = (log_probabilities.gather(1, targets) * -weights).squeeze(1)
            probabilities = log_probabilities.exp_()
            probabilities.scatter_add_(1, targets, torch.full_like(weights, -1.0))
            torch.mm(probabilities, head, out=gradient_MD[rows]).mul_(weights)
        ctx.save_for_backward(gradient_MD)
        return losses_M

    @staticmethod
    def backward(ctx: Any, d_losses_M: torch.Tensor) -> tuple[Any, ...]:
        return ctx.saved_tensors[0] * d_losses_M[:, None], None, None, None
