"""The balancing loss of routers on a model: its gradient against transformers' own loss, isolation, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F
from transformers.models.mixtral.modeling_mixtral import MixtralPreTrainedModel, load_balancing_loss_func
from transformers.models.phimoe import modeling_phimoe as phimoe

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.engine import lab as engine_lab
from tests.engine.losses import router_cases
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.passes import assert_as_plain, judges_like, moved

KINDS = (
    *("ernie4_5_moe", "flex_olmo", "flint", "gpt_oss", "granitemoe", "laguna", "mellum", "minimax_m2", "mixtral"),
    *("olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
)
FAST = ("mixtral", "gpt_oss", "phimoe")
ROWS = {"a": [[5, 9, 3, 17, 20], [4, 4, 8]], "b": [[30, 31, 2, 6, 11, 12, 40]]}
CONFIGS = dict.fromkeys("ab", LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
COEFFICIENT = 0.7


def adapted(backbone: Any) -> MultiTaskPeftModel:
    """Return a model of two tasks whose adapters are not zero; the first balances routers."""
    model = moved(MultiTaskPeftModel(backbone, CONFIGS, verify=False)).train()
    model.router_loss.assign(model.adapter_of("a"), COEFFICIENT, model.backbone)
    return model


def packed(rows: dict[str, list[list[int]]]) -> Any:
    """Return a micro-batch of rows of tasks."""
    return ChunkPackingCollator()([{"task": name, "input_ids": ids} for name, own in rows.items() for ids in own])


def plain_loss(model: Any, rows: list[list[int]]) -> torch.Tensor:
    """Return the loss of a task from plain PEFT, row by row, with the loss function of transformers for routers."""
    terms, logits = [], []
    for ids in rows:
        tokens = torch.tensor([ids])
        outputs = model(input_ids=tokens, output_router_logits=True)
        logits.append(outputs.router_logits)
        terms.append(F.cross_entropy(outputs.logits[0, :-1], tokens[0, 1:], reduction="none"))
    by_layer = tuple(torch.cat([own.reshape(-1, own.shape[-1]) for own in one]) for one in zip(*logits, strict=True))
    balancing = load_balancing_loss_func(by_layer, by_layer[0].shape[-1], model.config.num_experts_per_tok)
    return torch.cat(terms).mean() + (COEFFICIENT * balancing if rows is ROWS["a"] else 0.0)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FAST else [pytest.mark.slow]) for kind in KINDS]
)
def test_the_loss_and_its_gradient_are_those_of_transformers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = phimoe.sparsemixer
    backbone = engine_lab.backbone(kind)
    model = adapted(copy.deepcopy(backbone))
    # In training phimoe draws its experts.
    monkeypatch.setattr(phimoe, "sparsemixer", lambda *args, training, **others: mixer(*args, training=False, **others))
    judges = judges_like(model, CONFIGS, lambda: copy.deepcopy(backbone))
    assert_as_plain(model, packed(ROWS), judges, ROWS, loss_of=plain_loss)


def test_a_task_whose_routers_see_nan_reaches_no_other() -> None:
    backbone = router_cases.backbone()
    healthy, model = adapted(copy.deepcopy(backbone)), adapted(copy.deepcopy(backbone))
    model.router_loss.assign(model.adapter_of("b"), COEFFICIENT, model.backbone)
    healthy.router_loss.assign(healthy.adapter_of("b"), COEFFICIENT, healthy.backbone)
    with torch.no_grad():
        next(iter(model.task_parameters("a").values())).fill_(float("nan"))
    found = []
    for one in (healthy, model):
        output = one(packed(ROWS))
        output.losses.sum().backward()
        found.append((output.losses, one.task_parameters("b")))
    assert found[1][0][0].isnan()
    # Not to the bit: experts compute other numbers of rows.
    torch.testing.assert_close(found[0][0][1], found[1][0][1], rtol=1e-5, atol=0.0)
    for key, parameter in found[0][1].items():
        torch.testing.assert_close(parameter.grad, found[1][1][key].grad, rtol=1e-4, atol=1e-6)


def test_passes_without_gradient_and_losses_of_the_user_are_without_it() -> None:
    model = adapted(copy.deepcopy(router_cases.backbone()))
    with torch.no_grad():
        without = model(packed(ROWS)).losses
    balanced = model(packed(ROWS)).losses.detach()
    assert balanced[0] > without[0] + 0.1
    assert balanced[1] == pytest.approx(without[1].item(), rel=1e-6)
    tokens = model.token_logprobs(packed(ROWS))["a"]
    tokens.nll_M.mean().backward()
    own = {key: item.grad.clone() for key, item in model.task_parameters("a").items()}  # type: ignore[union-attr]
    model.router_loss.assign(model.adapter_of("a"), 0.0)
    for parameter in model.task_parameters("a").values():
        parameter.grad.zero_()  # type: ignore[union-attr]
    model(packed(ROWS)).losses[0].backward()
    for key, parameter in model.task_parameters("a").items():
        torch.testing.assert_close(own[key], parameter.grad, rtol=1e-4, atol=1e-6)


def test_counts_are_exact_under_autocast() -> None:
    model = adapted(copy.deepcopy(router_cases.backbone()))
    rows = {"a": [row["input_ids"] for row in lab.rows(1, 40, 50, 60)]}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), model.router_loss.counting() as counted:
        model.target_losses(packed(rows))
    counts, probabilities = counted[model.adapter_of("a")].double()
    config, num_tokens = model.backbone.config, sum(map(len, rows["a"]))
    assert counts.sum() == num_tokens * config.num_hidden_layers * config.num_experts_per_tok
    assert probabilities.sum().item() == pytest.approx(num_tokens * config.num_hidden_layers, rel=1e-6)


def trainer_of(backbone: Any, folder: Path, **settings: Any) -> MultiTaskTrainer:
    """Return a trainer of one task."""
    args = MultiTaskTrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    task = lab.small_task("a", data_seed=1, max_steps=1, target_modules=["q_proj"], **settings)
    return MultiTaskTrainer(backbone, args, [task])


def test_a_coefficient_for_a_model_without_routers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"tasks\.a\.router_aux_loss_coef must be.*, got 0\.1 with the model type llama"
    ):
        trainer_of(lab.tiny_llama(), tmp_path, router_aux_loss_coef=0.1)
    trainer_of(lab.tiny_llama(), tmp_path, router_aux_loss_coef=0.0)
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef must be a finite number of at least 0, got -0\.1"):
        lab.small_task("a", data_seed=1, router_aux_loss_coef=-0.1)


def test_a_mixture_whose_routers_are_not_known_is_refused_unless_the_coefficient_is_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MixtralPreTrainedModel, "_can_record_outputs", {})
    backbone = router_cases.backbone()
    with pytest.raises(
        UnsupportedModelError, match=r"MixtralForCausalLM has no balancing loss.*router_aux_loss_coef=0"
    ):
        trainer_of(copy.deepcopy(backbone), tmp_path).train()
    trainer_of(copy.deepcopy(backbone), tmp_path / "without", router_aux_loss_coef=0.0).train()
