"""`LastLayer`: whether the last layer of a model computes the rows alone whose outputs are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.attention.read_rows import ReadRows
from peft_mux.modeling.backbone.layer_list import find_layers
from peft_mux.modeling.backbone.probe import ComputingPath, path_of, probe_batch, tolerance_of
from peft_mux.modeling.interface import MultiplexedModel
from peft_mux.modeling.last_layer.forward import LastLayerForward, is_of_queries
from peft_mux.scheduler.costs.model_shape import MOST_READ

_TOLERANCE = 1e-5
"""Greatest difference in fp32, as a share of the greatest state: products of other heights round otherwise."""

_UNTRIED = "it was not held against the layer's own results"

Run = Callable[[MuxBatch, ReadRows | None], torch.Tensor]
"""Returns the last hidden states `[T, D]` of a micro-batch, given which rows are read; `None` for all."""


class LastLayer:
    """Whether the last layer of a model computes the rows alone whose outputs are read, which is proven on the model.

    Attributes:
        is_wanted: whether it is to be done, wherever it is exact and spares enough.
        reason: why it is not done on this model, a clause; `None` where it was proven.
    """

    def __init__(self) -> None:
        """Prove nothing yet."""
        self.is_wanted = True
        self.reason: str | None = _UNTRIED

    def rows(self, model: MultiplexedModel, batch: MuxBatch) -> ReadRows | None:
        """Return the rows that the last layer is to compute in a pass whose losses are wanted; `None` for all.

        Args:
            model: the model that runs the pass.
            batch: the micro-batch, on the model's device.
        """
        if not self.is_wanted or self.reason is not None:
            return None
        read = model.objectives.head.read_rows(batch, model.backbone)
        # Of a pass in which nothing is read, later parts of its rows may want the keys: that is left as it is.
        if read is None or not 0 < read.offsets[-1] <= MOST_READ * batch.num_computed:
            return None
        return read

    def check_cut(self, model: MultiplexedModel) -> None:
        """Give up where tensor parallel ranks sum before attention: other passes may go through the layer meanwhile."""
        found = find_layers(model.backbone)
        modules = () if found is None else found.layers[-1].modules()
        if self.reason is None and any(getattr(one, "is_over_all_ranks", False) for one in modules):
            self.reason = "a norm before attention is a sum over tensor parallel ranks"

    @property
    def was_refused(self) -> bool:
        """Whether it was tried on this model and cannot be done there."""
        return self.reason not in (None, _UNTRIED)

    def prove(self, model: MultiplexedModel, run: Run) -> None:
        """Hold the states of rows that are read against the layer's own, on a few made-up sequences.

        Args:
            model: the model, with its weights; a stage of one only if it has the last layer.
            run: runs a micro-batch through the last layer, and perhaps through others before it.
        """
        try:
            self.reason = self._reason(model, run)
        # Whatever an unknown architecture does with fewer rows, it goes on as before.
        except Exception as error:
            self.reason = f"its last layer does not run on some of its rows ({type(error).__name__}: {error})"

    def _reason(self, model: MultiplexedModel, run: Run) -> str | None:
        found = find_layers(model.backbone)
        if found is None or not len(found.layers):
            return "its layers are not in one list"
        layer = found.layers[-1]
        replaced = layer.__dict__.get("forward")
        if replaced is not None and not isinstance(replaced, LastLayerForward):
            return "the forward of its last layer was replaced"
        if replaced is not None:
            del layer.forward
        # Anew, as what a layer calls before it attends may have changed.
        layer.forward = forward = LastLayerForward(layer, model.module_names[layer], model.stream)
        batch = probe_batch(model, next(iter(model.tasks)))
        # Of four sequences all rows of none, and none of the third; neither the first row nor the last is left out.
        rows = torch.tensor([0, 3, 6, 17, 18, 25, 34], device=model.device)
        read = ReadRows(rows, (0, len(rows)))
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), model.without_adapters():
                wide, narrow = (run(batch, one)[rows].float() for one in (None, read))
        finally:
            model.train(was_training)
        if not forward.was_narrowed:
            return "the rows that are read do not reach its last layer"
        difference = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
        # Asked this way round, NaN is refused as well.
        if not difference <= self._tolerance(path_of(model)):
            return f"its last layer differs by {difference:.1e} of its size where it computes some rows alone"
        return None

    @staticmethod
    def _tolerance(path: ComputingPath) -> float:
        tolerance = tolerance_of(path)
        return _TOLERANCE if path == ("cpu", torch.float32) else tolerance


def has_own_queries(backbone: Any) -> bool:
    """Whether a projection of the last layer makes queries alone; one that makes keys too is computed for all rows."""
    found = find_layers(backbone)
    if found is None or not len(found.layers):
        return False
    return any(is_of_queries(name.rpartition(".")[2]) for name, _ in found.layers[-1].named_modules())
