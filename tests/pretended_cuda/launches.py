"""What Triton kernels are launched with, noted in place of launching them.

A signature is what Triton compiles a variant for: types of arguments, which of them are multiples of 16, the constants,
and the options of the launch. It can be written as JSON and compiled in another process, for any card (`compiled.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.kernels.compiling import Compilation

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_MOST_PROGRAMS = (2**31 - 1, 65535, 65535)


class Argument(NamedTuple):
    """One argument of a launch: its type ("constexpr" for constants), and its value or what is known to divide it."""

    name: str
    type: str
    value: Any


class Signature(NamedTuple):
    """What one variant of a kernel is compiled for."""

    module: str
    kernel: str
    arguments: tuple[Argument, ...]
    options: tuple[tuple[str, Any], ...]


class Launches:
    """The launches of a device.

    Attributes:
        counts: number of launches of each kernel.
        signatures: the variants that would have been compiled, in the order of their first launches.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.signatures: dict[Signature, None] = {}

    def clear(self) -> None:
        """Reset the counts; variants that are compiled stay so."""
        self.counts.clear()

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note launches instead of launching, in the `with` block."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            self._note(kernel, args, grid, kwargs)

        with mock.patch.object(JITFunction, "run", run):
            yield

    def _note(self, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        values, options = bound(kernel, args, kwargs)
        _check_grid(kernel, grid(values) if callable(grid) else grid)
        for name, value in values.items():
            is_there = not isinstance(value, torch.Tensor) or value.device.type == "cuda"
            assert is_there, f"{kernel.__name__}: {name} lies on {value.device}"
        arguments = tuple(arguments_of(kernel, values))
        self.counts[kernel.__name__] += 1
        signature = Signature(kernel.fn.__module__, kernel.__name__, arguments, tuple(sorted(options.items())))
        self.signatures.setdefault(signature)


def _check_grid(kernel: Any, grid: tuple[int, ...]) -> None:
    grid = (*grid, *(1,) * (len(_MOST_PROGRAMS) - len(grid)))
    fits = all(isinstance(n, int) and 1 <= n <= most for n, most in zip(grid, _MOST_PROGRAMS, strict=True))
    assert fits, f"{kernel.__name__} is launched with {grid} programs"


def bound(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of all arguments of a launch by name, and its options."""
    own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    found = kernel.signature.bind(*args, **own)
    found.apply_defaults()
    return found.arguments, options


def arguments_of(kernel: Any, values: dict[str, Any]) -> list[Argument]:
    """Return what Triton compiles a variant for these values for."""
    return [_argument(kernel, param, values[param.name]) for param in kernel.params]


def compilation_of(kernel: Any, arguments: Sequence[Argument], options: dict[str, Any]) -> Compilation:
    """Return the compilation of a variant."""
    types = {one.name: one.type for one in arguments}
    constants = {one.name: _constant(one.value) for one in arguments if one.type == "constexpr"}
    aligned = [one.name for one in arguments if one.type != "constexpr" and one.value == 16]
    return Compilation(kernel, types, constants, aligned, options)


def _constant(value: Any) -> Any:
    is_dtype = isinstance(value, str) and value.startswith("dtype ")
    return tl.str_to_ty(value.removeprefix("dtype "), None) if is_dtype else value


def _argument(kernel: Any, param: Any, value: Any) -> Argument:
    if param.is_constexpr:
        # A dtype by its name, as signatures are written as JSON.
        return Argument(param.name, "constexpr", f"dtype {value}" if isinstance(value, tl.dtype) else value)
    if value is None:
        return Argument(param.name, "constexpr", None)
    if isinstance(value, torch.Tensor):
        is_aligned = value.data_ptr() % 16 == 0 and not param.do_not_specialize
        return Argument(param.name, _POINTERS[value.dtype], 16 if is_aligned else 0)
    if isinstance(value, bool):
        return Argument(param.name, "i1", 0)
    if isinstance(value, int):
        return _integer(param, value)
    assert isinstance(value, float), f"{kernel.__name__}: {param.name} is a {type(value).__name__}"
    return Argument(param.name, "fp32", 0)


def _integer(param: Any, value: int) -> Argument:
    kind = param.annotation_type or ("i32" if -(2**31) <= value < 2**31 else "i64")
    if param.do_not_specialize:
        return Argument(param.name, kind, 0)
    if value == 1:
        return Argument(param.name, "constexpr", 1)
    return Argument(param.name, kind, 16 if value % 16 == 0 else 0)
