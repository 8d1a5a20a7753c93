"""A head that gives the logits of its first words only, for a while."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from peft_mux.modeling.backbone.probe import truncated_head

CONFIG = LlamaConfig(
    vocab_size=300, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=1, pad_token_id=0
)


def backbone(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_truncated_head_gives_the_first_logits_and_is_whole_again_afterwards(tied: bool) -> None:
    model = backbone(tied=tied)
    ids, weight = torch.tensor([[299, 1, 150]]), model.lm_head.weight
    whole = model(ids).logits
    with truncated_head(model, 7):
        torch.testing.assert_close(model(ids).logits, whole[..., :7])
    assert model.lm_head.weight is weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model(ids).logits, whole)


def test_a_truncated_head_is_whole_again_after_an_error() -> None:
    model = backbone()
    weight = model.lm_head.weight
    with pytest.raises(RuntimeError, match="of the block"), truncated_head(model, 7):
        raise RuntimeError("of the block")
    assert model.lm_head.weight is weight


class OwnHead(nn.Linear):
    """Stands for layers that only look like a linear one, such as quantised ones."""


@torch.no_grad()
def test_short_heads_custom_heads_and_models_without_a_head_are_not_changed() -> None:
    short, own = backbone(), backbone()
    own.lm_head = OwnHead(16, 300, bias=False)
    ids = torch.tensor([[1, 2]])
    with truncated_head(short, 300), truncated_head(own, 7):
        assert short(ids).logits.shape[-1] == own(ids).logits.shape[-1] == 300
    classifier = AutoModelForSequenceClassification.from_config(CONFIG)
    with truncated_head(classifier, 1):
        assert classifier(ids).logits.shape[-1] == 2
