"""`Profile`: how long the parts of a training step take on one device, measured or from data sheets (M §4).

The cost model (Eq. 3 and 4) looks everything up here. `peft_mux.planning.profiling.backbone` measures profiles;
`analytic_profile` makes one from data-sheet numbers and says so in `source`: good for comparing plans rather than for
promising seconds. `Parts` holds one number for each part of a step that is timed apart: seconds, or factors over those
of a profile. Nothing here touches a device.

`Curve` and `AdapterTable` are measured points as functions: over a count, and over rank, width and tokens of an
adapter.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from peft_mux.scheduler.costs.hardware import Device, Overlap
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.plan import Link, from_plain


@dataclass(frozen=True, slots=True)
class Curve:
    """A value over a count, such as seconds over tokens: piecewise linear between measured points.

    Below the first point the value is constant, because a launch takes its time however little it does; a count of 0
    gives 0. Above the last point the last slope continues, or a s + b s^2 through the last two points if the value
    grows with the square of the count.

    Attributes:
        counts: the measured counts, ascending and above 0.
        values: the value at each count, 0 or more, not falling (`measured` levels noise).
        is_quadratic: whether the value grows with the square of the count, as attention does.

    Raises:
        ValueError: for other points.
    """

    counts: tuple[float, ...]
    values: tuple[float, ...]
    is_quadratic: bool = False

    def __post_init__(self) -> None:
        if not self.counts or len(self.counts) != len(self.values):
            raise ValueError(
                f"counts and values must have equally many entries, got {len(self.counts)} and {len(self.values)}."
            )
        _require_ascending("counts", self.counts)
        if min(self.values) < 0 or not all(map(math.isfinite, self.values)) or np.any(np.diff(self.values) < 0):
            raise ValueError(
                f"values must be finite, 0 or more, not falling, got {self.values[:5]}. Use Curve.measured for "
                "measurements."
            )

    @classmethod
    def measured(cls, counts: ArrayLike, values: ArrayLike, *, is_quadratic: bool = False) -> Curve:
        """Return the curve of measurements; noise that makes a later value lower than an earlier one is levelled."""
        levelled = _levelled(np.asarray(values, dtype=float))
        return cls(tuple(np.asarray(counts, dtype=float).tolist()), tuple(levelled.tolist()), is_quadratic)

    def __call__(self, count: ArrayLike) -> Any:
        """Return the value at a count, or at each count of an array."""
        x = np.asarray(count, dtype=float)
        last, value = self.counts[-1], self.values[-1]
        if len(self.counts) == 1:
            # A single point has no slope: a power through 0 is all that is known.
            beyond = value * (x / last) ** (2 if self.is_quadratic else 1)
        else:
            before, value_before = self.counts[-2], self.values[-2]
            beyond = value + (x - last) * (value - value_before) / (last - before)
            # b of a s + b s^2. If it is not above 0, the cost of a launch outweighs the square: the slope is better.
            square = (value / last - value_before / before) / (last - before)
            if self.is_quadratic and square > 0:
                beyond = x * (value / last + square * (x - last))
        y = np.where(x > last, beyond, np.interp(x, self.counts, self.values))
        y = np.where(x <= 0, 0.0, y)
        return float(y) if np.ndim(count) == 0 else y

    def scaled(self, factor: float) -> Curve:
        """Return the curve times a factor of 0 or more."""
        return replace(self, values=tuple(value * factor for value in self.values))


@dataclass(frozen=True)
class AdapterTable:
    """A value over rank, width and tokens: linear in each between the points.

    Beyond the points, rank and width continue in proportion to the last one, tokens as in `Curve`.

    Attributes:
        ranks: the measured ranks, ascending.
        widths: the measured input plus output features, ascending.
        tokens: the measured rows of an adapter, ascending.
        values: the values as nested tuples [ranks, widths, tokens], each 0 or more.

    Raises:
        ValueError: for shapes that do not match, or points that are not ascending.
    """

    ranks: tuple[float, ...]
    widths: tuple[float, ...]
    tokens: tuple[float, ...]
    values: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for name in ("ranks", "widths", "tokens"):
            _require_ascending(name, getattr(self, name))
        shape = len(self.ranks), len(self.widths), len(self.tokens)
        values = self._array
        if values.shape != shape or not np.all(np.isfinite(values)) or values.min() < 0:
            raise ValueError(
                f"values must be finite numbers of 0 or more in shape {shape}, got shape {values.shape}. Give one "
                "for each rank, width and number of tokens."
            )

    @classmethod
    def measured(
        cls, ranks: ArrayLike, widths: ArrayLike, tokens: ArrayLike, measurements: NDArray[Any], *, level: bool = True
    ) -> AdapterTable:
        """Return the table of measurements `[ranks, widths, tokens]`; `level` levels noise along tokens and ranks."""
        array = np.asarray(measurements, dtype=float)
        if level:
            array = np.apply_along_axis(_levelled, 2, array)
            array = np.apply_along_axis(_levelled, 0, array)
        rank_points, width_points, token_points = (
            tuple(np.asarray(points, dtype=float).tolist()) for points in (ranks, widths, tokens)
        )
        values = tuple(tuple(map(tuple, plane)) for plane in array.tolist())
        return cls(rank_points, width_points, token_points, values)

    @classmethod
    def constant(cls, value: float) -> AdapterTable:
        """Return a table in which every look-up returns `value`."""
        return cls((1.0,), (1.0,), (1.0,), (((value,),),))

    @cached_property
    def _array(self) -> NDArray[Any]:
        return np.asarray(self.values, dtype=float)

    def __call__(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike, *, grows: bool = True) -> Any:
        """Return the value at a point, or at each point of arrays that broadcast.

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads; 0 gives 0 if `grows` is set.
            grows: whether the value continues beyond the points, as times do; a share stays at the last value.
        """
        r, w, t = np.broadcast_arrays(*(np.asarray(part, dtype=float) for part in (rank, width, tokens)))
        values = self._array
        rank_axis, width_axis = _bracket(self.ranks, r), _bracket(self.widths, w)
        axes = (rank_axis, width_axis, _bracket(self.tokens, t, extend=grows))
        # Trilinear: each of the eight corners around a point counts by how near it is.
        index, weight = [], np.ones(())
        for place, ((lower, way, _), size) in enumerate(zip(axes, values.shape, strict=True)):
            shape = [1] * 3
            shape[place] = 2
            index.append(np.stack([lower, np.minimum(lower + 1, size - 1)]).reshape(*shape, *r.shape))
            weight = weight * np.stack([1 - way, way]).reshape(*shape, *r.shape)
        result = (weight * values[tuple(index)]).reshape(8, *r.shape).sum(axis=0)
        if grows:
            if len(self.tokens) == 1:  # a single point has no slope to continue
                result = result * np.maximum(t / self.tokens[0], 1.0)
            result = np.where(t <= 0, 0.0, np.maximum(result, 0.0) * rank_axis[2] * width_axis[2])
        return float(result) if result.ndim == 0 else result

    def scaled(self, factor: float) -> AdapterTable:
        """Return the table times a factor of 0 or more."""
        scaled = (np.asarray(self.values) * factor).tolist()
        return replace(self, values=tuple(tuple(map(tuple, plane)) for plane in scaled))


def _bracket(points: tuple[float, ...], x: NDArray[Any], *, extend: bool = False) -> tuple[NDArray[Any], ...]:
    """Return the index of the point at or below each x, the way to the next one, and x over the last point (1 within).

    With `extend` the way may exceed 1 on the last piece, and the ratio is 1.
    """
    ratio = np.ones(x.shape) if extend else np.maximum(x / points[-1], 1.0)
    if len(points) == 1:
        return np.zeros(x.shape, dtype=int), np.zeros(x.shape), ratio
    known = np.asarray(points)
    # Never the last point, so that there is always a next one.
    index = np.minimum(np.maximum(np.searchsorted(known, x, side="right") - 1, 0), len(points) - 2)
    way = np.maximum((x - known[index]) / (known[index + 1] - known[index]), 0.0)
    return index, way if extend else np.minimum(way, 1.0), ratio


def _levelled(values: NDArray[Any]) -> NDArray[Any]:
    """Return the nearest sequence that does not fall (in the largest difference), never below 0."""
    rising = np.maximum.accumulate(values)
    falling = np.minimum.accumulate(values[::-1])[::-1]
    return np.maximum((rising + falling) / 2, 0.0)


def _require_ascending(field: str, points: tuple[float, ...]) -> None:
    if not points or points[0] <= 0 or any(b <= a for a, b in itertools.pairwise(points)):
        raise ValueError(f"{field} must be at least one number, above 0, ascending, got {points[:5]}. Sort them.")


class Parts(NamedTuple):
    """One number, or array of numbers, for each part of a step.

    Attributes:
        fixed: what a pass takes whatever its size.
        tokens: what grows with tokens in the backbone: layers without attention products, embedding, output head.
        attention: attention products, which grow with the square of lengths, and their launches.
        adapters: adapters of all tasks in a pass.
        communication: sums and gatherings over devices within a pass, and messages between stages.
        optimizer: what lies between the passes of two steps: updates, and the step's own overhead.
    """

    fixed: Any = 0.0
    tokens: Any = 0.0
    attention: Any = 0.0
    adapters: Any = 0.0
    communication: Any = 0.0
    optimizer: Any = 0.0

    @property
    def total(self) -> Any:
        """The sum: seconds of all parts together."""
        return sum(self)

    def times(self, factors: Parts) -> Parts:
        """Return these seconds, each part multiplied by its factor."""
        return Parts(*(part * factor for part, factor in zip(self, factors, strict=True)))

    def __str__(self) -> str:
        """Return the numbers in words, two decimals each."""
        return ", ".join(f"{name} {value:.2f}" for name, value in self._asdict().items())


AS_PROFILED = Parts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""The factors of a profile that is right as it is."""

