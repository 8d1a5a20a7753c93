"""Regular expressions in a `LoraConfig`: one that would never end is refused in time, harmless ones are not."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from peft import LoraConfig

from peft_mux.modeling.adapters import checks as patterns
from peft_mux.modeling.adapters.checks import is_fast, pattern_faults
from tests.modeling.adapters.passes import assert_refused

NAMES = [f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(4) for part in "qkvo"]
ENDLESS = ["(.*)*(.*)*(.*)*#", r"(\w|.)*#", ".*.*.*.*.*.*.*.*.*.*.*.*#", "(" + ".?" * 40 + ")#"]


@pytest.fixture(autouse=True)
def _short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 1.0)
    patterns._reason_against.cache_clear()


FIELDS = ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"]


@pytest.mark.parametrize(("field", "pattern"), list(zip(FIELDS, ENDLESS, strict=True)))
def test_a_pattern_that_backtracks_without_end_is_refused_by_its_field(
    field: str, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.2)  # none of them ends in any time
    value: Any = {pattern: 4} if field.endswith("_pattern") else pattern
    config = LoraConfig(r=4, **{"target_modules": ["q_proj"], field: value})
    assert_refused({"own": config}, rf"tasks\.own\.peft_config\.{field}.*It backtracks")


@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ("target_modules", "("),
        ("exclude_modules", "a{3,2}"),
        ("layers_pattern", "a{99999999999999}"),
        ("rank_pattern", "(?P<idx>a)(?P<idx>b)"),
    ],
)
def test_what_is_no_pattern_is_refused_by_its_field(field: str, pattern: str) -> None:
    value: Any = {pattern: 4} if field == "rank_pattern" else pattern
    config = LoraConfig(r=4, **{"target_modules": ["q_proj"]})
    config.layers_to_transform = [0] if field == "layers_pattern" else None
    setattr(config, field, value)
    assert_refused({"own": config}, rf"tasks\.own\.peft_config\.{field}.*not a regular expression")


def test_a_nested_repetition_that_ends_in_time_is_taken() -> None:
    assert pattern_faults(LoraConfig(target_modules=r"(\w+\.)*(q|v)_proj"), NAMES, "x") == []
    assert pattern_faults(LoraConfig(target_modules=r"(?i).*\.Q_PROJ"), NAMES, "x") == []


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q|k|v|o)_proj",
        r"model\.layers\.\d+\.self_attn\.(q|v)_proj",
        r".*layers\.[0-9]{1,2}\..*_proj",
        r"(.*\.)?(q_proj)$",
    ],
)
def test_ordinary_patterns_need_no_process(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a process was started"))
    assert is_fast(pattern)
    assert pattern_faults(LoraConfig(target_modules=pattern), NAMES, "x") == []
