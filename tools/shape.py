"""The structure of the package in numbers, several checkouts side by side: `python tools/shape.py /tmp/before .`.

Read from the sources alone, nothing is imported. What counts as what:

* An import *while importing* runs when its module is imported; all others are those inside functions and under
  `TYPE_CHECKING`. To import a package is to import its `__init__.py`; `peft_mux.a.b` is no import of `peft_mux.a`.
* A folder imports another one where any of its modules imports any of the other's, in whatever way. A folder and its
  sub-folders are different folders.
* *Floors* are the modules (or folders) on the longest chain of imports; those that import one another in a circle
  stand on one floor.
* An argument's text is a *fragment* where it has fewer than four words, begins as in "of the run" or "likewise", or has
  a first sentence of fewer than four words.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "peft_mux"
LONG_FILE_LINES, LONG_FUNCTION_LINES = 400, 40
FEWEST_WORDS = 4
FRAGMENT_STARTS = ("of ", "likewise", "as for", "as given", "as in", "by name", "see ")

_ONLY_CHECKED = ("TYPE_CHECKING", "typing.TYPE_CHECKING")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
Graph = Mapping[str, set[str]]
"""What each node imports; every node is a key."""


@dataclass(frozen=True)
class Module:
    """A source file of the package.

    Attributes:
        name: dotted, that of the package itself for its `__init__.py`.
        path: relative to the checkout, with slashes.
        lines: of the file, without line ends.
        tree: its syntax.
        num_comments: lines whose first token is a comment.
    """

    name: str
    path: str
    lines: list[str]
    tree: ast.Module
    num_comments: int

    @property
    def folder(self) -> str:
        """Path of the folder that the file lies in."""
        return self.path.rpartition("/")[0]


def read_package(checkout: Path) -> dict[str, Module]:
    """Return all modules of a checkout's package by name."""
    found = {}
    for file in sorted((checkout / PACKAGE).rglob("*.py")):
        path = file.relative_to(checkout)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        with tokenize.open(file) as source:
            text = source.read()
        found[name] = Module(name, path.as_posix(), text.splitlines(), ast.parse(text, str(path)), _comments(file))
    return found


def _comments(file: Path) -> int:
    with file.open("rb") as source:
        return sum(
            token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
            for token in tokenize.tokenize(source.readline)
        )


# -------------------------------------------------------------------- imports


def imports(module: Module, known: Mapping[str, Module], *, while_importing: bool) -> set[str]:
    """Return the modules of the package that a module imports.

    Args:
        module: whose imports are read.
        known: all modules of the package by name.
        while_importing: whether to leave out what functions import and what only type checkers see.
    """
    names = {name for node in _statements(module.tree, while_importing) for name in _targets(node, module)}
    found = {name if name in known else name.rpartition(".")[0] for name in names}
    return found & known.keys() - {module.name}


def _statements(node: ast.AST, while_importing: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if while_importing and isinstance(child, Function):
            continue
        if while_importing and isinstance(child, ast.If) and ast.unparse(child.test) in _ONLY_CHECKED:
            yield from _statements(ast.Module(child.orelse, []), while_importing)
            continue
        yield child
        yield from _statements(child, while_importing)


def _targets(node: ast.AST, module: Module) -> set[str]:
    """Return the dotted names that a statement imports, `a.b` for `from a import b`."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return set()
    home = node.module or ""
    if node.level:
        parts = module.path.split("/")[: -node.level]
        home = ".".join([*parts, *filter(None, [home])])
    return {f"{home}.{alias.name}" for alias in node.names}


def module_graph(modules: Mapping[str, Module], *, while_importing: bool) -> dict[str, set[str]]:
    """Return which modules each module imports."""
    return {name: imports(module, modules, while_importing=while_importing) for name, module in modules.items()}


def entry_graph(modules: Mapping[str, Module], folder: str) -> dict[str, set[str]]:
    """Return which entries of a folder (files, and folders with all that lies under them) import which, in any way."""

    def entry(path: str) -> str | None:
        return path.removeprefix(f"{folder}/").split("/")[0] if path.startswith(f"{folder}/") else None

    graph: dict[str, set[str]] = {}
    for name, others in module_graph(modules, while_importing=False).items():
        if (own := entry(modules[name].path)) is not None:
            imported = {entry(modules[other].path) for other in others}
            graph.setdefault(own, set()).update(one for one in imported if one not in (None, own))
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that all reach one another, the largest first."""
    reached = {node: _reached(graph, node) for node in graph}
    groups = {frozenset(other for other in reached[node] if node in reached[other]) for node in graph}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda group: (-len(group), group))


