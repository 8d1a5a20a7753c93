"""The size and structure of the package in numbers: `make shape`, or `python tools/shape.py --run /tmp/before .`.

Several checkouts appear as columns. Most numbers are read from the sources, nothing is imported. With `--run`, each
checkout also trains two LoRA tasks for two steps in a process of its own, and the files and functions that this enters
are counted. What counts as what:

* A *code line* is neither blank, nor a comment, nor part of a docstring.
* A function *with one reference* has a name that no other function has and that the package mentions once outside of
  its definition and of imports.
* A *file name used more than once* is that of files in several folders, `__init__.py` and `__main__.py` excepted.
* A run *enters* a function when it calls it, in the constructor, `plan()` or `train()`. Lambdas and comprehensions are
  counted apart: they are part of a function that is counted, and which of them have a frame depends on the
  version of Python.
* *Frames* are the calls on the stack from `train()` to the backbone's forward, those two included.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "peft_mux"
Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function
Graph = Mapping[str, set[str]]
"""The modules that each module imports."""
WINGS = {
    "adapters": "adapters",
    "losses": "losses",
    "generation": "generation",
    "plans": "scheduler planning",
    "parallel": "parallel",
    "reporting": "reporting",
    "doors": "calls sweeps serve cli demo",
}
"""What the core does without: folders and files of the package by subject. Everything else is the core, except
`ASSEMBLING`; so are `VALUES`."""
VALUES = "scheduler.parallel_layout scheduler.plan scheduler.units".split()
"""Values in the folders of wings that the core uses too: data alone (and its text), they count as the core."""
ASSEMBLING = "__init__ __main__ trainer.trainer modeling.adapters modeling.objectives scheduler.names".split()
"""Modules that put core and wings together, or hold a registry that both use."""


class Module(NamedTuple):
    """A source file: its dotted name, its path relative to the checkout, its text and its syntax tree."""

    name: str
    path: str
    text: str
    tree: ast.Module


def read_package(checkout: Path, folder: str = PACKAGE) -> dict[str, Module]:
    """Return all modules under a folder of a checkout by dotted name."""
    modules = {}
    for file in sorted((checkout / folder).rglob("*.py")):
        path = file.relative_to(checkout)
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        text = file.read_text(encoding="utf-8")
        modules[name] = Module(name, path.as_posix(), text, ast.parse(text, str(path)))
    return modules


# -------------------------------------------------------------------- sources


def num_code_lines(module: Module) -> int:
    """Return the number of lines that are neither blank, nor a comment, nor part of a docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(module.tree):
        for statement in node.body if isinstance(node, Documented) else ():
            # Also strings below a constant or a field, which document it.
            if isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
                docstrings.update(range(statement.lineno, (statement.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, module.text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in docstrings for number, line in lines)


def functions(module: Module) -> list[Function]:
    """Return all functions of a module, methods and inner functions included."""
    return [node for node in ast.walk(module.tree) if isinstance(node, Function)]


def with_one_reference(modules: Mapping[str, Module]) -> list[str]:
    """Return the functions, as `path:name`, whose name is unique and mentioned once outside definition and imports."""
    homes = [(node.name, module.path) for module in modules.values() for node in functions(module)]
    defined = Counter(name for name, _ in homes)
    mentioned: Counter[str] = Counter()
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Name):
                mentioned[node.id] += 1
            elif isinstance(node, ast.Attribute):
                mentioned[node.attr] += 1
    return [f"{path}:{name}" for name, path in homes if defined[name] == mentioned[name] == 1]


def import_graph(modules: Mapping[str, Module]) -> dict[str, set[str]]:
    """Return which modules of the package each module imports, inside functions and for type checkers too."""
    graph: dict[str, set[str]] = {}
    for name, module in modules.items():
        imported: set[str] = set()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        # The last part of a name may be a function or a class of a module.
        imported = {other if other in modules else other.rpartition(".")[0] for other in imported}
        graph[name] = imported & modules.keys() - {name}
    return graph


def wing_of(module: str) -> str | None:
    """Return the wing of a module; "" for the core, `None` for a module that puts both together."""
    name = module.removeprefix(PACKAGE).removeprefix(".") or "__init__"
    if name in ASSEMBLING:
        return None
    if name in VALUES:
        return ""
    wings = (wing for wing, parts in WINGS.items() for part in parts.split() if f"{name}.".startswith(f"{part}."))
    return next(wings, "")


def core_to_wings(graph: Graph) -> list[tuple[str, str]]:
    """Return the imports of wings by modules of the core, as pairs of both names in order."""
    pairs = [(name, other) for name, others in graph.items() if wing_of(name) == "" for other in others]
    return sorted((name, other) for name, other in pairs if wing_of(other))


def _circle(graph: Graph) -> str:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(error.args[1])
    return "none"


def source_numbers(checkout: Path) -> dict[str, str]:
    """Return what is counted in the sources of a checkout, as rows of the table."""
    modules = read_package(checkout)
    code = {module.path: num_code_lines(module) for module in modules.values()}
    total, num_functions = sum(code.values()), sum(len(functions(module)) for module in modules.values())
    single, graph = len(with_one_reference(modules)), import_graph(modules)
    core = [module.path for name, module in modules.items() if wing_of(name) == ""]
    root = checkout / PACKAGE
    entries = [entry for entry in root.iterdir() if entry.suffix == ".py" or any(entry.rglob("*.py"))]
    file_names = Counter(Path(module.path).name for module in modules.values())
    repeated = sorted(name for name, count in file_names.items() if count > 1 and not name.startswith("__"))
    tests = read_package(checkout, "tests")
    undocumented = sum(map(_num_undocumented, modules.values()))
    longest = max(code, key=lambda path: code[path])
    return {
        "code lines": f"{total:,}",
        "modules": f"{len(modules):,}",
        "code lines and modules of the core": f"{sum(code[path] for path in core):,} in {len(core):,}",
        "imports from core to wings": f"{len(core_to_wings(graph)):,}",
        "functions": f"{num_functions:,}",
        "code lines per function": f"{total / max(1, num_functions):.1f}",
        "functions with one reference": f"{single / max(1, num_functions):.1%} ({single:,})",
        "top-level entries": str(len(entries)),
        "file names used more than once": f"{len(repeated)} ({', '.join(repeated)})" if repeated else "0",
        "code lines of the longest file": f"{code[longest]:,} ({longest})",
        "public functions and classes without a docstring": str(undocumented),
        "circle of imports": _circle(graph),
        "code lines of tests": f"{sum(map(num_code_lines, tests.values())):,}",
    }


def _num_undocumented(module: Module) -> int:
    def count(node: ast.AST) -> int:
        total = 0
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function) and not child.name.startswith("_"):
                decorators = map(ast.unparse, child.decorator_list)
                is_setter = any(decorator.endswith((".setter", "overload")) for decorator in decorators)
                total += ast.get_docstring(child) is None and not is_setter
                total += count(child) if isinstance(child, ast.ClassDef) else 0
        return total

    return count(module.tree)


