"""`PromptKind`: what PEFT's prompt learning types have in common as kinds of adapters.

A prompt sits on no layer. PEFT keeps its encoder beside the backbone, as `prompt_encoder.<adapter>`, and so do we; what
it computes comes into a pass through `peft_mux.modeling.adapters.prompts.prompts`.
"""

# MERGED: Which configurations are of prompts, and where PEFT keeps their encoders.
# MERGED: Prompts of keys and values in every layer: PREFIX_TUNING and CARTRIDGE.
# MERGED: Prompts of virtual tokens: PROMPT_TUNING, P_TUNING, MULTITASK_PROMPT_TUNING and CPT.

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftConfig, PeftType, PromptEncoderReparameterizationType, TaskType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING
from peft.utils.other import _prepare_prompt_learning_config
from torch import nn

from peft_mux.data.task_batch import IGNORE_INDEX, ignored
from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.fields import FLAG, FieldType, field_faults, type_faults
from peft_mux.modeling.adapters.kind import (
    CutLayers,
    CutOfLayer,
    MultiplexedForward,
    ReplicaLayout,
    SavedForm,
    Shapes,
    SlabOf,
    kind_of,
    register_kind,
)
from peft_mux.modeling.slabs import Slot, plain_slot
from peft_mux.modeling.stream import PassMaker, Stream
from peft_mux.scheduler.costs.loads import AdapterLoad

PREFIX = "prompt_encoder."
"""How the names of all parameters of prompts begin."""
MERGED_NOTHING = "a prompt is no change of the backbone's weights"

_SHAPE_FIELDS = ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
"""Fields that PEFT fills in from the backbone's configuration."""


class _NoLayer(BaseTunerLayer):
    """A class of layers that has no instances: prompts sit on no layer."""


def is_at_least(least: int) -> FieldType:
    """Return the type of whole numbers from `least` on."""
    return FieldType(
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least,
        f"an integer of at least {least}",
    )


