"""The losses of the Tinker API: sums over targets, as its documentation defines them, with its thresholds.

The documentation names no default for the thresholds of `gspo` (here as for `ppo`) and for `beta` of `dro` (here as in
its example). Per-token thresholds may come as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from peft_mux.errors import ConfigError, DataError, closest, is_real, shown
from peft_mux.serve.wire import Datum

_RL = ("logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")
_RATIO_MASK = "sequence_ratio_mask"
Columns = Mapping[str, torch.Tensor]


def _cross_entropy(logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping) -> torch.Tensor:
    return -(logprobs * columns["weights"]).sum()


def _importance_sampling(
    logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping
) -> torch.Tensor:
    return -((logprobs - columns["logprobs"]).exp() * columns["advantages"]).sum()


def _clipped(ratio: torch.Tensor, columns: Columns, config: Mapping) -> torch.Tensor:
    low, high = (columns.get(name, torch.full_like(ratio, config[name])) for name in _CLIP)
    return ratio.clamp(low, high)


def _ppo(logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping) -> torch.Tensor:
    ratio, advantages = (logprobs - columns["logprobs"]).exp(), columns["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, columns, config) * advantages).sum()


def _cispo(logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping) -> torch.Tensor:
    ratio = (logprobs.detach() - columns["logprobs"]).exp()
    return -(_clipped(ratio, columns, config) * logprobs * columns["advantages"]).sum()


def _dro(logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping) -> torch.Tensor:
    penalty = 0.5 * config["beta"] * (logprobs - columns["logprobs"]) ** 2
    return -(logprobs * columns["advantages"] - penalty).sum()


def _gspo(logprobs: torch.Tensor, columns: Columns, counts: Sequence[int], config: Mapping) -> torch.Tensor:
    advantages = columns["advantages"]
    difference, marked = logprobs.detach() - columns["logprobs"], columns[_RATIO_MASK] != 0
    # Of each sequence the mean over its marked tokens; a sequence without them has no advantage either.
    rows = zip(difference.split(list(counts)), marked.split(list(counts)), strict=True)
    means = [torch.where(is_marked, row, 0.0).sum() / is_marked.sum().clamp(min=1) for row, is_marked in rows]
    spread = torch.stack(means).repeat_interleave(torch.tensor(counts, device=logprobs.device))
    ratio = (spread + logprobs - logprobs.detach()).exp()
    return -torch.minimum(ratio * advantages, _clipped(ratio, columns, config) * advantages).sum()


_PPO_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: dict[str, tuple[Callable[..., torch.Tensor], tuple[str, ...], tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, (), ("weights",), {}),
    "importance_sampling": (_importance_sampling, _RL, (), {}),
    "ppo": (_ppo, _RL, _CLIP, _PPO_CLIP),
    "cispo": (_cispo, _RL, _CLIP, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": (_dro, _RL, (), {"beta": 0.05}),
    "gspo": (_gspo, _RL, (*_CLIP, _RATIO_MASK), _PPO_CLIP),
}
"""Of each loss its function, the inputs that it needs, those that it may have, and its settings with their defaults."""
_INSTEAD = {
    "stable_reinforce": "Its formula is not published. Use importance_sampling.",
    "custom": "Losses are not uploaded. Use forward_backward_custom with a function, which runs in the client.",
}


def loss_of(name: str, config: Mapping[str, Any]) -> Callable[[Any], torch.Tensor]:
    """Return a loss as a function of a call's outputs.

    Raises:
        ConfigError: naming the loss or the setting that is not served, and what to use instead.
    """
    if name not in LOSSES:
        fix = _INSTEAD.get(name) or closest(name, LOSSES)
        raise ConfigError(f"loss_fn must be one of {', '.join(LOSSES)}, got {shown(name)}. {fix}".rstrip())
    function, _, _, defaults = LOSSES[name]
    for key, value in config.items():
        if key not in defaults:
            allowed = f"one of {', '.join(defaults)}" if defaults else "left out with this loss"
            raise ConfigError(f"loss_fn_config.{key} must be {allowed}, got {shown(value)}.")
        if not is_real(value) or value < 0:
            raise ConfigError(f"loss_fn_config.{key} must be a finite number of at least 0, got {shown(value)}.")
    settings = {**defaults, **config}
    if settings.get(_CLIP[0], 0.0) > settings.get(_CLIP[1], 0.0):
        raise ConfigError(
            f"loss_fn_config.{_CLIP[0]} must be at most {_CLIP[1]} ({settings[_CLIP[1]]}), got {settings[_CLIP[0]]}."
        )

    def loss(outputs: Any) -> torch.Tensor:
        logprobs = outputs.logprobs_M if outputs.word_logprobs_MK is None else outputs.word_logprobs_MK
        return function(logprobs, outputs.columns, outputs.sequence_counts, settings)

    return loss


def example_of(datum: Datum, loss: str, where: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Return the tokens, targets and columns of a row, as a call takes them.

    Args:
        datum: the row.
        loss: the name of its loss, one of `LOSSES`.
        where: path of the row for messages, such as `data[3]`.

    Raises:
        DataError: naming the input that is missing, unknown, of another length, or not finite.
    """
    _, needed, optional, _ = LOSSES[loss]
    inputs, known = dict(datum.inputs), ("target_tokens", *needed, *optional)
    for name in known[: 1 + len(needed)]:
        if name not in inputs:
            raise DataError(
                f"{where}.loss_fn_inputs must have {name} for {loss}, got {', '.join(inputs) or 'nothing'}."
            )
    targets = inputs.pop("target_tokens")
    at = f"{where}.loss_fn_inputs.target_tokens"
    if targets.dtype.kind != "i":
        raise DataError(f"{at} must be of integers, got {targets.dtype}.")
    length = len(datum.tokens)
    if length == 0:
        raise DataError(f"{where}.model_input must have at least one token, got none.")
    shapes = f"[{length}] or [{length}, K]" if loss == "cross_entropy" else f"[{length}]"
    if len(targets) != length or targets.ndim > (2 if loss == "cross_entropy" else 1) or targets.size == 0:
        raise DataError(
            f"{at} must have shape {shapes}, as model_input has {length} tokens, got {list(targets.shape)}."
        )
    columns = {}
    for name, values in inputs.items():
        at = f"{where}.loss_fn_inputs.{name}"
        if name not in known:
            raise DataError(f"{at} must be left out with {loss}, which reads {', '.join(known)}.")
        if values.shape != targets.shape:
            raise DataError(
                f"{at} must have the shape of target_tokens, {list(targets.shape)}, got {list(values.shape)}."
            )
        columns[name] = values.astype(np.float32)
        if not (finite := np.isfinite(columns[name])).all():
            place = int(np.flatnonzero(~finite.reshape(-1))[0])
            raise DataError(f"{at} must be finite, got {values.reshape(-1)[place]} at {place}.")
    if loss == "cross_entropy" and "weights" not in columns:
        columns["weights"] = np.ones(targets.shape, np.float32)
    if loss == "gspo":
        # The prompt has no advantage and no log-probabilities of a sampler, so it must not count.
        columns.setdefault(_RATIO_MASK, (columns["advantages"] != 0).astype(np.float32))
        if (columns["advantages"] != 0).any() and not columns[_RATIO_MASK].any():
            raise DataError(f"{where}.loss_fn_inputs.{_RATIO_MASK} must mark at least one token, got only zeros.")
    return datum.tokens, targets, columns
