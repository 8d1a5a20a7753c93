"""Every kind of backbone: packed losses and gradients against plain PEFT on one row at a time, and refusals by name.

The judge is `get_peft_model` on a copy of the backbone with the transformers model's own forward: no packing, no
padding, and the architecture's own attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import relative
from tests.modeling import backbones
from tests.modeling.adapters.passes import (
    Judges,
    assert_as_plain,
    assert_nan_stays,
    assert_refused,
    assert_same_tensors,
    judges_like,
    moved,
    plain,
)
from tests.modeling.backbones import llava

LENGTHS = {"a": (5, 19, 9, 2), "b": (33, 3, 17)}


def rows(*, classes: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return rows of unequal lengths for both tasks; some of the labels carry no loss."""
    rng = np.random.default_rng(3)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, lengths in LENGTHS.items():
        found[name] = []
        for length in lengths:
            ids = rng.integers(2, backbones.VOCABULARY, length)
            labels = np.where(rng.random(length) < 0.3, IGNORE_INDEX, ids)
            row: dict[str, Any] = {"input_ids": ids, "labels": labels}
            if classes is not None:
                row = {"input_ids": ids, "label": int(rng.integers(classes))}
            found[name].append(row)
    return found


def packed(task_rows: dict[str, list[dict[str, Any]]]) -> MuxBatch:
    """Return all rows as one micro-batch."""
    return ChunkPackingCollator()([{"task": name, **row} for name, part in task_rows.items() for row in part])


def exact(backbone: Any) -> tuple[Any, float]:
    """Return a backbone in float64, and what its gradients may differ by.

    In float32 the gradients of a few weights differ by 2e-5 on some processors. Products of experts know no float64.
    """
    if any("experts" in name for name, _ in backbone.named_modules()):
        return backbone, 1e-4
    return backbone.double(), 1e-5


def judged(backbone: Any, targets: list[str], model: MultiTaskPeftModel) -> Judges:
    """Return plain PEFT's models of both tasks with the weights of a model."""
    return judges_like(model, backbones.configs_of(backbone, targets), lambda: copy.deepcopy(backbone))


