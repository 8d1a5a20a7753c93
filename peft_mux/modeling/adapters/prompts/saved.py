"""Prompts as files: PEFT's own tensors, and what is needed beside them to train on.

PEFT saves of a prompt what its encoder makes (`prompt_embeddings`), and reads no more than that. Where an encoder is
more than that (P-tuning's network, the projection of a prefix, CPT's changes), its parameters are saved in the same
file under their own names, which PEFT passes over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.func import functional_call

from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.prompts.encoders import encoders_of
from peft_mux.modeling.adapters.prompts.kind import PREFIX

EMBEDDINGS = "prompt_embeddings"
"""PEFT's name of what a prompt's encoder makes."""

_TABLE = f"{PREFIX}embedding.weight"
_TRAINED_KEYS = f"{PREFIX}trainable_embedding"
_FACTORS = {f"{PREFIX}{name}": name for name in ("prefix_task_cols", "prefix_task_rows")}
_SAME = ({_TABLE: EMBEDDINGS}, {_TRAINED_KEYS: EMBEDDINGS}, {_TABLE: EMBEDDINGS, **_FACTORS})
"""Prompts whose parameters are what PEFT saves: prompt tuning or a prefix, a cartridge, multitask prompt tuning."""


def prompt_keys(names: Collection[str]) -> dict[str, str]:
    """Return the key under which each parameter of a prompt is found in its file.

    Args:
        names: names of all trained parameters of a prompt, without the adapter id.
    """
    same = next((keys for keys in _SAME if keys.keys() == set(names)), None)
    return same or {name: name for name in names}


def saved_tensor(state: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return a parameter's tensor from a prompt's file; `None` where it is not there.

    Args:
        state: the tensors of the file.
        key: that of `prompt_keys`.
        shape: shape of the parameter; of a cartridge it is the last rows of the tensor, behind those that are frozen.
    """
    found = state.get(key)
    return found[-shape[0] :] if found is not None and key == EMBEDDINGS else found


@torch.no_grad()
def prompt_state(model: Any, adapter: str, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a prompt's file.

    Args:
        model: the model that holds the prompt.
        adapter: internal id of the prompt's task.
        parameters: values of all trained parameters, by name without the adapter id.
    """
    encoder, config = encoders_of(model)[adapter], model.peft_config[adapter]
    keys = prompt_keys(list(parameters))
    if hasattr(config, "num_tasks"):
        return {keys[name]: value for name, value in parameters.items()}
    device = next(encoder.parameters()).device
    held = {name.removeprefix(PREFIX): value.to(device) for name, value in parameters.items()}
    tokens = torch.arange(config.num_virtual_tokens, device=device)[None]
    made = functional_call(encoder, held, (tokens,))[0]
    own = {key: parameters[name] for name, key in keys.items() if key != EMBEDDINGS}
    return {EMBEDDINGS: made, **own}


@torch.no_grad()
def load_prompt(
    model: Any, adapter: str, state: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Write the tensors of a prompt's file into its parameters.

    Args:
        model: the model that holds the prompt.
        adapter: internal id of the prompt's task.
        state: the tensors of the file, as many and of such shapes as `prompt_state` makes.
        parameters: the trained parameters, by name without the adapter id.
    """
    encoder: Any = encoders_of(model)[adapter]
    for name, key in prompt_keys(list(parameters)).items():
        value = saved_tensor(state, key, tuple(parameters[name].shape))
        assert value is not None, "the tensors were compared before"
        parameters[name].copy_(value)
    if getattr(encoder, "frozen_embedding", None) is not None:
        encoder.frozen_embedding.copy_(state[EMBEDDINGS][: encoder.num_frozen_tokens])


def refuse_made_only(found: Collection[str], expected: Collection[str], where: object) -> None:
    """Refuse a file of plain PEFT's whose encoder is not in it, by a message of its own.

    Raises:
        CheckpointError: if nothing but what the encoder made is there.
    """
    if set(found) == {EMBEDDINGS} and set(expected) > {EMBEDDINGS}:
        raise CheckpointError(
            f"{where}: got what the prompt's encoder made ({EMBEDDINGS}) without its parameters; allowed: a folder that"
            " peft_mux wrote, as PEFT saves no more and the encoder cannot be had back. For inference, load it with"
            " PeftModel.from_pretrained."
        )
