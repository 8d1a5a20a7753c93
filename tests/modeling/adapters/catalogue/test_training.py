"""All types in one run, and what their files are to plain PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftType, TaskType

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.modeling.adapters import kind as kinds
from peft_mux.modeling.adapters.checks import target_faults
from peft_mux.modeling.adapters.kind import KINDS, entry_of
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters import alone
from tests.modeling.adapters.cases import CASES, FAST, each_type
from tests.modeling.adapters.passes import assert_refused, assert_same_tensors, packed
from tests.modeling.backbones import classifier_of

# Prompts, which have no layers, have tests of their own in `tests/modeling/adapters/prompts`.
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
def test_tasks_of_all_types_come_and_go_while_others_train(tmp_path: Path) -> None:
    late = [one for one in tasks_of_all_types() if one.name != "lora"]
    at_end = {1: lambda trainer: trainer.register_tasks(late), 3: lambda trainer: trainer.remove_task("vera")}
    first = lab.small_task("first", data_seed=1, max_steps=6)
    recorder = lab.Recorder(at_end=at_end, keep_weights=False)
    run = lab.train([first], tmp_path, recorder=recorder)
    lab.assert_as_judged(run, {"first": lab.judge(run.trainer, first)})
    for one in late:
        if one.name != "vera" and not CASES[PeftType[one.name.upper()]].is_random:
            lab.assert_as_judged(run, {one.name: lab.judge(run.trainer, one)})


@pytest.mark.slow
def test_a_task_of_nan_stays_alone_whatever_its_type() -> None:
    configs = {name: CASES[PeftType[name.upper()]].make(0) for name in NAMES}
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False).eval()
    batch, _ = packed(*NAMES)
    healthy = model(batch).losses
    for number, name in enumerate(NAMES):
        parameter = next(iter(model.task_parameters(name).values()))
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.fill_(float("nan"))
        model.prepare_pass(NAMES)
        losses = model(batch).losses
        others = [other for other in range(len(NAMES)) if other != number]
        assert torch.equal(losses[others], healthy[others]), f"{name} reaches its neighbours"
        assert not torch.isfinite(losses[number]), name
        with torch.no_grad():
            parameter.copy_(kept)


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
    shapes = {
        key: item.shape
        for key, item in MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False).task_parameters("a").items()
    }
    with torch.device("meta"):
        described = type(tiny_llama())(tiny_llama().config)
    if entry_of(peft_type).needs_weights:
        assert_refused({"a": config}, r"must be used on a loaded model, got .* on a model without weights", described)
        return
    model = MultiTaskPeftModel(described, {"a": config}, verify=False)
    assert {key: item.shape for key, item in model.task_parameters("a").items()} == shapes


@EVERY_TYPE
def test_a_type_that_reads_weights_does_not_join_a_sharded_backbone(
    peft_type: PeftType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "FSDPModule", torch.nn.Module)  # as if FSDP2 had sharded it
    faults = target_faults(CASES[peft_type].make(0), tiny_llama(), "tasks.a")
    assert bool(faults) is entry_of(peft_type).reads_weights
    assert all("on a sharded backbone" in fault.got for fault in faults)


@EVERY_TYPE
def test_a_classifier_trains_its_head_next_to_any_type(peft_type: PeftType) -> None:
    config = CASES[peft_type].make(0)
    config.task_type = TaskType.SEQ_CLS
    backbone = classifier_of("llama", vocab_size=lab.VOCABULARY, intermediate_size=64)()
    if not hasattr(config, "modules_to_save"):
        assert_refused({"a": config}, "task_type", backbone)
        return
    model = MultiTaskPeftModel(backbone, {"a": config, "l": _classifier()}, num_labels={"a": 3, "l": 2}, verify=False)
    assert model.task_parameters("a")["base_model.model.score.modules_to_save.weight"].shape[0] == 3
    assert model.task_parameters("l")["base_model.model.score.modules_to_save.weight"].shape[0] == 2


def _classifier() -> Any:
    config = CASES[PeftType.LORA].make(0)
    config.task_type = TaskType.SEQ_CLS
    return config
