"""Options of DPO: what TRL would refuse or pass over is refused here by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from peft_mux.errors import Fault, shown
from peft_mux.modeling.objectives.arguments import SEVERAL, LossArgs, above, between

DISABLE_DROPOUT = "the dropout of each task is that of its peft_config; set lora_dropout=0 there, as TRL would"
"""Why `disable_dropout` of TRL's configurations is no option here."""
_DIVERGING = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"sigmoid", "exo_pair", "robust"}


@dataclass(frozen=True, kw_only=True)
class DPOArgs(LossArgs):
    """Options of DPO, by their names in `trl.DPOConfig`.

    Attributes:
        beta: how strongly the reference holds the model; the regularisation `tau` of IPO.
        label_smoothing: share of labels that is taken to be wrong: cDPO for `sigmoid` (TRL passes it over there), below
            0.5 for `robust`, above 0 for `exo_pair`.
        loss_weights: weight of each loss where `loss_type` names several; by default 1.
        f_divergence_type: what holds the model near the reference, a key of `DIVERGENCES`.
        f_alpha_divergence_coef: the order of `alpha_divergence`.
        discopop_tau: temperature of the blend of `discopop`.
        ld_alpha: weight of tokens beyond the shorter answer's length (LD-DPO), from 0 to 1; `None` for 1. Reference
            log-probabilities that rows bring are taken as they are.
    """

    beta: float = above(0, 0.1)
    label_smoothing: float = between(0, 0.5, 0.0)
    loss_weights: tuple[float, ...] | None = None
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    discopop_tau: float = above(0, 0.05)
    ld_alpha: float | None = between(0, 1, None)

    refused: ClassVar[Mapping[str, str]] = {
        "use_weighting": "it needs the probabilities of all words at each token, which are never held; leave it out",
        "sync_ref_model": "the reference is the backbone without adapters, which stays as it is; leave it out",
        "disable_dropout": DISABLE_DROPOUT,
        "precompute_ref_log_probs": "rows may bring ref_chosen_logps and ref_rejected_logps; else they are computed",
        "reference_free": "TRL has taken it out, too; objective='orpo' trains without a reference",
        "rpo_alpha": 'TRL has taken it out, too; loss_type=["sigmoid", "sft"] with loss_weights=[1.0, alpha]',
        "truncation_mode": "rows keep their beginning, as with keep_start; leave it out",
    }

    @property
    def loss_types(self) -> tuple[str, ...]:
        """Names of the losses that are added up."""
        return tuple((self.loss_type or "sigmoid").split(SEVERAL))

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with options beside one another, also where no loss would read one."""
        chosen = set(self.loss_types)
        return [
            *self._smoothing_faults(chosen, where),
            *self._divergence_faults(chosen, where),
            *self._other_faults(chosen, where),
        ]

    def _smoothing_faults(self, chosen: set[str], where: str) -> list[Fault]:
        field, value = f"{where}.label_smoothing", self.label_smoothing
        if value == 0.5 and "robust" in chosen:
            return [Fault(field, "0.5 for the loss robust", "a number below 0.5", "At 0.5 labels tell nothing.")]
        if value == 0 and "exo_pair" in chosen:
            return [Fault(field, "0 for the loss exo_pair", "a number above 0", "Its paper recommends 1e-3.")]
        return [_unread(field, value, _SMOOTHED)] if value and not chosen & _SMOOTHED else []

    def _divergence_faults(self, chosen: set[str], where: str) -> list[Fault]:
        value = self.f_divergence_type
        if value != "reverse_kl" and not chosen <= _DIVERGING:
            got = f"{value!r} for {', '.join(sorted(chosen - _DIVERGING))}"
            allowed = f"reverse_kl, or the losses {', '.join(sorted(_DIVERGING))} alone"
            return [Fault(f"{where}.f_divergence_type", got, allowed)]
        if value != "alpha_divergence" and self.f_alpha_divergence_coef != DPOArgs().f_alpha_divergence_coef:
            got, allowed = shown(self.f_alpha_divergence_coef), "none unless f_divergence_type is 'alpha_divergence'"
            return [Fault(f"{where}.f_alpha_divergence_coef", got, allowed)]
        return []

    def _other_faults(self, chosen: set[str], where: str) -> list[Fault]:
        faults, weights = [], self.loss_weights
        if weights is not None and len(weights) != len(self.loss_types):
            allowed = f"a list of {len(self.loss_types)} numbers, one for each of loss_type"
            faults.append(Fault(f"{where}.loss_weights", shown(list(weights)), allowed))
        if self.discopop_tau != DPOArgs().discopop_tau and "discopop" not in chosen:
            faults.append(_unread(f"{where}.discopop_tau", self.discopop_tau, {"discopop"}))
        if chosen == {"sft"} and self.ld_alpha is not None:
            faults.append(
                Fault(f"{where}.ld_alpha", f"{self.ld_alpha}, which sft does not read", "none with sft alone")
            )
        return faults


REFUSED_LOSSES: Mapping[str, str] = dict.fromkeys(
    ("aot", "aot_unpaired"),
    'it sorts the answers of a whole batch, which micro-batches and processes share out; the nearest is "sigmoid"',
)
"""Losses of `DPOTrainer` that are not trained towards, and why."""


def _unread(field: str, value: object, readers: set[str]) -> Fault:
    return Fault(field, f"{shown(value)}, which no loss here reads", f"none, or one of {', '.join(sorted(readers))}")
