"""Bytes that a pass keeps for its backward on the pretended device, and what the planner counts without a device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.kernels.availability import runs_kernels
from peft_mux.modeling.backbone.liger import fuse_layers
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.backbone.recompute import recomputing
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token
from tests.pretended_cuda import backbones
from tests.pretended_cuda.device import PretendedCuda
from tests.pretended_cuda.steps import DTYPES, forget_the_last_card

LENGTHS = (384, 256, 512, 128, 320, 448)


def kept(architecture: str, *, dtype: str, bf16: bool, liger: bool = False, selective: bool = False) -> dict[str, Any]:
    """Return bytes kept a token, on the device, of its last layer alone, and as counted for plans.

    Args:
        architecture: name in `backbones.REAL_WIDTHS`.
        dtype: of the backbone's weights.
        bf16: whether the pass runs under bf16 autocast.
        liger: whether layers compute by Liger's kernels.
        selective: whether inputs of linear layers are recomputed.
    """
    described = _model(architecture, DTYPES[dtype], "meta")
    autocast = torch.bfloat16 if bf16 else None
    counted = count_activation_bytes_per_token(
        described,
        LENGTHS,
        autocast=autocast,
        device_type="cuda",
        liger={} if liger else None,
        selective=selective,
    )
    forget_the_last_card()
    device = PretendedCuda()
    with device.present():
        model = _model(architecture, DTYPES[dtype], "cuda")
        precision = torch.autocast("cuda", dtype=torch.bfloat16) if bf16 else nullcontext()
        assert runs_kernels(model.device)
        if liger:
            with precision, mock.patch.object(device, "number", 0.0):  # by how much fused layers differ
                assert not fuse_layers(model)
        with precision, recomputing(model.backbone, wanted=selective):
            all_bytes, layer_bytes = _kept_on_device(model)
    num_tokens = sum(LENGTHS)
    return {"on device": all_bytes / num_tokens, "of a layer": layer_bytes / num_tokens, "counted": counted}


def _model(architecture: str, dtype: torch.dtype, device: str) -> MultiTaskPeftModel:
    backbone: PreTrainedModel = backbones.make(architecture, dtype, device)
    names = {name: config for name, config in backbones.adapters(architecture).items() if not config.lora_dropout}
    return MultiTaskPeftModel(backbone, names, verify=False).train()  # type: ignore[arg-type]


def _kept_on_device(model: MultiTaskPeftModel) -> tuple[int, int]:
    ids = np.ones(max(LENGTHS), dtype=np.int64)
    batches = [
        TaskBatch(name, 0, 0, tuple(TokenSequence(ids[:n], ids[:n], row) for row, n in enumerate(LENGTHS[index::2])))
        for index, name in enumerate(model.tasks)
    ]
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=sum(LENGTHS))
    moved = batch.to("cuda")
    model.prepare_pass(batch.task_names)
    slabs = [model.registry.slab_of(name) for name in model.tasks]
    for slab in slabs:
        slab.refresh_copies()
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage
        return tensor

    def kept_bytes() -> int:
        return sum(storage.nbytes() for storage in storages.values())

    ends: list[int] = []  # of layers: bytes kept until then
    for layer in find_layers(model.backbone).layers:  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *given: ends.append(kept_bytes()))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(moved)
    return kept_bytes(), ends[-1] - ends[-2]
