"""Fixtures of the invariant tests; helpers live in `mux_lab.py` and `mux_checks.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Fix the number of threads: it takes part in the order of sums, and so in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
