"""What training launches compiles for the cards that people have: no spill, no stack, within their shared memory.

The signatures are those of whole steps of models of real widths, collected on the pretended device under each card's
name, as tiles follow from it.

As a script, `test_compiled.py FOLDER SIGNATURES.json`: compiles pairs of a compute capability (90 for 9.0) and a
signature as Triton would at a first launch, and prints JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.kernels.compiling import compiled, run_compiling, usage_of
from tests.pretended_cuda.checks import seen_of

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


def main(folder: Path, pairs: list[tuple[int, list[Any]]]) -> None:
    """Print what each signature takes."""
    from tests.pretended_cuda.launches import Argument, compilation_of

    found = []
    for number, (capability, (module, name, listed, options)) in enumerate(pairs):
        kernel = getattr(importlib.import_module(module), name)
        wanted = compilation_of(kernel, [Argument(*argument) for argument in listed], dict(options))
        found.append(usage_of(compiled(wanted, capability), folder / f"{number}.cubin"))
    print(json.dumps(found))


# ------------------------------------------------------------------ the tests


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
    written = tmp_path / "signatures.json"
    written.write_text(json.dumps([(number, signature) for signature in signatures]))
    for usage in run_compiling(__file__, tmp_path, str(written), timeout_s=1800):
        assert_lean(usage, CARDS[number])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
