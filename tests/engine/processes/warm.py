"""Imported by the server that forks processes: one short run, so that what the first one alone takes is paid once."""

from __future__ import annotations

import contextlib
import gc
import io
import tempfile
from pathlib import Path

import pytest
import torch

from tests.engine.processes import cases
from tests.shortcuts import take_shortcuts

torch.set_num_threads(1)
with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
    take_shortcuts(patch, is_rank=True)
    with contextlib.redirect_stdout(io.StringIO()):
        cases.run(Path(folder), cases.five_tasks(max_steps=2))
gc.freeze()
gc.set_threshold(50_000, 20, 20)
