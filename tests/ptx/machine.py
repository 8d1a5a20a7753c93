"""Runs compiled PTX in numpy: what Triton emits for sm_80 to sm_90, one thread block after another.

All threads of a block advance together, because Triton's branches are uniform within a block. A register is an array
with one element per thread: `uint64` bits, or `bool` for a predicate.

The machine also checks memory. Every global access must lie within a live tensor and be aligned. Shared memory may be
read only after it is written, and what an asynchronous copy writes only after the wait for it. Registers that were
never written hold a pattern that spoils any result.

Not modelled: races between warps, the fences of wgmma, and speed.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch._subclasses import FakeTensor

Bits: TypeAlias = np.ndarray
LOW_16, LOW_32 = np.uint64(0xFFFF), np.uint64(0xFFFFFFFF)
UNWRITTEN = np.uint64(0xCDCDCDCDCDCDCDCD)
WARP = 32
GROUP = 4 * WARP
"""Threads of a warp group, which multiplies together."""


class PtxFault(Exception):
    """A program does what a GPU would answer with an error or with wrong values."""


# ------------------------------------------------------------------ programs


class Address(NamedTuple):
    base: str
    offset: int


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        guard: the predicate register that it depends on, or `None`.
        negated: whether it runs where the guard is false.
        parts: the opcode, split at its dots.
        operands: register names, labels, `np.uint64` constants, addresses, and tuples of registers.
        text: as it was written.
    """

    guard: str | None
    negated: bool
    parts: tuple[str, ...]
    operands: tuple[Any, ...]
    text: str


class Program:
    """The instructions of one compiled kernel.

    Attributes:
        threads: number of threads of a block.
        instructions: in their order.
        labels: index of the instruction after each label.
    """

    def __init__(self, ptx: str) -> None:
        self.threads = int(_search(r"\.reqntid (\d+)", ptx))
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        body = ptx[ptx.index("\n{") + 2 : ptx.rindex("\n}")]
        body = re.sub(r"//[^\n]*", "", body)
        body = re.sub(r"^\s*\.(loc|pragma|section|file)[^\n]*$", "", body, flags=re.MULTILINE)
        for statement in body.split(";"):
            text = " ".join(statement.split())
            while label := re.match(r"(\$L[\w$]*):\s*", text):
                self.labels[label.group(1)] = len(self.instructions)
                text = text[label.end() :]
            text = text.removeprefix("} ").strip()
            if text and text not in "{}" and not text.startswith((".reg", ".local", "{ .reg", "{.reg")):
                self.instructions.append(_instruction(text))


