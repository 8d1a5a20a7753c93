"""A run that has crashed, for tests that spoil its folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.crashes import SAVING, Killed, crash, crashed_tasks
from tests.invariants import mux_lab as lab


@pytest.fixture(scope="session")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that saved after steps 2 and 4, and crashed in step 5."""
    root = tmp_path_factory.mktemp("crashed")
    trainer = lab.make_trainer(crashed_tasks(), root, recorder=lab.Recorder(at_end={5: crash}), **SAVING)
    with pytest.raises(Killed):
        trainer.train()
    return root


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """The run that nothing befalls."""
    return lab.train(crashed_tasks(), tmp_path_factory.mktemp("whole"), **SAVING)


@pytest.fixture
def root(crashed: Path, tmp_path: Path) -> Path:
    """Return a copy of the crashed run, to be spoilt."""
    return Path(shutil.copytree(crashed, tmp_path / "run"))
