"""Checks of `benchmarks.gpu`: attention on packed sequences, of any length and of short ones.

Forward and backward against float64, each sequence alone and together, and a sequence of NaN next to others. A table
then compares the seconds of flash attention and of the kernels of short rows by the length of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import TOLERANCES, relative_error
from benchmarks.kernels.timing import interleaved_us

PARTS = ("out", "dq", "dk", "dv")


def attention_rows(settings: Settings) -> Iterator[Row]:
    """Yield the checks of both directions."""
    for is_causal in (True, False):
        yield from _direction_rows(settings, is_causal)
        if settings.wants_kernels:
            packed = _Packed(settings, is_causal, 8 if settings.is_rehearsal else 128, None, is_short=True)
            yield from _rows_of(f"short rows {'causal' if is_causal else 'both directions'}", packed)


def attention_times(settings: Settings) -> Iterator[Row]:
    """Yield microseconds of a row, forward and backward, by its tokens: 8,192 tokens a pass, heads of Llama-3-8B."""
    from peft_mux.kernels.attention import MAX_TOKENS

    for tokens in (4, 8) if settings.is_rehearsal else (16, 32, 48, 64, 96, 128, 256, 1024):
        count = (16 if settings.is_rehearsal else 8192) // tokens
        kernels = {
            "flash": _Packed(settings, True, 8 if settings.is_rehearsal else 128, None, lengths=[tokens] * count)
        }
        if settings.is_rehearsal:
            kernels["flash"].kernel = _stand_in()
        if tokens <= MAX_TOKENS and settings.wants_kernels:
            channels = 8 if settings.is_rehearsal else 128
            kernels["short rows"] = _Packed(settings, True, channels, None, lengths=[tokens] * count, is_short=True)
        calls = {name: lambda _, packed=packed: packed.attend(0, packed.num_tokens) for name, packed in kernels.items()}
        found = interleaved_us(calls, settings.device, calls=4, rounds=5)
        yield f"rows of {tokens} tokens", {f"{name}_us_a_row": us / count for name, us in found.items()}


def _stand_in() -> Any:
    from peft_mux.modeling.attention.varlen import as_kernel

    return as_kernel("torch", stand_in_varlen)


def _direction_rows(settings: Settings, is_causal: bool) -> Iterator[Row]:
    from peft_mux.modeling.attention.varlen import varlen_support

    name = f"varlen {'causal' if is_causal else 'both directions'}"
    channels = 8 if settings.is_rehearsal else 128
    reason = varlen_support(settings.device, settings.dtype, channels)
    if reason is not None and not settings.is_rehearsal:
        yield name, {"skipped": reason, "is_right": False}
        return
    yield from _rows_of(name, _Packed(settings, is_causal, channels, None if reason is None else _stand_in()))


def _rows_of(name: str, packed: _Packed) -> Iterator[Row]:
    together = packed.attend(0, packed.num_tokens)
    yield name, _exactness(packed, together)
    yield f"{name} co-location", _co_location(packed, together)
    yield f"{name} NaN isolation", _nan_isolation(packed, together)


class _Packed:
    """Sequences side by side, and attention over any run of them.

    Attributes:
        bounds: first row of each sequence, and the number of rows.
        is_short: whether the kernels of short rows compute them.
    """

    def __init__(
        self,
        settings: Settings,
        is_causal: bool,
        channels: int,
        kernel: Any,
        *,
        lengths: list[int] | None = None,
        is_short: bool = False,
    ) -> None:
        self.settings, self.is_causal, self.kernel, self.is_short = settings, is_causal, kernel, is_short
        self.scale = channels**-0.5
        if lengths is None:
            lengths = [5, 1, 9, 3] if settings.is_rehearsal else [300, 1, 17, 1024, 64, 129]
            lengths = [min(length, 64) for length in lengths] if is_short else lengths
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
        if self.is_short:
            from peft_mux.kernels.attention.short_rows import short_row_attention

            out = short_row_attention(leaves[0], leaves[1], leaves[2], cu, **options)
        else:
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
    # The sums of flash attention's backward have no fixed order, so that only its forward has to keep its bits.
    is_right = not any(differing.values()) if packed.is_short else differing["out"] == 0
    return {f"differing_{part}": count for part, count in differing.items()} | {"is_right": is_right}


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
