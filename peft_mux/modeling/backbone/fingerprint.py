"""A digest of the frozen weights, equal however they are laid out over processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.modeling.backbone.modules import frozen_parameters
from peft_mux.modeling.backbone.quantized import quantized_layers, scales

_SAMPLE_BYTES = 256


@torch.no_grad()
def weight_samples(backbone: Any) -> dict[str, str]:
    """Return what tells each frozen tensor from another: shape, type, and a digest of its first 256 bytes.

    Formats and scales of quantised layers take part. Task heads are left out, and so is what lies outside the base
    model. Of a backbone that is cut into stages, each process has the names of its own layers; taken before weights are
    sharded, as the first bytes of a shard are others.

    Args:
        backbone: the transformers model, with its weights.
    """
    samples = {}
    for name, parameter in frozen_parameters(backbone.base_model):
        form = f"{tuple(parameter.shape)} {parameter.dtype}"
        samples[name] = f"{form} {_digest(parameter)}"
    for name, layer, bits in quantized_layers(backbone.base_model):
        form, tensors = scales(layer, bits)
        samples[f"{name} format"] = f"{form} {' '.join(map(_digest, tensors))}"
    return samples


def fingerprint(kind: str, samples: Mapping[str, str]) -> str:
    """Return one digest for a whole backbone.

    It tells another model, another size, another dtype or other weights of the same model; a few changed values deep
    inside a tensor it does not see.

    Args:
        kind: name of the backbone's class.
        samples: what `weight_samples` returned for all of its weights.
    """
    digest = hashlib.sha256(kind.encode())
    for name in sorted(samples):
        digest.update(f"{name} {samples[name]}\n".encode())
    return digest.hexdigest()[:32]


def backbone_fingerprint(backbone: Any) -> str:
    """Return the digest of a backbone that lies whole in this process."""
    return fingerprint(type(backbone).__name__, weight_samples(backbone))


def _digest(tensor: torch.Tensor) -> str:
    # As bytes, since numpy has no bf16.
    first = tensor.flatten()[: _SAMPLE_BYTES // tensor.element_size()].contiguous().view(torch.uint8)
    return hashlib.sha256(first.cpu().numpy().tobytes()).hexdigest()[:16]
