"""The kinds of PEFT's prompt learning types: virtual tokens, or keys and values, before each sequence of a task.

A prompt sits on no layer. PEFT keeps its encoder next to the backbone, as `prompt_encoder.<adapter>`, and so do we. In
a packed pass each encoder runs once, and its output enters the rows of virtual tokens, or becomes keys and values
before the first token. Outside of one (views, forwards, `generate`), PEFT's own model of one prompt runs, on the same
modules.

PEFT saves what a prompt's encoder makes (`prompt_embeddings`) and reads no more than that. If an encoder is more than
that (P-tuning's network, the projection of a prefix, CPT's changes), its parameters are saved in a file of their own.

Shape letters: T tokens, V virtual tokens of a prompt, D hidden features, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from inspect import signature
from itertools import accumulate
from types import MethodType
from typing import Any

import numpy as np
import torch
from peft import (
    MODEL_TYPE_TO_PEFT_MODEL_MAPPING,
    CPTConfig,
    MultitaskPromptTuningConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptEncoderReparameterizationType,
    TaskType,
)
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING
from peft.utils.other import _prepare_prompt_learning_config
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from peft_mux.adapters.catalogue import ENTRIES
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX, virtual_tokens_of_sequences
from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.checks import value_faults
from peft_mux.modeling.adapters.kind import EMBEDDINGS, PREFIX, AdapterKind, Category, register_kind
from peft_mux.modeling.attention.attention_stream import Prefixes
from peft_mux.modeling.attention.rows import copied_to
from peft_mux.modeling.backbone.modules import CLASSIFICATION, head_kind_of, head_module, without_head

_SHAPE_FIELDS = ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
"""Fields that PEFT fills in from the backbone's configuration."""

_UNEVEN_FIELDS = ("global_head_dim", "per_layer_config", "num_kv_shared_layers")
"""Fields of a backbone whose layers differ in their heads, or share keys."""

_WIDTH_FIELDS = ("embedding_size", "word_embed_proj_dim")
"""Fields of a backbone whose embeddings may be of another width than its layers (ELECTRA, OPT)."""


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


