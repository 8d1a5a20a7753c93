"""Bytes that elementwise operators and Liger's kernels read and write in a pass, on the pretended device."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
from peft import LoraConfig
from torch.utils import _pytree as pytree
from triton.runtime.jit import JITFunction

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.kernels import availability
from peft_mux.modeling.backbone import liger
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.pretended_cuda import backbones
from tests.pretended_cuda.device import PretendedCuda
from tests.pretended_cuda.steps import forget_the_last_card

_NOT_COUNTED = ("mm", "attention", "flash", "varlen", "empty", "zeros", "embedding", "index", "nll")
"""Products, attention, allocations and what happens once a pass."""


class Traffic(PretendedCuda):
    """A device that adds up bytes of operators that are no products, views or allocations."""

    def __init__(self) -> None:
        super().__init__("NVIDIA H100 80GB HBM3", (9, 0), has_driver=True)
        self.num_bytes = 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().dispatch(func, types, args, kwargs)
        name = str(func)
        if name.startswith("aten.") and not func.is_view and not any(word in name for word in _NOT_COUNTED):
            self.num_bytes += _bytes_of((args, kwargs, found))
        return found


def _bytes_of(tree: Any) -> int:
    tensors = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return sum(one.numel() * one.element_size() for one in tensors if one.device.type == "cuda")


def traffic(tokens: int, is_fused: bool) -> dict[str, Any]:
    """Return the bytes of a layer of Llama-3-8B in a pass of so many tokens: those of two layers minus those of one."""
    one, two = (_traffic(layers, tokens, is_fused) for layers in (1, 2))
    return {"layer_bytes": two[0] - one[0], "launches": two[1]}


def _traffic(layers: int, tokens: int, is_fused: bool) -> tuple[int, dict[str, int]]:
    forget_the_last_card()
    device, counts = Traffic(), dict[str, int]()
    with device.present():
        backbone = backbones.make("llama 8B", torch.bfloat16, num_hidden_layers=layers)
        model = MultiTaskPeftModel(backbone, {"a": LoraConfig(r=16, target_modules="all-linear")}, verify=False).train()
        note = JITFunction.run

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kernel.fn.__module__.startswith("liger_kernel"):
                counts[kernel.__name__] = counts.get(kernel.__name__, 0) + 1
                device.num_bytes += _bytes_of(args)
                return None
            return note(kernel, *args, **kwargs)

        properties = mock.Mock(multi_processor_count=132)
        with (
            mock.patch.object(JITFunction, "run", run),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        ):
            if is_fused:
                liger._patch(model.backbone, {})  # numbers of a pretended device prove nothing
            availability.runs_kernels(model.device)
            ids = np.resize(np.arange(1, 1024), tokens)
            batch = TaskBatch("a", 0, 7, (TokenSequence(ids, ids.copy(), 0),))
            (micro_batch,) = ChunkPackingCollator().micro_batches([batch], max_tokens=len(ids))
            device.num_bytes = 0
            model(micro_batch.to(model.device)).losses.sum().backward()
    return device.num_bytes, counts
