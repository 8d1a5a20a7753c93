"""Carries out launches of Triton kernels on tensors of the CPU, by the PTX that Triton compiles for a card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from peft_mux.kernels.cross_entropy import linear
from peft_mux.kernels.lora import launch
from peft_mux.modeling.adapters.lora import layer, lora_pass
from tests.ptx.machine import WARP, Block, LiveTensors, Program, PtxFault

CARDS = {80: "A100", 90: "H100"}
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
}
_compiled: dict[str, tuple[str, int]] = {}


class Launches:
    """What was launched.

    Attributes:
        counts: number of launches by kernel.
        opcodes: which opcodes the launched programs have.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
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

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.object(launch, "gpu_model", return_value=CARDS[capability]))
        for module in (linear, layer, lora_pass):
            stack.enter_context(mock.patch.object(module, "runs_kernels", return_value=True))
        yield launches


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capability: int) -> tuple[str, int, list[int]]:
    """Return the PTX of a launch, the bytes of shared memory of a block, and the bits of the arguments."""
    own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    bound = kernel.signature.bind(*args, **own)
    bound.apply_defaults()
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    arguments: list[int] = []
    for index, param in enumerate(kernel.params):
        value = bound.arguments[param.name]
        is_one = type(value) is int and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            signature[param.name], constants[index,] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name], bits = _POINTERS[value.dtype], value.data_ptr()
        elif isinstance(value, float):
            signature[param.name], bits = "fp32", int(np.float32(value).view(np.uint32))
        else:
            bits = int(value)
            signature[param.name] = param.annotation_type or ("i32" if -(2**31) <= bits < 2**31 else "i64")
        if not isinstance(value, float) and bits % 16 == 0 and not param.do_not_specialize:
            attributes[index,] = [["tt.divisibility", 16]]
        arguments.append(bits)
    key = repr((kernel.__name__, capability, signature, constants, attributes, options))
    if key not in _compiled:
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        found = triton.compile(source, target=GPUTarget("cuda", capability, WARP), options=options)
        _compiled[key] = found.asm["ptx"], found.metadata.shared
    return (*_compiled[key], arguments)
