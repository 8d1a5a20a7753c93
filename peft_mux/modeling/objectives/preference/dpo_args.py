"""Which options of DPO go together: what TRL would refuse or pass over is refused here by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peft_mux.errors import Fault, closest, shown
from peft_mux.modeling.objectives.preference.dpo_losses import DPO_LOSSES, DPOArgs
from peft_mux.modeling.objectives.preference.pairs import DIVERGENCES

_SORTS = 'it sorts the answers of a whole batch, which micro-batches and processes share out; the nearest is "sigmoid"'
REFUSED_LOSSES = {"aot": _SORTS, "aot_unpaired": _SORTS}
"""Losses of `DPOTrainer` that are not trained towards, and why."""
REFUSED_ARGS = {
    "use_weighting": "it needs the probabilities of all words at each token, which are never held; False",
    "sync_ref_model": "the reference is the backbone without adapters, which stays as it is; False",
    "disable_dropout": "the dropout of each task is that of its peft_config; set lora_dropout=0 there",
    "precompute_ref_log_probs": "they are kept for each row once they are computed, whatever is set; leave it out",
    "reference_free": "TRL has taken it out, too; objective='orpo' trains without a reference",
    "rpo_alpha": 'TRL has taken it out, too; loss_type=["sigmoid", "sft"] with loss_weights=[1.0, alpha]',
}
"""Options of `DPOConfig` that are not honoured, and what to do instead."""
_DIVERGING = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
_SMOOTHED = {"sigmoid", "exo_pair", "robust"}


def loss_type_faults(loss_types: Sequence[str], where: str) -> list[Fault]:
    """Return what is wrong with the names of losses.

    Args:
        loss_types: the names, as a task gives them.
        where: the task, for messages: `tasks.sql`.
    """
    faults, field = [], f"{where}.loss_type"
    known = ", ".join(DPO_LOSSES)
    if not loss_types:
        faults.append(Fault(field, "none", known))
    for name in loss_types:
        if name in REFUSED_LOSSES:
            faults.append(Fault(field, shown(name), known, f"{name} is not supported: {REFUSED_LOSSES[name]}."))
        elif not isinstance(name, str) or name not in DPO_LOSSES:
            faults.append(Fault(field, shown(name), known, closest(name, DPO_LOSSES)))
    if len(set(map(str, loss_types))) < len(loss_types):
        faults.append(Fault(field, shown(list(loss_types)), "each loss once", "Weigh it by loss_weights."))
    return faults


def dpo_faults(args: DPOArgs, loss_types: Sequence[str], where: str) -> list[Fault]:
    """Return what is wrong with options, also where none of the losses would read them.

    Args:
        args: the options.
        loss_types: keys of `DPO_LOSSES`.
        where: the task, for messages: `tasks.sql`.
    """
    where, chosen = f"{where}.objective_args", set(loss_types)
    return [
        *_number_faults(args, where),
        *_smoothing_faults(args, chosen, where),
        *_divergence_faults(args, chosen, where),
        *_weight_faults(args, loss_types, where),
        *_unread_faults(args, chosen, where),
    ]


def number_fault(where: str, value: object, low: float, high: float = math.inf, *, low_allowed: bool) -> list[Fault]:
    """Return a fault where a value is no number between two bounds; the upper one is always allowed.

    Args:
        where: dotted path of the field.
        value: what stands there.
        low: the lower bound.
        high: the upper bound.
        low_allowed: whether the lower bound itself may stand there.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value <= high:
        is_above = low <= value if low_allowed else low < value
        if is_above:
            return []
    least = "" if low == -math.inf else f" {'of at least' if low_allowed else 'above'} {low:g}"
    most = "" if high == math.inf else f" and at most {high:g}"
    return [Fault(where, shown(value), f"a finite number{least}{most}")]


def _number_faults(args: DPOArgs, where: str) -> list[Fault]:
    faults = number_fault(f"{where}.beta", args.beta, 0, low_allowed=False)
    faults += number_fault(f"{where}.discopop_tau", args.discopop_tau, 0, low_allowed=False)
    faults += number_fault(
        f"{where}.f_alpha_divergence_coef", args.f_alpha_divergence_coef, -math.inf, low_allowed=True
    )
    if args.ld_alpha is not None:
        faults += number_fault(f"{where}.ld_alpha", args.ld_alpha, 0, 1, low_allowed=True)
    return faults


def _smoothing_faults(args: DPOArgs, chosen: set[str], where: str) -> list[Fault]:
    field, value = f"{where}.label_smoothing", args.label_smoothing
    faults = number_fault(field, value, 0, 0.5, low_allowed=True)
    if faults:
        return faults
    if value == 0.5 and "robust" in chosen:
        faults.append(Fault(field, "0.5 for the loss robust", "a number below 0.5", "At 0.5 labels tell nothing."))
    if value == 0 and "exo_pair" in chosen:
        faults.append(Fault(field, "0 for the loss exo_pair", "a number above 0", "Its paper recommends 1e-3."))
    if value and not chosen & _SMOOTHED:
        faults.append(_unread(field, value, _SMOOTHED))
    return faults


def _divergence_faults(args: DPOArgs, chosen: set[str], where: str) -> list[Fault]:
    field, value = f"{where}.f_divergence_type", args.f_divergence_type
    if value not in DIVERGENCES:
        return [Fault(field, shown(value), ", ".join(DIVERGENCES), closest(value, DIVERGENCES))]
    if value != "reverse_kl" and not chosen <= _DIVERGING:
        allowed = f"reverse_kl, or the losses {', '.join(sorted(_DIVERGING))} alone"
        return [Fault(field, f"{value!r} for {', '.join(sorted(chosen - _DIVERGING))}", allowed)]
    if value != "alpha_divergence" and args.f_alpha_divergence_coef != DPOArgs().f_alpha_divergence_coef:
        got = shown(args.f_alpha_divergence_coef)
        return [Fault(f"{where}.f_alpha_divergence_coef", got, "none unless f_divergence_type is 'alpha_divergence'")]
    return []


def _weight_faults(args: DPOArgs, loss_types: Sequence[str], where: str) -> list[Fault]:
    field, weights = f"{where}.loss_weights", args.loss_weights
    if weights is None:
        return []
    if not isinstance(weights, (list, tuple)) or len(weights) != len(loss_types):
        return [Fault(field, shown(weights), f"a list of {len(loss_types)} numbers, one for each of loss_type")]
    return [fault for weight in weights for fault in number_fault(field, weight, -math.inf, low_allowed=True)]


def _unread_faults(args: DPOArgs, chosen: set[str], where: str) -> list[Fault]:
    faults, defaults = [], DPOArgs()
    if args.discopop_tau != defaults.discopop_tau and "discopop" not in chosen:
        faults.append(_unread(f"{where}.discopop_tau", args.discopop_tau, {"discopop"}))
    if chosen == {"sft"} and args.ld_alpha is not None:
        faults.append(_unread(f"{where}.ld_alpha", args.ld_alpha, set(DPO_LOSSES) - {"sft"}))
    return faults


def _unread(field: str, value: object, readers: set[str]) -> Fault:
    return Fault(field, f"{shown(value)}, which no loss here reads", f"none, or one of {', '.join(sorted(readers))}")
