"""The code has the messages that the docs explain, and the site has all pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIECES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def said() -> str:
    """Return all code, with strings joined that continue on the next line."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "peft_mux").rglob("*.py")))
    return re.sub(r'"\s*\n\s*f?"', "", code)


@pytest.mark.parametrize("piece", PIECES)
def test_each_message_of_the_troubleshooting_page_is_one_that_the_code_has(piece: str, said: str) -> None:
    assert piece in said


def test_there_are_messages_to_look_for() -> None:
    assert len(PIECES) > 8


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = set(re.findall(r"(\w+\.md)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {path.name for path in (ROOT / "docs").glob("*.md")} == listed


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs_jupyter") is None, reason="mkdocs-jupyter is absent (the extra docs)"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MultiTaskTrainer" in (tmp_path / "site/reference/index.html").read_text(encoding="utf-8")
