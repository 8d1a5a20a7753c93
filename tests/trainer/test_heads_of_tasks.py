"""Tasks that classify alongside language modelling, on one causal language model: each as it trains alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

from peft_mux import ConfigError, GenerationRequest, MultiTaskPeftModel, Task, generate
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.runs import SAVING, poison, stop, task_of

WORDS = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", lora_dropout=0.1)
CLASSES = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")
LABELLED = [{**row, "label": number % 3} for number, row in enumerate(lab.rows(8, 24, 9, 9))]
HELD_OUT = [{**row, "label": number % 3} for number, row in enumerate(lab.rows(9, 7, 3, 20))]
SETTINGS: dict[str, Any] = {"train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 6, "seed": 3}
IDS = torch.tensor([lab.rows(99, 1, 13, 13)[0]["input_ids"]])


def accuracy(found: Any) -> dict[str, float]:
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def accuracy_of_rows(found: Any) -> dict[str, float]:
    hits = found.predictions.argmax(-1) == found.label_ids
    return {"accuracy": float(hits.mean()), "eval_rows": float(len(hits))}


def words(**changed: Any) -> Task:
    return task_of("words", lab.rows(7, 24, 4, 20), WORDS, **{**SETTINGS, **changed})


def classes(**changed: Any) -> Task:
    options = {"eval_dataset": HELD_OUT, "eval_steps": 6, "compute_metrics": accuracy, "shuffle": False}
    return task_of("classes", LABELLED, CLASSES, **{**SETTINGS, **options, **changed})


def train(tasks: list[Task], folder: Path, **options: Any) -> Run:
    model = lab.tiny_llama().double()
    model.config.pad_token_id = 0
    return lab.train(tasks, folder, model=model, **{**SAVING, **options})


def classifier() -> Any:
    """Return transformers' classifier on the same base model."""
    config = lab.tiny_llama().config
    config.num_labels, config.pad_token_id = 3, 0
    model = LlamaForSequenceClassification(config).double()
    model.model.load_state_dict(lab.tiny_llama().model.double().state_dict())
    return model


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train([words(), classes()], tmp_path_factory.mktemp("together"))


