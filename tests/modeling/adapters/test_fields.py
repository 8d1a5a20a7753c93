"""Fields of configurations: each is trained with or refused by name, in our words, before PEFT fails on it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftType
from peft.tuners.lora import config as peft_config

from peft_mux import ConfigError, MultiTaskPeftModel, Task
from peft_mux.modeling.adapters.checks import config_faults
from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.adapters.lora.config import FIELDS, REASONS, REFUSED_INITIALISERS
from tests.invariants.mux_lab import make_trainer, rows, tiny_llama
from tests.modeling.adapters.cases import CASES, each_type
from tests.modeling.adapters.passes import assert_refused
from tests.paths import ROOT
from tools import lora_fields

LORA_FIELDS = [field.name for field in dataclasses.fields(LoraConfig)]


def changed(field: str, value: Any) -> LoraConfig:
    """Return a configuration whose field was set after construction, because PEFT refuses some values at once."""
    config = LoraConfig(r=4, target_modules=["q_proj"])
    setattr(config, field, value)
    return config


def refusal(config: Any, backbone: Any = None) -> str:
    """Return why a configuration is refused; nothing if it is not. The backbone must stay as it was then."""
    backbone = tiny_llama() if backbone is None else backbone
    before = list(backbone.state_dict())
    try:
        MultiTaskPeftModel(backbone, {"own": config}, verify=False)
    except ConfigError as error:
        assert list(backbone.state_dict()) == before
        return str(error)
    return ""


# ---------------------------------------------------------------------- of LoRA

WRONG: list[Any] = [
    *(None, True, False, 0, -1, 5, 10**9, 10**400, 2.5, math.nan, math.inf, "", "x", b"x", object(), print, ...),
    *([], [5], [None], [[1]], {"a": 1}, {"q_proj": "x"}, {"q_proj": 10**400}, {1: 2}, {"(": 3}),
    *(frozenset({"q_proj"}), ("q_proj", 5), np.zeros(3), np.float32(1), torch.zeros(2)),
]


JUDGED_BY_PEFT = ("peft_type", "layers_to_transform", "layers_pattern", "use_bdlora")
"""Fields of which PEFT refuses some values, because of others or of the backbone."""


@pytest.mark.slow
@pytest.mark.parametrize("field", LORA_FIELDS)
def test_any_value_in_any_field_is_trained_with_or_refused_by_name(field: str, tmp_path: Path) -> None:
    refused, taken, backbone = [], [], tiny_llama()
    for value in WRONG:
        message = refusal(changed(field, value), backbone)
        if message:
            refused.append(message)
        else:
            taken.append(value)
            backbone = tiny_llama()
    assert refused, "no field takes everything"
    for message in refused:
        assert message.startswith("tasks.own.peft_config")
        says_what_is_allowed = message.startswith(f"tasks.own.peft_config.{field}") and " must be " in message
        assert says_what_is_allowed or field in JUDGED_BY_PEFT
        assert "PEFT: " not in message or field in JUDGED_BY_PEFT
    for value in taken[:1]:
        task = Task(name="own", peft_config=changed(field, value), train_dataset=rows(0, 4, 5, 5), max_steps=1)
        # What was taken can also be written, by PEFT.
        make_trainer([task], tmp_path / "run").model.save_task("own", tmp_path / "adapter")


def test_what_is_no_configuration_is_refused_by_the_model_too() -> None:
    assert_refused({"own": 5}, r"tasks\.own\.peft_config must be a peft\.PeftConfig such as LoraConfig\(r=8\), got int")


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


@pytest.mark.parametrize("field", REASONS)
def test_a_refused_field_says_why_and_what_to_do(field: str) -> None:
    assert f"tasks.own.peft_config.{field}" in (message := refusal(changed(field, REFUSED_VALUES[field])))
    assert f"Not supported: {REASONS[field]}." in message


@pytest.mark.parametrize("name", REFUSED_INITIALISERS)
def test_a_refused_initialisation_says_why(name: str) -> None:
    message = refusal(changed("init_lora_weights", name))
    assert message.startswith("tasks.own.peft_config.init_lora_weights must be ")
    assert REFUSED_INITIALISERS[name] in message


def test_every_field_of_this_peft_is_documented_as_honoured_or_refused() -> None:
    assert {*lora_fields.HONOURED, *REASONS} == {*LORA_FIELDS}, "a field is new in PEFT: decide"
    assert not FIELDS & REASONS.keys()
    page = ROOT / "docs" / "lora_fields.md"
    assert page.read_text(encoding="utf-8") == lora_fields.page(), f"write it: {lora_fields.COMMAND} docs/{page.name}"


# -------------------------------------------------------------- of other types

BAD = ("x", -1, 0, None, True, [], math.nan, 1.5, b"q", [1], {"(": 2}, {"q_proj": "x"}, {"q_proj": -3})
SLICED = [one for one in CASES if one in KINDS and one is not PeftType.LORA]


@each_type(SLICED)
def test_no_bad_value_breaks_the_checks(peft_type: PeftType) -> None:
    for field in dataclasses.fields(CASES[peft_type].make(0)):  # type: ignore[arg-type]
        for bad in BAD if field.name != "peft_type" else ():
            config: Any = CASES[peft_type].make(0)
            setattr(config, field.name, bad)
            faults = config_faults(config, "tasks.a")
            assert all(fault.where.startswith("tasks.a.peft_config") for fault in faults)


# Our own method, factors that several layers share, factored weights, and rows of an embedding.
@pytest.mark.slow
@each_type(PeftType[name] for name in ("BOTTLENECK", "VERA", "LOKR", "TRAINABLE_TOKENS"))
def test_a_bad_value_is_refused_by_name_or_trained_with(peft_type: PeftType) -> None:
    for field in dataclasses.fields(CASES[peft_type].make(0)):  # type: ignore[arg-type]
        for bad in BAD:
            config: Any = CASES[peft_type].make(0)
            setattr(config, field.name, bad)
            message = refusal(config)
            assert not message or "tasks.own.peft_config" in message, f"{field.name}={bad!r}"


FAULTY = {
    "BOTTLENECK": ("bottleneck_size", 0, "an integer of at least 1"),
    "VERA": ("projection_prng_key", "seed", "an integer of at least 0"),
    "PSOFT": ("r", 0, "an integer of at least 1"),
    "LOHA": ("rank_dropout", 1.0, "a number in [0, 1)"),
    "DELORA": ("lambda_pattern", {"q_proj": -3}, "a number above 0"),
    "ROAD": ("group_size", True, "an integer of at least 1"),
    "DEFT": ("alpha", math.nan, "a finite number or None"),
    "PEANUT": ("act_fn", "sine", ("a configuration that PEFT accepts, got PeanutConfig. PEFT: Unsupported")),
    "GLORA": ("config_A_B", "x", "'lora', 'vector', 'constant', 'none'"),
    "SHIRA": ("mask_type", "mine", "'random'"),
    "OFT": ("coft", True, "its default False, got True. Not supported: it changes its weights in the forward pass"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_value_is_refused_with_the_field_and_what_is_allowed(name: str) -> None:
    field, value, allowed = FAULTY[name]
    config: Any = CASES[PeftType[name]].make(0)
    setattr(config, field, value)
    message = refusal(config)
    assert message.startswith("tasks.own.peft_config")
    assert f" must be {allowed}" in message


def test_a_configuration_that_trains_nothing_is_refused_and_the_backbone_given_back() -> None:
    config: Any = CASES[PeftType.GLORA].make(0)
    config.config_A_B = config.config_C = config.config_D_E = "none"
    assert "peft_config must have target modules that its type can adapt, with ranks below their widths," in refusal(
        config
    )
    model = MultiTaskPeftModel(tiny_llama(), {"l": CASES[PeftType.LORA].make(0)}, verify=False)
    with pytest.raises(ConfigError, match="trains nothing"):
        model.register_tasks({"a": config})
    assert model.tasks == ("l",)
