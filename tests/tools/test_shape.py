"""What `tools/shape.py` counts, on small packages made for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import shape

ROOM = "peft_mux"


def package(folder: Path, **files: str) -> dict[str, shape.Module]:
    """Write a package and return its modules; `a__b` stands for `a/b.py`, and every folder has an `__init__.py`."""
    root = folder / ROOM
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for part in (root, *(path for path in root.rglob("*") if path.is_dir())):
        if not (part / "__init__.py").exists():
            (part / "__init__.py").write_text('"""A room."""\n', encoding="utf-8")
    return shape.read_package(folder)


def numbers(folder: Path, **files: str) -> dict[str, str]:
    """Return what is measured of a package."""
    return shape.measure(folder, package(folder, **files))


# ---------------------------------------------------------------------- sizes


def test_sizes_count_modules_lines_and_what_lies_in_the_root(tmp_path: Path) -> None:
    files = {"one": "x = 1\n\ny = 2\n", "room__a": "\n" * 401, "room__b": "", "room__deep__c": ""}
    package(tmp_path, **files)
    for empty in ("__pycache__", "left_over/__pycache__"):
        (tmp_path / ROOM / empty).mkdir(parents=True)
    found = shape.measure(tmp_path, shape.read_package(tmp_path))
    assert found["modules"] == "7"  # with three __init__.py
    assert found["lines"] == str(3 + 401 + 3)
    assert found["entries in the root"] == "3 (2 modules, 1 folders)"
    assert found["largest folder, .py files with __init__"] == "3 (peft_mux/room)"
    assert found["longest file, lines"] == "401 (peft_mux/room/a.py)"
    assert found["files over 400 lines"] == "1"


def test_files_of_a_folder_are_those_that_lie_in_it_directly(tmp_path: Path) -> None:
    modules = package(tmp_path, one="", room__a="", room__deep__c="")
    assert shape.folder_files(modules) == {"peft_mux": 2, "peft_mux/room": 2, "peft_mux/room/deep": 2}


# -------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    ("text", "imported"),
    [
        ("import peft_mux.room.b", {"peft_mux.room.b"}),
        ("from peft_mux.room.b import name", {"peft_mux.room.b"}),
        ("from peft_mux.room import b", {"peft_mux.room.b"}),
        ("from peft_mux.room import b, name", {"peft_mux.room.b", "peft_mux.room"}),
        ("import peft_mux.room", {"peft_mux.room"}),
        ("from . import b", {"peft_mux.room.b"}),
        ("from .b import name", {"peft_mux.room.b"}),
        ("from .. import one", {"peft_mux.one"}),
        ("from ..one import name", {"peft_mux.one"}),
        ("import json, peft_mux_other.room", set()),
        ("try:\n    from peft_mux import one\nexcept ImportError:\n    pass", {"peft_mux.one"}),
        ("class A:\n    from peft_mux import one", {"peft_mux.one"}),
    ],
)
def test_every_form_of_import_is_read(text: str, imported: set[str], tmp_path: Path) -> None:
    modules = package(tmp_path, one="", room__a=text, room__b="")
    for while_importing in (True, False):
        assert shape.imports(modules["peft_mux.room.a"], modules, while_importing=while_importing) == imported


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    from peft_mux import one",
        "class A:\n    async def f(self):\n        from peft_mux import one",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from peft_mux import one",
        "import typing\nif typing.TYPE_CHECKING:\n    from peft_mux import one",
    ],
)
def test_what_functions_and_type_checkers_import_is_not_imported_while_importing(text: str, tmp_path: Path) -> None:
    modules = package(tmp_path, one="", room__a=text)
    assert shape.imports(modules["peft_mux.room.a"], modules, while_importing=True) == set()
    assert shape.imports(modules["peft_mux.room.a"], modules, while_importing=False) == {"peft_mux.one"}


def test_what_stands_beside_type_checking_is_imported_while_importing(tmp_path: Path) -> None:
    text = "if TYPE_CHECKING:\n    import peft_mux.one\nelse:\n    import peft_mux.two"
    modules = package(tmp_path, one="", two="", room__a=text)
    assert shape.imports(modules["peft_mux.room.a"], modules, while_importing=True) == {"peft_mux.two"}


def test_a_circle_under_type_checking_shows_among_all_imports_only(tmp_path: Path) -> None:
    found = numbers(
        tmp_path,
        one="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from peft_mux.two import B\n",
        two="from peft_mux.one import A\n",
    )
    assert found["circles of modules, while importing"] == "0"
    assert found["circles of modules, every import"] == "1 (of 2)"
    assert found["floors of modules, while importing"] == "2"


def test_a_circle_while_importing_is_found(tmp_path: Path) -> None:
    files = {"one": "import peft_mux.two", "two": "import peft_mux.three", "three": "import peft_mux.one"}
    found = numbers(tmp_path, **files, four="import peft_mux.one")
    assert found["circles of modules, while importing"] == "1 (of 3)"
    assert found["floors of modules, while importing"] == "2"


def test_folders_stand_in_a_circle_although_no_modules_do(tmp_path: Path) -> None:
    found = numbers(
        tmp_path,
        low__a="",
        low__b="def f():\n    from peft_mux.high.a import name\n",
        high__a="",
        high__b="from peft_mux.low import a\n",
    )
    assert found["circles of modules, every import"] == "0"
    assert found["circles among the entries of a folder"] == "1 (of 2)"
    assert found["floors of what lies in the root, every import"] == "1"


def test_a_file_and_a_folder_beside_it_stand_in_a_circle_within_their_own_folder(tmp_path: Path) -> None:
    found = numbers(
        tmp_path,
        room__a="import peft_mux.room.deep.b",
        room__deep__b="",
        room__deep__c="import peft_mux.room.a",
    )
    assert found["circles among the entries of a folder"] == "1 (of 2)"
    assert found["circles of modules, every import"] == "0"


def test_files_below_and_above_a_folder_beside_them_make_no_circle(tmp_path: Path) -> None:
    found = numbers(tmp_path, room__a="import peft_mux.room.deep.b", room__deep__b="import peft_mux.room.c", room__c="")
    assert found["circles among the entries of a folder"] == "0"


def test_what_the_root_hands_on_is_its_highest_floor(tmp_path: Path) -> None:
    hands_on = "def __getattr__(name):\n    from peft_mux.room.a import name\n"
    found = numbers(tmp_path, **{"__init__": hands_on}, errors="", room__a="from peft_mux.errors import E\n")
    assert found["circles among the entries of a folder"] == "0"
    assert found["floors of what lies in the root, every import"] == "3"


def test_floors_are_those_of_the_longest_chain(tmp_path: Path) -> None:
    found = numbers(
        tmp_path,
        top="import peft_mux.low\nimport peft_mux.middle\n",
        middle="import peft_mux.low\n",
        low="def f():\n    import peft_mux.never\n",
        never="import peft_mux.aside\n",
        aside="",
    )
    assert found["floors of modules, while importing"] == "3"


# ------------------------------------------------------------------ functions


FUNCTIONS = '''
def documented(a: int, /, b, *more: int, c: str = "", **others):
    """Say so."""


class Bare:
    def method(self, x: int):
        def inner(y):
            return y
        return inner

    @classmethod
    def make(cls, z):
        """Say so."""

    @property
    def size(self):
        """Say so."""

    @size.setter
    def size(self, value: int):
        self.x = value

    def _own(self):
        pass


class _Hidden:
    def method(self):
        pass
'''


def test_functions_are_measured_and_their_arguments_counted(tmp_path: Path) -> None:
    long = "def long():\n" + "    x = 1\n" * 41
    found = numbers(tmp_path, one=FUNCTIONS, two=long)
    assert found["longest function, lines"] == "42 (peft_mux/two.py:long)"
    assert found["functions over 40 lines"] == "1"
    assert found["median function, lines"] == "2"
    # a, b, more, c and others; x, y, z and value; neither self nor cls.
    assert found["arguments with a type"] == "55.6% (5 of 9)"


def test_functions_are_named_by_where_they_stand(tmp_path: Path) -> None:
    modules = package(tmp_path, one=FUNCTIONS)
    names = [name for name, _ in shape.functions(modules["peft_mux.one"])]
    assert names[:3] == ["documented", "Bare.method", "Bare.method.<locals>.inner"]


def test_public_things_without_a_docstring_are_found(tmp_path: Path) -> None:
    modules = package(tmp_path, one=FUNCTIONS)
    assert shape.undocumented(modules["peft_mux.one"]) == ["peft_mux/one.py:Bare", "peft_mux/one.py:Bare.method"]
    assert numbers(tmp_path)["public and without a docstring"] == "2"


# ----------------------------------------------------------------------- texts


def test_comment_lines_are_those_that_begin_with_one(tmp_path: Path) -> None:
    text = '"""Say\n# no comment\n"""\n\n# one\nx = "# no"  # no line of its own\nif x:\n    # two\n    pass\n'
    found = numbers(tmp_path, one=text)
    assert found["comment lines of lines that are not blank"] == "22.2% (2 of 9)"  # with the line of __init__.py


