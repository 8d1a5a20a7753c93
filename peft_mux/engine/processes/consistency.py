"""Consistency of processes: what must be the same on all of them, compared when a run begins or tasks change."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.engine.processes.processes import Processes
from peft_mux.errors import Fault, raise_faults

_MAX_CHARACTERS = 120
_NONE = "nothing"


def require_consistent(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Compare facts over all processes, which all call this.

    Args:
        processes: the processes of the run, connected.
        facts: plain values by name, nested in mappings as deep as one likes; faults name them with dots.

    Raises:
        ConfigError: on every process, naming each rank and fact that differs from what most processes have.
    """
    if processes.is_alone:
        return
    given = [_flatten(json.loads(one)) for one in processes.gather(json.dumps(facts, default=str, sort_keys=True))]
    faults = [
        Fault(
            f"rank {rank}: {name}",
            _shown(own[name]) if name in own else _NONE,
            f"{_shown(usual)}, as on the other processes",
            "Start every process with the same script, arguments, data and packages.",
        )
        for name in dict.fromkeys(name for own in given for name in own)
        # Most processes are taken to be right, so that the error names the odd one out, and not all the others.
        for usual in [_usual([own.get(name, _NONE) for own in given])]
        for rank, own in enumerate(given)
        if own.get(name, _NONE) != usual
    ]
    raise_faults(faults)


@torch.no_grad()
def tensors_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of the bits, shapes and dtypes of tensors.

    Args:
        tensors: the tensors by name; their order does not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        own = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(own.shape)} {own.dtype}".encode())
        # As raw bytes, since numpy has no bfloat16, and since -0.0 and 0.0 are other weights.
        digest.update(own.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(item)
    return flat


def _usual(values: list[str]) -> str:
    """Return the value that most processes have; of several such values that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]


def _shown(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."
