"""Frozen weights divided among real processes (FSDP2): the result of one process, in 1/n of the memory."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor

from peft_mux.engine import fsdp
from peft_mux.engine.fsdp import ShardedBackbone
from peft_mux.engine.processes import Processes
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.fsdp import cases
from tests.engine.fsdp.cases import Case, Seen
from tests.engine.processes.cases import launch, values
from tests.engine.replicas import layout_cases
from tests.invariants import mux_lab as lab

pytestmark = pytest.mark.distributed


@functools.cache
def alone(case: Case, folder: Path) -> Seen:
    return cases.train(case, 0, folder, sharded=False)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@functools.cache
def trained(case: Case, world_size: int, home: Path) -> list[Seen]:
    return values(launch(world_size, cases.train_sharded, case, home))


def assert_as_one(part: Seen, one: Seen, *, but: tuple[str, ...] = ()) -> None:
    assert part.losses.keys() == one.losses.keys()
    for name in one.losses.keys() - set(but):
        np.testing.assert_allclose(part.losses[name], one.losses[name], rtol=1e-5, err_msg=name)
        for key, weight in one.weights[name].items():
            np.testing.assert_allclose(part.weights[name][key], weight, atol=1e-4, err_msg=f"{name} {key}")


CASES = {
    "llama": (2, Case("llama")),
    "gpt2, recomputed activations": (2, Case("gpt2", recomputes=True)),
    "tied and adapted ends, 3 processes": (3, Case("tied", ends=True)),
    "adapted ends, recomputed, unequal passes": (2, Case("llama", ends=True, recomputes=True, few=True)),
    "a task arrives, ends unadapted": (2, Case("tied", arrives=True)),
    "a task arrives and adapts the ends": (2, Case("llama", arrives=True, ends=True)),
    "mixtral, adapted experts and routers": (2, Case("mixtral")),
    "gpt2, chains of passes, unequal": (2, Case("gpt2", splits=True, max_tokens=20, few=True)),
}
SLOW = (
    "gpt2, recomputed activations",
    "tied and adapted ends, 3 processes",
    "adapted ends, recomputed, unequal passes",
    "a task arrives, ends unadapted",
    "a task arrives and adapts the ends",
    "mixtral, adapted experts and routers",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_several_processes_with_a_part_of_the_backbone_train_to_the_result_of_one(name: str, home: Path) -> None:
    world_size, case = CASES[name]
    parts, one = trained(case, world_size, home), alone(case, home)
    for part in parts:
        assert_as_one(part, one)
        assert part.losses == parts[0].losses
        assert part.local_bytes == pytest.approx(part.whole_bytes / world_size, rel=0.1)
        most = [counts[1] for counts in part.passes]
        assert part.bytes_by_step[-1] == most[-1] * part.closed_form
    if case.few:
        assert parts[1].passes[0][0] < parts[0].passes[0][0]


def test_bytes_received_in_a_pass_are_those_of_the_layers_twice_and_of_the_ends_once(home: Path) -> None:
    (first, _) = trained(Case("llama"), 2, home)
    layer = 4 * (32 * 32 * 2 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)  # bytes: q, o; k, v; gate, up, down; norms
    end, norm = 4 * 98 * 32, 4 * 32  # 97 tokens are padded to 98
    assert first.closed_form == (2 * 4 * layer + 2 * end + 2 * norm) // 2
    assert first.bytes_by_step == [most * first.closed_form for _, most in first.passes]


def test_a_nan_ends_its_task_on_all_processes_and_harms_no_neighbour(home: Path) -> None:
    healthy = alone(Case("llama"), home)
    for part in trained(Case("llama", poison=True), 2, home):
        assert part.failures == {"d": "non_finite: loss is nan"}
        assert_as_one(part, healthy_without_d(healthy, part), but=("d",))


def healthy_without_d(healthy: Seen, part: Seen) -> Seen:
    losses = {**healthy.losses, "d": part.losses["d"]}
    return Seen(losses=losses, weights=healthy.weights)


def test_weights_are_freed_after_forward_and_the_backward_reads_what_is_gathered_again(home: Path) -> None:
    wanted = cases.changed_between_passes(None)
    for found, freed in values(launch(2, cases.changed_between_passes)):
        assert freed
        for key, gradient in wanted[0].items():
            np.testing.assert_allclose(found[key], gradient, atol=1e-6, err_msg=key)


def test_a_view_computes_and_saves_and_plain_peft_reads_it(tmp_path: Path) -> None:
    for rank, facts in enumerate(values(launch(2, cases.used_through_a_view, tmp_path))):
        plain = PeftModel.from_pretrained(cases.backbone("llama"), str(tmp_path / f"a{rank}")).eval()
        ids = torch.arange(1, 8)[None]
        with torch.no_grad():
            np.testing.assert_allclose(plain(input_ids=ids).logits.numpy(), facts["logits"], atol=1e-5)


def test_a_model_whose_layers_cannot_be_told_is_refused() -> None:
    model: Any = MultiTaskPeftModel(cases.backbone("llama"), {"a": LoraConfig(target_modules=["q_proj"])}, verify=False)
    model.backbone.config.num_hidden_layers = 7
    with pytest.raises(
        UnsupportedModelError,
        match="LlamaForCausalLM must keep its 7 decoder layers in one list with shard_backbone=True",
    ):
        ShardedBackbone(model, Processes(), mesh=None)  # type: ignore[arg-type]


def bytes_while_sharding(rank: int, folder: Path) -> tuple[int, int, int, list[int]]:
    """Return the most bytes of frozen weights that a process's device held, its shards, the largest unit, and moves."""
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    held, peaks, units, moved = [0], [0], [0], []
    move, shard = _fsdp_init._move_states_to_device, fsdp.fully_shard
    to = MultiTaskPeftModel.to

    def noted_move(params: list[Any], buffers: list[Any], device: Any) -> None:
        units.append(sum(item.nbytes for item in params))
        move(params, buffers, device)
        peaks.append(held[0] + units[-1])

    def noted_shard(unit: Any, **options: Any) -> Any:
        found = shard(unit, **options)
        held[0] = sum(item.to_local().nbytes for item in model.backbone.parameters() if isinstance(item, DTensor))
        return found

    def noted_to(self: Any, *args: Any, **options: Any) -> Any:
        moved.append(sum(item.nbytes for item in self.backbone.parameters() if not isinstance(item, DTensor)))
        return to(self, *args, **options)

    model: Any = None
    wrap = MultiTaskPeftModel.verify_once

    def noted_model(self: Any) -> None:
        nonlocal model
        model = self
        wrap(self)

    with pytest.MonkeyPatch.context() as patch:
        for place in [module for name, module in sys.modules.items() if "_fully_shard" in name]:
            if hasattr(place, "_move_states_to_device"):
                patch.setattr(place, "_move_states_to_device", noted_move)
        patch.setattr(fsdp, "fully_shard", noted_shard)
        patch.setattr(MultiTaskPeftModel, "to", noted_to)
        patch.setattr(MultiTaskPeftModel, "verify_once", noted_model)
        task = lab.small_task("a", data_seed=1, max_steps=1)
        layout_cases.train(folder, layout_cases.backbone("llama"), [task], shard_backbone=True)
    return max(peaks), held[0], max(units), moved


def test_a_device_never_holds_more_than_its_shards_and_one_unit(tmp_path: Path) -> None:
    whole = sum(item.nbytes for item in layout_cases.backbone("llama").parameters())
    for peak, shards, unit, moved in values(launch(2, bytes_while_sharding, tmp_path)):
        assert 0.49 * whole <= shards <= 0.51 * whole
        assert unit < 0.3 * whole
        assert peak <= shards + unit
        assert len(moved) == 1
        assert 0 < moved[0] < 0.25 * whole, "only adapters are left to move"
