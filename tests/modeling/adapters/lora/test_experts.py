"""LoRA on bare parameters: experts and routers of mixtures, grouped over tasks and experts, against plain PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from peft.tuners.lora.layer import ParamWrapper

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.lora import parameters as parameters_file
from peft_mux.parallel.layout import _bare_parameter_faults
from peft_mux.scheduler.parallel_layout import ParallelLayout
from tests.invariants import mux_lab as lab
from tests.modeling.adapters import passes
from tests.modeling.adapters.alone import alone, assert_resumes, task
from tests.modeling.backbones import backbone_of, drawn

GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"


def qwen3_moe(width: int = 24) -> Any:
    return drawn(backbone_of("qwen3_moe", vocab_size=lab.VOCABULARY, moe_intermediate_size=width))


def odd_widths() -> Any:
    """Rows of 22 numbers are no multiple of 16 bytes: torch's `grouped_mm` takes none of them."""
    model = qwen3_moe(22)
    model.config._experts_implementation = "eager"
    return model


def gpt_oss() -> Any:
    return drawn(backbone_of("gpt_oss", vocab_size=lab.VOCABULARY, intermediate_size=24))


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


def together(make: Callable[[], Any], configs: dict[str, Any], *, is_moved: bool = False) -> MultiTaskPeftModel:
    """Return a model of tasks, whose adapters do something if they are moved."""
    seeds = {name: number for number, name in enumerate(configs)}
    model = MultiTaskPeftModel(make(), configs, seeds=seeds, verify=False)
    return passes.moved(model) if is_moved else model


def with_experts(implementation: str) -> Callable[[], Any]:
    """Return a function that makes a mixture whose experts are computed in one of the ways of transformers."""

    def make() -> Any:
        model = qwen3_moe()
        model.config._experts_implementation = implementation
        return model

    return make


ALONE: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "all sets": (qwen3_moe, [*every_set()]),
    "another set first": (qwen3_moe, ["up", "down", "both", "all"]),
    **{way: (with_experts(way), ["attention", "both", "router"]) for way in ("eager", "batched_mm", "grouped_mm")},
    "task by task": (odd_widths, ["both", "attention", "all"]),
}


