"""Checks of `benchmarks.gpu`: variable-length attention on packed sequences.

Forward and backward against float64, each sequence alone and together, and a sequence of NaN next to others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import TOLERANCES, relative_error

PARTS = ("out", "dq", "dk", "dv")


def attention_rows(settings: Settings) -> Iterator[Row]:
    """Yield the checks of both directions."""
    for is_causal in (True, False):
        yield from _direction_rows(settings, is_causal)


def _direction_rows(settings: Settings, is_causal: bool) -> Iterator[Row]:
    from peft_mux.modeling.attention.varlen import as_kernel, varlen_support

    name = f"varlen {'causal' if is_causal else 'both directions'}"
    channels = 8 if settings.is_rehearsal else 128
    reason = varlen_support(settings.device, settings.dtype, channels)
    if reason is not None and not settings.is_rehearsal:
        yield name, {"skipped": reason, "is_right": False}
        return
    packed = _Packed(settings, is_causal, channels, None if reason is None else as_kernel("torch", stand_in_varlen))
    together = packed.attend(0, packed.num_tokens)
    yield name, _exactness(packed, together)
    yield f"{name} co-location", _co_location(packed, together)
    yield f"{name} NaN isolation", _nan_isolation(packed, together)


class _Packed:
    """Sequences side by side, and attention over any run of them.

    Attributes:
        bounds: first row of each sequence, and the number of rows.
    """

    def __init__(self, settings: Settings, is_causal: bool, channels: int, kernel: Any) -> None:
        self.settings, self.is_causal, self.kernel = settings, is_causal, kernel
        self.scale = channels**-0.5
        lengths = [5, 1, 9, 3] if settings.is_rehearsal else [300, 1, 17, 1024, 64, 129]
        self.bounds = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        heads, groups = (4, 2) if settings.is_rehearsal else (32, 8)
        self.qkv = [self._draw(count, channels) for count in (heads, groups, groups)]
        self.d_out = self._draw(heads, channels)

    @property
    def num_tokens(self) -> int:
        return self.bounds[-1]

    def sequences(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds[:-1], self.bounds[1:], strict=True))

    def attend(self, start: int, end: int, poisoned: slice | None = None) -> list[torch.Tensor]:
        """Return output and gradients of the sequences between two bounds; rows of `poisoned` are NaN before."""
        from peft_mux.modeling.attention.varlen import varlen_attention

        leaves = [tensor[start:end].clone() for tensor in self.qkv]
        for leaf in leaves if poisoned is not None else ():
            leaf[poisoned] = float("nan")
        leaves = [leaf.requires_grad_() for leaf in leaves]
        inside = [bound - start for bound in self.bounds if start <= bound <= end]
        cu = torch.tensor(inside, dtype=torch.int32, device=self.settings.device)
        longest = max(b - a for a, b in zip(inside[:-1], inside[1:], strict=True))
        options: dict[str, Any] = {"is_causal": self.is_causal, "window": None, "scaling": self.scale}
        out = varlen_attention(leaves[0], leaves[1], leaves[2], cu, longest, kernel=self.kernel, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.d_out[start:end])]

    def exact(self) -> list[torch.Tensor]:
        """Return the same of all sequences in float64."""
        q, k, v = (tensor.double().requires_grad_() for tensor in self.qkv)
        out = _per_sequence(q, k, v, self.bounds, self.is_causal, self.scale)
        return [out.detach(), *torch.autograd.grad(out, [q, k, v], self.d_out.double())]

    def _draw(self, count: int, channels: int) -> torch.Tensor:
        drawn = torch.randn(self.num_tokens, count, channels, device=self.settings.device)
        return drawn.to(self.settings.dtype)


def _exactness(packed: _Packed, together: list[torch.Tensor]) -> dict[str, Any]:
    found = {part: relative_error(a, b) for part, a, b in zip(PARTS, together, packed.exact(), strict=True)}
    limit = TOLERANCES[packed.settings.dtype]
    return {**found, "tolerance": limit, "is_right": all(error <= limit for error in found.values())}


def _co_location(packed: _Packed, together: list[torch.Tensor]) -> dict[str, Any]:
    differing = dict.fromkeys(PARTS, 0)
    for start, end in packed.sequences():
        for part, mine, theirs in zip(PARTS, packed.attend(start, end), together, strict=True):
            differing[part] += int(not torch.equal(mine, theirs[start:end]))
    # The backward adds up in an order that differs from run to run: only the forward has to keep its bits.
    return {f"differing_{part}": count for part, count in differing.items()} | {"is_right": differing["out"] == 0}


def _nan_isolation(packed: _Packed, together: list[torch.Tensor]) -> dict[str, Any]:
    bad = slice(packed.bounds[2], packed.bounds[3])
    poisoned = packed.attend(0, packed.num_tokens, bad)
    others = [row for row in range(packed.num_tokens) if not bad.start <= row < bad.stop]
    healthy = torch.tensor(others, device=packed.settings.device)
    leaks = {part: int((~tensor[healthy].isfinite()).sum()) for part, tensor in zip(PARTS, poisoned, strict=True)}
    is_same = torch.equal(poisoned[0][healthy], together[0][healthy])
    is_right = not any(leaks.values()) and is_same and bool(poisoned[0][bad].isnan().all())
    return {f"leaks_{part}": count for part, count in leaks.items()} | {"is_same_out": is_same, "is_right": is_right}


def stand_in_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Attention sequence by sequence, where a dry run has no kernel: it tests the check, not the kernel."""
    return _per_sequence(q, k, v, cu_q.tolist(), window_size[1] == 0, scale)


def _per_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], is_causal: bool, scale: float
) -> torch.Tensor:
    parts = []
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        if start == end:  # fills up the bounds of a captured pass
            continue
        q_1, k_1, v_1 = (tensor[None, start:end].transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q_1, k_1, v_1, is_causal=is_causal, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
