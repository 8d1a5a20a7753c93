"""Every member of `PeftType` is in exactly one category, and what is said of it is what happens."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters import catalogue as registry
from peft_mux.modeling.adapters.catalogue import ENTRIES, Category, TypeEntry, category_of, entry_of, register_entry
from peft_mux.modeling.adapters.checks import peft_config_faults
from peft_mux.modeling.adapters.kind import KINDS
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.cases import CASES
from tests.modeling.adapters.prompts.prompt_cases import PROMPTS, config_of
from tests.modeling.adapters.toy_kind import ToyKind, registered
from tools.peft_types import COMMAND, page

EVERY_TYPE = pytest.mark.parametrize("peft_type", list(PeftType), ids=[one.name for one in PeftType])
PAGE = Path(__file__).parents[4] / "docs" / "peft_types.md"


@EVERY_TYPE
def test_a_type_is_trained_or_refused_with_a_reason_and_a_type_that_works(peft_type: PeftType) -> None:
    entry = entry_of(peft_type)
    assert entry.name == peft_type.name
    assert (entry.category is Category.REFUSED) is (peft_type not in KINDS)
    if entry.category is Category.REFUSED:
        assert entry.refusal
        assert entry.nearest
        assert all(PeftType[name] in KINDS for name in entry.nearest if name in PeftType.__members__)
    else:
        kinds_of_prompts = {config_of(form).peft_type for form in PROMPTS}
        assert peft_type in {*CASES, *kinds_of_prompts}, "a conformance case of test_kinds.py, or a form of a prompt"


@EVERY_TYPE
def test_what_an_entry_lets_be_set_are_fields_of_peft(peft_type: PeftType) -> None:
    entry = ENTRIES.get(peft_type.name)
    if entry is None:
        return
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type])}
    assert set(entry.fields) <= known
    assert set(entry.reasons) <= known
    assert not set(entry.fields) & set(entry.reasons)


@EVERY_TYPE
def test_the_adapters_of_all_tasks_lie_in_one_layer_where_a_type_is_fused(peft_type: PeftType) -> None:
    if category_of(peft_type) is not Category.FUSED:
        return
    make = CASES[peft_type].make
    model = MultiTaskPeftModel(lab.tiny_llama(), {"a": make(0), "b": make(1)})
    layers: list[Any] = [module for module in model.backbone.modules() if isinstance(module, BaseTunerLayer)]
    assert layers
    assert not any(isinstance(layer.base_layer, BaseTunerLayer) for layer in layers)


def test_most_types_are_trained() -> None:
    assert sum(category_of(one) is not Category.REFUSED for one in PeftType) >= 30


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES.values() if entry.category is Category.REFUSED])
def test_a_task_of_a_refused_type_hears_why_and_of_the_nearest_type(name: str, tmp_path: Path) -> None:
    config: Any = PeftConfig(peft_type=PeftType[name])
    task = Task(name="sql", peft_config=config, train_dataset=[{"input_ids": [1, 2]}])
    entry = entry_of(PeftType[name])
    with pytest.raises(ConfigError) as caught:
        lab.make_trainer([task], tmp_path)
    assert f"tasks.sql.peft_config: got PeftConfig ({name}); allowed: PEFT types LORA, " in str(caught.value)
    assert entry.refusal[1:] in str(caught.value)
    assert f"Nearest: {', '.join(entry.nearest)}." in str(caught.value)


@pytest.fixture
def unknown_type(monkeypatch: pytest.MonkeyPatch) -> PeftType:
    """A type of a later PEFT, of which no entry tells."""
    monkeypatch.setattr(registry, "ENTRIES", {name: entry for name, entry in ENTRIES.items() if name != "POLY"})
    return PeftType.POLY


def test_a_type_of_a_later_peft_is_refused_by_name(unknown_type: PeftType) -> None:
    entry = entry_of(unknown_type)
    assert entry.category is Category.REFUSED
    (fault,) = peft_config_faults(peft.PolyConfig(), "tasks.a")
    assert "PolyConfig (POLY)" in fault.got
    assert "This release of peft_mux does not know it. Nearest: LORA." in fault.fix


def test_a_type_that_is_no_member_is_refused_by_name() -> None:
    config = peft.LoraConfig()
    config.peft_type = "SOMETHING"  # type: ignore[assignment]
    (fault,) = peft_config_faults(config, "tasks.a")
    assert "LoraConfig (SOMETHING)" in fault.got


def test_a_registered_kind_without_an_entry_counts_by_how_it_runs(unknown_type: PeftType) -> None:
    kind = ToyKind()
    kind.peft_type = unknown_type
    with registered(kind):
        assert category_of(unknown_type) is Category.SLICED
    assert category_of(unknown_type) is Category.REFUSED


def test_an_entry_that_others_register_takes_the_place_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "ENTRIES", dict(ENTRIES))
    other = TypeEntry("POLY", Category.REFUSED, "a bank", refusal="we do not like it", nearest=("LORA",))
    register_entry(other)
    assert entry_of(PeftType.POLY) is other


def test_a_refusal_without_a_nearest_type_is_no_entry() -> None:
    with pytest.raises(ValueError, match="POLY: a refused type has a reason and a nearest type"):
        TypeEntry("POLY", Category.REFUSED, "a bank", refusal="no")
    with pytest.raises(ValueError, match="POLY"):
        TypeEntry("POLY", Category.SLICED, "a bank", refusal="no", nearest=("LORA",))


def test_the_page_of_types_is_what_the_registry_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"write it anew: {COMMAND} {PAGE.name}"


def test_no_other_file_of_the_product_names_a_type_of_the_catalogue() -> None:
    names = {name for name, entry in ENTRIES.items() if entry.category in (Category.SLICED, Category.WEIGHT_SPACE)}
    root = Path(registry.__file__).parents[2]
    for path in root.rglob("*.py"):
        if path.name not in ("catalogue.py", "special_kinds.py"):
            constants = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
            assert not names & {value for value in constants if isinstance(value, str)}, path
