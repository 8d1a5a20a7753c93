"""The properties that are read from a backbone before training, and the probe that finds all other problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import GPT2Config, OPTConfig, RobertaConfig

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone import probe
from peft_mux.modeling.backbone.digests import fingerprint, weight_digests
from peft_mux.modeling.backbone.probe import max_positions, truncated_head
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.lab import config_of
from tests.modeling.backbones import backbone_of, classifier_of


def llama(**changed: Any) -> Any:
    torch.manual_seed(0)
    return backbone_of("llama", initializer_range=0.15, **changed)()


def adapted(model: Any, **options: Any) -> MultiTaskPeftModel:
    """Return the backbone with one adapter, probed by default."""
    return MultiTaskPeftModel(model, {"a": LoraConfig(r=2, target_modules=["q_proj"])}, **options)


# ---------------------------------------------------------------------- probe


class Shifted(nn.Module):
    """Mixes each token with the one before it, whichever sequence that belongs to."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        return self.inner(x + before)


class BlindAttention(nn.Module):
    """Lets no token see any other, and asks no attention function."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return hidden_states, None


class Noisy(nn.Module):
    """Draws from torch's global generator in training."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(x), 0.1, self.training)


@pytest.mark.parametrize(("num_layers", "layer"), [(2, 1), (6, 4)])
def test_a_model_that_mixes_tokens_in_one_layer_is_caught_by_its_logits(num_layers: int, layer: int) -> None:
    model = llama(num_hidden_layers=num_layers)
    model.model.layers[layer].mlp = Shifted(model.model.layers[layer].mlp)
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM cannot be packed: its logits differ by "):
        adapted(model)


def test_a_model_whose_attention_goes_another_way_is_caught() -> None:
    model = llama()
    for layer in model.model.layers:
        layer.self_attn = BlindAttention()
    config = LoraConfig(r=2, target_modules=["up_proj"])
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .*attention never reached the packed attention"):
        MultiTaskPeftModel(model, {"a": config})


def test_a_model_that_draws_from_the_global_generator_in_training_is_caught() -> None:
    model = llama()
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM .*draws from the global random generator"):
        adapted(model)


def test_a_model_with_logits_that_are_no_numbers_is_caught() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(UnsupportedModelError, match=r"its logits differ by nan"):
        adapted(model)


@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_mode_random_numbers_and_gradients_as_they_were(training: bool) -> None:
    model = adapted(llama(), verify=False).train(training)
    torch.manual_seed(4)
    state = torch.get_rng_state()
    model.verify()
    assert model.training is training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.stream.is_idle


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Return the precision of each probe that runs."""
    ran: list[torch.dtype] = []

    def noted(model: Any) -> None:
        ran.append(probe.path_of(model).dtype)

    monkeypatch.setattr("peft_mux.modeling.model.check_packing", noted)
    return ran


def test_packing_is_proven_once_for_each_precision(probes: list[torch.dtype]) -> None:
    model = adapted(llama())
    model.verify_once()
    assert probes == [torch.float32]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.verify_once()
        model.verify_once()
    assert probes == [torch.float32, torch.bfloat16]


def test_a_deferred_check_runs_later_and_a_refused_one_never(probes: list[torch.dtype]) -> None:
    later, never = adapted(llama(), verify=None), adapted(llama(), verify=False)
    never.verify_once()
    assert probes == []
    later.verify_once()
    assert probes == [torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, None])
def test_a_sound_model_passes_in_every_precision(dtype: torch.dtype | None) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
        assert adapted(llama().to(dtype)).tasks == ("a",)


# ------------------------------------------------------------- what is read off


def test_the_longest_sequence_is_that_of_the_positions() -> None:
    assert max_positions(config_of("llama")) == 64
    assert max_positions(GPT2Config(n_positions=48)) == 48
    assert max_positions(OPTConfig(max_position_embeddings=80)) == 80
    # RoBERTa's first token has the position after the padding id.
    assert max_positions(RobertaConfig(max_position_embeddings=514, pad_token_id=1)) == 512


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, None),
        ({"rope_type": "linear", "factor": 2.0}, None),
        ({"rope_type": "dynamic", "factor": 2.0}, 64),
        ({"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}, 16),
    ],
    ids=["plain", "linear", "dynamic", "dynamic with an original length"],
)
def test_scaling_that_looks_at_the_longest_row_limits_rows_to_where_it_does_not(
    rope: dict[str, Any], limit: int | None
) -> None:
    config = config_of("llama")
    config.rope_parameters = {"rope_theta": 10_000.0, **rope}
    assert max_positions(config) == (limit or 64)


def backbone_fingerprint(backbone: Any) -> str:
    return fingerprint(type(backbone).__name__, weight_digests(backbone))


def test_the_fingerprint_of_a_backbone_sees_its_weights_its_type_and_its_size_but_not_adapters() -> None:
    model = llama()
    before = backbone_fingerprint(model)
    adapted(model, verify=False)
    assert backbone_fingerprint(model) == before == backbone_fingerprint(llama())
    others = [backbone_fingerprint(other) for other in (llama().bfloat16(), llama(num_hidden_layers=1))]
    assert len({before, *others}) == 3


@pytest.mark.parametrize("place", ["model.layers.1.mlp.up_proj", "model.embed_tokens", "lm_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_fingerprint_of_a_backbone_sees_one_changed_value_and_rows_that_changed_places(
    dtype: torch.dtype, place: str
) -> None:
    model = llama(vocab_size=601, intermediate_size=601).to(dtype)
    weight = model.get_submodule(place).weight
    prints = [backbone_fingerprint(model)]
    for row, column in ((0, 0), (300, 7), (600, 31)):
        weight[row, column] += 0.5
        prints.append(backbone_fingerprint(model))
    for one, other in ((0, 1), (0, 512)):
        weight[[one, other]] = weight[[other, one]]
        prints.append(backbone_fingerprint(model))
    assert len(set(prints)) == len(prints)


# ------------------------------------ a head that gives the logits of its first words only, for a while


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_a_truncated_head_gives_the_first_logits_and_is_whole_again_afterwards(tied: bool) -> None:
    model = llama(tie_word_embeddings=tied).eval()
    ids, weight = torch.tensor([[60, 1, 30]]), model.lm_head.weight
    whole = model(ids).logits
    with truncated_head(model, 7):
        torch.testing.assert_close(model(ids).logits, whole[..., :7])
    with pytest.raises(RuntimeError, match="of the block"), truncated_head(model, 7):
        raise RuntimeError("of the block")
    assert model.lm_head.weight is weight
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.equal(model(ids).logits, whole)


class OwnHead(nn.Linear):
    """Stands for layers that only look like a linear one, such as quantised ones."""


@torch.no_grad()
def test_short_heads_custom_heads_and_models_without_a_head_are_not_changed() -> None:
    short, own = llama(), llama()
    own.lm_head = OwnHead(32, 61, bias=False)
    ids = torch.tensor([[1, 2]])
    with truncated_head(short, 61), truncated_head(own, 7):
        assert short(ids).logits.shape[-1] == own(ids).logits.shape[-1] == 61
    classifier = classifier_of("llama", num_labels=2)()
    with truncated_head(classifier, 1):
        assert classifier(ids).logits.shape[-1] == 2