def _reached(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def floors(graph: Graph) -> int:
    """Return the number of nodes on the longest chain of imports, where a circle counts as one."""
    floor_of = {node: circle[0] for circle in circles(graph) for node in circle}
    merged: dict[str, set[str]] = {}
    for node, others in graph.items():
        own = floor_of.get(node, node)
        merged.setdefault(own, set()).update({floor_of.get(other, other) for other in others} - {own})
    heights: dict[str, int] = {}
    for node in TopologicalSorter(merged).static_order():
        heights[node] = 1 + max((heights[other] for other in merged[node]), default=0)
    return max(heights.values(), default=0)


# ------------------------------------------------------------------ functions


def functions(module: Module) -> Iterator[tuple[str, Function]]:
    """Yield every function of a module with its dotted name within it, methods and inner functions too."""
    for name, node in _definitions(module.tree, ""):
        if isinstance(node, Function):
            yield name, node


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            yield prefix + child.name, child
            inner = f"{prefix}{child.name}{'.' if isinstance(child, ast.ClassDef) else '.<locals>.'}"
        yield from _definitions(child, inner)


def num_lines(function: Function) -> int:
    """Return the number of lines from `def` to the last one."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def arguments(function: Function) -> list[ast.arg]:
    """Return all arguments but `self` and `cls`, those of `*args` and `**kwargs` too."""
    own = function.args
    given = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, [own.vararg, own.kwarg])]
    return [one for one in given if one.arg not in ("self", "cls")]


def undocumented(module: Module) -> list[str]:
    """Return the public functions, methods and classes without a docstring; other setters of a property need none."""
    return [
        f"{module.path}:{name}"
        for name, node in _definitions(module.tree, "")
        if not any(part.startswith("_") or part == "<locals>" for part in name.split("."))
        and ast.get_docstring(node) is None
        and not any(ast.unparse(one).endswith((".setter", "overload")) for one in node.decorator_list)
    ]


# ------------------------------------------------------------------ docstrings


_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|[A-Z]\w+):")
_ENTRY = re.compile(r"\*{0,2}\w[\w.]*(?:, \*{0,2}\w[\w.]*)*(?: \([^)]*\))?:(?: (?P<text>.*))?")


def argument_texts(docstring: str) -> list[str]:
    """Return the text of every entry of the sections Args, Attributes, Returns and Yields of a cleaned docstring."""
    texts: list[str] = []
    section = ""
    lines: list[str] = []
    for line in [*docstring.splitlines(), "End:"]:
        if line and not line[0].isspace():
            if section in ("Args", "Attributes", "Returns", "Yields"):
                texts += _entries(lines, names_are_due=section in ("Args", "Attributes"))
            found = _SECTION.fullmatch(line)
            section, lines = found.group(1) if found else "", []
        elif line.strip():
            lines.append(line)
    return texts


def _entries(lines: list[str], *, names_are_due: bool) -> list[str]:
    """Return the texts of a section; one without a name in its first line is a single text, if names may be absent."""
    if not lines:
        return []
    indent = len(lines[0]) - len(lines[0].lstrip())
    if not names_are_due and not _ENTRY.fullmatch(lines[0].strip()):
        return [" ".join(line.strip() for line in lines)]
    texts: list[str] = []
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip()) if len(line) - len(line.lstrip()) == indent else None
        if entry:
            texts.append(entry.group("text") or "")
        elif texts:
            texts[-1] = f"{texts[-1]} {line.strip()}".strip()
    return texts


def is_fragment(text: str) -> bool:
    """Whether an argument's text is less than a whole phrase."""
    first_sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`\"'(])", text, maxsplit=1)[0]
    return text.lower().startswith(FRAGMENT_STARTS) or len(re.findall(r"\S*\w\S*", first_sentence)) < FEWEST_WORDS


def docstring_texts(modules: Mapping[str, Module]) -> list[str]:
    """Return the argument texts of all docstrings of the package."""
    documented = (node for module in modules.values() for node in ast.walk(module.tree) if isinstance(node, Documented))
    return [text for node in documented for text in argument_texts(ast.get_docstring(node) or "")]


# ---------------------------------------------------------------------- tables


def measure(checkout: Path, modules: Mapping[str, Module]) -> dict[str, str]:
    """Return the numbers of a checkout and its modules by what they tell, in the order of the table."""
    return {
        **_sizes(checkout, modules),
        **_import_numbers(modules),
        **_function_numbers(modules),
        **_text_numbers(modules),
    }


def folder_files(modules: Mapping[str, Module]) -> Counter[str]:
    """Return the number of .py files that lie directly in each folder."""
    return Counter(module.folder for module in modules.values())


def _sizes(checkout: Path, modules: Mapping[str, Module]) -> dict[str, str]:
    lengths = {module.path: len(module.lines) for module in modules.values()}
    root = checkout / PACKAGE
    num_folders = sum(one.is_dir() and any(one.rglob("*.py")) for one in root.iterdir())
    num_modules = len(list(root.glob("*.py")))
    largest, num_files = folder_files(modules).most_common(1)[0]
    longest = max(lengths, key=lambda path: lengths[path])
    return {
        "modules": f"{len(modules):,}",
        "lines": f"{sum(lengths.values()):,}",
        "entries in the root": f"{num_modules + num_folders} ({num_modules} modules, {num_folders} folders)",
        "largest folder, .py files with __init__": f"{num_files} ({largest})",
        "longest file, lines": f"{lengths[longest]} ({longest})",
        f"files over {LONG_FILE_LINES} lines": str(sum(length > LONG_FILE_LINES for length in lengths.values())),
    }


def _import_numbers(modules: Mapping[str, Module]) -> dict[str, str]:
    early, every = (module_graph(modules, while_importing=only) for only in (True, False))
    rooms = [entry_graph(modules, folder) for folder in sorted(folder_files(modules))]
    return {
        "floors of modules, while importing": str(floors(early)),
        "floors of what lies in the root, every import": str(floors(entry_graph(modules, PACKAGE))),
        "circles of modules, while importing": _circles_text(early),
        "circles of modules, every import": _circles_text(every),
        "circles among the entries of a folder": _circles_text(*rooms),
    }


def _circles_text(*graphs: Graph) -> str:
    sizes = [len(circle) for graph in graphs for circle in circles(graph)]
    return f"{len(sizes)} (of {', '.join(map(str, sizes))})" if sizes else "0"


def _function_numbers(modules: Mapping[str, Module]) -> dict[str, str]:
    found = [(f"{module.path}:{name}", one) for module in modules.values() for name, one in functions(module)]
    lengths = {name: num_lines(one) for name, one in found}
    given = [one for _, function in found for one in arguments(function)]
    longest = max(lengths, key=lambda name: lengths[name], default="")
    return {
        "longest function, lines": f"{lengths.get(longest, 0)} ({longest})",
        f"functions over {LONG_FUNCTION_LINES} lines": str(sum(n > LONG_FUNCTION_LINES for n in lengths.values())),
        "median function, lines": f"{statistics.median(lengths.values() or [0]):g}",
        "arguments with a type": _share(sum(one.annotation is not None for one in given), len(given)),
    }


def _text_numbers(modules: Mapping[str, Module]) -> dict[str, str]:
    num_filled = sum(bool(line.strip()) for module in modules.values() for line in module.lines)
    texts = docstring_texts(modules)
    return {
        "comment lines of lines that are not blank": _share(
            sum(module.num_comments for module in modules.values()), num_filled
        ),
        "argument texts that are fragments": _share(sum(map(is_fragment, texts)), len(texts)),
        "public and without a docstring": str(sum(len(undocumented(module)) for module in modules.values())),
    }


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%} ({part:,} of {whole:,})" if whole else "none"


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table with a column for each key, whose rows are named in any of the columns."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [["", *columns], *([name, *(column.get(name, "-") for column in columns.values())] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Print the tables of the checkouts that the command line names."""
    parser = argparse.ArgumentParser(description=f"The structure of {PACKAGE} in numbers, side by side.")
    parser.add_argument("checkouts", nargs="*", default=["."], metavar="CHECKOUT", help="by default this folder")
    parser.add_argument("--folders", action="store_true", help="also the number of .py files in each folder")
    parser.add_argument("--circles", action="store_true", help="also what imports one another in circles")
    given = parser.parse_args()
    for checkout in given.checkouts:
        if not (Path(checkout) / PACKAGE).is_dir():
            parser.error(f"{checkout!r} holds no folder {PACKAGE}; allowed: checkouts of the repository.")
    packages = {checkout: read_package(Path(checkout)) for checkout in given.checkouts}
    print(table({checkout: measure(Path(checkout), modules) for checkout, modules in packages.items()}))
    if given.folders:
        print(f"\n{table({checkout: _folder_numbers(modules) for checkout, modules in packages.items()})}")
    if given.circles:
        for checkout, modules in packages.items():
            for circle in circles(module_graph(modules, while_importing=False)):
                print(f"\n{checkout}: {', '.join(circle)}")


def _folder_numbers(modules: Mapping[str, Module]) -> dict[str, str]:
    return {folder: str(count) for folder, count in sorted(folder_files(modules).items())}


if __name__ == "__main__":
    main()
