"""A digest of each frozen weight of a backbone, the same however weights are divided among processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.modeling.backbone.modules import frozen_parameters, head_kind_of
from peft_mux.modeling.backbone.quantized import quantized_layers, scales

_BLOCK_WORDS = 1024


@torch.no_grad()
def weight_digests(backbone: Any) -> dict[str, str]:
    """Return the shape, the type and a digest of all bytes of each frozen tensor, by name.

    Formats and scales of quantised layers take part. Task heads are left out. In a backbone that is cut into stages,
    each process has the names of its own layers. To be called before weights are sharded or cut, as parts have other
    digests.
    """
    head, digests = head_kind_of(backbone), {}
    # A stage with the output head alone has it under the name of the embedding that it is tied to.
    tied = getattr(backbone, "all_tied_weights_keys", None) or {}
    for name, parameter in frozen_parameters(backbone):
        if name.partition(".")[0] not in head.trained_modules:
            key = name if tied.get(name, name) in digests else tied.get(name, name)
            digests[key] = f"{tuple(parameter.shape)} {parameter.dtype} {_digest(parameter)}"
    for name, layer, bits in quantized_layers(backbone):
        form, tensors = scales(layer, bits)
        digests[f"{name} format"] = f"{form} {' '.join(map(_digest, tensors))}"
    return digests


def fingerprint(kind: str, digests: Mapping[str, str]) -> str:
    """Return one digest for a whole backbone.

    It differs for another model, another size, another dtype or other weights of the same model, even if only one value
    is different.

    Args:
        kind: name of the backbone's class.
        digests: what `weight_digests` returned for all of its weights.
    """
    digest = hashlib.sha256(kind.encode())
    for name in sorted(digests):
        digest.update(f"{name} {digests[name]}\n".encode())
    return digest.hexdigest()[:32]


def _digest(tensor: torch.Tensor) -> str:
    """Return a digest of the bytes of a tensor, computed on its device.

    It hashes sums over blocks of 8 KB and over their columns; SHA-256 of all bytes would take several times longer.
    A change of up to three words of 8 bytes, or of one block, always changes a sum. Only changes of four words or more
    that cancel in their block and in their column are not noticed.
    """
    octets = tensor.detach().contiguous().flatten().view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    end = octets.numel() // (8 * _BLOCK_WORDS) * 8 * _BLOCK_WORDS
    blocks = octets[:end].view(torch.int64).view(-1, _BLOCK_WORDS)
    digest = hashlib.sha256()
    for part in (blocks.sum(0), blocks.sum(1), octets[end:]):
        digest.update(part.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
