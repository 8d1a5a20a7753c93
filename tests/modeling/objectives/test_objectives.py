"""The door for losses: what every registered one keeps to, and that a new one needs nothing but its own class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F
from transformers import LlamaForSequenceClassification

from peft_mux.data.batch import MuxBatch, TaskBatch, TokenSequence
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.engine.cuda_graphs.passes import reason_against
from peft_mux.errors import ConfigError
from peft_mux.modeling.backbone.head_kinds import CLASSIFICATION
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.head import HeadPass
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.objective import (
    OBJECTIVES,
    OWN,
    BaseObjective,
    Objective,
    objective_of,
    register_objective,
    unregister_objective,
)
from peft_mux.modeling.objectives.outputs import SequenceOutputs, TaskLoss, TokenOutputs
from peft_mux.task import EarlyStopping, Task
from tests.invariants import mux_lab as lab

NAMES = sorted(set(OBJECTIVES) - {OWN})
NUM_CLASSES = 3


# --------------------------------------------------------------- new losses


class SquaredSurprise(BaseObjective):
    """A loss of language models that the package does not have: the square of each target's negative log-likelihood."""

    name = "squared-surprise"
    loss_types = ("squared", "doubled")
    head = LANGUAGE_HEAD
    row_form = LANGUAGE_ROWS

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean of the squares, and of what is squared as a statistic."""
        terms_M = outputs.nll_M**2 * (2 if args.loss_type == "doubled" else 1)
        statistics = outputs.mean_over_tokens(outputs.nll_M.detach())
        return TaskLoss(outputs.mean_over_tokens(terms_M), statistics[None])

    def statistic_names(self, args: LossArgs) -> tuple[str, ...]:
        """Return the name of the mean surprise."""
        return ("surprise",)


class SurprisePerRow(SquaredSurprise):
    """One term for each row: the square of the sum over its targets, which no part of the row has."""

    name = "surprise-per-row"
    row_form = replace(LANGUAGE_ROWS, is_one_term=True)

    def loss(self, outputs: TokenOutputs, args: LossArgs) -> TaskLoss:
        """Return the mean of the squares of the rows."""
        sums_R = outputs.row_sums(outputs.nll_M)
        return TaskLoss(outputs.mean_over_rows(sums_R**2), outputs.mean_over_tokens(outputs.nll_M.detach())[None])


@pytest.fixture
def added() -> Iterator[Callable[[Any], Objective]]:
    """Registers losses for the time of a test."""
    names = []

    def add(objective: Any) -> Objective:
        register_objective(objective)
        names.append(objective.name)
        return objective

    yield add
    for name in names:
        unregister_objective(name)


# ----------------------------------------------------- what a test is made of


def model_of(objective: Objective, *names: str) -> MultiTaskPeftModel:
    """Return a float64 model with adapters that do something, and the head that the loss reads."""
    torch.manual_seed(0)
    backbone: Any = lab.tiny_llama()
    if objective.head.kind == CLASSIFICATION:
        config = backbone.config
        config.num_labels, config.pad_token_id = NUM_CLASSES, 0
        backbone = LlamaForSequenceClassification(config)
        lab.fill(backbone, 1)
    task_type = objective.head.kind.task_types[0]
    configs = {name: LoraConfig(r=2, target_modules="all-linear", task_type=task_type) for name in names}
    for config in configs.values():
        config.exclude_modules = ["score"] if objective.head.kind == CLASSIFICATION else None
    model = MultiTaskPeftModel(backbone, configs, verify=False)
    lab.fill(_Parameters(model), 2)
    for name in names:
        model.objectives.assign(name, objective)
    return model.double()


class _Parameters(torch.nn.Module):
    """The parameters of all tasks of a model, under names that `lab.fill` takes for weights."""

    def __init__(self, model: MultiTaskPeftModel) -> None:
        super().__init__()
        for name in model.tasks:
            for key, parameter in model.task_parameters(name).items():
                self.register_parameter(f"{name}_{key}".replace(".", "_"), parameter)


def rows_of(objective: Objective, task: str, seed: int) -> TaskBatch:
    """Return a global batch of rows of unequal lengths, as the loss reads them."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index, length in enumerate((9, 4, 2, 17, 6)):
        ids = rng.integers(1, lab.VOCABULARY, size=length)
        labels = np.where(np.arange(length) < index, -100, ids)
        label = int(rng.integers(NUM_CLASSES)) if objective.row_form.needs_label else None
        one_term = objective.row_form.is_one_term
        sequences.append(TokenSequence(ids, ids if index > 1 else labels, index, label, is_one_term=one_term))
    return TaskBatch(task, 0, 0, tuple(sequences))


