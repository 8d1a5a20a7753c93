"""docs/reliability.md names tests, tables and files that there are."""

from __future__ import annotations

import re

from tests.paths import ROOT

TEXT = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")}
CODE = "\n".join(FILES.values()) + "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "peft_mux").rglob("*.py")
)


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"`((?:tests|peft_mux)/[\w/.]+)`", TEXT)
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_test_that_it_names_is_there() -> None:
    named = re.findall(r"`(test_\w+?)(?:\.\.\.)?`", TEXT)
    assert len(named) > 15
    assert [name for name in named if f"def {name}" not in CODE] == []


def test_every_table_that_it_names_is_there() -> None:
    named = re.findall(r"`([A-Z]+(?:_[A-Z]+)*)`", TEXT)
    of_the_system = {"SIGKILL", "ENOSPC", "EROFS", "EIO", "PEFT_MUX_CRASHPOINT"}
    known = {*re.findall(r"^([A-Z_]+)\b.* = ", CODE, re.MULTILINE), *of_the_system}
    assert len(named) > 15
    assert {name for name in named if name not in known} == set()
