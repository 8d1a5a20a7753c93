"""A last decoder layer that computes keys and values of all rows, and everything else only of the rows that are read.

No code of a layer is written again. `LastLayerForward` calls the layer's own code twice: with all rows until it asks
for attention, and with the rows that are read to its end, where attention takes the keys and values of the first call.
Projections whose outputs a call does not use give zeros in it::

    first call     all rows     norm            k v -> attention, which keeps them and ends the call
    second call    read rows    norm    q           -> attention -> o -> norm -> MLP

`LastLayer` decides for a model whether this is done, after it was tried on the model itself.

Shape letters: T tokens, D hidden features, U computed rows, R rows that are read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.attention.attention_stream import AttentionStream, KeysReady, LayerCalls
from peft_mux.modeling.attention.rows import ReadRows
from peft_mux.modeling.backbone.modules import find_layers, some_layers
from peft_mux.modeling.backbone.probe import path_of, probe_batch, tolerance_of
from peft_mux.modeling.stream import in_mode, temporary_attributes

_MOST_READ = 0.75
"""Part of a pass's rows above which the last layer computes all of them, including those that no loss reads."""
_TOLERANCE = 1e-5
"""Greatest difference in fp32 on a CPU, as a share of the greatest state: products of other heights round otherwise."""


class Projections(NamedTuple):
    """The part of a layer before its attention.

    Attributes:
        attention: the module that attends.
        of_queries: names there of the linear layers that only queries come from.
        of_keys: names of the others that are called before attention.
    """

    attention: Any
    of_queries: tuple[str, ...]
    of_keys: tuple[str, ...]


