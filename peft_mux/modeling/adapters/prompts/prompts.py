"""Prompts in a model: how they are added and removed, their part of a pass, and their files.

In a packed pass, `prompt_pass` runs the encoder of each task's prompt once and says where its output belongs: in the
rows of virtual tokens, or as keys and values before the first token. Outside of one (views, forwards, `generate`),
PEFT's own model of one prompt runs, on the same modules.

PEFT saves what a prompt's encoder makes (`prompt_embeddings`) and reads no more than that. If an encoder is more than
that (P-tuning's network, the projection of a prefix, CPT's changes), its parameters are saved in a file of their own.

Shape letters: T tokens, V virtual tokens of a prompt, D hidden features, G key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from types import MethodType
from typing import Any

import numpy as np
import torch
from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, CPTConfig, PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import virtual_tokens_of_sequences
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import PREFIX, kind_of
from peft_mux.modeling.adapters.prompts.prompt_kind import encoders_of
from peft_mux.modeling.attention.attention_stream import Prefixes, PromptPass
from peft_mux.modeling.attention.rows import copied_to
from peft_mux.modeling.backbone.modules import classifier_around, head_kind_for, head_kind_of, head_module

# -------------------------------------------------------------- joining a model


class PromptTuner(nn.Module):
    """Holds the backbone where PEFT has the tuner of a model's first type, if that type is a prompt.

    Args:
        model: the backbone.
        peft_config: configurations of all adapters, by internal id.
        adapter: internal id of the first one, which plain forwards use.
    """

    def __init__(self, model: nn.Module, peft_config: dict[str, PeftConfig], adapter: str) -> None:
        super().__init__()
        self.model = model
        self.peft_config = peft_config
        self.active_adapter = adapter

    @property
    def active_adapters(self) -> list[str]:
        """The adapter that plain forwards use, as PEFT asks for it."""
        return [self.active_adapter] if self.active_adapter else []

    def set_adapter(self, adapter: str, inference_mode: bool = False) -> None:
        """Let plain forwards use another adapter."""
        self.active_adapter = adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backbone."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the backbone's attribute of a name, as PEFT's own tuners do."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)


def open_without_tuner(model: Any, backbone: Any, config: PeftConfig, adapter: str) -> None:
    """Initialise a `PeftModel` whose first adapter is a prompt: what PEFT's own constructor does, without a tuner.

    Args:
        model: the `PeftModel`, of which nothing is there yet.
        backbone: the transformers model.
        config: the configuration of the first adapter.
        adapter: internal id of the first adapter.
    """
    nn.Module.__init__(model)
    model.active_adapter, model.peft_type = adapter, config.peft_type
    model.special_peft_forward_args = {"adapter_names", "alora_offsets"}
    # To PEFT, a model has prompts or layers. This one has layers, and prompts inside `Tuners.alone`.
    model._is_prompt_learning, model._peft_config, model._adapters_disabled = False, None, False
    model.base_model = PromptTuner(backbone, {}, adapter)
    if hasattr(backbone.config, "pretraining_tp"):
        backbone.config.pretraining_tp = 1


def add_prompt(model: Any, adapter: str, config: PeftConfig) -> None:
    """Make the encoder of a task's prompt as `get_peft_model` does, inside `Tuners.alone`; PEFT completes `config`."""
    # PEFT refuses prefixes with checkpointing, because its cache would be written twice; here there is no cache.
    modules = model.base_model.modules()
    checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    active = model.active_adapter
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        # PEFT looks at the active adapter for what kind of model this is.
        model.active_adapter = adapter
        model.add_adapter(adapter, config)
    finally:
        model.active_adapter = active
        # PEFT keeps the embedding of words a second time, under a name of its own.
        model._modules.pop("word_embeddings", None)
        for module in checkpointing:
            module.gradient_checkpointing = True


def remove_prompt(model: Any, adapter: str) -> None:
    """Free a prompt, and the head that came with it."""
    model.peft_config.pop(adapter, None)
    encoders = encoders_of(model)
    if adapter in encoders:
        del encoders[adapter], model.prompt_tokens[adapter]  # type: ignore[attr-defined]
    # Heads continue with the adapter that is active now.
    active = [model.active_adapter] if model.active_adapter not in ([], adapter) else None
    for module in list(model.backbone.modules()):
        if isinstance(module, ModulesToSaveWrapper):
            module.delete_adapter(adapter, new_active_adapters=active)


# ------------------------------------------------------------ outside of passes


