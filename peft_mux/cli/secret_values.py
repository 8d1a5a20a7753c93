"""`${HF_TOKEN}` in `tasks.yaml`: variables of the environment, in the fields that hold secrets and in no others.

A file is shared and kept under version control, a token is not. Elsewhere a variable would make a file that trains
something else on another machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from peft_mux.errors import Fault, shown

SECRETS = ("run.hub_token", "model_init_kwargs.token")
"""The fields that hold secrets; neither is written into a run folder."""

_VARIABLE = re.compile(r"\$\{(.*?)\}")
_BARE = re.compile(r"\$(\w+)")
_TEMPLATES = (".chat_template",)
"""Fields whose text has a language of its own."""


def expand_secrets(data: dict[str, Any]) -> list[Fault]:
    """Put variables of the environment into the fields that hold secrets, in place; return what is wrong with others.

    Args:
        data: what a file holds.
    """
    faults: list[Fault] = []
    for path in SECRETS:
        section, key = path.split(".")
        own = data.get(section)
        if isinstance(own, dict) and isinstance(own.get(key), str):
            own[key], more = _expanded(own[key], path)
            faults += more
    allowed = f"the value itself; variables stand in {' and '.join(SECRETS)} alone"
    for where, text in _texts(data, ""):
        if where not in SECRETS and not where.endswith(_TEMPLATES) and re.search(r"\$\{\w+\}", text):
            faults.append(Fault(where, shown(text), allowed, "Write the value, or give it with --set."))
    return faults


def _expanded(text: str, where: str) -> tuple[str | None, list[Fault]]:
    """Return a secret with its variables in it, `None` where one of them is not there."""
    names = _VARIABLE.findall(text)
    if bare := _BARE.fullmatch(text):
        return None, [Fault(where, shown(text), "a token, or a variable in braces", f"Write ${{{bare[1]}}}.")]
    fix = "Set it where the run is started, or leave the field out: then the log-in of the machine counts."
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        got = f"${{{missing[0]}}}, a variable of the environment that is not set"
        return None, [Fault(where, got, "variables that are set", fix)]
    return _VARIABLE.sub(lambda found: os.environ[found[1]], text), []


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield each text of a file with its dotted path."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, own in value.items():
            yield from _texts(own, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for own in value:
            yield from _texts(own, where)
