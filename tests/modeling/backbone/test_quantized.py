"""Backbones through bitsandbytes: equal to plain PEFT, isolated, planned, resumed, saved, and refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.errors import CheckpointError, ConfigError, UnsupportedModelError
from peft_mux.modeling.backbone.quantized import base_output, prepare_quantized, quantized_layers, weight_bytes
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import assert_resumes, together
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors
from tests.modeling.backbone.test_checks import backbone_fingerprint
from tests.modeling.backbones import backbone_of, drawn

bnb = pytest.importorskip("bitsandbytes")

SLOW = pytest.mark.slow
FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
ALL_FORMATS = pytest.mark.parametrize(
    "form", ["nf4-double", *(pytest.param(one, marks=SLOW) for one in ("nf4", "int8"))]
)
BOTH_WIDTHS = pytest.mark.parametrize("form", ["nf4-double", pytest.param("int8", marks=SLOW)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stored Llama in full precision: hidden 64, 2 layers."""
    path = tmp_path_factory.mktemp("quantized") / "llama"
    sizes = {"vocab_size": lab.VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = drawn(backbone_of("llama", **sizes, attention_bias=True))
    model.save_pretrained(path)
    return path


def loaded(folder: Path, form: str, **options: Any) -> Any:
    config = BitsAndBytesConfig(**{**FORMATS[form], **options})
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map={"": "cpu"})


def two_tasks(**settings: Any) -> list[Any]:
    return [
        lab.small_task("first", data_seed=3, max_steps=3, **settings),
        lab.small_task("second", data_seed=2, rank=8, length=7, max_steps=3, target_modules=["q_proj", "down_proj"]),
    ]


@pytest.fixture(scope="module")
def plain_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], lab.Run]:
    """Return what trains `two_tasks` on a backbone of a format, once; nothing of the run may be changed."""

    @cache
    def run(form: str) -> lab.Run:
        return lab.train(two_tasks(), tmp_path_factory.mktemp(form), model=loaded(folder, form))

    return run


