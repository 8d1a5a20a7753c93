"""What decides the last bits of a result beside a task's own settings; a resumed run says what has changed of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.compat import installed_version
from peft_mux.modeling.attention.varlen import varlen_kernel

_ARGUMENTS = (
    "bf16 planner max_tokens_per_micro_batch chunk_size min_chunk_size pad_to_chunks split_long_sequences "
    "share_prefixes last_layer_at_targets memory_limit_gib cost_profile num_micro_batches tensor_parallel_size "
    "pipeline_parallel_size replicas dispatch interleaved_passes pipeline_schedule shard_backbone measured_times "
    "cuda_graphs full_determinism world_size"
).split()
_PACKAGES = ("torch", "transformers", "peft")


def numerics_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return what decides the bits of a run here, by name: arguments, versions, device, threads, attention."""
    device = args.device
    is_cuda = device.type == "cuda"
    kernel = varlen_kernel() if is_cuda else None
    return {
        **{name: _plain(getattr(args, name)) for name in _ARGUMENTS},
        **{f"{name} version": installed_version(name) for name in _PACKAGES},
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "threads": None if is_cuda else torch.get_num_threads(),
        "attention": "by groups of equal length" if kernel is None else f"{kernel.library} varlen",
    }


def changed_numerics(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what has changed, by name: before and now. What an older version did not record is not compared."""
    return {name: (before[name], now[name]) for name in now if name in before and before[name] != now[name]}


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
