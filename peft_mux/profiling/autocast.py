"""`AutocastOnMeta`: what autocast does to dtypes, on the meta device, for which torch has none.

Which operations compute in which dtype is what torch documents for CUDA and for CPUs
(https://docs.pytorch.org/docs/stable/amp.html); those are listed that models of transformers use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LOWER: frozenset[Callable[..., Any]] = frozenset(
    (F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
     Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__)
)  # fmt: skip
"""Products, in the dtype of autocast."""

_FULL_ON_CUDA: frozenset[Callable[..., Any]] = frozenset(
    (F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus, torch.pow, torch.rsqrt, torch.exp, torch.log,
     torch.softmax, torch.sum, torch.cumsum, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log,
     Tensor.softmax, Tensor.sum, Tensor.cumsum)
)  # fmt: skip
"""Operations that CUDA's autocast computes in fp32; that of CPUs leaves all of them alone."""


class Weights(Protocol):
    """Tells weights from activations."""

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight, or a copy of one."""
        ...

    def leave_out(self, tensor: Tensor) -> None:
        """Take a copy of a weight for one."""
        ...


class AutocastOnMeta:
    """Autocast of the meta device, on or off.

    Args:
        dtype: the dtype of autocast; `None` where it is off.
        device_type: "cuda" or "cpu", the device whose lists are followed.
    """

    def __init__(self, dtype: torch.dtype | None, device_type: str) -> None:
        """Begin in this state."""
        self.dtype = dtype
        self._full = _FULL_ON_CUDA if device_type == "cuda" else frozenset()

    @contextmanager
    def asked(self) -> Iterator[None]:
        """Answer questions about autocast on the meta device, where torch raises; others are passed on."""
        is_enabled, dtype_of, autocast = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast

        def known(*args: Any) -> bool:
            return self.dtype is not None if args == ("meta",) else is_enabled(*args)

        def known_dtype(device_type: str) -> torch.dtype:
            if device_type == "meta" and self.dtype is not None:
                return self.dtype
            return dtype_of("cpu" if device_type == "meta" else device_type)

        def entered(device_type: str, *args: Any, **kwargs: Any) -> Any:
            if device_type != "meta":
                return autocast(device_type, *args, **kwargs)
            return nullcontext() if kwargs.get("enabled", True) else self._switched_off()

        torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast = known, known_dtype, entered  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast = is_enabled, dtype_of, autocast  # type: ignore[assignment]

    @contextmanager
    def casting(self, weights: Weights) -> Iterator[None]:
        """Cast what operations read, as autocast does.

        Args:
            weights: tells which tensors are weights, whose casts no pass has for itself.
        """
        with _Casts(self, weights):
            yield

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        before, self.dtype = self.dtype, None
        try:
            yield
        finally:
            self.dtype = before

    def dtype_in(self, function: Callable[..., Any]) -> torch.dtype | None:
        """Return the dtype that an operation computes in, or `None` where that of its inputs decides."""
        if self.dtype is None:
            return None
        if function in _LOWER:
            return self.dtype
        return torch.float32 if function in self._full else None


class _Casts(TorchFunctionMode):
    """Casts the inputs of operations."""

    def __init__(self, state: AutocastOnMeta, weights: Weights) -> None:
        super().__init__()
        self._state, self._weights = state, weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = self._state.dtype_in(func)
        if dtype is None:
            return func(*args, **kwargs)
        args = tuple(self._cast(value, dtype) for value in args)
        kwargs = {name: self._cast(value, dtype) for name, value in kwargs.items()}
        with self._state._switched_off():  # what an operation is made of is not cast again
            return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        cast = value.to(dtype)
        if self._weights.is_weight(value):
            self._weights.leave_out(cast)
        return cast