@pytest.mark.parametrize(
    "text",
    [
        "",
        "likewise.",
        "Likewise, but for the other one of them.",
        "of the run.",
        "of each task by its steps, which are counted from one.",
        "by task.",
        "by name, as the others above are too.",
        "as for `plan`, but with more of them.",
        "as given to the other function before.",
        "as in the paper that this follows.",
        "see the module for what it means.",
        "Tokenizer. By default that of the model where it is a folder.",
        "`[N]`. A loss of one task leaves all others as they are.",
    ],
)
def test_a_text_that_is_no_whole_phrase_is_a_fragment(text: str) -> None:
    assert shape.is_fragment(text)


@pytest.mark.parametrize(
    "text",
    [
        "tokens that one pass may hold.",
        "`[T, D]`, activations of the packed stream.",
        "how many rows a step takes, e.g. two. More take longer.",
        "offices are the start of this phrase.",
    ],
)
def test_a_whole_phrase_is_none(text: str) -> None:
    assert not shape.is_fragment(text)


DOCSTRING = '''
def f():
    """Return something: but this line is no entry.

    Args:
        first: of the run.
        second (int): what the function is to do,
            with: an indented line that belongs to it.

            And a paragraph.
        a, b: two of them at once.
        *more: any number of further ones.
        late:
            begins on the next line.

    Returns:
        What came of it: a number that is
        greater than none.

    Raises:
        ValueError: if it must.

    Example:
        word: no entry either
    """


class C:
    """Something.

    Attributes:
        third: likewise.
    """

    def g(self):
        """Yield.

        Yields:
            name: by task.
            other: each one as it was found.
        """
'''


