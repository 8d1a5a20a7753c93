"""A linter of plain modern English: phrases that native readers stumble over do not come back (`make lint`).

Pages, notebooks, and the docstrings, comments and string literals of code are read; of tests, docstrings, comments and
names. To add a phrase, add a line to `PHRASES` with what to write instead.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PHRASES = {
    r"\balike\b": "equal, identical, the same; with a common prefix",
    r"\banew\b": "again",
    r"\bbeside\b": "next to, alongside, in addition to, compared with",
    r"\bgo(es)? on\b": "continues, resumes",
    r"\bheld against\b": "compared with",
    r"\bholds? .{1,40} against\b": "compares ... with",
    r"\bholds? (this|each|every|that) \w+ to\b": "compares with, checks",
    r"\b(is|are|was|were) told\b": "is reported, is logged, gets",
    r"\btells? (what|of|so|where|how|which|it|to)\b": "says, reports, shows",
    r"\bnobody\b": "no process, no other task",
    r"\bwhoever\b": "the code that, callers",
    r"\bowners?\b": "user",
    r"\bamiss\b(?!`)": "wrong, a problem",
    r"\bbut for\b": "except",
    r"\bwhat comes? of\b": "effect, result",
    r"\bcomes? to nothing\b": "has no effect",
    r"\bwhat (\w+ )?of (it|them|these|those)\b": "the part that",
    r"\bof which (a|the|all|some|none)\b": "whose",
    r"\bit is said\b": "it is reported",
    r"\b(is|are) said\b": "is reported, is shown",
    r"\bthe more so\b": "even more",
    r"\bunder way\b": "running, in transit",
    r"\bin company\b": "with other tasks",
    r"\bmended\b": "fixed",
    r"\bbears? (it|them|this|that)\b": "supports, allows",
    r"\bwhat is (left|missing) of\b": "the rest of",
    r"\bfor its own sake\b": "because",
    r"\b(is|are) heard of\b": "is reported",
    r"\bhears? (of|nothing|that)\b": "is notified of, gets no events",
    r"\ball the same\b(?! (to|as|in|for))": "nevertheless, still",
    r"\bhas to be\b": "must be",
    r"\bcomes? nearest\b": "is closest",
    r"\bfalls? to\b": "goes to",
    r"\btakes? up\b": "uses, applies",
    r"\bsees? to it\b": "makes sure",
    r"\bas ever\b": "as before",
    r"\bis let in\b": "is added",
    r"\brests no more\b": "is resumed",
    r"\bspares?d?\b": "saves, skips",
    r"\bwithout a word\b": "silently",
    r"\bof one'?s own\b": "your own",
    r"\bthe like\b(?!`)": "and similar",
    r"\bas (they|it) (are|is|lie|lies|stand|stands) there\b": "unchanged",
    r"\bstands? (in|at|under|beside|for itself|alone)\b": "is in",
    r"\blies? (in|on|under|there|beside|together|apart|above|below)\b": "is in",
}
"""Patterns, and what to write instead."""

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")),
    *(path for path in (ROOT / "docs").glob("*.md") if path.name != "log.md"),  # the log is history
    *(ROOT / "notebooks").glob("*.ipynb"),
]


def prose(path: Path) -> str:
    """Return the text of a page or of a notebook's Markdown, without code."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n\n".join("".join(source) for source in cells)
    text = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def texts(path: Path) -> list[str]:
    """Return the docstrings, comments and string literals of a module, each without its code in backquotes.

    Placeholders of f-strings become "...". Literals without a space, such as keys, are left out.
    """
    source = path.read_text("utf-8")
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in formatted for part in node.values}
    literals = [
        "".join(getattr(part, "value", "") if isinstance(part, ast.Constant) else "..." for part in node.values)
        for node in formatted
    ]
    literals += [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
    ]
    literals.append(comments(source))
    return [re.sub(r"`[^`\n]*`", "`code`", text) for text in literals if " " in text.strip()]


def comments(source: str) -> str:
    """Return the comments of a module as one text, as a comment may have several lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def comments_and_docstrings(path: Path) -> list[str]:
    """Return the comments and docstrings of a module, without code in backquotes and without other literals."""
    source = path.read_text("utf-8")
    docstrings = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return [re.sub(r"`[^`\n]*`", "`code`", text) for text in [*docstrings, comments(source)]]


def found_in(text: str) -> list[str]:
    """Return each phrase of the list in a text, with its surroundings and what to write instead."""
    text = re.sub(r"\s+", " ", text)
    faults = []
    for pattern, instead in PHRASES.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            around = text[max(0, match.start() - 40) : match.end() + 40]
            faults.append(f'"{match[0]}" in "...{around}..."; write: {instead}')
    return faults


def names_of_tests(path: Path) -> list[str]:
    """Return the names of a module's tests as sentences."""
    functions = [node for node in ast.parse(path.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    return [node.name.removeprefix("test_").replace("_", " ") for node in functions if node.name.startswith("test_")]


def all_texts() -> Iterator[tuple[Path, str]]:
    """Return every text of the repository that is checked, with its file."""
    for page in PAGES:
        yield page, prose(page)
    for folder in ("peft_mux", "benchmarks", "examples", "tools", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__).resolve():
                continue
            words = [*comments_and_docstrings(path), *names_of_tests(path)] if folder == "tests" else texts(path)
            for text in words:
                # A parameter's name in a docstring is no phrase.
                yield path, text if folder == "peft_mux" else re.sub(r"(?m)^ +\w+: ", "", text)


def main() -> int:
    """Print every phrase that is found; return 1 if there is one."""
    faults = [f"{path.relative_to(ROOT)}: {fault}" for path, text in all_texts() for fault in found_in(text)]
    print("\n".join(faults) if faults else "No phrase of tools/plain_words.py found.")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
