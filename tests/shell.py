"""Commands of `peft-mux` in this process: what they print, and with which status they end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peft_mux.cli.main import main


class Shell:
    """Runs commands, and returns the output of each."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, status: int = 0) -> str:
        """Run a command that ends with a status; return what it prints on standard output."""
        return self.streams(*words, status=status)[0]

    def streams(self, *words: object, status: int = 0) -> tuple[str, str]:
        """Run a command that ends with a status; return what it prints on standard output and standard error."""
        self._capsys.readouterr()
        assert main([str(word) for word in words]) == status
        out, err = self._capsys.readouterr()
        return out, err

    def json(self, *words: object, status: int = 0) -> Any:
        """Return the object that a command prints with `--json`; nothing else is on standard output."""
        return json.loads(self(*words, "--json", status=status))

    def refused(self, *words: object) -> str:
        """Return what a command says that ends for a fault of the user's: one error, in words."""
        _, said = self.streams(*words, status=2)
        # Libraries draw their own progress there before.
        assert len([line for line in said.splitlines() if line.startswith("error: ")]) == 1
        assert "Traceback" not in said
        return said
