"""What tasks train in addition to plain LoRA (rows, biases, copies, steps of rows): as plain PEFT alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peft import LoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.alone import Together, tied_llama, tiny_gpt2, together
from tests.modeling.adapters.lora import test_row_steps as steps
from tests.modeling.adapters.own import test_biases as biases
from tests.modeling.adapters.own import test_copies as copies
from tests.modeling.adapters.own import test_token_rows as rows
from tests.modeling.adapters.passes import assert_nan_stays, assert_same_tensors, snapshot


class Group(NamedTuple):
    """Tasks that train together.

    Attributes:
        configs: of the tasks, one of plain LoRA among them.
        base: makes the backbone.
        poisoned: by task, the part of the names of parameters that are NaN in the test of isolation.
        but: ends of names whose gradients are zero except for rounding.
    """

    configs: Mapping[str, LoraConfig]
    base: Callable[[], Any]
    poisoned: Mapping[str, str]
    but: tuple[str, ...] = ()


GROUPS = {
    "rows": Group(rows.CONFIGS, tiny_llama, {"listed": "trainable_tokens"}),
    "rows of a tied embedding": Group(rows.CONFIGS, tied_llama, {"listed": "trainable_tokens"}),
    # A bias that all keys share does not move attention.
    "biases": Group(biases.CONFIGS, tiny_gpt2, {"all": "bias"}, ("attn.c_attn.bias", "attn.c_attn.base_layer.bias")),
    "copies": Group(copies.CONFIGS, tiny_llama, {"most": "modules_to_save"}),
    "steps of rows": Group(steps.CONFIGS, tiny_llama, dict.fromkeys(("dora", "initial", "biased", "blocks"), "")),
}
EVERY_GROUP = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())


@pytest.fixture(scope="module", params=GROUPS)
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Group, Together]:
    group = GROUPS[request.param]
    return group, together(group.configs, group.base, tmp_path_factory.mktemp("mixed"))


def test_each_task_goes_as_plain_peft_alone_and_is_saved_as_there(
    mixed: tuple[Group, Together], tmp_path: Path
) -> None:
    group, ran = mixed
    model = ran.run.trainer.model
    there = Together(ran.run, ran.tasks, ran.base, tmp_path, {})
    for name, config in group.configs.items():
        side = ran.assert_as_alone(name, but=group.but)
        side.model.save_pretrained(tmp_path / name)
        assert ran.saved(name).keys() == there.saved(name).keys()
        assert model.peft_config[model.adapter_of(name)].bias == config.bias


def test_no_task_changes_the_backbone(mixed: tuple[Group, Together]) -> None:
    mixed[1].assert_backbone_unchanged()


def test_a_folder_of_them_is_loaded_again(mixed: tuple[Group, Together]) -> None:
    group, ran = mixed
    again = MultiTaskPeftModel.from_pretrained(group.base(), ran.folder, verify=False)
    for name, config in group.configs.items():
        # What begins from the backbone's weights is saved as the LoRA into which PEFT converts it.
        if config.init_lora_weights is True:
            assert_same_tensors(again.task_parameters(name), ran.run.weights(name), name)


@EVERY_GROUP
def test_nan_in_what_one_task_trains_reaches_no_neighbour(group: Group) -> None:
    model = MultiTaskPeftModel(group.base(), group.configs, verify=False)
    # Rows that have tokens with trained rows, too.
    batch = ChunkPackingCollator()([{"task": name, "input_ids": [4, 7, *rows.TOKENS, 9]} for name in group.configs])
    for spoilt, part in group.poisoned.items():
        assert_nan_stays(model, batch, spoilt, part)


@EVERY_GROUP
def test_a_model_of_such_tasks_gives_its_backbone_back(group: Group) -> None:
    backbone = group.base()
    before = snapshot(backbone.state_dict())
    model = MultiTaskPeftModel(backbone, group.configs, verify=False)
    model.remove_tasks([next(iter(group.configs))])
    assert_same_tensors(model.unload().state_dict(), before)
