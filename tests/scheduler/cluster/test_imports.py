"""The replay stands apart: no run depends on it."""

from __future__ import annotations

from pathlib import Path

import peft_mux


def test_nothing_else_of_the_package_imports_the_replay() -> None:
    package = Path(peft_mux.__file__).parent
    folder = package / "scheduler" / "cluster"
    assert (folder / "replay.py").is_file(), "the replay has moved; this test would prove nothing"
    importing = [
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if folder not in path.parents and "scheduler.cluster" in path.read_text(encoding="utf-8")
    ]
    assert importing == []
