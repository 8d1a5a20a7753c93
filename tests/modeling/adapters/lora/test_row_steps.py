"""What adapters do beyond the grouped product, with plain LoRA in one run, compared with plain PEFT alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.kernels import philox
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.alone import PhiloxDropout
from tests.modeling.adapters.passes import assert_as_plain, assert_refused, judges_of

TWO = ["q_proj", "down_proj"]
CONFIGS = {
    "dora": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
    "initial": LoraConfig(r=4, lora_alpha=7, target_modules="all-linear", init_lora_weights="pissa"),
    "patterns": LoraConfig(
        r=3,
        target_modules=TWO,
        init_lora_weights="pissa",
        use_rslora=True,
        rank_pattern={r"layers\.1\..*q_proj": 5},
        alpha_pattern={"down_proj": 9},
    ),
    "iterated": LoraConfig(r=3, target_modules=TWO, init_lora_weights="pissa_niter_4"),
    "orthonormal": LoraConfig(r=3, target_modules=TWO, init_lora_weights="olora", use_rslora=True),
    "biased": LoraConfig(r=3, target_modules=TWO, lora_bias=True),
    "blocks": LoraConfig(
        r=4,
        target_modules=TWO,
        use_bdlora=BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2),
    ),
    "plain": LoraConfig(r=5, target_modules="all-linear"),
}


_OF_GPT2: dict[str, Any] = {"r": 4, "target_modules": ["c_fc", "c_proj"], "fan_in_fan_out": True}
TRANSPOSED = {
    "dora": LoraConfig(use_dora=True, **_OF_GPT2),
    "initial": LoraConfig(init_lora_weights="pissa", **_OF_GPT2),
    "biased": LoraConfig(lora_bias=True, **_OF_GPT2),
}


@pytest.mark.parametrize("name", ["dora", "biased", "iterated", "blocks"])
def test_dropout_acts_where_peft_lets_it_act(name: str) -> None:
    config = replace(CONFIGS[name], target_modules=TWO, lora_dropout=0.4)
    other = LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.3)
    mux = MultiTaskPeftModel(tiny_llama(), {"own": config, "z": other}, seeds={"own": 3}, verify=False).train()
    judges = judges_of(mux, {"own": config}, {"own": 3})
    row = lab.rows(1, 1, 9, 9)[0]["input_ids"]
    batch = ChunkPackingCollator()([{"task": name, "input_ids": row, "seed": 5} for name in ("own", "z")])
    for key, module in judges["own"][0].train().named_modules():
        if key.endswith("lora_dropout"):
            site = key.removeprefix("base_model.model.").removesuffix(".lora_dropout")
            module["default"] = PhiloxDropout(0.4, philox.draw_seed(5, batch.task_steps[0], site))
    assert_as_plain(mux, batch, judges, {"own": [row]})


def test_dora_runs_on_a_backbone_in_float64() -> None:
    config = {"own": CONFIGS["dora"]}
    mux = MultiTaskPeftModel(tiny_llama().double(), config, seeds={"own": 3}, verify=False)
    judges = judges_of(mux, config, {"own": 3}, lambda: tiny_llama().double())
    row = lab.rows(1, 1, 9, 9)[0]["input_ids"]
    assert_as_plain(
        mux, ChunkPackingCollator()([{"task": "own", "input_ids": row}]), judges, {"own": [row]}, tolerance=1e-9
    )


@pytest.mark.parametrize("field", ["use_dora", "use_bdlora"])
def test_what_peft_cannot_convert_is_refused(field: str) -> None:
    config = LoraConfig(r=4, target_modules=TWO, init_lora_weights="pissa")
    setattr(config, field, True if field == "use_dora" else CONFIGS["blocks"].use_bdlora)
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.{field}.*Leave one of them out")
