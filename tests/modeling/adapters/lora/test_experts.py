"""LoRA on bare parameters: experts and routers of mixtures, grouped over tasks and experts, against plain PEFT."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, PeftType, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch.nn import functional as F

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, Task
from peft_mux.engine.layout import ParallelLayout, _bare_parameter_faults
from peft_mux.errors import ConfigError, UnsupportedModelError
from peft_mux.modeling.adapters.kind import KINDS
from peft_mux.modeling.adapters.lora import parameters as parameters_file
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.test_kinds import ia3, perturbed
from tests.modeling.adapters.toy_kind import ToyKind, registered

GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"
SIZE: dict[str, Any] = {
    "vocab_size": lab.VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}


@cache
def _mixture(width: int) -> Any:
    config = tf.Qwen3MoeConfig(**SIZE, moe_intermediate_size=width, num_experts=4, num_experts_per_tok=2)
    model = tf.Qwen3MoeForCausalLM(config)
    lab.fill(model, 0)
    return model


def qwen3_moe(width: int = 24) -> Any:
    return copy.deepcopy(_mixture(width))


def odd_widths() -> Any:
    """Rows of 22 numbers are no multiple of 16 bytes: torch's `grouped_mm` takes none of them."""
    model = qwen3_moe(22)
    model.config._experts_implementation = "eager"
    return model


@cache
def _gpt_oss() -> Any:
    config = tf.GptOssConfig(
        **SIZE, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, sliding_window=6, pad_token_id=0
    )
    model = tf.GptOssForCausalLM(config)
    lab.fill(model, 0)
    return model


def gpt_oss() -> Any:
    return copy.deepcopy(_gpt_oss())


@cache
def _wide() -> Any:
    sizes = {**SIZE, "hidden_size": 64, "num_hidden_layers": 1}
    return tf.Qwen3MoeForCausalLM(
        tf.Qwen3MoeConfig(**sizes, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
    )


def on(*parameters: str, rank: int = 3, modules: list[str] | None = None, **options: Any) -> LoraConfig:
    return LoraConfig(r=rank, target_modules=modules or [], target_parameters=list(parameters), **options)


def every_set() -> dict[str, LoraConfig]:
    """Return adapters on all linear layers (which PEFT converts), on sets of parameters, and on attention alone."""
    return {
        "all": LoraConfig(r=2, target_modules="all-linear"),
        "both": on(GATE_UP, DOWN, lora_alpha=5),
        "attention": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0),
        "down": on(DOWN, rank=4, modules=["q_proj"], use_rslora=True),
        "up": on(GATE_UP, rank=9),
        "router": on(ROUTER, rank=1),
        "both2": on(GATE_UP, DOWN, rank=1),
    }


def rows_of(names: list[str]) -> dict[str, list[list[int]]]:
    return {name: [row["input_ids"] for row in lab.rows(number, 3, 3, 11)] for number, name in enumerate(names)}


def packed(rows: dict[str, list[list[int]]]) -> Any:
    return ChunkPackingCollator()([{"task": name, "input_ids": ids} for name, part in rows.items() for ids in part])


def loss_of(model: Any, rows: list[list[int]]) -> torch.Tensor:
    terms = [
        F.cross_entropy(model(input_ids=torch.tensor([ids])).logits[0, :-1], torch.tensor(ids[1:]), reduction="sum")
        for ids in rows
    ]
    return torch.stack(terms).sum() / sum(len(ids) - 1 for ids in rows)


def alone(make: Callable[[], Any], config: LoraConfig, seed: int) -> tuple[Any, dict[str, Any]]:
    """Return plain PEFT's model of one task, with adapters that do something."""
    torch.manual_seed(seed)
    model = get_peft_model(make(), copy.deepcopy(config))
    return model, {key.replace(".default", ""): item for key, item in model.named_parameters() if item.requires_grad}


def together(make: Callable[[], Any], configs: dict[str, LoraConfig]) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(
        make(), configs, seeds={name: number for number, name in enumerate(configs)}, verify=False
    )