@pytest.mark.parametrize("case", ALONE)
def test_tasks_on_any_sets_of_parameters_go_as_plain_peft_goes_with_each_alone(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, names = ALONE[case]
    if make is odd_widths:
        monkeypatch.setattr(parameters_file, "grouped_experts", None)
    assert_as_alone(make, {name: every_set()[name] for name in names})


def test_transposed_experts_have_biases_and_a_gate_of_their_own_next_to_another_type() -> None:
    of_attention = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    router = on(DOWN, "mlp.router.weight", rank=5, modules=["k_proj"])
    assert_as_alone(gpt_oss, {"a": on(GATE_UP, DOWN), "scales": of_attention, "b": router})


def assert_as_alone(make: Callable[[], Any], configs: dict[str, Any]) -> None:
    model = together(make, configs)
    judges = passes.judges_of(model, configs, {name: number for number, name in enumerate(configs)}, make)
    batch, rows = passes.packed(*configs)
    passes.assert_as_plain(model, batch, judges, rows)


def test_experts_are_never_copied_for_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing as large as a weight of the experts is held for the backward pass but the frozen weights themselves."""
    configs = {name: on(GATE_UP, DOWN, rank=1) for name in ("a", "b", "c")}
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 128, "num_experts": 8}
    model = together(backbone_of("qwen3_moe", vocab_size=lab.VOCABULARY, **sizes), configs)
    monkeypatch.setattr(parameters_file, "functional_call", None)
    frozen = {item.data_ptr() for item in model.backbone.parameters()}
    smallest = min(item.numel() for key, item in model.backbone.named_parameters() if key.endswith("down_proj"))
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda item: held.append(item) or item, lambda item: item):
        model(passes.packed(*configs)[0]).losses.sum().backward()
    assert len(held) > 10
    assert not [item.shape for item in held if item.numel() >= smallest and item.data_ptr() not in frozen]


def test_what_is_nan_in_one_task_reaches_no_other() -> None:
    configs = every_set()
    passes.assert_nan_stays(together(qwen3_moe, configs, is_moved=True), passes.packed(*configs)[0], "both")


def test_what_is_saved_comes_back_in_plain_peft_and_here(tmp_path: Path) -> None:
    configs = every_set()
    model = together(qwen3_moe, configs, is_moved=True).eval()
    model.save_pretrained(tmp_path)
    again = MultiTaskPeftModel.from_pretrained(qwen3_moe(), tmp_path, verify=False).eval()
    with torch.no_grad():
        for name in configs:
            judge = PeftModel.from_pretrained(qwen3_moe(), str(tmp_path / name)).eval()
            own = {key.replace(".default", ""): item for key, item in judge.named_parameters() if "lora_" in key}
            passes.assert_same_tensors(model.task_parameters(name), own)
            mine = model.task_view(name)(input_ids=passes.IDS).logits
            assert lab.relative(mine, judge(input_ids=passes.IDS).logits) <= 1e-6
            assert torch.equal(again.task_view(name)(input_ids=passes.IDS).logits, mine)
    merged = model.task_view("both").merge_and_unload()
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())


def test_the_last_task_that_leaves_takes_the_wrappers_along_and_the_backbone_comes_back() -> None:
    model = together(qwen3_moe, {"a": LoraConfig(target_modules=["q_proj"]), "up": on(GATE_UP), "down": on(DOWN)})
    model.remove_tasks(["up", "down"])
    assert not any(isinstance(module, ParamWrapper) for module in model.backbone.modules())
    model.register_tasks({"both": on(GATE_UP, DOWN)}, seeds={"both": 0})
    _, own = passes.plain(on(GATE_UP, DOWN), 0, qwen3_moe)
    passes.assert_same_tensors(model.task_parameters("both"), own)
    model(passes.packed(*model.tasks)[0]).losses.sum().backward()
    passes.assert_same_tensors(model.unload().state_dict(), qwen3_moe().state_dict())


# --------------------------------------------------------------------- trainer


def tasks() -> list[Task]:
    configs = {
        "both": on(GATE_UP, DOWN, rank=4),
        "all": LoraConfig(r=2, target_modules="all-linear"),
        "attention": LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    }
    return [
        task(name, config, number, router_aux_loss_coef=0.0) for number, (name, config) in enumerate(configs.items())
    ]


@pytest.mark.slow
def test_a_run_ends_with_the_weights_of_plain_peft_and_resumes_with_the_same_bits(tmp_path: Path) -> None:
    run = lab.train(tasks(), tmp_path / "whole", model=qwen3_moe(), gradient_checkpointing=True)
    lab.assert_as_judged(run, {one.name: alone(run.trainer, one, qwen3_moe) for one in tasks()})
    assert_resumes(tasks, tmp_path, qwen3_moe, whole=run)


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout must be its default, .*got 0\.1 with adapters on bare parameters"),
        ({"use_dora": True}, r"use_dora"),
        ({"init_lora_weights": "orthogonal"}, r"init_lora_weights must be True, False, 'gaussian'.*got 'orthogonal'"),
        ({"target_parameters": ["mlp.experts.gate_up"]}, r"target_parameters .*Did you mean \"mlp\.experts"),
        ({"target_parameters": ["norm.weight"]}, r"target_parameters .*two or three dimensions.*got 'norm\.weight'"),
        ({"target_parameters": ["embed_tokens.weight"]}, r"target_parameters .*name layers in target_modules"),
        ({"target_parameters": ["q_proj.weight"]}, r"target_parameters .*got 'q_proj\.weight'.*the same LoRA"),
        ({"target_parameters": GATE_UP}, r"target_parameters must be a list of strings or None, got "),
        # By "all-linear" PEFT adapts experts too.
        (
            {"target_parameters": None, "target_modules": "all-linear", "lora_dropout": 0.1},
            r"lora_dropout must be.* with adapters on bare parameters .*gate_up_proj.*name layers in target_modules",
        ),
        # Half of a fused matrix.
        ({"target_parameters": None, "target_modules": {"gate_proj"}}, r"without also targeting up_proj"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    config: Any = on(GATE_UP)
    for name, value in options.items():
        setattr(config, name, value)
    passes.assert_refused({"a": config}, rf"tasks\.a\.peft_config.*{message}", qwen3_moe())


def test_a_router_that_is_written_as_a_linear_layer_is_refused_with_the_targets_that_work() -> None:
    backbone = backbone_of("phimoe", router_jitter_noise=0.0, input_jitter_noise=0.0)()
    passes.assert_refused(
        {"a": LoraConfig(target_modules="all-linear")},
        r'"all-linear" with exclude_modules=\["router"\].*returns several tensors',
        backbone,
    )
    allowed = LoraConfig(target_modules="all-linear", exclude_modules=["router"])
    assert MultiTaskPeftModel(backbone, {"a": allowed}, verify=False).tasks == ("a",)


def test_a_parameter_of_a_module_that_mixes_tokens_is_refused_before_the_first_step() -> None:
    backbone = qwen3_moe()
    backbone.model.layers[0].self_attn.extra = torch.nn.Parameter(torch.zeros(8, 8))
    said = r"model\.layers\.0\.self_attn must be called with tokens as its first.*Leave its parameters"
    with pytest.raises(UnsupportedModelError, match=said):
        MultiTaskPeftModel(backbone, {"a": on("self_attn.extra")})


def test_stages_and_tensor_parallelism_refuse_bare_parameters_and_all_layers_but_not_those_of_attention() -> None:
    for config, layout, where in (
        (on(GATE_UP), ParallelLayout.of(2, tp=2), ["tasks.sql.peft_config.target_parameters"]),
        (LoraConfig(target_modules="all-linear"), ParallelLayout.of(2, pp=2), ["tasks.sql.peft_config.target_modules"]),
        (LoraConfig(target_modules=["q_proj", "o_proj"]), ParallelLayout.of(2, pp=2), []),
    ):
        faults = _bare_parameter_faults(layout, [task("sql", config, 1)], qwen3_moe())
        assert [fault.where for fault in faults] == where
