"""Rows whose targets are weighted, several, or a teacher's; and their losses by formula."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.data.row_cells import with_given_targets
from peft_mux.data.task_batch import TokenSequence
from tests.invariants import mux_lab as lab
from tests.modeling.objectives.judged_row import JudgedRow

_LENGTHS = (9, 4, 2, 17, 6)


def weighted_rows(rng: np.random.Generator, objective: Any) -> list[TokenSequence]:
    """Return rows with a weight a token, some of them 0, and labels of their own."""
    rows = []
    for index, length in enumerate(_LENGTHS):
        ids, own = (rng.integers(1, lab.VOCABULARY, size=length) for _ in range(2))
        weights = np.where(rng.random(length) < 0.3, 0, rng.uniform(0.1, 2, size=length)).astype(np.float32)
        weights[-1] = 1
        columns = {"weights": weights}
        rows.append(TokenSequence(ids, with_given_targets(own, columns), index, token_columns=columns))
    return rows


def weighted_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return sum(w * nll) / sum(w)."""
    weights = torch.cat([row.column("weights") for row in rows]).double()
    return -(torch.cat([row.logprobs() for row in rows]) * weights).sum() / weights.sum()


def rows_with_several_targets(rng: np.random.Generator, objective: Any) -> list[TokenSequence]:
    """Return rows with three weighted targets a token."""
    rows = []
    for index, length in enumerate(_LENGTHS):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        several = rng.integers(1, lab.VOCABULARY, size=(length, 3))
        weights = rng.uniform(0, 1, size=(length, 3)).astype(np.float32)
        weights[:-1][rng.random(length - 1) < 0.3] = 0
        columns = {"target_ids": several, "target_weights": weights}
        rows.append(TokenSequence(ids, with_given_targets(ids, columns), index, token_columns=columns))
    return rows


def several_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the weighted mean over all targets of all tokens."""
    logprobs = torch.cat([row.target_logits().log_softmax(dim=1).gather(1, row.column("target_ids")) for row in rows])
    weights = torch.cat([row.column("target_weights") for row in rows]).double()
    return -(logprobs * weights).sum() / weights.sum()


def weighted_targets(row: JudgedRow) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of all words at each target, and the ids and the weights of its targets."""
    logprobs = row.target_logits().log_softmax(dim=1)
    if "target_ids" in row.row.token_columns:
        return logprobs, row.column("target_ids"), row.column("target_weights")
    labels = torch.tensor(row.row.labels[1:])
    has_weights = "weights" in row.row.token_columns
    weights = row.column("weights")[:, None] if has_weights else torch.ones(len(logprobs), 1)
    return logprobs, labels[labels != -100][:, None], weights


def dynamic_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the weighted mean over all targets of their nll, times their probability without its gradient."""
    total, size = torch.zeros(()).double(), 0.0
    for row in rows:
        logprobs, ids, weights = weighted_targets(row)
        chosen = logprobs.gather(1, ids)
        total = total - (weights.double() * chosen.detach().exp() * chosen).sum()
        size += weights.double().sum().item()
    return total / size


def smoothed_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return this mean of what transformers' `LabelSmoother` makes of a target: the share of all words is the same."""
    share, total, size = args.label_smoothing_factor, torch.zeros(()).double(), 0.0
    for row in rows:
        logprobs, ids, weights = weighted_targets(row)
        terms = (1 - share) * logprobs.gather(1, ids) + share * logprobs.mean(dim=1, keepdim=True)
        total = total - (terms * weights.double()).sum()
        size += weights.double().sum().item()
    return total / size


def taught_rows(rng: np.random.Generator, objective: Any) -> list[TokenSequence]:
    """Return rows with a teacher's four likeliest words for each token."""
    rows = []
    for index, length in enumerate(_LENGTHS):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        words = np.stack([rng.permutation(lab.VOCABULARY)[:4] for _ in range(length)])
        logprobs = np.log(rng.dirichlet(np.ones(6), size=length)[:, :4]).astype(np.float32)
        labels = np.where(np.arange(length) < min(index, length - 1), -100, ids)
        columns = {"teacher_ids": words, "teacher_logprobs": logprobs}
        rows.append(TokenSequence(ids, labels, index, token_columns=columns))
    return rows


def distilled(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean over the targets of the loss by its formula in `distill`."""
    student = torch.cat([row.target_logits().softmax(dim=1).gather(1, row.column("teacher_ids")) for row in rows])
    teacher = torch.cat([row.column("teacher_logprobs") for row in rows]).double().exp()
    if args.renormalize:
        teacher = teacher / teacher.sum(dim=1, keepdim=True)
    if args.loss_type == "cross_entropy":
        return -(teacher * student.log()).sum(dim=1).mean()
    divergence = (teacher * (teacher / student).log()).sum(dim=1)
    if args.loss_type == "forward_kl_tail":
        rest, own_rest = 1 - teacher.sum(dim=1), 1 - student.sum(dim=1)
        divergence = divergence + rest * (rest / own_rest).log()
    return divergence.mean()
