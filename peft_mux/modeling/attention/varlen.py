"""Attention over a packed stream in one call, on CUDA: flash attention that reads where each sequence begins.

Torch brings the kernel (`torch.nn.attention.varlen`), under signatures that change from version to version; where its
build has none, the packages `flash_attn_interface` and `flash_attn` do. There is none for a CPU: `varlen_support` says
so, or what else is in the way, and the caller takes scaled-dot-product attention.

Nothing passed on depends on which sequences happen to be together, but for `cu_seqlens` itself and the launch size: see
`_lengths`.

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
"""What flash attention computes in."""
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
        parameters: names of the function's parameters; what it has none for is done here or left out.
    """

    library: str
    function: Callable[..., Any]
    parameters: frozenset[str]

    @property
    def takes_gqa(self) -> bool:
        """Whether there may be fewer key-value heads than heads."""
        return self.library != "torch" or "enable_gqa" in self.parameters


def as_kernel(library: str, function: Callable[..., Any]) -> VarlenKernel | None:
    """Describe a library's function, or return `None` if it cannot be told to be causal within a window.

    Args:
        library: `torch` or the name of a package.
        function: its attention over sequences of varying length.
    """
    parameters = frozenset(inspect.signature(function).parameters)
    return VarlenKernel(library, function, parameters) if "window_size" in parameters else None


@functools.cache
def varlen_kernel() -> VarlenKernel | None:
    """Return torch's own kernel, or that of a flash attention package, or `None`; found once a process."""
    if torch.backends.cuda.is_flash_attention_available():
        kernel = _imported("torch", "torch.nn.attention.varlen", "varlen_attn")
        if kernel is not None:
            return kernel
    for package in _PACKAGES:
        kernel = _imported(package, package, "flash_attn_varlen_func")
        if kernel is not None:
            return kernel
    return None


def _imported(library: str, module: str, name: str) -> VarlenKernel | None:
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError):  # absent, other version, built for another CUDA
        return None
    return as_kernel(library, function)


def varlen_support(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    has_sinks: bool = False,
) -> str | None:
    """Return why `varlen_attention` cannot be used, or `None` if it can.

    Args:
        device: where the stream lies.
        dtype: the precision of queries, keys and values.
        head_dim: number C of channels of a head's queries and keys.
        value_dim: number of channels of a head's values, where it may be another.
        softcap: bound of the scores; `None` for no bound.
        dropout: probability with which an attention weight is dropped.
        has_sinks: whether the softmax has a learnt extra term.
    """
    if device.type != "cuda":
        return f"there is no kernel for {device.type}"
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
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        return "the GPU is older than compute capability 8.0"
    if head_dim in _WIDE_HEAD_DIMS and (capability in _LITTLE_SHARED_MEMORY or capability[0] == 12):
        return f"heads have {head_dim} channels, too many for its backward pass in the shared memory of this GPU"
    if varlen_kernel() is None:
        return "neither torch nor a flash_attn package brings a kernel"
    return None


@functools.cache
def warn_once(reason: str) -> None:
    """Warn that a GPU computes attention the slower way; once for each reason.

    Args:
        reason: what `varlen_support` returned, a clause.
    """
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
        window: a query sees this many tokens, itself included; `None` for all. Causal attention only.
        scaling: factor of the scores.
        kernel: the library's function; by default what `varlen_kernel` finds.
        keys: int32 `[S + 1]` bounds and greatest number of the keys of each sequence, where they are not those of the
            queries. Queries are the last tokens that there are keys of: flash attention since 2.1 aligns causality so.

    Returns:
        Outputs `[T, H, C]` of all queries.

    Raises:
        ValueError: if there is no kernel, a window reaches to both sides, or G does not divide H.
    """
    kernel = kernel or varlen_kernel()
    if kernel is None:
        raise ValueError("no kernel for sequences of varying length; ask `varlen_support` first.")
    if window is not None and (not is_causal or window < 1):
        raise ValueError(f"a window of {window} over both directions or of no token; allowed: causal, 1 or more.")
    if q_THC.shape[1] % k_TGC.shape[1]:
        raise ValueError(f"{k_TGC.shape[1]} key-value heads for {q_THC.shape[1]} heads; allowed: a divisor.")
    # The kernels count the tokens to the left of the query, without the query.
    reach = (-1 if window is None else window - 1, 0 if is_causal else -1)
    call = _call_torch if kernel.library == "torch" else _call_package
    q_THC, k_TGC, v_TGC = (_with_dense_channels(x) for x in (q_THC, k_TGC, v_TGC))
    bounds, longest = (cu_seqlens, max_length) if keys is None else keys
    lengths = _lengths(max_length, window)[0], _lengths(longest, window)[1]
    return call(kernel, (q_THC, k_TGC, v_TGC), (cu_seqlens, bounds), lengths, reach, scaling)


def _lengths(max_length: int, window: int | None) -> tuple[int, int]:
    """Return the greatest lengths of queries and of keys that the kernel is told.

    They size its launch, and may be too large. But it also chooses other code where they are 1, or within the window:
    a sequence would be computed by other code alone than beside a longer one.
    """
    return max(max_length, 2), max(max_length, 2 if window is None else window, 2)


def _call_torch(
    kernel: VarlenKernel,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[int, int],
    reach: tuple[int, int],
    scaling: float,
) -> torch.Tensor:
    q_THC, k_TGC, v_TGC = qkv
    options: dict[str, Any] = {"scale": scaling, "window_size": reach}
    groups = q_THC.shape[1] // k_TGC.shape[1]
    if kernel.takes_gqa:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k_TGC, v_TGC = _repeated(k_TGC, groups), _repeated(v_TGC, groups)
    if "num_splits" in kernel.parameters:
        options["num_splits"] = 1  # where keys are split depends on the longest sequence, and so would the sums
    return kernel.function(q_THC, k_TGC, v_TGC, *cu_seqlens, *lengths, **options)


def _call_package(
    kernel: VarlenKernel,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    lengths: tuple[int, int],
    reach: tuple[int, int],
    scaling: float,
) -> torch.Tensor:
    options: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens[0],
        "cu_seqlens_k": cu_seqlens[1],
        "max_seqlen_q": lengths[0],
        "max_seqlen_k": lengths[1],
        "softmax_scale": scaling,
        "causal": reach[1] == 0,
        "window_size": reach,
    }
    # Torch's kernel looks at the global switch by itself; the packages have to be told.
    if "deterministic" in kernel.parameters:
        options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if "num_splits" in kernel.parameters:
        # As for torch's kernel: splits would follow from the longest sequence, and the sums from them.
        options["num_splits"] = 1
    out = kernel.function(*qkv, **options)
    return out[0] if isinstance(out, tuple) else out  # some versions add the logarithm of the softmax's divisor


def _with_dense_channels(x: torch.Tensor) -> torch.Tensor:
    # The kernels take any strides but those of the channels, which have to lie side by side.
    return x if x.stride(-1) == 1 else x.contiguous()


def _repeated(x_TGC: torch.Tensor, groups: int) -> torch.Tensor:
    """`[T, G, C] -> [T, G * groups, C]`; its backward is a sum in a fixed order, not an addition by index."""
    return x_TGC[:, :, None].expand(-1, -1, groups, -1).flatten(1, 2)
