"""Things that a reader of the examples tries next: evaluation for all tasks at once, classifiers of several sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, TaskType

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.losses.classification import head_module
from tests.invariants.mux_lab import small_task, tiny_llama


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a decoder whose head gives words, as most that people classify with."""
    folder = tmp_path_factory.mktemp("decoder")
    tiny_llama().save_pretrained(folder)
    return str(folder)


class _NoTokenizer:
    pad_token_id = 0


def classifiers(decoder: str, folder: Path, seed: int = 7, **classes: int) -> MultiTaskTrainer:
    """Return a trainer of classifiers of some classes each."""
    tasks = []
    for name, number in classes.items():
        rows = [{"input_ids": [2, 5 + row, 3], "label": row % number} for row in range(12)]
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules="all-linear")
        options: dict[str, Any] = {"max_steps": 2, "learning_rate": 1e-2, "seed": seed}
        tasks.append(Task(name=name, peft_config=config, train_dataset=rows, **options))
    args = MultiTaskTrainingArguments(
        output_dir=str(folder), save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    )
    # Rows are tokenised; a processing class keeps the trainer from looking for a tokenizer in the folder.
    return MultiTaskTrainer(decoder, args, tasks, processing_class=_NoTokenizer())


@pytest.mark.slow
def test_classifiers_of_unlike_classes_on_all_layers_train_together_as_alone(decoder: str, tmp_path: Path) -> None:
    losses: dict[str, float] = {}
    for classes in ({"two": 2, "three": 3}, {"two": 2}, {"three": 3}):
        trainer = classifiers(decoder, tmp_path / "-".join(classes), **classes)
        trainer.train()
        for name in classes:
            assert losses.setdefault(name, trainer.table[name].last_loss) == pytest.approx(
                trainer.table[name].last_loss, rel=1e-4
            )
    assert losses["three"] > losses["two"]


def test_the_seed_of_a_task_fixes_its_new_classification_head(decoder: str, tmp_path: Path) -> None:
    heads = []
    for seed in (1, 2, 1):
        trainer = classifiers(decoder, tmp_path, seed, a=2)
        trainer._placement.load()
        _, wrapper = head_module(trainer.model.backbone)
        heads.append(wrapper.modules_to_save[trainer.model.adapter_of("a")].weight.detach().clone())
    assert torch.equal(heads[0], heads[2])
    assert not torch.equal(heads[0], heads[1])


def test_a_run_warns_of_no_names_that_transformers_has_changed(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), save_strategy="no", report_to="none", use_cpu=True)
    MultiTaskTrainer(tiny_llama(), args, [small_task("a", data_seed=1, max_steps=1)]).train()
    assert [str(one.message) for one in recwarn if issubclass(one.category, FutureWarning)] == []