def plain_call(
    model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, generate: bool = False
) -> Any:
    """Return what plain PEFT returns for one adapter (internal id) of a `MultiTaskPeftModel`, selected before.

    `generate` calls PEFT's `generate` in place of its forward.
    """
    if adapter not in encoders_of(model):
        has_own_head = head_kind_for(model.peft_config[adapter].task_type) != head_kind_of(model.backbone)
        plain = classifier_around(model.backbone) if has_own_head else model.base_model
        return plain.generate(*args, **kwargs) if generate else plain(*args, **kwargs)
    rows = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    if hasattr(model.peft_config[adapter], "num_tasks") and rows is not None:
        # A multitask prompt of one task; callers need not name it.
        kwargs = {"task_ids": rows.new_zeros(len(rows), dtype=torch.int64), **kwargs}
    with model.alone(adapter):
        # PEFT's model of one prompt, with the same modules, and dictionaries of its own, so that nothing that PEFT sets
        # there outlives the call.
        plain_type: Any = MODEL_TYPE_TO_PEFT_MODEL_MAPPING[model.peft_config[adapter].task_type]
        plain = plain_type.__new__(plain_type)
        plain.__dict__.update(model.__dict__)
        for name in ("_modules", "_parameters", "_buffers"):
            plain.__dict__[name] = dict(model.__dict__[name])
        plain.__dict__.pop("forward", None)
        plain.active_adapter = adapter
        plain.word_embeddings = model.base_model.get_input_embeddings()
        if generate:
            plain.base_model_prepare_inputs_for_generation = model.base_model.prepare_inputs_for_generation
        if not head_kind_of(model.base_model).is_shared:
            plain.cls_layer_name, _ = head_module(model.base_model)
        return plain.generate(*args, **kwargs) if generate else plain(*args, **kwargs)


