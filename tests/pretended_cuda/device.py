"""`PretendedCuda`: whole training steps on device "cuda" without a GPU.

Tensors are fake: they have a shape, a dtype and a device, and no numbers. So what can be seen is which device a
tensor is on, where the host would wait, what is launched with which arguments, and what autograd keeps; what
cannot be seen are numbers, races, and faults of allocators and streams.

The library of `library.py` must be loaded before torch is imported, so each test of this runs in a process of its own.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from tests.pretended_cuda.launches import Launches

aten = torch.ops.aten
_DRAWS = ("random", "dropout", "bernoulli", "multinomial", "rand")
_ATTENTION = ("flash", "attention", "varlen")


class PretendedCuda(FakeTensorMode):
    """One CUDA device.

    Args:
        name: model of the card.
        capability: compute capability of the card.
        has_driver: whether Triton finds a driver; without one its launches raise what it raises on this machine.
        memory_bytes: memory of the card.

    Attributes:
        waits: where the host would have waited for the device, and how often.
        blocking_copies: where a copy to the device would have held the host up, as it is not from pinned memory or does
            not say `non_blocking`.
        unsafe: what was done under capture that no graph can repeat.
        attention: number of calls of torch's own attention operators, by name.
        launches: the launches of Triton kernels.
        number: what every floating-point number is that the host reads.
        memory: the history of allocations: a storage's number, and its bytes, or 0 where it is freed.
        num_places: how many places of the call stack waits and copies are recorded with.
    """

    def __init__(
        self,
        name: str = "NVIDIA H100 80GB HBM3",
        capability: tuple[int, int] = (9, 0),
        *,
        has_driver: bool = True,
        memory_bytes: int = 85 * 10**9,
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.name, self.capability, self._has_driver = name, capability, has_driver
        self.waits: Counter[str] = Counter()
        self.blocking_copies: Counter[str] = Counter()
        self.unsafe: Counter[str] = Counter()
        self.attention: Counter[str] = Counter()
        self.launches = Launches()
        self.number, self.num_places = 1.0, 4
        self.memory: list[tuple[int, int]] = []
        self._memory_bytes = memory_bytes
        self._storages: dict[int, int] = {}
        self._num_storages = 0
        self._is_capturing = False

    avoid_device_init = property(lambda self: True)

    # ------------------------------------------------------------------ what is watched

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Watch an operator, and give an answer where it reads a number off the device."""
        kwargs = kwargs or {}
        if self._is_capturing:
            self._look_for_unsafe(func, args, kwargs)
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            if args[0].device.type == "cuda":
                self.waits[f"item: {caller(self.num_places)}"] += 1
            return self._number_of(args[0].dtype)
        if func is aten.equal.default:
            return True
        if func is aten._pin_memory.default:
            pinned = super().dispatch(aten.clone.default, types, (args[0],), {})
            pinned.is_pretended_pinned = True
            return pinned
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            self._look_at_copy(args[0], torch.device(kwargs["device"]), bool(kwargs.get("non_blocking")))
        if func is aten.copy_.default:
            self._look_at_copy(args[1], args[0].device, bool(kwargs.get("non_blocking", (*args, False)[2])))
        name = str(func)
        if any(word in name for word in _ATTENTION):
            self.attention[name.removeprefix("aten.").removesuffix(".default")] += 1
        found = super().dispatch(func, types, args, kwargs)
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda":
                self._number(leaf.untyped_storage())
        return found

    def _number(self, storage: torch.UntypedStorage) -> int:
        """Return the number of a storage of the device; a new one is noted until it is freed."""
        key = storage._cdata
        if key not in self._storages:
            self._num_storages += 1
            self._storages[key] = number = self._num_storages
            self.memory.append((number, storage.nbytes()))
            weakref.finalize(storage, self._free, key)
        return self._storages[key]

    def _free(self, key: int) -> None:
        self.memory.append((self._storages.pop(key), 0))

    def _look_at_copy(self, source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
        if source.device.type == "cuda" and target.type == "cpu":
            self.waits[f"copy to the host: {caller(self.num_places)}"] += 1
        is_asynchronous = non_blocking and getattr(source, "is_pretended_pinned", False)
        if source.device.type == "cpu" and target.type == "cuda" and not is_asynchronous:
            self.blocking_copies[f"{tuple(source.shape)}: {caller(self.num_places)}"] += 1

    def _look_for_unsafe(self, func: Any, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = kwargs.get("device")
        on_host = any(t.device.type == "cpu" for t in tensors) or (
            device is not None and torch.device(device).type == "cpu"
        )
        name = str(func)
        if on_host or func is aten._local_scalar_dense.default or any(word in name for word in _DRAWS):
            self.unsafe[f"{name}: {caller(self.num_places)}"] += 1

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Look for what no graph can repeat, in the `with` block."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def forget(self) -> None:
        """Reset all counts."""
        for count in (self.waits, self.blocking_copies, self.unsafe, self.attention):
            count.clear()
        self.launches.clear()

    # ------------------------------------------------------------------ what torch and Triton see

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let this process have the device in the `with` block."""
        # Not `__enter__`, which torch calls for itself again and again.
        with ExitStack() as stack:
            for target, name, value in self._replacements():
                stack.enter_context(mock.patch.object(target, name, value))
            if self._has_driver:
                stack.enter_context(self.launches.recorded())
            stack.enter_context(self)
            yield

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        def is_bf16_supported(*args: Any, **kwargs: Any) -> bool:
            return self.capability >= (8, 0)

        def synchronize(*args: Any) -> None:
            self.waits[f"synchronize: {caller(self.num_places)}"] += 1

        cuda, (major, minor) = torch.cuda, self.capability
        properties = SimpleNamespace(
            name=self.name, major=major, minor=minor, total_memory=self._memory_bytes, multi_processor_count=132
        )
        return [
            (FakeTensor, "tolist", self._tolist),
            (torch.Tensor, "data_ptr", self._data_ptr(torch.Tensor.data_ptr)),
            (torch.UntypedStorage, "data_ptr", lambda storage: self._number(storage) << 40),
            (torch.nn.Module, "_apply", _apply),
            (cuda, "device_of", _NoGuard),
            (cuda, "device", _NoGuard),
            (cuda, "get_device_capability", lambda device=None: self.capability),
            (cuda, "get_device_name", lambda device=None: self.name),
            (cuda, "get_device_properties", lambda device=None: properties),
            (cuda, "current_device", lambda: 0),
            (cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
            (cuda, "is_bf16_supported", is_bf16_supported),
            (cuda, "synchronize", synchronize),
            (cuda.amp.common, "amp_definitely_not_available", lambda: False),
            (torch.backends.cuda, "is_flash_attention_available", lambda: True),
        ]

    def _number_of(self, dtype: torch.dtype) -> bool | float | int:
        if dtype is torch.bool:
            return True
        return self.number if dtype.is_floating_point else 1

    @property
    def _tolist(self) -> Any:
        def tolist(tensor: torch.Tensor) -> Any:
            if tensor.device.type == "cuda":
                self.waits[f"tolist: {caller(self.num_places)}"] += 1
            return _nested(self._number_of(tensor.dtype), list(tensor.shape))

        return tolist

    def _data_ptr(self, original: Any) -> Any:
        def data_ptr(tensor: torch.Tensor) -> int:
            if not isinstance(tensor, FakeTensor):
                return original(tensor)
            # Far from all others.
            return (self._number(tensor.untyped_storage()) << 40) + tensor.storage_offset() * tensor.element_size()

        return data_ptr


def caller(limit: int) -> str:
    """Return the places in the package and in transformers from which an operator was called, the nearest first."""
    places: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < limit:
        path = frame.f_code.co_filename
        folder = next((folder for folder in ("/peft_mux/", "/transformers/") if folder in path), None)
        if folder is not None:
            places.append(f"{path.rsplit(folder)[-1]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(places)


def _nested(number: Any, shape: list[int]) -> Any:
    return [_nested(number, shape[1:]) for _ in range(shape[0])] if shape else number


class _NoGuard:
    """Stands for what makes a device the current one: there is one."""

    def __init__(self, *args: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *args: Any) -> bool:
        return False


def _apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
    """Move a module as torch does, by new parameters: the data of a fake one cannot be set to another device's."""
    for child in self.children() if recurse else ():
        child._apply(fn)
    for key, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                moved = fn(parameter)
            if (moved.device, moved.dtype) != (parameter.device, parameter.dtype):
                self._parameters[key] = torch.nn.Parameter(moved, parameter.requires_grad)
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self
