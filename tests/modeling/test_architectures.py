"""Every kind of backbone: packed losses and gradients against plain PEFT on one row at a time, and refusals by name.

The judge is `get_peft_model` on a copy of the backbone with the transformers model's own forward: no packing, no
padding, and the architecture's own attention.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F

from peft_mux.data.batch import IGNORE_INDEX, MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel

VOCABULARY = 61
LENGTHS = {"a": (5, 19, 9, 2), "b": (33, 3, 17)}
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**SIZE, "num_key_value_heads": 2}
NO_BERT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def llama() -> Any:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED))


def qwen2() -> Any:
    return tf.Qwen2ForCausalLM(tf.Qwen2Config(**GROUPED))


def qwen3() -> Any:
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED, head_dim=16))


def mistral() -> Any:
    return tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=6))


def gemma2() -> Any:
    config = tf.Gemma2Config(
        **GROUPED,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        query_pre_attn_scalar=5,
    )
    # Only the eager path of transformers honours the soft-cap of the scores.
    config._attn_implementation = "eager"
    return tf.Gemma2ForCausalLM(config)


def gemma3() -> Any:
    config = tf.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    return tf.Gemma3ForCausalLM(config)


def gpt2() -> Any:
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
    )
    return tf.GPT2LMHeadModel(config)


def phi() -> Any:
    return tf.PhiForCausalLM(tf.PhiConfig(**SIZE))


def opt(**settings: Any) -> Any:
    config = tf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        pad_token_id=0,
        **{"dropout": 0.0, **settings},
    )
    return tf.OPTForCausalLM(config)


def bert_classifier() -> Any:
    return tf.BertForSequenceClassification(tf.BertConfig(**SIZE, **NO_BERT_DROPOUT, num_labels=3))


def roberta_classifier() -> Any:
    config = tf.RobertaConfig(**{**SIZE, "pad_token_id": 1}, **NO_BERT_DROPOUT, num_labels=3)
    return tf.RobertaForSequenceClassification(config)


def llama_classifier() -> Any:
    return tf.LlamaForSequenceClassification(tf.LlamaConfig(**GROUPED, num_labels=3))


LANGUAGE_MODELS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Llama": (llama, ["q_proj", "down_proj"]),
    "Qwen2": (qwen2, ["k_proj", "up_proj"]),
    "Qwen3": (qwen3, ["v_proj", "o_proj"]),
    "Mistral": (mistral, ["q_proj", "v_proj"]),
    "Gemma2": (gemma2, ["q_proj", "gate_proj"]),
    "Gemma3": (gemma3, ["k_proj", "o_proj"]),
    "GPT2": (gpt2, ["c_attn"]),
    "Phi": (phi, ["q_proj", "dense"]),
    "OPT": (opt, ["q_proj", "fc1"]),
}
CLASSIFIERS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "Bert": (bert_classifier, ["query", "dense"]),
    "Roberta": (roberta_classifier, ["query", "value"]),
    "Llama": (llama_classifier, ["q_proj", "up_proj"]),
}


def filled(make: Callable[[], Any]) -> Any:
    """Return a backbone with weights large enough that every layer matters."""
    model = make()
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = torch.from_numpy(rng.normal(0.0, 0.15, tuple(weight.shape)).astype(np.float32))
            weight.copy_(1.0 + draws if weight.ndim == 1 and name.endswith("weight") else draws)
    return model.train()


def configs(backbone: Any, targets: list[str]) -> dict[str, LoraConfig]:
    """Return two adapters of unequal rank, scale and targets."""
    options = {
        "task_type": "SEQ_CLS" if "SequenceClassification" in type(backbone).__name__ else "CAUSAL_LM",
        "fan_in_fan_out": isinstance(backbone, tf.GPT2LMHeadModel),
    }
    return {
        "a": LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", **options),
        "b": LoraConfig(r=8, lora_alpha=4, use_rslora=True, target_modules=targets, **options),
    }


def rows(*, classes: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return rows of unequal lengths for both tasks; some of the labels carry no loss."""
    rng = np.random.default_rng(3)
    found: dict[str, list[dict[str, Any]]] = {}
    for name, lengths in LENGTHS.items():
        found[name] = []
        for length in lengths:
            ids = rng.integers(2, VOCABULARY, length)
            labels = np.where(rng.random(length) < 0.3, IGNORE_INDEX, ids)
            row: dict[str, Any] = {"input_ids": ids, "labels": labels}
            if classes is not None:
                row = {"input_ids": ids, "label": int(rng.integers(classes))}
            found[name].append(row)
    return found


def packed(task_rows: dict[str, list[dict[str, Any]]]) -> MuxBatch:
    """Return all rows as one micro-batch."""
    return ChunkPackingCollator()([{"task": name, **row} for name, part in task_rows.items() for row in part])


def multiplexed(backbone: Any, targets: list[str]) -> MultiTaskPeftModel:
    """Return a model of both tasks, with adapters that already do something."""
    model = MultiTaskPeftModel(copy.deepcopy(backbone), configs(backbone, targets))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name in model.tasks:
            for parameter in model.task_parameters(name).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.train()


