"""The losses of the service against the formulas of the documentation in plain torch, and inputs that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from peft_mux.errors import ConfigError, DataError
from peft_mux.serve.losses import LOSSES, example_of, loss_of
from peft_mux.serve.wire import Datum

COUNTS = (3, 4)


def outputs(k: int = 0) -> Any:
    """Return log-probabilities as a leaf and random columns for two sequences whose prompts have no advantage."""
    torch.manual_seed(0)
    shape = (7, k) if k else (7,)
    own = SimpleNamespace(word_logprobs_MK=None, sequence_counts=COUNTS)
    logprobs = (-torch.rand(shape).double()).requires_grad_()
    setattr(own, "word_logprobs_MK" if k else "logprobs_M", logprobs)
    names = ("weights", "logprobs", "advantages")
    own.columns = {name: torch.randn(shape).double() for name in names}
    own.columns["advantages"][[0, 3]] = 0.0
    own.columns["sequence_ratio_mask"] = (own.columns["advantages"] != 0).double()
    return own, logprobs


def expected(name: str, p: torch.Tensor, c: dict[str, torch.Tensor], low: float, high: float, beta: float) -> Any:
    q, a = c["logprobs"], c["advantages"]
    if name == "cross_entropy":
        return (-p * c["weights"]).sum()
    if name == "importance_sampling":
        return -(torch.exp(p - q) * a).sum()
    if name == "dro":
        return -(p * a - 0.5 * beta * (p - q) ** 2).sum()
    if name == "cispo":
        return -(torch.clamp(torch.exp(p - q), low, high).detach() * p * a).sum()
    ratio = torch.exp(p - q)
    if name == "gspo":
        marked = [c["sequence_ratio_mask"][:3] != 0, c["sequence_ratio_mask"][3:] != 0]
        means = [
            (p.detach() - q)[part][own].mean() for part, own in zip((slice(0, 3), slice(3, 7)), marked, strict=True)
        ]
        ratio = torch.exp(torch.cat([means[0].expand(3), means[1].expand(4)]) + p - p.detach())
    return -torch.min(ratio * a, torch.clamp(ratio, low, high) * a).sum()


@pytest.mark.parametrize(
    ("name", "config", "low", "high", "beta"),
    [
        ("cross_entropy", {}, 0, 0, 0),
        ("importance_sampling", {}, 0, 0, 0),
        ("ppo", {}, 0.8, 1.2, 0),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, 0.9, 1.1, 0),
        ("cispo", {}, 0.0, 4.0, 0),
        ("cispo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, 0.8, 1.2, 0),
        ("dro", {"beta": 0.3}, 0, 0, 0.3),
        ("dro", {}, 0, 0, 0.05),
        ("gspo", {}, 0.8, 1.2, 0),
    ],
)
def test_a_loss_and_its_gradient_are_those_of_the_documentation(
    name: str, config: dict, low: float, high: float, beta: float
) -> None:
    ours, theirs = outputs(), outputs()
    loss = loss_of(name, config)(ours[0])
    wanted = expected(name, theirs[1], theirs[0].columns, low, high, beta)
    loss.backward()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(ours[1].grad, theirs[1].grad)


def test_several_targets_a_token_and_thresholds_of_each_token() -> None:
    own, logprobs = outputs(k=2)
    torch.testing.assert_close(loss_of("cross_entropy", {})(own), (-logprobs * own.columns["weights"]).sum())
    own, _ = outputs()
    whole = loss_of("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})(own)
    own.columns |= {"clip_low_threshold": torch.full((7,), 0.5), "clip_high_threshold": torch.full((7,), 1.5)}
    torch.testing.assert_close(loss_of("ppo", {})(own), whole)


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("stable_reinforce", {}, "Use importance_sampling"),
        ("custom", {"loss_id": "a"}, "Use forward_backward_custom"),
        ("cross_entrpy", {}, 'Did you mean "cross_entropy"'),
        ("ppo", {"beta": 1.0}, "loss_fn_config.beta must be one of clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "loss_fn_config.beta must be left out"),
        ("dro", {"beta": float("nan")}, "loss_fn_config.beta must be a finite number"),
        ("ppo", {"clip_low_threshold": 1.3}, "must be at most clip_high_threshold"),
    ],
)
def test_a_loss_that_is_not_served_and_its_settings_are_refused_by_name(name: str, config: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loss_of(name, config)


IDS, ONES = np.asarray([1, 2, 3]), np.ones(3, np.float32)
RL = {"target_tokens": IDS, "logprobs": ONES, "advantages": ONES}


@pytest.mark.parametrize(
    ("loss", "tokens", "inputs", "words"),
    [
        ("ppo", IDS, {"target_tokens": IDS}, "must have logprobs for ppo, got target_tokens"),
        ("ppo", IDS, RL | {"mask": ONES}, "loss_fn_inputs.mask must be left out with ppo"),
        ("ppo", IDS, RL | {"logprobs": ONES[:2]}, r"logprobs must have the shape of target_tokens, \[3\], got \[2\]"),
        ("ppo", IDS[:2], RL, "as model_input has 2 tokens, got \\[3\\]"),
        ("ppo", IDS, RL | {"advantages": np.float32([1, np.nan, 0])}, "advantages must be finite, got nan at 1"),
        ("ppo", IDS, RL | {"target_tokens": IDS.reshape(3, 1)}, r"must have shape \[3\], "),
        ("cross_entropy", IDS, {"target_tokens": ONES}, "must be of integers, got float32"),
        ("cross_entropy", IDS[:0], {"target_tokens": IDS}, "model_input must have at least one token"),
        ("gspo", IDS, RL | {"sequence_ratio_mask": 0 * ONES}, "must mark at least one token"),
    ],
)
def test_a_row_that_its_loss_cannot_read_is_refused_by_its_input(
    loss: str, tokens: np.ndarray, inputs: dict, words: str
) -> None:
    with pytest.raises(DataError, match=rf"data\[4\].*{words}"):
        example_of(Datum(tokens, inputs), loss, "data[4]")


def test_weights_are_1_by_default_and_the_prompt_has_no_part_in_the_ratio_of_gspo() -> None:
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
    _, _, columns = example_of(Datum(IDS, {"target_tokens": IDS.reshape(3, 1)}), "cross_entropy", "data[0]")
    assert columns["weights"].tolist() == [[1.0]] * 3
    _, _, columns = example_of(Datum(IDS, RL | {"advantages": np.float32([0, 1, -1])}), "gspo", "data[0]")
    assert columns["sequence_ratio_mask"].tolist() == [0, 1, 1]
