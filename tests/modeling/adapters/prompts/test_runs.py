"""Whole runs: prompts together with LoRA on one backbone, each as plain PEFT trains it alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F

from peft_mux import Task
from peft_mux.data.task_batch import TokenSequence
from tests.engine.processes import cases
from tests.engine.processes.cases import Part, launch, values
from tests.engine.processes.test_data_parallel import assert_alike, assert_as_one
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import assert_resumes
from tests.modeling.adapters.prompts import prompt_cases as prompts
from tests.modeling.backbones import classifier_of, filled

ONE_OF_EACH = pytest.mark.parametrize("name", ["language", "Bert", "Llama", "GPT2", "Bert, tokens"])


@ONE_OF_EACH
def test_every_prompt_trains_next_to_lora_as_plain_peft_trains_it_alone(name: str, tmp_path: Path) -> None:
    case = prompts.CASES[name]
    tasks = [prompts.task_of(form, case, weight_decay=0.1) for form in case.forms]
    run = lab.train(tasks, tmp_path, model=case.make())
    verdicts = {task.name: prompts.judge(run.trainer, task, case) for task in tasks}
    lab.assert_as_judged(run, verdicts)
    for form, verdict in verdicts.items():
        assert verdict.losses[-1] != verdict.losses[0], f"{form} has learned something"
    if case is not prompts.LANGUAGE:
        heads = [next(item for key, item in run.weights(form).items() if "modules_to_save" in key) for form in verdicts]
        assert len({item.sum().item() for item in heads}) == len(heads), "heads are shared"


@pytest.mark.parametrize(("name", "form"), [("Bert", "mlp"), ("Bert", "prefix"), ("GPT2", "projected")])
def test_a_prompt_trains_alone_as_plain_peft_trains_it(name: str, form: str, tmp_path: Path) -> None:
    task = prompts.task_of(form, prompts.CASES[name])
    run = lab.train([task], tmp_path, model=prompts.CASES[name].make())
    lab.assert_as_judged(run, {form: prompts.judge(run.trainer, task, prompts.CASES[name])})


@ONE_OF_EACH
def test_a_run_resumes_from_its_checkpoint_bit_by_bit(name: str, tmp_path: Path) -> None:
    case = prompts.CASES[name]
    assert_resumes(lambda: [prompts.task_of(form, case, max_steps=4) for form in case.forms], tmp_path, case.make)


@pytest.mark.slow
def test_checkpointing_and_long_rows_in_parts_change_nothing(tmp_path: Path) -> None:
    forms = ("prompt", "mlp", "prefix", "lora")

    def tasks() -> list[Task]:
        return [prompts.task_of(form, max_steps=3, max_length=40) for form in forms]

    plain = lab.train(tasks(), tmp_path / "plain")
    options = {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 16, "split_long_sequences": True}
    parts = lab.train(tasks(), tmp_path / "parts", **options)
    for name in forms:
        lab.assert_same(parts, plain, name, 1e-4)


@pytest.mark.parametrize("name", ["language", "Bert"])
def test_a_prompt_arrives_in_a_run_with_its_own_number_of_classes_and_leaves_it(name: str, tmp_path: Path) -> None:
    case = prompts.CASES[name]
    own = {} if case is prompts.LANGUAGE else {"num_labels": 5}
    late = {form: prompts.task_of(form, case, max_steps=3, **own) for form in ("prefix", "mlp")}
    recorder = lab.Recorder(
        at_end={
            2: lambda trainer: trainer.register_tasks(list(late.values())),
            4: lambda trainer: trainer.remove_task("mlp"),
        }
    )
    run = lab.train([prompts.task_of("lora", case, max_steps=8)], tmp_path, model=case.make(), recorder=recorder)
    assert [len(run.losses[form]) for form in ("lora", "prefix", "mlp")] == [8, 3, 2]
    if case is prompts.LANGUAGE:
        lab.assert_close(run.losses["prefix"], prompts.judge(run.trainer, late["prefix"]).losses, 1e-5, "prefix")
        return
    head = "base_model.classifier.modules_to_save.weight"
    assert run.weights("prefix")[head].shape == (5, 32)
    wrapper = run.trainer.model.backbone.classifier
    assert set(wrapper.modules_to_save) == {run.trainer.model.adapter_of(form) for form in ("lora", "prefix")}


@pytest.mark.parametrize("name", ["language", "Bert", "Llama", "Bert, tokens"])
def test_an_evaluation_is_plain_pefts_after_training(name: str, tmp_path: Path) -> None:
    case = prompts.CASES[name]
    held_out = prompts.rows_of("held out", case.task_type, 5)
    column = {prompts.LM: "input_ids", prompts.SEQ: "label", prompts.TOKEN: "labels"}[case.task_type]
    rows = [{"input_ids": row.ids, column: row.ids if row.label is None else row.label} for row in held_out]
    measured = "cpt" if case is prompts.LANGUAGE else "prefix"
    seen: dict[str, Any] = {}

    def metrics(prediction: Any) -> dict[str, float]:
        seen["logits"], seen["labels"] = prediction.predictions, prediction.label_ids
        return {"own": 1.0}

    tasks = [
        prompts.task_of(
            form, case, max_steps=2, eval_dataset=rows, compute_metrics=metrics if form == measured else None
        )
        for form in case.forms
    ]
    with warnings.catch_warnings():
        # Memory is counted on a description of the model, and estimated only where it does not run.
        warnings.filterwarnings("error", message="activations are estimated by formula")
        run = lab.train(tasks, tmp_path, model=case.make(), save_strategy="steps", save_steps=100)
    found = run.trainer.evaluate()
    for form in case.forms:
        saved: Any = PeftModel.from_pretrained(case.make(), str(tmp_path / form)).eval()
        saved.peft_config["default"] = prompts.config_of(form) if form == "cpt" else saved.peft_config["default"]
        with torch.no_grad():
            assert found[f"{form}/eval_loss"] == pytest.approx(prompts.prompt_loss(saved, held_out).item(), rel=1e-4), (
                form
            )
        assert prompts.task_ids(saved).keys() == ({"task_ids"} if form == "multitask" else set())
        if form == measured:
            wanted = [saved(input_ids=torch.tensor([row.ids])).logits[0].detach() for row in held_out]
    for row, theirs, logits, labels in zip(held_out, wanted, seen["logits"], seen["labels"], strict=True):
        # Of a row's own tokens alone, padded as Trainer pads them.
        own = len(row.ids) if case.task_type != prompts.SEQ else 1
        theirs = theirs.reshape(-1, theirs.shape[-1])[-own:]
        assert np.allclose(logits.reshape(-1, theirs.shape[-1])[:own], theirs, rtol=1e-3, atol=1e-4)
        assert (
            np.atleast_1d(labels)[:own].tolist() == np.atleast_1d(row.ids if row.label is None else row.label).tolist()
        )


def test_micro_batches_and_dropout_of_an_encoder_depend_on_nothing_but_the_task(tmp_path: Path) -> None:
    drops = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}
    case = prompts.Case(lambda: filled(classifier_of("bert", **drops)), prompts.SEQ)
    forms = ("mlp", "prefix")
    tasks = [prompts.task_of(form, case) for form in ("lora", *forms)]
    together = lab.train(tasks, tmp_path / "together", model=case.make())
    for form in forms:
        options = {"model": case.make(), "max_tokens_per_micro_batch": 24, "gradient_checkpointing": True}
        alone = lab.train([prompts.task_of(form, case)], tmp_path / form, **options)
        lab.assert_same(alone, together, form, 1e-4)


def test_a_prefix_trains_a_reward_model_as_plain_peft_does(tmp_path: Path) -> None:
    case = prompts.Case(lambda: filled(classifier_of("llama", num_labels=1)), prompts.SEQ)
    pairs = [row.ids for row in prompts.rows_of("prefix", prompts.SEQ, 12)]
    rows = [{"chosen_ids": a, "rejected_ids": b} for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    task = prompts.task_of("prefix", case, train_dataset=rows, objective="reward", num_labels=None)

    def loss_of(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
        margins = []
        for one in sequences:
            chosen, rejected = (torch.tensor(one.input_ids[a:b])[None] for a, b in one.sequence_bounds)
            margins.append(model(input_ids=chosen).logits[0, 0] - model(input_ids=rejected).logits[0, 0])
        return -F.logsigmoid(torch.stack(margins)).mean()

    run = lab.train([task], tmp_path, model=case.make())
    lab.assert_as_judged(run, {"prefix": prompts.judge(run.trainer, task, case, loss_of)})


def test_a_plan_counts_virtual_tokens(tmp_path: Path) -> None:
    def tokens_of(form: str) -> float:
        rows = [{"input_ids": row.ids} for row in prompts.rows_of("lora", count=8, low=10, high=11)]
        task = prompts.task_of(form, train_dataset=rows, train_batch_size=8)
        trainer = lab.make_trainer([task], tmp_path)
        with warnings.catch_warnings():
            # Activations are counted on a description of the model, and estimated only where it does not run.
            warnings.filterwarnings("error", message="activations are estimated by formula")
            return trainer.plan().tokens_per_step

    bare = tokens_of("lora")
    added = {form: tokens_of(form) - bare for form in ("prompt", "cpt", "prefix")}
    assert added == {"prompt": 8 * 3, "cpt": 8 * 8, "prefix": 0}


def test_rows_keep_as_many_tokens_as_they_may_and_positions_are_left_for_the_prompt(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(1, 91))}]
    for form, positions in (("prompt", 3), ("prefix", 5), ("lora", 0)):
        short = prompts.task_of(form, train_dataset=rows, train_batch_size=1, max_length=20)
        with pytest.warns(UserWarning, match=r"rows cut to"):
            table = lab.make_trainer([short], tmp_path).table
        (sequence,) = table[form].loader.batch(0).sequences
        assert len(sequence) - sequence.num_virtual_tokens == 20, "max_length is of the row's own tokens"
        with pytest.warns(UserWarning, match=r"rows cut to"):
            table = lab.make_trainer([replace(short, max_length=90)], tmp_path).table
        (sequence,) = table[form].loader.batch(0).sequences
        assert len(sequence) - sequence.num_virtual_tokens == 64 - positions, "the backbone knows 64 positions"


def in_a_process(rank: int, folder: Path, name: str, forms: tuple[str, ...]) -> Part:
    """Train prompts of different forms together with LoRA."""
    case = prompts.CASES[name]
    return cases.run(folder, [prompts.task_of(form, case, max_steps=4) for form in (*forms, "lora")], model=case.make())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "forms"), [("language", ("prompt", "mlp", "cpt", "prefix")), ("Bert", ("prompt", "mlp", "prefix"))]
)
def test_two_processes_train_prompts_to_the_result_of_one(name: str, forms: tuple[str, ...], tmp_path: Path) -> None:
    parts = values(launch(2, in_a_process, tmp_path / "two", name, forms))
    assert_alike(parts)
    assert_as_one(parts[0], in_a_process(0, tmp_path / "one", name, forms))