@contextmanager
def without_layers(backbone: nn.Module) -> Iterator[None]:
    """Switch the layers of all PEFT types off, in the `with` block."""
    layers: list[Any] = [m for m in backbone.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


# ------------------------------------------------------------------ in a pass


def prompt_pass(model: Any, batch: MuxBatch) -> PromptPass | None:
    """Return what prompts bring into a pass; `None` if no task of it has one.

    Args:
        model: the `MultiTaskPeftModel`.
        batch: the micro-batch, on the model's device.

    Raises:
        ConfigError: if rows do not begin with the virtual tokens that their task's prompt has.
    """
    encoders = encoders_of(model) if model.has_prompts else {}
    if not encoders and not batch.virtual_tokens:
        return None
    device = batch.input_ids.device
    virtual: dict[int, torch.Tensor] = {}
    prefixes: dict[int, torch.Tensor] = {}
    for number, name in enumerate(batch.task_names):
        adapter = model.adapters[name]
        config = model.peft_config[adapter] if adapter in encoders else None
        wanted = 0 if config is None else len(kind_of(config).virtual_labels(config))
        got = batch.virtual_tokens[number] if batch.virtual_tokens else 0
        if got != wanted:
            raise ConfigError(
                f'task "{name}" must have rows with {wanted} virtual tokens, as many as its prompt has in this '
                f"pass, got {got}. Collate with ChunkPackingCollator(virtual_labels=model.virtual_labels), or "
                "without them where adapters are off."
            )
        if config is None:
            continue
        encoded_VE = encode(encoders[adapter], config, device)
        if wanted:
            virtual[number] = encoded_VE
        else:
            # Keys and values `[2 * layers, G, V, C]`, in the dtype of the weights as in PEFT.
            heads = config.num_attention_heads
            shape = (config.num_virtual_tokens, 2 * config.num_layers, heads, config.token_dim // heads)
            prefixes[number] = encoded_VE.to(model.backbone.dtype).view(shape).permute(1, 2, 0, 3)
    if not virtual and not prefixes:
        return None
    rows, embeddings = _virtual_rows(batch, virtual) if virtual else (None, None)
    if not prefixes:
        return PromptPass(rows, embeddings, None, None)
    counts = np.diff(batch.sequence_offsets)
    tasks = np.repeat(np.arange(len(counts)), counts).tolist()
    places = {number: place for place, number in enumerate(prefixes)}
    # Tokens come after the keys of their prefix.
    lengths = [prefixes[number].shape[2] if number in prefixes else 0 for number in tasks]
    shift = np.repeat(np.asarray(lengths, dtype=np.int64), batch.sequence_lengths)
    owners = [places.get(number) for number in tasks]
    moved = copied_to(torch.from_numpy(shift), device)[None]
    return PromptPass(rows, embeddings, Prefixes(owners, list(prefixes.values())), moved)


def encode(encoder: nn.Module, config: Any, device: torch.device) -> torch.Tensor:
    """Return the output of a prompt's encoder: `[V, D]`, or `[V, 2 * layers * G * C]` for keys and values."""
    tokens = torch.arange(config.num_virtual_tokens, device=device)[None]
    if hasattr(config, "num_tasks"):
        return encoder(tokens, torch.zeros(1, dtype=torch.int64, device=device))[0]
    return encoder(tokens)[0]


def _virtual_rows(
    batch: MuxBatch, prompts: Mapping[int, torch.Tensor]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the rows of the stream that are virtual tokens, and their embeddings."""
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
        # A long row may be cut amid its virtual tokens.
        for index in sequences:
            if 0 < counts[index] < len(prompt_VD):
                start = batch.parts[index].start if batch.parts else 0
                values.append(prompt_VD[start : start + counts[index]])
                rows.append(np.arange(first_rows[index], first_rows[index] + counts[index]))
    if not rows:
        return None, None
    return copied_to(torch.from_numpy(np.concatenate(rows)), batch.input_ids.device), torch.cat(values)


# ------------------------------------------------------------- CPT's projection

_PROJECTION_ROUNDING = 1e-6
"""How far over its bound, relative to it, the norm of a projected row may lie."""


def adopt_encoder(encoder: Any, config: PeftConfig) -> None:
    """Keep an encoder's parameters in their memory: CPT's encoder allocates new ones whenever it projects them."""
    if isinstance(config, CPTConfig):
        # A bound method, because a copy of the model has to have that of its own encoder.
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
    """Project what CPT trains, as each of its forwards does: also if a process has no rows of a task in a step.

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
    """Return CPT's projection of its changes, which leaves rows within their bounds unchanged, except for rounding."""
    weight = encoder.delta_embedding.weight
    bounds = encoder.get_epsilon().to(weight.device)
    is_within = weight.norm(p=2, dim=1) <= bounds * (1 + _PROJECTION_ROUNDING)
    return torch.where(is_within[:, None], weight, encoder.get_projection())


# ---------------------------------------------------------------------- files

EMBEDDINGS = "prompt_embeddings"
"""PEFT's name of what a prompt's encoder makes."""

_TABLE = f"{PREFIX}embedding.weight"
_TRAINED_KEYS = f"{PREFIX}trainable_embedding"
_FACTORS = {f"{PREFIX}{name}": name for name in ("prefix_task_cols", "prefix_task_rows")}
_SAME = ({_TABLE: EMBEDDINGS}, {_TRAINED_KEYS: EMBEDDINGS}, {_TABLE: EMBEDDINGS, **_FACTORS})
"""Prompts whose parameters are what PEFT saves: prompt tuning or a prefix, a cartridge, multitask prompt tuning."""


def prompt_keys(names: Collection[str]) -> dict[str, str]:
    """Return the key in its file of each trained parameter of a prompt, by the names without the adapter id."""
    own = {name: name for name in names if name.startswith(PREFIX)}
    heads = {name: name.replace(".modules_to_save", "") for name in names if name not in own}
    return next((keys for keys in _SAME if keys.keys() == own.keys()), own) | heads


def saved_tensor(state: Mapping[str, torch.Tensor], key: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """Return a parameter's tensor from a prompt's file, by its key of `prompt_keys`; `None` if it is not there.

    A cartridge's parameter, by its shape, is the last rows of the tensor, behind those that are frozen.
    """
    found = state.get(key)
    return found[-shape[0] :] if found is not None and key == EMBEDDINGS else found


@torch.no_grad()
def prompt_state(model: Any, adapter: str, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a prompt's files.

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
    held = {name.removeprefix(PREFIX): x.to(device) for name, x in parameters.items() if name.startswith(PREFIX)}
    tokens = torch.arange(config.num_virtual_tokens, device=device)[None]
    made = functional_call(encoder, held, (tokens,))[0]
    return {EMBEDDINGS: made, **{key: parameters[name] for name, key in keys.items() if key != EMBEDDINGS}}


@torch.no_grad()
def load_prompt(
    model: Any, adapter: str, state: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]
) -> None:
    """Write the tensors of a prompt's file, of the shapes of `prompt_state`, into its trained parameters."""
    encoder: Any = encoders_of(model)[adapter]
    for name, key in prompt_keys(list(parameters)).items():
        value = saved_tensor(state, key, tuple(parameters[name].shape))
        assert value is not None, "the tensors were compared before"
        parameters[name].copy_(value)
    if getattr(encoder, "frozen_embedding", None) is not None:
        encoder.frozen_embedding.copy_(state[EMBEDDINGS][: encoder.num_frozen_tokens])