def language_loss(model: Any, part: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss over the targets of all rows, one row at a time."""
    total = sum(int((row["labels"][1:] != IGNORE_INDEX).sum()) for row in part)
    terms = []
    for row in part:
        logits = model(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
        labels = torch.from_numpy(row["labels"])[1:]
        terms.append(F.cross_entropy(logits[:-1], labels, ignore_index=IGNORE_INDEX, reduction="sum"))
    return torch.stack(terms).sum() / total


def class_loss(model: Any, part: list[dict[str, Any]]) -> torch.Tensor:
    """Return the mean loss of all rows, one row at a time."""
    terms = []
    for row in part:
        logits = model(input_ids=torch.from_numpy(row["input_ids"])[None]).logits
        terms.append(F.cross_entropy(logits, torch.tensor([row["label"]])))
    return torch.stack(terms).mean()


def assert_as_alone(
    backbone: Any,
    targets: list[str],
    task_rows: dict[str, list[dict[str, Any]]],
    loss_of: Callable[[Any, list[dict[str, Any]]], torch.Tensor],
) -> None:
    """Assert that losses and all gradients of one packed pass are those of each task alone."""
    backbone, tolerance = exact(backbone)
    model = backbones.multiplexed(backbone, targets)
    judges = judged(backbone, targets, model)
    assert all(own.keys() == model.task_parameters(name).keys() for name, (_, own) in judges.items())
    assert_as_plain(model, packed(task_rows), judges, task_rows, loss_of=loss_of, tolerance=tolerance)


@pytest.mark.parametrize("architecture", backbones.LANGUAGE_MODELS)
def test_a_packed_language_model_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = backbones.LANGUAGE_MODELS[architecture]
    assert_as_alone(backbones.filled(make), targets, rows(), language_loss)


@pytest.mark.parametrize("architecture", backbones.VISION_LANGUAGE_MODELS)
def test_a_model_of_images_and_text_trains_on_text_as_plain_peft_trains_it(architecture: str) -> None:
    backbone, tolerance = exact(backbones.filled(backbones.VISION_LANGUAGE_MODELS[architecture]))
    task_rows, targets = rows(), ["q_proj", "o_proj"]
    model = backbones.multiplexed(backbone, targets)
    judges = judged(backbone, targets, model)
    reached = {
        name: (judge, {key: value for key, value in own.items() if key in model.task_parameters(name)})
        for name, (judge, own) in judges.items()
    }
    assert_as_plain(model, packed(task_rows), reached, task_rows, loss_of=language_loss, tolerance=tolerance)
    for name, (_, own) in judges.items():
        # What images would pass through gets no gradient alone, so no optimizer touches it, nor its decay here.
        mine = model.task_parameters(name)
        assert mine.keys() == {key for key, value in own.items() if value.grad is not None}
        assert name == "b" or len(mine) < len(own), "all-linear adapts the tower of images too"


def test_adapters_that_no_row_reaches_are_saved_as_they_were_drawn_and_refused_if_there_are_no_others(
    tmp_path: Path,
) -> None:
    backbone = backbones.filled(llava)
    MultiTaskPeftModel(
        copy.deepcopy(backbone), backbones.configs_of(backbone, ["q_proj"]), seeds={"a": 3}
    ).save_pretrained(tmp_path)
    judge, _ = plain(backbones.configs_of(backbone, ["q_proj"])["a"], 3, lambda: copy.deepcopy(backbone))
    saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
    drawn = get_peft_model_state_dict(judge)
    assert any("vision_tower" in key for key in saved)
    assert_same_tensors(saved, drawn)
    config = LoraConfig(target_modules=r".*vision_tower.*(k|v)_proj", task_type="CAUSAL_LM")
    assert_refused({"a": config}, r"tasks\.a\.peft_config\.target_modules must ", backbone)


@pytest.mark.parametrize("architecture", backbones.CLASSIFIERS)
def test_a_packed_classifier_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = backbones.CLASSIFIERS[architecture]
    assert_as_alone(backbones.filled(make), targets, rows(classes=3), class_loss)


@pytest.mark.parametrize("architecture", ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2", "Gemma3", "Phi", "GptOss"])
def test_a_task_that_classifies_alongside_language_modelling_has_the_loss_and_gradients_that_it_has_on_a_classifier(
    architecture: str,
) -> None:
    make, targets = backbones.LANGUAGE_MODELS[architecture]
    backbone, tolerance = exact(backbones.filled(make))
    config = copy.deepcopy(backbone.config)
    config.num_labels = 3
    classifier = tf.AutoModelForSequenceClassification.from_config(config, dtype=backbone.dtype)
    classifier.model.load_state_dict(backbone.model.state_dict())
    configs = backbones.configs_of(backbone, targets)
    configs["b"].task_type = "SEQ_CLS"
    model = moved(MultiTaskPeftModel(copy.deepcopy(backbone), configs, num_labels={"b": 3})).train()
    task_rows = {"a": rows()["a"], "b": rows(classes=3)["b"]}
    task_rows["b"][0]["input_ids"][-1] = backbone.config.pad_token_id
    judges = judges_like(model, {"a": configs["a"]}, lambda: backbone)
    judges |= judges_like(model, {"b": configs["b"]}, lambda: classifier)
    if architecture not in backbones.MIXTURES:  # where experts without a task's rows have products of other heights
        assert_nan_stays(model, packed(task_rows), "a")
        assert_nan_stays(model, packed(task_rows), "b", "score")
    for item in model.registry.parameters():
        item.grad = None

    def loss_of(judge: Any, part: list[dict[str, Any]]) -> torch.Tensor:
        return class_loss(judge, part) if "label" in part[0] else language_loss(judge, part)

    assert_as_plain(model, packed(task_rows), judges, task_rows, loss_of=loss_of, tolerance=tolerance)


@pytest.mark.parametrize("architecture", ["Qwen3", "GptOss"])
def test_the_logits_of_every_sequence_are_those_of_the_model_alone(architecture: str) -> None:
    make, targets = backbones.LANGUAGE_MODELS[architecture]
    backbone, task_rows = backbones.filled(make), rows()
    model = backbones.multiplexed(backbone, targets)
    found = iter(model.sequence_logits(packed(task_rows)))
    for name, (judge, _) in judged(backbone, targets, model).items():
        for row in task_rows[name]:
            with torch.no_grad():
                wanted = judge(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
            assert relative(next(found), wanted) <= 2e-5, f"{name}, a row of {len(row['input_ids'])} tokens"
    assert next(found, None) is None


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma2", "Gemma3"])
def test_the_sliding_window_matters_in_these_tests(architecture: str) -> None:
    make, targets = backbones.LANGUAGE_MODELS[architecture]
    model = backbones.multiplexed(backbones.filled(make), targets)
    batch = packed(rows())
    with torch.no_grad():
        before = model(batch).losses
        model.backbone.config.sliding_window = 64  # Mistral reads its configuration, the others their layers
        for module in model.modules():
            if getattr(module, "sliding_window", None) is not None:
                module.sliding_window = 64
        after = model(batch).losses
    assert ((after - before).abs() > 1e-4 * before).all()


def test_adapters_on_the_embedding_and_the_output_head_have_the_gradients_that_they_have_alone() -> None:
    backbone = backbones.filled(backbones.LANGUAGE_MODELS["Llama"][0])
    assert_as_alone(backbone, ["embed_tokens", "lm_head"], rows(), language_loss)


def test_each_task_has_a_head_of_its_own_size() -> None:
    backbone = backbones.filled(backbones.CLASSIFIERS["Bert"][0])
    model = MultiTaskPeftModel(backbone, backbones.configs_of(backbone, ["query"]), num_labels={"a": 5, "b": 3})
    shapes = {
        name: [
            len(value)
            for key, value in model.task_parameters(name).items()
            if key.endswith("classifier.modules_to_save.weight")
        ]
        for name in model.tasks
    }
    assert shapes == {"a": [5], "b": [3]}
    logits = model.sequence_logits(packed(rows(classes=3)))
    assert [len(row) for row in logits] == [5, 5, 5, 5, 3, 3, 3]


def test_a_decoder_classifies_by_its_last_token_that_is_no_padding() -> None:
    backbone, task_rows = backbones.filled(backbones.CLASSIFIERS["Llama"][0]), rows(classes=3)
    for part in task_rows.values():
        part[0]["input_ids"][-1] = backbone.config.pad_token_id
    assert_as_alone(backbone, ["q_proj"], task_rows, class_loss)


# ------------------------------------------------------------------ refusals


def compiled_llama() -> Any:
    """Return a backbone with a compiled part."""
    backbone = backbones.LANGUAGE_MODELS["Llama"][0]()
    backbone.model.layers[0].mlp.compile()
    return backbone


@pytest.mark.parametrize(
    ("make", "target", "name", "reason"),
    [
        (backbones.backbone_of("bloom"), "query_key_value", "BloomForCausalLM", "attention on a path of its own"),
        (
            backbones.backbone_of("mamba", state_size=4),
            "in_proj",
            "MambaForCausalLM",
            "carry state from one sequence into the next",
        ),
        (
            backbones.backbone_of("t5", tf.AutoModelForSeq2SeqLM, d_kv=8),
            "q",
            "T5ForConditionalGeneration",
            "encoder-decoder models have two streams",
        ),
        (
            backbones.backbone_of("opt", word_embed_proj_dim=32, dropout=0.1),
            "q_proj",
            "OPTForCausalLM",
            "global random generator",
        ),
        (compiled_llama, "q_proj", "LlamaForCausalLM", r"model\.layers\.0\.mlp is compiled"),
    ],
)
def test_a_model_that_packing_would_change_is_refused_by_name_with_the_reason(
    make: Callable[[], Any], target: str, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^{name} cannot be packed: .*{reason}.*must "):
        MultiTaskPeftModel(make(), {"a": LoraConfig(r=2, target_modules=[target])})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: tf.LlamaModel(tf.LlamaConfig(**backbones.GROUPED)), "^LlamaModel has no output embeddings"),
        (lambda: torch.nn.Linear(2, 2), "the backbone must be a transformers PreTrainedModel, got Linear"),
        (
            lambda: get_peft_model(backbones.LANGUAGE_MODELS["Llama"][0](), LoraConfig(target_modules=["q_proj"])),
            "PeftModel already holds adapters, and must be a plain transformers model.*model.unload",
        ),
    ],
    ids=["no head", "no transformers model", "with adapters"],
)
def test_what_is_no_plain_model_with_a_head_is_refused_by_name(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        MultiTaskPeftModel(make(), {"a": LoraConfig(target_modules=["q_proj"])})
