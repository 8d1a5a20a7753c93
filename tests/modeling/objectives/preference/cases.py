"""A case for each variant of each loss of preferences, judged by its formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.data.preferences import with_mismatched
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.modeling.objectives.objective import Objective
from tests.invariants import mux_lab as lab
from tests.modeling.objectives.cases import Judge, LossCase
from tests.modeling.objectives.judged_row import JudgedRow

LENGTHS = ((5, 7), (4, 6), (9, 5), (8, 12))


def pair_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows of a chosen and a rejected answer to prompts of one to three tokens."""
    rows = []
    for index, (chosen, rejected) in enumerate(LENGTHS):
        ids, prompt = rng.integers(1, lab.VOCABULARY, size=chosen + rejected), 1 + index % 3
        is_answer = np.ones(len(ids), dtype=np.float32)
        for first in (0, chosen):
            is_answer[first : first + prompt] = 0.0
        values: dict[str, float] = {"chosen_tokens": chosen - prompt, "rejected_tokens": rejected - prompt}
        labels = np.where(is_answer > 0, ids, IGNORE_INDEX)
        columns: dict[str, np.ndarray] = {}
        if objective.name == "orpo":
            # The whole chosen row is learnt.
            labels, values, columns = np.where(np.arange(len(ids)) < chosen, ids, labels), {}, {"is_answer": is_answer}
        rows.append(TokenSequence(ids, labels, index, None, None, True, (chosen,), columns, values))
    return rows


def scored_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows of a better and a worse text, with margins."""
    rows = []
    for index, (chosen, rejected) in enumerate(LENGTHS):
        ids = rng.integers(1, lab.VOCABULARY, size=chosen + rejected)
        values = {"margin": 0.2 * index}
        rows.append(TokenSequence(ids, ids, index, 0.0, is_one_term=True, starts=(chosen,), row_values=values))
    return rows


def single_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return rows of one answer each, good and bad ones."""
    rows = []
    for index, (length, _) in enumerate(LENGTHS):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        labels = np.where(np.arange(length) < 1 + index % 3, IGNORE_INDEX, ids)
        rows.append(TokenSequence(ids, labels, index, is_one_term=True, row_values={"desirable": float(index % 3 > 0)}))
    return rows


def mismatched_rows(rng: np.random.Generator, objective: Objective) -> list[TokenSequence]:
    """Return the same, each with an answer to another prompt."""
    return list(with_mismatched(tuple(single_rows(rng, objective)), 12))


def sigma(value: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-value))


def log_sigma(value: torch.Tensor) -> torch.Tensor:
    return -torch.log1p(torch.exp(-value))


Formula = Callable[[torch.Tensor, torch.Tensor, Any, JudgedRow], torch.Tensor]
"""The loss of a pair, from the log-ratios of its answers to the reference, the arguments and the row."""


def tokens(row: JudgedRow, number: int) -> int:
    return len(row.logprobs(number))


def exo(chosen: torch.Tensor, rejected: torch.Tensor, args: Any, row: JudgedRow) -> torch.Tensor:
    logits, flipped = args.beta * (chosen - rejected), args.label_smoothing
    first = sigma(logits) * (log_sigma(logits) - math.log(1 - flipped))
    return first + sigma(-logits) * (log_sigma(-logits) - math.log(flipped))


def mean_difference(chosen: torch.Tensor, rejected: torch.Tensor, row: JudgedRow) -> torch.Tensor:
    return chosen / tokens(row, 0) - rejected / tokens(row, 1)


def discopop(chosen: torch.Tensor, rejected: torch.Tensor, args: Any, row: JudgedRow) -> torch.Tensor:
    logits = args.beta * (chosen - rejected)
    blend = sigma(logits / args.discopop_tau)
    return -(1 - blend) * log_sigma(logits) + blend * torch.exp(-logits)


FORMULAS: dict[str, Formula] = {
    "sigmoid": lambda c, r, a, row: -log_sigma(a.beta * (c - r)),
    "hinge": lambda c, r, a, row: (1 - a.beta * (c - r)).clamp(min=0),
    "ipo": lambda c, r, a, row: (mean_difference(c, r, row) - 0.5 / a.beta) ** 2,
    "exo_pair": exo,
    "nca_pair": lambda c, r, a, row: (
        -log_sigma(a.beta * c) - 0.5 * log_sigma(-a.beta * c) - 0.5 * log_sigma(-a.beta * r)
    ),
    "robust": lambda c, r, a, row: (
        (a.label_smoothing * log_sigma(a.beta * (r - c)) - (1 - a.label_smoothing) * log_sigma(a.beta * (c - r)))
        / (1 - 2 * a.label_smoothing)
    ),
    "bco_pair": lambda c, r, a, row: -log_sigma(a.beta * c) - log_sigma(-a.beta * r),
    "sppo_hard": lambda c, r, a, row: (c - 0.5 / a.beta) ** 2 + (r + 0.5 / a.beta) ** 2,
    "apo_zero": lambda c, r, a, row: 1 - sigma(a.beta * c) + sigma(a.beta * r),
    "apo_down": lambda c, r, a, row: sigma(a.beta * c) + 1 - sigma(a.beta * (c - r)),
    "discopop": discopop,
    "sigmoid_norm": lambda c, r, a, row: -log_sigma(a.beta * mean_difference(c, r, row)),
}


