"""Kernels compiled by Triton for GPUs that need not be here, and what the machine code takes.

Triton brings the assembler and the tool that reads its output. Only for processes in which Triton does not interpret.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.children import run_script

_HEADER = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)")


def run_compiling(script: str | Path, folder: Path, *arguments: str, timeout_s: float = 280.0) -> Any:
    """Run a script that compiles into a folder, and return the JSON that it prints; skip without Triton's tools."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    missing = [name for name in ("ptxas", "cuobjdump") if not os.access(_tool(name), os.X_OK)]
    if missing:
        pytest.skip(f"triton comes without {', '.join(missing)}")
    options = {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    return json.loads(run_script(script, str(folder), *arguments, timeout_s=timeout_s, **options))


class Compilation(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        kernel: a function of `triton.jit`.
        types: Triton's names of the types of its arguments, except constants.
        constants: arguments that are constants.
        aligned: names of the arguments that 16 divides.
        options: of the launch.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: Collection[str]
    options: Mapping[str, Any]


def compiled(wanted: Compilation, capability: int = 90) -> Any:
    """Compile a kernel as Triton would at a first launch on a card of a capability, 90 for 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, types, constants, aligned, options = wanted
    names = list(kernel.arg_names)
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))


def usage_of(found: Any, cubin: Path) -> dict[str, int]:
    """Write machine code and return what it takes: registers, stack, local and shared memory."""
    cubin.write_bytes(found.asm["cubin"])
    usage = _HEADER.search(_dump("--dump-resource-usage", cubin))
    assert usage is not None
    registers, stack, local = map(int, usage.groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": found.metadata.shared}


def listing(cubin: Path) -> str:
    """Return the machine code in words."""
    return _dump("--dump-sass", cubin)


def _dump(what: str, cubin: Path) -> str:
    done = subprocess.run([_tool("cuobjdump"), what, str(cubin)], capture_output=True, text=True, check=True)
    return done.stdout


def _tool(name: str) -> str:
    spec = importlib.util.find_spec("triton")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name)
