"""`PromptKind`: what PEFT's prompt learning types have in common as kinds of adapters.

A prompt sits on no layer. PEFT keeps its encoder beside the backbone, as `prompt_encoder.<adapter>`, and so do we; what
it computes comes into a pass through `peft_mux.modeling.adapters.prompts.prompts`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftConfig, PeftType, TaskType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import _prepare_prompt_learning_config
from torch import nn

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.field_types import FieldType, type_faults
from peft_mux.modeling.adapters.fields import field_faults
from peft_mux.modeling.adapters.kind import CutLayers, CutOfLayer, ReplicaLayout, SavedForm, Shapes, SlabOf
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
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
        """Return nothing: what is written of a prompt is made in `peft_mux.modeling.adapters.prompts.saved`."""
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
