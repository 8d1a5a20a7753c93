"""The door for losses: what every registered one keeps to, and that a new one needs nothing but its own class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.formats import LANGUAGE_ROWS
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepSums
from peft_mux.errors import ConfigError
from peft_mux.modeling.backbone.modules import CLASSIFICATION, LANGUAGE_MODEL, TOKEN_CLASSIFICATION, HeadKind
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import (
    OBJECTIVES,
    OWN,
    LossArgs,
    Objective,
    TaskLoss,
    TokenOutputs,
    register_objective,
)
from peft_mux.modeling.objectives.task_objective import find_loss
from peft_mux.parallel.cuda_graphs import reason_against
from peft_mux.task import EarlyStopping, Task
from tests.invariants import mux_lab as lab
from tests.losses.preference.cases import PREFERENCE_CASES
from tests.modeling.backbones import backbone_of, classifier_of, drawn, tagger_of
from tests.modeling.objectives import rollouts
from tests.modeling.objectives.cases import CASES as OTHERS
from tests.modeling.objectives.cases import LossCase
from tests.modeling.objectives.judged_row import JudgedRow

CASES = [*OTHERS, *PREFERENCE_CASES]
READING_CASES = list({(case.name, case.rows): case for case in reversed(CASES)}.values())
"""The first case of each loss and each form of its rows."""
EVERY_LOSS = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=str(case), marks=[] if case in READING_CASES else pytest.mark.slow) for case in CASES],
)

BACKBONES = {
    LANGUAGE_MODEL: lab.tiny_llama,
    CLASSIFICATION: classifier_of("llama", vocab_size=lab.VOCABULARY),
    TOKEN_CLASSIFICATION: tagger_of("llama", vocab_size=lab.VOCABULARY),
}


# --------------------------------------------------------------- new losses


class SquaredSurprise(Objective):
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


@pytest.fixture
def added() -> Iterator[Objective]:
    """Registers `SquaredSurprise` for the time of a test."""
    register_objective(SquaredSurprise())
    yield OBJECTIVES[SquaredSurprise.name]
    del OBJECTIVES[SquaredSurprise.name]


# ----------------------------------------------------- what a test is made of


def model_of(
    objective: Objective, *names: str, targets: Any = "all-linear", backbone: Any = None
) -> MultiTaskPeftModel:
    """Return a float64 model with adapters that do something, and the head that the loss reads."""
    backbone = backbone or drawn(BACKBONES[objective.head.kind])
    task_type = objective.head.kind.task_types[0]
    configs = {name: LoraConfig(r=2, target_modules=targets, task_type=task_type) for name in names}
    for config in configs.values():
        config.exclude_modules = ["score"] if objective.head.kind != LANGUAGE_MODEL else None
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


@cache
def _shared_model(kind: HeadKind) -> MultiTaskPeftModel:
    first = next(case.objective for case in CASES if case.objective.head.kind == kind)
    model = model_of(first, "a", "b")
    model.verify()
    return model


def model_for(case: LossCase) -> MultiTaskPeftModel:
    """Return a model of the tasks `a` and `b` with the loss of a case; cases that read one head share it."""
    model = _shared_model(case.objective.head.kind).train()
    for name in "ab":
        model.objectives.assign(name, case.objective, case.loss_args)
    return model


def streams(batches: list[TaskBatch], max_tokens: int = 1000) -> list[MuxBatch]:
    """Lay global batches out in micro-batches."""
    return ChunkPackingCollator().micro_batches(batches, max_tokens=max_tokens)


def ready(model: MultiTaskPeftModel, micro_batches: Sequence[MuxBatch]) -> Sequence[MuxBatch]:
    """Return micro-batches with what passes before theirs have to give."""
    return Executor(model).with_reference_values(micro_batches, list(model.tasks))


def judged(model: MultiTaskPeftModel, batch: TaskBatch) -> list[JudgedRow]:
    """Return what plain PEFT gives for every row of a task."""
    view = model.task_view(batch.task)

    def logits(row: TokenSequence) -> list[torch.Tensor]:
        ids = [torch.tensor(row.input_ids[start:end])[None] for start, end in row.sequence_bounds]
        return [view(input_ids=one).logits[0].double() for one in ids]

    references: list[list[torch.Tensor]] = [[] for _ in batch.sequences]
    if model.objectives.args_of(batch.task).needs_reference:
        with model.disable_adapter(), torch.no_grad():
            references = [logits(row) for row in batch.sequences]
    return [JudgedRow(row, logits(row), reference) for row, reference in zip(batch.sequences, references, strict=True)]


# ------------------------------------------------------ what every loss keeps


def beginning_alike(batch: TaskBatch) -> TaskBatch:
    """Return a batch whose sequences begin with the same tokens, as far as they are long enough; the last row twice."""
    beginning = np.asarray([5, 6, 7, 8], dtype=np.int64)
    rows = []
    for row in batch.sequences:
        ids = row.input_ids.copy()
        for start, end in row.sequence_bounds:
            ids[start : min(start + 4, end)] = beginning[: end - start]
        was_itself = (row.labels == row.input_ids) & (not row.labels_itself)
        rows.append(replace(row, input_ids=ids, labels=np.where(was_itself, ids, row.labels)))
    return replace(batch, sequences=(*rows, replace(rows[-1], row=len(rows))))


def sums_of(model: MultiTaskPeftModel, micro_batches: Sequence[MuxBatch]) -> tuple[StepSums, list[torch.Tensor]]:
    """Return losses, statistics and gradients, summed over micro-batches."""
    model.zero_grad(set_to_none=False)
    sums = StepSums(model, list(model.tasks), torch.device("cpu"))
    for micro_batch in ready(model, micro_batches):
        output = model(micro_batch)
        output.losses.sum().backward()
        sums.add(output)
    parameters = [one for name in model.tasks for one in model.task_parameters(name).values()]
    return sums, [one.grad.clone() for one in parameters if one.grad is not None]


@EVERY_LOSS
def test_every_loss_is_its_formula_in_one_pass_in_several_and_with_shared_prefixes(case: LossCase) -> None:
    model = model_for(case)
    batches = [beginning_alike(case.batch("a", 1)), beginning_alike(case.batch("b", 2))]
    wanted = {rows.task: case.judge(judged(model, rows), case.loss_args) for rows in batches}
    parameters = [one for name in model.tasks for one in model.task_parameters(name).values()]
    gradients = torch.autograd.grad(sum(wanted.values()), parameters, allow_unused=True)  # type: ignore[arg-type]
    assert any(theirs is not None and theirs.abs().sum() > 0 for theirs in gradients)
    (whole,) = streams(batches)
    shared = whole.sharing([True, True], 2)
    assert shared.num_computed < shared.num_tokens
    statistics: dict[str, torch.Tensor] = {}
    for micro_batches in ([whole], streams(batches, max_tokens=17), [shared]):
        sums, found = sums_of(model, micro_batches)
        for name, loss in wanted.items():
            assert sums.losses[name].item() == pytest.approx(loss.item(), rel=1e-6)
        assert len(found) == len(parameters), "all parameters have bound gradients"
        for mine, theirs in zip(found, gradients, strict=True):
            theirs = torch.zeros_like(mine) if theirs is None else theirs
            assert (mine - theirs).norm() <= 1e-5 * theirs.norm() + 1e-7
        statistics = statistics or dict(sums.statistics)
        assert sums.statistics.keys() == statistics.keys()
        for name, values in sums.statistics.items():
            torch.testing.assert_close(values, statistics[name], rtol=1e-5, atol=1e-7)
    assert {name: len(values) for name, values in statistics.items()} == (
        dict.fromkeys("ab", len(names)) if (names := case.objective.statistic_names(case.loss_args)) else {}
    )
    assert all(values.isfinite().all() for values in statistics.values())


def assert_a_nan_stays_in_its_task(model: MultiTaskPeftModel, batch: MuxBatch) -> None:
    """Assert that NaN in the rows of the first of two tasks leaves the bits of the second."""
    with torch.no_grad(), model.multiplexing(batch):
        whole_TD = model.hidden_states(batch)
    found = []
    for poison in (0.0, float("nan")):
        hidden_TD = whole_TD.clone()
        hidden_TD[: batch.task_offsets[1]] += poison
        hidden_TD.requires_grad_()
        with model.multiplexing(batch):
            losses = model.stream_losses(hidden_TD, batch)
        (gradient,) = torch.autograd.grad(losses.losses.sum(), hidden_TD)
        others = [torch.zeros(0) if losses.statistics[1] is None else losses.statistics[1]]
        found.append((torch.cat([losses.losses.detach(), *others]), gradient[batch.task_offsets[1] :]))
    (clean, gradient), (poisoned, poisoned_gradient) = found
    assert torch.isnan(poisoned[0])
    assert torch.equal(clean[1:], poisoned[1:])
    assert torch.equal(gradient, poisoned_gradient)
    assert gradient.abs().sum() > 0


@EVERY_LOSS
def test_a_nan_in_rows_of_one_task_leaves_the_bits_of_the_other(case: LossCase) -> None:
    model = model_for(case)
    (batch,) = ready(model, streams([case.batch("a", 1), case.batch("b", 2)]))
    assert_a_nan_stays_in_its_task(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", "all-linear"), ("llama", ["q_proj", "lm_head"]), ("gemma2", "all-linear")],
    ids=["frozen head", "adapted head", "soft-capped head"],
)
def test_tasks_of_several_temperatures_share_a_pass(kind: str, targets: Any) -> None:
    temperatures = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 2.0}
    objective = OBJECTIVES["policy"]
    backbone = drawn(backbone_of(kind, vocab_size=lab.VOCABULARY))
    model = model_of(objective, *temperatures, targets=targets, backbone=backbone)
    batches = []
    for seed, (name, temperature) in enumerate(temperatures.items()):
        case = LossCase("policy", "dapo", rollouts.judged, {"temperature": temperature, "beta": 0.1}, rollouts.rows)
        model.objectives.assign(name, objective, case.loss_args)
        batches.append(case.batch(name, seed))
    (batch,) = ready(model, streams(batches))
    with torch.no_grad():
        losses = model(batch).losses
    for rows, loss in zip(batches, losses.tolist(), strict=True):
        wanted = rollouts.judged(judged(model, rows), model.objectives.args_of(rows.task))
        assert loss == pytest.approx(wanted.item(), rel=1e-6), rows.task
        targets_of = model.token_logprobs(batch)[rows.task]
        divided = [rollouts.divided(row, temperatures[rows.task]).logprobs() for row in judged(model, rows)]
        torch.testing.assert_close(targets_of.logprobs_M.double(), torch.cat(divided), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", [case for case in READING_CASES if case.objective.has_logits], ids=str)
def test_every_sequence_has_its_own_logits_and_labels_for_metrics(case: LossCase) -> None:
    rows = case.batch("a", 1)
    (batch,) = streams([rows])
    labels = list(case.objective.head.labels(rows, batch))
    needs_label = case.objective.row_form.needs_label
    wanted = [
        row.row_values.get("class_labels", row.class_label) if needs_label else labels_of_sequence
        for row in rows.sequences
        for labels_of_sequence in np.split(row.input_ids if row.starts else row.labels, row.starts)
    ]
    assert len(model_for(case).sequence_logits(batch)) == len(labels) == len(wanted)
    assert sorted(np.asarray(one).tolist() for one in labels) == sorted(np.asarray(one).tolist() for one in wanted)


def test_a_task_finds_every_loss_by_its_name_and_the_type_of_its_adapter_and_knows_its_metrics() -> None:
    for case in CASES:
        objective, args = case.objective, case.loss_args
        for task_type in objective.head.kind.task_types:
            task = Task(
                name="a",
                peft_config=LoraConfig(r=2, task_type=task_type),
                train_dataset=[{}],
                objective=case.name,
                loss_type=case.loss_type,
                objective_args=case.args,
            )
            found = find_loss(task, "task")
            assert found.objective is objective, case
            assert replace(found.args, label_smoothing_factor=args.label_smoothing_factor) == args, case
            assert task.is_classification == (objective.head.kind == CLASSIFICATION), case
        metrics = objective.metrics(1e6, dict.fromkeys(objective.statistic_names(args), 0.5))
        assert tuple(metrics) == objective.metric_names(args), case
        assert metrics["eval_loss"] == 1e6
        assert all(key.startswith("eval_") and np.isfinite(value) for key, value in metrics.items()), case


def test_every_variant_of_every_loss_has_a_case() -> None:
    wanted = {(entry.name, kind) for entry in OBJECTIVES.values() if entry.name != OWN for kind in entry.loss_types}
    assert {(case.name, case.loss_type) for case in CASES} == wanted


# ------------------------------------------------------------- the door itself


@pytest.mark.parametrize(
    ("wanted", "fix"),
    [
        ("GRPO", 'Set objective="policy", loss_type="grpo"'),
        ("gspo", 'objective_args={"importance_sampling_level": "sequence"}'),
        ("simpo", 'Set objective="cpo", loss_type="simpo", objective_args={"cpo_alpha": 0.0}.'),
        ("gkd", 'Set objective="distill", for rows with teacher_ids'),
        ("online-dpo", "No answers are sampled in training"),
        ("prm", 'Set task_type="TOKEN_CLS" on the adapter'),
        ("orpp", 'Did you mean "orpo"?'),
    ],
)
def test_the_name_of_a_loss_elsewhere_leads_to_the_one_here(wanted: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        Task(name="a", peft_config=LoraConfig(task_type="CAUSAL_LM"), train_dataset=[{}], objective=wanted)
    assert "tasks.a.objective must be one of sft, distill, policy, dpo, kto, cpo, orpo, got" in str(error.value)
    assert fix in str(error.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"objective": "cpo", "loss_type": "alphapo"}, 'TRL trains loss_type="simpo" with cpo_alpha=0.0 for it'),
        ({"objective": "policy", "loss_type": "luspo"}, 'set "dr_grpo" with max_completion_length=1'),
        (
            {"objective": "cpo", "loss_type": "ipo", "objective_args": {"label_smoothing": 0.1}},
            'label_smoothing must be 0 with loss_type "ipo", got 0.1',
        ),
        ({"objective": "cpo", "objective_args": {"simpo_gamma": 0.1}}, "simpo_gamma must be its default, unless"),
        (
            {"objective": "policy", "objective_args": {"use_bias_correction_kl": False}},
            "use_bias_correction_kl must be its default where beta is 0, got False",
        ),
        ({"loss_type": "dft", "label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0 or None, except for"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(map(str, value)),
)
def test_what_a_variant_would_ignore_is_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        Task(name="a", peft_config=LoraConfig(task_type="CAUSAL_LM"), train_dataset=[{}], **settings)
    assert fault in str(error.value)


def test_a_loss_of_another_head_and_a_name_that_is_taken_are_refused(added: Objective) -> None:
    model = model_of(OBJECTIVES["sft"], "a")
    with pytest.raises(
        ConfigError,
        match=r"tasks\.a\.objective must be a loss of language-model tasks, got 'classification', a loss of",
    ):
        model.objectives.assign("a", OBJECTIVES["classification"])
    with pytest.raises(ValueError, match='the objective "squared-surprise" is already registered'):
        register_objective(SquaredSurprise())
    config = LoraConfig(task_type="SEQ_CLS")
    with pytest.raises(
        ConfigError,
        match="objective must be one of classification, reward, got 'squared-surprise' for classification tasks",
    ):
        Task(name="c", peft_config=config, train_dataset=[{}], objective="squared-surprise")


def test_a_task_that_comes_back_under_a_name_does_not_inherit_a_loss(added: Objective) -> None:
    model = model_of(added, "a", "b")
    assert reason_against(model) == "a task's loss is more than the sum over its targets", "for CUDA graphs"
    model.remove_tasks(["a"])
    model.register_tasks({"a": LoraConfig(r=2, target_modules=["q_proj"])})
    assert [model.objectives.of(name).name for name in ("a", "b")] == ["sft", "squared-surprise"]
    model.objectives.assign("b", OBJECTIVES["sft"])
    assert reason_against(model) is None
    dynamic = next(case for case in CASES if case.loss_type == "dft")
    model.objectives.assign("b", OBJECTIVES["sft"], dynamic.loss_args)
    assert reason_against(model) == 'a task weighs its targets by their probabilities (loss_type="dft")'


@pytest.mark.parametrize("case", READING_CASES, ids=str)
def test_the_stream_of_some_tasks_is_that_which_they_would_have_without_the_others(case: LossCase) -> None:
    batches = [case.batch(name, seed) for seed, name in enumerate("abc")]
    (whole,) = streams(batches)
    for chosen in ((1,), (0, 2)):
        (wanted,) = streams([batches[index] for index in chosen])
        found = whole.of_tasks(chosen)
        for field in fields(MuxBatch):
            assert is_same(getattr(found, field.name), getattr(wanted, field.name)), field.name


def is_same(mine: Any, theirs: Any) -> bool:
    """Whether two values of a field are equal, tensors within them too."""
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, Mapping):
        return mine.keys() == theirs.keys() and all(is_same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, tuple) and len(mine) == len(theirs):
        return all(is_same(one, other) for one, other in zip(mine, theirs, strict=True))
    return bool(mine == theirs)


# ------------------------------------------------- a loss that comes from here


def squared(model: Any, batch: TaskBatch) -> Iterator[torch.Tensor]:
    """Yield each row's part of `SquaredSurprise`, as an ordinary loop would compute it."""
    for sequence in batch.sequences:
        ids = torch.tensor(sequence.input_ids)
        losses = F.cross_entropy(model(input_ids=ids[None]).logits[0][:-1], ids[1:], reduction="none")
        yield (losses**2).sum() / sum(len(row) - 1 for row in batch.sequences)


