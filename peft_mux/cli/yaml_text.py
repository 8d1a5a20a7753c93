"""YAML as people write it, from files that nobody has vouched for: bounded before anything is made of it.

PyYAML makes its objects by recursion and shares what aliases repeat, so a file of a few lines can stand for more than
any walk through it comes to an end with (`a: &a [x, x]`, `b: &b [*a, *a]`, ...), contain itself, or be nested beyond
the stack. The stream of its events shows all three before a single object is made.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from peft_mux.errors import ConfigError, Fault

MAX_BYTES, MAX_NODES, MAX_DEPTH = 2**23, 200_000, 50
"""Of a file; of what it stands for once aliases are written out; of sections within sections."""

_FREE_KEYS = ("model_init_kwargs",)
"""Sections that are handed on, in which numbers may be keys (`max_memory: {0: 10GiB}`)."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number (YAML 1.1 wants `1.0e-4`)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(path: Path) -> tuple[Any, dict[str, int], list[Fault]]:
    """Return what a file holds.

    Args:
        path: path of the file.

    Returns:
        What the file holds; the line of each key, by its dotted path; and what is wrong with keys.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, or is too large.
    """
    text = _text_of(path)
    node, data = _parsed(text, str(path))
    lines: dict[str, int] = {}
    faults: list[Fault] = []
    _look_at_keys(node, "", lines, faults)
    return data, lines, faults


def parse_value(text: str, where: str) -> Any:
    """Return what a text stands for, such as the value of `--set`.

    Args:
        text: the text that is parsed.
        where: what it is the value of, for messages.

    Raises:
        ConfigError: if it is no YAML, or too large.
    """
    return _parsed(text, where)[1]


def _text_of(path: Path) -> str:
    try:
        kind = path.stat()
        # Others, such as a pipe, may never come to an end.
        if not stat.S_ISREG(kind.st_mode):
            raise ConfigError(f"{path}: cannot be read: it is no regular file; allowed: a YAML file.")
        if kind.st_size > MAX_BYTES:
            raise ConfigError(f"{path}: got {kind.st_size} bytes; allowed: at most {MAX_BYTES}.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; allowed: UTF-8. Save it as UTF-8.") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"file: got {str(path)!r}, which is not there; allowed: a YAML file. peft-mux init {path} writes one."
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _parsed(text: str, where: str) -> tuple[Any, Any]:
    """Return the nodes of a text, which know their lines, and the object that it stands for."""
    try:
        _require_bounded(text, where)
        return yaml.compose(text, Loader=_Loader), yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}{_yaml_words(error)}") from error
    # What PyYAML raises of values such as the date 2024-13-01, or a number of 5,000 digits.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{where}: is not YAML: a value cannot be read: {error}. Write it in quotes.") from error


def _yaml_words(error: yaml.YAMLError) -> str:
    """Return line, column and fault in one line; PyYAML draws them over six."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": is not YAML: {' '.join(str(error).split())}"
    began, context = getattr(error, "context_mark", None), getattr(error, "context", None) or ""
    since = f", {context} that begins in line {began.line + 1}" if began is not None and context else ""
    problem = getattr(error, "problem", None) or "it cannot be read"
    return f":{mark.line + 1}: is not YAML: column {mark.column + 1}: {problem}{since}."


def _require_bounded(text: str, where: str) -> None:
    """Refuse a text that stands for too much, is nested too deeply, or contains itself."""
    sizes: dict[str, tuple[int, int]] = {}  # nodes and depth of what each anchor stands for
    open_ones: list[_Open] = []
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes and any(one.anchor == event.anchor for one in open_ones):
                raise ConfigError(
                    f"{where}: line {line}: got *{event.anchor} within itself; allowed: sections that end."
                )
            nodes, depth = sizes.get(event.anchor, (1, 0))
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            open_ones.append(_Open(event.anchor))
            nodes, depth = 0, 0
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            ended = open_ones.pop()
            nodes, depth = ended.nodes, ended.depth + 1
            sizes |= {ended.anchor: (nodes, depth)} if ended.anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            nodes, depth = 1, 0
            sizes |= {event.anchor: (1, 0)} if event.anchor else {}
        else:
            continue
        if open_ones:
            open_ones[-1].nodes += nodes
            open_ones[-1].depth = max(open_ones[-1].depth, depth)
        if len(open_ones) + depth > MAX_DEPTH:
            raise ConfigError(f"{where}: line {line}: got sections in more than {MAX_DEPTH} others; allowed: fewer.")
        if sum(one.nodes for one in open_ones) > MAX_NODES:
            raise ConfigError(
                f"{where}: line {line}: got more than {MAX_NODES} values once aliases (*name) are written out; "
                "allowed: fewer. Put what tasks share into the section defaults."
            )


class _Open:
    """A section that has not ended yet: what it is called, and the values and depth that it has so far."""

    def __init__(self, anchor: str | None) -> None:
        """Start with the section itself."""
        self.anchor, self.nodes, self.depth = anchor, 1, 0


def _look_at_keys(node: Any, prefix: str, lines: dict[str, int], faults: list[Fault]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        where = f"{prefix}{key.value}"
        is_second = where in lines
        lines[where] = key.start_mark.line + 1
        if is_second:
            faults.append(Fault(where, "the same key twice", "each key once"))
            # What stands in it is not what is meant to be there twice.
            for own in [line for line in lines if line.startswith(f"{where}.")]:
                del lines[own]
        faults += _key_faults(key, where) if not where.startswith(_FREE_KEYS) else ()
        _look_at_keys(value, f"{where}.", lines, faults)


def _key_faults(key: Any, where: str) -> Iterator[Fault]:
    """Yield a fault for a key that YAML reads as something else than its text: `yes` is true, and `null` is nothing."""
    kind = key.tag.rsplit(":", 1)[-1]
    if kind in ("str", "merge"):
        return
    meant = {"bool": "true or false", "null": "nothing", "int": "a number", "float": "a number"}.get(kind, f"a {kind}")
    fix = f'Write it in quotes: "{key.value}".' if isinstance(key, yaml.ScalarNode) else ""
    yield Fault(where, f"a key that YAML reads as {meant}", "a name", fix)
