"""The last layer at the rows that are read, in a stage of a pipeline."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.modeling.last_layer import LastLayerForward
from tests.invariants.mux_lab import tiny_llama


@pytest.mark.parametrize("stage", [0, 1])
def test_the_stage_that_has_the_last_layer_proves_it_and_computes_the_rows_that_are_read(stage: int) -> None:
    config = LoraConfig(r=3, target_modules="all-linear")
    whole = MultiTaskPeftModel(tiny_llama(), {"a": config}, verify=False)
    part = StageModel(whole, StageLayout.of(2, 2), stage)
    part.prove_last_layer()
    if stage == 0:
        assert part.model.last_layer.reason is not None
        return
    assert part.model.last_layer.reason is None
    ids = list(range(1, 12))
    batch = ChunkPackingCollator()([{"task": "a", "input_ids": ids, "labels": [-100] * 9 + ids[9:]}])
    hidden_TD = torch.randn(len(ids), part.hidden_size)
    forward = part.model.backbone.model.layers[-1].forward
    assert isinstance(forward, LastLayerForward)
    losses = []
    for is_wanted in (True, False):
        part.model.last_layer.is_wanted, forward.was_narrowed = is_wanted, False
        part.model.prepare_pass(["a"])
        losses.append(part.forward(1, batch, hidden_TD).output)
        assert forward.was_narrowed == is_wanted
    assert torch.allclose(*losses, rtol=1e-6)