class LastLayerForward(MultiplexedForward):
    """Calls a decoder layer twice if only some of its outputs are read, and once if all are.

    Attributes:
        was_narrowed: whether it has computed only some of its rows.
    """

    was_narrowed: bool = False
    _projections: Projections | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the layer returns; rows that are not read hold zeros."""
        attention = kwargs.get("mux_stream")
        # A compiled graph cannot be left in the middle of a layer.
        if not isinstance(attention, AttentionStream) or attention.read is None or torch.compiler.is_compiling():
            return self._own_forward(*args, **kwargs)
        if self._projections is None:
            self._projections = self._find_projections(attention, attention.read, args, kwargs)
        compute = partial(self._compute, self._projections, attention, attention.read)
        may_checkpoint = isinstance(self.module, GradientCheckpointingLayer)
        # In older releases of transformers the layer's call recomputes its activations, and not its forward.
        may_checkpoint = may_checkpoint and "__call__" not in vars(GradientCheckpointingLayer)
        layer: Any = self.module
        if may_checkpoint and layer.gradient_checkpointing and layer.training:
            # Around both calls, where the layer's own forward would recompute each of them.
            return layer._gradient_checkpointing_func(partial(compute, **kwargs), *args)
        return compute(*args, **kwargs)

    def _compute(
        self, found: Projections, attention: AttentionStream, read: ReadRows, *args: Any, **kwargs: Any
    ) -> Any:
        self.was_narrowed, num_rows = True, self.stream.num_rows
        calls = LayerCalls(read.rows, has_own_queries=bool(found.of_queries))
        with temporary_attributes(attention, calls=calls):
            with self._without(found.attention, found.of_queries):
                self._first_call(args, kwargs)
            own_args, own_kwargs = _rows_of((args, kwargs), read.rows, num_rows)
            with self.stream.read_rows(*read), self._without(found.attention, found.of_keys) as changes:
                # Behind attention the layer is unchanged: other passes may run it while this one waits for a sum.
                calls.reached = changes.close
                out = self._own_forward(*own_args, **own_kwargs)
        hidden_1RD = out[0] if isinstance(out, tuple) else out
        # Zeros and not uninitialised memory: what comes next is computed for all rows, and 0 * NaN = NaN.
        wide_1UD = hidden_1RD.new_zeros(hidden_1RD.shape[0], num_rows, *hidden_1RD.shape[2:])
        wide_1UD = wide_1UD.index_copy(1, read.rows, hidden_1RD)
        return (wide_1UD, *out[1:]) if isinstance(out, tuple) else wide_1UD

    def _without(self, attention: Any, names: tuple[str, ...]) -> ExitStack:
        """Return a context in which projections give zeros and the layer recomputes nothing by itself."""
        # Looked up by name, as adapters may have been put around them since.
        modules = [getattr(attention, name) for name in names]
        changes = ExitStack()
        changes.enter_context(temporary_attributes(self.module, gradient_checkpointing=False))
        for module in modules:
            changes.enter_context(temporary_attributes(module, forward=partial(_zeros, _num_outputs(module) or 0)))
        # Siblings that are computed together with them leave them out.
        changes.enter_context(temporary_attributes(self.stream, left_out=frozenset(modules)))
        return changes

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        # From the class that the layer has now, which FSDP2 replaces; with it comes what recomputes activations.
        return type(self.module).forward(self.module, *args, **kwargs)

    def _first_call(self, args: Any, kwargs: Any) -> None:
        try:
            self._own_forward(*args, **kwargs)
        except KeysReady:
            return
        raise UnsupportedModelError(
            f"{self.name} ({type(self.module).__name__}) must attend once, but ended without attention."
        )

    def _find_projections(self, attention: AttentionStream, read: ReadRows, args: Any, kwargs: Any) -> Projections:
        """Return which projections the layer calls before its attention."""
        called: list[nn.Module] = []
        hooks = [one.register_forward_hook(lambda one, *_: called.append(one)) for one in self.module.modules()]
        calls = LayerCalls(read.rows, has_own_queries=False)
        try:
            with temporary_attributes(attention, calls=calls):
                self._first_call(args, kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        children = calls.attention.named_children()
        linear = [name for name, one in children if one in called and _num_outputs(one) is not None]
        # By the names that transformers gives to projections of which only queries come.
        of_queries = tuple(name for name in linear if name.startswith("q_") or name in ("query", "q"))
        return Projections(calls.attention, of_queries, tuple(name for name in linear if name not in of_queries))


def _zeros(num_outputs: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Not expanded from one zero, as some architectures clamp in place.
    return x.new_zeros(*x.shape[:-1], num_outputs)


def _num_outputs(module: Any) -> int | None:
    """Return the output features of a linear layer, perhaps with adapters; `None` for any other module."""
    base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    found = getattr(base, "out_features", getattr(base, "nf", None))
    return found if isinstance(found, int) else None


def _rows_of(value: Any, rows: torch.Tensor, num_rows: int) -> Any:
    """Return arguments of a layer for some rows: cut are tensors `[1, rows, ...]` and `[rows, ...]`."""
    if isinstance(value, torch.Tensor):
        dim = 1 if value.ndim > 1 and value.shape[0] == 1 else 0
        has_rows = value.ndim > dim and value.shape[dim] == num_rows
        return value.index_select(dim, rows) if has_rows else value
    if isinstance(value, dict):
        return {key: _rows_of(one, rows, num_rows) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_rows_of(one, rows, num_rows) for one in value)
    return value


Run = Callable[[MuxBatch, ReadRows | None], torch.Tensor]
"""Returns the last hidden states `[T, D]` of a micro-batch, given which rows are read; `None` for all."""


class LastLayer:
    """Whether the last layer of a model computes only the rows whose outputs are read; methods are given the model.

    Attributes:
        is_wanted: whether it is to be done, if it is exact and saves enough.
        reason: why it is not done on this model, a clause; `None` once it was tried with success.
    """

    def __init__(self) -> None:
        """Wait to be tried."""
        self.is_wanted = True
        self.reason: str | None = "it was not compared with the layer's own results"

    def rows(self, model: Any, batch: MuxBatch) -> ReadRows | None:
        """Return the rows that the last layer computes in a pass whose losses are wanted; `None` for all."""
        # A balancing loss reads the routers of all tokens, those of the last layer too.
        if not self.is_wanted or self.reason is not None or model.stream.routing is not None:
            return None
        read = model.objectives.head.read_rows(batch, model.backbone)
        # If a pass reads nothing, later parts of its rows may still want the keys: all rows are computed.
        if read is None or not 0 < read.offsets[-1] <= _MOST_READ * batch.num_computed:
            return None
        return read

    def check_cut(self, model: Any) -> None:
        """Give up if tensor parallel ranks sum before attention: other passes may run the layer meanwhile."""
        found = find_layers(model.backbone)
        modules = () if found is None else found.layers[-1].modules()
        if self.reason is None and any(getattr(one, "is_over_all_ranks", False) for one in modules):
            self.reason = "a norm before attention is a sum over tensor parallel ranks"

    def prove(self, model: Any, run: Run | None = None) -> None:
        """Compare the states of rows that are read with the layer's own, on a few made-up sequences.

        Args:
            model: the model, with its weights; a stage of one only if it has the last layer.
            run: runs a micro-batch through the last layer, and perhaps through others before it; by default through the
                last layer alone.
        """

        def run_last_layer(batch: MuxBatch, read: ReadRows | None) -> torch.Tensor:
            with some_layers(model.backbone, slice(-1, None)), model.multiplexing(batch):
                return model.hidden_states(batch, read=read)

        try:
            self.reason = _reason_against(model, run or run_last_layer)
        # An unknown architecture may do anything with fewer rows; its last layer then computes all of them.
        except Exception as error:
            self.reason = f"its last layer does not run on some of its rows ({type(error).__name__}: {error})"


def _reason_against(model: Any, run: Run) -> str | None:
    found = find_layers(model.backbone)
    if found is None or not len(found.layers):
        return "its layers are not in one list"
    layer = found.layers[-1]
    replaced = layer.__dict__.get("forward")
    if replaced is not None and not isinstance(replaced, LastLayerForward):
        return "the forward of its last layer was replaced"
    if replaced is not None:
        del layer.forward
    # A new one, as what a layer calls before it attends may have changed.
    layer.forward = forward = LastLayerForward(layer, model.module_names[layer], model.stream)
    batch = probe_batch(model, next(iter(model.tasks)))
    # Of four sequences all rows of none, and none of the third; neither the first row nor the last is left out.
    rows = torch.tensor([0, 3, 6, 17, 18, 25, 34], device=model.device)
    with in_mode(model, training=False), torch.no_grad(), model.without_adapters():
        wide, narrow = (run(batch, one)[rows].float() for one in (None, ReadRows(rows, (0, len(rows)))))
    if not forward.was_narrowed:
        return "the rows that are read do not reach its last layer"
    difference = ((wide - narrow).abs().max() / wide.abs().max().clamp_min(1e-6)).item()
    path = path_of(model)
    tolerance = _TOLERANCE if path == ("cpu", torch.float32) else tolerance_of(path)
    # Written this way round, so that NaN is refused as well.
    if not difference <= tolerance:
        return f"its last layer differs by {difference:.1e} of its size where it computes some rows alone"
    return None