FORMAT_VERSION = 1

_CURVES = ("layer", "attention", "head", "embedding", "optimizer")
_LEAST_PASS_S = 1e-5
"""So that a factor has something to multiply even if a profile was measured to have no overhead."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of the parts of a step on one device; forward and backward together unless stated otherwise.

    Attributes:
        device: the device that it holds for, such as "cpu, 2 threads".
        dtype: the dtype in which the backbone computes.
        model: signature of the backbone's shapes.
        versions: name and version of everything that the times depend on.
        source: "measured", or "analytic" if nothing was measured.
        layer: seconds over tokens, one decoder layer without the attention product and without adapters.
        attention: seconds over length, the attention product of one sequence in one layer; continued by its square.
        adapter: seconds over rank, width and tokens, one adapter of one linear layer alone (t_a of M Eq. 3).
        utilization: u_a of M Eq. 3 over the same, from 0 to 1.
        head: seconds over targets, output head and loss.
        embedding: seconds over tokens, what lies before and after the layers: embedding, positions, last norm.
        optimizer: seconds over parameters of one task: gradient norm, last good copy, AdamW.
        pass_overhead_s: seconds of each pass whatever its size.
        step_overhead_s: seconds of each step whatever its size.
        attention_call_s: seconds of each group of sequences of near-equal length in one layer; 0 if one call serves all
            lengths.
        forward_fraction: the part of a pass that is its forward.
        link: the link between two devices; `None` for one device.
        overlap: what passes in turns cost and hide among the devices of a stage; `None` if that was not measured.
        layer_host_s: seconds of the host to launch one layer while the device computes; 0 if the times include it.
        recompute: seconds over tokens, what the backward pass of one layer computes again with `selective_recompute`.
        recompute_host_s: seconds of the host to launch that.
        graph_tokens: most tokens of a pass that is replayed as a CUDA graph, without these launches; 0 for none.

    Raises:
        ValueError: for numbers out of range.
    """

    device: str
    dtype: str
    model: str
    layer: Curve
    attention: Curve
    adapter: AdapterTable
    head: Curve
    embedding: Curve
    optimizer: Curve
    utilization: AdapterTable = field(default_factory=lambda: AdapterTable.constant(1.0))
    pass_overhead_s: float = 0.0
    step_overhead_s: float = 0.0
    attention_call_s: float = 0.0
    forward_fraction: float = 0.5
    versions: tuple[tuple[str, str], ...] = ()
    link: Link | None = None
    overlap: Overlap | None = None
    layer_host_s: float = 0.0
    recompute: Curve = Curve((1.0,), (0.0,))
    recompute_host_s: float = 0.0
    graph_tokens: int = 0
    source: Literal["measured", "analytic"] = "measured"

    def __post_init__(self) -> None:
        if not 0 < self.forward_fraction < 1:
            raise ValueError(
                f"forward_fraction must be between 0 and 1, got {self.forward_fraction}. Backward takes the rest."
            )
        for name in ("pass_overhead_s", "step_overhead_s", "attention_call_s", "layer_host_s", "recompute_host_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}. Give seconds.")
        if self.source not in ("measured", "analytic"):
            raise ValueError(f"source must be 'measured', 'analytic', got {self.source!r}. Say which it is.")

    @property
    def reach(self) -> dict[str, float]:
        """The last measured point of each part, by name: a larger size is continued from there, not looked up."""
        last = {name: getattr(self, name).counts[-1] for name in _CURVES}
        return last | {"adapter": self.adapter.tokens[-1]}

    @property
    def pass_s(self) -> float:
        """Seconds of a pass of any size, always above 0."""
        return max(self.pass_overhead_s, _LEAST_PASS_S)

    @property
    def key(self) -> str:
        """Short digest of device, dtype, model signature and versions, suitable for a file name."""
        return profile_key(self.device, self.dtype, self.model, dict(self.versions))

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps({"format_version": FORMAT_VERSION, "key": self.key, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that `to_json` wrote.

        Raises:
            ValueError: for another format, or contents that are not a profile.
        """
        try:
            data = json.loads(text)
            version = data.pop("format_version", None)
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise ValueError(f"profile must be a JSON object that Profile.to_json wrote ({error}).") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version must be {FORMAT_VERSION}, got {version}. Measure the profile again, with refresh=True."
            )
        # The key follows from the other fields; it is in the file for its reader.
        data.pop("key", None)
        try:
            return from_plain(cls, data)
        except (LookupError, TypeError) as error:
            raise ValueError(f"profile must be what to_json wrote, but lacks or misnames a field ({error}).") from error


def profile_key(device: str, dtype: str, model: str, versions: Mapping[str, str]) -> str:
    """Return the digest under which a profile of these is stored, whatever the order of the versions."""
    text = json.dumps([FORMAT_VERSION, device, dtype, model, sorted(versions.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def shape_signature(shape: ModelShape) -> str:
    """Return a readable name of a backbone's shape, which is part of the key of a profile."""
    return (
        f"L{shape.num_layers}-D{shape.hidden_size}-I{shape.intermediate_size}-A{shape.attention_size}"
        f"-K{shape.key_value_size}-V{shape.vocab_size}-W{shape.backbone_bytes}"
    )


def corrected(profile: Profile, factors: Parts) -> Profile:
    """Return the profile with the times of each part multiplied by its factor, including those of the link."""
    if factors == AS_PROFILED:
        return profile
    # Utilization is a share of the device and no time: it stays.
    overlap = profile.overlap
    if overlap is not None:
        overlap = replace(overlap, turn_s=overlap.turn_s * factors.fixed, host_s=overlap.host_s * factors.fixed)
    return replace(
        profile,
        **{name: getattr(profile, name).scaled(factors.tokens) for name in ("layer", "embedding", "head", "recompute")},
        attention=profile.attention.scaled(factors.attention),
        attention_call_s=profile.attention_call_s * factors.attention,
        adapter=profile.adapter.scaled(factors.adapters),
        optimizer=profile.optimizer.scaled(factors.optimizer),
        step_overhead_s=profile.step_overhead_s * factors.optimizer,
        pass_overhead_s=profile.pass_s * factors.fixed,
        layer_host_s=profile.layer_host_s * factors.fixed,
        recompute_host_s=profile.recompute_host_s * factors.fixed,
        link=None if profile.link is None else profile.link.slowed(factors.communication),
        overlap=overlap,
    )


def with_recomputed_inputs(profile: Profile) -> Profile:
    """Return the profile of a run with `selective_recompute`, if tasks adapt all linear layers."""
    layer_s = np.array(profile.layer.values)
    longer_s = layer_s + profile.recompute(profile.layer.counts)
    # What is computed again is part of the backward: of the whole the forward is a smaller share.
    forward_fraction = profile.forward_fraction * layer_s[-1] / longer_s[-1] if longer_s[-1] else 0.5
    return replace(
        profile,
        layer=Curve.measured(profile.layer.counts, longer_s),
        forward_fraction=float(forward_fraction),
        layer_host_s=profile.layer_host_s + profile.recompute_host_s,
    )


STREAMING_PART = 0.85
"""Of the stated bandwidth, what streaming kernels are assumed to reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How software runs a backbone with adapters, which no data sheet says.

    Attributes:
        elementwise_reads: times that a layer's elementwise operators read or write a hidden state and an MLP state,
            forward and backward.
        adapter_launches: launches of each adapter by itself, forward and backward; 0 if all tasks share them.
        adapter_moves: times that an adapter reads or writes the rows of its linear layer's inputs and outputs.
        adapter_streaming_part: part of the stated bandwidth that the adapters' kernels reach.
        optimizer_bytes: bytes that a step moves for a trained weight: norm of gradients, update, copies.
        attention_tile_s: seconds of a tile of 128 rows for each channel of the queries, forward and backward, on an
            H100; on others in proportion to the bandwidth. Shorter sequences are padded to a tile.
        short_row_tokens: tokens of the longest row that attention reads and writes once instead, without tiles; not if
            heads have more than 128 channels.
        layer_host_s: seconds of the host to launch one layer, forward and backward. A pass takes as long as the
            device or the host, whichever is slower.
        recompute_reads: as `elementwise_reads`, of what the backward pass computes again with `selective_recompute`.
        recompute_host_s: seconds of the host to launch that for one layer.
        graph_tokens: most tokens of a pass that is replayed as a CUDA graph; 0 for none.
    """

    elementwise_reads: float
    adapter_launches: int = 0
    adapter_moves: float = 3.0
    adapter_streaming_part: float = 0.6
    optimizer_bytes: float = 46.0
    attention_tile_s: float = 0.31e-6 / 128
    short_row_tokens: int = 64
    layer_host_s: float = 2.7e-3
    recompute_reads: float = 11.9
    recompute_host_s: float = 0.4e-3
    graph_tokens: int = 0


IDEAL = Execution(
    elementwise_reads=14,
    adapter_launches=6,  # shrink, expand, and four products of the backward pass
    adapter_moves=2.5,
    adapter_streaming_part=STREAMING_PART,
    optimizer_bytes=40,
    attention_tile_s=0.0,
    short_row_tokens=0,
    layer_host_s=0.0,
    recompute_reads=3.2,
    recompute_host_s=0.0,
)
"""Assumed, for software that is not ours and for CPUs: fused operators, every byte at the rate of a copy, no host."""
EAGER = Execution(elementwise_reads=59)
"""This package on a GPU, transformers' own layers.

| field | value | source |
|---|---|---|
| elementwise_reads | 59 | computed: bytes by operator of a layer of Llama-3-8B (`tests/pretended_cuda`) |
| adapter_launches | 0 | by design: one launch serves all tasks, and `layer_host_s` includes it |
| adapter_moves | 3 | computed: x, dy and dx or y are read by shrink, expand and the sum of weight gradients |
| adapter_streaming_part | 0.6 | measured: `kernels` of `benchmarks/results/gpu-h100-rest.json`, 0.3 to 0.7 of a copy |
| optimizer_bytes | 46 | by design: norm 4, one pass of AdamW 36, bf16 copy 6 (torch's multi-tensor AdamW: 110) |
| attention_tile_s | 0.31 us / 128 | inferred: the rest of `floor` in `benchmarks/results/gpu-h100.json` |
| short_row_tokens | 64 | by design (`peft_mux.kernels.attention`, heads of up to 128 channels); not timed |
| layer_host_s | 2.7 ms | measured: 5.5 ms there, times 0.49 by `benchmarks.training.host_passes` since then |
| recompute_reads | 11.9 | computed: bytes by operator of two norms and the activated product of Llama-3-8B |
| recompute_host_s | 0.4 ms | `layer_host_s` times 0.14 by `checkouts --mix host host-selective` |
"""
FUSED = replace(EAGER, elementwise_reads=10, recompute_reads=3.2, recompute_host_s=0.7e-3)
"""The same with Liger's kernels (computed: bytes of its operators in `tests/pretended_cuda`; they take 25 % more of the
host's time if `selective_recompute` runs three of them again); no GPU has timed it."""

# Assumptions of analytic profiles, for which there is no data sheet and nothing was measured.
_ATTENTION_PART = 0.6
"""Of the efficiency of products, what fused attention is assumed to reach."""
_LAYER_OPERATORS = 30
"""Launches of one decoder layer, forward and backward, without adapters."""
_RECOMPUTED_OPERATORS = 3
"""Launches of what `selective_recompute` computes again: two norms and the product of the MLP."""
_TILE_ROWS = 128
SHORT_ROW_CHANNELS = 128
"""Most channels of a head for which `peft_mux.kernels.attention` computes short rows; a test compares the two."""
_TILE_BYTES_PER_S = 3.35e12
"""Bandwidth of the H100 that `Execution.attention_tile_s` holds for."""
_ADAPTER_SATURATION_ELEMENTS = 2**21
"""Tokens times width at which one adapter alone keeps a data-centre GPU busy."""
_HEAD_PRODUCTS = 2
"""Products of the output head: logits and the gradient of the hidden states; the frozen head gets none."""
_COUNTS = np.array([2.0**power for power in range(4, 18)])
_PARAMETERS = np.array([10.0**power for power in range(3, 10)])
_RANKS = np.array([1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])
_SHEET_OVERLAP = Overlap(slowdown=0.1, turn_s=5e-5)
"""On a GPU, if nothing was measured: a collective holds 8 of some 80 to 130 multiprocessors (M §3.4.3)."""


def launch_s(device: Device) -> float:
    """Return the seconds of one launch that analytic profiles assume."""
    return 2e-5 if device.name == "cpu" else 4e-6


def analytic_profile(
    device: Device,
    shape: ModelShape,
    num_devices_per_stage: int = 1,
    *,
    link: Link | None = None,
    execution: Execution = IDEAL,
) -> Profile:
    """Return the profile of a backbone on a device by its data sheet (a roofline); its `source` is "analytic".

    Matrix products take the longer of arithmetic and of reading the weights; element-wise operators and adapters take
    their bytes. Launches are added for a layer, which counts those of its attention product, for an adapter and for the
    head; those of the embedding are part of what a pass costs whatever its size.

    Args:
        device: the data sheet of the device.
        shape: the shape of the backbone.
        num_devices_per_stage: devices among which tensor parallelism divides a stage. Eq. 3 divides base operators by
            it in the cost model, so that here it only limits how well small products fill each device.
        link: the link between devices, if there are several.
        execution: how the software runs on a GPU; CPUs have none.
    """
    if device.name == "cpu":
        execution = IDEAL
    is_cpu, item_bytes, a_launch_s = device.name == "cpu", shape.activation_bytes, launch_s(device)
    flops_per_s = device.flops_per_s * device.efficiency
    bytes_per_s = device.memory_bytes_per_s * STREAMING_PART
    d, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.key_value_size
    # Of a mixture all experts are read in a pass of any size, and each token computes with some of them.
    read_i = (shape.held_intermediate_size or i) / i
    linears = [(d, a, 1.0), (d, k, 1.0), (d, k, 1.0), (a, d, 1.0), (d, i, read_i), (d, i, read_i), (i, d, read_i)]

    def product_s(elements: int, read: float = 1.0) -> NDArray[Any]:
        """Return the seconds of one product of rows with a frozen matrix, of which `read` times as much is read."""
        # Eq. 3 divides by the devices; a product too small to fill its share takes more than that part.
        reading_s = read * elements * item_bytes / bytes_per_s
        return np.maximum(2 * _COUNTS * elements / flops_per_s, reading_s + num_devices_per_stage * a_launch_s)

    # Forward and gradient of the input: frozen weights get no gradient.
    layer_s = sum(2 * product_s(inputs * outputs, read) for inputs, outputs, read in linears)
    one_read_s = _COUNTS * (d + i) * item_bytes / bytes_per_s
    layer_s += execution.elementwise_reads * one_read_s + _LAYER_OPERATORS * a_launch_s
    recompute_s = execution.recompute_reads * one_read_s + _RECOMPUTED_OPERATORS * a_launch_s
    # Causal attention: half of the scores. Two products forward, five backward, where scores are computed again.
    longest = execution.short_row_tokens if shape.head_dim <= SHORT_ROW_CHANNELS else 0
    lengths = np.union1d(_COUNTS, [longest + 1]) if longest else _COUNTS
    attention_s = np.maximum(
        7 * lengths**2 * a / (flops_per_s * _ATTENTION_PART), 8 * lengths * 2 * (a + k) * item_bytes / bytes_per_s
    )
    tiles_s = np.ceil(lengths / _TILE_ROWS) * a * execution.attention_tile_s
    attention_s = np.maximum(attention_s, tiles_s * _TILE_BYTES_PER_S / device.memory_bytes_per_s)
    # Short rows: all keys of a tile for each query; queries, keys, values, outputs and their gradients move once.
    short_s = np.maximum(
        14 * lengths * longest * a / (flops_per_s * _ATTENTION_PART),
        lengths * (5 * a + 6 * k) * item_bytes / bytes_per_s,
    )
    attention_s = np.where(lengths <= longest, short_s, attention_s)
    head_s = _HEAD_PRODUCTS * product_s(d * shape.vocab_size)
    head_s += 4 * _COUNTS * shape.vocab_size * item_bytes / bytes_per_s
    widths = np.array(sorted({float(inputs + outputs) for inputs, outputs, _ in linears}))
    rank, width, tokens = np.meshgrid(_RANKS, widths, _COUNTS, indexing="ij")
    # By bytes: x is read twice, dx updated, y updated, dy read; factors once. Two operations for each weight and token:
    # for the results, the gradient of the input and the gradient of the factors.
    moved_bytes = tokens * width * execution.adapter_moves * item_bytes + 8 * rank * width + 12 * rank * tokens
    adapter_bytes_per_s = device.memory_bytes_per_s * execution.adapter_streaming_part
    adapter_s = np.maximum(6 * tokens * rank * width / flops_per_s, moved_bytes / adapter_bytes_per_s)
    # On a CPU adapters run one after another, each on the whole device.
    busy = np.ones(tokens.shape) if is_cpu else np.clip(width * tokens / _ADAPTER_SATURATION_ELEMENTS, 0.02, 1.0)
    return Profile(
        device=device.name,
        dtype=f"{8 * item_bytes}-bit",
        model=shape_signature(shape),
        layer=Curve.measured(_COUNTS, layer_s),
        attention=Curve.measured(lengths, attention_s, is_quadratic=True),
        adapter=AdapterTable.measured(_RANKS, widths, _COUNTS, adapter_s + execution.adapter_launches * a_launch_s),
        utilization=AdapterTable.measured(_RANKS, widths, _COUNTS, busy, level=False),
        head=Curve.measured(_COUNTS, head_s),
        embedding=Curve.measured(_COUNTS, 6 * _COUNTS * d * item_bytes / bytes_per_s),
        # At least, weights, gradients and moments are read and three of them written; the norm and the copy read again.
        optimizer=Curve.measured(_PARAMETERS, execution.optimizer_bytes * _PARAMETERS / bytes_per_s + 10 * a_launch_s),
        pass_overhead_s=20 * a_launch_s,
        step_overhead_s=50 * a_launch_s,
        layer_host_s=execution.layer_host_s,
        recompute=Curve.measured(_COUNTS, recompute_s),
        recompute_host_s=execution.recompute_host_s,
        graph_tokens=execution.graph_tokens,
        versions=(("analytic", "1"),),
        link=link,
        # On a CPU the same cores compute and sum: what can be hidden there only a measurement shows.
        overlap=None if is_cpu else _SHEET_OVERLAP,
        source="analytic",
    )


def profile_text(profile: Profile) -> str:
    """Return the main times of a profile as a table, forward and backward together."""
    lines = [
        f"profile ({profile.source})  {profile.device}, {profile.dtype}, {profile.model}",
        f"  {'tokens':>8}  {'a layer':>10}  {'one sequence':>13}  {'head, loss':>10}",
    ]
    for tokens in (64, 256, 1024, 4096):
        times = profile.layer(tokens), profile.attention(tokens), profile.head(tokens)
        layer, attention, head = (f"{1e3 * seconds:.3f} ms" for seconds in times)
        lines.append(f"  {tokens:>8,}  {layer:>10}  {attention:>13}  {head:>10}")
    lines.append(
        f"  a pass costs {1e3 * profile.pass_overhead_s:.2f} ms whatever its size; its forward takes"
        f" {profile.forward_fraction:.0%}"
    )
    if profile.overlap is not None:
        known = profile.overlap
        lines.append(
            f"  passes in turns: a turn costs {1e6 * known.turn_s:,.0f} us, computing is {known.slowdown:.0%} slower"
            f" during a sum; one after another, a sum is waited for {known.skew:.0%} of the computing before it longer;"
            f" the host takes {1e6 * known.host_s:,.0f} us more for what lies between two sums"
        )
    if profile.source == "measured":
        reach = {name: f"{last:,.0f}" for name, last in profile.reach.items()}
        lines.append(
            f"  measured up to {reach['layer']} tokens of a layer, {reach['attention']} of one sequence, "
            f"{reach['adapter']} of an adapter, {reach['head']} targets; larger sizes are continued from there"
        )
    return "\n".join(lines)
