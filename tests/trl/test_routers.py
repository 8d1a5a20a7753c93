"""The balancing loss of routers, compared with TRL's trainers: by default with the model's own coefficient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from peft_mux.task import Task
from tests.invariants import mux_lab
from tests.trl import trl_lab as lab

trl = pytest.importorskip("trl", reason="trl is not installed")
pytestmark = pytest.mark.slow

OWN = 0.4
"""Coefficient of the tiny models: large, so that a wrong loss shows."""

FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}),
    "olmoe": ("Olmoe", {"num_experts": 4}),
}
COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in lab.pairs()]


def mixture(family: str) -> Any:
    """Return a tiny mixture of experts whose routers prefer some experts."""
    name, shape = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(lab.tokenizer()),
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        router_aux_loss_coef=OWN,
        bos_token_id=None,
        eos_token_id=lab.tokenizer().eos_token_id,
        pad_token_id=lab.tokenizer().pad_token_id,
        **shape,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    mux_lab.fill(model, 0)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith(("gate.weight", "router.weight")):
                weight.mul_(5.0)
    return model


@pytest.fixture(autouse=True)
def backbone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let both train a mixture."""
    model = mixture(getattr(request, "param", "mixtral"))
    monkeypatch.setattr(lab, "_language_model", lambda: model)
    return model


def both(
    folder: Path, trainer: str, rows: Sequence[Mapping[str, Any]], options: Mapping[str, Any], **settings: Any
) -> tuple[lab.Outcome, lab.Outcome]:
    """Train with TRL and here."""
    kinds = getattr(trl, f"{trainer}Trainer"), getattr(trl, f"{trainer}Config")
    theirs = lab.trl_outcome(*kinds, rows, folder, max_length=64, **options)
    mine = lab.our_outcomes([lab.task("a", rows, max_length=64, **settings)], folder)["a"]
    return theirs, mine


@pytest.mark.parametrize("backbone", FAMILIES, indirect=True)
def test_a_mixture_trains_with_its_own_coefficient_by_default_as_in_trl(tmp_path: Path) -> None:
    theirs, mine = both(tmp_path, "SFT", COMPLETIONS, {})
    lab.assert_same(mine, theirs, ["aux_loss"])
    # It is a part of the loss that is logged, and of the gradient.
    without = lab.our_outcomes([lab.task("a", COMPLETIONS, max_length=64, router_aux_loss_coef=0.0)], tmp_path)["a"]
    assert mine.losses[0] - without.losses[0] == pytest.approx(OWN * mine.metrics[0]["aux_loss"], rel=1e-4)
    assert max((mine.weights[key] - weight).norm() / weight.norm() for key, weight in without.weights.items()) > 0.1


@pytest.mark.parametrize(
    ("trainer", "rows", "settings"),
    [
        pytest.param("DPO", lab.pairs(), {}, id="dpo"),
        pytest.param("KTO", lab.answers(), {"objective": "kto"}, id="kto"),
    ],
)
def test_losses_of_preferences_balance_routers_as_in_trl(
    trainer: str, rows: list[dict[str, Any]], settings: dict[str, Any], tmp_path: Path
) -> None:
    coefficient = {"router_aux_loss_coef": 0.1}
    theirs, mine = both(tmp_path, trainer, rows, coefficient, **coefficient, **settings)
    lab.assert_same(mine, theirs, ["aux_loss"])


def test_conversions_carry_the_coefficient(tmp_path: Path) -> None:
    rows: dict[str, Any] = {"train_dataset": COMPLETIONS, "peft_config": lab.adapter()}
    for given in (None, 0.0, 0.3):
        config = trl.SFTConfig(output_dir=str(tmp_path), router_aux_loss_coef=given, bf16=False, use_cpu=True)
        assert Task.from_sft_config("a", config, **rows).router_aux_loss_coef == given
    # Trainer leaves it to `output_router_logits`, which is off.
    plain = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert Task.from_sft_config("a", plain, max_length=64, **rows).router_aux_loss_coef == 0.0


def test_a_coefficient_of_zero_leaves_the_loss_out(tmp_path: Path) -> None:
    theirs, mine = both(tmp_path, "SFT", COMPLETIONS, {"router_aux_loss_coef": 0.0}, router_aux_loss_coef=0.0)
    lab.assert_same(mine, theirs, ["aux_loss"])
    assert all("aux_loss" not in entry for entry in mine.metrics)