def test_tasks_with_different_losses_train_in_one_run_and_come_while_it_runs(added: Objective, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "learning_rate": 1e-3}
    tasks = [
        lab.small_task("a", data_seed=1, objective="squared-surprise", **options),
        lab.small_task("b", data_seed=2, length=7, **options),
    ]
    late = lab.small_task("late", data_seed=4, length=5, objective="squared-surprise", **options)
    recorder = lab.Recorder(keep_weights=False, at_end={1: lambda trainer: trainer.register_tasks([late])})
    run = lab.train(tasks, tmp_path, recorder=recorder, max_tokens_per_micro_batch=32)
    assert [task.name for task in run.trainer.tasks] == ["a", "b", "late"]
    for task in run.trainer.tasks:
        loop = squared if task.objective == "squared-surprise" else None
        lab.assert_as_judged(run, {task.name: lab.judge(run.trainer, task, loop)})


def test_a_nan_of_one_loss_leaves_the_bits_of_another_in_the_same_pass(added: Objective) -> None:
    model = model_of(OBJECTIVES["sft"], "a", "b")
    model.objectives.assign("b", added)
    (batch,) = streams([CASES[0].batch(name, seed) for seed, name in enumerate("ab")])
    assert_a_nan_stays_in_its_task(model, batch)


