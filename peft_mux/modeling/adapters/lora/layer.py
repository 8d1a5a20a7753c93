"""Backward only as deep as a task's lowest adapter: from there on down, its rows need no gradient.

A pass meets adapters from the bottom to the top. What a layer reads depends on the weights of a task only if an adapter
of the task was computed before; so the rows of tasks that a pass has not met yet (`Stream.unmet`) need no gradient
there. The products with frozen weights, which take most of a backward pass, are then made for the others alone.
"""

# MERGED: DoRA: each output feature of `W + s B A` is given a length of its own, which the task trains.
# MERGED: y = m / ||W + s B A|| * (W x + s B A x) + b        the norm of each row is a constant to the gradient (DoRA,
# MERGED: 4.3)
# MERGED: The norms come from products of the small factors, without the matrix `B A` of every task::
# MERGED:     ||W + s B A||^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>        row by row
# MERGED: Shape letters: N rows of one task, D input features, K output features, R rank.
# MERGED: Initialisations that move a part of the backbone's weight into the adapter, without changing the shared
# MERGED: backbone.
# MERGED: PiSSA, OLoRA, CorDA and LoRA-GA begin with factors A0 and B0 and take `s B0 A0` out of the weight, so that
# MERGED: the model
# MERGED: starts where it was. The weight belongs to all tasks; so it stays, and each layer keeps A0 and B0 beside the
# MERGED: adapter.
# MERGED: What is trained is the pair A, B; what it adds to the backbone is `s (B A - B0 A0)`, a LoRA of twice the
# MERGED: rank, and as
# MERGED: such it is saved, in the form into which PEFT converts (`path_initial_model_for_weight_conversion`).
# MERGED: What an adapter does to its task's rows beyond the grouped product `W x + s B A x`.
# MERGED: Most adapters do nothing else, and no layer that holds only such ones pays for the others. Each step works
# MERGED: on the rows
# MERGED: of one task, cut out of the stream, so that no other task's numbers take part.
# MERGED: Shape letters: N rows of one task, D input features, K output features, R rank.
# MERGED: The multiplexed layers: Dispatch, BaseOp, grouped Adapters and Aggregate around a PEFT layer (M §3.2, §3.4.3).
# MERGED: `attach` replaces the `forward` of the layers that PEFT injected and of the backbone's own dropout layers,
# MERGED: on the
# MERGED: instance: modules, parameters and their names stay PEFT's and the model's code is untouched. While the
# MERGED: stream is idle
# MERGED: the original `forward` runs, so `generate`, merging and saving work as ever.

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from torch.nn import functional as F

from peft_mux.kernels import philox
from peft_mux.kernels.availability import runs_kernels
from peft_mux.kernels.lora.group import Base, LoraGroup
from peft_mux.kernels.lora.reference import LinearSlice, LoraSegment, Rows, grouped_lora_slices, num_rows_in
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.adapters.lora.lora_pass import linear_tables
from peft_mux.modeling.adapters.own import own_bias_added, own_biases
from peft_mux.modeling.backbone.modules import frozen_weight
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.slabs import round_up_to_group
from peft_mux.modeling.stream import RowSegment, Stream

_LAYER_OF_FACTOR = re.compile(r"^(?!.*\.experts\.)(?:[^.0-9][^.]*\.)+?(\d+)\..*\.lora_(?:A|B|magnitude_vector)\b")
"""The number of a layer in the name of a factor, as the first number among the names of modules."""
_LEAST_SHARE = 8
"""Less than one in so many rows is not left out, as taking rows apart takes a copy where they do not lie together."""


def lowest_layer(parameters: Iterable[str]) -> int:
    """Return the number of the lowest layer, from 0, that a task has weights in; 0 where its rows go all the way down.

    They do where weights lie elsewhere too, as in embeddings, experts and heads (`Stream.unmet`).

    Args:
        parameters: names of the task's parameters.
    """
    found = [_LAYER_OF_FACTOR.search(name) for name in parameters]
    return min((int(one.group(1)) if one is not None else 0 for one in found), default=0)