def judged(run: lab.Run, tasks: list[Any], folder: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Train each task alone with plain PEFT on a quantised backbone of its own."""
    monkeypatch.setattr(lab, "tiny_llama", lambda: loaded(folder, form))
    return {task.name: lab.judge(run.trainer, task) for task in tasks}


# ---------------------------------------------------------- alone = together


@ALL_FORMATS
def test_several_steps_equal_those_of_plain_peft(
    form: str, folder: Path, plain_run: Callable[[str], lab.Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = plain_run(form)
    lab.assert_as_judged(run, judged(run, two_tasks(), folder, form, monkeypatch))


@BOTH_WIDTHS
def test_evaluation_between_steps_does_not_change_training(
    form: str, folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    tasks = two_tasks(eval_dataset=lab.rows(5, 3, 4, 9))
    busy = lab.train(tasks, tmp_path, model=loaded(folder, form), eval_strategy="steps", eval_steps=1)
    assert any("eval_loss" in line for line in busy.trainer.task_states["first"].log_history)
    for name in ("first", "second"):
        lab.assert_bit_identical(plain_run(form), busy, name)


@SLOW
def test_all_tasks_under_bf16_autocast_learn(folder: Path, tmp_path: Path) -> None:
    tasks = [lab.small_task(name, data_seed=seed, length=5 + seed) for seed, name in enumerate("ab")]
    run = lab.train(tasks, tmp_path, model=loaded(folder, "nf4", bnb_4bit_compute_dtype=torch.bfloat16), bf16=True)
    assert all(losses[-1] < losses[0] for losses in run.losses.values())


@SLOW
def test_recomputed_activations_give_the_same_training(
    folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    recomputed = lab.train(two_tasks(), tmp_path, model=loaded(folder, "nf4"), gradient_checkpointing=True)
    for name in ("first", "second"):
        lab.assert_same(recomputed, plain_run("nf4"), name, 1e-6)


@BOTH_WIDTHS
def test_gpt2_with_transposed_layers_trains_as_plain_peft(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = drawn(backbone_of("gpt2", vocab_size=lab.VOCABULARY, hidden_size=64))
    model.save_pretrained(tmp_path / "gpt2")
    tasks = [lab.small_task(name, data_seed=seed, max_steps=3) for seed, name in enumerate("ab")]
    run = lab.train(tasks, tmp_path / "run", model=loaded(tmp_path / "gpt2", form))
    lab.assert_as_judged(run, judged(run, tasks, tmp_path / "gpt2", form, monkeypatch))


@SLOW
def test_classifiers_with_heads_in_full_precision_go_together_as_alone(folder: Path, tmp_path: Path) -> None:
    def task(name: str, classes: int) -> Task:
        rows = [{**row, "label": place % classes} for place, row in enumerate(lab.rows(classes, 8, 5, 9))]
        config = LoraConfig(r=4, task_type=TaskType.SEQ_CLS, target_modules="all-linear")
        return Task(name=name, peft_config=config, train_dataset=rows, train_batch_size=4, max_steps=3, seed=1)

    tasks = [task("two", 2), task("three", 3)]
    together = from_folder(folder, tmp_path / "together", FORMATS["int8"], tasks)
    together.train()
    for one in tasks:
        alone = from_folder(folder, tmp_path / one.name, FORMATS["int8"], [one])
        alone.train()
        assert_close_weights(lab.weights(together, one.name), lab.weights(alone, one.name))


def assert_close_weights(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for key, weight in wanted.items():
        assert lab.relative(found[key], weight) < 1e-4, key


# ------------------------------------------------------------------ isolation


@BOTH_WIDTHS
def test_a_task_of_nans_is_quarantined_and_its_neighbour_continues(
    form: str, folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    def poison(trainer: MultiTaskTrainer) -> None:
        with torch.no_grad():
            for weight in trainer.model.task_parameters("second").values():
                weight.fill_(float("nan"))

    recorder = lab.Recorder(at_end={1: poison})
    sick = lab.train(two_tasks(), tmp_path, model=loaded(folder, form), recorder=recorder)
    assert str(getattr(sick.trainer.task_statuses["second"], "value", "")) == "failed"
    lab.assert_same(sick, plain_run(form), "first", 1e-6)


@pytest.mark.parametrize("form", FORMATS)
def test_values_of_a_neighbour_change_no_bit_of_a_row(form: str, folder: Path) -> None:
    _, layer, _ = next(quantized_layers(loaded(folder, form)))
    layer.support_avx512bf16_for_cpu = False
    calm_TD = torch.linspace(-1.0, 1.0, 6 * 64).view(6, 64)
    wild_TD = calm_TD.clone()
    wild_TD[4, 7], wild_TD[5] = 40.0, float("nan")
    for is_training in (True, False):
        layer.train(is_training)
        torch.testing.assert_close(layer(wild_TD)[:4], layer(calm_TD)[:4], rtol=0, atol=0)


def test_an_outlier_threshold_would_let_one_row_change_another(folder: Path) -> None:
    _, layer, _ = next(quantized_layers(loaded(folder, "int8", llm_int8_threshold=6.0)))
    calm_TD = torch.linspace(-1.0, 1.0, 6 * 64).view(6, 64)
    wild_TD = calm_TD.clone()
    wild_TD[4, 7] = 40.0
    assert not torch.equal(layer.eval()(wild_TD)[:4], layer(calm_TD)[:4]), "then the refusal of thresholds can go"


# ------------------------------------------------- folders, plans, resumption


@ALL_FORMATS
def test_a_folder_is_planned_in_quantised_bytes_and_trained_as_the_loaded_model(
    form: str, folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    trainer = from_folder(folder, tmp_path, FORMATS[form])
    assert trainer.model.device.type == "meta"
    planned = trainer.plan().memory.backbone_bytes
    trainer.train()
    assert trainer.plan().memory.backbone_bytes == planned == held_bytes(loaded(folder, form))
    for name in ("first", "second"):
        assert_same_tensors(lab.weights(trainer, name), plain_run(form).weights(name), name)


def from_folder(folder: Path, output: Path, quantization: Any, tasks: list[Any] | None = None) -> MultiTaskTrainer:
    args = MultiTaskTrainingArguments(
        output_dir=str(output), use_cpu=True, save_strategy="no", disable_tqdm=True, report_to="none"
    )
    options = {} if quantization is None else {"quantization_config": quantization}
    return MultiTaskTrainer(str(folder), args, tasks or two_tasks(), model_init_kwargs=options)


def held_bytes(model: Any) -> int:
    """Count what a loaded model holds, tensor by tensor."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    for _, layer, bits in quantized_layers(model):
        if bits == 8:
            total += (layer.state.SCB if layer.state.SCB is not None else layer.weight.SCB).nbytes
            continue
        state = layer.weight.quant_state
        total += state.absmax.nbytes + state.code.nbytes
        total += state.offset.nbytes + state.state2.absmax.nbytes + state.state2.code.nbytes if state.nested else 0
    return total


@pytest.mark.parametrize(("double", "wanted"), [(False, 4.5), (True, 4.127)])
def test_a_large_4_bit_layer_counts_as_the_bits_that_the_literature_names(double: bool, wanted: float) -> None:
    layer = bnb.nn.Linear4bit(4096, 4096, quant_type="nf4", compress_statistics=double, device="meta")
    assert weight_bytes(layer, 4) * 8 / 4096**2 == pytest.approx(wanted, abs=2e-3)


@SLOW
def test_a_folder_that_is_stored_quantised_needs_no_options(folder: Path, tmp_path: Path) -> None:
    loaded(folder, "nf4").save_pretrained(tmp_path / "stored")
    stored = from_folder(tmp_path / "stored", tmp_path / "a", None)
    fresh = from_folder(folder, tmp_path / "b", FORMATS["nf4"])
    assert stored.plan().memory.backbone_bytes == fresh.plan().memory.backbone_bytes
    stored.train()
    fresh.train()
    assert_close_weights(lab.weights(stored, "first"), lab.weights(fresh, "first"))
    with pytest.raises(ConfigError, match="model must be empty for weights that bitsandbytes has already quantised"):
        from_folder(tmp_path / "stored", tmp_path / "c", FORMATS["nf4"])
    loaded(folder, "int8", llm_int8_threshold=6.0).save_pretrained(tmp_path / "outliers")
    with pytest.raises(ConfigError, match=r"of model\.llm_int8_threshold must be.*, got 6\.0.*config\.json"):
        from_folder(tmp_path / "outliers", tmp_path / "d", None)


@BOTH_WIDTHS
def test_a_resumed_run_ends_with_the_same_bits(
    form: str, folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    assert_resumes(two_tasks, tmp_path, lambda: loaded(folder, form), plain_run(form))
    full = LlamaForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="backbone"):
        lab.train(two_tasks(), tmp_path / "cut", model=full, resume=True, save_strategy="steps", save_steps=1)


def test_the_fingerprint_sees_format_and_scales_but_not_use(folder: Path) -> None:
    prints = {form: backbone_fingerprint(loaded(folder, form)) for form in FORMATS}
    assert len(set(prints.values())) == len(prints)
    for form, before in prints.items():
        used = loaded(folder, form)
        prepare_quantized(used)
        used.eval()(input_ids=torch.tensor([[1, 2, 3]]))
        assert backbone_fingerprint(used) == before
        layer = next(layer for name, layer, _ in quantized_layers(used) if name.endswith("q_proj"))
        scale = layer.state.SCB if form == "int8" else layer.weight.quant_state.absmax
        scale[0] += 1
        assert backbone_fingerprint(used) != before


def test_a_saved_adapter_is_plain_pefts_on_either_backbone(
    folder: Path, plain_run: Callable[[str], lab.Run], tmp_path: Path
) -> None:
    run = plain_run("nf4")
    run.trainer.model.save_task("first", tmp_path / "adapter")
    ids = torch.tensor([[5, 9, 2, 44]])
    view = run.trainer.model.eval().task_view("first")
    for base, tolerance in ((loaded(folder, "nf4"), 1e-5), (LlamaForCausalLM.from_pretrained(folder), 1.0)):
        prepare_quantized(base)
        alone = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        for key, weight in run.weights("first").items():
            assert torch.equal(alone.get_parameter(key.replace(".weight", ".default.weight")), weight)
        with torch.no_grad():
            assert lab.relative(view(input_ids=ids).logits, alone(input_ids=ids).logits) < tolerance


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"load_in_8bit": True}, r"llm_int8_threshold of.*, got 6\.0.*llm_int8_threshold=0.0"),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0, "llm_int8_has_fp16_weight": True}, "16-bit copy"),
        ({"load_in_4bit": True, "bnb_4bit_quant_typ": "nf4"}, 'Did you mean "bnb_4bit_quant_type"'),
        ({"load_in_4bit": True, "load_in_8bit": True}, r"model_init_kwargs\.quantization_config must be options"),
        ({}, r"model_init_kwargs\.quantization_config must be set with load_in_4bit or load_in_8bit, got neither"),
        ("nf4", r"model_init_kwargs\.quantization_config must be a BitsAndBytesConfig, or a mapping of one, got str"),
    ],
)
def test_options_that_would_change_results_are_refused(options: Any, said: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        from_folder(folder, tmp_path, options)


def test_a_loaded_model_with_an_outlier_threshold_is_refused_with_and_without_a_trainer(
    folder: Path, tmp_path: Path
) -> None:
    model = loaded(folder, "int8", llm_int8_threshold=6.0)
    with pytest.raises(ConfigError, match=r"layers\.1\..*llm_int8_threshold=0\.0"):
        lab.make_trainer(two_tasks(), tmp_path, model=model)
    assert_refused({"a": LoraConfig(target_modules=["q_proj"])}, "llm_int8_threshold", model)


def test_tasks_on_few_layers_train_after_the_probe_ran_the_others_in_evaluation_mode(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [
        lab.small_task(name, data_seed=seed, max_steps=2, target_modules=["q_proj"]) for seed, name in enumerate("ab")
    ]
    run = lab.train(tasks, tmp_path, model=loaded(folder, "nf4"))
    lab.assert_as_judged(run, judged(run, tasks, folder, "nf4", monkeypatch))


def test_a_quantised_head_and_another_library_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model\.lm_head must be in full precision, because.*Add "lm_head" to'):
        lab.make_trainer(two_tasks(), tmp_path, model=loaded(folder, "nf4", llm_int8_skip_modules=["gate_proj"]))
    model = LlamaForCausalLM.from_pretrained(folder)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4}
    with pytest.raises(ConfigError, match=r"model must be bitsandbytes \(4 or 8 bits\), or no quantisation, got gptq"):
        lab.make_trainer(two_tasks(), tmp_path, model=model)


def test_weights_that_were_repacked_for_inference_are_refused(folder: Path, tmp_path: Path) -> None:
    model = loaded(folder, "nf4")
    _, layer, _ = next(quantized_layers(model))
    if not layer.support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16, so that bitsandbytes repacks nothing")
    with torch.no_grad():
        model.eval()(input_ids=torch.tensor([[1, 2, 3]]))
    with pytest.raises(ConfigError, match="repacked for inference"):
        lab.make_trainer(two_tasks(), tmp_path, model=model)


def test_a_layer_that_loses_the_gradient_is_refused() -> None:
    class Cut(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach()

    with pytest.raises(UnsupportedModelError, match=r"up_proj \(Cut\).*no gradient"):
        base_output(Cut(), torch.ones(2, 3, requires_grad=True), "up_proj")


def test_an_absent_library_and_a_platform_without_kernels_are_named_before_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no kernel for this backend")

    with monkeypatch.context() as patch:
        patch.setattr(bnb.nn.Linear4bit, "forward", no_kernel)
        with pytest.raises(ConfigError, match=r"cannot compute on cpu \(no kernel for this backend\)"):
            from_folder(folder, tmp_path, FORMATS["nf4"])
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"quantised weights.*cannot be imported.*pip install bitsandbytes"):
        from_folder(folder, tmp_path, FORMATS["nf4"])


# ------------------------------------------------------------------------ gpu


@pytest.mark.gpu
@ALL_FORMATS
def test_on_a_gpu_a_task_next_to_another_goes_as_alone(form: str, folder: Path, tmp_path: Path) -> None:
    def losses(tasks: list[Any], output: Path) -> dict[str, list[float]]:
        args = MultiTaskTrainingArguments(
            output_dir=str(output), bf16=True, save_strategy="no", disable_tqdm=True, report_to="none"
        )
        recorder = lab.Recorder(keep_weights=False)
        trainer = MultiTaskTrainer(
            str(folder), args, tasks, callbacks=[recorder], model_init_kwargs={"quantization_config": FORMATS[form]}
        )
        recorder.trainer = trainer
        trainer.train()
        return recorder.losses

    together = losses(two_tasks(), tmp_path / "together")
    for task in two_tasks():
        alone = losses([task], tmp_path / task.name)[task.name]
        lab.assert_close(together[task.name], alone, 2e-2, task.name)


@SLOW
def test_what_tasks_train_next_to_plain_lora_goes_as_plain_peft_on_quantised_layers(
    folder: Path, tmp_path: Path
) -> None:
    configs = {
        "dora": LoraConfig(r=4, target_modules="all-linear", use_dora=True),
        "biased": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_bias=True),
        "copies": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head", "norm"]),
        "rows": LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2, 3]),
        "plain": LoraConfig(r=3, target_modules="all-linear"),
    }
    ran = together(configs, lambda: loaded(folder, "nf4"), tmp_path, max_steps=3)
    for name in configs:
        side = ran.side(name)
        lab.assert_close(ran.run.losses[name], side.losses, 1e-5, name)
        # Three steps from B = 0: Adam makes whole steps of gradients that are rounding alone, on any processor.
        assert all(lab.relative(ran.run.weights(name)[key], weight) <= 5e-3 for key, weight in side.weights.items())


def test_what_changes_weights_is_refused_on_quantised_layers(folder: Path) -> None:
    for field, value in {"init_lora_weights": "pissa", "bias": "all"}.items():
        config: Any = LoraConfig(r=4, target_modules=["q_proj"], **{field: value})
        assert_refused({"own": config}, rf"tasks\.own\.peft_config\.{field}.*q_proj", loaded(folder, "nf4"))
