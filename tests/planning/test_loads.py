"""What the planner reads about a run's tasks, and how far down a backward goes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from peft_mux import Task
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.planning.task_loads import task_load, whole_shapes
from peft_mux.scheduler.costs.loads import TaskLoad
from tests.invariants.mux_lab import make_trainer, tiny_llama

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
    if reference and not batch:  # the head is computed for each word of both answers
        words = sum(len(row["chosen_ids"] + row["rejected_ids"]) for row in rows)
        assert load.num_targets == pytest.approx(words, abs=2)


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
        (["layers.5.mlp.experts.2.up_proj.lora_A.weight"], 0),
        (["layers.5.self_attn.q_proj.lora_A.weight", "score.weight"], 0),
        ([], 0),
    ],
)
def test_the_lowest_layer_is_read_off_names_and_unknown_if_weights_lie_elsewhere(names: list[str], lowest: int) -> None:
    assert lowest_layer(f"base_model.model.model.{name}" for name in names) == lowest


# ----------------------------------------------------- against counted operations
