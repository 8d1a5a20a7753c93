"""The library of the pretended device, built once a session, and cases run with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_script
from tests.pretended_cuda import library

Found = dict[str, dict[str, Any]]
_CASES = Path(__file__).with_name("cases.py")


@pytest.fixture(scope="session")
def pretended_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the library of the pretended device; without a compiler its tests are skipped."""
    reason = library.reason_against()
    if reason is not None:
        pytest.skip(reason)
    return library.build(tmp_path_factory.mktemp("pretended_cuda"))


@pytest.fixture(scope="session")
def run_cases(pretended_cuda: Path) -> Callable[[dict[str, dict[str, Any]]], Found]:
    """Return what runs cases in a process of their own, and gives back what was seen of each."""

    def run(cases: dict[str, dict[str, Any]]) -> Found:
        printed = run_script(_CASES, str(pretended_cuda), json.dumps(cases), timeout_s=900, TRITON_INTERPRET="0")
        return json.loads(printed.splitlines()[-1])

    return run
