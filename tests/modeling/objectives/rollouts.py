"""Rollouts as the policy losses read them, and those losses by their formulas, row by row in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from peft_mux.data.task_batch import TokenSequence
from tests.invariants import mux_lab as lab
from tests.modeling.objectives.judged_row import JudgedRow

SEQUENCE_LEVEL = {"importance_sampling_level": "sequence", "beta": 0.05, "use_bias_correction_kl": True, "delta": 1.5}
COOLER = {"temperature": 0.7, "beta": 0.1}
CISPO = {"epsilon_high": 1.2, "beta": 0.2}


def rows(rng: np.random.Generator, objective: Any) -> list[TokenSequence]:
    """Return rollouts of unequal lengths, the first tokens of which are a prompt."""
    found = []
    for index, (prompt, length) in enumerate(((3, 9), (1, 4), (1, 2), (6, 17), (2, 6))):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        labels = np.where(np.arange(length) < prompt, -100, ids)
        # Around the log-probabilities that a random backbone gives, so that some ratios are clipped and some not.
        old = (-np.log(lab.VOCABULARY) + rng.normal(0, 0.4, size=length)).astype(np.float32)
        advantages = np.full(length, rng.normal(), dtype=np.float32)
        columns = {"advantages": advantages, "old_logprobs": old}
        found.append(TokenSequence(ids, labels, index, is_one_term=True, token_columns=columns))
    return found


def rows_with_reference(rng: np.random.Generator, objective: Any) -> list[TokenSequence]:
    """Return rollouts that bring the log-probabilities of a reference, and an advantage for each token."""
    found = []
    for row in rows(rng, objective):
        reference = (-np.log(lab.VOCABULARY) + rng.normal(0, 0.4, size=len(row))).astype(np.float32)
        advantages = rng.normal(size=len(row)).astype(np.float32)
        columns = {**row.token_columns, "ref_logprobs": reference, "advantages": advantages}
        found.append(TokenSequence(row.input_ids, row.labels, row.row, is_one_term=True, token_columns=columns))
    return found


def judged(judged_rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the loss of the variant, row by row."""
    judged_rows = [divided(row, args.temperature) for row in judged_rows]
    parts = [_terms(row, args) for row in judged_rows]
    if args.entropy_coef:
        logprobs = torch.cat([row.target_logits().log_softmax(dim=1) for row in judged_rows])
        entropy = -(logprobs.exp() * logprobs).sum(dim=1).mean()
        return _mean(parts, args) - args.entropy_coef * entropy
    return _mean(parts, args)


def divided(row: JudgedRow, temperature: float) -> JudgedRow:
    """Return a row whose logits are divided by a temperature."""
    return replace(
        row, logits=[one / temperature for one in row.logits], reference=[one / temperature for one in row.reference]
    )


def _mean(parts: list[torch.Tensor], args: Any) -> torch.Tensor:
    if args.loss_type == "grpo":
        return torch.stack([part.mean() for part in parts]).mean()
    if args.loss_type == "dr_grpo":
        return torch.stack([part.sum() / args.max_completion_length for part in parts]).mean()
    return torch.cat(parts).mean()


def _terms(row: JudgedRow, args: Any) -> torch.Tensor:
    logprobs, advantages = row.logprobs(), row.column("advantages").double()
    log_ratio = logprobs - row.column("old_logprobs").double()
    if args.importance_sampling_level == "sequence":
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    ratio = log_ratio.exp()
    if args.loss_type == "cispo":
        terms = -ratio.clamp(max=args.high).detach() * advantages * logprobs
    elif args.loss_type == "importance_sampling":
        terms = -ratio * advantages
    else:
        free = ratio if args.delta is None else ratio.clamp(max=args.delta)
        terms = -torch.min(free * advantages, ratio.clamp(1 - args.epsilon, 1 + args.high) * advantages)
    if args.beta == 0:
        return terms
    brings = "ref_logprobs" in row.row.token_columns
    reference = row.column("ref_logprobs").double() if brings else row.reference_logprobs()
    divergence = (reference - logprobs).exp() - (reference - logprobs) - 1
    return terms + args.beta * divergence * (ratio if args.use_bias_correction_kl else 1)