def streams(batches: list[TaskBatch], max_tokens: int = 1000) -> list[MuxBatch]:
    """Lay global batches out in micro-batches."""
    return ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens)


def pass_of(model: MultiTaskPeftModel, batch: MuxBatch) -> tuple[torch.Tensor, HeadPass]:
    """Return the hidden states of a micro-batch as a leaf, and what its head is computed with."""
    with torch.no_grad(), model.multiplexing(batch):
        hidden_TD = model.hidden_states(batch)
    return hidden_TD.clone().requires_grad_(), model._head_pass()


def terms_of(model: MultiTaskPeftModel, objective: Objective, batch: MuxBatch) -> torch.Tensor:
    """Return the terms of a micro-batch."""
    hidden_TD, head = pass_of(model, batch)
    with model.multiplexing(batch):
        return objective.terms(hidden_TD, batch, head).detach()


def language_terms(logits: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    """Return what plain torch makes of one row of a language model."""
    return F.cross_entropy(logits[:-1], torch.tensor(sequence.labels[1:]), reduction="none", ignore_index=-100)[
        torch.tensor(sequence.labels[1:]) != -100
    ]


def class_terms(logits: torch.Tensor, sequence: TokenSequence) -> torch.Tensor:
    """Return what plain torch makes of one row of a classifier."""
    return F.cross_entropy(logits[None], torch.tensor([sequence.class_label]), reduction="none")


REFERENCES: dict[str, Callable[[torch.Tensor, TokenSequence], torch.Tensor]] = {
    "language": language_terms,
    "classification": class_terms,
}
"""Terms of one row from the logits of the backbone alone; a loss of the package comes with an entry."""


# ------------------------------------------------------ what every loss keeps


@pytest.mark.parametrize("name", NAMES)
def test_terms_are_those_of_plain_torch_in_float64_sorted_by_task(name: str) -> None:
    objective = OBJECTIVES[name]
    model = model_of(objective, "a", "b")
    batches = [rows_of(objective, "a", 1), rows_of(objective, "b", 2)]
    (batch,) = streams(batches)
    terms = terms_of(model, objective, batch)
    counts = objective.counts(batch)
    assert len(terms) == sum(counts)
    assert all(count > 0 for count in counts)
    for task, own in zip(batches, terms.split(counts), strict=True):
        view = model.task_view(task.task)
        with torch.no_grad():
            wanted = [
                REFERENCES[name](view(input_ids=torch.tensor(row.input_ids)[None]).logits[0].double(), row)
                for row in task.sequences
            ]
        assert sorted(own.tolist()) == pytest.approx(sorted(torch.cat(wanted).tolist()), rel=1e-5)


@pytest.mark.parametrize("max_tokens", [17, 25, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_terms_of_all_micro_batches_are_as_many_as_the_divisor_says(name: str, max_tokens: int) -> None:
    objective = OBJECTIVES[name]
    batches = [rows_of(objective, "a", 1), rows_of(objective, "b", 2)]
    totals = {"a": 0, "b": 0}
    for batch in streams(batches, max_tokens):
        for task, count in zip(batch.task_names, objective.counts(batch), strict=True):
            totals[task] += count
    assert totals == {batch.task: batch.num_targets for batch in batches}


@pytest.mark.parametrize("name", NAMES)
def test_no_split_into_micro_batches_changes_the_mean_over_the_global_batch(name: str) -> None:
    objective = OBJECTIVES[name]
    model = model_of(objective, "a", "b")
    batches = [rows_of(objective, "a", 1), rows_of(objective, "b", 2)]
    (whole,) = streams(batches)
    means = [part.mean().item() for part in terms_of(model, objective, whole).split(objective.counts(whole))]
    for max_tokens in (17, 25, 1000):
        totals = {"a": 0.0, "b": 0.0}
        for batch in streams(batches, max_tokens):
            output = model(batch)
            for task, loss in zip(output.task_names, output.losses.tolist(), strict=True):
                totals[task] += loss
        assert list(totals.values()) == pytest.approx(means, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_in_rows_of_one_task_leaves_the_bits_of_the_other(name: str) -> None:
    objective = OBJECTIVES[name]
    model = model_of(objective, "a", "b")
    (batch,) = streams([rows_of(objective, "a", 1), rows_of(objective, "b", 2)])

    def run(poison: bool) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_TD, head = pass_of(model, batch)
        with torch.no_grad():
            if poison:
                hidden_TD[: batch.task_offsets[1]] = float("nan")
        with model.multiplexing(batch):
            losses_N = per_task(objective.terms(hidden_TD, batch, head), objective.counts(batch), batch.loss_weights)
        (gradient,) = torch.autograd.grad(losses_N.sum(), hidden_TD)
        return losses_N.detach(), gradient[batch.task_offsets[1] :]

    clean, gradient = run(poison=False)
    poisoned, poisoned_gradient = run(poison=True)
    assert torch.isnan(poisoned[0])
    assert torch.equal(clean[1], poisoned[1])
    assert torch.equal(gradient, poisoned_gradient)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", NAMES)
def test_every_sequence_has_its_own_logits_and_labels_for_metrics(name: str) -> None:
    objective = OBJECTIVES[name]
    model = model_of(objective, "a")
    rows = rows_of(objective, "a", 1)
    (batch,) = streams([rows])
    labels = list(objective.head.labels(rows, batch))
    assert len(model.sequence_logits(batch)) == len(labels) == len(rows.sequences)
    wanted = [row.class_label if objective.row_form.needs_label else row.labels.tolist() for row in rows.sequences]
    assert sorted(np.asarray(label).tolist() for label in labels) == sorted(wanted)  # type: ignore[type-var]


@pytest.mark.parametrize("name", NAMES)
def test_metrics_are_named_beforehand_and_finite_for_any_loss(name: str) -> None:
    objective = OBJECTIVES[name]
    for loss in (0.0, 1.5, 1e6):
        metrics = objective.metrics(loss)
        assert tuple(metrics) == objective.metric_names
        assert metrics["eval_loss"] == loss
        assert all(key.startswith("eval_") and np.isfinite(value) for key, value in metrics.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_task_finds_the_loss_by_its_type_and_that_of_its_adapter(name: str) -> None:
    objective = OBJECTIVES[name]
    for task_type in objective.head.kind.task_types:
        config = LoraConfig(r=2, task_type=task_type)
        task = Task(name="a", peft_config=config, train_dataset=[{}], loss_type=objective.loss_type)
        assert objective_of(task) is objective
        assert task.is_classification == (objective.head.kind == CLASSIFICATION)


# ------------------------------------------------------------- the door itself


def test_todays_losses_and_the_choices_of_a_task_are_those_of_the_registry() -> None:
    assert NAMES == ["classification", "language"]
    with pytest.raises(ConfigError, match="loss_type: got 'dpo'; allowed: nll"):
        lab.small_task("a", data_seed=1, loss_type="dpo")


def test_a_name_and_a_loss_type_of_one_head_are_given_once(added: Callable[[Any], Objective]) -> None:
    added(SquaredSurprise())
    with pytest.raises(ValueError, match='"squared-surprise" is registered already'):
        register_objective(SquaredSurprise())
    other = SquaredSurprise()
    other.name = "other"
    with pytest.raises(ValueError, match='loss_type "squared_surprise" is taken for language-model tasks'):
        register_objective(other)


def test_a_loss_of_another_head_or_with_a_reference_is_refused(added: Callable[[Any], Objective]) -> None:
    model = model_of(OBJECTIVES["language"], "a")
    with pytest.raises(ConfigError, match="a loss of classification tasks; allowed: those of language-model tasks"):
        model.objectives.assign("a", OBJECTIVES["classification"])
    new = SquaredSurprise()
    new.needs_reference = True
    with pytest.raises(ConfigError, match="needs a reference model"):
        model.objectives.assign("a", added(new))
    with pytest.raises(ConfigError, match="loss_type: got 'squared_surprise'; allowed: nll"):
        Task(
            name="c",
            peft_config=LoraConfig(task_type="SEQ_CLS"),
            train_dataset=[{}],
            loss_type="squared_surprise",
        )


def test_a_task_that_comes_back_under_a_name_does_not_inherit_a_loss(added: Callable[[Any], Objective]) -> None:
    model = model_of(added(SquaredSurprise()), "a", "b")
    model.remove_tasks(["a"])
    model.register_tasks({"a": LoraConfig(r=2, target_modules=["q_proj"])})
    assert [model.objectives.of(name).name for name in ("a", "b")] == ["language", "squared-surprise"]


def test_graphs_are_refused_for_losses_that_cannot_be_captured_and_for_several(
    added: Callable[[Any], Objective],
) -> None:
    new = added(SquaredSurprise())
    model = model_of(OBJECTIVES["language"], "a", "b")
    assert reason_against(model) is None
    model.objectives.assign("b", new)
    assert reason_against(model) == "this loss is only tried"
    SquaredSurprise.eager_reason, before = None, SquaredSurprise.eager_reason  # type: ignore[assignment]
    try:
        assert reason_against(model) == "tasks have losses of several kinds"
        model.objectives.assign("a", new)
        assert reason_against(model) is None
    finally:
        SquaredSurprise.eager_reason = before


@pytest.mark.parametrize("chosen", [(0,), (1,), (0, 2), (1, 2), (0, 1, 2)])
def test_the_stream_of_some_tasks_is_that_which_they_would_have_without_the_others(chosen: tuple[int, ...]) -> None:
    for objective in OBJECTIVES.values():
        batches = [rows_of(objective, name, seed) for seed, name in enumerate("abc")]
        (whole,) = streams(batches)
        (wanted,) = streams([batches[index] for index in chosen])
        found = whole.of_tasks(chosen)
        for field in fields(MuxBatch):
            mine, theirs = getattr(found, field.name), getattr(wanted, field.name)
            is_same = torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs
            assert is_same, field.name


# ------------------------------------------------- a loss that comes from here


def squared(model: Any, batch: TaskBatch) -> Iterator[torch.Tensor]:
    """Yield each row's part of `SquaredSurprise`, as an ordinary loop would compute it."""
    for sequence in batch.sequences:
        ids = torch.tensor(sequence.input_ids)
        losses = F.cross_entropy(model(input_ids=ids[None]).logits[0][:-1], ids[1:], reduction="none")
        yield (losses**2).sum() / sum(len(row) - 1 for row in batch.sequences)


def squared_per_row(model: Any, batch: TaskBatch) -> Iterator[torch.Tensor]:
    """Yield each row's part of `SurprisePerRow`, as an ordinary loop would compute it."""
    for sequence in batch.sequences:
        ids = torch.tensor(sequence.input_ids)
        loss = F.cross_entropy(model(input_ids=ids[None]).logits[0][:-1], ids[1:], reduction="sum")
        yield loss**2 / len(batch.sequences)


LOOPS = {"squared_surprise": squared, "surprise_per_row": squared_per_row, "nll": lab._sequence_losses}


def assert_as_loops_say(run: lab.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that every task went as an ordinary loop with its loss would have gone."""
    for task in run.trainer.tasks:
        monkeypatch.setattr(lab, "_sequence_losses", LOOPS[task.loss_type])
        lab.assert_as_judged(run, {task.name: lab.judge(run.trainer, task)})


@pytest.mark.parametrize("loss", [SquaredSurprise, SurprisePerRow])
def test_two_tasks_train_towards_a_new_loss_as_an_ordinary_loop_does(
    loss: type, added: Callable[[Any], Objective], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_type = added(loss()).loss_type
    options: dict[str, Any] = {"loss_type": loss_type, "max_steps": 4, "learning_rate": 1e-3}
    tasks = [
        lab.small_task("a", data_seed=1, **options),
        lab.small_task("b", data_seed=2, rank=2, length=7, seed=3, **options),
    ]
    run = lab.train(tasks, tmp_path, max_tokens_per_micro_batch=32, recorder=lab.Recorder(keep_weights=False))
    assert_as_loops_say(run, monkeypatch)


def test_tasks_with_different_losses_train_in_one_run_and_come_while_it_runs(
    added: Callable[[Any], Objective], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added(SquaredSurprise())
    added(SurprisePerRow())
    options: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-3}
    tasks = [
        lab.small_task("a", data_seed=1, loss_type="squared_surprise", **options),
        lab.small_task("b", data_seed=2, length=7, **options),
        lab.small_task("c", data_seed=3, length=9, loss_type="surprise_per_row", **options),
    ]
    late = lab.small_task("late", data_seed=4, length=5, loss_type="squared_surprise", **options)
    recorder = lab.Recorder(keep_weights=False, at_end={1: lambda trainer: trainer.register_tasks([late])})
    run = lab.train(tasks, tmp_path, recorder=recorder)
    assert [task.name for task in run.trainer.tasks] == ["a", "b", "c", "late"]
    assert_as_loops_say(run, monkeypatch)


def test_a_nan_of_one_loss_leaves_the_bits_of_another_in_the_same_pass(added: Callable[[Any], Objective]) -> None:
    model = model_of(OBJECTIVES["language"], "a", "b")
    model.objectives.assign("b", added(SquaredSurprise()))
    (batch,) = streams([rows_of(OBJECTIVES["language"], name, seed) for seed, name in enumerate("ab")])
    found = []
    for poison in (0.0, float("nan")):
        hidden_TD, head = pass_of(model, batch)
        with torch.no_grad():
            hidden_TD[: batch.task_offsets[1]] += poison
        with model.multiplexing(batch):
            losses_N = model.objectives.losses(hidden_TD, batch, head)
        (gradient,) = torch.autograd.grad(losses_N.sum(), hidden_TD)
        found.append((losses_N.detach(), gradient[batch.task_offsets[1] :]))
    (clean, gradient), (poisoned, poisoned_gradient) = found
    assert torch.isnan(poisoned[0])
    assert torch.equal(clean[1], poisoned[1])
    assert torch.equal(gradient, poisoned_gradient)


def test_a_new_loss_names_metrics_that_may_stop_its_task(added: Callable[[Any], Objective], tmp_path: Path) -> None:
    added(SquaredSurprise())
    held_out = lab.rows(9, 4, 5, 9)
    options: dict[str, Any] = {"eval_dataset": held_out, "eval_steps": 1, "max_steps": 2}
    rule = EarlyStopping(metric="eval_surprise", greater_is_better=False)
    with pytest.raises(ConfigError, match="allowed: eval_loss or eval_perplexity where"):
        lab.small_task("a", data_seed=1, early_stopping=rule, **options)
    task = lab.small_task("a", data_seed=1, early_stopping=rule, loss_type="squared_surprise", **options)
    run = lab.train([task], tmp_path)
    metrics = run.trainer.evaluate("a")
    (key,) = [key for key in metrics if key.endswith("eval_surprise")]
    (loss,) = [value for key, value in metrics.items() if key.endswith("eval_loss")]
    assert metrics[key] == pytest.approx(loss**0.5)
