"""What adapters do beyond the grouped product, with plain LoRA in one run, compared with plain PEFT alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import BdLoraConfig
from peft.tuners.lora.dora import DoraLinearLayer
from torch import nn

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.lora.layer import MultiplexedLinear
from peft_mux.modeling.adapters.lora.row_steps import RowSteps
from tests.children import run_script
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import PhiloxDropout, tiny_gpt2, together
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


def test_transposed_weights_are_decomposed_and_scaled_too(tmp_path: Path) -> None:
    targets: dict[str, Any] = {"target_modules": ["c_fc", "c_proj"], "fan_in_fan_out": True}
    configs = {
        "dora": LoraConfig(r=4, use_dora=True, **targets),
        "initial": LoraConfig(r=4, init_lora_weights="pissa", **targets),
        "biased": LoraConfig(r=4, lora_bias=True, **targets),
    }
    ran = together(configs, tiny_gpt2, tmp_path, max_steps=3)
    for name in configs:
        ran.assert_as_alone(name)
    ran.assert_backbone_unchanged()


def test_norms_from_small_factors_are_those_of_the_whole_matrix() -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), LoraConfig(r=3, target_modules=["up_proj"], use_dora=True))
    layer: Any = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    nn.init.normal_(layer.lora_B["default"].weight)
    judge = DoraLinearLayer(fan_in_fan_out=False)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    wanted = judge.get_weight_norm(layer.base_layer.weight, product, layer.scaling["default"])
    assert relative(RowSteps(layer, "default").norms(layer.base_layer.weight), wanted) <= 1e-6


@pytest.mark.parametrize("field", ["use_dora", "lora_bias", "pissa", "use_bdlora"])
def test_dropout_acts_where_peft_lets_it_act(field: str) -> None:
    options: dict[str, Any] = {"lora_dropout": 0.4, "target_modules": TWO}
    options |= {"init_lora_weights": "pissa"} if field == "pissa" else {field: True}
    if field == "use_bdlora":
        options[field] = BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["down_proj"], nblocks=2)
    config = LoraConfig(r=4, **options)
    other = LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.3)
    mux = MultiTaskPeftModel(tiny_llama(), {"own": config, "z": other}, seeds={"own": 3}, verify=False).train()
    judges = judges_of(mux, {"own": config}, {"own": 3})
    row = lab.rows(1, 1, 9, 9)[0]["input_ids"]
    batch = ChunkPackingCollator()([{"task": name, "input_ids": row, "seed": 5} for name in ("own", "z")])
    for name, module in judges["own"][0].train().named_modules():
        if name.endswith("lora_dropout"):
            site = name.removeprefix("base_model.model.").removesuffix(".lora_dropout")
            module["default"] = PhiloxDropout(0.4, philox.draw_seed(5, batch.task_steps[0], site))
    assert_as_plain(mux, batch, judges, {"own": [row]})


def test_layers_without_such_tasks_run_no_steps() -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"a": CONFIGS["plain"], "b": CONFIGS["biased"]}, verify=False)
    forwards = {name: module.__dict__.get("forward") for name, module in model.backbone.named_modules()}
    linear = {name: item for name, item in forwards.items() if isinstance(item, MultiplexedLinear)}
    stepping = {name.rpartition(".")[2] for name, item in linear.items() if item.reason_against_graphs() is not None}
    assert stepping == set(TWO)
    model.remove_tasks(["b"])


def test_a_merged_task_computes_what_its_view_did() -> None:
    for name in ("dora", "initial", "plain"):
        model = MultiTaskPeftModel(tiny_llama(), {"x": CONFIGS["plain"], name: CONFIGS[name]}, verify=False).eval()
        with torch.no_grad():
            for item in model.task_parameters(name).values():
                item.mul_(1.5)
            ids = torch.tensor([[5, 6, 7, 8]])
            wanted = model.task_view(name)(input_ids=ids).logits
            merged = model.task_view(name).merge_and_unload()
            assert relative(merged(input_ids=ids).logits, wanted) <= 1e-5


@pytest.mark.parametrize("field", ["use_dora", "use_bdlora"])
def test_what_peft_cannot_convert_is_refused(field: str) -> None:
    config = LoraConfig(r=4, target_modules=TWO, init_lora_weights="pissa")
    setattr(config, field, True if field == "use_dora" else CONFIGS["blocks"].use_bdlora)
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.{field}.*Leave one of them out")


_TWO_PROCESSES = """
import json, os, sys
from pathlib import Path
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import task
from tests.modeling.adapters.lora.test_row_steps import CONFIGS, WITH_COPIES
configs = {**CONFIGS, **WITH_COPIES}
tasks = [task(name, config, number, max_steps=3) for number, (name, config) in enumerate(configs.items())]
run = lab.train(tasks, Path(sys.argv[1]) / "run")
if os.environ.get("RANK", "0") == "0":
    (Path(sys.argv[1]) / "losses.json").write_text(json.dumps(run.losses))
"""
WITH_COPIES = {
    "copies": LoraConfig(r=2, target_modules=TWO, modules_to_save=["lm_head", "norm"]),
    "rows": LoraConfig(r=2, target_modules=TWO, trainable_token_indices=[3, 4, 5]),
}


@pytest.mark.slow
def test_two_processes_train_them_to_the_result_of_one(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(_TWO_PROCESSES, encoding="utf-8")
    losses = {}
    for count in ("1", "2"):
        folder = tmp_path / count
        folder.mkdir()
        code = f"import sys; sys.argv = ['torchrun', '--nproc_per_node', '{count}', {str(script)!r}, {str(folder)!r}]"
        launcher = tmp_path / f"launch{count}.py"
        launcher.write_text(f"{code}\nfrom torch.distributed.run import main\nmain()\n", encoding="utf-8")
        run_script(launcher)
        losses[count] = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
    for name, wanted in losses["1"].items():
        lab.assert_close(losses["2"][name], wanted, 1e-6, name)
