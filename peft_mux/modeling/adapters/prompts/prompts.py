"""`Prompts`: runs the prompt encoders of one model, once a pass and task, and says where their results belong.

Shape letters: T tokens, V virtual tokens of a prompt, D hidden features, G key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from types import MethodType
from typing import Any

import numpy as np
import torch
from peft import CPTConfig, PeftConfig
from torch import nn
from torch.nn import functional

from peft_mux.data.batch import MuxBatch
from peft_mux.data.rows.virtual_tokens import virtual_tokens_of_sequences
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.prompts.encoders import encoders_of, prompt_kind_of
from peft_mux.modeling.attention.prefixes import Prefixes
from peft_mux.modeling.attention.prompt_pass import PromptPass
from peft_mux.modeling.attention.rectangles import copied_to

_PROJECTION_ROUNDING = 1e-6
"""How far over its bound, relative to it, the norm of a projected row may lie."""


class Prompts:
    """The prompts of one model.

    Attributes:
        is_off: whether passes leave prompts out, as where all adapters are switched off.
    """

    def __init__(self) -> None:
        """Begin with prompts on."""
        self.is_off = False

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Leave prompts out of the passes in the `with` block."""
        before, self.is_off = self.is_off, True
        try:
            yield
        finally:
            self.is_off = before

    def of_pass(self, model: Any, batch: MuxBatch) -> PromptPass | None:
        """Return what prompts bring into a pass; `None` where no task of it has one.

        Args:
            model: the `MultiTaskPeftModel` whose prompts these are.
            batch: the micro-batch, on the model's device.

        Raises:
            ConfigError: if rows do not begin with the virtual tokens that their task's prompt has.
        """
        encoders = {} if self.is_off else encoders_of(model)
        if not encoders and not batch.virtual_tokens:
            return None
        virtual: dict[int, torch.Tensor] = {}
        prefixes: dict[int, torch.Tensor] = {}
        for number, name in enumerate(batch.task_names):
            adapter = model.adapters[name]
            config = model.peft_config[adapter] if adapter in encoders else None
            _check_rows(batch, number, config)
            if config is None:
                continue
            encoded_VE = encode(encoders[adapter], config, batch.input_ids.device)
            if _num_virtual_tokens(config):
                virtual[number] = encoded_VE
            else:
                prefixes[number] = _keys_and_values(encoded_VE, config, model.backbone.dtype)
        if not virtual and not prefixes:
            return None
        rows, embeddings = _virtual_rows(batch, virtual)
        return PromptPass(rows, embeddings, _prefixes(batch, prefixes), _position_shift(batch, prefixes))


def virtual_labels(configs: Mapping[str, PeftConfig]) -> dict[str, tuple[int, ...]]:
    """Return the label of each virtual token that rows of a task begin with; only of tasks with such a prompt.

    Args:
        configs: the configuration of each task's adapter, by name of the task.
    """
    kinds = {name: prompt_kind_of(config) for name, config in configs.items()}
    labels = {name: kind.virtual_labels(configs[name]) for name, kind in kinds.items() if kind is not None}
    return {name: of_task for name, of_task in labels.items() if of_task}


def encode(encoder: nn.Module, config: Any, device: torch.device) -> torch.Tensor:
    """Return what a prompt's encoder makes, `[V, D]`, or `[V, 2 * layers * G * C]` for keys and values.

    Args:
        encoder: PEFT's encoder of the prompt.
        config: the prompt's configuration, as PEFT completed it.
        device: where the result is needed.
    """
    tokens = torch.arange(config.num_virtual_tokens, device=device)[None]
    if hasattr(config, "num_tasks"):
        return encoder(tokens, torch.zeros(1, dtype=torch.int64, device=device))[0]
    return encoder(tokens)[0]


def adopt_encoder(encoder: Any, config: PeftConfig) -> None:
    """Let an encoder leave its parameters where they are: CPT's gives them other memory whenever it projects them."""
    if not isinstance(config, CPTConfig):
        return

    # A bound method, as a copy of the model has to have that of its own encoder.
    encoder.forward = MethodType(_projected, encoder)


def _projected(encoder: Any, indices: torch.Tensor) -> torch.Tensor:
    weight, words = encoder.delta_embedding.weight, encoder.embedding(indices).detach()
    # A description of a model has no numbers to project.
    projected = weight if weight.is_meta else _projection(encoder)
    if not torch.is_grad_enabled():
        # Evaluating or saving changes nothing of what is trained.
        return words + functional.embedding(indices, projected)
    with torch.no_grad():
        weight.copy_(projected)
    return words + encoder.delta_embedding(indices)


