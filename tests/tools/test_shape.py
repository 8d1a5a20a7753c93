"""What `tools/shape.py` counts, on small packages made for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import shape

SOURCE = '''"""A module."""

# A comment.
LIMIT = 3
"""Documents the constant."""


def used_once(x):
    """A function."""
    return [
        x,
        LIMIT,  # not a comment line
    ]


class Thing:
    """A class."""

    size: int
    """Documents the field."""

    def used_twice(self):
        """A method."""

        def inner():
            return self

        return inner() or used_once(1)

    def bare(self):
        return self.used_twice() or self.used_twice()
'''


def package(root: Path, **sources: str) -> Path:
    for name, text in sources.items():
        path = root / "peft_mux" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_code_lines_leave_out_blanks_comments_and_all_docstrings(tmp_path: Path) -> None:
    module = shape.read_package(package(tmp_path, one=SOURCE))["peft_mux.one"]
    assert shape.num_code_lines(module) == 1 + 5 + 2 + 4 + 2


def test_functions_with_one_reference_have_a_name_of_their_own_that_is_mentioned_once(tmp_path: Path) -> None:
    package(tmp_path, one=SOURCE, two="from peft_mux.one import used_once\n")
    found = shape.with_one_reference(shape.read_package(tmp_path))
    assert found == ["peft_mux/one.py:used_once", "peft_mux/one.py:inner"]


def test_the_table_has_sizes_entries_docstrings_and_circles(tmp_path: Path) -> None:
    package(tmp_path, one=SOURCE, room__a="import peft_mux.room.b\n", room__b="def f():\n    import peft_mux.room.a\n")
    numbers = shape.source_numbers(tmp_path)
    assert numbers["modules"] == "3"
    assert numbers["functions"] == "5"
    assert numbers["top-level entries"] == "2"
    assert numbers["public functions and classes without a docstring"] == "2"
    assert set(numbers["circle of imports"].split(" -> ")) == {"peft_mux.room.a", "peft_mux.room.b"}


def test_checkouts_are_columns_and_folders_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = package(tmp_path / "old", one="X = 1\n"), package(tmp_path / "new", room__a="X = 1\nY = 2\n", b="")
    monkeypatch.setattr(sys, "argv", ["shape.py", str(old), str(new), "--folders", "--single"])
    shape.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [str(old), str(new)] in lines
    assert ["modules", "1", "2"] in lines
    assert ["room/a.py", "2", "1", "0"] in lines


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shape.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        shape.main()
    assert "must be a checkout of the repository" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_of_this_checkout_is_counted() -> None:
    root = Path(shape.__file__).parents[1]
    numbers = shape.run_numbers(root)
    assert int(numbers["files entered by two steps of two tasks"]) > 10
    own, _, whole = numbers["own frames from train() to the backbone"].split()
    assert 0 < int(own) < int(whole)
