"""Prompts that classify: each trains a head of its own, and is what plain PEFT makes of it alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers as tf
from peft import (
    AutoPeftModelForSequenceClassification,
    AutoPeftModelForTokenClassification,
    CPTConfig,
    PeftModel,
    TaskType,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from torch.nn import functional as F

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence, with_virtual_tokens
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.modeling.attention import packed as attention
from peft_mux.modeling.attention.varlen import as_kernel, varlen_attention
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.prompts import prompt_cases
from tests.modeling.adapters.prompts.prompt_cases import judge, plain, task_ids
from tests.modeling.test_architectures import (
    GROUPED,
    NO_BERT_DROPOUT,
    SIZE,
    VOCABULARY,
    bert_classifier,
    filled,
    llama_classifier,
    roberta_classifier,
)

SEQ, TOKEN = TaskType.SEQ_CLS, TaskType.TOKEN_CLS
TOKENS = ("prompt", "words", "mlp", "lstm", "multitask")
"""Forms of virtual tokens that PEFT trains for classification: all but CPT."""
KEYS = ("prefix", "projected", "cartridge")
ENCODED = ("mlp", "lstm", "projected")
"""Forms whose encoder is more than what PEFT saves of it."""
CLASSES = 3
BERT = {**SIZE, **NO_BERT_DROPOUT, "num_labels": CLASSES}


def gpt2_config(**settings: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
    return tf.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, num_labels=CLASSES, **settings)


def llama_tagger() -> Any:
    return tf.LlamaForTokenClassification(tf.LlamaConfig(**GROUPED, num_labels=CLASSES, classifier_dropout=0.0))


class Case(NamedTuple):
    """A backbone, the task type that it serves, and the forms of prompts that PEFT trains on it."""

    make: Callable[[], Any]
    task_type: TaskType
    forms: tuple[str, ...]


CASES = {
    "Bert": Case(bert_classifier, SEQ, TOKENS + KEYS),
    "Roberta": Case(roberta_classifier, SEQ, TOKENS + KEYS),
    "Llama": Case(llama_classifier, SEQ, KEYS),
    "GPT2": Case(lambda: tf.GPT2ForSequenceClassification(gpt2_config()), SEQ, KEYS),
    "Bert, tokens": Case(lambda: tf.BertForTokenClassification(tf.BertConfig(**BERT)), TOKEN, KEYS),
    "Llama, tokens": Case(llama_tagger, TOKEN, KEYS),
    "GPT2, tokens": Case(lambda: tf.GPT2ForTokenClassification(gpt2_config(classifier_dropout=0.0)), TOKEN, KEYS),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)
ONE_OF_EACH = pytest.mark.parametrize("name", ["Bert", "Llama", "GPT2", "Bert, tokens"])


def config_of(form: str, task_type: TaskType) -> Any:
    config: Any = prompt_cases.config_of(form, task_type)
    if form == "lora":
        # By "all-linear" plain PEFT adapts the head of a tagger before it copies it, which fails.
        config.target_modules = r".*(query|q_proj|c_attn)"
    return config


# ------------------------------------------------------------------------ passes


class Row(NamedTuple):
    """Tokens, and their class or classes."""

    ids: list[int]
    label: Any

    @property
    def num_terms(self) -> int:
        return sum(one != IGNORE_INDEX for one in self.label) if isinstance(self.label, list) else 1


def rows_of(form: str, task_type: TaskType, count: int = 4) -> list[Row]:
    """Return rows of random tokens and classes, others for each form."""
    rng = np.random.default_rng(sum(map(ord, form)))
    found = []
    for length in rng.integers(2, 20, count):
        ids = rng.integers(2, VOCABULARY, length).tolist()
        classes = np.where(rng.random(length) < 0.3, IGNORE_INDEX, rng.integers(0, CLASSES, length))
        classes[-1] = rng.integers(0, CLASSES)
        found.append(Row(ids, classes.tolist() if task_type == TOKEN else int(classes[-1])))
    return found


def packed(model: MultiTaskPeftModel, rows: dict[str, list[Row]]) -> MuxBatch:
    """Return the rows of tasks as one stream."""
    batches = []
    for form, own in rows.items():
        sequences = []
        for number, (ids, label) in enumerate(own):
            is_of_tokens = isinstance(label, list)
            options: dict[str, Any] = {"labels_itself": True} if is_of_tokens else {"class_label": label}
            sequence = TokenSequence(np.array(ids), np.array(label if is_of_tokens else ids), number, **options)
            sequences.append(with_virtual_tokens(sequence, model.virtual_labels.get(form, ())))
        batches.append(TaskBatch(form, 0, 1, tuple(sequences)))
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=10_000)
    return batch


def plain_loss(model: Any, rows: Sequence[Row]) -> torch.Tensor:
    """Return plain PEFT's own loss of rows, one at a time, as a mean over the rows or the labelled tokens of all."""
    losses = [
        model(input_ids=torch.tensor([row.ids]), labels=torch.tensor([row.label]), **task_ids(model)).loss
        * row.num_terms
        for row in rows
    ]
    return torch.stack(losses).sum() / sum(row.num_terms for row in rows)


