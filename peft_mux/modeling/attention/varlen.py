"""Attention over a packed stream in one call, on CUDA: flash attention that reads where each sequence begins.

Torch brings the kernel (`torch.nn.attention.varlen`), under signatures that change from version to version; if its
build has none, the packages `flash_attn_interface` and `flash_attn` may. There is none for a CPU: `varlen_support` says
so, or what else is in the way, and the caller uses scaled-dot-product attention.

Nothing passed to the kernel depends on which sequences happen to be together, except for `cu_seqlens` and the launch
size.

Shape letters: T tokens, S sequences, H heads, G key-value heads (G divides H), C channels of a head.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

DTYPES = (torch.bfloat16, torch.float16)
"""Precisions that flash attention supports."""
MAX_HEAD_DIM = 256
"""Most channels of a head that flash attention takes."""
_HEAD_DIM_STEP = 8
_LEAST_CAPABILITY = (8, 0)
# What flash attention 2 and torch refuse in their backward passes, on cards with 99 KiB of shared memory a program
# (torch: check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120). Wider heads take another tile there.
_WIDE_HEAD_DIMS = range(193, 225)
_LITTLE_SHARED_MEMORY = ((8, 6), (8, 7), (8, 9))
_PACKAGES = ("flash_attn_interface", "flash_attn")
"""Packages of flash attention 3 and 2; the newer one first."""


class VarlenKernel(NamedTuple):
    """A library's attention over sequences of varying length.

    Attributes:
        library: `torch` or the name of a package.
        function: the library's attention function.
        parameters: names of the function's parameters; without one of them, its work is done here or left out.
    """

    library: str
    function: Callable[..., Any]
    parameters: frozenset[str]


def as_kernel(library: str, function: Callable[..., Any]) -> VarlenKernel | None:
    """Describe the attention function of a library; `None` if it takes no window."""
    parameters = frozenset(inspect.signature(function).parameters)
    return VarlenKernel(library, function, parameters) if "window_size" in parameters else None


@functools.cache
def varlen_kernel() -> VarlenKernel | None:
    """Return torch's own kernel, or that of a flash attention package, or `None`; found once a process."""
    candidates = [(package, package, "flash_attn_varlen_func") for package in _PACKAGES]
    if torch.backends.cuda.is_flash_attention_available():
        candidates.insert(0, ("torch", "torch.nn.attention.varlen", "varlen_attn"))
    for library, module, name in candidates:
        try:
            function = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, OSError):  # absent, another version, built for another CUDA
            continue
        kernel = as_kernel(library, function)
        if kernel is not None:
            return kernel
    return None


def varlen_support(device: torch.device, dtype: torch.dtype, head_dim: int, **options: Any) -> str | None:
    """Return why `varlen_attention` cannot be used, or `None` if it can.

    Args:
        device: where the stream lies.
        dtype: the precision of queries, keys and values.
        head_dim: number C of channels of a head's queries and keys.
        **options: as for `unsupported_attention`.
    """
    if device.type != "cuda":
        return f"there is no kernel for {device.type}"
    if (reason := unsupported_attention(dtype, head_dim, **options)) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    if head_dim in _WIDE_HEAD_DIMS and (capability in _LITTLE_SHARED_MEMORY or capability[0] == 12):
        return f"heads have {head_dim} channels, too many for its backward pass in the shared memory of this GPU"
    if varlen_kernel() is None:
        return "neither torch nor a flash_attn package brings a kernel"
    return None


def unsupported_attention(
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    has_sinks: bool = False,
) -> str | None:
    """Return why no GPU computes such attention by `varlen_attention`; `None` if some do.

    Args:
        dtype: the precision of queries, keys and values.
        head_dim: number C of channels of a head's queries and keys.
        value_dim: number of channels of a head's values; by default `head_dim`.
        softcap: bound of the scores; `None` for none.
        dropout: probability with which an attention weight is dropped.
        has_sinks: whether the softmax has a learnt extra term.
    """
    if dtype not in DTYPES:
        return f"the kernel computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}"
    if head_dim > MAX_HEAD_DIM or head_dim % _HEAD_DIM_STEP:
        return f"heads have {head_dim} channels, not a multiple of {_HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    # As in latent attention, where values are narrower than queries.
    if value_dim not in (None, head_dim):
        return f"values have {value_dim} channels and queries {head_dim}"
    if softcap is not None:
        return "scores are soft-capped"
    if dropout > 0.0:
        return "attention weights are dropped out"
    if has_sinks:
        return "attention has sinks"
    return None


