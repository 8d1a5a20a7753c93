"""`CapturedPasses`: passes of one plan as CUDA graphs, captured once for each shape and replayed.

A step of small tasks launches thousands of small kernels, and the host may take longer to launch them than the device
to run them. A graph is launched at once.

What cannot be captured runs eagerly, with one warning for each reason: see `reason_against`, and `CannotCaptureError`.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.cuda_graphs.capture import CannotCaptureError, CapturedPass, Precision
from peft_mux.engine.cuda_graphs.graph import CudaGraphs, Graph
from peft_mux.engine.cuda_graphs.inputs import Shape
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import bits_of
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.language_head import output_head

MAX_PASSES = 32
"""Graphs that are kept; of more, those that were not used for the longest time are dropped."""


class Composition(NamedTuple):
    """What is written into a graph beside its shape.

    Attributes:
        tasks: names of the tasks, in stream order.
        num_bindings: how often the gradients of each task were bound; another number means that they lie elsewhere.
        version: version of the tables of the model's stream; another one means that adapters lie elsewhere.
        is_training: whether adapters drop out.
    """

    tasks: tuple[str, ...]
    num_bindings: tuple[int, ...]
    version: int
    is_training: bool


class CapturedPasses:
    """Runs micro-batches through graphs where it can.

    Args:
        model: the model, on its device.
        precision: returns the autocast context to compute in.
        make_graph: makes an empty graph; by default one of the model's device.

    Attributes:
        num_captures: number of passes captured so far.

    Example:
        >>> losses = CapturedPasses(model, nullcontext).run(micro_batch)  # doctest: +SKIP
    """

    def __init__(
        self, model: MultiTaskPeftModel, precision: Precision, make_graph: Callable[[], Graph] | None = None
    ) -> None:
        """Start without a graph."""
        self._model, self._precision = model, precision
        if make_graph is None and model.device.type == "cuda":
            make_graph = CudaGraphs(model.device)
        self._make_graph = make_graph
        self._passes: OrderedDict[tuple[Composition, Shape], CapturedPass] = OrderedDict()
        self._refused: set[Composition] = set()
        self._model_reasons: dict[tuple[int, bool], str | None] = {}
        self._warned: set[str] = set()
        self.num_captures = 0

    def run(self, batch: MuxBatch) -> torch.Tensor | None:
        """Add a micro-batch's gradients to those of its tasks.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Returns:
            `[N]`, the losses as `MuxOutput` has them; `None` where the pass has to be run eagerly, and nothing is
            changed.
        """
        reason = self._reason_against(batch)
        if reason is not None:
            self._warn_once(reason)
            return None
        key = self._composition(batch.task_names), Shape.of(batch)
        if key not in self._passes and key[0] not in self._refused:
            self._capture(key, batch)
        if key not in self._passes:
            return None
        self._passes.move_to_end(key)
        return self._passes[key].replay(batch)

    def _composition(self, tasks: tuple[str, ...]) -> Composition:
        slabs = [self._model.task_slab(name) for name in tasks]
        for slab in slabs:
            # Before the key is made: binding may lay gradients elsewhere, and a graph of before would add to the old
            # memory.
            slab.bind_gradients()
        bindings = tuple(slab.num_bindings for slab in slabs)
        return Composition(tasks, bindings, self._model.stream.version, self._model.training)

    def _capture(self, key: tuple[Composition, Shape], batch: MuxBatch) -> None:
        """Capture a pass; where that fails, remember that and warn."""
        assert self._make_graph is not None, "the reasons against it were asked for"
        composition, shape = key
        # Before a new graph takes its memory: graphs of adapters that have moved can never be replayed again.
        self._drop_stale()
        while len(self._passes) >= MAX_PASSES:
            self._passes.popitem(last=False)
        try:
            captured = CapturedPass(self._model, composition.tasks, shape, self._precision, self._make_graph())
            captured.capture(batch)
        except CannotCaptureError as error:
            self._refuse(composition, str(error))
        except Exception as error:  # what is wrong with the pass itself, the eager one will raise
            self._refuse(composition, f"capturing failed with {type(error).__name__}: {error}")
        else:
            self._passes[key] = captured
            self.num_captures += 1

    def _refuse(self, composition: Composition, reason: str) -> None:
        self._refused.add(composition)
        self._warn_once(reason)

    def _drop_stale(self) -> None:
        """Free the graphs whose adapters or gradients have moved or gone."""
        for key in [key for key in self._passes if not self._is_current(key[0])]:
            del self._passes[key]
        self._refused = {composition for composition in self._refused if self._is_current(composition)}

    def _is_current(self, composition: Composition) -> bool:
        if composition.version != self._model.stream.version:
            return False
        bindings = tuple(self._model.task_slab(name).num_bindings for name in composition.tasks)
        return bindings == composition.num_bindings

    def _reason_against(self, batch: MuxBatch) -> str | None:
        if self._make_graph is None:
            return f"there are none on a {self._model.device.type}"
        if batch.input_ids.device.type != "cpu":
            return "a micro-batch did not come from the host"
        key = self._model.stream.version, self._model.training
        # Kept, as going through all modules takes long, and they change only with the tables or the mode.
        if key not in self._model_reasons:
            self._model_reasons = {key: reason_against(self._model)}
        return self._model_reasons[key]

    def _warn_once(self, reason: str) -> None:
        """Warn, once for each reason."""
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"passes run eagerly instead of as CUDA graphs, as {reason}.", stacklevel=2)


def reason_against(model: MultiTaskPeftModel) -> str | None:
    """Return why no pass of a model can be captured, as far as its modules tell, or `None`.

    Each of them computes slice by slice of the rows of a task, or of a sequence, which differ from step to step.

    Args:
        model: the model, in the mode (training or not) that it will run in.
    """
    objectives = model.objectives.of_all(model.tasks)
    reason = next((objective.eager_reason for objective in objectives if objective.eager_reason), None)
    if reason is not None:
        return reason
    if len(objectives) > 1:
        return "tasks have losses of several kinds"
    if frozen_weight(output_head(model.backbone)[0])[0] is None:
        return "a task adapts the output head, or it is quantised"
    for name, module in model.backbone.named_modules():
        forward = module.__dict__.get("forward")
        reason = forward.reason_against_graphs() if isinstance(forward, MultiplexedForward) else None
        if reason is not None:
            return reason
        if bits_of(module) is not None:
            return f"layers are quantised ({name})"
    return None
