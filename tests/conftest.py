"""What every test folder shares: no network, one thread, repeatable random cases, and the helpers of the invariants."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Libraries read these while they are imported, so they come before anything that imports transformers.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["DO_NOT_TRACK"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Two threads on cores that others use too take ten times as long as one.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.paths import ROOT, SHARED_DATA
from tests.shell import Shell
from tests.shortcuts import take_shortcuts

# Thousands of small runs flush every file that they write; in memory that costs next to nothing.
_IN_MEMORY = Path("/dev/shm")
if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))

if importlib.util.find_spec("peft_mux") is None:
    sys.path.append(str(ROOT))  # a checkout that is not installed

# A shell that starts tests in the background has them ignore Ctrl-C, which tests of interrupts send themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "peft_mux",
    deadline=None,  # the first case of a property pays for imports
    derandomize=True,
    max_examples=25,
    database=None,  # nothing is written into the source folders
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("peft_mux")


@pytest.fixture
def disk() -> Iterator[Callable[[int | None], None]]:
    """Return what limits the size of every file that is written from then on; `None` lifts it."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size_bytes is None else size_bytes, hard))

    yield limit
    limit(None)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    """Return what runs commands of `peft-mux` and returns what they print."""
    return Shell(capsys)


def pytest_collection_finish() -> None:
    """Look for garbage seldom, and not among the modules and tests that stay: it would take a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files that take long come first: at the end one of them would keep one worker busy and leave others idle."""
    ranks: dict[Path, int] = {}
    for item in items:
        ranks[item.path] = min(ranks.get(item.path, 2), _rank(item))
    items.sort(key=lambda item: ranks[item.path])


def _rank(item: pytest.Item) -> int:
    """Return 0 for a test that may take longer than others, 1 for one that starts processes, and 2 for all others."""
    limit = item.get_closest_marker("timeout")
    if limit is not None and limit.args[0] > float(item.config.getini("timeout")):
        return 0
    return 2 if item.get_closest_marker("distributed") is None and item.get_closest_marker("notebook") is None else 1


@pytest.fixture(autouse=True, scope="session")
def _one_thread_everywhere() -> Iterator[None]:
    """Fix the number of threads: it takes part in the order of sums, and so in the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _shortcuts() -> Iterator[None]:
    """Save tests that are not about pictures or commits the time that these take."""
    with pytest.MonkeyPatch.context() as patch:
        take_shortcuts(patch)
        yield


@pytest.fixture(autouse=True, scope="session")
def _whole_lines() -> Iterator[None]:
    """Keep lines whole for tests of what they say; `tests/cli/test_width.py` tests where they are broken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real inputs that may be next to the repository."""
    if not SHARED_DATA.is_dir():
        pytest.skip("../shared/data absent")
    return SHARED_DATA
