"""`CapturedPasses`: passes of one plan as CUDA graphs, captured once for each shape and replayed.

A step of small tasks launches thousands of small kernels, and the host may take longer to launch them than the device
to run them. A graph is launched at once.

What cannot be captured runs eagerly, with one warning for each reason: see `reason_against`, and `CannotCaptureError`.

Where nobody has asked for graphs, but they may be used ("auto"), a shape that comes for the first time runs over the
memory of its graph to be, without one, and when it comes again it is captured. Both are proven equal to the eager pass
before they count (`proof.py`); where they are not, no more graphs are tried. So a shape has the same bits in every
pass, be there a graph or not, and no graph is made of what comes once.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.cuda_graphs.capture import CapturedPass, Precision
from peft_mux.engine.cuda_graphs.graph import CannotCaptureError, CudaGraphs, Graph
from peft_mux.engine.cuda_graphs.inputs import Shape
from peft_mux.engine.cuda_graphs.proof import Pass, reason_against_padding, reason_against_replay
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.prompts.encoders import encoders_of
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import bits_of
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.token_losses import output_head

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


class _UnequalError(Exception):
    """A pass is not what the eager one is; the message is a clause that says by how much."""


class CapturedPasses:
    """Runs micro-batches through graphs where it can.

    Args:
        model: the model, on its device.
        precision: returns the autocast context to compute in.
        make_graph: makes an empty graph; by default one of the model's device.
        plain: the eager pass, that graphs are proven against before they are used; `None` for no proof.

    Attributes:
        num_captures: number of passes captured so far.

    Example:
        >>> losses = CapturedPasses(model, nullcontext).run(micro_batch)  # doctest: +SKIP
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        precision: Precision,
        make_graph: Callable[[], Graph] | None = None,
        *,
        plain: Pass | None = None,
    ) -> None:
        """Start without a graph."""
        self._model, self._precision, self._plain = model, precision, plain
        if make_graph is None and model.device.type == "cuda":
            make_graph = CudaGraphs(model.device)
        self._make_graph = make_graph
        self._passes: OrderedDict[tuple[Composition, Shape], CapturedPass] = OrderedDict()
        self._refused: set[Composition] = set()
        self._model_reasons: dict[tuple[int, bool], str | None] = {}
        self._warned: set[str] = set()
        self._has_given_up = False
        self._proven: set[Composition] = set()
        self.num_captures = 0

    def run(self, batch: MuxBatch) -> torch.Tensor | None:
        """Add a micro-batch's gradients to those of its tasks.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Returns:
            `[N]`, the losses as `MuxOutput` has them; `None` where the pass has to be run eagerly, and nothing is
            changed.
        """
        if self._has_given_up:
            return None
        reason = self._reason_against(batch)
        if reason is not None:
            self._warn_once(reason)
            return None
        key = self._composition(batch.task_names), Shape.of(batch)
        if key[0] in self._refused:
            return None
        if key in self._passes:
            self._passes.move_to_end(key)
            if self._passes[key].is_captured:
                return self._passes[key].replay(batch)
        return self._run_first(key, batch)

    def _composition(self, tasks: tuple[str, ...]) -> Composition:
        slabs = [self._model.registry.slab_of(name) for name in tasks]
        for slab in slabs:
            # Before the key is made: binding may lay gradients elsewhere, and a graph of before would add to the old
            # memory.
            slab.bind_gradients()
        bindings = tuple(slab.num_bindings for slab in slabs)
        return Composition(tasks, bindings, self._model.stream.version, self._model.training)

    def _run_first(self, key: tuple[Composition, Shape], batch: MuxBatch) -> torch.Tensor | None:
        """Run a pass that has no graph yet, and capture it where it is time; where that fails, remember and warn."""
        composition, _ = key
        try:
            if key in self._passes or self._plain is None:
                return self._capture(key, batch)
            captured = self._make(key)
            if composition not in self._proven:
                self._prove(reason_against_padding(captured, batch, self._plain, self._dtype()))
                self._proven.add(composition)
            return captured.compute(batch)
        except CannotCaptureError as error:
            self._passes.pop(key, None)
            self._refuse(composition, str(error))
        except Exception as error:  # what is wrong with the pass itself, the eager one will raise
            self._passes.pop(key, None)
            self._refuse(composition, str(error) if isinstance(error, _UnequalError) else _said(error))
            if self._plain is not None:
                # Graphs that nobody has asked for are worth no second try.
                self._has_given_up = True
                self._passes.clear()
        return None

    def _make(self, key: tuple[Composition, Shape]) -> CapturedPass:
        """Keep a new pass under its key; there is no graph of it yet."""
        # Before a new graph takes its memory: graphs of adapters that have moved can never be replayed again.
        self._drop_stale()
        while len(self._passes) >= MAX_PASSES:
            self._passes.popitem(last=False)
        composition, shape = key
        self._passes[key] = CapturedPass(self._model, composition.tasks, shape, self._precision)
        return self._passes[key]

    def _capture(self, key: tuple[Composition, Shape], batch: MuxBatch) -> torch.Tensor:
        """Capture a pass, prove it where nobody has asked for it, and replay it."""
        assert self._make_graph is not None, "the reasons against it were asked for"
        captured = self._passes[key] if key in self._passes else self._make(key)
        captured.capture(batch, self._make_graph())
        self.num_captures += 1
        if self._plain is not None:
            self._prove(reason_against_replay(captured, batch))
        return captured.replay(batch)

    def _prove(self, reason: str | None) -> None:
        if reason is not None:
            raise _UnequalError(reason)

    def _dtype(self) -> torch.dtype:
        """Return what the backbone computes in."""
        device_type = self._model.device.type
        with self._precision():
            has_autocast = torch.is_autocast_enabled(device_type)
            return torch.get_autocast_dtype(device_type) if has_autocast else self._model.backbone.dtype

    def _refuse(self, composition: Composition, reason: str) -> None:
        self._refused.add(composition)
        self._warn_once(reason)

    def _drop_stale(self) -> None:
        """Free the graphs whose adapters or gradients have moved or gone."""
        for key in [key for key in self._passes if not self._is_current(key[0])]:
            del self._passes[key]
        self._refused = {composition for composition in self._refused if self._is_current(composition)}
        self._proven = {composition for composition in self._proven if self._is_current(composition)}

    def _is_current(self, composition: Composition) -> bool:
        if composition.version != self._model.stream.version:
            return False
        bindings = tuple(self._model.registry.slab_of(name).num_bindings for name in composition.tasks)
        return bindings == composition.num_bindings

    def _reason_against(self, batch: MuxBatch) -> str | None:
        if self._make_graph is None:
            return f"there are none on a {self._model.device.type}"
        if batch.input_ids.device.type != "cpu":
            return "a micro-batch did not come from the host"
        if any(batch.target_columns):
            return "rows bring numbers for each token"
        if batch.shared is not None:
            return "rows that begin alike share tokens, others in each step"
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


def _said(error: Exception) -> str:
    return f"capturing failed with {type(error).__name__}: {error}"


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
    if model.objectives.smoothed(model.tasks):
        return "a task smooths its labels (label_smoothing_factor)"
    if model.noise.is_on:
        return "a task adds noise to its embeddings (neftune_noise_alpha)"
    if encoders_of(model):
        return "a task's prompt stands before each of its sequences"
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