def padded(rows: Sequence[Row], pad: int, side: str) -> dict[str, torch.Tensor]:
    """Return rows as a batch of equal lengths."""
    longest = max(len(row.ids) for row in rows)
    ids, mask = [], []
    for row in rows:
        padding = longest - len(row.ids)
        before, after = (0, padding) if side == "right" else (padding, 0)
        ids.append([pad] * before + row.ids + [pad] * after)
        mask.append([0] * before + [1] * len(row.ids) + [0] * after)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def mux(name: str, *forms: str) -> MultiTaskPeftModel:
    """Return a model of tasks of some forms, the weights of each drawn from a seed of its own."""
    make, task_type, _ = CASES[name]
    configs = {form: config_of(form, task_type) for form in forms}
    return MultiTaskPeftModel(filled(make), configs, seeds={form: len(form) for form in forms})


def moved(model: Any, parameters: dict[str, torch.nn.Parameter]) -> Any:
    """Return a model whose parameters were changed, as training would, by amounts that their names fix."""
    with torch.no_grad():
        for key, item in parameters.items():
            generator = torch.Generator().manual_seed(sum(map(ord, key)))
            item.add_(0.3 * torch.randn(item.shape, generator=generator))
    return model


@EVERY_CASE
def test_a_pass_gives_each_prompt_what_plain_peft_alone_gives(name: str) -> None:
    make, task_type, forms = CASES[name]
    rows = {form: rows_of(form, task_type) for form in (*forms, "lora")}
    model = mux(name, *rows)
    losses = model(packed(model, rows)).losses
    losses.sum().backward()
    for loss, form in zip(losses, rows, strict=True):
        peft_model, own = plain(config_of(form, task_type), len(form), filled(make))
        ours = model.task_parameters(form)
        assert ours.keys() == own.keys(), "names are plain PEFT's"
        assert all(torch.equal(ours[key], item) for key, item in own.items()), "initial weights"
        wanted = plain_loss(peft_model.train(), rows[form])
        wanted.backward()
        assert math.isclose(loss.item(), wanted.item(), rel_tol=1e-5), form
        for key, item in own.items():
            grad: Any = item.grad
            assert grad.norm() > 0 or key.endswith("lora_A.weight"), f"{form} {key}: nothing would be compared"
            found: Any = ours[key].grad
            assert lab.relative(found, grad) <= 1e-4, f"{form} {key}"


@EVERY_CASE
def test_logits_of_a_stream_and_of_a_view_are_plain_pefts_in_a_padded_batch(name: str) -> None:
    make, task_type, forms = CASES[name]
    backbone = filled(make)
    model = mux(name, *forms, "lora").eval()
    for form in (*forms, "lora"):
        moved(model, model.task_parameters(form))
        peft_model, own = plain(config_of(form, task_type), len(form), filled(make))
        moved(peft_model.eval(), own)
        rows = rows_of(form, task_type)
        given = padded(rows, backbone.config.pad_token_id, "right")
        with torch.no_grad():
            wanted = peft_model(**given, **task_ids(peft_model)).logits
            viewed = model.task_view(form)(**given).logits
            streamed = model.sequence_logits(packed(model, {form: rows}))
        assert torch.equal(viewed, wanted), form
        for row, found, theirs in zip(rows, streamed, wanted, strict=True):
            theirs = theirs[: len(row.ids)] if task_type == TOKEN else theirs
            torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)