def test_a_task_that_classifies_trains_as_with_trainer_alone(together: Run, tmp_path: Path) -> None:
    model = classifier()
    torch.manual_seed(SETTINGS["seed"])
    model = get_peft_model(model, CLASSES)
    parameters = {key.replace(".default", ""): item for key, item in model.named_parameters() if item.requires_grad}
    initial = together.recorder.before["classes"][0]
    head = parameters["base_model.model.score.modules_to_save.weight"]
    assert head.shape == (3, 32)
    with torch.no_grad():  # transformers draws a new head from the global state, here it is drawn from the task's seed
        head.copy_(initial["base_model.model.score.modules_to_save.weight"])
    for key, item in parameters.items():
        assert torch.equal(item, initial[key]), key
    losses: list[float] = []

    class Recording(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append((loss[0] if isinstance(loss, tuple) else loss).item())
            return loss

    args = TrainingArguments(
        str(tmp_path), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, lr_scheduler_type="linear",
        train_sampling_strategy="sequential", use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Recording(model, args, train_dataset=LABELLED, eval_dataset=HELD_OUT, compute_metrics=accuracy)  # type: ignore[arg-type]
    trainer.train()
    lab.assert_close(together.losses["classes"], losses[:6], 1e-5, "classes")
    for key, weight in together.weights("classes").items():
        assert lab.relative(weight, parameters[key]) <= 1e-5, key
    history = together.trainer.task_states["classes"].log_history
    found = next(entry for entry in history if "eval_loss" in entry)
    with torch.no_grad():
        logits = np.concatenate([model.eval()(torch.tensor([row["input_ids"]])).logits for row in HELD_OUT])
    wanted = torch.nn.functional.cross_entropy(torch.from_numpy(logits), torch.arange(7) % 3).item()
    assert found["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert found["eval_accuracy"] == pytest.approx((logits.argmax(-1) == np.arange(7) % 3).mean())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["words", "classes"])
def test_several_eval_data_sets_and_predictions_are_those_of_trainer(name: str, tmp_path: Path) -> None:
    labels = {"words": lambda row, _: row["input_ids"], "classes": lambda _, number: number % 3}[name]
    key = {"words": "labels", "classes": "label"}[name]
    many = [{**row, key: labels(row, number)} for number, row in enumerate(lab.rows(8, 24, 9, 9))]
    options: dict[str, Any] = {"learning_rate": 3e-2, "max_steps": 6, "lr_scheduler_type": "reduce_lr_on_plateau"}
    options |= {"lr_scheduler_kwargs": {"patience": 0}, "load_best_model_at_end": True, "eval_steps": 2}
    options |= {"metric_for_best_model": "b_loss"}
    held_out = {"a": many[:3], "b": many[3:8]}
    config = {"words": LoraConfig(r=4, target_modules="all-linear"), "classes": CLASSES}[name]
    own = {"eval_dataset": held_out, "compute_metrics": accuracy_of_rows, "shuffle": False, "train_batch_size": 4}
    tasks = [task_of(name, many[8:], config, seed=3, **own, **options), task_of("b", many, WORDS)]
    ours = train(tasks, tmp_path / "a")
    train(tasks, tmp_path / "stopped", recorder=Recorder(at_end={3: stop}))
    resumed = train(tasks, tmp_path / "stopped", resume=True)
    lab.assert_bit_identical(resumed, ours, name, steps=0)
    assert resumed.trainer.task_states[name].log_history == ours.trainer.task_states[name].log_history
    (shown, _), page = ours.trainer.report().rows, (tmp_path / "a" / "report.html").read_text()
    assert (shown.best_metric, shown.best) == ("eval_b_loss", ours.trainer.task_states[name].best_metric)
    assert shown.eval_loss is not None
    assert "b_loss" in page
    assert "eval_b_loss" in (tmp_path / "a" / name / "README.md").read_text()

    model = {"words": lambda: lab.tiny_llama().double(), "classes": classifier}[name]()
    model = get_peft_model(model, config)
    initial = ours.recorder.before[name][0]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(initial[parameter_name.replace(".default", "")])
    args = TrainingArguments(
        str(tmp_path / "b"), per_device_train_batch_size=4, train_sampling_strategy="sequential", use_cpu=True,
        report_to="none", save_steps=2, eval_strategy="steps", disable_tqdm=True, **options,
    )  # fmt: skip
    given: dict[str, Any] = {"train_dataset": many[8:], "eval_dataset": held_out, "compute_metrics": accuracy_of_rows}
    trainer = Trainer(model, args, **given)
    trainer.train()
    state = ours.trainer.task_states[name]
    theirs = [entry for entry in trainer.state.log_history if any(part.startswith("eval_") for part in entry)]
    found = [entry for entry in state.log_history if any(part.startswith("eval_") for part in entry)]
    assert len(found) == len(theirs) == 6
    for entry, wanted in zip(found, theirs, strict=True):
        wanted = {key: value for key, value in wanted.items() if not key.endswith(("runtime", "per_second"))}
        assert {key: entry[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
        assert {key.removesuffix("perplexity") for key in entry.keys() - wanted.keys()} <= {"eval_a_", "eval_b_"}
    assert state.best_metric == pytest.approx(trainer.state.best_metric, rel=1e-5)
    assert state.best_global_step == trainer.state.best_global_step
    for rows in held_out.values():
        wanted, output = trainer.predict(rows), ours.trainer.predict(name, rows)  # type: ignore[arg-type]
        np.testing.assert_allclose(output.predictions, wanted.predictions, rtol=1e-5, atol=1e-5)
        assert (output.label_ids == wanted.label_ids).all()
        assert output.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-5)
        assert wanted.metrics.keys() - output.metrics.keys() <= {"test_model_preparation_time"}
    again = ours.trainer.evaluate(name, held_out["b"])
    assert again[f"{name}/eval_loss"] == pytest.approx(state.best_metric, rel=1e-5)


def test_language_modelling_and_classification_are_each_as_alone_and_one_that_fails_leaves_the_other(
    together: Run, tmp_path: Path
) -> None:
    for name, task in (("words", words()), ("classes", classes())):
        lab.assert_same(train([task], tmp_path / name), together, name, 1e-6)
    failing = Recorder(at_begin={2: poison("classes")})
    poisoned = train([words(), classes()], tmp_path / "poisoned", recorder=failing)
    assert poisoned.trainer.task_statuses == {"words": "succeeded", "classes": "failed"}
    lab.assert_bit_identical(poisoned, together, "words", steps=3)
    lab.assert_same(poisoned, together, "words", 1e-6)


def test_a_run_with_both_stops_and_resumes_and_takes_a_task_that_classifies_while_it_runs(
    together: Run, tmp_path: Path
) -> None:
    train([words(), classes()], tmp_path / "run", recorder=Recorder(at_end={3: stop}))
    resumed = train([words(), classes()], tmp_path / "run", resume=True)
    for name in ("words", "classes"):
        assert resumed.recorder.digests[name] == together.recorder.digests[name][3:]
    late = Recorder(at_end={2: lambda trainer: trainer.register_tasks([classes()])})
    lab.assert_same(train([words()], tmp_path / "late", recorder=late), together, "classes", 1e-6)


@torch.no_grad()
def test_its_adapter_is_one_of_the_classifier_which_its_view_and_merging_give(together: Run) -> None:
    model, folder = together.trainer.model.eval(), Path(together.trainer.args.output_dir)
    plain = PeftModel.from_pretrained(classifier(), folder / "classes").eval()
    view = model.task_view("classes")
    wanted = plain(input_ids=IDS, labels=torch.tensor([1]))
    assert torch.equal(view(input_ids=IDS).logits, wanted.logits)
    assert torch.equal(view(input_ids=IDS, labels=torch.tensor([1])).loss, wanted.loss)
    assert model.backbone.config.problem_type is None, "the view has a configuration of its own"
    assert model.task_view("words")(input_ids=IDS).logits.shape == (1, 13, lab.VOCABULARY)
    for refused in (
        lambda: view.generate(IDS),
        lambda: generate(model, [GenerationRequest(task="classes", prompt=[1, 2])]),
    ):
        with pytest.raises(ConfigError, match='needs a task that makes words, got the classification task "classes"'):
            refused()
    loaded = MultiTaskPeftModel.from_pretrained(lab.tiny_llama().double(), folder).eval()
    assert torch.equal(loaded.task_view("classes")(input_ids=IDS).logits, wanted.logits)
    merged = view.merge_and_unload()
    assert isinstance(merged, LlamaForSequenceClassification)
    assert torch.allclose(merged(input_ids=IDS).logits, wanted.logits)


def test_removing_all_tasks_gives_the_language_model_back(tmp_path: Path) -> None:
    model = lab.make_trainer([words(), classes()], tmp_path).model
    names = {name for name, _ in lab.tiny_llama().named_modules()}
    assert {name for name, _ in model.unload().named_modules()} == names


def test_a_reward_model_and_a_regression_train_alongside_language_modelling(tmp_path: Path) -> None:
    pairs = [{"chosen_ids": row["input_ids"], "rejected_ids": row["input_ids"][:2]} for row in lab.rows(6, 8, 4, 9)]
    values = [{**row, "label": 0.5} for row in lab.rows(5, 8, 4, 9)]
    tasks = [words(label_smoothing_factor=0.1), task_of("reward", pairs, CLASSES, objective="reward", **SETTINGS)]
    tasks += [task_of("values", values, CLASSES, num_labels=1, **SETTINGS), classes(label_smoothing_factor=0.2)]
    run = train(tasks, tmp_path)
    assert set(run.trainer.task_statuses.values()) == {"succeeded"}
    assert all(run.losses[name][-1] < run.losses[name][0] for name in ("reward", "values"))


def test_classes_alongside_language_modelling_on_a_sharded_backbone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tasks\.classes\.peft_config\.task_type must be .*shard_backbone"):
        lab.make_trainer([words(), classes()], tmp_path, shard_backbone=True).plan()