class PromptKind:
    """A PEFT type whose prompt is put before every sequence of its task; see `AdapterKind`.

    Args:
        peft_type: one of PEFT's prompt learning types.
        types: what may stand in the fields that this type has for itself, by name; those may be set.
    """

    draws_itself: bool = False
    can_be_cut: bool = False
    lies_apart: bool = False
    layer_type: type[BaseTunerLayer] = _NoLayer
    default_targets: Mapping[str, Any] = {}

    def __init__(self, peft_type: PeftType, types: Mapping[str, FieldType]) -> None:
        """Keep the type and its fields."""
        self.peft_type = peft_type
        self.name = self.title = str(peft_type.value)
        self._types = {"num_virtual_tokens": is_at_least(1), **types}
        self._fields = frozenset(self._types) | frozenset(_SHAPE_FIELDS)

    # ------------------------------------------------------------- prompts

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return the label of each virtual token that sequences begin with; none where the prompt is no tokens."""
        return ()

    def num_positions(self, config: Any) -> int:
        """Return by how many positions the prompt moves the tokens of a row."""
        return config.num_virtual_tokens

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone.

        Args:
            config: the configuration of one task, which has no `faults`.
            backbone: the transformers model that the prompt is for.
            where: prefix of the fields, such as `tasks.sql.peft_config`.
        """
        blank = copy.deepcopy(config)
        for name in _SHAPE_FIELDS:
            setattr(blank, name, None)
        completed = _prepare_prompt_learning_config(blank, backbone.config)
        completed.num_transformer_submodules = 1
        faults = []
        for name in _SHAPE_FIELDS:
            got, wanted = getattr(config, name), getattr(completed, name)
            # What PEFT reads off the model before it looks at heads that share keys is what users know.
            if got not in (None, wanted):
                known = f"{wanted} or None, as the backbone is a {type(backbone).__name__}"
                faults.append(Fault(f"{where}.{name}", shown(got), known, "Leave it out: PEFT fills it in."))
        return faults

    # ------------------------------------------------------- configurations

    def is_config(self, config: PeftConfig) -> bool:
        """Return whether a configuration is of the class that PEFT has for this type."""
        return isinstance(config, PEFT_TYPE_TO_CONFIG_MAPPING[self.peft_type])

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return a fault for every field that cannot be trained, and for a task type other than CAUSAL_LM."""
        faults = field_faults(config, where, supported=self._fields, reasons={"modules_to_save": "a prompt sits alone"})
        faults += type_faults(config, where, self._types, self._fields)
        if config.task_type != TaskType.CAUSAL_LM:
            fix = "PEFT finds by it what puts the prompt before the tokens; for classification, use LORA."
            got = str(getattr(config.task_type, "value", config.task_type))
            faults.append(Fault(f"{where}.task_type", got, f"CAUSAL_LM for {self.title}", fix))
        return faults

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return nothing: a prompt has no target modules."""
        return {}

    def width_faults(self, config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
        """Return nothing: a prompt has no target modules."""
        return []

    def complete(self, config: Any, backbone: Any) -> None:
        """Do nothing: PEFT fills in what a prompt needs to know of the backbone."""

    def injecting(self) -> AbstractContextManager[None]:
        """Return nothing: prompts change nothing of the backbone."""
        return nullcontext()

    def narrow(self, config: Any, modules: Sequence[str]) -> None:
        """Refuse: a prompt adapts no modules, so no part of a model holds a part of it."""
        raise NotImplementedError(f"{self.title} adapts no modules.")

    def sample_config(self, rank: int) -> PeftConfig | None:
        """Return nothing: a prompt has no rank."""
        return None

    # --------------------------------------------------------------- passes

    def pass_maker(self, slab_of: SlabOf) -> PassMaker | None:
        """Return nothing: no layer asks for a prompt."""
        return None

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return nothing: there is no layer."""
        return None

    def arrange(self, model: nn.Module, stream: Stream) -> None:
        """Do nothing: there is no layer."""

    # ----------------------------------------------------------- parameters

    def owns(self, parameter_name: str) -> bool:
        """Return whether a parameter is one of a prompt; the types of prompts cannot be told apart by names."""
        return parameter_name.startswith(PREFIX)

    def site_of(self, parameter_name: str) -> str:
        """Return the name of PEFT's dictionary of prompts, the one site of them all."""
        return PREFIX.removesuffix(".")

    def slot(self, name: str, parameter: nn.Parameter) -> Slot:
        """Return how a parameter of a task lies in its slab: as it is."""
        return plain_slot(name, parameter)

    def saved_form(self, backbone: nn.Module, adapter: str) -> SavedForm | None:
        """Return nothing: what is written of a prompt is made in `peft_mux.modeling.adapters.prompts.prompts`."""
        return None

    def loads(self, shapes: Shapes, cut: CutLayers) -> list[AdapterLoad]:
        """Return one load of rank 1, as wide as the prompt has elements; its tokens count as tokens do."""
        count = sum(int(torch.Size(shape).numel()) for name, shape in shapes.items() if self.owns(name))
        return [AdapterLoad(1, count)] if count else []

    # ---------------------------------------------------------- parallelism

    def cut_dim(self, parameter_name: str, *, is_row: bool) -> int | None:
        """Return nothing: prompts are not cut."""
        return None

    def cut(self, layer: Any, cut: CutOfLayer) -> None:
        """Refuse, as `refusals` says."""
        raise NotImplementedError(f"{self.title} prompts are not cut among processes.")

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of the model."""
        if layout.is_data_parallel:
            return []
        got = f"{self.title} with replicas {layout}"
        return [Fault(f"{where}.peft_config", got, "LORA with this layout", "Give every process the whole model.")]


def prompt_kind_of(config: PeftConfig) -> PromptKind | None:
    """Return the kind of a configuration that was checked, if it is one of prompts."""
    kind = kind_of(config)
    return kind if isinstance(kind, PromptKind) else None


def encoders_of(model: Any) -> Mapping[str, nn.Module]:
    """Return the prompt encoders of a model, by the internal ids of their adapters."""
    # Not by attribute, as PEFT would look through the whole model for one that is not there.
    return model._modules.get("prompt_encoder") or {}


_UNEVEN_FIELDS = ("global_head_dim", "per_layer_config", "num_kv_shared_layers")
"""Fields of a backbone whose layers differ in their heads, or share keys."""
_WIDTH = FieldType(lambda value: value is None or is_at_least(1).is_valid(value), "an integer of at least 1, or None")


class PrefixKind(PromptKind):
    """Prompts that no token stands for: their keys and values come before those of the first token, in every layer."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and one where no token of a cartridge would be trained."""
        faults = super().faults(config, where)
        frozen, count = getattr(config, "num_frozen_tokens", 0), config.num_virtual_tokens
        if is_at_least(0).is_valid(frozen) and is_at_least(1).is_valid(count) and frozen >= count:
            allowed = f"less than num_virtual_tokens, which are {count}"
            faults.append(Fault(f"{where}.num_frozen_tokens", shown(frozen), allowed, "Else nothing is trained."))
        return faults

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone: layers whose keys are not all of one shape."""
        # As written to files: as attributes, every configuration has some of them.
        text = backbone.config.get_text_config().to_dict()
        odd = next((name for name in _UNEVEN_FIELDS if text.get(name)), None)
        if backbone.config.model_type in TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING:
            odd = "keys in a layout of its own"
        if odd is None:
            return super().backbone_faults(config, backbone, where)
        got = f"{self.title} on a {type(backbone).__name__} with {odd}"
        return [Fault(where, got, "backbones whose layers all have the same heads", "Use PROMPT_TUNING.")]


register_kind(
    PrefixKind(
        PeftType.PREFIX_TUNING,
        {
            "encoder_hidden_size": _WIDTH,
            "prefix_projection": FLAG,
            "init_weights": FieldType(lambda value: value in (None, "zero"), "None or 'zero'"),
        },
    )
)
register_kind(PrefixKind(PeftType.CARTRIDGE, {"num_frozen_tokens": is_at_least(0)}))


_NAME = FieldType(lambda value: isinstance(value, str), "a name")
_TEXT = FieldType(lambda value: value is None or isinstance(value, str), "a string or None")
_DICT = FieldType(lambda value: value is None or isinstance(value, dict), "a dict or None")
_NUMBER = FieldType(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"),
    "a finite number of at least 0",
)
_WIDTH_virtual_tokens = FieldType(
    lambda value: value is None or is_at_least(1).is_valid(value), "an integer of at least 1, or None"
)
_INTEGERS = FieldType(
    lambda value: isinstance(value, (list, tuple)) and bool(value) and all(is_at_least(0).is_valid(i) for i in value),
    "a list of integers of at least 0",
)
_INIT_FIELDS = {
    "prompt_tuning_init": _NAME,
    "prompt_tuning_init_text": _TEXT,
    "tokenizer_name_or_path": _TEXT,
    "tokenizer_kwargs": _DICT,
}


class VirtualTokensKind(PromptKind):
    """Prompts whose virtual tokens nothing is to predict."""

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return `IGNORE_INDEX` for each virtual token."""
        return ignored(config.num_virtual_tokens)


class PTuningKind(VirtualTokensKind):
    """P-tuning: embeddings go through a small network, which runs once a pass; PEFT saves only what it returns."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and those of the encoder's fields."""
        faults = super().faults(config, where)
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
        return faults


class MultitaskKind(VirtualTokensKind):
    """Multitask prompt tuning of one target task: a shared prompt times a low rank one of the task."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and one where rows would have to say which task they are of."""
        faults = super().faults(config, where)
        if is_at_least(2).is_valid(config.num_tasks):
            fix = "Rows here carry no task_ids; give each target task a Task, with the shared prompt as its source."
            faults.append(Fault(f"{where}.num_tasks", shown(config.num_tasks), "1", fix))
        return faults


class CptKind(PromptKind):
    """Context-aware prompt tuning: examples as virtual tokens, whose answers are targets of the loss as well."""

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return the ids of context tokens that are answers (types 4, 8, ...), and `IGNORE_INDEX` for the others."""
        pairs = zip(config.cpt_token_ids, config.cpt_tokens_type_mask, strict=True)
        return tuple(token if kind > 0 and kind % 4 == 0 else IGNORE_INDEX for token, kind in pairs)

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and those of the context's fields."""
        faults = super().faults(config, where)
        lists = {name: getattr(config, name) for name in ("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask")}
        if not all(_INTEGERS.is_valid(value) for value in lists.values()):
            return faults  # told above
        count = config.num_virtual_tokens
        faults += [
            Fault(f"{where}.{name}", f"{len(value)} entries", f"{count}, one for each of num_virtual_tokens")
            for name, value in lists.items()
            if len(value) != count
        ]
        if (highest := max(config.cpt_tokens_type_mask)) % 4:
            fix = "PEFT counts the types of rows on from it, and would mask the labels of all rows."
            allowed = "types whose highest is a multiple of 4: that of an answer"
            faults.append(Fault(f"{where}.cpt_tokens_type_mask", f"{highest} as the highest type", allowed, fix))
        if config.opt_weighted_loss_type != "none" and config.opt_loss_decay_factor != 1.0:
            got = f"{shown(config.opt_weighted_loss_type)} by {shown(config.opt_loss_decay_factor)}"
            fix = "Not supported: tokens of a row have no weights of their own."
            faults.append(Fault(f"{where}.opt_weighted_loss_type", got, "'none', or a decay by 1.0", fix))
        return faults

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone, its vocabulary above all."""
        size = backbone.config.get_text_config().vocab_size
        odd = [token for token in config.cpt_token_ids if token >= size]
        faults = super().backbone_faults(config, backbone, where)
        if odd:
            faults.append(Fault(f"{where}.cpt_token_ids", str(odd[0]), f"ids below {size}, the vocabulary's size"))
        return faults


register_kind(VirtualTokensKind(PeftType.PROMPT_TUNING, _INIT_FIELDS))
register_kind(
    PTuningKind(
        PeftType.P_TUNING,
        {
            "encoder_reparameterization_type": _NAME,
            "encoder_hidden_size": _WIDTH_virtual_tokens,
            "encoder_num_layers": is_at_least(1),
            "encoder_dropout": _NUMBER,
        },
    )
)
register_kind(
    MultitaskKind(
        PeftType.MULTITASK_PROMPT_TUNING,
        {
            **_INIT_FIELDS,
            "prompt_tuning_init_state_dict_path": _TEXT,
            "prompt_tuning_init_task": is_at_least(0),
            "num_ranks": is_at_least(1),
            "num_tasks": is_at_least(1),
        },
    )
)
register_kind(
    CptKind(
        PeftType.CPT,
        {
            "cpt_token_ids": _INTEGERS,
            "cpt_mask": _INTEGERS,
            "cpt_tokens_type_mask": _INTEGERS,
            "opt_weighted_loss_type": _NAME,
            "opt_loss_decay_factor": _NUMBER,
            "opt_projection_epsilon": _NUMBER,
            "opt_projection_format_epsilon": _NUMBER,
            "tokenizer_name_or_path": _TEXT,
        },
    )
)
