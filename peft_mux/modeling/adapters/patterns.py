r"""Regular expressions of a `PeftConfig`: they are the owner's, and PEFT matches them against every module's name.

One that backtracks, such as `(a|a)*b` or `.*.*.*.*.*.*x`, would keep the process busy for hours: Python can interrupt
no match, from no thread. A refusal by form alone would be both too strict (`(\w+\.)*q_proj` is harmless on most names)
and too lax (nothing is nested in the second example), and engines with a time limit differ from the `re` that PEFT
calls. So a pattern that its form does not show to be fast is tried out first: in a child process, with `re`, on the
very names that PEFT will match, for `TIME_LIMIT_S`.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from peft_mux.errors import Fault

TIME_LIMIT_S = 5.0
"""For all names of a model. A pattern of use takes milliseconds, so the rest is for a machine that is busy."""

_TRIAL = """
import json, re, sys
method, pattern, names = json.load(sys.stdin)
for name in names:
    getattr(re, method)(pattern, name)
"""
_LENGTH_OF_NAME, _MOST_WAYS = 100, 100_000
"""Characters of a module's name, about; and ways of matching it that take no more than a millisecond."""

_COMPILE_ERRORS = (re.error, RecursionError, OverflowError)


def pattern_faults(config: Any, names: Sequence[str], where: str) -> list[Fault]:
    """Return a fault for each regular expression that is none, or does not come to an end in time.

    Args:
        config: a `PeftConfig` of one task, whose fields have the right types.
        names: names of all modules of the backbone.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
    """
    faults = []
    for field, given, method, pattern in _patterns(config):
        reason = _reason_against(method, pattern, tuple(names))
        if reason:
            faults.append(
                Fault(f"{where}.{field}", f"{given!r:.80}", "a regular expression over names of modules", reason)
            )
    return faults


def _patterns(config: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the field and its pattern, then the function of `re` and the pattern with which PEFT matches it."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value.lower() != "all-linear":
            yield field, value, "fullmatch", value
    layers = getattr(config, "layers_pattern", None) or ()
    for value in [layers] if isinstance(layers, str) else layers:
        yield "layers_pattern", value, "match", rf"(?:^|.*?\.){value}\.(?P<idx>\d+)\."
    for field in ("rank_pattern", "alpha_pattern", "lambda_pattern", "n_frequency_pattern", "block_size_pattern"):
        for value in getattr(config, field, None) or ():
            yield f"{field}[{value!r:.60}]", value, "match", rf"(.*\.)?({value})$"


@lru_cache(maxsize=256)
def _reason_against(method: str, pattern: str, names: tuple[str, ...]) -> str:
    # Kept, as tasks of a run often share a pattern, and a trial of a bad one takes its time.
    try:
        re.compile(pattern)
    except _COMPILE_ERRORS as error:
        return f"It is not a regular expression: {error}."
    if is_fast(pattern):
        return ""
    try:
        subprocess.run(
            # Isolated and without site packages: nothing of the user's is imported, and it starts in 20 ms.
            [sys.executable, "-I", "-S", "-c", _TRIAL],
            input=json.dumps([method, pattern, names]),
            text=True,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return (
            f"It backtracks: matching takes more than {TIME_LIMIT_S:g} s. Leave out repetitions within repetitions, "
            "and those that may match the same text."
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"It may backtrack, and could not be tried out in a process of its own: {error}. List the names."
    return ""


def is_fast(pattern: str) -> bool:
    """Return whether the form of a regular expression shows that matching a name takes no more than milliseconds.

    Args:
        pattern: a regular expression that can be compiled.
    """
    # What `re` makes of a pattern is told by its own parser alone, which has another name before Python 3.11.
    parser: Any = getattr(re, "_parser", None) or importlib.import_module("sre_parse")
    return _most_ways(parser.parse(pattern)) <= _MOST_WAYS


def _most_ways(parsed: Iterable[Any]) -> float:
    """Return a bound on the number of ways in which a parsed pattern can be tried on one name."""
    ways = 1.0
    for operation, argument in parsed:
        name = str(operation)
        if name.endswith("_REPEAT"):
            least, most, body = argument
            ways *= _ways_of_repetition(int(least), int(most), _most_ways(body))
        elif name == "BRANCH":
            ways *= sum(_most_ways(alternative) for alternative in argument[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            ways *= _most_ways(argument[-1])
        elif name == "ATOMIC_GROUP":
            ways *= _most_ways(argument)
        elif name.startswith("GROUPREF"):
            return math.inf
    return ways


def _ways_of_repetition(least: int, most: int, of_body: float) -> float:
    if most <= 1:
        return 1 + of_body
    # Within a repetition choices multiply at every turn.
    return math.inf if of_body > 1 else min(most - least + 1, _LENGTH_OF_NAME)
