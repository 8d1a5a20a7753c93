"""Compiles launch signatures for a card that is not here, as Triton would at their first launch; prints JSON.

In a process of its own: `python tests/pretended_cuda/compiled.py SIGNATURES.json FOLDER`, where the file holds pairs
of a compute capability (90 for 9.0) and a signature (`launches.Signature`).
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernels.lora.test_compile import HEADER, dump
from tests.pretended_cuda.launches import Argument, Signature


def main(pairs: list[tuple[int, list[Any]]], folder: Path) -> None:
    """Print what each signature takes."""
    found = []
    for number, (capability, (module, kernel, arguments, options)) in enumerate(pairs):
        signature = Signature(module, kernel, tuple(Argument(*argument) for argument in arguments), tuple(options))
        found.append({"kernel": kernel, **_usage(signature, capability, folder / f"{number}.cubin")})
    print(json.dumps(found))


def _usage(signature: Signature, capability: int, cubin: Path) -> dict[str, Any]:
    compiled = triton.compile(
        _source(signature), target=GPUTarget("cuda", capability, 32), options=dict(signature.options)
    )
    cubin.write_bytes(compiled.asm["cubin"])
    usage = HEADER.search(dump("--dump-resource-usage", cubin))
    assert usage is not None
    registers, stack, local = map(int, usage.groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared}


def _source(signature: Signature) -> ASTSource:
    function = getattr(importlib.import_module(signature.module), signature.kernel)
    arguments = list(enumerate(signature.arguments))
    return ASTSource(
        fn=function,
        signature={argument.name: argument.type for _, argument in arguments},
        constexprs={(index,): _constant(argument) for index, argument in arguments if argument.type == "constexpr"},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, argument in arguments
            if argument.type != "constexpr" and argument.value == 16
        },
    )


def _constant(argument: Argument) -> Any:
    if isinstance(argument.value, str) and argument.value.startswith("dtype "):
        return tl.str_to_ty(argument.value.removeprefix("dtype "), None)
    return argument.value


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