def judge_of(formula: Formula) -> Judge:
    """Return the mean of a formula over pairs."""

    def judge(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
        losses = []
        for row in rows:
            chosen, rejected = (
                (row.logprobs(number) * (weights := ld_weights(row, number, args.ld_alpha))).sum()
                - (row.reference_logprobs(number) * weights).sum()
                for number in (0, 1)
            )
            losses.append(formula(chosen, rejected, args, row))
        return torch.stack(losses).mean()

    return judge


def ld_weights(row: JudgedRow, number: int, alpha: float | None) -> torch.Tensor:
    shared = min(tokens(row, 0), tokens(row, 1))
    return torch.tensor([1.0 if place < shared or alpha is None else alpha for place in range(tokens(row, number))])


def chosen_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    return -torch.cat([row.logprobs(0) for row in rows]).mean()


def judge_orpo(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    odds = []
    for row in rows:
        means = [row.logprobs(number)[row.column("is_answer", number) == 1].mean() for number in (0, 1)]
        chosen, rejected = (mean - torch.log(1 - torch.exp(mean)) for mean in means)
        odds.append(log_sigma(chosen - rejected))
    return chosen_nll(rows, args) - args.beta * torch.stack(odds).mean()


def judge_cpo(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    losses = []
    for row in rows:
        rewards = []
        for number in (0, 1):
            logps = row.logprobs(number)
            reward = logps.mean() if args.loss_type in ("ipo", "simpo") else logps.sum()
            rewards.append((1 - torch.exp(reward) ** -args.alpha) / args.alpha if args.alpha else reward)
        ahead, flipped = rewards[0] - rewards[1], args.label_smoothing
        if args.loss_type == "hinge":
            losses.append((1 - args.beta * ahead).clamp(min=0))
        elif args.loss_type == "ipo":
            losses.append((ahead - 0.5 / args.beta) ** 2)
        else:
            logits = args.beta * (ahead - (args.simpo_gamma / args.beta if args.loss_type == "simpo" else 0))
            losses.append(-(1 - flipped) * log_sigma(logits) - flipped * log_sigma(-logits))
    return torch.stack(losses).mean() + args.cpo_alpha * chosen_nll(rows, args)


def judge_kto(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    moved = torch.zeros(())
    if args.loss_type == "kto":
        ratios = [row.logprobs(1).sum() - row.reference_logprobs(1).sum() for row in rows]
        moved = torch.stack(ratios).mean().clamp(min=0).detach()
    losses = []
    for row in rows:
        ratio = row.logprobs().sum() - row.reference_logprobs().sum() - moved
        is_good = row.row.row_values["desirable"] > 0
        weight = args.desirable_weight if is_good else args.undesirable_weight
        losses.append(weight * sigma(args.beta * (-ratio if is_good else ratio)))
    return torch.stack(losses).mean()


def judge_reward(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    losses = []
    for row in rows:
        chosen, rejected = (row.logits[number][0] for number in (0, 1))
        loss = -log_sigma(chosen - rejected - row.row.row_values["margin"])
        losses.append(loss + args.center_rewards_coefficient * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


def _dpo_args(name: str) -> dict[str, Any]:
    return {"beta": 0.3} | ({"label_smoothing": 0.1} if name in ("exo_pair", "robust") else {})


PREFERENCE_CASES = [
    *(LossCase("dpo", name, judge_of(formula), _dpo_args(name), pair_rows) for name, formula in FORMULAS.items()),
    LossCase("dpo", "sft", chosen_nll, {}, pair_rows),
    LossCase("dpo", "sigmoid", judge_of(FORMULAS["sigmoid"]), {"ld_alpha": 0.4}, pair_rows, "ld"),
    *(LossCase("cpo", kind, judge_cpo, {"beta": 0.3}, pair_rows) for kind in ("sigmoid", "hinge", "ipo")),
    LossCase("cpo", "simpo", judge_cpo, {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0}, pair_rows),
    LossCase("cpo", "sigmoid", judge_cpo, {"label_smoothing": 0.1, "alpha": -0.1}, pair_rows, "alphapo"),
    LossCase("orpo", "odds_ratio", judge_orpo, {"beta": 0.3}, pair_rows),
    LossCase("kto", "kto", judge_kto, {"beta": 0.3, "undesirable_weight": 1.5}, mismatched_rows),
    LossCase("kto", "apo_zero_unpaired", judge_kto, {"beta": 0.3, "desirable_weight": 0.5}, single_rows),
    LossCase("reward", "bradley_terry", judge_reward, {"center_rewards_coefficient": 0.1}, scored_rows),
]
"""Cases that `test_objectives.py` walks."""
