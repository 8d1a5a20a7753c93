"""Ten architectures train on the pretended device: nothing waits, attention is what it should be, kernels are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import assert_as_promised, seen_of
from tests.pretended_cuda.conftest import Found

pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
NAMES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gpt2", "opt", "bert")
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "fp32 under autocast": {"dtype": "fp32", "autocast": True},
    "checkpointing": {"dtype": "bf16", "checkpointing": True},
}


@pytest.fixture(scope="module", params=FORMS)
def slow(request: pytest.FixtureRequest, run_cases: Callable[..., Found]) -> tuple[str, Found]:
    return request.param, run_cases({name: {"architecture": name, **FORMS[request.param]} for name in NAMES})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_trains_in_every_form(slow: tuple[str, Found], name: str) -> None:
    form, found = slow
    assert_as_promised(seen_of(found, name), name, form)