@functools.cache
def warn_once(reason: str) -> None:
    """Warn once that a GPU computes attention the slower way, for a reason of `varlen_support`."""
    warnings.warn(f"attention is computed by groups of sequences of equal length, as {reason}.", stacklevel=2)


def varlen_attention(
    q_THC: torch.Tensor,
    k_TGC: torch.Tensor,
    v_TGC: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    *,
    is_causal: bool,
    window: int | None,
    scaling: float,
    kernel: VarlenKernel | None = None,
    keys: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Attend within each sequence of the stream; differentiable in queries, keys and values.

    The backward pass adds up in an order that differs from run to run, unless
    `torch.use_deterministic_algorithms(True)` asks for the slower one that does not.

    Args:
        q_THC: queries `[T, H, C]`.
        k_TGC: keys `[T, G, C]`.
        v_TGC: values `[T, G, C]`.
        cu_seqlens: int32 `[S + 1]` on the same device, from 0 to T.
        max_length: tokens of the longest sequence; on the host, as reading `cu_seqlens` back would wait for the device.
        is_causal: whether a query sees no later key.
        window: a query sees this many tokens, itself included, before it, and after it if not causal; `None` for all.
        scaling: factor of the scores.
        kernel: the library's function; by default what `varlen_kernel` finds.
        keys: int32 `[S + 1]` bounds and greatest number of the keys of each sequence, if they are not those of the
            queries. Queries are the last tokens that there are keys of: flash attention since 2.1 aligns causality so.

    Returns:
        Outputs `[T, H, C]` of all queries.

    Raises:
        ValueError: if there is no kernel, a window has no token, or G does not divide H.
    """
    kernel = kernel or varlen_kernel()
    if kernel is None:
        raise ValueError("no kernel for sequences of varying length; ask `varlen_support` first.")
    if window is not None and window < 1:
        raise ValueError(f"a window must be of 1 token or more, got {window}.")
    if q_THC.shape[1] % k_TGC.shape[1]:
        raise ValueError(f"the number of key-value heads must divide the {q_THC.shape[1]} heads, got {k_TGC.shape[1]}.")
    # The kernels count the tokens on each side of the query, without the query.
    reach = -1 if window is None else window - 1
    # The kernels take any strides but those of the channels, which must be adjacent.
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_THC, k_TGC, v_TGC))
    bounds, longest = (cu_seqlens, max_length) if keys is None else keys
    # Lengths size the launch, and may be too large. But the kernel also chooses other code if they are 1, or within the
    # window: a sequence would be computed by other code alone than with a longer one in the batch.
    num_queries, num_keys = max(max_length, 2), max(longest, 2 if window is None else window, 2)
    options: dict[str, Any] = {"window_size": (reach, 0 if is_causal else reach)}
    if "num_splits" in kernel.parameters:
        options["num_splits"] = 1  # where keys are split depends on the longest sequence, and so would the sums
    if kernel.library == "torch":
        groups = q.shape[1] // k.shape[1]
        if "enable_gqa" in kernel.parameters:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            # Expanded, so that the backward is a sum in a fixed order and not an addition by index.
            k, v = (x[:, :, None].expand(-1, -1, groups, -1).flatten(1, 2) for x in (k, v))
        return kernel.function(q, k, v, cu_seqlens, bounds, num_queries, num_keys, scale=scaling, **options)
    if "deterministic" in kernel.parameters:
        # Torch's kernel looks at the global switch by itself; the packages have to be told.
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    out = kernel.function(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=bounds,
        max_seqlen_q=num_queries,
        max_seqlen_k=num_keys,
        softmax_scale=scaling,
        causal=is_causal,
        **options,
    )
    return out[0] if isinstance(out, tuple) else out  # some versions add the logarithm of the softmax's divisor