def assert_as_alone(make: Callable[[], Any], configs: dict[str, LoraConfig]) -> MultiTaskPeftModel:
    model, rows = together(make, configs), rows_of(list(configs))
    judges = {name: alone(make, config, number) for number, (name, config) in enumerate(configs.items())}
    for number, (name, (_, own)) in enumerate(judges.items()):
        mine = model.task_parameters(name)
        assert own.keys() == mine.keys()
        assert all(torch.equal(own[key], mine[key]) for key in own), f"{name}: initial weights"
        perturbed(own, number)
        perturbed(mine, number)
    output = model(packed(rows))
    output.losses.sum().backward()
    for loss, (name, (judge, own)) in zip(output.losses, judges.items(), strict=True):
        wanted = loss_of(judge, rows[name])
        wanted.backward()
        assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-5), name
        for key, parameter in own.items():
            assert parameter.grad.norm() > 0, f"{name} {key}: the comparison would be empty"
            assert lab.relative(model.task_parameters(name)[key].grad, parameter.grad) <= 1e-4, f"{name} {key}"
    return model


def test_tasks_on_any_sets_of_parameters_go_as_plain_peft_goes_with_each_alone() -> None:
    assert_as_alone(qwen3_moe, every_set())


def test_the_set_of_the_first_task_does_not_matter() -> None:
    configs = every_set()
    assert_as_alone(qwen3_moe, {name: configs[name] for name in ("up", "down", "both", "all")})


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_any_implementation_of_experts_gives_the_same(implementation: str) -> None:
    def make() -> Any:
        model = qwen3_moe()
        model.config._experts_implementation = implementation
        return model

    configs = every_set()
    assert_as_alone(make, {name: configs[name] for name in ("attention", "both", "router")})


def test_transposed_experts_with_biases_and_their_own_gate() -> None:
    assert_as_alone(gpt_oss, {"a": on(GATE_UP, DOWN), "b": on(DOWN, "mlp.router.weight", rank=5, modules=["k_proj"])})


