"""A case for each variant of each loss of preferences, judged row by row.

What `test_against_trl.py` compares with TRL's code is taken from the package here: the functions of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence
from peft_mux.losses.preference import DPO_LOSSES, Pairs, dpo_losses, kto_losses, log_odds, reward_losses
from peft_mux.losses.preference_rows import with_mismatched
from peft_mux.modeling.objectives.objective import Objective
from tests.invariants import mux_lab as lab
from tests.modeling.objectives.cases import LossCase
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


def judge_dpo(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    """Return the mean loss of pairs by `dpo_losses`, which `test_against_trl.py` compares with TRL's."""
    sums = [
        torch.stack([(logprobs(row, number) * ld_weights(row, number, args.ld_alpha)).sum() for row in rows])
        for logprobs in (JudgedRow.logprobs, JudgedRow.reference_logprobs)
        for number in (0, 1)
    ]
    tokens = [torch.tensor([len(row.logprobs(number)) for row in rows]) for number in (0, 1)]
    nll = -torch.stack([row.logprobs(0).sum() for row in rows]) * len(rows) / tokens[0].sum()
    return dpo_losses(Pairs(*sums, *tokens, nll), args).mean()


def ld_weights(row: JudgedRow, number: int, alpha: float | None) -> torch.Tensor:
    lengths = [len(row.logprobs(one)) for one in (0, 1)]
    shared = lengths[number] if alpha is None else min(lengths)
    return torch.tensor([1.0 if place < shared else alpha for place in range(lengths[number])])


def chosen_nll(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    return -torch.cat([row.logprobs(0) for row in rows]).mean()


def judge_orpo(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    means = [
        torch.stack([row.logprobs(number)[row.column("is_answer", number) == 1].mean() for row in rows])
        for number in (0, 1)
    ]
    return chosen_nll(rows, args) - args.beta * F.logsigmoid(log_odds(*means)).mean()


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
            losses.append(-(1 - flipped) * F.logsigmoid(logits) - flipped * F.logsigmoid(-logits))
    return torch.stack(losses).mean() + args.cpo_alpha * chosen_nll(rows, args)


def judge_kto(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    moved = torch.zeros(())
    if args.loss_type == "kto":
        ratios = [row.logprobs(1).sum() - row.reference_logprobs(1).sum() for row in rows]
        moved = torch.stack(ratios).mean().clamp(min=0).detach()
    ratios = [row.logprobs().sum() - row.reference_logprobs().sum() for row in rows]
    is_good = torch.tensor([row.row.row_values["desirable"] > 0 for row in rows])
    return kto_losses(torch.stack(ratios), is_good, moved, args).mean()


def judge_reward(rows: Sequence[JudgedRow], args: Any) -> torch.Tensor:
    scores = [torch.stack([row.logits[number][0] for row in rows]) for number in (0, 1)]
    margins = torch.tensor([row.row.row_values["margin"] for row in rows])
    return reward_losses(*scores, margins, args).mean()


def _dpo_args(name: str) -> dict[str, Any]:
    return {"beta": 0.3} | ({"label_smoothing": 0.1} if name in ("exo_pair", "robust") else {})


PREFERENCE_CASES = [
    *(LossCase("dpo", name, judge_dpo, _dpo_args(name), pair_rows) for name in DPO_LOSSES),
    LossCase("dpo", "sigmoid", judge_dpo, {"ld_alpha": 0.4}, pair_rows, "ld"),
    *(LossCase("cpo", kind, judge_cpo, {"beta": 0.3}, pair_rows) for kind in ("sigmoid", "hinge", "ipo")),
    LossCase("cpo", "simpo", judge_cpo, {"beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0}, pair_rows),
    LossCase("cpo", "sigmoid", judge_cpo, {"label_smoothing": 0.1, "alpha": -0.1}, pair_rows, "alphapo"),
    LossCase("orpo", "odds_ratio", judge_orpo, {"beta": 0.3}, pair_rows),
    LossCase("kto", "kto", judge_kto, {"beta": 0.3, "undesirable_weight": 1.5}, mismatched_rows),
    LossCase("kto", "apo_zero_unpaired", judge_kto, {"beta": 0.3, "desirable_weight": 0.5}, single_rows),
    LossCase("reward", "bradley_terry", judge_reward, {"center_rewards_coefficient": 0.1}, scored_rows),
]
"""Cases that `test_objectives.py` walks."""
