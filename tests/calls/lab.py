"""Three models of unequal ranks and targets on a tiny backbone, their losses, and rows for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig

from peft_mux import AdamSettings, Call, CallResult, Calls, Example
from peft_mux.modeling.objectives.objective import TokenOutputs
from tests.modeling.adapters.passes import perturbed
from tests.modeling.backbones import LANGUAGE_MODELS, VOCABULARY, drawn

CONFIGS = {
    "a": LoraConfig(r=4, lora_alpha=32, target_modules="all-linear"),
    "b": LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "up_proj", "lm_head"]),
    "c": LoraConfig(r=9, lora_alpha=16, use_rslora=True, target_modules=["down_proj"]),
}
SETTINGS = {
    "a": AdamSettings(1e-2),
    "b": AdamSettings(1e-3, max_grad_norm=0.5),
    "c": AdamSettings(1e-2, beta1=0.8, weight_decay=0.1),
}


def door(backbone: str = "Llama", names: Sequence[str] = ("a", "b", "c"), **sizes: int) -> Calls:
    """Return a door with models whose adapters already do something."""
    calls = Calls(drawn(LANGUAGE_MODELS[backbone][0]), **sizes)
    for name in names:
        calls.open(name, CONFIGS[name], seed=1)
        perturbed(calls.model.task_parameters(name), ord(name))
    return calls


def example(rng: np.random.Generator, length: int, several: int = 0, prefix: Sequence[int] = ()) -> Example:
    """Return a row of random tokens, targets and columns, with `several` targets a token if not 0."""
    tokens = np.asarray([*prefix, *rng.integers(0, VOCABULARY, length)])
    shape = (len(tokens), several) if several else len(tokens)
    columns = {
        "weights": rng.normal(size=shape),
        "logprobs": -rng.random(shape) * 5,
        "advantages": rng.normal(size=shape),
    }
    columns["weights"].flat[1:2] = 0.0
    return Example(tokens, rng.integers(0, VOCABULARY, shape), columns)


def logprobs(outputs: TokenOutputs) -> torch.Tensor:
    return outputs.logprobs_M if outputs.word_logprobs_MK is None else outputs.word_logprobs_MK


def cross_entropy(outputs: TokenOutputs) -> torch.Tensor:
    return -(logprobs(outputs) * outputs.columns["weights"]).sum()


def ppo(outputs: TokenOutputs) -> torch.Tensor:
    ratios, advantages = (logprobs(outputs) - outputs.columns["logprobs"]).exp(), outputs.columns["advantages"]
    return -torch.minimum(ratios * advantages, ratios.clamp(0.8, 1.2) * advantages).sum()


def cispo(outputs: TokenOutputs) -> torch.Tensor:
    ratios = (logprobs(outputs) - outputs.columns["logprobs"]).exp().detach().clamp(0, 4)
    return -(ratios * outputs.columns["advantages"] * logprobs(outputs)).sum()


LOSSES = {"a": cross_entropy, "b": ppo, "c": cispo}


def call(name: str, *examples: Example, **changed: Any) -> Call:
    return Call(name, examples, **{"loss": LOSSES[name], **changed})


def bits(calls: Calls, name: str) -> list[bytes]:
    """Return weights and gradients of a model, to the bit."""
    parameters = calls.model.task_parameters(name).values()
    return [tensor.detach().numpy().tobytes() for own in parameters for tensor in (own, own.grad)]


def plain(result: Any) -> Any:
    """Return a result in a form that can be compared."""
    if isinstance(result, CallResult):
        return result.loss, [(own.shape, own.dtype.name, own.tobytes()) for own in result.logprobs]
    return result
