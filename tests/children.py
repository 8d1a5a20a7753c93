"""Python scripts in processes of their own: Triton's interpreter is chosen when Triton is imported, once a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT


def run_script(script: str | Path, *arguments: str, timeout_s: float = 280.0, **environment: str) -> str:
    """Run a script with this checkout's packages on one thread; return what it prints, or fail with its errors.

    Args:
        script: path of the script.
        *arguments: what it finds in `sys.argv`.
        timeout_s: seconds after which it is ended.
        **environment: variables in addition to those of this process, such as `TRITON_INTERPRET="1"`.
    """
    return _run([str(script), *arguments], timeout_s, environment)


def run_code(code: str) -> str:
    """Run code with this checkout's packages in a fresh interpreter; return what it prints, or fail with its errors."""
    return _run(["-c", code], 120.0, {}).strip()


def _run(words: list[str], timeout_s: float, environment: dict[str, str]) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