def rows_needed(segments: Sequence[RowSegment], unmet: frozenset[str]) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients a layer below needs, as ranges in order; `None` for all.

    Args:
        segments: rows of each task, in order.
        unmet: adapters that the pass has not come to yet.
    """
    needed: list[Rows] = []
    for segment in segments:
        if segment.adapter not in unmet:
            # Neighbours are one range, so that most often nothing is copied.
            joined = bool(needed) and needed[-1].end == segment.start
            start = needed.pop().start if joined else segment.start
            needed.append(Rows(start, segment.end))
    num_rows = sum(segment.end - segment.start for segment in segments)
    num_left_out = num_rows - num_rows_in(needed)
    return None if num_left_out * _LEAST_SHARE < num_rows else tuple(needed)


def rows_needed_now(stream: Stream, num_rows: int) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients are needed below where the pass in flight is now; `None` for all.

    Args:
        stream: the pass in flight.
        num_rows: rows of what is computed with; where they are not the stream's, whose they are is not known.
    """
    # A compiled graph must not depend on who was met.
    if torch.compiler.is_compiling() or not stream.unmet or num_rows != stream.num_rows:
        return None
    return rows_needed(stream.segments, stream.unmet)


class MagnitudeScale:
    """The step of a DoRA adapter: scales what the grouped product gives, or computes both where inputs are dropped.

    Args:
        layer: PEFT's layer.
        adapter: internal id of the task's adapter.
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        """Start without the squares of the frozen weight, which are added up when they are first needed."""
        self._layer, self._adapter = layer, adapter
        self._squares: tuple[tuple[int, int], torch.Tensor] | None = None

    def __call__(
        self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the outputs of the task's rows; see `RowStep`."""
        layer, adapter = self._layer, self._adapter
        magnitude = layer.lora_magnitude_vector[adapter].weight
        weight_KD, bias_K = self._frozen(y_NK.dtype)
        with torch.autocast(y_NK.device.type, enabled=False):
            scale_K = (magnitude / self.norms(weight_KD).to(magnitude.dtype)).to(y_NK.dtype)
            if not drops(layer, adapter):
                # The grouped product has added s B A x already; the frozen bias is not scaled.
                return y_NK * scale_K if bias_K is None else (y_NK - bias_K) * scale_K + bias_K
            # As PEFT has it: the backbone's own part sees the input, and what is added to it sees the dropped one.
            x_ND = drop(x_ND).to(y_NK.dtype)
            a_RD, b_KR = (part[adapter].weight.to(y_NK.dtype) for part in (layer.lora_A, layer.lora_B))
            added = F.linear(F.linear(x_ND, a_RD), b_KR) * layer.scaling[adapter]
            return y_NK + (scale_K - 1) * F.linear(x_ND, weight_KD) + scale_K * added

    @torch.no_grad()
    def norms(self, weight_KD: torch.Tensor) -> torch.Tensor:
        """Return the norms `[K]` of the rows of `W + s B A`, in fp32.

        Args:
            weight_KD: the frozen weight.
        """
        a_RD, b_KR = (part[self._adapter].weight.float() for part in (self._layer.lora_A, self._layer.lora_B))
        scale = self._layer.scaling[self._adapter]
        crossed = (F.linear(a_RD.to(weight_KD.dtype), weight_KD).t().float() * b_KR).sum(dim=1)
        added = (b_KR @ (a_RD @ a_RD.t()) * b_KR).sum(dim=1)
        # Rounding can take a row of zeros below zero.
        return (self._squares_of(weight_KD) + 2 * scale * crossed + scale**2 * added).clamp_min_(0).sqrt_()

    def _squares_of(self, weight_KD: torch.Tensor) -> torch.Tensor:
        frozen = self._layer.get_base_layer().weight
        # Added up once, and again where the backbone was moved, cast or written to.
        key = (frozen.data_ptr(), frozen._version)
        if self._squares is None or self._squares[0] != key:
            self._squares = key, torch.linalg.vector_norm(weight_KD, dim=1, dtype=torch.float32).square()
        return self._squares[1]

    def _frozen(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the frozen weight `[K, D]` and bias `[K]`."""
        base = self._layer.get_base_layer()
        weight, bias = frozen_weight(base)
        if weight is None:
            weight, bias = dequantize_module_weight(base), base.bias
        return weight.to(dtype), None if bias is None else bias.to(dtype)


def drops(layer: Any, adapter: str) -> bool:
    """Whether an adapter drops elements of its input now."""
    # PEFT puts an `Identity`, which has no `p`, where nothing is dropped.
    return layer.training and getattr(layer.lora_dropout[adapter], "p", 0.0) > 0.0


def is_apart(layer: Any, adapter: str) -> bool:
    """Whether the grouped product leaves an adapter out: DoRA that drops, which also scales what was not dropped."""
    return adapter in layer.lora_magnitude_vector and drops(layer, adapter)


_INITIALISERS = ("pissa_init", "olora_init", "corda_init", "lora_ga_init")
"""Methods of PEFT's layer that write into the frozen weight."""

_KEPT = ("lora_initial_A", "lora_initial_B")
"""Where a layer keeps A0 and B0 of each adapter."""


@contextmanager
def backbone_kept() -> Iterator[None]:
    """Let PEFT initialise adapters from the backbone's weights without changing these, in the `with` block."""
    # On the class, for the time of one injection: PEFT makes its layers and initialises them in one go, and draws
    # random numbers on the way, so that what a seed gives depends on every layer before.
    before: dict[str, Any] = {name: getattr(LoraLayer, name) for name in _INITIALISERS}
    for name, method in before.items():
        setattr(LoraLayer, name, _keeping(name, method))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(LoraLayer, name, method)


def _keeping(name: str, method: Callable[..., None]) -> Callable[..., None]:
    def initialise(layer: Any, adapter: str, *args: Any) -> None:
        base = layer.get_base_layer()
        if name == "lora_ga_init" and not hasattr(base, "_peft_loraga_grad"):
            raise ValueError(
                "init_lora_weights='lora_ga' found no gradients on the backbone, without which PEFT draws at random; "
                "allowed: a backbone that peft.tuners.lora.loraga.preprocess_loraga has estimated them on."
            )
        frozen = base.weight.data
        whole = frozen.clone()  # PEFT writes into it, or puts another in its place
        try:
            method(layer, adapter, *args)
        finally:
            base.weight.data = frozen.copy_(whole)
        keep_factors(layer, adapter, layer.lora_A[adapter].weight, layer.lora_B[adapter].weight)

    return initialise


def keep_factors(layer: Any, adapter: str, a_RD: torch.Tensor, b_KR: torch.Tensor) -> None:
    """Keep copies of A0 and B0 beside an adapter; PEFT moves and deletes them with it."""
    for name, factor in zip(_KEPT, (a_RD, b_KR), strict=True):
        if not hasattr(layer, name):
            # Not persistent: the adapter's files have them in another form, see `saved_form.py`.
            setattr(layer, name, BufferDict({}, persistent=False))
            layer.other_param_names = (*layer.other_param_names, name)
        getattr(layer, name)[adapter] = factor.detach().clone()


def initial_factors(layer: Any, adapter: str) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return A0 `[R, D]` and B0 `[K, R]` of an adapter; `None` where it began without taking from the weight."""
    kept = getattr(layer, _KEPT[0], None)
    if kept is None or adapter not in kept:
        return None
    return kept[adapter], getattr(layer, _KEPT[1])[adapter]


Drop = Callable[[torch.Tensor], torch.Tensor]
"""Returns rows `[N, D]` after the dropout of their task in this layer; the rows themselves where nothing is dropped."""


class RowStep(Protocol):
    """One step over the rows of one task."""

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs `[N, K]` of the task's rows.

        Args:
            x_ND: inputs of the layer.
            y_NK: its outputs so far.
            drop: the task's dropout on inputs of this layer.
        """
        ...


class AddedBias(NamedTuple):
    """`lora_bias`: a bias on B, which is scaled as B is, and dropped with nothing."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the bias added."""
        bias = self.layer.lora_B[self.adapter].bias * self.layer.scaling[self.adapter]
        return y_NK + bias.to(y_NK.dtype)


class BlockDiagonal(NamedTuple):
    """`use_bdlora`: one of the factors consists of blocks, so the grouped product leaves the adapter out."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the adapter's added."""
        a, b = self.layer.lora_A[self.adapter], self.layer.lora_B[self.adapter]
        added = b(a(drop(x_ND).to(a.weight.dtype))) * self.layer.scaling[self.adapter]
        return y_NK + added.to(y_NK.dtype)


class InitialPart(NamedTuple):
    """Initialisations that take `s B0 A0` out of the weight (PiSSA and its like): taken out of the outputs instead.

    So the backbone stays as it is, and every task can have its own: `(W - s B0 A0) x = W x - s B0 A0 x`. What the
    layer's own weight computes sees the input before dropout, and so does this.
    """

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs less those of the initial factors."""
        found = initial_factors(self.layer, self.adapter)
        assert found is not None, "only layers that were initialised so have this step"
        a_RD, b_KR = (factor.to(y_NK.dtype) for factor in found)
        s_NR = F.linear(x_ND.reshape(-1, x_ND.shape[-1]).to(y_NK.dtype), a_RD)
        # Taken out within the product, without another tensor as large as the outputs.
        rows = torch.addmm(y_NK.reshape(-1, y_NK.shape[-1]), s_NR, b_KR.t(), alpha=-self.layer.scaling[self.adapter])
        return rows.view_as(y_NK)


class OwnBias(NamedTuple):
    """`bias`: the task's own in place of the frozen one, which the grouped product has added."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the task's bias."""
        return own_bias_added(self.layer.get_base_layer(), self.adapter, y_NK)


def steps_of(layer: Any, adapter: str) -> tuple[RowStep, ...]:
    """Return what an adapter of a layer does beyond the grouped product, in order; mostly nothing."""
    steps: list[RowStep] = []
    own = [OwnBias(layer, adapter)] if adapter in own_biases(layer.get_base_layer()) else []
    if adapter not in layer.lora_A:
        return tuple(own)
    if is_block_diagonal(layer, adapter):
        steps.append(BlockDiagonal(layer, adapter))
    if layer.lora_bias.get(adapter, False):
        steps.append(AddedBias(layer, adapter))
    if initial_factors(layer, adapter) is not None:
        steps.append(InitialPart(layer, adapter))
    if adapter in layer.lora_magnitude_vector:
        steps.append(MagnitudeScale(layer, adapter))
    return (*steps, *own)


def is_block_diagonal(layer: Any, adapter: str) -> bool:
    """Whether a factor of an adapter consists of blocks, which the grouped product does not know."""
    return any(not isinstance(part[adapter], torch.nn.Linear) for part in (layer.lora_A, layer.lora_B))


NAME = "LORA"
"""By which streams know the passes of LoRA layers."""


class MultiplexedLinear(MultiplexedForward):
    """The frozen linear layer once over the stream, and each task's LoRA on its own rows."""

    adds_own_biases = True

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self.group = LinearGroup([self], stream)
        self._steps: dict[str, tuple[RowStep, ...]] = {}

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the layer's output; outside of a pass PEFT's own, for the adapter that is selected."""
        if self.stream.batch is not None:
            return self.multiplexed(x)
        y = self.original(x, *args, **kwargs)
        return self._selected_output(x, y) if self._steps else y

    def find_steps(self) -> None:
        """Look anew at which adapters do more than the grouped product; needed whenever one came."""
        layer: Any = self.module
        adapters = {*layer.lora_A, *own_biases(layer.get_base_layer())}
        found = {adapter: steps_of(layer, adapter) for adapter in adapters}
        self._steps = {adapter: steps for adapter, steps in found.items() if steps}

    def is_grouped(self, adapter: str) -> bool:
        """Whether the grouped product computes an adapter; otherwise its steps do."""
        layer: Any = self.module
        if adapter not in layer.lora_A or adapter not in self._steps:
            return adapter in layer.lora_A
        return not is_apart(layer, adapter) and not is_block_diagonal(layer, adapter)

    def has(self, adapter: str) -> bool:
        """Whether an adapter does anything here."""
        layer: Any = self.module
        return adapter in layer.lora_A or adapter in self._steps

    def weights_of(self, adapter: str) -> list[nn.Parameter]:
        """Return the weights of an adapter that only this layer reads."""
        layer: Any = self.module
        parts = [getattr(layer, name, {}) for name in ("lora_A", "lora_B", "lora_magnitude_vector")]
        return [weight for part in parts if adapter in part for weight in part[adapter].parameters()]

    @property
    def is_plain(self) -> bool:
        """Whether the frozen layer is a matrix that we multiply with ourselves."""
        return frozen_weight(self.base_layer)[0] is not None

    @property
    def base_layer(self) -> Any:
        """The frozen layer under the adapters."""
        # Asked for several times a layer and pass: PyTorch's `__getattr__` would look everywhere else first.
        return self.module._modules["base_layer"]

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        y = self.group.shared_output(self, x) if len(self.group.members) > 1 else self.product(x)
        return self._stepped(x, y) if self._steps else y

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]` of the layer computed by itself, before the steps of its adapters."""
        layer: Any = self.module
        (y,) = self.group.outputs(x)
        return y if self.is_plain else base_output(layer.base_layer, x, self.name) + y

    @torch.compiler.disable()
    def _stepped(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[..., K]` after each task's own steps on its rows."""
        layer: Any = self.module
        segments = self.stream.segments
        if layer.disable_adapters or not any(segment.adapter in self._steps for segment in segments):
            return y
        x_TD, y_TK, parts = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1]), []
        for segment, x_ND, y_NK in zip(segments, self.by_segment(x_TD), self.by_segment(y_TK), strict=True):
            for step in self._steps.get(segment.adapter, ()):
                y_NK = step(x_ND, y_NK, functools.partial(self._dropped, segment))
            parts.append(y_NK)
        # Joined from slices and not masked: 0 * NaN would carry one task's NaN to the others.
        return torch.cat(parts).view_as(y)

    def _dropped(self, segment: RowSegment, x_ND: torch.Tensor) -> torch.Tensor:
        """Return rows of a task after its dropout in this layer, which is drawn as the grouped product draws it."""
        dropout = self.dropout_of(segment.adapter)
        if dropout == 0.0:
            return x_ND
        places = self.stream.places[segment.start : segment.end]
        return philox.dropout(x_ND, places, dropout, segment.draw_seed(self.name), self._window)

    def _selected_output(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return PEFT's own output, with what it does not know of: the initial part of the weight, own biases."""
        layer: Any = self.module
        if layer.disable_adapters or layer.merged:
            return y
        for adapter in layer.active_adapters:
            for step in self._steps.get(adapter, ()):
                y = step(x, y, lambda rows: rows) if isinstance(step, InitialPart | OwnBias) else y
        return y

    def base(self) -> Base:
        """Return the frozen part of the layer, as it lies now."""
        layer: Any = self.module
        return Base(*frozen_weight(self.base_layer), layer.out_features)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass through this layer can be captured: its frozen weight is quantised."""
        if self._steps:
            return f"a task's adapter does more on its own rows than the grouped product ({self.name})"
        return None if self.is_plain else f"layers are quantised ({self.name})"

    def slice(self) -> LinearSlice:
        """Return the layer and the adapters that the tasks of the stream have here."""
        return self.slice_of(self.stream.segments)

    def slice_of(self, rows: Sequence[RowSegment]) -> LinearSlice:
        """Return the layer and the adapters that the tasks of given rows have here."""
        layer: Any = self.module
        segments, factors, window = [], [], self._window
        for segment in rows:
            if self.is_grouped(segment.adapter) and not layer.disable_adapters:
                segments.append(self._segment(segment, window))
                factors.append((layer.lora_A[segment.adapter].weight, layer.lora_B[segment.adapter].weight))
        weight, bias = frozen_weight(layer.base_layer)
        return LinearSlice(weight, bias, layer.out_features, segments, factors)

    def dropout_of(self, adapter: str) -> float:
        """Return the probability with which an adapter drops its input now."""
        layer: Any = self.module
        # PEFT puts an `Identity`, which has no `p`, where nothing is dropped.
        return getattr(layer.lora_dropout[adapter], "p", 0.0) if layer.training else 0.0

    def _segment(self, rows: RowSegment, window: philox.Window | None) -> LoraSegment:
        layer: Any = self.module
        dropout = self.dropout_of(rows.adapter)
        # A seed is a hash over names, so it is made only where it is drawn from.
        seed = rows.draw_seed(self.name) if dropout > 0.0 else 0
        return LoraSegment(rows.start, rows.end, layer.scaling[rows.adapter], dropout, seed, window)

    @property
    def _window(self) -> philox.Window | None:
        """Which columns of the whole input lie here, in row-parallel layers (`peft_mux.engine.tensor.parallel`)."""
        return self.base_layer.__dict__.get("input_window")  # getattr would raise and catch in every pass

    @property
    def has_window(self) -> bool:
        """Whether some columns of the whole input lie here alone."""
        return "input_window" in self.base_layer.__dict__

    def draws_in_window(self, rows: Sequence[RowSegment]) -> bool:
        """Whether some adapter drops elements of an input of which only some columns lie here."""
        if not self.has_window:
            return False
        adapters = [segment.adapter for segment in rows]
        return any(self.is_grouped(adapter) and self.dropout_of(adapter) > 0.0 for adapter in adapters)


class LinearGroup:
    """Linear layers that read the same activations: the first one called computes all of them (M §3.4.3).

    Model code calls them one after another with one tensor; the others find their outputs ready. Where a model calls
    only some of them with a tensor, they are computed one by one from then on.

    Args:
        members: the layers; often one.
        stream: the model's, which tells which rows are whose.

    Attributes:
        number: the number by which compiled graphs find the group.
        num_columns: columns of S that any tasks may need; kept up to date by `attach`.
        are_apart: whether the model has called only some of them with a tensor.
    """

    def __init__(self, members: list[MultiplexedLinear], stream: Stream) -> None:
        self.members = members
        self.stream = stream
        self.number = stream.maker_of(NAME).enroll(self)
        self.num_columns = 0
        self.are_apart = False
        self._x: torch.Tensor | None = None
        self._pass = -1
        self._parts: dict[tuple[int, ...], LinearGroup] = {}
        self._ready: dict[int, torch.Tensor] = {}

    @property
    def is_training(self) -> bool:
        """Whether adapters drop out."""
        return self.members[0].module.training

    @property
    def widths(self) -> list[int]:
        """Output features of each layer."""
        return [member.module.out_features for member in self.members]  # type: ignore[misc]

    def _usable_pass(self, x: torch.Tensor) -> Any:
        """Return the `LoraPass` that is to compute the layers; `None` where slices shall."""
        lora_pass = self.stream.pass_of(NAME)
        # A loop and no generators, which cost as much as a launch: this is asked in every pass of every layer.
        for member in self.members:
            layer: Any = member.module
            if layer.disable_adapters:
                return None
            # Kernels number draws by the columns that they see, which here are not those of the whole input.
            if member.has_window and member.draws_in_window(self.stream.segments):
                if runs_kernels(x.device):
                    _say_windows()
                return None
        return lora_pass

    def bases(self) -> list[Base]:
        """Return the frozen part of each layer."""
        return [member.base() for member in self.members]

    def tables(self, *of_tasks: Any) -> LoraGroup | None:
        """Return what launches need to know for a set of tasks; see `KernelGroup` of `lora_pass`."""
        return linear_tables(self.members, *of_tasks)

    def _part(self, members: list[MultiplexedLinear]) -> LinearGroup:
        """Return the group of some of the members, which are computed without the others."""
        key = tuple(map(id, members))
        if key not in self._parts:
            self._parts[key] = LinearGroup(members, self.stream)
            self._parts[key].count_columns()
        return self._parts[key]

    def count_columns(self) -> None:
        """Count anew what S needs: whole groups of eight ranks of each layer's greatest adapter."""
        layers: list[Any] = [member.module for member in self.members]
        self.num_columns = sum(round_up_to_group(max(map(int, layer.r.values()), default=0)) for layer in layers)

    def outputs(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return `[..., K]` of each layer, for `x [..., D]`."""
        self.members[0].check_rows(x, x.shape[-1])
        needed = self._meet() if self.stream.unmet else None
        lora_pass, lead = self._usable_pass(x), x.shape[:-1]
        if lora_pass is not None:
            device_type = x.device.type
            autocast = torch.is_autocast_enabled(device_type)
            dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
            if torch.compiler.is_compiling():
                # The dtype is settled above; autocast would cast each product by itself.
                with torch.autocast(device_type, enabled=False):
                    ys = lora_pass.compiled_outputs(self, x.reshape(-1, x.shape[-1]), dtype)
                return tuple(y.view(*lead, -1) for y in ys)
            ys = lora_pass.outputs(self, x, dtype, needed)
            if ys is not None:
                return ys
        x_TD = x.reshape(-1, x.shape[-1])
        ys = grouped_lora_slices(x_TD, [member.slice() for member in self.members], self.stream.places, needed)
        return tuple(y.view(*lead, -1) for y in ys)

    def _meet(self) -> tuple[Rows, ...] | None:
        """Return which rows need the gradient of `x`, and note that the adapters of these layers are met now."""
        stream = self.stream
        layers: list[Any] = [member.module for member in self.members]
        if torch.compiler.is_compiling() or any(layer.disable_adapters for layer in layers):
            # A compiled graph must not depend on who was met, and a frozen pass may ask for gradients of its input.
            stream.unmet = frozenset()
            return None
        needed = rows_needed(stream.segments, stream.unmet)
        stream.unmet = frozenset(a for a in stream.unmet if not any(member.has(a) for member in self.members))
        return needed

    def shared_output(self, member: MultiplexedLinear, x: torch.Tensor) -> torch.Tensor:
        """Return one member's output for `x`."""
        if self.stream.left_out:
            kept = [one for one in self.members if one.module not in self.stream.left_out]
            if len(kept) == 1:
                return self._part(kept).outputs(x)[0]
            if len(kept) < len(self.members):
                return self._part(kept).shared_output(member, x)
        # The same object and not equal numbers: siblings are called with one tensor, and comparing would wait.
        if x is self._x and id(member) in self._ready:
            # Given out once, so that no activation outlives its last reader here.
            y = self._ready.pop(id(member))
            if not self._ready:
                self._x = None
            return y
        # What is left over from another pass was cut off there: a recomputation ends where nothing more is needed.
        # A compiled graph must not depend on the number of the pass.
        this_pass = 0 if torch.compiler.is_compiling() else self.stream.num_passes
        if self._ready and self._pass == this_pass:
            self.are_apart = True
        # Outputs of other activations are of no use, and would be held on to.
        self._ready.clear()
        self._x = None
        if self.are_apart:
            member.group = LinearGroup([member], self.stream)
            member.group.count_columns()
            return member.product(x)
        ys = self.outputs(x)
        outputs = {id(item): y for item, y in zip(self.members, ys, strict=True)}
        y = outputs.pop(id(member))
        self._x, self._pass, self._ready = x, this_pass, outputs
        return y


@functools.cache
def _say_windows() -> None:
    warnings.warn(
        "adapters with dropout on row-parallel layers are computed task by task: kernels draw for whole inputs only.",
        stacklevel=2,
    )
