"""Whole runs: prompts together with LoRA on one backbone, each as plain PEFT trains it alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.nn import functional as F

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.data.task_batch import TokenSequence
from tests.adapters.prompts import prompt_cases as prompts
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import assert_resumes
from tests.modeling.adapters.passes import assert_same_tensors, plain
from tests.modeling.backbones import classifier_of, filled


class Trained(NamedTuple):
    """A run of all forms of a case, what was measured on held-out rows, and the logits of one task on them."""

    case: prompts.Case
    run: lab.Run
    folder: Path
    held_out: list[prompts.Row]
    metrics: dict[str, float]
    seen: list[Any]


def tasks_of(case: prompts.Case, held_out: Sequence[prompts.Row] = (), seen: list[Any] | None = None) -> list[Task]:
    """Return a task of each form; predictions of one of them go into a list."""
    column = {prompts.LM: "input_ids", prompts.SEQ: "label", prompts.TOKEN: "labels"}[case.task_type]
    rows = [{"input_ids": row.ids, column: row.ids if row.label is None else row.label} for row in held_out]

    def keep(prediction: Any) -> dict[str, float]:
        if seen is not None:
            seen.append(prediction)
        return {}

    options: dict[str, Any] = {"weight_decay": 0.1, "max_steps": 4, "eval_dataset": rows or None}
    return [
        prompts.task_of(form, case, compute_metrics=keep if form == "prefix" and rows else None, **options)
        for form in case.forms
    ]


@pytest.fixture(scope="module", params=["language", "Bert", "Llama", "Bert, tokens"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Train every form that is possible on a backbone together with LoRA, evaluate and save them."""
    case, folder, seen = prompts.CASES[request.param], tmp_path_factory.mktemp("trained"), []
    held_out = prompts.rows_of("held out", case.task_type, 5)
    with warnings.catch_warnings():
        # Memory is counted on a description of the model, and estimated only where it does not run.
        warnings.filterwarnings("error", message="activations are estimated by formula")
        tasks = tasks_of(case, held_out, seen)
        run = lab.train(tasks, folder, model=case.make(), save_strategy="steps", save_steps=100)
    return Trained(case, run, folder, held_out, run.trainer.evaluate(), seen)


def test_every_prompt_trains_next_to_lora_as_plain_peft_trains_it_alone(trained: Trained) -> None:
    case, run = trained.case, trained.run
    verdicts = {task.name: prompts.judge(run.trainer, task, case) for task in tasks_of(case)}
    lab.assert_as_judged(run, verdicts)
    assert all(verdict.losses[-1] != verdict.losses[0] for verdict in verdicts.values()), "something was learned"
    if case is not prompts.LANGUAGE:
        heads = [next(item for key, item in run.weights(form).items() if "modules_to_save" in key) for form in verdicts]
        assert len({item.sum().item() for item in heads}) == len(heads), "heads are shared"


@pytest.mark.slow
def test_a_run_resumes_from_its_checkpoint_bit_by_bit(trained: Trained, tmp_path: Path) -> None:
    assert_resumes(lambda: tasks_of(trained.case), tmp_path, trained.case.make, whole=trained.run)


def test_an_evaluation_is_plain_pefts_after_training(trained: Trained) -> None:
    case, held_out = trained.case, trained.held_out
    for form in case.forms:
        saved: Any = PeftModel.from_pretrained(case.make(), str(trained.folder / form)).eval()
        saved.peft_config["default"] = prompts.config_of(form) if form == "cpt" else saved.peft_config["default"]
        with torch.no_grad():
            wanted = prompts.prompt_loss(saved, held_out).item()
        assert trained.metrics[f"{form}/eval_loss"] == pytest.approx(wanted, rel=1e-4), form
        if form == "prefix":
            theirs = [saved(input_ids=torch.tensor([row.ids])).logits[0].detach() for row in held_out]
    for row, wanted, logits, labels in zip(
        held_out, theirs, trained.seen[-1].predictions, trained.seen[-1].label_ids, strict=True
    ):
        # Of a row's own tokens alone, padded as Trainer pads them.
        own = len(row.ids) if case.task_type != prompts.SEQ else 1
        wanted = wanted.reshape(-1, wanted.shape[-1])
        assert np.allclose(logits.reshape(-1, wanted.shape[-1])[:own], wanted, rtol=1e-3, atol=1e-4)
        label = row.ids if row.label is None else row.label
        assert np.atleast_1d(labels)[:own].tolist() == np.atleast_1d(label).tolist()


def test_what_is_saved_is_plain_pefts_answers_as_its_view_does_and_comes_back(trained: Trained) -> None:
    case, run = trained.case, trained.run
    model = run.trainer.model.eval()
    again = MultiTaskPeftModel.from_pretrained(case.make(), trained.folder, verify=False)
    given = prompts.padded(prompts.rows_of("lora", case.task_type), 0)
    if case is prompts.LANGUAGE:
        given = {"input_ids": given["input_ids"][:1, :5]}
    for form in case.forms:
        folder = trained.folder / form
        judge, own = plain(prompts.config_of(form, case.task_type), 42, case.make)
        assert load_file(folder / "adapter_model.safetensors").keys() == get_peft_model_state_dict(judge).keys()
        beside = folder / "prompt_encoder.safetensors"
        assert beside.exists() == (form in prompts.ENCODED)
        assert not beside.exists() or load_file(beside).keys() <= own.keys()
        assert_same_tensors(again.task_parameters(form), run.weights(form), form)
        loaded: Any = PeftModel.from_pretrained(case.make(), str(folder)).eval()
        # PEFT saves an encoder's prompt as computed from one row; the view computes it from several. LoRA's B is stored
        # transposed here, which may round a last bit.
        tolerance = 1e-4 if form in prompts.ENCODED else 1e-6 if form == "lora" else 0.0
        with torch.no_grad():
            viewed, wanted = model.task_view(form)(**given).logits, loaded(**given, **prompts.task_ids(loaded)).logits
        torch.testing.assert_close(viewed, wanted, rtol=tolerance, atol=tolerance)


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


@pytest.mark.slow
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