def test_experts_that_no_grouped_product_takes_are_computed_task_by_task(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = every_set()
    monkeypatch.setattr(parameters_file, "grouped_experts", None)
    assert_as_alone(odd_widths, {name: configs[name] for name in ("both", "attention", "all")})


def test_experts_are_never_copied_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as a weight of the experts is held for the backward pass but the frozen weights themselves."""
    configs = {name: on(GATE_UP, DOWN, rank=1) for name in ("a", "b", "c")}
    model, rows = together(lambda: copy.deepcopy(_wide()), configs), rows_of(list(configs))
    monkeypatch.setattr(parameters_file, "functional_call", None)
    frozen = {item.data_ptr() for item in model.backbone.parameters()}
    smallest = min(item.numel() for key, item in model.backbone.named_parameters() if key.endswith("down_proj"))
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: held.append(item) or item, lambda item: item):
        model(packed(rows)).losses.sum().backward()
    assert len(held) > 10
    assert not [item.shape for item in held if item.numel() >= smallest and item.data_ptr() not in frozen]


def test_what_is_nan_in_one_task_reaches_no_other() -> None:
    configs = every_set()
    healthy, rows = together(qwen3_moe, configs), rows_of(list(configs))
    ill = together(qwen3_moe, configs)
    for model in (healthy, ill):
        for number, name in enumerate(configs):
            perturbed(model.task_parameters(name), number)
    with torch.no_grad():
        next(iter(ill.task_parameters("both").values())).fill_(torch.nan)
    losses = [model(packed(rows)).losses for model in (healthy, ill)]
    for output in losses:
        output.sum().backward()
    for number, name in enumerate(configs):
        if name == "both":
            assert losses[1][number].isnan()
            continue
        assert losses[0][number].item() == losses[1][number].item(), name
        theirs = ill.task_parameters(name)
        assert all(torch.equal(item.grad, theirs[key].grad) for key, item in healthy.task_parameters(name).items())


def test_what_is_saved_comes_back_in_plain_peft_and_here(tmp_path: Path) -> None:
    configs = every_set()
    model = together(qwen3_moe, configs).eval()
    for number, name in enumerate(configs):
        perturbed(model.task_parameters(name), number)
    model.save_pretrained(tmp_path)
    again = MultiTaskPeftModel.from_pretrained(qwen3_moe(), tmp_path, verify=False).eval()
    ids = torch.tensor([rows_of(["x"])["x"][0]])
    with torch.no_grad():
        frozen = qwen3_moe().eval()(input_ids=ids).logits
        for name, config in configs.items():
            judge = PeftModel.from_pretrained(qwen3_moe(), str(tmp_path / name)).eval()
            own = {key.replace(".default", ""): item for key, item in judge.named_parameters() if "lora_" in key}
            assert own.keys() == model.task_parameters(name).keys()
            assert all(torch.equal(item, own[key]) for key, item in model.task_parameters(name).items())
            wanted, mine = judge(input_ids=ids).logits, model.task_view(name)(input_ids=ids).logits
            assert not torch.allclose(wanted, frozen, rtol=1e-3)
            assert lab.relative(mine, wanted) <= 1e-6
            assert torch.equal(again.task_view(name)(input_ids=ids).logits, mine)
            alone(qwen3_moe, config, 0)[0].save_pretrained(tmp_path / "plain")
            saved, plain = (_saved_config(tmp_path / folder) for folder in (name, "plain"))
            assert saved == plain, name
        merged = model.task_view("both").merge_and_unload()
        assert not any(isinstance(module, ParamWrapper) for module in merged.modules())


def _saved_config(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "adapter_config.json").read_text())
    values.pop("base_model_name_or_path")
    return {key: sorted(value) if isinstance(value, list) else value for key, value in values.items()}


def test_the_last_task_that_leaves_takes_the_wrappers_along() -> None:
    model = together(qwen3_moe, {"a": LoraConfig(target_modules=["q_proj"]), "up": on(GATE_UP), "down": on(DOWN)})
    model.remove_tasks(["up", "down"])
    assert not any(isinstance(module, ParamWrapper) for module in model.backbone.modules())
    model.register_tasks({"both": on(GATE_UP, DOWN)}, seeds={"both": 0})
    _, own = alone(qwen3_moe, on(GATE_UP, DOWN), 0)
    mine = model.task_parameters("both")
    assert own.keys() == mine.keys()
    assert all(torch.equal(own[key], mine[key]) for key in own)


def test_the_backbone_comes_back_as_it_was() -> None:
    before = {key: item.clone() for key, item in qwen3_moe().state_dict().items()}
    model = together(qwen3_moe, every_set())
    model(packed(rows_of(list(every_set())))).losses.sum().backward()
    backbone = model.unload()
    after = backbone.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(item, after[key]) for key, item in before.items())


def test_adapters_of_another_type_are_next_to_those_on_parameters(tmp_path: Path) -> None:
    with registered(ToyKind()):
        configs: dict[str, Any] = {"both": on(GATE_UP, DOWN), "ia3": ia3(0), "up": on(GATE_UP)}
        configs["ia3"].target_modules, configs["ia3"].feedforward_modules = ["k_proj"], []
        model = together(qwen3_moe, configs)
        for number, name in enumerate(("both", "ia3", "up")):
            assert model.task_parameters(name).keys() == alone(qwen3_moe, configs[name], number)[1].keys()
        model.save_pretrained(tmp_path)
        for name in configs:
            PeftModel.from_pretrained(qwen3_moe(), str(tmp_path / name))


# --------------------------------------------------------------------- trainer


def experts_task(name: str, config: LoraConfig, data_seed: int, **settings: Any) -> Task:
    task = lab.small_task(name, data_seed=data_seed, length=7 + data_seed, max_steps=6, **settings)
    return Task(**{**{key: getattr(task, key) for key in task.__dataclass_fields__}, "peft_config": config})


def tasks() -> list[Task]:
    return [
        experts_task("both", on(GATE_UP, DOWN, rank=4), 1, weight_decay=0.1, router_aux_loss_coef=0.0),
        experts_task("all", LoraConfig(r=2, target_modules="all-linear"), 3, router_aux_loss_coef=0.0),
        experts_task(
            "attention", LoraConfig(r=4, target_modules=["q_proj", "v_proj"]), 2, seed=4, router_aux_loss_coef=0.0
        ),
    ]


def test_a_run_ends_with_the_weights_of_plain_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "tiny_llama", qwen3_moe)
    run = lab.train(tasks(), tmp_path)
    lab.assert_as_judged(run, {task.name: lab.judge(run.trainer, task) for task in tasks()})


def test_a_run_resumes_from_its_checkpoint_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "tiny_llama", qwen3_moe)
    whole = lab.train(tasks(), tmp_path / "whole")
    stop = lab.Recorder(at_end={3: lambda trainer: setattr(trainer.control, "should_training_stop", True)})
    lab.train(tasks(), tmp_path / "cut", recorder=stop, save_strategy="steps", save_steps=3)
    rest = lab.train(tasks(), tmp_path / "cut", resume=True, save_strategy="steps", save_steps=100)
    for task in tasks():
        assert rest.losses[task.name] == whole.losses[task.name][3:], task.name
        mine, theirs = rest.weights(task.name), whole.weights(task.name)
        assert all(torch.equal(item, theirs[key]) for key, item in mine.items()), task.name


def test_recomputed_activations_give_the_same_gradients() -> None:
    configs = {"both": on(GATE_UP, DOWN), "router": on(ROUTER)}
    models, rows = [together(qwen3_moe, configs) for _ in range(2)], rows_of(list(configs))
    models[1].activation_checkpointing_enable()
    for model in models:
        for number, name in enumerate(configs):
            perturbed(model.task_parameters(name), number)
        model.train()(packed(rows)).losses.sum().backward()
    for name in configs:
        theirs = models[1].task_parameters(name)
        assert all(torch.equal(item.grad, theirs[key].grad) for key, item in models[0].task_parameters(name).items())


def test_bf16_stays_within_its_noise() -> None:
    configs = {"both": on(GATE_UP, DOWN), "all": LoraConfig(r=2, target_modules="all-linear")}
    rows = rows_of(list(configs))
    exact, rounded = together(qwen3_moe, configs), together(lambda: qwen3_moe().to(torch.bfloat16), configs)
    for model in (exact, rounded):
        for number, name in enumerate(configs):
            perturbed(model.task_parameters(name), number)
    losses = [model(packed(rows)).losses for model in (exact, rounded)]
    losses[1].sum().backward()
    assert torch.allclose(losses[0], losses[1].float(), rtol=0.05)
    assert all(item.grad.isfinite().all() for name in configs for item in rounded.task_parameters(name).values())


# -------------------------------------------------------------------- planning


def test_loads_of_experts_are_marked_and_count_all_parameters() -> None:
    kind = KINDS[PeftType.LORA]
    parameters = together(qwen3_moe, {"a": on(GATE_UP, DOWN, ROUTER)}).task_parameters("a")
    loads = kind.loads({name: tuple(item.shape) for name, item in parameters.items()}, {})
    assert sum(load.rank * load.width for load in loads) == sum(item.numel() for item in parameters.values())
    assert [load.is_routed for load in loads].count(True) == 4  # two matrices in each of two layers
    assert [load.is_routed for load in loads].count(False) == 2  # routers see every token


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout must be its default, .*got 0\.1 with adapters on bare parameters"),
        ({"use_dora": True}, r"use_dora"),
        ({"init_lora_weights": "orthogonal"}, r"init_lora_weights must be True, False, 'gaussian'.*got 'orthogonal'"),
        (
            {"target_parameters": ["mlp.experts.gate_up"]},
            r"target_parameters .*got 'mlp\.experts\.gate_up'.*Did you mean \"mlp\.experts",
        ),
        (
            {"target_parameters": ["norm.weight"]},
            r"target_parameters .*two or three dimensions.*got 'norm\.weight'.*norm\.weight belongs to a layer",
        ),
        (
            {"target_parameters": ["embed_tokens.weight"]},
            r"target_parameters .*got 'embed_tokens\.weight'.*name layers in target_modules",
        ),
        ({"target_parameters": ["lm_head.weight"]}, r"target_parameters .*got 'lm_head\.weight'"),
        ({"target_parameters": ["q_proj.weight"]}, r"target_parameters .*got 'q_proj\.weight'.*the same LoRA"),
        ({"target_parameters": GATE_UP}, r"target_parameters must be a list of strings or None, got "),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    config: Any = on(GATE_UP)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=rf"tasks\.a\.peft_config\.{message}"):
        MultiTaskPeftModel(qwen3_moe(), {"a": config}, verify=False)


def test_dropout_on_all_linear_layers_of_a_mixture_is_refused_as_peft_makes_experts_of_them() -> None:
    config = LoraConfig(target_modules="all-linear", lora_dropout=0.1)
    with pytest.raises(
        ConfigError,
        match=(
            r"lora_dropout must be.*, got 0\.1 with adapters on bare parameters "
            r".*gate_up_proj.*name layers in target_modules"
        ),
    ):
        MultiTaskPeftModel(qwen3_moe(), {"a": config}, verify=False)


def test_a_half_of_a_fused_matrix_is_refused_in_the_words_of_peft() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tasks\.a\.peft_config must be one whose targets.*gate_proj without also targeting up_proj",
    ):
        MultiTaskPeftModel(qwen3_moe(), {"a": LoraConfig(target_modules=["gate_proj"])}, verify=False)


def test_a_router_that_is_written_as_a_linear_layer_is_refused_with_the_targets_that_work() -> None:
    sizes = {key: value for key, value in SIZE.items() if key != "head_dim"}
    no_jitter = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    config = tf.PhimoeConfig(**sizes, intermediate_size=24, num_local_experts=4, pad_token_id=0, **no_jitter)
    backbone = tf.PhimoeForCausalLM(config)
    with pytest.raises(ConfigError, match=r'"all-linear" with exclude_modules=\["router"\].*returns several tensors'):
        MultiTaskPeftModel(backbone, {"a": LoraConfig(target_modules="all-linear")})
    allowed = LoraConfig(target_modules="all-linear", exclude_modules=["router"])
    assert MultiTaskPeftModel(backbone, {"a": allowed}, verify=False).tasks == ("a",)


def test_a_parameter_of_a_module_that_mixes_tokens_is_refused_before_the_first_step() -> None:
    backbone = qwen3_moe()
    backbone.model.layers[0].self_attn.extra = torch.nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(
        UnsupportedModelError,
        match=r"model\.layers\.0\.self_attn must be called with tokens as its first.*Leave its parameters",
    ):
        MultiTaskPeftModel(backbone, {"a": on("self_attn.extra")})


def test_stages_and_tensor_parallelism_refuse_bare_parameters_by_name() -> None:
    task = experts_task("sql", on(GATE_UP), 1)
    (fault,) = _bare_parameter_faults(ParallelLayout.of(2, tp=2), [task], qwen3_moe())
    assert fault.where == "tasks.sql.peft_config.target_parameters"
    assert "data parallelism" in fault.fix


def test_stages_and_tensor_parallelism_refuse_all_layers_of_a_mixture_and_take_those_of_attention() -> None:
    layout, backbone = ParallelLayout.of(2, pp=2), qwen3_moe()
    of_all = experts_task("sql", LoraConfig(r=2, target_modules="all-linear"), 1)
    (fault,) = _bare_parameter_faults(layout, [of_all], backbone)
    assert fault.where == "tasks.sql.peft_config.target_modules"
    assert "gate_up_proj" in fault.got
    of_attention = experts_task("sql", LoraConfig(r=2, target_modules=["q_proj", "o_proj"]), 1)
    assert _bare_parameter_faults(layout, [of_attention], backbone) == []


def test_router_losses_that_would_mix_tasks_are_refused_by_name() -> None:
    backbone = qwen3_moe()
    backbone.config.output_router_logits = True
    with pytest.raises(
        UnsupportedModelError, match=r"router loss \(output_router_logits\) mixes the tokens of all tasks"
    ):
        MultiTaskPeftModel(backbone, {"a": LoraConfig(target_modules=["q_proj"])})