def test_texts_are_those_of_arguments_attributes_and_what_is_returned(tmp_path: Path) -> None:
    modules = package(tmp_path, one=DOCSTRING)
    assert shape.docstring_texts(modules) == [
        "of the run.",
        "what the function is to do, with: an indented line that belongs to it. And a paragraph.",
        "two of them at once.",
        "any number of further ones.",
        "begins on the next line.",
        "What came of it: a number that is greater than none.",
        "likewise.",
        "by task.",
        "each one as it was found.",
    ]
    assert numbers(tmp_path)["argument texts that are fragments"] == "33.3% (3 of 9)"


# -------------------------------------------------------------------- printing


def test_checkouts_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package(tmp_path / "old", one="import peft_mux.two\n", two="def f():\n    import peft_mux.one\n")
    package(tmp_path / "new", room__a="")
    monkeypatch.setattr(
        sys, "argv", ["shape.py", str(tmp_path / "old"), str(tmp_path / "new"), "--folders", "--circles"]
    )
    shape.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [str(tmp_path / "old"), str(tmp_path / "new")] in lines
    assert ["modules", "3", "3"] in lines
    assert ["peft_mux", "3", "1"] in lines
    assert ["peft_mux/room", "-", "2"] in lines
    assert lines[-1] == [f"{tmp_path / 'old'}:", "peft_mux.one,", "peft_mux.two"]


def test_a_folder_that_is_no_checkout_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["shape.py", str(tmp_path)])
    with pytest.raises(SystemExit):
        shape.main()
    assert "holds no folder peft_mux" in capsys.readouterr().err


@pytest.mark.slow
def test_this_checkout_can_be_measured() -> None:
    root = Path(shape.__file__).parents[1]
    modules = shape.read_package(root)
    assert len(modules) > 100
    assert shape.measure(root, modules)["circles of modules, while importing"] == "0"