# ---------------------------------------------------------------------- a run


def run_numbers(checkout: Path) -> dict[str, str]:
    """Return what two steps of two tasks enter, measured in a process of its own, as rows of the table."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        shown = Path(folder, "shown.json")
        command = [sys.executable, __file__, "--train-and-count", str(shown), str(checkout)]
        subprocess.run(command, env=environment, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        numbers = json.loads(shown.read_text(encoding="utf-8"))
    return {
        "files entered by two steps of two tasks": f"{numbers['files']:,}",
        "functions entered by them": f"{numbers['functions']:,}",
        "lines of functions entered by them": f"{numbers['lines']:,}",
        "lambdas and comprehensions entered by them": f"{numbers['unnamed']:,}",
        "own frames from train() to the backbone": f"{numbers['own_frames']} of {numbers['frames']}",
    }


def _train_and_count(checkout: Path, shown: Path) -> None:
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

    package = str(checkout / PACKAGE) + os.sep
    entered: set[Any] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.add(frame.f_code)

    stacks: list[list[str]] = []

    def note_stack(*_: Any) -> None:
        names, frame = [], sys._getframe(1)
        while frame is not None and frame.f_code.co_name != "count":
            names.append(frame.f_code.co_filename)
            frame = frame.f_back
        stacks.append(names)

    def count() -> None:
        trainer = MultiTaskTrainer(model, args, tasks)
        trainer.plan()
        sys.setprofile(None)
        model.model.register_forward_pre_hook(note_stack)
        sys.setprofile(note)
        trainer.train()

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes))
    assert isinstance(model.model, LlamaModel)
    rows = [{"input_ids": [1 + (number * place) % 60 for place in range(8 + number)]} for number in range(8)]
    config = {"r": 4, "target_modules": "all-linear"}
    tasks = [
        Task(name=name, peft_config=LoraConfig(**config), train_dataset=rows, train_batch_size=4, max_steps=2)
        for name in ("a", "b")
    ]
    args = MultiTaskTrainingArguments(output_dir="run", use_cpu=True, report_to="none", disable_tqdm=True)
    sys.setprofile(note)
    count()
    sys.setprofile(None)
    # The hook of the model is called by the frame of its `__call__`, which calls its forward next.
    stack = max(stacks, key=len)
    functions_entered = [code for code in entered if not code.co_name.startswith("<")]
    lines = set()  # of a function and of one inside it together, each line once
    for code in functions_entered:
        last = max(line for _, _, line in code.co_lines() if line)
        lines |= {(code.co_filename, line) for line in range(code.co_firstlineno, last + 1)}
    numbers = {
        "files": len({code.co_filename for code in entered}),
        "functions": len(functions_entered),
        "lines": len(lines),
        "unnamed": len(entered) - len(functions_entered),
        "frames": len(stack),
        "own_frames": sum(name.startswith(package) for name in stack),
    }
    shown.write_text(json.dumps(numbers), encoding="utf-8")


# --------------------------------------------------------------------- tables


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table with a column for each key, whose rows are named in any of the columns."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    rows = [["", *columns], *([name, *(column.get(name, "-") for column in columns.values())] for name in names)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def folder_table(checkout: Path) -> str:
    """Return code lines, modules and functions of each folder below the package, and of the modules in its root."""
    sums: dict[str, list[int]] = {}
    for module in read_package(checkout).values():
        parts = module.path.split("/")[1:]
        for depth in range(1, len(parts) + 1) if len(parts) > 1 else (1,):
            sums_of_folder = sums.setdefault("/".join(parts[:depth]), [0, 0, 0])
            for index, number in enumerate((num_code_lines(module), 1, len(functions(module)))):
                sums_of_folder[index] += number
    names = ("code lines", "modules", "functions")
    columns = {name: {path: f"{row[i]:,}" for path, row in sorted(sums.items())} for i, name in enumerate(names)}
    return table(columns)


def _checkouts(given: Sequence[str], parser: argparse.ArgumentParser) -> Iterator[Path]:
    for folder in given:
        if not (Path(folder) / PACKAGE).is_dir():
            parser.error(f"{folder!r} must be a checkout of the repository; it has no folder {PACKAGE}.")
        yield Path(folder).resolve()


def main() -> None:
    """Print the table of the checkouts that the command line names."""
    parser = argparse.ArgumentParser(description=f"The size and structure of {PACKAGE} in numbers.")
    parser.add_argument("checkouts", nargs="*", default=["."], metavar="CHECKOUT", help="default: this folder")
    parser.add_argument("--run", action="store_true", help="also train two tasks and count what that enters")
    parser.add_argument("--folders", action="store_true", help="also the numbers of each folder and file")
    parser.add_argument("--single", action="store_true", help="also list the functions with one reference")
    parser.add_argument("--train-and-count", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkouts = dict(zip(given.checkouts, _checkouts(given.checkouts, parser), strict=True))
    if given.train_and_count:
        _train_and_count(next(iter(checkouts.values())), given.train_and_count)
        return
    columns = {
        name: source_numbers(path) | (run_numbers(path) if given.run else {}) for name, path in checkouts.items()
    }
    print(table(columns))
    for path in checkouts.values():
        if given.folders:
            print(f"\n{path}\n{folder_table(path)}")
        if given.single:
            print("\n".join([f"\n{path}", *with_one_reference(read_package(path))]))


if __name__ == "__main__":
    main()