def test_statistics_of_a_loss_are_logged_next_to_it_and_name_metrics_that_may_stop_a_task(
    added: Objective, tmp_path: Path
) -> None:
    held_out = lab.rows(9, 4, 5, 9)
    options: dict[str, Any] = {"eval_dataset": held_out, "eval_steps": 1, "max_steps": 3}
    rule = EarlyStopping(metric="eval_surprise", greater_is_better=False)
    with pytest.raises(
        ConfigError,
        match=r"tasks\.a\.early_stopping\.metric must be eval_loss or eval_perplexity if compute_metrics is",
    ):
        lab.small_task("a", data_seed=1, early_stopping=rule, **options)
    options["objective"] = "squared-surprise"
    task = lab.small_task("a", data_seed=1, early_stopping=rule, **options)
    doubled = lab.small_task("b", data_seed=1, loss_type="doubled", **options)
    arguments = {"logging_strategy": "steps", "logging_steps": 1, "max_tokens_per_micro_batch": 20}
    run = lab.train([task, doubled], tmp_path, **arguments)
    plain, twice = (run.trainer.table[name].state.log_history[0] for name in "ab")
    assert plain["surprise"] > 0
    assert twice["loss"] == pytest.approx(2 * plain["loss"])
    assert twice["surprise"] == pytest.approx(plain["surprise"])
    metrics = run.trainer.evaluate("a")
    (surprise,) = [value for key, value in metrics.items() if key.endswith("eval_surprise")]
    (loss,) = [value for key, value in metrics.items() if key.endswith("eval_loss")]
    assert 0 < surprise <= loss**0.5
