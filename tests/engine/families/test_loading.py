"""Stages of every form of backbone, read from a folder: the weights and buffers that cutting the whole model leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from peft_mux.engine.pipeline.stage import StageLayout, StageModel, is_converted, load_stage
from tests.engine.families import family_cases as cases

LAYOUT, SEEDS = StageLayout.of(cases.NUM_LAYERS, 2), {"a": 0, "b": 1}


@pytest.mark.parametrize("kind", ["gemma3_text", "granite", "opt"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_read_has_the_weights_of_one_that_is_cut(kind: str, stage: int, tmp_path: Path) -> None:
    whole = cases.mux_model(kind)
    cases.backbone(kind).save_pretrained(tmp_path)
    read = load_stage(tmp_path, cases.adapters(cases.backbone(kind)), LAYOUT, stage, seeds=SEEDS).model.backbone
    expected = StageModel(whole, LAYOUT, stage).model.backbone.state_dict()
    found = read.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        if "lora_" not in name:
            assert torch.equal(found[name], tensor), name


def test_buffers_that_are_saved_are_read_as_well(tmp_path: Path) -> None:
    backbone = cases.backbone("llama")
    backbone.model.layers[3].register_buffer("balance", torch.arange(3.0))
    backbone.save_pretrained(tmp_path)
    original = type(backbone.model.layers[3]).__init__

    def with_buffer(self: torch.nn.Module, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        self.register_buffer("balance", torch.zeros(3))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(backbone.model.layers[3]), "__init__", with_buffer)
        stage = load_stage(tmp_path, cases.adapters(backbone), LAYOUT, 1, seeds=SEEDS)
    # Layers 0 to 2 have none in the files; theirs stay as they were made.
    assert stage.model.backbone.model.layers[3].balance.tolist() == [0.0, 1.0, 2.0]


def test_folders_whose_tensors_transformers_converts_are_reported(tmp_path: Path) -> None:
    for kind, converts in (("mixtral", True), ("gpt_neox", True), ("phi3", False)):
        backbone = cases.backbone(kind)
        backbone.save_pretrained(tmp_path / kind)
        assert is_converted(tmp_path / kind, backbone) is converts
