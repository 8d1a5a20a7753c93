"""Every field of `LoraConfig` has a row: honoured, and then by which test, or refused with its reason."""

from __future__ import annotations

import ast
import dataclasses
from functools import cache
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora import config as peft_config

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.lora.config import FIELD_TABLE, REFUSED_INITIALISERS, Honoured, Refused, field_page
from tests.invariants.mux_lab import tiny_llama
from tests.paths import ROOT

_HERE = "modeling/adapters"
_STEPS = f"{_HERE}/lora/test_row_steps.py::test_a_task_goes_as_plain_peft_alone_and_comes_back_there"
_ALONE = "test_a_task_goes_as_plain_peft_alone_and_is_saved_as_there"
_ON_ANY_SETS = "test_tasks_on_any_sets_of_parameters_go_as_plain_peft_goes_with_each_alone"
_ANY = f"{_HERE}/test_field_types.py::test_any_value_in_any_field_is_trained_with_or_refused_by_name"
_INITIAL = f"{_HERE}/lora/test_initial_factors.py"

TESTED_BY = {
    "task_type": f"{_HERE}/test_kinds.py::test_a_task_type_that_cannot_be_trained_is_refused",
    "peft_type": f"{_HERE}/test_kinds.py::test_a_kind_is_found_by_configuration_layer_and_parameter",
    "auto_mapping": _ANY,
    "peft_version": _ANY,
    "base_model_name_or_path": _ANY,
    "revision": _ANY,
    "inference_mode": f"{_HERE}/test_kinds.py::test_an_adapter_is_saved_and_comes_back_in_plain_peft_and_here",
    "r": f"{_HERE}/test_kinds.py::test_a_pass_of_two_tasks_gives_each_what_plain_peft_alone_gives",
    "target_modules": f"{_HERE}/test_kinds.py::test_a_narrowed_configuration_adapts_the_given_layers_alone",
    "exclude_modules": f"{_HERE}/lora/test_field_table.py::test_layers_are_chosen_and_scaled_as_peft_does",
    "lora_alpha": _STEPS,
    "lora_dropout": f"{_HERE}/lora/test_row_steps.py::test_dropout_acts_where_peft_lets_it_act",
    "fan_in_fan_out": f"{_HERE}/own/test_biases.py::{_ALONE}",
    "bias": f"{_HERE}/own/test_biases.py::{_ALONE}",
    "use_rslora": _STEPS,
    "modules_to_save": f"{_HERE}/own/test_copies.py::{_ALONE}",
    "init_lora_weights": _STEPS,
    "layers_to_transform": f"{_HERE}/lora/test_field_table.py::test_layers_are_chosen_and_scaled_as_peft_does",
    "layers_pattern": f"{_HERE}/lora/test_field_table.py::test_layers_are_chosen_and_scaled_as_peft_does",
    "rank_pattern": _STEPS,
    "alpha_pattern": _STEPS,
    "megatron_core": _ANY,
    "trainable_token_indices": f"{_HERE}/own/test_token_rows.py::{_ALONE}",
    "corda_config": f"{_INITIAL}::test_initialisers_that_read_what_was_prepared_on_the_backbone",
    "lora_ga_config": f"{_INITIAL}::test_initialisers_that_read_what_was_prepared_on_the_backbone",
    "use_dora": _STEPS,
    "qalora_group_size": _ANY,
    "lora_bias": _STEPS,
    "target_parameters": f"{_HERE}/lora/test_experts.py::{_ON_ANY_SETS}",
    "use_bdlora": _STEPS,
}
"""Which test shows that a field is honoured, beside its file."""

REFUSED_VALUES: dict[str, Any] = {
    "megatron_config": {"a": 1},
    "loftq_config": {"loftq_bits": 4},
    "eva_config": peft_config.EvaConfig(),
    "velora_config": peft_config.VeloraConfig(),
    "alora_invocation_tokens": [5, 6],
    "use_qalora": True,
    "monteclora_config": peft_config.MontecloraConfig(),
    "layer_replication": [(0, 2), (1, 2)],
    "runtime_config": peft_config.LoraRuntimeConfig(ephemeral_gpu_offload=True),
    "arrow_config": peft_config.ArrowConfig(),
    "kasa_config": peft_config.KasaConfig(),
    "ensure_weight_tying": True,
}
"""A value of each field that is refused."""

FIELDS = [field.name for field in dataclasses.fields(LoraConfig)]


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_is_honoured_by_a_test_or_refused(field: str) -> None:
    assert field in FIELD_TABLE, f"{field} is new in PEFT: decide, and write its row"
    if isinstance(FIELD_TABLE[field], Honoured):
        file, _, test = TESTED_BY[field].partition("::")
        assert test in _tests_of(file)
        assert field not in REFUSED_VALUES
    else:
        assert field in REFUSED_VALUES
        assert field not in TESTED_BY


@cache
def _tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_no_row_is_of_a_field_that_peft_does_not_have() -> None:
    assert set(FIELD_TABLE) == set(FIELDS)


@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_a_refusal_says_why_and_what_to_do(field: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    setattr(config, field, REFUSED_VALUES[field])  # afterwards, as PEFT itself drops or refuses a few
    entry = FIELD_TABLE[field]
    assert isinstance(entry, Refused)
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False)
    said = str(caught.value)
    assert f"tasks.a.peft_config.{field}" in said
    assert f"{entry.reason}. {entry.instead}" in said


@pytest.mark.parametrize("name", REFUSED_INITIALISERS)
def test_an_initialisation_that_is_refused_says_why(name: str) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    config.init_lora_weights = name  # type: ignore[assignment]
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False)
    entry = REFUSED_INITIALISERS[name]
    assert isinstance(entry, Refused)
    assert "tasks.a.peft_config.init_lora_weights" in str(caught.value)
    assert entry.reason in str(caught.value)


def test_layers_are_chosen_and_scaled_as_peft_does() -> None:
    options: dict[str, Any] = {"rank_pattern": {r"^model\.layers\.0\..*v_proj": 2, "down_proj": 3}}
    configs = {
        "excluded": LoraConfig(r=4, target_modules="all-linear", exclude_modules=r".*(k|o)_proj", **options),
        "listed": LoraConfig(r=4, target_modules=["v_proj", "down_proj"], exclude_modules=["layers.1.mlp.down_proj"]),
        "second": LoraConfig(
            r=4, target_modules=["v_proj"], layers_to_transform=[1], layers_pattern="layers", alpha_pattern={"v": 2}
        ),
        "patterns": LoraConfig(r=4, target_modules=["v_proj", "down_proj"], alpha_pattern={r"layers\.\d\.mlp.*": 16}),
    }
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False)
    for name, config in configs.items():
        judge = get_peft_model(tiny_llama(), config)
        wanted = {key.replace(".default", ""): item.shape for key, item in judge.named_parameters() if "lora" in key}
        assert {key: item.shape for key, item in model.task_parameters(name).items()} == wanted
        scales = {key: item.scaling["default"] for key, item in judge.named_modules() if isinstance(item, LoraLayer)}
        ours = dict(model.named_modules())
        assert all(ours[key].scaling[model.adapter_of(name)] == scale for key, scale in scales.items())


def test_the_page_of_all_fields_is_written_from_the_table() -> None:
    assert (ROOT / "docs" / "lora_fields.md").read_text(encoding="utf-8") == field_page()
