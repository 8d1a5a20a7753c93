"""What may stand in a field, read off PEFT's defaults; and what comes of values that PEFT itself would choke on."""

from __future__ import annotations

import math
from typing import Any

import pytest
from peft import PeftType

from peft_mux import MultiTaskPeftModel
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.catalogue import ENTRIES
from peft_mux.modeling.adapters.fields import types_of_defaults
from peft_mux.modeling.adapters.kind import KINDS
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.cases import CASES

BAD = ("x", -1, 0, None, True, [], math.nan, 1.5, b"q", [1], {"(": 2}, {"q_proj": "x"}, {"q_proj": -3})
SLICED = [one for one in KINDS if one is not PeftType.LORA]


@pytest.mark.parametrize("peft_type", SLICED, ids=[one.name for one in SLICED])
def test_no_value_of_a_field_gets_past_the_checks_and_breaks_the_check_itself(peft_type: PeftType) -> None:
    kind = KINDS[peft_type]
    for field in ENTRIES[peft_type.name].fields:
        for bad in BAD:
            config: Any = CASES[peft_type].make(0)
            setattr(config, field, bad)
            assert all(
                fault.where.startswith("tasks.a.peft_config") for fault in kind.faults(config, "tasks.a.peft_config")
            )


@pytest.mark.slow
@pytest.mark.parametrize("peft_type", SLICED, ids=[one.name for one in SLICED])
def test_a_bad_value_is_refused_by_name_or_trained_with_and_leaves_the_backbone_alone(peft_type: PeftType) -> None:
    for field in ENTRIES[peft_type.name].fields:
        for bad in BAD:
            config: Any = CASES[peft_type].make(0)
            setattr(config, field, bad)
            backbone = tiny_llama()
            before = list(backbone.state_dict())
            if message := refusal(backbone, config):
                assert "tasks.a.peft_config" in message
                assert list(backbone.state_dict()) == before, f"{field}={bad!r}"


def refusal(backbone: Any, config: Any) -> str:
    try:
        MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    except ConfigError as error:
        return str(error)
    return ""


FAULTY = {
    "VERA": ("projection_prng_key", "seed", "an integer of at least 0"),
    "PSOFT": ("r", 0, "an integer of at least 1"),
    "LOHA": ("rank_dropout", 1.0, r"a number in \[0, 1\)"),
    "DELORA": ("lambda_pattern", {"q_proj": -3}, "a dict from names of modules to numbers above 0"),
    "ROAD": ("group_size", True, "an integer of at least 1"),
    "DEFT": ("alpha", math.nan, "a finite number, or None"),
    "PEANUT": ("act_fn", "sine", "what PEFT takes. PEFT refuses it: Unsupported `act_fn`: sine"),
    "GLORA": ("config_A_B", "x", "what PEFT takes. PEFT refuses it: Invalid config_A_B value"),
    "SHIRA": ("mask_type", "mine", '"random"'),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_value_is_refused_with_the_field_and_what_is_allowed(name: str) -> None:
    field, value, allowed = FAULTY[name]
    config: Any = CASES[PeftType[name]].make(0)
    setattr(config, field, value)
    with pytest.raises(ConfigError, match=rf"tasks\.a\.peft_config.*; allowed: {allowed}"):
        MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False)


def test_a_configuration_that_trains_nothing_is_refused_and_the_backbone_given_back() -> None:
    config: Any = CASES[PeftType.GLORA].make(0)
    config.config_A_B = config.config_C = config.config_D_E = "none"
    backbone = tiny_llama()
    with pytest.raises(ConfigError, match=r"tasks\.a\.peft_config: got a configuration with which PEFT trains nothing"):
        MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    assert backbone.state_dict().keys() == tiny_llama().state_dict().keys()
    model = MultiTaskPeftModel(backbone, {"l": CASES[PeftType.LORA].make(0)}, verify=False)
    with pytest.raises(ConfigError, match="trains nothing"):
        model.register_tasks({"a": config})
    assert model.tasks == ("l",)


def test_seeds_may_be_zero_and_factors_need_not_be_whole() -> None:
    from peft import LoHaConfig, VeraConfig

    found = types_of_defaults(VeraConfig, {"projection_prng_key", "r", "target_modules", "vera_dropout"})
    assert found.keys() == {"projection_prng_key", "r", "vera_dropout"}
    assert found["projection_prng_key"].is_valid(0)
    assert not found["r"].is_valid(0)
    assert types_of_defaults(LoHaConfig, {"alpha"})["alpha"].is_valid(0.5)
