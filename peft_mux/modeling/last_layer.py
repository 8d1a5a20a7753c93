"""`LastLayerForward`: a decoder layer that computes keys and values of all rows, and all else of those that are read.

Nothing of a layer is written anew. Its own code is called twice: with all rows until it asks for attention, and with
the rows that are read to its end, where attention takes the keys and values of the first call. Projections whose
outputs a call has no use for give zeros in it::

    first call     all rows     norm            k v -> attention, which keeps them and ends the call
    second call    read rows    norm    q           -> attention -> o -> norm -> MLP

Shape letters: U computed rows, R rows that are read.
"""

# MERGED: `LastLayer`: whether the last layer of a model computes the rows alone whose outputs are read.

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.rows import KeysReady, LayerCalls, ReadRows
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.backbone.probe import ComputingPath, path_of, probe_batch, tolerance_of
from peft_mux.modeling.interface import MultiplexedModel

_QUERY_NAMES = ("query", "q")
_QUERY_PREFIX = "q_"
"""How transformers names projections that queries alone come from."""
_MOST_READ = 0.75
"""Part of a pass's rows above which the last layer computes all of them, including those that no loss reads."""


class Projections(NamedTuple):
    """What a layer computes before it asks for attention.

    Attributes:
        attention: the module that attends.
        of_queries: names there of the linear layers that queries alone come from.
        of_keys: names of the others that are called before attention.
    """

    attention: Any
    of_queries: tuple[str, ...]
    of_keys: tuple[str, ...]


class LastLayerForward(MultiplexedForward):
    """Calls a decoder layer twice where only some of its outputs are read, and as ever where all are.

    Attributes:
        was_narrowed: whether it has computed some of its rows alone.
    """

    was_narrowed: bool = False
    _projections: Projections | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns; rows that are not read hold zeros."""
        attention = kwargs.get("mux_stream")
        # A compiled graph cannot be left amid a layer.
        if not isinstance(attention, AttentionStream) or attention.read is None or torch.compiler.is_compiling():
            return self._own_forward(*args, **kwargs)
        if self._projections is None:
            self._projections = self._find(attention, attention.read, args, kwargs)
        layer: Any = self.module
        compute = partial(self._computed, self._projections, attention, attention.read)
        if not _checkpoints_itself(layer):
            return compute(*args, **kwargs)
        # Around both calls, where the layer's own forward would recompute each of them by itself.
        return layer._gradient_checkpointing_func(partial(compute, **kwargs), *args)

    def _computed(
        self, found: Projections, attention: AttentionStream, read: ReadRows, *args: Any, **kwargs: Any
    ) -> Any:
        self.was_narrowed, num_rows = True, self.stream.num_rows
        calls = LayerCalls(read.rows, has_own_queries=bool(found.of_queries))
        with attention.in_calls(calls):
            with self._changed(found.attention, found.of_queries):
                self._first_call(args, kwargs)
            own_args, own_kwargs = _rows_of((args, kwargs), read.rows, num_rows)
            with self.stream.read_rows(*read), self._changed(found.attention, found.of_keys) as changes:
                # Behind attention the layer is as ever: other passes may go through it while this one waits for a sum.
                calls.reached = changes.close
                out = self._own_forward(*own_args, **own_kwargs)
        return _at_their_places(out, read.rows, num_rows)

    @contextmanager
    def _changed(self, attention: Any, names: tuple[str, ...]) -> Iterator[ExitStack]:
        """Let projections give zeros, and the layer recompute nothing by itself, until the stack is closed."""
        with ExitStack() as changes:
            changes.enter_context(_without_checkpointing(self.module))
            changes.enter_context(self._giving_zeros(attention, names))
            yield changes

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        # Of the class that the layer has now, which FSDP2 makes another one, and with it what recomputes.
        return type(self.module).forward(self.module, *args, **kwargs)

    def _first_call(self, args: Any, kwargs: Any) -> None:
        try:
            self._own_forward(*args, **kwargs)
        except KeysReady:
            return
        raise UnsupportedModelError(
            f"{self.name} ({type(self.module).__name__}) ended without attention; allowed: layers that attend once."
        )

    def _find(self, attention: AttentionStream, read: ReadRows, args: Any, kwargs: Any) -> Projections:
        """Return which projections the layer calls before it asks for attention."""
        called: list[nn.Module] = []
        hooks = [one.register_forward_hook(lambda one, *_: called.append(one)) for one in self.module.modules()]
        calls = LayerCalls(read.rows, has_own_queries=False)
        try:
            with attention.in_calls(calls):
                self._first_call(args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        linear = [
            name for name, one in calls.attention.named_children() if one in called and _num_outputs(one) is not None
        ]
        of_queries = [name for name in linear if is_of_queries(name)]
        others = [name for name in linear if name not in of_queries]
        return Projections(calls.attention, tuple(of_queries), tuple(others))

    @contextmanager
    def _giving_zeros(self, attention: Any, names: tuple[str, ...]) -> Iterator[None]:
        """Let projections give zeros in the `with` block, and siblings that are computed together leave them out."""
        # Looked up by name, as adapters may have come around them since.
        modules = [getattr(attention, name) for name in names]
        before = [module.__dict__.get("forward") for module in modules]
        try:
            for module in modules:
                module.__dict__["forward"] = _Zeros(_num_outputs(module) or 0)
            with self.stream.leaving_out(frozenset(modules)):
                yield
        finally:
            for module, forward in zip(modules, before, strict=True):
                del module.__dict__["forward"]
                if forward is not None:
                    module.__dict__["forward"] = forward


def is_of_queries(name: str) -> bool:
    """Whether a projection of an attention module makes queries alone, by its name there."""
    return name.startswith(_QUERY_PREFIX) or name in _QUERY_NAMES


def _checkpoints_itself(layer: nn.Module) -> bool:
    """Whether a layer's own forward recomputes its activations; in older releases of transformers its call does."""
    if "__call__" in vars(GradientCheckpointingLayer) or not isinstance(layer, GradientCheckpointingLayer):
        return False
    return layer.gradient_checkpointing and layer.training