def alone(backbone: Any, config: LoraConfig, parameters: dict[str, torch.Tensor]) -> tuple[Any, dict[str, Any]]:
    """Return a plain PEFT model with the given weights, and its parameters by the names that we use."""
    model = get_peft_model(copy.deepcopy(backbone), copy.deepcopy(config)).train()
    own = {key.replace(".default", ""): value for key, value in model.named_parameters() if value.requires_grad}
    assert own.keys() == parameters.keys()
    with torch.no_grad():
        for key, value in own.items():
            value.copy_(parameters[key])
    return model, own


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


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the second."""
    return ((found - wanted).norm() / wanted.norm()).item()


def assert_as_alone(
    backbone: Any,
    targets: list[str],
    task_rows: dict[str, list[dict[str, Any]]],
    judge: Callable[[Any, list[dict[str, Any]]], torch.Tensor],
) -> None:
    """Assert that losses and all gradients of one packed pass are those of each task alone."""
    model = multiplexed(backbone, targets)
    output = model(packed(task_rows))
    output.losses.sum().backward()
    assert output.task_names == ("a", "b")
    for index, (name, config) in enumerate(configs(backbone, targets).items()):
        mine = model.task_parameters(name)
        plain, own = alone(backbone, config, mine)
        loss = judge(plain, task_rows[name])
        loss.backward()
        assert output.losses[index].item() == pytest.approx(loss.item(), rel=1e-5)
        for key, parameter in own.items():
            assert parameter.grad.norm() > 0, f"{name} {key}: the comparison would be empty"
            assert relative(mine[key].grad, parameter.grad) <= 1e-5, f"{name} {key}"


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_a_packed_language_model_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    assert_as_alone(filled(make), targets, rows(), language_loss)


@pytest.mark.parametrize("architecture", CLASSIFIERS)
def test_a_packed_classifier_gives_every_task_the_loss_and_gradients_that_it_has_alone(architecture: str) -> None:
    make, targets = CLASSIFIERS[architecture]
    assert_as_alone(filled(make), targets, rows(classes=3), class_loss)


@pytest.mark.parametrize("architecture", LANGUAGE_MODELS)
def test_the_logits_of_every_sequence_are_those_of_the_model_alone(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    backbone, task_rows = filled(make), rows()
    model = multiplexed(backbone, targets)
    found = iter(model.sequence_logits(packed(task_rows)))
    for name, config in configs(backbone, targets).items():
        plain, _ = alone(backbone, config, model.task_parameters(name))
        for row in task_rows[name]:
            with torch.no_grad():
                wanted = plain(input_ids=torch.from_numpy(row["input_ids"])[None]).logits[0]
            assert relative(next(found), wanted) <= 1e-5, f"{name}, a row of {len(row['input_ids'])} tokens"
    assert next(found, None) is None


@pytest.mark.parametrize("architecture", ["Mistral", "Gemma2", "Gemma3"])
def test_the_sliding_window_matters_in_these_tests(architecture: str) -> None:
    make, targets = LANGUAGE_MODELS[architecture]
    model = multiplexed(filled(make), targets)
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
    assert_as_alone(filled(llama), ["embed_tokens", "lm_head"], rows(), language_loss)


def test_each_task_has_a_head_of_its_own_size() -> None:
    backbone = filled(bert_classifier)
    model = MultiTaskPeftModel(backbone, configs(backbone, ["query"]), num_labels={"a": 5, "b": 3})
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
    backbone, task_rows = filled(llama_classifier), rows(classes=3)
    for part in task_rows.values():
        part[0]["input_ids"][-1] = backbone.config.pad_token_id
    assert_as_alone(backbone, ["q_proj"], task_rows, class_loss)


# ------------------------------------------------------------------ refusals


def bloom() -> Any:
    return tf.BloomForCausalLM(tf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4))


def mamba() -> Any:
    config = tf.MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, state_size=4)
    return tf.MambaForCausalLM(config)


def gpt_oss() -> Any:
    config = tf.GptOssConfig(
        **{**GROUPED, "num_hidden_layers": 1}, head_dim=8, num_local_experts=2, num_experts_per_tok=1
    )
    return tf.GptOssForCausalLM(config)


def t5() -> Any:
    config = tf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    return tf.T5ForConditionalGeneration(config)


def with_functional_dropout() -> Any:
    return opt(dropout=0.1)


def with_layer_drop() -> Any:
    return opt(layerdrop=0.5)


@pytest.mark.parametrize(
    ("make", "target", "name", "reason"),
    [
        (bloom, "query_key_value", "BloomForCausalLM", "attention on a path of its own"),
        (mamba, "in_proj", "MambaForCausalLM", "carry state from one sequence into the next"),
        (t5, "q", "T5ForConditionalGeneration", "encoder-decoder models have two streams"),
        (with_functional_dropout, "q_proj", "OPTForCausalLM", "global random generator"),
        (with_layer_drop, "q_proj", "OPTForCausalLM", "global random generator"),
    ],
)
def test_a_model_that_packing_would_change_is_refused_by_name_with_the_reason(
    make: Callable[[], Any], target: str, name: str, reason: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^{name} cannot be packed: .*{reason}.*; allowed: "):
        MultiTaskPeftModel(make(), {"a": LoraConfig(r=2, target_modules=[target])})


def test_a_base_model_without_an_output_head_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^LlamaModel has no output embeddings"):
        MultiTaskPeftModel(tf.LlamaModel(tf.LlamaConfig(**GROUPED)), {"a": LoraConfig(target_modules=["q_proj"])})


def test_a_module_that_is_no_transformers_model_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^got Linear; allowed: a transformers PreTrainedModel"):
        MultiTaskPeftModel(torch.nn.Linear(2, 2), {"a": LoraConfig(target_modules=["q_proj"])})


def test_a_model_that_holds_adapters_already_is_refused() -> None:
    model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(UnsupportedModelError, match=r"already holds adapters; allowed: a plain.*model.unload"):
        MultiTaskPeftModel(model, {"a": LoraConfig(target_modules=["q_proj"])})
