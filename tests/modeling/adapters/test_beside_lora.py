"""What tasks train in addition to plain LoRA (rows, biases, copies, steps of rows): as plain PEFT alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import assert_resumes, task, tied_llama, tiny_gpt2, together
from tests.modeling.adapters.lora import test_row_steps as steps
from tests.modeling.adapters.passes import IDS, assert_nan_stays, assert_same_tensors, moved, snapshot
from tests.modeling.adapters.trained_parts import test_biases as biases
from tests.modeling.adapters.trained_parts import test_copies as copies
from tests.modeling.adapters.trained_parts import test_token_rows as rows


class Group(NamedTuple):
    """Tasks that train together.

    Attributes:
        configs: of the tasks, one of plain LoRA among them.
        base: makes the backbone.
        poisoned: by task, the part of the names of parameters that are NaN in the test of isolation.
        merged: tasks that are merged into the backbone.
        but: ends of names whose gradients are zero except for rounding.
    """

    configs: Mapping[str, LoraConfig]
    base: Callable[[], Any]
    poisoned: Mapping[str, str]
    merged: tuple[str, ...] = ()
    but: tuple[str, ...] = ()


TIED_COPIES = {name: copies.CONFIGS[name] for name in ("head", "most", "plain")}
GROUPS = {
    "rows": Group(rows.CONFIGS, tiny_llama, {"listed": "trainable_tokens"}),
    "rows of a tied embedding": Group(rows.TIED_CONFIGS, tied_llama, {"listed": "trainable_tokens"}),
    "biases": Group(biases.CONFIGS, tiny_gpt2, {"all": "bias"}, ("all",), biases.NO_EFFECT),
    "copies": Group(copies.CONFIGS, tiny_llama, {"most": "modules_to_save"}),
    "copies of a tied head": Group(TIED_COPIES, tied_llama, {"head": "modules_to_save"}),
    "steps of rows": Group(
        steps.CONFIGS, tiny_llama, dict.fromkeys(("dora", "initial", "biased", "blocks"), ""), ("dora", "initial")
    ),
    "steps of rows of transposed weights": Group(steps.TRANSPOSED, tiny_gpt2, {"dora": ""}),
}
FAST = ("rows", "biases", "steps of rows")
EVERY_GROUP = pytest.mark.parametrize(
    "group",
    [pytest.param(own, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, own in GROUPS.items()],
)


@EVERY_GROUP
def test_each_task_goes_as_plain_peft_alone_is_saved_as_there_and_loaded_again(group: Group, tmp_path: Path) -> None:
    ran = together(group.configs, group.base, tmp_path)
    again = MultiTaskPeftModel.from_pretrained(group.base(), ran.folder, verify=False)
    for name, config in group.configs.items():
        side = ran.assert_as_alone(name, but=group.but)
        assert ran.saved(name).keys() == ran.saved_alone(side).keys()
        # What begins from the backbone's weights is saved as the LoRA into which PEFT converts it.
        if config.init_lora_weights is True:
            assert_same_tensors(again.task_parameters(name), ran.run.weights(name), name)
    ran.assert_backbone_unchanged()


@EVERY_GROUP
def test_nan_in_what_one_task_trains_reaches_no_neighbour_and_the_backbone_comes_back(group: Group) -> None:
    backbone = group.base()
    before = snapshot(backbone.state_dict())
    model = MultiTaskPeftModel(backbone, group.configs, verify=False)
    # Rows that have tokens with trained rows, too.
    batch = ChunkPackingCollator()([{"task": name, "input_ids": [4, 7, *rows.TOKENS, 9]} for name in group.configs])
    for spoilt, part in group.poisoned.items():
        assert_nan_stays(model, batch, spoilt, part)
    model.remove_tasks([next(iter(group.configs))])
    assert_same_tensors(model.unload().state_dict(), before)


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in GROUPS.values() for name in group.merged])
def test_a_merged_task_computes_what_its_view_did(group: Group, name: str) -> None:
    model = moved(MultiTaskPeftModel(group.base(), group.configs, verify=False)).eval()
    with torch.no_grad():
        wanted = model.task_view(name)(input_ids=IDS).logits
        assert relative(model.task_view(name).merge_and_unload()(input_ids=IDS).logits, wanted) <= 1e-5


@pytest.mark.slow
def test_a_run_of_every_way_resumes_with_the_same_bits(tmp_path: Path) -> None:
    configs = {
        **{name: steps.CONFIGS[name] for name in ("dora", "initial", "plain")},
        "copies": copies.CONFIGS["head"],
        "rows": rows.CONFIGS["named"],
    }
    assert_resumes(
        lambda: [task(name, config, number, max_steps=3) for number, (name, config) in enumerate(configs.items())],
        tmp_path,
    )