class PromptKind(AdapterKind):
    """A prompt before every sequence of its task."""

    has_targets = False
    lies_apart = False

    # ------------------------------------------------------- configurations

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return the label of each virtual token that sequences begin with; none if the prompt is keys and values."""
        if is_prefix(config):
            return ()
        if not isinstance(config, CPTConfig):
            return (IGNORE_INDEX,) * config.num_virtual_tokens
        # CPT's tokens are examples, whose answers (types 4, 8, ...) are targets of the loss as well.
        pairs = zip(config.cpt_token_ids or (), config.cpt_tokens_type_mask or (), strict=True)
        return tuple(token if kind > 0 and kind % 4 == 0 else IGNORE_INDEX for token, kind in pairs)

    def setting_faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the fields of the encoder, and a task type that PEFT does not train."""
        faults = value_faults(config, where)
        if config.num_virtual_tokens is None:
            faults.append(Fault(f"{where}.num_virtual_tokens", "None", "an integer of at least 1"))
        task_types = [TaskType.CAUSAL_LM]
        fix = "PEFT chooses by it how the prompt is put before the tokens."
        if isinstance(config, CPTConfig):
            fix = "PEFT trains no other with it; for classification, use PREFIX_TUNING or LORA."
        else:
            task_types.append(TaskType.SEQ_CLS)
        if is_prefix(config):
            task_types.append(TaskType.TOKEN_CLS)
        elif config.task_type == TaskType.TOKEN_CLS:
            fix = "PEFT fails on the logits of virtual tokens, which have no labels; use PREFIX_TUNING or LORA."
        if config.task_type not in task_types:
            got = str(getattr(config.task_type, "value", config.task_type))
            faults.append(Fault(f"{where}.task_type", got, f"{' or '.join(task_types)} for {self.title}", fix))
        # What fields mean together is checked once each of them is sound.
        return faults or _encoder_faults(config, where)

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone, such as fields that PEFT fills in, set to another value."""
        text, got = backbone.config.get_text_config(), f"{self.title} on a {type(backbone).__name__}"
        # As written to files: as attributes, every configuration has some of the fields.
        written, has_tokens = text.to_dict(), bool(self.virtual_labels(config))
        is_classifier = config.task_type == TaskType.SEQ_CLS and head_kind_of(backbone) is CLASSIFICATION
        if has_tokens and is_classifier and head_module(backbone)[0] == "score":
            fix = (
                "PEFT gives it embeddings, in which it cannot see padding, so it would classify by padding in a batch"
                " of rows of unequal length; use PREFIX_TUNING or LORA."
            )
            return [Fault(where, got, "used with classifiers that pool the first token, such as BERT's", fix)]
        if is_prefix(config):
            # As PEFT looks for it: among the model's arguments, else among those of what is below its head.
            calls = (backbone.forward, without_head(backbone).forward)
            if not any("past_key_values" in signature(call).parameters for call in calls):
                return [Fault(where, got, "used with backbones that take past_key_values", "Use LORA.")]
            odd = next((name for name in _UNEVEN_FIELDS if written.get(name)), None)
            if backbone.config.model_type in TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING:
                odd = "its own layout of keys"
            if odd is not None:
                allowed = "used with backbones whose layers all have the same heads"
                return [Fault(where, f"{got} with {odd}", allowed, "Use PROMPT_TUNING.")]
        blank = copy.deepcopy(config)
        for name in _SHAPE_FIELDS:
            setattr(blank, name, None)
        try:
            completed = _prepare_prompt_learning_config(blank, backbone.config)
        except ValueError as error:  # of PEFT, which does not find a size in every configuration
            return [Fault(where, got, "used with backbones whose configuration PEFT can read", f"PEFT: {error}.")]
        completed.num_transformer_submodules = 1
        width = next((written[name] for name in _WIDTH_FIELDS if name in written), completed.token_dim)
        if has_tokens and width != completed.token_dim:
            fix = f"PEFT makes virtual tokens of {completed.token_dim} features for embeddings of {width}. Use LORA."
            return [Fault(where, got, "used with backbones whose embeddings are as wide as their layers", fix)]
        faults = []
        for name in _SHAPE_FIELDS:
            got, wanted = getattr(config, name), getattr(completed, name)
            # Users know what PEFT reads off the model before it looks at heads that share keys.
            if got not in (None, wanted):
                known = f"{wanted} or None, because the backbone is a {type(backbone).__name__}"
                faults.append(Fault(f"{where}.{name}", shown(got), known, "Leave it out: PEFT fills it in."))
        odd_tokens = [token for token in getattr(config, "cpt_token_ids", None) or () if token >= text.vocab_size]
        if odd_tokens:
            allowed = f"ids below {text.vocab_size}, the vocabulary's size"
            faults.append(Fault(f"{where}.cpt_token_ids", str(odd_tokens[0]), allowed))
        return faults

    # ----------------------------------------------------- coming and going

    def open(self, model: Any, backbone: Any, adapter: str, config: PeftConfig) -> None:
        """Initialise a `PeftModel` with its first adapter: what PEFT's own constructor does, without a tuner."""
        nn.Module.__init__(model)
        model.active_adapter, model.peft_type = adapter, config.peft_type
        model.special_peft_forward_args = {"adapter_names", "alora_offsets"}
        # To PEFT, a model has prompts or layers. This one has layers, and prompts inside `Tuners.as_peft_model`.
        model._is_prompt_learning, model._peft_config, model._adapters_disabled = False, None, False
        model.base_model = PromptTuner(backbone, {}, adapter)
        if hasattr(backbone.config, "pretraining_tp"):
            backbone.config.pretraining_tp = 1
        model.registry.tuners.inject(model, adapter, config)

    def inject(self, model: Any, adapter: str, config: PeftConfig) -> None:
        """Make the encoder of a task's prompt as `get_peft_model` does, inside `Tuners.as_peft_model`."""
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
        if isinstance(config, CPTConfig):
            # CPT's encoder allocates new parameters whenever it projects them. A bound method, because a copy of the
            # model needs the method of its own encoder.
            encoder: Any = encoders_of(model)[adapter]
            encoder.forward = MethodType(_projected, encoder)

    def remove(self, model: Any, adapter: str) -> None:
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

    def call(
        self, model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, generate: bool = False
    ) -> Any:
        """Return what PEFT's model of one prompt returns."""
        rows = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if hasattr(model.peft_config[adapter], "num_tasks") and rows is not None:
            # A multitask prompt of one task; callers need not name it.
            kwargs = {"task_ids": rows.new_zeros(len(rows), dtype=torch.int64), **kwargs}
        with model.as_peft_model(adapter):
            # The same modules, and dictionaries of its own, so that nothing that PEFT sets there outlives the call.
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

    @torch.no_grad()
    def to_file(
        self, model: Any, adapter: str, parameters: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor] | None:
        """Return the tensors of a prompt's files."""
        encoder, config = encoders_of(model)[adapter], model.peft_config[adapter]
        keys = _file_keys(parameters)
        if hasattr(config, "num_tasks"):
            return {keys[name]: value for name, value in parameters.items()}
        device = next(encoder.parameters()).device
        held = {name.removeprefix(PREFIX): x.to(device) for name, x in parameters.items() if name.startswith(PREFIX)}
        tokens = torch.arange(config.num_virtual_tokens, device=device)[None]
        made = functional_call(encoder, held, (tokens,))[0]
        return {EMBEDDINGS: made, **{key: parameters[name] for name, key in keys.items() if key != EMBEDDINGS}}

    @torch.no_grad()
    def from_file(
        self, model: Any, adapter: str, state: Mapping[str, torch.Tensor], names: Collection[str]
    ) -> dict[str, torch.Tensor] | None:
        """Return the parameters of a prompt; the first rows of a cartridge, which are frozen, are adopted."""
        weights = {name: state[key] for name, key in _file_keys(names).items() if key in state}
        encoder: Any = encoders_of(model)[adapter]
        if getattr(encoder, "frozen_embedding", None) is not None and EMBEDDINGS in state:
            frozen, weights[_TRAINED_KEYS] = state[EMBEDDINGS].tensor_split([encoder.num_frozen_tokens])
            if frozen.shape == encoder.frozen_embedding.shape:  # otherwise the caller refuses the rest
                encoder.frozen_embedding.copy_(frozen)
        return weights

    # --------------------------------------------------------------- passes

    @torch.no_grad()
    def begin_step(self, model: Any, adapter: str) -> None:
        """Project what CPT trains, as each of its forwards does."""
        if isinstance(model.peft_config[adapter], CPTConfig):
            encoder: Any = encoders_of(model)[adapter]
            encoder.delta_embedding.weight.copy_(_projection(encoder))

    def put_before_rows(self, model: Any, batch: MuxBatch, arguments: dict[str, Any]) -> Prefixes | None:
        """Put the prompts of a micro-batch into the arguments of the backbone, each computed once for all sequences.

        Args:
            model: the `MultiTaskPeftModel`.
            batch: the micro-batch, on the model's device; its rows begin with their virtual tokens.
            arguments: ids and positions of its tokens; the ids of a batch with virtual tokens become embeddings, and
                positions move behind the keys of prefixes.

        Returns:
            learnt keys and values in front of sequences; `None` if there are none.
        """
        encoders, device = encoders_of(model), batch.input_ids.device
        virtual: dict[int, torch.Tensor] = {}
        prefixes: dict[int, torch.Tensor] = {}
        for number, name in enumerate(batch.task_names):
            if (adapter := model.adapters[name]) not in encoders:
                continue
            config = model.peft_config[adapter]
            inputs = [torch.arange(config.num_virtual_tokens, device=device)[None]]
            if hasattr(config, "num_tasks"):
                inputs.append(torch.zeros(1, dtype=torch.int64, device=device))
            encoded_VE = encoders[adapter](*inputs)[0]
            if self.virtual_labels(config):
                virtual[number] = encoded_VE
            else:
                # Keys and values `[2 * layers, G, V, C]`, in the dtype of the weights as in PEFT.
                heads = config.num_attention_heads
                shape = (config.num_virtual_tokens, 2 * config.num_layers, heads, config.token_dim // heads)
                prefixes[number] = encoded_VE.to(model.backbone.dtype).view(shape).permute(1, 2, 0, 3)
        rows, embeddings = _virtual_rows(batch, virtual) if virtual else (None, None)
        if rows is not None and embeddings is not None:
            words_1TD = model.backbone.get_input_embeddings()(arguments.pop("input_ids"))
            # Copied into place, not masked: a task's NaN stays in its rows, and so do gradients. Tasks with virtual
            # tokens share none, so each of these has a row of its own.
            embedded_TD = words_1TD.squeeze(0).index_copy(0, batch.rows_of(rows), embeddings.to(words_1TD.dtype))
            arguments["inputs_embeds"] = embedded_TD.unsqueeze(0)
        if not prefixes:
            return None
        counts = np.diff(batch.sequence_offsets)
        tasks = np.repeat(np.arange(len(counts)), counts).tolist()
        places = {number: place for place, number in enumerate(prefixes)}
        # Tokens come after the keys of their prefix.
        lengths = [prefixes[number].shape[2] if number in prefixes else 0 for number in tasks]
        shift_T = torch.from_numpy(np.repeat(np.asarray(lengths, dtype=np.int64), batch.sequence_lengths))
        arguments["position_ids"] = arguments["position_ids"] + batch.computed(copied_to(shift_T, device)[None])
        return Prefixes([places.get(number) for number in tasks], list(prefixes.values()))


def is_prefix(config: Any) -> bool:
    """Return whether a prompt is the keys and values of every layer, and not tokens."""
    return isinstance(config, PrefixTuningConfig) or hasattr(config, "num_frozen_tokens")


def encoders_of(model: Any) -> Mapping[str, nn.Module]:
    """Return the prompt encoders of a model, by the internal ids of their adapters."""
    # Not by attribute, because PEFT would look through the whole model for one that is not there.
    return model._modules.get("prompt_encoder") or {}


# -------------------------------------------------------------- configurations


def _encoder_faults(config: Any, where: str) -> list[Fault]:
    """Return what is wrong with the fields of the type's own encoder."""
    faults, count = [], config.num_virtual_tokens
    if isinstance(config, PromptEncoderConfig):
        way, ways = config.encoder_reparameterization_type, PromptEncoderReparameterizationType
        if way not in list(ways):
            faults.append(Fault(f"{where}.encoder_reparameterization_type", shown(way), "MLP or LSTM"))
        if config.encoder_dropout != 0.0:
            why = "PEFT ignores it" if way == ways.MLP else "it would draw from a generator that all tasks share"
            got, field = shown(config.encoder_dropout), f"{where}.encoder_dropout"
            faults.append(Fault(field, got, "0.0", f"Not supported: {why}."))
        if way == ways.MLP and config.encoder_num_layers != 2:
            got = f"{shown(config.encoder_num_layers)} with an MLP"
            faults.append(Fault(f"{where}.encoder_num_layers", got, "2", "PEFT's MLP has a fixed number of layers."))
    elif isinstance(config, MultitaskPromptTuningConfig) and config.num_tasks != 1:
        fix = "Rows have no task_ids; give each target task its own Task, with the shared prompt as its source."
        faults.append(Fault(f"{where}.num_tasks", shown(config.num_tasks), "1", fix))
    elif isinstance(config, CPTConfig):
        for name in ("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask"):
            num_entries = len(getattr(config, name) or ())
            if num_entries != count:
                allowed = f"{count} entries, one for each of num_virtual_tokens"
                faults.append(Fault(f"{where}.{name}", str(num_entries), allowed))
        if (highest := max(config.cpt_tokens_type_mask or (0,))) % 4:
            fix = "PEFT counts the types of rows on from it, and would mask the labels of all rows."
            allowed = "types whose highest is a multiple of 4, the type of an answer"
            faults.append(Fault(f"{where}.cpt_tokens_type_mask", f"{highest} as the highest type", allowed, fix))
        for name in ("opt_projection_epsilon", "opt_projection_format_epsilon", "opt_loss_decay_factor"):
            if (value := getattr(config, name)) < 0:
                faults.append(Fault(f"{where}.{name}", shown(value), "a finite number of at least 0"))
        if config.opt_weighted_loss_type != "none" and config.opt_loss_decay_factor != 1.0:
            got = f"{shown(config.opt_weighted_loss_type)} by {shown(config.opt_loss_decay_factor)}"
            fix = "Not supported: tokens of a row have no weights."
            faults.append(Fault(f"{where}.opt_weighted_loss_type", got, "'none', or a decay by 1.0", fix))
    elif (frozen := getattr(config, "num_frozen_tokens", 0)) >= count:
        allowed = f"less than num_virtual_tokens, which is {count}"
        faults.append(Fault(f"{where}.num_frozen_tokens", shown(frozen), allowed, "Otherwise nothing is trained."))
    return faults


# ------------------------------------------------------------------ in a pass


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
"""Relative tolerance of the bound on the norm of a projected row."""


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
def _projection(encoder: Any) -> torch.Tensor:
    """Return CPT's projection of its changes, which leaves rows within their bounds unchanged, except for rounding."""
    weight = encoder.delta_embedding.weight
    bounds = encoder.get_epsilon().to(weight.device)
    is_within = weight.norm(p=2, dim=1) <= bounds * (1 + _PROJECTION_ROUNDING)
    return torch.where(is_within[:, None], weight, encoder.get_projection())


# ---------------------------------------------------------------------- files

_TABLE = f"{PREFIX}embedding.weight"
_TRAINED_KEYS = f"{PREFIX}trainable_embedding"
_FACTORS = {f"{PREFIX}{name}": name for name in ("prefix_task_cols", "prefix_task_rows")}
_SAME = ({_TABLE: EMBEDDINGS}, {_TRAINED_KEYS: EMBEDDINGS}, {_TABLE: EMBEDDINGS, **_FACTORS})
"""Prompts whose parameters are what PEFT saves: prompt tuning or a prefix, a cartridge, multitask prompt tuning."""


def _file_keys(names: Collection[str]) -> dict[str, str]:
    """Return the key in its file of each trained parameter of a prompt, by the names without the adapter id."""
    trained = {name: name for name in names if name.startswith(PREFIX)}
    heads = {name: name.replace(".modules_to_save", "") for name in names if name not in trained}
    return next((keys for keys in _SAME if keys.keys() == trained.keys()), trained) | heads


for _entry in ENTRIES.values():
    if _entry.category is Category.PROMPT and _entry.peft_type:
        register_kind(PromptKind(_entry))
