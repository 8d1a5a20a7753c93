"""The last layer at the rows that are read: the losses and gradients of all rows, and where it is not done.

`objectives/test_objectives.py` compares every loss with its formula on models that do this.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from peft import LoraConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.lab import last_layer_of
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.passes import assert_nan_stays
from tests.modeling.backbones import LANGUAGE_MODELS, VOCABULARY, filled, multiplexed
from tests.modeling.test_shared_prefixes import assert_near, losses_and_gradients, model_of


def some_rows() -> MuxBatch:
    """Return rows of two tasks with targets at their ends: some have none, one has one, one has only targets."""
    rng, batches = np.random.default_rng(3), []
    for name, shapes in {"a": ((9, 3), (5, 0), (20, 1), (3, 3)), "b": ((17, 4), (1, 0), (12, 0))}.items():
        rows = []
        for number, (length, targets) in enumerate(shapes):
            ids = rng.integers(2, VOCABULARY, length)
            labels = np.where(np.arange(length) < length - targets, IGNORE_INDEX, ids)
            rows.append(TokenSequence(ids, labels, number))
        batches.append(TaskBatch(name, 0, 7, tuple(rows)))
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100_000)
    return batch


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "GPT2", "DeepseekV3", "GptOss"])
def test_losses_and_gradients_are_those_of_all_rows(name: str) -> None:
    model, batch = model_of(name), some_rows()
    model.last_layer.is_wanted = False
    wanted = losses_and_gradients(model, batch)
    model.last_layer.is_wanted = True
    found = losses_and_gradients(model, batch)
    assert last_layer_of(model).was_narrowed
    for mine, theirs in zip(found, wanted, strict=True):
        assert_near(mine, theirs)


def test_nan_of_one_task_reaches_no_other() -> None:
    model = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), ["q_proj", "down_proj"])
    assert_nan_stays(model, some_rows(), "a")


class LooksAround(LlamaDecoderLayer):
    """A layer whose outputs depend on those of other rows behind attention."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out + out.mean(dim=1, keepdim=True)


def test_an_architecture_that_is_not_proven_computes_all_rows_and_says_why() -> None:
    backbone = tiny_llama()
    backbone.model.layers[-1].__class__ = LooksAround
    model = MultiTaskPeftModel(backbone, {"a": LoraConfig(target_modules=["q_proj"])}, verify=False)
    model.last_layer.prove(model)
    assert model.last_layer.reason is not None
    assert re.search("differs by .* of its size", model.last_layer.reason)
    assert model.last_layer.rows(model, some_rows()) is None
