"""Carries out launches of Triton kernels on tensors of the CPU, by the PTX that Triton compiles for a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.runtime.jit import JITFunction

from peft_mux.kernels.cross_entropy import linear
from peft_mux.kernels.lora import launch
from peft_mux.modeling.adapters.lora import layer, lora_pass
from tests.kernels.compiling import compiled
from tests.pretended_cuda.launches import arguments_of, bound, compilation_of
from tests.ptx.machine import Block, LiveTensors, Program, PtxFault

CARDS = {80: "A100", 90: "H100"}
_compiled: dict[str, tuple[str, int]] = {}


class Launches:
    """What was launched.

    Attributes:
        counts: number of launches by kernel.
        moved_bytes: bytes that its launches read and wrote, by kernel.
        opcodes: which opcodes the launched programs have.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.moved_bytes: Counter[str] = Counter()
        self.opcodes: set[str] = set()


@contextmanager
def ptx_on_cpu(capability: int, change: Callable[[str], str] | None = None) -> Iterator[Launches]:
    """Let kernels run on CPU tensors, as compiled for a card; the model takes the paths of a GPU.

    Args:
        capability: of the card, 80 or 90.
        change: what is done to the PTX of each kernel before it runs.
    """
    launches = Launches()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        ptx, shared_bytes, arguments = _compile(kernel, args, kwargs, capability)
        program = Program(ptx if change is None else change(ptx))
        memory = LiveTensors()
        launches.counts[kernel.__name__] += 1
        launches.opcodes |= {one.parts[0] for one in program.instructions}
        for position in np.ndindex((*grid, 1, 1)[:3][::-1]):
            try:
                # Triton passes two addresses of scratch memory after the arguments.
                Block(program, memory, [*arguments, 0, 0], position[::-1], shared_bytes).run()
            except PtxFault as fault:
                raise PtxFault(f"{kernel.__name__}{position[::-1]}: {fault}") from None
        launches.moved_bytes[kernel.__name__] += memory.num_moved

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(launch, "gpu_model", return_value=CARDS[capability]))
        for module in (linear, layer, lora_pass):
            stack.enter_context(mock.patch.object(module, "runs_kernels", return_value=True))
        yield launches


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> tuple[str, int, list[int]]:
    """Return the PTX of a launch, the bytes of shared memory of a block, and the bits of the arguments."""
    values, options = bound(kernel, args, kwargs)
    arguments = arguments_of(kernel, values)
    key = repr((kernel.__name__, capability, arguments, options))
    if key not in _compiled:
        found = compiled(compilation_of(kernel, arguments, options), capability)
        _compiled[key] = found.asm["ptx"], found.metadata.shared
    return (*_compiled[key], [_bits(values[one.name]) for one in arguments if one.type != "constexpr"])


def _bits(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return int(np.float32(value).view(np.uint32)) if isinstance(value, float) else int(value)
