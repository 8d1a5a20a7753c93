"""Programs find the tensors of a test among the objects that the garbage collector follows."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def leave_out_objects_of_earlier_tests() -> None:
    """Keep the search, done for each launch, short in a process that has run other tests."""
    gc.collect()
    gc.freeze()
