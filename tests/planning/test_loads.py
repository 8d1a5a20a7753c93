"""What the planner reads about a run's tasks, and how far down a backward goes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from peft_mux import Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import rows_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.planning.loads import task_load, whole_shapes
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.profile import AdapterTable, Curve, Profile
from tests.invariants.mux_lab import make_trainer, tiny_llama
from tests.planning.cases import llama

PAIRS = [
    {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6, 7], "rejected_ids": [8, 9]},
    {"prompt_ids": [3, 2], "chosen_ids": [4, 5], "rejected_ids": [8, 9, 10]},
]
JUDGED = [{"prompt_ids": [1, 2, 3], "completion_ids": [4, 5, 6, 7], "label": label} for label in (True, False)]
WITH_REFERENCES = [{**row, "ref_chosen_logps": -3.0, "ref_rejected_logps": -4.0} for row in PAIRS]
PLAIN = [{"input_ids": [1, 2, 3, 4]}] * 2
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load_of(rows: list[dict[str, Any]], folder: Path, *, layers: list[int] | None = None, **options: Any) -> TaskLoad:
    """Return what the planner reads about a task with these rows."""
    config = LoraConfig(r=4, target_modules=LINEAR, layers_to_transform=layers, task_type="CAUSAL_LM")
    task = Task(name="one", train_dataset=rows, peft_config=config, train_batch_size=2, max_steps=1, **options)
    trainer = make_trainer([task], folder, model=tiny_llama())
    (run,) = trainer.table
    return task_load(run, whole_shapes(trainer.model, run.name), num_layers=2)


@pytest.mark.parametrize(
    ("rows", "options", "reference", "batch"),
    [
        (PLAIN, {}, False, False),
        (PAIRS, {"objective": "dpo"}, True, False),
        (WITH_REFERENCES, {"objective": "dpo"}, False, False),
        (PAIRS, {"objective": "orpo"}, False, False),
        (JUDGED, {"objective": "kto"}, True, True),
    ],
    ids=["sft", "dpo", "dpo with references", "orpo", "kto"],
)
def test_forwards_before_the_passes_of_a_step_are_known(
    rows: list[dict[str, Any]], options: dict[str, Any], reference: bool, batch: bool, tmp_path: Path
) -> None:
    load = load_of(rows, tmp_path, **options)
    assert (load.has_reference_forward, load.has_batch_forward) == (reference, batch)


def test_the_head_of_a_pair_is_computed_for_each_word_of_both(tmp_path: Path) -> None:
    load = load_of(PAIRS, tmp_path, objective="dpo")
    assert load.num_targets == pytest.approx(sum(len(row["chosen_ids"] + row["rejected_ids"]) for row in PAIRS), abs=2)


@pytest.mark.parametrize("lowest", [0, 1])
def test_a_load_has_the_adapters_of_a_layer_that_has_them(lowest: int, tmp_path: Path) -> None:
    load = load_of(PLAIN, tmp_path, layers=list(range(lowest, 2)))
    assert (load.lowest_layer, len(load.adapters)) == (lowest, len(LINEAR))


@pytest.mark.parametrize(
    ("names", "lowest"),
    [
        (["layers.5.self_attn.q_proj.lora_A.weight", "layers.7.mlp.up_proj.lora_B.weight"], 5),
        (["h.3.attn.c_attn.lora_A.weight", "h.3.attn.c_attn.lora_magnitude_vector.weight"], 3),
        (["layers.5.self_attn.q_proj.lora_A.weight", "embed_tokens.lora_embedding_A"], 0),
        (["layers.5.self_attn.q_proj.lora_A.weight", "lm_head.lora_A.weight"], 0),
        (["layers.5.mlp.experts.lora_A.weight"], 0),
        (["layers.5.mlp.experts.2.up_proj.lora_A.weight"], 0),
        (["layers.5.self_attn.q_proj.lora_A.weight", "score.weight"], 0),
        ([], 0),
    ],
)
def test_the_lowest_layer_is_read_off_names_and_unknown_if_weights_lie_elsewhere(names: list[str], lowest: int) -> None:
    assert lowest_layer(f"base_model.model.model.{name}" for name in names) == lowest


# ----------------------------------------------------- against counted operations


def batch_of(names: tuple[str, ...]) -> MuxBatch:
    """Return two rows of 40 tokens of each task, all but the first of which are predicted."""
    rng = np.random.default_rng(0)
    rows = [{"task": name, "input_ids": rng.integers(1, 90, size=40).tolist()} for name in names for _ in range(2)]
    return ChunkPackingCollator()([{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows])


def added_product(own: Any, left: Any, right: Any, **others: Any) -> int:
    """Return the operations of a product that is added in place, of which PyTorch knows none."""
    return 2 * left[0] * left[1] * right[1]


def operations(num_layers: int, lowest: dict[str, int]) -> int:
    """Return the operations of the products of a pass, forward and backward, of tasks with these lowest layers."""
    # Rank 1 with products of width 256: adapters are next to nothing.
    configs = {
        name: LoraConfig(r=1, target_modules=LINEAR, layers_to_transform=list(range(layer, num_layers)))
        for name, layer in lowest.items()
    }
    model = MultiTaskPeftModel(llama(num_layers, 256), configs).train()
    model.last_layer.is_wanted = False
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product}) as counter:
        model(batch_of(tuple(lowest))).losses.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("lowest", [{"a": 2, "b": 3}, {"a": 3}], ids=str)
def test_a_backward_that_stops_early_is_predicted_to_skip_layers_below_all_adapters(lowest: dict[str, int]) -> None:
    flat, nothing = Curve((1e-9, 1.0), (1e-9, 1.0)), Curve((1.0,), (0.0,))
    profile = Profile(
        device="cpu that takes a second for a token and layer",
        dtype="float32",
        model="small",
        layer=flat,
        attention=nothing,
        adapter=AdapterTable.constant(0.0),
        head=nothing,
        embedding=nothing,
        optimizer=nothing,
    )
    backbone, batch = llama(4, 256), batch_of(tuple(lowest))
    shape = model_shape(backbone, backbone.config, dtype=torch.float32, activation_dtype=torch.float32)
    cost, everywhere = CostModel(profile, shape), dict.fromkeys(lowest, 0)

    def predicted_s(layers: dict[str, int]) -> float:
        loads = [TaskLoad(o.task, o.lengths, o.num_targets, (), 1, lowest_layer=layers[o.task]) for o in rows_of(batch)]
        return float(cost.passes_s(loads, [whole_pass(loads)]).sum())

    layer = operations(4, everywhere) - operations(3, everywhere)
    spared = (operations(4, everywhere) - operations(4, lowest)) / layer
    predicted = (predicted_s(everywhere) - predicted_s(lowest)) / batch.num_tokens
    # Rows of a task whose adapters are all above another one's skip a little more, which is not counted.
    assert predicted <= spared * 1.03
    assert predicted == pytest.approx(spared, rel=0.03 if len(lowest) == 1 else 0.4)
