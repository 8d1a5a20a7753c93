"""`Proofs`: what is shown on a model itself before it trains, as configurations do not tell everything about one."""

from __future__ import annotations

from functools import partial

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.adapters.injection.hidden import only_adapter
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.backbone.layer_list import last_layer_alone
from peft_mux.modeling.backbone.probe import ComputingPath, check_packing, path_of
from peft_mux.modeling.packed_forward import PackedModel


class Proofs:
    """Shows on a model that packing changes no result, nor the last layer where it computes some rows alone.

    Args:
        is_asked: whether anything is to be shown.
    """

    def __init__(self, *, is_asked: bool) -> None:
        """Show nothing yet."""
        self._is_asked = is_asked
        self._paths: set[ComputingPath] = set()

    def show(self, model: PackedModel) -> None:
        """Hold packed against separate results on a model's backbone, and its last layer against itself.

        Args:
            model: a model with at least one task, with its weights.

        Raises:
            UnsupportedModelError: if packed and separate results differ.
        """
        # The probe's rows are of one task, and modules of the others are many.
        with only_adapter(model.backbone, model.adapter_of(model.tasks[0])):
            check_packing(model)
            model.last_layer.prove(model, partial(states_of_probe, model))
        model.train(model.training)
        self._paths.add(path_of(model))

    def show_once(self, model: PackedModel) -> None:
        """Do so where it is asked for and was not done on this device and in this precision.

        Args:
            model: a model with at least one task, with its weights.

        Raises:
            UnsupportedModelError: if packed and separate results differ.
        """
        if self._is_asked and path_of(model) not in self._paths:
            self.show(model)


def states_of_probe(model: PackedModel, batch: MuxBatch, read: ReadRows | None) -> torch.Tensor:
    """Return the last hidden states `[T, D]` of a batch that goes through the last layer of a model alone.

    Args:
        model: the model.
        batch: the micro-batch, on the model's device.
        read: the rows that are read; `None` for all.
    """
    with last_layer_alone(model.backbone), model.packed.multiplexing(batch):
        return model.packed.hidden_states(batch, read=read)
