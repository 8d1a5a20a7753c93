"""The losses of preferences on random numbers, each against TRL's own code for it, gradients included."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from peft_mux.losses.preference import (
    DPO_LOSSES,
    DPOArgs,
    KTOArgs,
    Pairs,
    RewardArgs,
    dpo_losses,
    kto_losses,
    log_odds,
    reward_losses,
)

trl = pytest.importorskip("trl", reason="trl is not installed")

ROWS, LENGTH = 5, 9


class Processes:
    """What TRL's losses ask of accelerate, in one process."""

    device = torch.device("cpu")

    @staticmethod
    def gather(value: Any) -> Any:
        return value

    gather_for_metrics = gather

    @staticmethod
    def unwrap_model(model: Any) -> Any:
        return model


def lengths_of(seed: int, count: int) -> torch.Tensor:
    return torch.randint(2, LENGTH, (count,), generator=torch.Generator().manual_seed(seed))


def token_logps(seed: int, lengths: torch.Tensor) -> torch.Tensor:
    """Return `[S, LENGTH - 1]` log-probabilities of the tokens of answers that begin at token 1."""
    generator = torch.Generator().manual_seed(seed)
    logps = -3 * torch.rand(len(lengths), LENGTH - 1, generator=generator) - 0.01
    return logps * (torch.arange(LENGTH - 1) < lengths[:, None])


def masks_of(lengths: torch.Tensor) -> torch.Tensor:
    places = torch.arange(LENGTH)
    return ((places > 0) & (places <= lengths[:, None])).long()


def stand_in(**fields: Any) -> SimpleNamespace:
    """Return what TRL's losses read of a trainer, with fields of its own."""
    return SimpleNamespace(
        accelerator=Processes,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        **fields,
    )


def through(model: Any, logps: torch.Tensor) -> SimpleNamespace:
    """Return what TRL's fused head returns."""
    zeros = torch.zeros_like(logps)
    return SimpleNamespace(log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool())


# ------------------------------------------------------------------- DPO


def trl_dpo(loss_types: list[str], args: DPOArgs, logps: torch.Tensor, references: torch.Tensor, lengths: torch.Tensor):
    reference_logps = references
    if args.ld_alpha is not None:
        shared = torch.minimum(*lengths.chunk(2)).repeat(2)
        places = torch.arange(LENGTH - 1)
        reference_logps = references * torch.where(places < shared[:, None], 1.0, args.ld_alpha)
    chosen, rejected = reference_logps.sum(dim=1).chunk(2)
    trainer = stand_in(
        loss_types=loss_types,
        loss_weights=args.loss_weights or [1.0] * len(loss_types),
        use_weighting=False,
        args=args,
        **{name: getattr(args, name) for name in ("beta", "ld_alpha", "label_smoothing", "f_divergence_type")},
        f_alpha_divergence_coef=args.f_alpha_divergence_coef,
    )
    inputs = {
        "input_ids": torch.zeros(2 * ROWS, LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(2 * ROWS, LENGTH, dtype=torch.int64),
        "completion_mask": masks_of(lengths),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }

    def model(**kwargs: Any) -> SimpleNamespace:
        return through(None, logps)

    return trl.DPOTrainer._compute_loss(trainer, model, inputs, False), trainer._metrics["train"]


def our_dpo(args: DPOArgs, logps: torch.Tensor, references: torch.Tensor, lengths: torch.Tensor):
    weights = torch.ones_like(logps)
    if args.ld_alpha is not None:
        shared = torch.minimum(*lengths.chunk(2)).repeat(2)
        weights = torch.where(torch.arange(LENGTH - 1) < shared[:, None], 1.0, args.ld_alpha).to(logps)
    chosen_tokens, rejected_tokens = lengths.chunk(2)
    pairs = Pairs(
        *(logps * weights).sum(dim=1).chunk(2),
        *(references * weights).sum(dim=1).chunk(2),
        chosen_tokens,
        rejected_tokens,
        -logps.sum(dim=1).chunk(2)[0] * ROWS / chosen_tokens.sum(),
    )
    return dpo_losses(pairs, args).mean()


VARIANTS: list[tuple[list[str], dict[str, Any]]] = [
    *(([name], {"label_smoothing": 0.1} if name in ("robust", "exo_pair") else {}) for name in DPO_LOSSES),
    (["robust"], {"label_smoothing": 0.4, "beta": 0.7}),
    (["discopop"], {"discopop_tau": 0.5, "beta": 2.0}),
    (["sigmoid", "sft"], {"loss_weights": [0.8, 0.3]}),
    (["sigmoid", "bco_pair", "sft"], {"loss_weights": (0.8, 0.2, 1.0)}),
    *(([name], {"ld_alpha": alpha}) for name in ("sigmoid", "ipo", "sft") for alpha in (0.0, 0.4, 1.0)),
    *(
        ([name], {"f_divergence_type": kind, "f_alpha_divergence_coef": 0.3})
        for name in ("sigmoid", "hinge", "ipo", "sigmoid_norm", "discopop")
        for kind in ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
    ),
    (["sigmoid"], {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}),
]


@pytest.mark.parametrize(("loss_types", "options"), VARIANTS, ids=str)
def test_losses_of_pairs_are_those_of_the_dpo_trainer(loss_types: list[str], options: Mapping[str, Any]) -> None:
    args = DPOArgs(loss_type="+".join(loss_types), **options)
    lengths = lengths_of(0, 2 * ROWS)
    references = token_logps(1, lengths)
    ours, theirs = (token_logps(2, lengths).requires_grad_() for _ in range(2))
    is_real = torch.arange(LENGTH - 1) < lengths[:, None]
    loss = our_dpo(args, ours * is_real, references, lengths)
    expected, _ = trl_dpo(loss_types, args, theirs * is_real, references, lengths)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    (gradient,) = torch.autograd.grad(loss, ours)
    (wanted,) = torch.autograd.grad(expected, theirs)
    assert wanted.abs().max() > 0
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


def test_every_loss_of_the_dpo_trainer_is_trained_towards_or_refused() -> None:
    from peft_mux.losses.preference import REFUSED_LOSSES

    text = " ".join((trl.DPOConfig.__doc__ or "").split("Possible values are: ")[1].split("If multiple")[0].split())
    listed = set(text.replace("`", "").replace("'", "").rstrip(". ").split(", "))
    assert listed == set(DPO_LOSSES) | set(REFUSED_LOSSES)


def test_smoothed_labels_are_those_of_the_wrong_share() -> None:
    lengths = lengths_of(0, 2 * ROWS)
    logps, references = token_logps(2, lengths), token_logps(1, lengths)
    right = our_dpo(DPOArgs(), logps, references, lengths)
    swapped = [torch.cat(part.chunk(2)[::-1]) for part in (logps, references, lengths)]
    wrong = our_dpo(DPOArgs(), *swapped)
    smoothed = our_dpo(DPOArgs(label_smoothing=0.2), logps, references, lengths)
    torch.testing.assert_close(smoothed, 0.8 * right + 0.2 * wrong, rtol=1e-5, atol=0)


# ------------------------------------------------------------------- KTO


@pytest.mark.parametrize("labels", [[True, False, True, True, False], [False] * 5], ids=str)
@pytest.mark.parametrize("loss_type", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("moved", [1.5, -1.5], ids=["moved away", "moved nearer, which counts as not at all"])
def test_losses_of_single_answers_are_those_of_the_kto_trainer(
    labels: list[bool], loss_type: str, moved: float
) -> None:
    args = KTOArgs(beta=0.3, desirable_weight=1.3, undesirable_weight=0.7)
    lengths = lengths_of(0, ROWS)
    references = token_logps(1, lengths)
    ours, theirs = (token_logps(2, lengths).requires_grad_() for _ in range(2))
    others = torch.randn(ROWS, generator=torch.Generator().manual_seed(3))
    trainer = stand_in(
        calculate_KL=loss_type == "kto",
        loss_type=loss_type,
        beta=args.beta,
        desirable_weight=args.desirable_weight,
        undesirable_weight=args.undesirable_weight,
        _compute_kl_logps=lambda model, batch: others + moved,
    )
    inputs = {
        "input_ids": torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.int64),
        "completion_mask": masks_of(lengths),
        "label": torch.tensor(labels),
        "ref_logps": references.sum(dim=1),
        "ref_KL_logps": others,
    }
    expected = trl.KTOTrainer._compute_loss(trainer, lambda **kwargs: through(None, theirs), inputs, False)
    kl = max(moved, 0.0) if loss_type == "kto" else 0.0
    assert trainer._metrics["train"]["kl"] == [pytest.approx(kl)]
    logratios = (ours - references).sum(dim=1)
    loss = kto_losses(logratios, torch.tensor(labels), kl, args).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*(torch.autograd.grad(*pair)[0] for pair in ((loss, ours), (expected, theirs))))


