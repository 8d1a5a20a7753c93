"""Things that a reader of the examples tries next: evaluation for all tasks at once, classifiers of several sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TaskType
from transformers import BertConfig, BertModel

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.modeling.objectives.classification import head_module
from tests.invariants.mux_lab import small_task, tiny_llama


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with an encoder that has no classification head, as those of the hub."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def classifier(name: str, classes: int, *, seed: int = 7) -> Task:
    rows = [{"input_ids": [2, 5 + row, 3], "label": row % classes} for row in range(12)]
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"])
    return Task(name=name, peft_config=config, num_labels=classes, train_dataset=rows, max_steps=2, seed=seed)


def losses(encoder: str, tasks: list[Task], folder: Path) -> dict[str, float]:
    """Train classifiers and return their last losses."""
    args = MultiTaskTrainingArguments(
        output_dir=str(folder), save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    )
    # Rows are tokenised; a processing class keeps the trainer from looking for a tokenizer in the folder.
    trainer = MultiTaskTrainer(encoder, args, tasks, processing_class=_NoTokenizer())
    trainer.train()
    return {task.name: trainer.table[task.name].last_loss for task in tasks}


class _NoTokenizer:
    pad_token_id = 0


@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_goes_the_same_way_alone_and_after_one_of_two_classes(
    encoder: str, tmp_path: Path, classes: int
) -> None:
    task = classifier("second", classes)
    together = losses(encoder, [classifier("first", 2), task], tmp_path / "together")
    alone = losses(encoder, [task], tmp_path / "alone")
    assert together["second"] == pytest.approx(alone["second"], rel=1e-5)


def head_of(encoder: str, task: Task, folder: Path) -> torch.Tensor:
    args = MultiTaskTrainingArguments(output_dir=str(folder), save_strategy="no", report_to="none", use_cpu=True)
    trainer = MultiTaskTrainer(encoder, args, [task], processing_class=_NoTokenizer())
    trainer._placement.load(trainer._plans.plan_stages)
    _, wrapper = head_module(trainer.model.backbone)
    weight = wrapper.modules_to_save[trainer.model.adapter_of(task.name)].weight
    return weight.detach().clone()


def test_the_seed_of_a_task_fixes_its_new_classification_head(encoder: str, tmp_path: Path) -> None:
    first, second = (head_of(encoder, classifier("a", 2, seed=seed), tmp_path) for seed in (1, 2))
    assert not torch.equal(first, second)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a decoder whose head gives words, as most that people classify with."""
    folder = tmp_path_factory.mktemp("decoder")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def test_two_classifiers_on_all_layers_of_a_decoder_train_without_a_plan_before_and_as_alone(
    decoder: str, tmp_path: Path
) -> None:
    def own(name: str, classes: int) -> Task:
        rows = [{"input_ids": [2, 5 + row, 3], "label": row % classes} for row in range(12)]
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules="all-linear")
        return Task(name=name, peft_config=config, train_dataset=rows, max_steps=2, learning_rate=1e-2, seed=7)

    together = losses(decoder, [own("two", 2), own("three", 3)], tmp_path / "both")
    assert together["two"] == pytest.approx(losses(decoder, [own("two", 2)], tmp_path / "one")["two"], rel=1e-4)
    assert together["three"] > together["two"]


def test_a_run_warns_of_no_names_that_transformers_has_changed(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    losses_of = MultiTaskTrainingArguments(output_dir=str(tmp_path), save_strategy="no", report_to="none", use_cpu=True)
    MultiTaskTrainer(tiny_llama(), losses_of, [small_task("a", data_seed=1, max_steps=1)]).train()
    assert [str(one.message) for one in recwarn if issubclass(one.category, FutureWarning)] == []
