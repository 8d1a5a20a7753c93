"""What every kind of adapters must do, and a type of adapters that comes in one new file.

The judge is plain PEFT: `get_peft_model` on a copy of the backbone, one task alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PeftType, PolyConfig, TaskType
from peft.tuners.tuners_utils import BaseTunerLayer

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.adapters.prompt_kind import PromptKind
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.checks import config_faults
from peft_mux.modeling.adapters.kind import (
    KINDS,
    AdapterKind,
    MultiplexedForward,
    find_kind,
    kind_of,
    kind_of_layer,
    kind_of_parameter,
)
from peft_mux.parallel.layout import divided_kind_faults
from peft_mux.parallel.parallelize import narrow
from peft_mux.parallel.tensor.cut import CAN_BE_CUT, cut_dim
from peft_mux.planning.task_loads import adapter_loads
from peft_mux.scheduler.parallel_layout import ParallelLayout
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import assert_resumes, task
from tests.modeling.adapters.cases import CASES
from tests.modeling.adapters.passes import IDS, assert_as_plain, assert_refused, judges_of, packed, perturbed, plain
from tests.modeling.adapters.toy_kind import ToyKind, registered


def ia3(number: int) -> IA3Config:
    return IA3Config(target_modules=["k_proj", "down_proj", "v_proj"][number:], feedforward_modules=["down_proj"])


# Kinds that others add to the package are found here, and need a case; prompts, which have no layers, have theirs in
# `tests/adapters/prompts`.
LAYERED = [kind for kind in KINDS.values() if not isinstance(kind, PromptKind)]
SEEDS = {"a": 3, "b": 4}
EVERY_KIND = pytest.mark.parametrize("kind", LAYERED, ids=[str(kind.peft_type.value) for kind in LAYERED])


def test_every_registered_kind_has_a_case_here() -> None:
    assert {kind.peft_type for kind in LAYERED} - set(CASES) == set()
    assert next(iter(KINDS)) == PeftType.LORA, "it lies closest to the frozen layers"


def test_types_that_are_not_registered_have_no_kind() -> None:
    assert find_kind(PolyConfig(target_modules=["q_proj"])) is None
    assert_refused(
        {"a": PolyConfig(target_modules=["q_proj"])},
        r"tasks\.a\.peft_config must be.*, got PolyConfig \(POLY\).*Nearest: LORA",
    )


@EVERY_KIND
def test_a_field_and_a_task_type_that_cannot_be_trained_are_refused_by_name(kind: AdapterKind) -> None:
    case = CASES[kind.peft_type]
    assert config_faults(case.make(0), "tasks.a") == []
    config, other = case.make(0), case.make(0)
    field, value = case.wrong
    setattr(config, field, value)
    other.task_type = TaskType.SEQ_2_SEQ_LM
    assert_refused({"a": config}, rf"tasks\.a\.peft_config\.{field}")
    assert [fault.where for fault in config_faults(other, "tasks.a")] == ["tasks.a.peft_config.task_type"]


@EVERY_KIND
def test_a_kind_knows_its_configurations_layers_and_parameters(kind: AdapterKind) -> None:
    judge, own = plain(CASES[kind.peft_type].make(0), 0)
    assert kind_of(judge.peft_config["default"]) is kind
    layers = [module for module in judge.modules() if isinstance(module, BaseTunerLayer)]
    assert layers
    assert all(kind_of_layer(layer) is kind for layer in layers)
    assert own
    assert all(kind.owns(name) and kind_of_parameter(name) is kind for name in own)
    assert not any(kind.owns(name) for name, item in judge.named_parameters() if not item.requires_grad)
    adapted = {f"base_model.model.{name}" for name in judge.base_model.targeted_module_names}
    # Parameters that layers share are on none of them.
    assert {kind.site_of(name) for name in own} - {"base_model"} <= adapted
    loads = adapter_loads(kind, {name: tuple(item.shape) for name, item in own.items()}, {})
    sizes = [(item.dim() > 1, item.numel()) for item in own.values()]
    # Biases may be left out: they take hardly any time.
    allowed = {sum(size for _, size in sizes), sum(size for is_matrix, size in sizes if is_matrix)}
    assert sum(load.rank * load.width for load in loads) in allowed
    assert len(loads) == len({kind.site_of(name) for name in own})
    dims = [cut_dim(name, is_row=is_row) for name in own for is_row in (True, False)]
    assert any(dim is not None for dim in dims) is (kind.name in CAN_BE_CUT)


@EVERY_KIND
def test_a_kind_that_cannot_be_cut_refuses_layouts_that_cut_and_no_others(kind: AdapterKind) -> None:
    assert divided_kind_faults(kind, ParallelLayout.of(2), "tasks.a") == []
    faults = divided_kind_faults(kind, ParallelLayout.of(2, tp=2), "tasks.a")
    assert bool(faults) is (kind.name not in CAN_BE_CUT)
    stages = divided_kind_faults(kind, ParallelLayout.of(2, pp=2), "tasks.a")
    assert bool(stages) is bool(kind.entry.spans_layers or kind.entry.reads_weights)
    assert all(fault.where == "tasks.a.peft_config" and kind.title in fault.got for fault in (*faults, *stages))


@EVERY_KIND
def test_a_narrowed_configuration_adapts_the_given_layers_alone(kind: AdapterKind) -> None:
    config: Any = CASES[kind.peft_type].make(0)
    if hasattr(config, "layers_to_transform"):
        config.layers_to_transform = [0]
    full, _ = plain(CASES[kind.peft_type].make(0), 0)
    site = full.base_model.targeted_module_names[-1]
    narrow(config, [site])
    model, own = plain(config, 0)
    assert model.base_model.targeted_module_names == [site]
    assert {kind.site_of(name) for name in own} <= {f"base_model.model.{site}", "base_model"}


@EVERY_KIND
def test_a_pass_of_two_tasks_gives_each_what_plain_peft_alone_gives(kind: AdapterKind, tmp_path: Path) -> None:
    configs = {name: CASES[kind.peft_type].make(number) for number, name in enumerate("ab")}
    model = MultiTaskPeftModel(tiny_llama(), configs, seeds=SEEDS, verify=False)
    layers = [module for module in model.backbone.modules() if isinstance(module, kind.layer_type or ())]
    assert all(isinstance(layer.__dict__["forward"], MultiplexedForward) for layer in layers)
    batch, rows = packed("a", "b")
    if CASES[kind.peft_type].is_random:
        model.eval()
    judges = judges_of(model, configs, SEEDS)
    if CASES[kind.peft_type].is_random:
        for judge, _ in judges.values():
            judge.eval()
    assert_as_plain(model, batch, judges, rows, may_be_zero=True)
    # What it saves comes back in plain PEFT and here.
    model.eval().save_pretrained(tmp_path)
    again = MultiTaskPeftModel.from_pretrained(tiny_llama(), tmp_path, verify=False).eval()
    with torch.no_grad():
        for name in "ab":
            loaded = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / name)).eval()
            wanted = loaded(input_ids=IDS).logits
            assert torch.equal(model.task_view(name)(input_ids=IDS).logits, wanted)
            assert torch.equal(again.task_view(name)(input_ids=IDS).logits, wanted)
            if name == "a":
                assert_plain_peft_can_work_on_it(loaded, wanted, merges=CASES[kind.peft_type].merges)


def assert_plain_peft_can_work_on_it(loaded: Any, wanted: torch.Tensor, *, merges: bool) -> None:
    """Assert that plain PEFT disables and merges what was saved, and adds and deletes another next to it."""
    bare = tiny_llama().eval()(input_ids=IDS).logits
    assert relative(wanted, bare) > 1e-5, "the adapter does something"
    with loaded.disable_adapter():
        assert torch.equal(loaded(input_ids=IDS).logits, bare)
    loaded.add_adapter("second", copy.deepcopy(loaded.peft_config["default"]))
    loaded.delete_adapter("second")
    assert torch.equal(loaded(input_ids=IDS).logits, wanted)
    if merges:
        assert torch.allclose(loaded.merge_and_unload()(input_ids=IDS).logits, wanted, atol=1e-4)


@pytest.mark.slow
@EVERY_KIND
def test_a_task_among_tasks_of_other_types_drops_what_it_drops_alone_and_merges(kind: AdapterKind) -> None:
    case = CASES[kind.peft_type]
    make = case.dropped or (lambda: case.make(0))
    # Of its own type and of another, around it or inside it; one is gone before the pass.
    others = {"x": case.make(1), "b": case.make(1), "c": ia3(0), "d": LoraConfig(r=2, target_modules="all-linear")}
    model = MultiTaskPeftModel(tiny_llama(), {**others, "a": make()}, verify=False)
    alone = MultiTaskPeftModel(tiny_llama(), {"a": make()}, verify=False)
    for each in (model, alone):
        each.train()
        perturbed(each.task_parameters("a"), 0)
    model.remove_tasks(["x"])
    (both, _), (only, _), (other, _) = packed("b", "c", "a", "d"), packed("a"), packed("a", task_seed=2)
    together, by_itself = model(both).losses[2], alone(only).losses[0]
    assert math.isclose(together.item(), by_itself.item(), rel_tol=1e-6)
    if case.merges:
        with torch.no_grad():
            wanted = model.eval().task_view("a")(input_ids=IDS).logits
            merged = model.task_view("a").merge_and_unload()
            assert torch.allclose(merged(input_ids=IDS).logits, wanted, atol=1e-4)
    if case.dropped is None and not case.is_random:  # its layers drop nothing, whatever is drawn
        return
    assert abs(alone(other).losses[0].item() - by_itself.item()) > 1e-4, "another seed draws something else"
    assert abs(alone.eval()(only).losses[0].item() - by_itself.item()) > 1e-4, "in training something is dropped"


# ----------------------------------------------------- a type from one new file


@pytest.fixture
def toy() -> Iterator[ToyKind]:
    kind = ToyKind()
    with registered(kind):
        yield kind


def toy_task(name: str, number: int, **settings: Any) -> Task:
    return task(name, ia3(number), number, length=7 + 3 * number, max_steps=5, weight_decay=0.0, **settings)


def test_a_new_type_trains_next_to_lora_as_plain_peft_alone_and_arrives_in_a_run(toy: ToyKind, tmp_path: Path) -> None:
    tasks = [toy_task("toy0", 0), lab.small_task("lora", data_seed=3, max_steps=7), toy_task("toy1", 1, seed=2)]
    recorder = lab.Recorder(at_end={2: lambda trainer: trainer.register_tasks([tasks[2]])})
    run = lab.train(tasks[:2], tmp_path, recorder=recorder)
    verdicts = {one.name: lab.judge(run.trainer, one) for one in tasks}
    lab.assert_as_judged(run, verdicts)
    for name, verdict in verdicts.items():
        assert verdict.losses[-1] != verdict.losses[0], f"{name} has learned something"


def test_a_new_type_resumes_from_its_checkpoint(toy: ToyKind, tmp_path: Path) -> None:
    assert_resumes(lambda: [toy_task("toy0", 0), lab.small_task("lora", data_seed=3, max_steps=5)], tmp_path)


def test_a_type_that_is_no_longer_registered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_0 = toy_task("toy0", 0)
    monkeypatch.delitem(KINDS, PeftType.IA3)
    with pytest.raises(ConfigError, match=r"IA3Config \(IA3\)"):
        lab.make_trainer([toy_0], tmp_path)


def test_sliced_layers_are_named_as_a_reason_against_cuda_graphs() -> None:
    model = MultiTaskPeftModel(tiny_llama(), {"a": ia3(0)}, verify=False)
    name = "model.layers.0.self_attn.k_proj"
    assert name in model.backbone.get_submodule(name).__dict__["forward"].reason_against_graphs()