# ------------------------------------------------------------------ ORPO


def test_losses_of_odds_are_those_of_the_orpo_trainer() -> None:
    from trl.experimental.orpo import ORPOTrainer

    # From answers that are almost certain to such as are out of the question.
    chosen, rejected = torch.tensor([-1e-4, -0.2, -0.7, -2.0, -30.0]), torch.tensor([-0.5, -0.6931, -9.0, -0.1, -29.0])
    leaves = [[part.clone().requires_grad_() for part in (chosen, rejected)] for _ in range(2)]
    trainer = SimpleNamespace(beta=0.4, accelerator=Processes)
    expected, _, _, ratio, odds = ORPOTrainer.odds_ratio_loss(trainer, *leaves[0])
    ours = log_odds(*leaves[1])
    losses = -0.4 * F.logsigmoid(ours)
    torch.testing.assert_close(losses, -expected)
    torch.testing.assert_close(ours.mean(), odds)
    torch.testing.assert_close(losses.mean() / -0.4, ratio)
    gradients = [torch.autograd.grad(loss.sum(), leaf) for loss, leaf in ((-expected, leaves[0]), (losses, leaves[1]))]
    torch.testing.assert_close(gradients[1], gradients[0])


# ---------------------------------------------------------------- rewards


@pytest.mark.parametrize("coefficient", [None, 0.01])
@pytest.mark.parametrize("has_margin", [True, False])
def test_losses_of_scores_are_those_of_the_reward_trainer(coefficient: float | None, has_margin: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    scores, margins = torch.randn(2 * ROWS, generator=generator), torch.rand(ROWS, generator=generator)
    ours, theirs = (scores.clone().requires_grad_() for _ in range(2))
    trainer = stand_in(args=SimpleNamespace(center_rewards_coefficient=coefficient))
    inputs: dict[str, Any] = {"attention_mask": torch.ones(2 * ROWS, LENGTH)}
    if has_margin:
        inputs["margin"] = margins
    expected = trl.RewardTrainer.compute_loss(
        trainer, lambda **kwargs: SimpleNamespace(logits=theirs[:, None]), inputs, False
    )
    args = RewardArgs(center_rewards_coefficient=coefficient)
    loss = reward_losses(*ours.chunk(2), margins if has_margin else None, args).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(*pair)[0] for pair in ((loss, ours), (expected, theirs))))