def _search(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return found.group(1)


def _instruction(text: str) -> Instruction:
    guard = re.match(r"@(!?)(%\w+)\s+", text)
    opcode, _, rest = (text[guard.end() :] if guard else text).partition(" ")
    name, negated = (guard.group(2), guard.group(1) == "!") if guard else (None, False)
    return Instruction(name, negated, tuple(opcode.split(".")), tuple(map(_operand, _split(rest))), text)


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    pieces, depth = [""], 0
    for char in text:
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += char
    return [piece.strip() for piece in pieces if piece.strip()]


def _operand(text: str) -> Any:
    if text.startswith("{"):
        return tuple(map(_operand, _split(text.strip("{} "))))
    if text.startswith("["):
        base, _, offset = text.strip("[] ").replace(" ", "").partition("+")
        return Address(base, int(offset or 0))
    if text.startswith(("0f", "0d")):
        return np.uint64(int(text[2:], 16))
    if re.fullmatch(r"-?(0x)?[0-9a-fA-F]+U?", text):
        return np.uint64(int(text.rstrip("U"), 0) % 2**64)
    return np.uint64(0) if text == "global_smem" else text.partition("|")[0]


# ------------------------------------------------------------------ memory


class LiveTensors:
    """The memory of all tensors that are alive, as one array of bytes that begins at the first of them.

    Attributes:
        num_moved: bytes that were read and written.
    """

    def __init__(self) -> None:
        sizes: dict[int, int] = {}
        for found in gc.get_objects():
            if not isinstance(found, torch.Tensor) or isinstance(found, FakeTensor):  # fake ones of other tests
                continue
            if found.device.type == "cpu" and found.layout is torch.strided:
                storage = found.untyped_storage()
                sizes[storage.data_ptr()] = max(sizes.get(storage.data_ptr(), 0), storage.nbytes())
        self._starts = np.array(sorted(start for start, size in sizes.items() if start and size), np.int64)
        self._ends = self._starts + np.array([sizes[start] for start in self._starts.tolist()], np.int64)
        self._first = int(self._starts[0])
        num_bytes = int(self._ends.max()) - self._first
        self.num_moved = 0
        self.bytes = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(self._first))

    def places(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return the indices of the bytes `[n, num_bytes]` at each address."""
        if (addresses % num_bytes).any():
            raise PtxFault(f"an access of {num_bytes} bytes is not aligned")
        nearest = np.searchsorted(self._starts, addresses, side="right") - 1
        if (nearest < 0).any() or (addresses + num_bytes > self._ends[nearest]).any():
            raise PtxFault("an access lies outside of all tensors")
        self.num_moved += addresses.size * num_bytes
        return (addresses - self._first)[:, None] + np.arange(num_bytes)


class SharedMemory:
    """The shared memory of one block, which knows what was written.

    Args:
        num_bytes: its size.
    """

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.zeros(num_bytes, np.uint8)
        self._is_written = np.zeros(num_bytes, bool)
        self._open: list[tuple[np.ndarray, np.ndarray]] = []
        self._groups: list[list[tuple[np.ndarray, np.ndarray]]] = []

    def read(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        """Return the bytes `[n, num_bytes]` at each address."""
        places = self._places(addresses, num_bytes)
        if not self._is_written[places].all():
            raise PtxFault("shared memory is read that was not written, or whose copy was not waited for")
        return self.bytes[places]

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Write the bytes `[n, num_bytes]` at each address."""
        places = self._places(addresses, values.shape[1])
        self.bytes[places] = values
        self._is_written[places] = True

    def begin_copy(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Begin to copy bytes, which arrive with the wait for their group."""
        places = self._places(addresses, values.shape[1])
        self._is_written[places] = False
        self._open.append((places, values))

    def close_group(self) -> None:
        """Let the copies begun since the last group be a group."""
        self._groups.append(self._open)
        self._open = []

    def wait(self, most_in_flight: int) -> None:
        """Let groups arrive until at most that many are in flight."""
        while len(self._groups) > most_in_flight:
            for places, values in self._groups.pop(0):
                self.bytes[places] = values
                self._is_written[places] = True

    def _places(self, addresses: np.ndarray, num_bytes: int) -> np.ndarray:
        places = addresses[:, None] + np.arange(num_bytes)
        if places.size and (places.min() < 0 or places.max() >= len(self.bytes)):
            raise PtxFault("an access lies outside of shared memory")
        return places


# ------------------------------------------------------------------ numbers


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(values: np.ndarray) -> Bits:
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded & 0xFFFF).astype(np.uint64)


def _to_f32(bits: Bits) -> np.ndarray:
    return (bits & LOW_32).astype(np.uint32).view(np.float32)


def _half(bits: Bits, which: int, kind: str) -> np.ndarray:
    """Return the lower (0) or the upper half (1) of 32 bits as float64."""
    half = ((bits >> np.uint64(16 * which)) & LOW_16).astype(np.uint16)
    return (_from_bf16(half) if kind == "bf16" else half.view(np.float16)).astype(np.float64)


def _typed(bits: Bits, kind: str) -> np.ndarray:
    """Return the values of registers of one of PTX's types."""
    if kind == "f32":
        return _to_f32(bits)
    if kind == "pred":
        return bits.astype(bool)
    if kind == "bf16":
        return _from_bf16(bits & LOW_16)
    width, is_signed = int(kind[1:]), kind[0] == "s"
    if width == 64:
        return bits.view(np.int64) if is_signed else bits
    low = bits & np.uint64(2**width - 1)
    return low.astype(f"uint{width}").view(f"int{width}").astype(np.int64) if is_signed else low


def _bits(values: np.ndarray, kind: str) -> Bits:
    """Return values of one of PTX's types as the bits of registers."""
    values = np.asarray(values)
    if kind == "f32":
        return values.astype(np.float32).view(np.uint32).astype(np.uint64)
    if kind == "pred":
        return values.astype(bool)
    if kind == "bf16":
        return _to_bf16(values)
    bits = values if values.dtype == np.uint64 else values.astype(np.int64).view(np.uint64)
    return bits if kind.endswith("64") else bits & np.uint64(2 ** int(kind[1:]) - 1)


_FLOAT_OPS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32),
    "neg": np.negative,
    "abs": np.abs,
    "max": np.fmax,
    "min": np.fmin,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: np.reciprocal(np.sqrt(x)),
}
_INTEGER_OPS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "div": lambda a, b: np.trunc(a / b).astype(np.int64),
    "rem": np.fmod,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
}
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
_COMPARISONS: dict[str, Callable[..., np.ndarray]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _compare(name: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind != "f":
        return _COMPARISONS[name](left, right)
    is_nan = np.isnan(left) | np.isnan(right)
    if name in ("nan", "num"):
        return is_nan if name == "nan" else ~is_nan
    is_unordered = name.endswith("u")
    holds = _COMPARISONS[name.removesuffix("u") if is_unordered else name](left, right)
    return holds | is_nan if is_unordered else holds & ~is_nan


# ------------------------------------------------------------------ a block of threads


class Block:
    """One thread block: its registers and its shared memory.

    Args:
        program: what it runs.
        memory: the tensors that it may touch.
        arguments: bits of the kernel's arguments.
        position: of the block in the grid.
        shared_bytes: size of its shared memory.
    """

    def __init__(
        self, program: Program, memory: LiveTensors, arguments: list[int], position: tuple[int, ...], shared_bytes: int
    ) -> None:
        self._program, self._memory = program, memory
        self._arguments = np.array([argument % 2**64 for argument in arguments], np.uint64)
        self._shared = SharedMemory(shared_bytes)
        self._num_threads = program.threads
        self._registers: dict[str, np.ndarray] = {"%tid.x": np.arange(self._num_threads, dtype=np.uint64)}
        for axis, index in zip("xyz", position, strict=True):
            self._registers[f"%ctaid.{axis}"] = np.full(self._num_threads, index, np.uint64)
        self._everywhere = np.ones(self._num_threads, bool)

    def run(self) -> None:
        """Run to the end.

        Raises:
            PtxFault: with the instruction that went wrong.
        """
        program, index = self._program, 0
        with np.errstate(all="ignore"):
            while index < len(program.instructions):
                one = program.instructions[index]
                index += 1
                mask = self._everywhere
                if one.guard is not None:
                    mask = self._value(one.guard).astype(bool) ^ one.negated
                if one.parts[0] in ("bra", "ret"):
                    if mask.any() and not mask.all():
                        raise PtxFault(f"a branch is not uniform within a block: {one.text}")
                    if mask.all():
                        index = program.labels[one.operands[0]] if one.parts[0] == "bra" else len(program.instructions)
                    continue
                try:
                    self._run(one, mask)
                except PtxFault as fault:
                    raise PtxFault(f"{fault}: {one.text}") from None

    def _run(self, one: Instruction, mask: np.ndarray) -> None:
        name, kind = one.parts[0], one.parts[-1]
        if name in ("ld", "st", "cp", "ldmatrix", "stmatrix"):
            self._move_memory(one, mask)
        elif name == "mma":
            self._mma(one)
        elif one.parts[:2] == ("wgmma", "mma_async"):
            self._wgmma(one)
        elif name in ("wgmma", "fence", "bar", "barrier", "membar"):
            pass
        elif name == "mov" and isinstance(one.operands[0], tuple):  # one register into several
            bits, parts = self._value(one.operands[1]), one.operands[0]
            width = int(kind[1:]) // len(parts)
            for place, part in enumerate(parts):
                self._put(part, (bits >> np.uint64(place * width)) & np.uint64(2**width - 1), f"b{width}", mask)
        elif name == "mov" and isinstance(one.operands[1], tuple):  # several into one
            parts = one.operands[1]
            width = np.uint64(int(kind[1:]) // len(parts))
            low = np.uint64(2 ** int(width) - 1)
            bits = [(self._value(part) & low) << (np.uint64(place) * width) for place, part in enumerate(parts)]
            self._put(one.operands[0], np.bitwise_or.reduce(bits), kind, mask)
        elif name == "shfl":
            assert one.parts[2] in ("bfly", "idx"), one.text
            lanes, lane = np.arange(self._num_threads), int(one.operands[2])
            partner = lanes // WARP * WARP + (lanes % WARP ^ lane if one.parts[2] == "bfly" else lane)
            self._put(one.operands[0], self._value(one.operands[1])[partner], "b32", mask)
        else:
            self._put(one.operands[0], self._computed(one), self._result_kind(one), mask)

    @staticmethod
    def _result_kind(one: Instruction) -> str:
        name, kind = one.parts[0], one.parts[-1]
        if name == "cvt":
            return {"bf16x2": "b32"}.get(one.parts[-2], one.parts[-2])
        if name == "setp":
            return "pred"
        return kind[0] + "64" if "wide" in one.parts else kind

    def _computed(self, one: Instruction) -> np.ndarray:
        """Return the values that an instruction computes from registers."""
        name, kind = one.parts[0], one.parts[-1]
        sources = one.operands[1:]
        bits = [self._value(source) for source in sources]
        if name == "mov":
            return _typed(bits[0], kind)
        if name == "selp":
            return np.where(bits[2].astype(bool), _typed(bits[0], kind), _typed(bits[1], kind))
        if name == "setp":
            return _compare(one.parts[1], _typed(bits[0], kind), _typed(bits[1], kind))
        if name in _LOGIC:
            return _LOGIC[name](*(_typed(one_bits, kind) for one_bits in bits))
        if name in ("shl", "shr"):
            width = int(kind[1:])
            count = np.minimum(bits[1] & LOW_32, np.uint64(63))
            value = _typed(bits[0], kind)
            if name == "shr" and kind[0] == "s":
                return value >> np.minimum(count, np.uint64(width - 1)).astype(np.int64)
            moved = value << count if name == "shl" else value >> count
            return np.where(count >= width, np.uint64(0), moved)
        if name == "bfe":
            first, count = int(sources[1]), int(sources[2])
            field = (_typed(bits[0], kind).astype(np.int64) >> first) & (2**count - 1)
            is_negative = kind[0] == "s" and (field >> (count - 1)) & 1
            return np.where(is_negative, field - 2**count, field)
        if name == "prmt":
            both = (bits[0] & LOW_32) | ((bits[1] & LOW_32) << np.uint64(32))
            chosen = [(int(sources[2]) >> (4 * place)) & 7 for place in range(4)]
            found = [
                ((both >> np.uint64(8 * byte)) & np.uint64(0xFF)) << np.uint64(8 * place)
                for place, byte in enumerate(chosen)
            ]
            return np.bitwise_or.reduce(found)
        if name == "cvt":
            return self._converted(one, bits)
        if name not in (_FLOAT_OPS if kind in ("f32", "bf16") else _INTEGER_OPS):
            raise PtxFault("the machine does not know this opcode")
        if kind in ("f32", "bf16"):
            return _FLOAT_OPS[name](*(_typed(one_bits, kind) for one_bits in bits))
        if "hi" in one.parts:
            assert kind == "u32", one.text
            upper = ((bits[0] & LOW_32) * (bits[1] & LOW_32)) >> np.uint64(32)
            return upper + (bits[2] & LOW_32) if name == "mad" else upper
        values = [_typed(one_bits, kind).astype(np.int64) for one_bits in bits]
        if "wide" in one.parts and name == "mad":
            values[2] = bits[2].view(np.int64)
        return _INTEGER_OPS[name](*values)

    @staticmethod
    def _converted(one: Instruction, bits: list[Bits]) -> np.ndarray:
        """Return values in the type that a conversion asks for."""
        wanted, given = one.parts[-2], one.parts[-1]
        if wanted == "bf16x2":
            return (_to_bf16(_to_f32(bits[0])) << np.uint64(16)) | _to_bf16(_to_f32(bits[1]))
        values = _typed(bits[0], given)
        if given == "f32" and wanted not in ("bf16", "f32"):
            return np.trunc(values).astype(np.int64)
        return values

    # -------------------------------------------------------------- registers

    def _value(self, operand: Any) -> np.ndarray:
        """Return the bits of a register or a constant in all threads."""
        if isinstance(operand, np.uint64):
            return np.full(self._num_threads, operand)
        found = self._registers.get(operand)
        return np.full(self._num_threads, UNWRITTEN) if found is None else found

    def _put(self, register: str, values: np.ndarray, kind: str, mask: np.ndarray) -> None:
        bits = np.broadcast_to(_bits(values, kind), (self._num_threads,))
        self._registers[register] = bits.copy() if mask.all() else np.where(mask, bits, self._value(register))

    def _addresses(self, address: Address) -> np.ndarray:
        base = np.uint64(0) if address.base == "global_smem" else address.base
        return self._value(base).view(np.int64) + address.offset

    # -------------------------------------------------------------- memory

    def _move_memory(self, one: Instruction, mask: np.ndarray) -> None:
        parts = one.parts
        if parts[:2] == ("ld", "param"):
            number = int(_search(r"_param_(\d+)", one.text))
            self._put(one.operands[0], np.full(self._num_threads, self._arguments[number]), parts[-1], mask)
        elif parts[0] in ("ld", "st"):
            self._load_or_store(one, mask)
        elif parts[:3] == ("cp", "async", "commit_group"):
            self._shared.close_group()
        elif parts[:3] == ("cp", "async", "wait_group"):
            self._shared.wait(int(one.operands[0]))
        elif parts[:2] == ("cp", "async"):
            self._copy(one, mask)
        else:
            self._move_matrices(one)

    def _load_or_store(self, one: Instruction, mask: np.ndarray) -> None:
        is_load, width = one.parts[0] == "ld", int(one.parts[-1][1:]) // 8
        registers, address = one.operands if is_load else one.operands[::-1]
        registers = registers if isinstance(registers, tuple) else (registers,)
        if not mask.any():
            return
        dtype, num_bytes = f"uint{8 * width}", width * len(registers)
        addresses, is_global = self._addresses(address)[mask], "global" in one.parts
        if not is_load:
            values = np.stack([self._value(register)[mask].astype(dtype) for register in registers], 1)
            values = np.ascontiguousarray(values).view(np.uint8)
            if is_global:
                self._memory.bytes[self._memory.places(addresses, num_bytes)] = values
            else:
                self._shared.write(addresses, values)
            return
        if is_global:
            found = self._memory.bytes[self._memory.places(addresses, num_bytes)]
        else:
            found = self._shared.read(addresses, num_bytes)
        for register, values in zip(registers, found.view(dtype).T, strict=True):
            bits = np.zeros(self._num_threads, np.uint64)
            bits[mask] = values
            self._put(register, bits, f"b{8 * width}", mask)

    def _copy(self, one: Instruction, mask: np.ndarray) -> None:
        """Begin an asynchronous copy; bytes beyond its source size arrive as zeros."""
        num_bytes = int(one.operands[2])
        sizes = self._value(one.operands[3]) if len(one.operands) > 3 else np.full(self._num_threads, num_bytes)
        if not mask.any():
            return
        if not np.isin(sizes[mask], (0, num_bytes)).all():
            raise PtxFault("the machine knows copies of all bytes or of none")
        values = np.zeros((self._num_threads, num_bytes), np.uint8)
        from_memory = mask & (sizes > 0)
        sources = self._addresses(one.operands[1])[from_memory]
        if len(sources):
            values[from_memory] = self._memory.bytes[self._memory.places(sources, num_bytes)]
        self._shared.begin_copy(self._addresses(one.operands[0])[mask], values[mask])

    def _move_matrices(self, one: Instruction) -> None:
        """Load or store 8x8 matrices of 16 bits: eight lanes hold addresses of rows, each lane holds two elements."""
        is_load = one.parts[0] == "ldmatrix"
        registers, address = one.operands if is_load else one.operands[::-1]
        addresses, lane = self._addresses(address), np.arange(WARP)
        places = (lane // 4, lane % 4 * 2)
        loaded = {register: np.zeros(self._num_threads, np.uint64) for register in registers}
        for first in range(0, self._num_threads, WARP):
            for number, register in enumerate(registers):
                rows = addresses[first + 8 * number : first + 8 * number + 8]
                if is_load:
                    matrix = self._shared.read(rows, 16).view(np.uint16)
                    matrix = matrix.T if "trans" in one.parts else matrix
                    low, high = matrix[places], matrix[places[0], places[1] + 1]
                    bits = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(16))
                    loaded[register][first : first + WARP] = bits
                else:
                    bits, matrix = self._value(register)[first : first + WARP], np.zeros((8, 8), np.uint16)
                    matrix[places] = bits & LOW_16
                    matrix[places[0], places[1] + 1] = (bits >> np.uint64(16)) & LOW_16
                    matrix = matrix.T if "trans" in one.parts else matrix
                    self._shared.write(rows, np.ascontiguousarray(matrix).view(np.uint8))
        if is_load:
            self._registers.update(loaded)

    # -------------------------------------------------------------- tensor cores

    def _mma(self, one: Instruction) -> None:
        """Multiply and add `[16, 16] @ [16, 8]` in each warp (PTX ISA, fragments of mma.m16n8k16)."""
        if one.parts[3] != "m16n8k16":
            raise PtxFault("the machine does not know this shape of mma")
        kind = one.parts[-2]
        sums, left, right, before = one.operands
        lane = np.arange(WARP)
        group, quad = lane // 4, lane % 4
        out = {register: np.zeros(self._num_threads, np.uint64) for register in sums}
        for first in range(0, self._num_threads, WARP):
            warp = slice(first, first + WARP)
            A, B, C = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
            for number, register in enumerate(left):
                rows, columns = group + 8 * (number % 2), 2 * quad + 8 * (number // 2)
                for half in (0, 1):
                    A[rows, columns + half] = _half(self._value(register)[warp], half, kind)
            for number, register in enumerate(right):
                for half in (0, 1):
                    B[2 * quad + 8 * number + half, group] = _half(self._value(register)[warp], half, kind)
            for number, register in enumerate(before):
                C[group + 8 * (number // 2), 2 * quad + number % 2] = _to_f32(self._value(register)[warp])
            result = (A @ B + C).astype(np.float32)
            for number, register in enumerate(sums):
                out[register][warp] = _bits(result[group + 8 * (number // 2), 2 * quad + number % 2], "f32")
        self._registers.update(out)

    def _wgmma(self, one: Instruction) -> None:
        """Multiply and add `[64, 16] @ [16, N]` in a warp group (PTX ISA, wgmma.mma_async.m64nNk16)."""
        if self._num_threads % GROUP or one.parts[-1] != "bf16":
            raise PtxFault("the machine knows wgmma of whole warp groups, in bf16")
        width = int(_search(r"n(\d+)k16", one.text))
        sums, left, right, with_sums = one.operands[:4]
        lane = np.arange(GROUP)
        row, quad = 16 * (lane // WARP) + lane % WARP // 4, lane % 4
        places = [
            (row + 8 * (number // 2 % 2), 8 * (number // 4) + 2 * quad + number % 2) for number in range(len(sums))
        ]
        out = {register: np.zeros(self._num_threads, np.uint64) for register in sums}
        for first in range(0, self._num_threads, GROUP):
            group = slice(first, first + GROUP)
            if isinstance(left, tuple):
                A = np.zeros((64, 16))
                for number, register in enumerate(left):
                    for half in (0, 1):
                        columns = 2 * quad + 8 * (number // 2) + half
                        A[row + 8 * (number % 2), columns] = _half(self._value(register)[group], half, "bf16")
            else:
                A = self._matrix(int(self._value(left)[first]), 64, is_transposed=bool(one.operands[-2]))
            B = self._matrix(int(self._value(right)[first]), width, is_transposed=bool(one.operands[-1]))
            C = np.zeros((64, width))
            if self._value(with_sums)[first]:
                for place, register in zip(places, sums, strict=True):
                    C[place] = _to_f32(self._value(register)[group])
            result = (C + A @ B.T).astype(np.float32)
            for place, register in zip(places, sums, strict=True):
                out[register][group] = _bits(result[place], "f32")
        self._registers.update(out)

    def _matrix(self, descriptor: int, num_rows: int, *, is_transposed: bool) -> np.ndarray:
        """Return the matrix `[num_rows, 16]` in shared memory that a descriptor of wgmma names, without its swizzle."""
        start, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
        width = {1: 128, 2: 64, 3: 32}[(descriptor >> 62) & 3]
        row, column = np.meshgrid(np.arange(num_rows), np.arange(16), indexing="ij")
        if is_transposed:
            per = width // 2
            offset = row // per * leading + row % per * 2 + column // 8 * stride + column % 8 * width
        else:
            offset = row // 8 * stride + row % 8 * width + column * 2
        address = start + offset
        address ^= ((address >> 7) & {128: 7, 64: 3, 32: 1}[width]) << 4
        bits = self._shared.read(address.reshape(-1), 2).view(np.uint16)
        return _from_bf16(bits.reshape(num_rows, 16)).astype(np.float64)