# --------------------------------------------------------------------------- runs


def task_of(name: str, form: str, **settings: Any) -> Task:
    """Return a task of a form, whose name is the form's, on the backbone of a case."""
    task_type = CASES[name].task_type
    column = "labels" if task_type == TOKEN else "label"
    options: dict[str, Any] = {
        "train_dataset": [{"input_ids": row.ids, column: row.label} for row in rows_of(form, task_type, 10)],
        "num_labels": CLASSES,
        "train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_steps": 5,
        "seed": 3,
    }
    return Task(name=form, peft_config=config_of(form, task_type), **{**options, **settings})


def given_loss(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return plain PEFT's loss of the rows of a global batch."""
    rows = []
    for one in sequences:
        own = slice(one.num_virtual_tokens, None)
        label = one.labels[own].tolist() if one.class_label is None else one.class_label
        rows.append(Row(one.input_ids[own].tolist(), label))
    return plain_loss(model, rows)


@ONE_OF_EACH
def test_every_prompt_trains_next_to_lora_as_plain_peft_trains_it_alone(name: str, tmp_path: Path) -> None:
    make, _, forms = CASES[name]
    tasks = [task_of(name, form) for form in (*forms, "lora")]
    run = lab.train(tasks, tmp_path, model=filled(make))
    lab.assert_as_judged(run, {task.name: judge(run.trainer, task, filled(make), given_loss) for task in tasks})
    heads = [next(item for key, item in run.weights(task.name).items() if "modules_to_save" in key) for task in tasks]
    assert len({item.sum().item() for item in heads}) == len(heads), "heads are shared"


@pytest.mark.parametrize(("name", "form"), [("Bert", "mlp"), ("Bert", "prefix"), ("GPT2", "projected")])
def test_a_prompt_trains_alone_as_plain_peft_trains_it(name: str, form: str, tmp_path: Path) -> None:
    task, make = task_of(name, form), CASES[name].make
    run = lab.train([task], tmp_path, model=filled(make))
    lab.assert_as_judged(run, {form: judge(run.trainer, task, filled(make), given_loss)})


@ONE_OF_EACH
def test_a_run_resumes_from_its_checkpoint_bit_by_bit(name: str, tmp_path: Path) -> None:
    make, _, forms = CASES[name]

    def train(folder: str, **options: Any) -> lab.Run:
        tasks = [task_of(name, form, max_steps=4) for form in (*forms, "lora")]
        return lab.train(tasks, tmp_path / folder, model=filled(make), **options)

    whole = train("whole")
    stop = lab.Recorder(at_end={2: lambda trainer: setattr(trainer.control, "should_training_stop", True)})
    train("cut", recorder=stop, save_strategy="steps", save_steps=2)
    rest = train("cut", resume=True, save_strategy="steps", save_steps=100)
    for form in (*forms, "lora"):
        assert rest.losses[form] == whole.losses[form][2:], form
        final = whole.weights(form)
        assert all(torch.equal(final[key], weight) for key, weight in rest.weights(form).items()), form


def test_a_prompt_arrives_in_a_run_of_classifiers_with_its_own_number_of_classes_and_leaves_it(tmp_path: Path) -> None:
    late = {form: task_of("Bert", form, max_steps=3, num_labels=5) for form in ("prefix", "mlp")}
    recorder = lab.Recorder(
        at_end={
            2: lambda trainer: trainer.register_tasks(list(late.values())),
            4: lambda trainer: trainer.remove_task("mlp"),
        }
    )
    model = filled(bert_classifier)
    run = lab.train([task_of("Bert", "lora", max_steps=8)], tmp_path, model=model, recorder=recorder)
    assert [len(run.losses[form]) for form in ("lora", "prefix", "mlp")] == [8, 3, 2]
    head = "base_model.classifier.modules_to_save.weight"
    assert run.weights("prefix")[head].shape == (5, 32)
    wrapper = run.trainer.model.backbone.classifier
    assert set(wrapper.modules_to_save) == {run.trainer.model.adapter_of(form) for form in ("lora", "prefix")}


@pytest.mark.parametrize("name", ["Bert", "Llama", "Bert, tokens"])
def test_an_evaluation_is_plain_pefts_after_training(name: str, tmp_path: Path) -> None:
    make, task_type, forms = CASES[name]
    held_out = rows_of("held out", task_type, 5)
    column = "labels" if task_type == TOKEN else "label"
    rows = [{"input_ids": row.ids, column: row.label} for row in held_out]
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["logits"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"own": 1.0}

    tasks = [
        task_of(name, form, max_steps=2, eval_dataset=rows, compute_metrics=metrics if form == "prefix" else None)
        for form in (*forms, "lora")
    ]
    with warnings.catch_warnings():
        # Memory is counted on a description of the model, and estimated only where it does not run.
        warnings.filterwarnings("error", message="activations are estimated by formula")
        run = lab.train(tasks, tmp_path, model=filled(make), save_strategy="steps", save_steps=100)
    found = run.trainer.evaluate()
    for form in forms:
        saved: Any = PeftModel.from_pretrained(filled(make), str(tmp_path / form)).eval()
        with torch.no_grad():
            assert found[f"{form}/eval_loss"] == pytest.approx(plain_loss(saved, held_out).item(), rel=1e-4), form
        if form == "prefix":
            wanted = [saved(input_ids=torch.tensor([row.ids])).logits[0].detach() for row in held_out]
    for row, theirs, logits, labels in zip(held_out, wanted, seen["logits"], seen["labels"], strict=True):
        assert np.allclose(logits.reshape(-1, CLASSES)[: theirs.numel() // CLASSES], theirs, rtol=1e-3, atol=1e-4)
        assert np.array_equal(np.atleast_1d(labels)[: len(np.atleast_1d(row.label))], np.atleast_1d(row.label))


def test_micro_batches_and_dropout_of_an_encoder_depend_on_nothing_but_the_task(tmp_path: Path) -> None:
    def model() -> Any:
        drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
        return filled(lambda: tf.BertForSequenceClassification(tf.BertConfig(**{**BERT, **drops})))

    forms = ("mlp", "prefix")
    together = lab.train([task_of("Bert", form) for form in ("lora", *forms)], tmp_path / "together", model=model())
    for form in forms:
        options = {"model": model(), "max_tokens_per_micro_batch": 24, "gradient_checkpointing": True}
        alone = lab.train([task_of("Bert", form)], tmp_path / form, **options)
        lab.assert_same(alone, together, form, 1e-4)


def test_a_kernel_for_varying_lengths_gets_the_keys_of_an_encoders_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {form: rows_of(form, SEQ) for form in ("prefix", "lora", "mlp")}
    model = mux("Bert", *rows)
    wanted = model(packed(model, rows)).losses
    told: list[tuple[list[int], list[int], tuple[int, int]]] = []

    def kernel(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale=1.0, window_size=(-1, -1), enable_gqa=False):
        told.append((bounds_q.diff().tolist(), bounds_k.diff().tolist(), window_size))
        bounds = zip(pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist()), strict=True)
        parts = [
            [x[start:end].transpose(0, 1) for x, (start, end) in ((q, own), (k, keys), (v, keys))]
            for own, keys in bounds
        ]
        return torch.cat([F.scaled_dot_product_attention(*part, scale=scale).transpose(0, 1) for part in parts])

    monkeypatch.setattr(attention, "varlen_support", lambda *args, **kwargs: None)
    monkeypatch.setattr(attention, "varlen_attention", partial(varlen_attention, kernel=as_kernel("torch", kernel)))
    torch.testing.assert_close(model(packed(model, rows)).losses, wanted, rtol=1e-5, atol=1e-6)
    lengths = [len(row.ids) + (4 if form == "mlp" else 0) for form, own in rows.items() for row in own]
    keys = [length + (5 if number < 4 else 0) for number, length in enumerate(lengths)]
    assert told[0] == (lengths, keys, (-1, -1)), "every token sees all keys"


def test_a_prefix_trains_a_reward_model_as_plain_peft_does(tmp_path: Path) -> None:
    def make() -> Any:
        return filled(lambda: tf.LlamaForSequenceClassification(tf.LlamaConfig(**GROUPED, num_labels=1)))

    pairs = [row.ids for row in rows_of("prefix", SEQ, 12)]
    rows = [{"chosen_ids": a, "rejected_ids": b} for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    task = task_of("Llama", "prefix", train_dataset=rows, objective="reward", num_labels=None)

    def loss_of(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        margins = []
        for one in sequences:
            chosen, rejected = (torch.tensor(one.input_ids[a:b])[None] for a, b in one.sequence_bounds)
            margins.append(model(input_ids=chosen).logits[0, 0] - model(input_ids=rejected).logits[0, 0])
        return -F.logsigmoid(torch.stack(margins)).mean()

    run = lab.train([task], tmp_path, model=make())
    lab.assert_as_judged(run, {"prefix": judge(run.trainer, task, make(), loss_of)})


# -------------------------------------------------------------------------- files


@EVERY_CASE
def test_plain_peft_loads_a_saved_classifier_and_holds_the_same_keys(name: str, tmp_path: Path) -> None:
    make, task_type, forms = CASES[name]
    base = tmp_path / "base"
    filled(make).save_pretrained(base)
    auto, auto_peft = {
        SEQ: (tf.AutoModelForSequenceClassification, AutoPeftModelForSequenceClassification),
        TOKEN: (tf.AutoModelForTokenClassification, AutoPeftModelForTokenClassification),
    }[task_type]
    configs = {form: config_of(form, task_type) for form in forms}
    model = MultiTaskPeftModel(auto.from_pretrained(base), configs, verify=False).eval()
    for form in forms:
        moved(model, model.task_parameters(form))
    model.save_pretrained(tmp_path / "saved")
    for form in forms:
        folder = tmp_path / "saved" / form
        peft_model, _ = plain(config_of(form, task_type), 42, filled(make))
        assert load_file(folder / "adapter_model.safetensors").keys() == get_peft_model_state_dict(peft_model).keys()
        assert (folder / "prompt_encoder.safetensors").exists() == (form in ENCODED)
        given = padded(rows_of(form, task_type), model.backbone.config.pad_token_id, "right")
        viewed = model.task_view(form)(**given).logits
        loaded: Any
        for loaded in (PeftModel.from_pretrained(filled(make), str(folder)), auto_peft.from_pretrained(str(folder))):
            # What PEFT saves of an encoder was computed from one row, that of the view from several.
            tolerance = 1e-4 if form in ENCODED else 0.0
            wanted = loaded.eval()(**given, **task_ids(loaded)).logits
            torch.testing.assert_close(viewed, wanted, rtol=tolerance, atol=tolerance)
    again = MultiTaskPeftModel.from_pretrained(auto.from_pretrained(base), tmp_path / "saved", verify=False)
    for form in forms:
        theirs = again.task_parameters(form)
        assert theirs.keys() == model.task_parameters(form).keys()
        assert all(torch.equal(theirs[key], item) for key, item in model.task_parameters(form).items()), form


@pytest.mark.parametrize("form", TOKENS + KEYS)
def test_a_classifier_of_plain_peft_is_trained_on_where_its_file_holds_it(form: str, tmp_path: Path) -> None:
    peft_model, own = plain(config_of(form, SEQ), 5, filled(bert_classifier))
    moved(peft_model, own).save_pretrained(tmp_path / form)
    if form in ENCODED:
        with pytest.raises(
            CheckpointError,
            match=r'task "\w+": .*, got only its output \(prompt_embeddings\), which is all that PEFT saves',
        ):
            MultiTaskPeftModel.from_pretrained(filled(bert_classifier), tmp_path, verify=False)
        return
    model = MultiTaskPeftModel.from_pretrained(filled(bert_classifier), tmp_path, verify=False)
    assert all(torch.equal(item, own[key]) for key, item in model.task_parameters(form).items())


def test_removed_and_switched_off_prompts_leave_the_heads_of_others_alone() -> None:
    model = mux("Bert", "lora", "prompt", "prefix").eval()
    rows = rows_of("lora", SEQ)
    given = padded(rows, 0, "right")
    for form in model.tasks:
        moved(model, model.task_parameters(form))
    wanted = model.task_view("lora")(**given).logits
    with model.disable_adapter():
        assert torch.equal(model(**given).logits, filled(bert_classifier).eval()(**given).logits)
    model.select_adapter(model.adapter_of("lora"))
    model.remove_tasks(["prompt"])
    assert torch.equal(model(**given).logits, wanted), "the head of the active adapter"
    model.remove_tasks(["prefix"])
    assert torch.equal(model.task_view("lora")(**given).logits, wanted)
    assert [key for key, _ in model.named_parameters() if "modules_to_save" in key and "t000001" not in key] == []
    (logits,) = model.sequence_logits(packed(model, {"lora": rows[:1]}))
    torch.testing.assert_close(logits, wanted[0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------- what PEFT cannot train


def refusal(backbone: Any, config: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        MultiTaskPeftModel(backbone, {"a": config}, verify=False)
    return str(caught.value)


@pytest.mark.parametrize("form", TOKENS)
@pytest.mark.parametrize("name", ["Llama", "GPT2"])
def test_virtual_tokens_before_a_decoder_are_refused_as_plain_peft_classifies_by_padding(name: str, form: str) -> None:
    make = CASES[name].make
    said = refusal(filled(make), config_of(form, SEQ))
    assert said.startswith("tasks.a.peft_config must be ")
    assert f", got {config_of(form, SEQ).peft_type.value} on a {name}ForSequenceClassif" in said
    assert "it would classify by padding" in said
    peft_model, own = plain(config_of(form, SEQ), 0, filled(make))
    moved(peft_model.eval(), own)
    rows = [Row([5, 6, 7, 8, 9, 10], 0), Row([11, 12], 1)]
    with torch.no_grad():
        alone = peft_model(input_ids=torch.tensor([rows[1].ids]), **task_ids(peft_model)).logits[0]
        for side in ("right", "left"):
            together = peft_model(**padded(rows, 0, side), **task_ids(peft_model)).logits[1]
            assert lab.relative(together, alone) > 1e-3, f"{side}: PEFT can train it"


@pytest.mark.parametrize("form", TOKENS)
@pytest.mark.parametrize("name", ["Llama, tokens", "GPT2, tokens", "Bert, tokens"])
def test_virtual_tokens_before_a_tagger_are_refused_as_plain_peft_fails(name: str, form: str) -> None:
    make = CASES[name].make
    assert "PEFT fails on the logits of virtual tokens" in refusal(filled(make), config_of(form, TOKEN))
    peft_model, _ = plain(config_of(form, TOKEN), 0, filled(make))
    with pytest.raises(ValueError, match="batch_size"):
        plain_loss(peft_model, rows_of(form, TOKEN, 1))


def test_cpt_is_refused_as_plain_peft_refuses_it() -> None:
    with pytest.raises(ValueError, match="only supports task_type"):
        CPTConfig(task_type=SEQ, cpt_token_ids=[1], cpt_mask=[1], cpt_tokens_type_mask=[1])
    assert "task_type must be CAUSAL_LM for CPT, got SEQ_CLS" in refusal(filled(bert_classifier), config_of("cpt", SEQ))


def distilbert() -> Any:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "pad_token_id": 0}
    return tf.DistilBertForSequenceClassification(tf.DistilBertConfig(**sizes, num_labels=CLASSES))


def modernbert() -> Any:
    ids = {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return tf.ModernBertForSequenceClassification(tf.ModernBertConfig(**SIZE, **ids, num_labels=CLASSES))


def narrow_electra() -> Any:
    return tf.ElectraForSequenceClassification(tf.ElectraConfig(**BERT, embedding_size=16))


@pytest.mark.parametrize(
    ("make", "form", "said", "theirs"),
    [
        (distilbert, "prompt", "backbones whose configuration PEFT can read", "specify `token_dim`"),
        (modernbert, "prefix", "backbones that take past_key_values", "does not support past key values"),
        (
            narrow_electra,
            "mlp",
            "backbones whose embeddings are as wide as their layers",
            "Sizes of tensors must match",
        ),
    ],
)
def test_backbones_on_which_plain_peft_fails_are_refused_by_name(
    make: Callable[[], Any], form: str, said: str, theirs: str
) -> None:
    assert said in refusal(filled(make), config_of(form, SEQ))
    with pytest.raises((ValueError, RuntimeError), match=theirs):
        plain_loss(plain(config_of(form, SEQ), 0, filled(make))[0], rows_of(form, SEQ, 1))