@contextmanager
def _without_checkpointing(layer: Any) -> Iterator[None]:
    before = layer.__dict__.get("gradient_checkpointing")
    layer.__dict__["gradient_checkpointing"] = False
    try:
        yield
    finally:
        del layer.__dict__["gradient_checkpointing"]
        if before is not None:
            layer.__dict__["gradient_checkpointing"] = before


class _Zeros:
    """A linear layer whose outputs nobody reads."""

    def __init__(self, num_outputs: int) -> None:
        self._num_outputs = num_outputs

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Not expanded from one zero, as some architectures clamp in place.
        return x.new_zeros(*x.shape[:-1], self._num_outputs)


def _num_outputs(module: Any) -> int | None:
    """Return the output features of a linear layer, perhaps with adapters; `None` for any other module."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    found = getattr(base, "out_features", getattr(base, "nf", None))
    return found if isinstance(found, int) else None


def _rows_of(value: Any, rows: torch.Tensor, num_rows: int) -> Any:
    """Return arguments of a layer for some rows: whatever has one of each row is cut to those."""
    if isinstance(value, torch.Tensor):
        dim = _dim_of_rows(value, num_rows)
        return value if dim is None else value.index_select(dim, rows)
    if isinstance(value, dict):
        return {key: _rows_of(one, rows, num_rows) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_rows_of(one, rows, num_rows) for one in value)
    return value


def _dim_of_rows(value: torch.Tensor, num_rows: int) -> int | None:
    """Return the dimension that has one of each row: `[1, rows, ...]` or `[rows, ...]`; `None` where none has."""
    if value.ndim > 1 and value.shape[0] == 1:
        return 1 if value.shape[1] == num_rows else None
    return 0 if value.ndim > 0 and value.shape[0] == num_rows else None


def _at_their_places(out: Any, rows: torch.Tensor, num_rows: int) -> Any:
    """Return a layer's hidden states `[1, U, D]` from those of the rows that are read, zeros elsewhere."""
    if isinstance(out, tuple):
        return (_at_their_places(out[0], rows, num_rows), *out[1:])
    # Zeros and not whatever lies in memory: what comes next is computed for all rows, and 0 * NaN = NaN.
    return out.new_zeros(out.shape[0], num_rows, *out.shape[2:]).index_copy(1, rows, out)


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
        if read is None or not 0 < read.offsets[-1] <= _MOST_READ * batch.num_computed:
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
