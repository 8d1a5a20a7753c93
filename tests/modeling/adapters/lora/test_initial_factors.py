"""Initialisations that take from the backbone's weights: prepared ones, their files, resumption, and refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from safetensors.torch import load_file

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.errors import CheckpointError
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import tiny_gpt2
from tests.modeling.adapters.passes import IDS, assert_as_plain, assert_refused, perturbed, plain

TWO = ["q_proj", "down_proj"]
PISSA = LoraConfig(r=4, target_modules=TWO, init_lora_weights="pissa")


CORDA = LoraConfig(r=4, target_modules=TWO, init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"))
LORA_GA = LoraConfig(r=4, target_modules=TWO, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())


def prepare(model: Any, config: LoraConfig) -> None:
    if config is CORDA:
        preprocess_corda(model, config, run_model=lambda: model(IDS))
    else:
        preprocess_loraga(model, config, train_step=lambda: model(input_ids=IDS, labels=IDS).loss.backward())


@pytest.mark.parametrize("config", [CORDA, LORA_GA], ids=["corda", "lora_ga"])
def test_initialisers_read_what_was_prepared_on_the_backbone(config: LoraConfig) -> None:
    assert_refused({"own": config}, r"tasks\.own\.peft_config: PEFT refuses it: .*preprocess_(corda|loraga)")
    models = tiny_llama(), tiny_llama()
    for model in models:
        prepare(model, config)
        model.requires_grad_(True)
    mux = MultiTaskPeftModel(models[1], {"own": config}, seeds={"own": 3}, verify=False)
    judge, own = plain(config, 3, lambda: models[0])
    ours = mux.task_parameters("own")
    assert all(relative(ours[key], item.detach()) <= 1e-6 for key, item in own.items()), "initial weights"
    for parameters in (own, ours):
        perturbed(parameters, 0)
    rows = {"own": IDS.tolist()}
    batch = ChunkPackingCollator()([{"task": "own", "input_ids": rows["own"][0]}])
    assert_as_plain(mux, batch, {"own": (judge, own)}, rows)
    for (name, ours), theirs in zip(mux.unload().named_parameters(), tiny_llama().parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_is_saved_is_the_lora_into_which_peft_converts(tmp_path: Path) -> None:
    torch.manual_seed(3)
    judge = get_peft_model(tiny_llama(), copy.deepcopy(PISSA))
    initial = tmp_path / "initial"
    judge.peft_config["default"].init_lora_weights = True
    judge.save_pretrained(str(initial))
    model = MultiTaskPeftModel(tiny_llama(), {"own": PISSA}, seeds={"own": 3}, verify=False)
    for each, adapter in ((judge, "default"), (model, model.adapter_of("own"))):
        with torch.no_grad():
            for name, item in each.named_parameters():
                if f".{adapter}." in name:
                    item.mul_(1.25)
    judge.peft_config["default"].init_lora_weights = "pissa"
    judge.save_pretrained(str(tmp_path / "theirs"), path_initial_model_for_weight_conversion=str(initial))
    model.save_pretrained(tmp_path / "ours")
    theirs, ours = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "theirs", tmp_path / "ours/own")
    )
    assert theirs.keys() == ours.keys()
    assert all(relative(ours[key], item) <= 1e-6 for key, item in theirs.items())
    configs = [LoraConfig.from_pretrained(str(path)) for path in (tmp_path / "theirs", tmp_path / "ours/own")]
    fields = ("r", "lora_alpha", "init_lora_weights", "rank_pattern", "alpha_pattern", "target_modules")
    assert all(getattr(configs[0], field) == getattr(configs[1], field) for field in fields)


def test_a_saved_adapter_is_read_again_with_its_initial_factors(tmp_path: Path) -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"own": PISSA}, verify=False).eval()
    with torch.no_grad():
        for item in model.task_parameters("own").values():
            item.mul_(1.25)
    model.save_pretrained(tmp_path)
    # Its initial factors are others, as if decomposed on another machine.
    other = tiny_llama()
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.add_(0.01)
    again = MultiTaskPeftModel(other, {"own": PISSA}, verify=False).eval()
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.base_layer.weight.sub_(0.01)
    again.load_task("own", tmp_path / "own")
    wanted = model.task_view("own")(input_ids=IDS).logits
    assert relative(again.task_view("own")(input_ids=IDS).logits, wanted) <= 1e-6
    plain = MultiTaskPeftModel(tiny_llama(), {"own": LoraConfig(r=4, target_modules=TWO)}, verify=False)
    with pytest.raises(CheckpointError, match="of the same configuration"):
        plain.load_task("own", tmp_path / "own")


@pytest.mark.parametrize("targets", [["q_proj", "embed_tokens"], r".*(q_proj|embed_tokens)"])
def test_embeddings_cannot_be_decomposed(targets: Any) -> None:
    config = LoraConfig(r=4, target_modules=targets, init_lora_weights="pissa")
    assert_refused({"own": config}, r"init_lora_weights.*embed_tokens is an embedding")


def test_olora_on_layers_that_keep_their_weights_turned_is_refused() -> None:
    config = LoraConfig(r=4, init_lora_weights="olora")
    assert_refused({"own": config}, r"tasks\.own\.peft_config\.init_lora_weights.*a Conv1D.*Use 'pissa'", tiny_gpt2())
