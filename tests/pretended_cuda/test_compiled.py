"""What training launches compiles for the cards that people have: no spill, no stack, within their shared memory.

The signatures are those of whole steps of models of real widths, collected on the pretended device under each card's
name, as tiles follow from it.

As a script, `test_compiled.py FOLDER SIGNATURES.json`: compiles pairs of a compute capability (90 for 9.0) and a
signature as Triton would at a first launch, and prints JSON.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels.compiling import compiled, listing, run_compiling, usage_of
from tests.pretended_cuda.checks import seen_of

Found = dict[str, dict[str, Any]]


class Card(NamedTuple):
    name: str
    capability: tuple[int, int]
    shared_kib: int


CARDS = {
    80: Card("NVIDIA A100-SXM4-80GB", (8, 0), 163),
    86: Card("NVIDIA A10", (8, 6), 99),
    89: Card("NVIDIA L4", (8, 9), 99),
    90: Card("NVIDIA H100 80GB HBM3", (9, 0), 227),
    100: Card("NVIDIA B200", (10, 0), 227),
}
FORMS: dict[str, dict[str, Any]] = {
    "llama 8B": {"architecture": "llama 8B", "dtype": "fp32", "autocast": True},
    "llama 8B, long passes": {"architecture": "llama 8B", "num_rows": 8},
    "llama 8B, long passes in fp32": {"architecture": "llama 8B", "dtype": "fp32", "num_rows": 8},
    "qwen2 7B": {"architecture": "qwen2 7B", "dtype": "bf16", "captured": True},
    "gemma2 9B": {"architecture": "gemma2 9B", "dtype": "fp16"},
    "llama 8B with bottlenecks": {"architecture": "llama 8B", "has_bottlenecks": True},
    "bottlenecks in fp32": {"architecture": "llama 8B", "dtype": "fp32", "has_bottlenecks": True},
    "short rows": {"architecture": "llama 8B", "has_short_rows": True},
    "llama 8B in fp32": {"architecture": "llama 8B", "dtype": "fp32", "adapts_head": True},
}
OF_LORA = {"shrink_kernel", "expand_kernel", "wgrad_kernel", "reduce_kernel"}


# ------------------------------------------------------------------ what the child computes


def main(folder: Path, pairs: list[tuple[int, list[Any]]]) -> None:
    """Print what each signature takes, and how often some instructions occur."""
    from tests.pretended_cuda.launches import Argument, compilation_of

    found = []
    for number, (capability, (module, name, listed, options)) in enumerate(pairs):
        kernel = getattr(importlib.import_module(module), name)
        wanted = compilation_of(kernel, [Argument(*argument) for argument in listed], dict(options))
        cubin = folder / f"{number}.cubin"
        usage = usage_of(compiled(wanted, capability), cubin)
        code = listing(cubin)
        usage["local accesses"] = len(re.findall(r"\b(?:LDL|STL)\b", code))
        usage["atomics"] = len(re.findall(r"\b(?:RED|ATOM|ATOMG)\b", code))
        usage["products of warp groups"] = len(re.findall(r"\bHGMMA\b", code))
        usage["wide accesses"] = len(re.findall(r"(?:LDG|STG)\.E\S*\.128", code))
        usage["multiplications"] = len(re.findall(r"\bIMAD\.(?:WIDE|HI)\.U32\b", code))
        found.append(usage)
    print(json.dumps(found))


# ------------------------------------------------------------------ the tests


class Variant(NamedTuple):
    """A kernel, its constants, the types of its pointers, and what its code takes on a card."""

    card: int
    kernel: str
    constants: dict[str, Any]
    types: set[str]
    usage: dict[str, int]


def variants(
    cards: list[int], forms: list[str], run_cases: Callable[..., Found], folder: Path, widths: set[int] | None = None
) -> list[Variant]:
    """Return every kernel that training launches, or those of some widths, compiled for some cards."""
    where = {number: {"name": CARDS[number].name, "capability": CARDS[number].capability} for number in cards}
    found = run_cases({f"{number} {form}": {**FORMS[form], **where[number]} for number in cards for form in forms})
    pairs: dict[str, tuple[int, Any]] = {}
    for number in cards:
        signatures = [item for form in forms for item in seen_of(found, f"{number} {form}")["signatures"]]
        assert {item[1] for item in signatures} > OF_LORA
        pairs |= {json.dumps((number, item)): (number, item) for item in signatures}
    if widths is not None:
        pairs = {
            text: (number, signature)
            for text, (number, signature) in pairs.items()
            if all(value in widths for name, _, value in signature[2] if name in ("D", "K"))
        }
    written = folder / "signatures.json"
    written.write_text(json.dumps(list(pairs.values())))
    made = []
    usages = run_compiling(__file__, folder, str(written), timeout_s=1800)
    for (number, (_, kernel, arguments, _)), usage in zip(pairs.values(), usages, strict=True):
        constants = {name: value for name, kind, value in arguments if kind == "constexpr"}
        made.append(Variant(number, kernel, constants, {kind for _, kind, _ in arguments}, usage))
    return made


def assert_lean(one: Variant) -> None:
    usage, card = one.usage, CARDS[one.card]
    assert (usage["stack"], usage["local"], usage["local accesses"]) == (0, 0, 0), one
    assert usage["shared"] <= card.shared_kib * 1024, one
    assert usage["atomics"] == 0, one


@pytest.mark.slow
@pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
def test_launches_of_one_width_compile_for_the_oldest_and_the_newest_card(
    run_cases: Callable[..., Found], tmp_path: Path
) -> None:
    forms = ["llama 8B", "llama 8B, long passes", "short rows"]
    made = variants([80, 100], forms, run_cases, tmp_path, widths={4096})
    assert {one.kernel for one in made} > OF_LORA | {"attention_forward_kernel", "attention_backward_kernel"}
    assert {one.constants["ROWS"] for one in made if one.kernel == "shrink_kernel"} == {16, 64}
    for one in made:
        assert_lean(one)


@pytest.mark.nightly
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("card", CARDS)
def test_every_launch_of_training_compiles_for_a_card(
    run_cases: Callable[..., Found], tmp_path: Path, card: int
) -> None:
    made = variants([card], list(FORMS), run_cases, tmp_path)
    for one in made:
        assert_lean(one)
    if card == 90:
        assert_made_for_hopper(made)


def assert_made_for_hopper(made: list[Variant]) -> None:
    """Hold code to the tensor cores of a warp group, wide accesses, and one call of the generator for eight columns."""
    multiplications: dict[str, dict[bool, int]] = {"shrink_kernel": {}, "wgrad_kernel": {}}  # for a class of ranks
    for one in made:
        if one.kernel == "_cross_entropy_kernel":
            assert one.usage["registers"] <= 64, "two programs of 512 threads fit on a multiprocessor"
        elif one.kernel.startswith(("shrink", "expand", "wgrad", "attention")) and one.types & {"*bf16", "*fp16"}:
            assert one.usage["products of warp groups"] > 0, one
        if one.kernel != "trial_kernel":
            assert one.usage["wide accesses"] > 0, one
        if one.kernel in multiplications and one.constants["D"] == 4096 and "*bf16" in one.types:
            num_classes = sum(one.constants[stages] > 0 for stages in ("NARROW_STAGES", "WIDE_STAGES"))
            multiplications[one.kernel][one.constants["DROP"]] = one.usage["multiplications"] // num_classes
    for counts in multiplications.values():
        # A thread masks 64 elements: 8 calls of 7 rounds of 2 wide products, less the first round of a counter that is
        # mostly zeros. In the layout of a product it would be four times as many.
        assert 60 <= counts[True] - counts[False] <= 240, counts


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
