"""All types in one run, and what their files are to plain PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftConfig, PeftType, TaskType

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.adapters.prompt_kind import PromptKind
from peft_mux.modeling.adapters.kind import KINDS, entry_of
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters import alone
from tests.modeling.adapters.cases import CASES, FAST, each_type
from tests.modeling.adapters.passes import assert_nan_stays, assert_refused, assert_same_tensors, packed
from tests.modeling.backbones import classifier_of

# Prompts, which have no layers, have tests of their own in `tests/adapters/prompts`.
TYPES = [peft_type for peft_type, kind in KINDS.items() if not isinstance(kind, PromptKind)]


EVERY_TYPE = each_type(TYPES, FAST)
NAMES = [one.name.lower() for one in TYPES]


def task(name: str, number: int = 0, config: PeftConfig | None = None) -> Task:
    config = config or CASES[PeftType[name.upper()]].make(0)
    return alone.task(name, config, number, max_steps=3, weight_decay=0.0, length=5 + number % 7, seed=1 + number)


def tasks_of_all_types() -> list[Task]:
    return [task(name, number) for number, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """Every type at once, with the trainer's own planning."""
    return lab.train(tasks_of_all_types(), tmp_path_factory.mktemp("run"), recorder=lab.Recorder(keep_weights=False))


# What plain PEFT draws from the generator is compared with a run of its own in the next test.
@each_type(one for one in TYPES if not CASES[one].is_random)
def test_in_a_run_of_all_types_each_trains_as_plain_peft_trains_it_alone(run: lab.Run, peft_type: PeftType) -> None:
    name = peft_type.name.lower()
    verdict = lab.judge(run.trainer, task(name, NAMES.index(name)))
    lab.assert_as_judged(run, {name: verdict})
    assert verdict.losses[-1] != verdict.losses[0], "it has learned something"


# What dropout modules draw is tested in test_kinds.py.
@pytest.mark.slow
@each_type(one for one in TYPES if CASES[one].is_random or one.name in ("LOHA", "BOFT"))
def test_what_is_drawn_at_random_is_the_same_alone_and_in_micro_batches(peft_type: PeftType, tmp_path: Path) -> None:
    name, case = peft_type.name.lower(), CASES[peft_type]
    assert case.dropped is not None
    dropped = task(name, config=case.dropped())
    by_itself = lab.train([dropped], tmp_path / "alone")
    other = lab.train([dropped, task("ia3", 1)], tmp_path / "split", max_tokens_per_micro_batch=16)
    lab.assert_close(other.losses[name], by_itself.losses[name], 1e-5, name)


@pytest.mark.slow
def test_a_run_of_all_types_resumes_exactly_from_its_checkpoint(run: lab.Run, tmp_path: Path) -> None:
    alone.assert_resumes(tasks_of_all_types, tmp_path, whole=run)


@pytest.mark.slow
def test_tasks_of_all_types_that_come_and_go_train_as_those_that_were_there_from_the_start(
    run: lab.Run, tmp_path: Path
) -> None:
    late = tasks_of_all_types()
    first = lab.small_task("first", data_seed=1, max_steps=6)
    at_end = {1: lambda trainer: trainer.register_tasks(late), 3: lambda trainer: trainer.remove_task("vera")}
    changing = lab.train([first], tmp_path, recorder=lab.Recorder(at_end=at_end, keep_weights=False))
    lab.assert_as_judged(changing, {"first": lab.judge(changing.trainer, first)})
    for name in NAMES:
        steps = 2 if name == "vera" else 3
        lab.assert_close(changing.losses[name], run.losses[name][:steps], 1e-5, name)


@pytest.mark.slow
def test_a_task_of_nan_stays_alone_whatever_its_type() -> None:
    configs = {name: CASES[PeftType[name.upper()]].make(0) for name in NAMES}
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False)
    batch, _ = packed(*NAMES)
    for name in NAMES:
        assert_nan_stays(model, batch, name)


@EVERY_TYPE
def test_a_model_that_is_unloaded_is_the_backbone_again(peft_type: PeftType) -> None:
    backbone = tiny_llama()
    configs = {"a": CASES[peft_type].make(0), "l": CASES[PeftType.LORA].make(0), "b": CASES[peft_type].make(1)}
    found = MultiTaskPeftModel(backbone, configs, verify=False).unload().state_dict()
    assert list(found) == list(tiny_llama().state_dict())
    assert_same_tensors(found, tiny_llama().state_dict())


@EVERY_TYPE
def test_a_model_without_weights_has_the_adapters_shapes(peft_type: PeftType) -> None:
    config = CASES[peft_type].make(0)
    with torch.device("meta"):
        described = type(tiny_llama())(tiny_llama().config)
    if entry_of(peft_type).needs_weights:
        assert_refused({"a": config}, r"must be used on a loaded model, got .* on a model without weights", described)
        return
    shapes, wanted = (
        {key: item.shape for key, item in MultiTaskPeftModel(each, {"a": config}).task_parameters("a").items()}
        for each in (described, tiny_llama())
    )
    assert shapes == wanted


@EVERY_TYPE
def test_a_classifier_trains_its_head_next_to_any_type(peft_type: PeftType) -> None:
    config, lora = (CASES[one].make(0) for one in (peft_type, PeftType.LORA))
    config.task_type = lora.task_type = TaskType.SEQ_CLS
    backbone = classifier_of("llama", vocab_size=lab.VOCABULARY, intermediate_size=64)()
    if not hasattr(config, "modules_to_save"):
        assert_refused({"a": config}, "task_type", backbone)
        return
    model = MultiTaskPeftModel(backbone, {"a": config, "l": lora}, num_labels={"a": 3, "l": 2}, verify=False)
    heads = (model.task_parameters(name)["base_model.model.score.modules_to_save.weight"] for name in "al")
    assert [head.shape[0] for head in heads] == [3, 2]
