"""A run that has crashed, for tests that spoil its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.crashes import SAVING, crashed_tasks
from tests.invariants import mux_lab as lab
from tests.runs import crash, train_until_crash


@pytest.fixture(scope="session")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that saved after steps 2 and 4, and crashed in step 5."""
    root = tmp_path_factory.mktemp("crashed")
    train_until_crash(crashed_tasks(), root, lab.Recorder(at_end={5: crash}), **SAVING)
    return root


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """The run that nothing befalls."""
    return lab.train(crashed_tasks(), tmp_path_factory.mktemp("whole"), **SAVING)


@pytest.fixture
def root(crashed: Path, tmp_path: Path) -> Path:
    """Return a copy of the crashed run, to be spoilt."""
    return Path(shutil.copytree(crashed, tmp_path / "run"))
