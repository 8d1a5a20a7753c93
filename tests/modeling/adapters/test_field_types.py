"""Wrong types in any field of a `LoraConfig`: refused by field, in our words, before PEFT fails on them by itself."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux import ConfigError, MultiTaskPeftModel, Task
from tests.invariants.mux_lab import make_trainer, rows, tiny_llama

WRONG: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        5,
        10**9,
        10**400,
        2.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        b"x",
        object(),
        print,
        ...,
    ),
    *([], [5], [None], [[1]], {"a": 1}, {"q_proj": "x"}, {1: 2}, {"(": 3}, frozenset({"q_proj"}), ("q_proj", 5)),
    *(np.zeros(3), np.float32(1), torch.zeros(2), ""),
]


def changed(field: str, value: Any) -> LoraConfig:
    """Return a configuration whose field was set after PEFT looked at it, as PEFT itself refuses a few at once."""
    config = LoraConfig(r=4, target_modules=["q_proj"])
    setattr(config, field, value)
    return config


def refusal(config: LoraConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(tiny_llama(), {"own": config})
    return str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 2.5),
        ("r", True),
        ("r", 10**9),
        ("rank_pattern", 5),
        ("rank_pattern", {1: 2}),
        ("rank_pattern", None),
        ("rank_pattern", {"q_proj": 10**9}),
        ("alpha_pattern", [4]),
        ("alpha_pattern", {"q_proj": 10**400}),
        ("target_modules", [5]),
        ("target_modules", [""]),
        ("exclude_modules", 7),
        ("layers_to_transform", "x"),
        ("layers_to_transform", True),
        ("layers_pattern", 3),
        ("lora_dropout", "a"),
        ("lora_alpha", 10**400),
        ("lora_alpha", 1e308),
        ("bias", 3),
        ("bias", None),
        ("modules_to_save", [1]),
        ("init_lora_weights", object()),
        ("init_lora_weights", 1),
        ("use_rslora", "yes"),
        ("fan_in_fan_out", 1),
        ("trainable_token_indices", []),
        ("runtime_config", None),
        ("revision", object()),
        ("auto_mapping", {"a": object()}),
        ("task_type", np.zeros(3)),
        ("use_dora", torch.zeros(2)),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_field_with_what_is_allowed(field: str, value: Any) -> None:
    message = refusal(changed(field, value))
    assert message.startswith(f"tasks.own.peft_config.{field}"), message
    assert "; allowed: " in message
    assert "PEFT refuses it" not in message


def test_every_wrong_field_is_named_at_once() -> None:
    config = changed("rank_pattern", 5)
    config.target_modules, config.lora_dropout, config.layers_to_transform = [5], "a", "x"  # type: ignore[assignment]
    message = refusal(config)
    assert "4 things are wrong" in message
    for field in ("rank_pattern", "target_modules", "lora_dropout", "layers_to_transform"):
        assert f"tasks.own.peft_config.{field}: got " in message


@pytest.mark.parametrize("field", [field.name for field in fields(LoraConfig)])
def test_any_value_in_any_field_is_trained_with_or_refused_by_name(field: str, tmp_path: Path) -> None:
    refused = []
    for value in WRONG:
        try:
            task = Task(name="own", peft_config=changed(field, value), train_dataset=rows(0, 4, 5, 5), max_steps=1)
            trainer = make_trainer([task], tmp_path / "run")
        except ConfigError as error:
            refused.append(str(error))
            continue
        assert trainer.task_statuses == {"own": "waiting"}
        # What was taken can also be written, by PEFT.
        trainer.model.save_task("own", tmp_path / "adapter")
    assert refused, "no field takes everything"
    assert all("tasks.own.peft_config" in message for message in refused)


def test_what_is_no_configuration_is_refused_by_the_model_too() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.own\.peft_config: got int; allowed: a peft\.PeftConfig"):
        MultiTaskPeftModel(tiny_llama(), {"own": 5})  # type: ignore[dict-item]