@torch.no_grad()
def project_prompts(model: Any, tasks: Iterable[str]) -> None:
    """Project what CPT trains, as each of its forwards does: also where a process has no rows of a task in a step.

    Args:
        model: the `MultiTaskPeftModel` of this process, with its weights.
        tasks: names of the tasks that take a step, of other types too.
    """
    encoders = encoders_of(model)
    for adapter in [model.adapters[name] for name in tasks] if encoders else ():
        if adapter in encoders and isinstance(model.peft_config[adapter], CPTConfig):
            encoder: Any = encoders[adapter]
            encoder.delta_embedding.weight.copy_(_projection(encoder))


@torch.no_grad()
def _projection(encoder: Any) -> torch.Tensor:
    """Return CPT's projection of its changes; what is within its bounds but for rounding stays, however often it is."""
    weight = encoder.delta_embedding.weight
    bounds = encoder.get_epsilon().to(weight.device)
    is_within = weight.norm(p=2, dim=1) <= bounds * (1 + _PROJECTION_ROUNDING)
    return torch.where(is_within[:, None], weight, encoder.get_projection())


def _num_virtual_tokens(config: PeftConfig | None) -> int:
    kind = None if config is None else prompt_kind_of(config)
    return 0 if kind is None else len(kind.virtual_labels(config))


def _check_rows(batch: MuxBatch, number: int, config: PeftConfig | None) -> None:
    got, wanted = batch.virtual_tokens[number] if batch.virtual_tokens else 0, _num_virtual_tokens(config)
    if got != wanted:
        name = batch.task_names[number]
        raise ConfigError(
            f'task "{name}": got rows with {got} virtual tokens; allowed: {wanted}, as many as its prompt has in this'
            " pass. Collate with ChunkPackingCollator(virtual_labels=model.virtual_labels), or without them where"
            " adapters are off."
        )


def _virtual_rows(
    batch: MuxBatch, prompts: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows of the stream that are virtual tokens, and what stands in them."""
    if not prompts:
        return None, None
    first_rows = list(accumulate(batch.sequence_lengths, initial=0))
    counts = virtual_tokens_of_sequences(batch)
    rows: list[np.ndarray] = []
    values: list[torch.Tensor] = []
    for number, prompt_VD in prompts.items():
        sequences = range(batch.sequence_offsets[number], batch.sequence_offsets[number + 1])
        whole = [index for index in sequences if counts[index] == len(prompt_VD)]
        # Expanded, so that the gradient of a prompt is one sum over its sequences, in their order.
        values.append(prompt_VD.expand(len(whole), -1, -1).flatten(0, 1))
        rows += [np.arange(first_rows[index], first_rows[index] + counts[index]) for index in whole]
        # Where a long row was cut amid its virtual tokens.
        for index in sequences:
            if 0 < counts[index] < len(prompt_VD):
                start = batch.parts[index].start if batch.parts else 0
                values.append(prompt_VD[start : start + counts[index]])
                rows.append(np.arange(first_rows[index], first_rows[index] + counts[index]))
    if not rows:
        return None, None
    device = batch.input_ids.device
    return copied_to(torch.from_numpy(np.concatenate(rows)), device), torch.cat(values)


def _keys_and_values(encoded_VE: torch.Tensor, config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return `[2 * layers, G, V, C]`, in the dtype of the weights as PEFT has it."""
    heads = config.num_attention_heads
    shape = (config.num_virtual_tokens, 2 * config.num_layers, heads, config.token_dim // heads)
    return encoded_VE.to(dtype).view(shape).permute(1, 2, 0, 3)


def _prefixes(batch: MuxBatch, prefixes: Mapping[int, torch.Tensor]) -> Prefixes | None:
    if not prefixes:
        return None
    places = {number: place for place, number in enumerate(prefixes)}
    owners = [places.get(number) for number, _ in _tasks_of_sequences(batch)]
    return Prefixes(owners, list(prefixes.values()))


def _position_shift(batch: MuxBatch, prefixes: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """Return int64 `[1, T]`: tokens come after the keys of their prefix."""
    if not prefixes:
        return None
    lengths = [prefixes[number].shape[2] if number in prefixes else 0 for number, _ in _tasks_of_sequences(batch)]
    shift = np.repeat(np.asarray(lengths, dtype=np.int64), batch.sequence_lengths)
    return copied_to(torch.from_numpy(shift), batch.input_ids.device)[None]


def _tasks_of_sequences(batch: MuxBatch) -> Iterator[tuple[int, int]]:
    """Yield the number of the task of each sequence, and that of the sequence."""
    for number in range(len(batch.task_names)):
        for index in range(batch.sequence_offsets[number], batch.sequence_offsets[number + 1]):
            yield number, index
