"""What training launches compiles for the cards that people have: no spill, no stack, within their shared memory.

The signatures are those of whole steps of models of real widths, collected on the pretended device under each card's
name, as tiles follow from it.

As a script, `test_compiled.py SIGNATURES.json FOLDER`: compiles pairs of a compute capability (90 for 9.0) and a
signature as Triton would at a first launch, and prints JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.children import run_script
from tests.kernels.lora.test_compile import HEADER, dump, tool
from tests.pretended_cuda.checks import seen_of

if TYPE_CHECKING:
    from tests.pretended_cuda.launches import Argument, Signature

Found = dict[str, dict[str, Any]]


pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer


class Card(NamedTuple):
    name: str
    capability: tuple[int, int]
    shared_kib: int

    @property
    def number(self) -> int:
        return 10 * self.capability[0] + self.capability[1]


CARDS = {
    card.number: card
    for card in (
        Card("NVIDIA A100-SXM4-80GB", (8, 0), 163),
        Card("NVIDIA A10", (8, 6), 99),
        Card("NVIDIA L4", (8, 9), 99),
        Card("NVIDIA H100 80GB HBM3", (9, 0), 227),
        Card("NVIDIA B200", (10, 0), 227),
    )
}
FORMS: dict[str, dict[str, Any]] = {
    "llama 8B": {"architecture": "llama 8B", "dtype": "fp32", "autocast": True},
    "qwen2 7B": {"architecture": "qwen2 7B", "dtype": "bf16", "captured": True},
    "gemma2 9B": {"architecture": "gemma2 9B", "dtype": "fp16"},
    "llama 8B with bottlenecks": {"architecture": "llama 8B", "has_bottlenecks": True},
    "bottlenecks in fp32": {"architecture": "llama 8B", "dtype": "fp32", "has_bottlenecks": True},
    "llama 8B in fp32": {"architecture": "llama 8B", "dtype": "fp32", "adapts_head": True},
}


# ------------------------------------------------------------------ what the child computes


def main(pairs: list[tuple[int, list[Any]]], folder: Path) -> None:
    """Print what each signature takes."""
    from tests.pretended_cuda.launches import Argument, Signature

    found = []
    for number, (capability, (module, kernel, arguments, options)) in enumerate(pairs):
        signature = Signature(module, kernel, tuple(Argument(*argument) for argument in arguments), tuple(options))
        found.append({"kernel": kernel, **_usage(signature, capability, folder / f"{number}.cubin")})
    print(json.dumps(found))


def _usage(signature: Signature, capability: int, cubin: Path) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(_source(signature), target=target, options=dict(signature.options))
    cubin.write_bytes(compiled.asm["cubin"])
    usage = HEADER.search(dump("--dump-resource-usage", cubin))
    assert usage is not None
    registers, stack, local = map(int, usage.groups())
    return {"registers": registers, "stack": stack, "local": local, "shared": compiled.metadata.shared}


def _source(signature: Signature) -> Any:
    from triton.compiler import ASTSource

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
    import triton.language as tl

    if isinstance(argument.value, str) and argument.value.startswith("dtype "):
        return tl.str_to_ty(argument.value.removeprefix("dtype "), None)
    return argument.value


# ------------------------------------------------------------------ the tests


def compiled(folder: Path, pairs: list[tuple[int, Any]]) -> list[dict[str, Any]]:
    """Compile signatures for cards in a process of its own."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    missing = [name for name in ("ptxas", "cuobjdump") if not os.access(tool(name), os.X_OK)]
    if missing:
        pytest.skip(f"triton comes without {', '.join(missing)}")
    written = folder / "signatures.json"
    written.write_text(json.dumps(pairs))
    options = {"TRITON_CACHE_DIR": str(folder / "cache"), "TRITON_INTERPRET": "0"}
    return json.loads(run_script(__file__, str(written), str(folder), timeout_s=1800, **options))


def assert_lean(usage: dict[str, Any], card: Card) -> None:
    assert (usage["stack"], usage["local"]) == (0, 0), (card.name, usage)
    assert usage["shared"] <= card.shared_kib * 1024, (card.name, usage)


def signatures_on(card: Card, forms: list[str], run_cases: Callable[..., Found]) -> list[Any]:
    where = {"name": card.name, "capability": card.capability}
    found = run_cases({form: {**FORMS[form], **where} for form in forms})
    by_text = {json.dumps(item): item for form in forms for item in seen_of(found, form)["signatures"]}
    assert len(by_text) > 10
    return list(by_text.values())


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("number", CARDS)
def test_every_launch_of_training_compiles_for_a_card(
    run_cases: Callable[..., Found], tmp_path: Path, number: int
) -> None:
    signatures = signatures_on(CARDS[number], list(FORMS), run_cases)
    assert {"shrink_kernel", "expand_kernel", "wgrad_kernel", "reduce_kernel"} < {item[1] for item in signatures}
    for usage in compiled(tmp_path, [(number, signature) for signature in signatures]):
        assert_lean(usage, CARDS[number])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
