"""Times of operators from data-sheet numbers: what a plan stands on where nothing could be measured.

Matrix products take the longer of arithmetic and of reading the weights; element-wise operators and adapters take their
bytes. Launches are added for a layer, which counts those of its attention product, for an adapter and for the head;
those of the embedding are part of what a pass costs whatever its size. Numbers without a data sheet stand here as
assumptions, and nothing was measured for them. Good for comparing plans rather than for promising seconds.
"""

# MERGED: `Parts`: the parts of a step that are timed apart: six numbers, which are seconds, or factors over a
# MERGED: profile's.
# MERGED: `Profile`: how long the parts of a training step take on one device, measured or from data sheets (M §4).
# MERGED: The cost model (Eq. 3 and 4) looks everything up here. `peft_mux.planning.profiling.backbone` measures
# MERGED: profiles;
# MERGED: `analytic_profile` makes one of data-sheet numbers and says so in `source`. Nothing here touches a device.
# MERGED: A profile as a table for the terminal.

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from peft_mux.scheduler.costs.curves import AdapterTable, Curve
from peft_mux.scheduler.costs.hardware import Device, Link, Overlap
from peft_mux.scheduler.costs.model_shape import ModelShape

_BANDWIDTH_PART = 0.85
"""Of the stated bandwidth, what streaming kernels are assumed to reach."""
_ATTENTION_PART = 0.6
"""Of the efficiency of products, what fused attention is assumed to reach."""
_LAUNCH_S = {"cpu": 2e-5}
_GPU_LAUNCH_S = 4e-6
_LAYER_OPERATORS = 30
"""Launches of one decoder layer, forward and backward, without adapters."""
_ADAPTER_LAUNCHES = 6
"""Of one adapter: shrink, expand, and four products of the backward pass."""
_ELEMENTWISE_READS = 14
"""Times that a layer's element-wise operators read or write a hidden state, forward and backward."""
_ADAPTER_SATURATION_ELEMENTS = 2**21
"""Tokens times width at which one adapter alone keeps a data-centre GPU busy."""
_FORWARD_HEAD_PASSES = 2
"""Products of the output head: logits and the gradient of the hidden states; the frozen head gets none."""


class Roofline:
    """Times of operators under the two roofs of a device: arithmetic and bandwidth.

    Args:
        device: the data sheet of the device.
        shape: the shape of the backbone.
        num_devices: devices by which the cost model will divide base operators.
    """

    def __init__(self, device: Device, shape: ModelShape, num_devices: int) -> None:
        """Work out the roofs."""
        self.shape = shape
        self.num_devices = num_devices
        self.is_cpu = device.name == "cpu"
        self.launch_s = _LAUNCH_S.get(device.name, _GPU_LAUNCH_S)
        self.flops_per_s = device.flops_per_s * device.efficiency
        self.bytes_per_s = device.memory_bytes_per_s * _BANDWIDTH_PART
        d, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.key_value_size
        # Of a mixture all experts are read in a pass of any size, and each token computes with some of them.
        self._read_i = (shape.held_intermediate_size or i) / i
        self.linears = ((d, a), (d, k), (d, k), (a, d), (d, i), (d, i), (i, d))

    @property
    def widths(self) -> tuple[int, ...]:
        """Input plus output features of the linear layers of a decoder layer."""
        return tuple(inputs + outputs for inputs, outputs in self.linears)

    def bytes_s(self, num_bytes: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of reading or writing bytes.

        Args:
            num_bytes: bytes that pass through the memory of the device.
        """
        return num_bytes / self.bytes_per_s

    def product_s(self, tokens: NDArray[Any], elements: int, held: float = 1.0) -> NDArray[Any]:
        """Return the seconds of one product of rows with a frozen matrix, on one device's share.

        Args:
            tokens: rows of the product.
            elements: elements of the frozen matrix that a row is multiplied with.
            held: elements of the whole matrix, of which a row needs a part, over those.
        """
        # Eq. 3 divides by the devices; a product too small to fill its share takes more than that part.
        reading = held * elements * self.shape.activation_bytes / self.bytes_per_s
        return np.maximum(2 * tokens * elements / self.flops_per_s, reading + self.num_devices * self.launch_s)

    def layer_s(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of a decoder layer without attention product and adapters.

        Args:
            tokens: tokens of the stream.
        """
        # Forward and gradient of the input: frozen weights get no gradient.
        held = (1.0,) * 4 + (self._read_i,) * 3
        products = sum(
            (2 * self.product_s(tokens, d * k, h) for (d, k), h in zip(self.linears, held, strict=True)),
            np.zeros_like(tokens),
        )
        moved = _ELEMENTWISE_READS * tokens * (self.shape.hidden_size + self.shape.intermediate_size)
        return products + self.bytes_s(moved * self.shape.activation_bytes) + _LAYER_OPERATORS * self.launch_s

    def attention_s(self, length: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of the attention product of one sequence.

        Args:
            length: tokens of the sequence.
        """
        # Causal: half of the scores. Two products forward, five backward (scores are computed anew).
        flops = 7 * length**2 * self.shape.attention_size
        moved = 8 * length * (2 * self.shape.attention_size + 2 * self.shape.key_value_size)
        arithmetic = flops / (self.flops_per_s * _ATTENTION_PART)
        return np.maximum(arithmetic, self.bytes_s(moved * self.shape.activation_bytes))

    def adapter_s(self, rank: NDArray[Any], width: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of one adapter, by bytes: x is read twice, dx updated, y updated, dy read; factors once.

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        moved = tokens * width * 2.5 * self.shape.activation_bytes + 8 * rank * width + 12 * rank * tokens
        # Two operations a weight and token: for the results, the gradient of the input and that of the factors.
        arithmetic = 6 * tokens * rank * width / self.flops_per_s
        launches = _ADAPTER_LAUNCHES * self.launch_s
        return np.maximum(arithmetic, moved / self.bytes_per_s) + launches

    def utilization(self, width: NDArray[Any], tokens: NDArray[Any]) -> NDArray[Any]:
        """Return the part of the device that an adapter keeps busy; all of a CPU, where they run in turn.

        Args:
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        if self.is_cpu:
            return np.ones(np.broadcast(width, tokens).shape)
        return np.clip(width * tokens / _ADAPTER_SATURATION_ELEMENTS, 0.02, 1.0)

    def head_s(self, targets: NDArray[Any]) -> NDArray[Any]:
        """Return the seconds of output head and loss.

        Args:
            targets: loss terms of the pass.
        """
        product = self.product_s(targets, self.shape.hidden_size * self.shape.vocab_size)
        logits = 4 * targets * self.shape.vocab_size * self.shape.activation_bytes
        return _FORWARD_HEAD_PASSES * product + self.bytes_s(logits)


class Parts(NamedTuple):
    """One number for each part of a step.

    Attributes:
        fixed: what a pass takes whatever its size.
        tokens: what grows with tokens in the backbone: layers without attention products, embedding, output head.
        attention: attention products, which grow with the square of lengths, and their launches.
        adapters: adapters of all tasks in a pass.
        communication: sums and gatherings over devices within a pass, and messages between stages.
        optimizer: what lies between the passes of two steps: updates, and the step's own overhead.
    """

    fixed: float = 0.0
    tokens: float = 0.0
    attention: float = 0.0
    adapters: float = 0.0
    communication: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The sum: seconds of all parts together."""
        return sum(self)

    def times(self, factors: Parts) -> Parts:
        """Return these seconds, each part by its factor.

        Args:
            factors: what each part is multiplied by.
        """
        return Parts(*(own * factor for own, factor in zip(self, factors, strict=True)))

    def __str__(self) -> str:
        """Return the numbers in words, two decimals each."""
        return ", ".join(f"{name} {value:.2f}" for name, value in self._asdict().items())


AS_PROFILED = Parts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""The factors of a profile that holds as it is."""


def summed(parts: Iterable[Parts]) -> Parts:
    """Return the sum of seconds of several passes, part by part."""
    return Parts(*(sum(column) for column in zip(*parts, strict=True)))


def factors_of(numbers: Mapping[str, Any]) -> Parts | None:
    """Return factors that were written as a mapping by name; `None` where one is missing or is no factor.

    Args:
        numbers: a factor for each part, by its name.
    """
    values = [numbers.get(name) for name in Parts._fields]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        return None
    factors = Parts(*(float(value) for value in values if value is not None))
    return factors if all(1e-6 < factor < 1e6 for factor in factors) else None


FORMAT_VERSION = 1

_COUNTS = np.array([2.0**power for power in range(4, 18)])
_PARAMETERS = np.array([10.0**power for power in range(3, 10)])
_RANKS = np.array([1.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0])
"""Points of analytic profiles."""
_SHEET_OVERLAP = Overlap(slowdown=0.1, turn_s=5e-5)
"""On a GPU, where nothing was measured: a collective holds 8 of some 80 to 130 multiprocessors (M §3.4.3)."""

_CURVES = ("layer", "attention", "head", "embedding", "optimizer")
_TABLES = ("adapter", "utilization")
_LEAST_PASS_S = 1e-5
"""A factor has something to multiply, also where a profile was measured to have no overhead."""
_OVERHEADS = ("pass_overhead_s", "step_overhead_s", "attention_call_s")


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of the parts of a step on one device; forward and backward together where nothing else is said.

    Attributes:
        device: the device that it holds for, such as "cpu, 2 threads".
        dtype: the dtype in which the backbone computes.
        model: signature of the backbone's shapes.
        versions: name and version of everything that the times depend on.
        source: "measured", or "analytic" where nothing was measured.
        layer: seconds over tokens, one decoder layer without the attention product and without adapters.
        attention: seconds over length, the attention product of one sequence in one layer; continued by its square.
        adapter: seconds over rank, width and tokens, one adapter of one linear layer, by itself.
        utilization: u_a of M Eq. 3 over the same, from 0 to 1.
        head: seconds over targets, output head and loss.
        embedding: seconds over tokens, what lies before and after the layers: embedding, positions, last norm.
        optimizer: seconds over parameters of one task: gradient norm, last good copy, AdamW.
        pass_overhead_s: seconds of each pass whatever its size.
        step_overhead_s: seconds of each step whatever its size.
        attention_call_s: seconds of each further group of sequences of near-equal length in one layer; 0 where one call
            serves all lengths.
        forward_fraction: the part of a pass that is its forward.
        link: the link between two devices; `None` where there is one device.
        overlap: what passes in turns cost and hide among the devices of a stage; `None` where that was not measured.

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
    source: Literal["measured", "analytic"] = "measured"

    def __post_init__(self) -> None:
        if not 0 < self.forward_fraction < 1:
            raise ValueError(
                f"forward_fraction is {self.forward_fraction}; allowed: between 0 and 1. Backward takes the rest."
            )
        for name in _OVERHEADS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: 0 or more. Give seconds.")
        if self.source not in ("measured", "analytic"):
            raise ValueError(f"source is {self.source!r}; allowed: 'measured', 'analytic'. Say which it is.")

    @property
    def reach(self) -> dict[str, float]:
        """The last measured point of each part, by name: a larger size is continued from there, not looked up."""
        last = {name: getattr(self, name).counts[-1] for name in _CURVES}
        return last | {"adapter": self.adapter.tokens[-1]}

    # ---------------------------------------------------------------- lookups

    def layer_s(self, tokens: ArrayLike) -> Any:
        """Return the seconds of one layer's base operators, without the attention product.

        Args:
            tokens: tokens of the stream; a number, or an array of them.
        """
        return self.layer(tokens)

    def attention_s(self, length: ArrayLike) -> Any:
        """Return the seconds of the attention product of one sequence in one layer.

        Args:
            length: tokens of the sequence; a number, or an array of them.
        """
        return self.attention(length)

    def adapter_s(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike) -> Any:
        """Return the seconds of one adapter of one linear layer (t_a of M Eq. 3, forward and backward).

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        return self.adapter(rank, width, tokens)

    def adapter_utilization(self, rank: ArrayLike, width: ArrayLike, tokens: ArrayLike) -> Any:
        """Return the part of the device that one adapter keeps busy (u_a of M Eq. 3).

        Args:
            rank: R, the rank of the adapter.
            width: input plus output features of the linear layer.
            tokens: rows that the adapter reads.
        """
        return self.utilization(rank, width, tokens, grows=False)

    def head_s(self, num_targets: ArrayLike) -> Any:
        """Return the seconds of output head and loss.

        Args:
            num_targets: loss terms of the pass; a number, or an array of them.
        """
        return self.head(num_targets)

    def embedding_s(self, tokens: ArrayLike) -> Any:
        """Return the seconds of what lies before and after the layers.

        Args:
            tokens: tokens of the stream; a number, or an array of them.
        """
        return self.embedding(tokens)

    def optimizer_s(self, parameters: ArrayLike) -> Any:
        """Return the seconds of one task's update.

        Args:
            parameters: trainable parameters of the task; a number, or an array of them.
        """
        return self.optimizer(parameters)

    # ------------------------------------------------------------------- JSON

    @property
    def key(self) -> str:
        """Short digest of device, dtype, model signature and versions, fit for a file name."""
        return profile_key(self.device, self.dtype, self.model, dict(self.versions))

    def to_json(self) -> str:
        """Return the profile as JSON."""
        return json.dumps({"format_version": FORMAT_VERSION, "key": self.key, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Return the profile that `to_json` wrote.

        Args:
            text: the JSON of a profile in this format version.

        Raises:
            ValueError: for another format, or contents that are not a profile.
        """
        try:
            data = json.loads(text)
            version = data.pop("format_version", None)
        except (json.JSONDecodeError, AttributeError, TypeError) as error:
            raise ValueError(f"profile is no JSON object ({error}); allowed: what Profile.to_json wrote.") from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"format_version is {version}; allowed: {FORMAT_VERSION}. Measure the profile again, with refresh=True."
            )
        # The key follows from the other fields, and stands in the file for its reader.
        data.pop("key", None)
        try:
            for name in _CURVES:
                data[name] = Curve(**{key: _tuples(values) for key, values in data[name].items()})
            for name in _TABLES:
                data[name] = AdapterTable(**{key: _tuples(values) for key, values in data[name].items()})
            data["versions"] = tuple((name, value) for name, value in data["versions"])
            data["link"] = None if data["link"] is None else Link(**data["link"])
            data["overlap"] = None if data.get("overlap") is None else Overlap(**data["overlap"])
            return cls(**data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"profile lacks or misnames a field ({error}); allowed: what to_json wrote.") from error


def profile_key(device: str, dtype: str, model: str, versions: Mapping[str, str]) -> str:
    """Return the digest under which a profile of these is stored.

    Args:
        device: name of the device that the profile holds for.
        dtype: the dtype in which the backbone computes.
        model: signature of the backbone's shapes.
        versions: the version of everything that the times depend on, by name.
    """
    text = json.dumps([FORMAT_VERSION, device, dtype, model, sorted(versions.items())])
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def corrected(profile: Profile, factors: Parts) -> Profile:
    """Return the profile with the times of each part multiplied by its factor, those of the link too.

    Args:
        profile: the profile that factors were measured against.
        factors: what each part takes over what the profile says (`peft_mux.scheduler.costs.fit.PartFit`).

    Raises:
        ValueError: for a factor that is not above 0, or not finite.
    """
    for name, factor in factors._asdict().items():
        if not 0 < factor < math.inf:
            raise ValueError(f"{name} is {factor}; allowed: a factor above 0. Leave out passes that were not measured.")
    if factors == AS_PROFILED:
        return profile
    # Utilization is a share of the device and no time: it stays.
    overlap = profile.overlap
    return replace(
        profile,
        **{name: getattr(profile, name).scaled(factors.tokens) for name in ("layer", "embedding", "head")},
        attention=profile.attention.scaled(factors.attention),
        attention_call_s=profile.attention_call_s * factors.attention,
        adapter=profile.adapter.scaled(factors.adapters),
        optimizer=profile.optimizer.scaled(factors.optimizer),
        step_overhead_s=profile.step_overhead_s * factors.optimizer,
        pass_overhead_s=least_pass_s(profile) * factors.fixed,
        link=None if profile.link is None else profile.link.slowed(factors.communication),
        overlap=overlap
        and replace(overlap, turn_s=overlap.turn_s * factors.fixed, host_s=overlap.host_s * factors.fixed),
    )


def least_pass_s(profile: Profile) -> float:
    """Return the seconds that the factor of the fixed part multiplies: those of a pass, or of a launch or two.

    Args:
        profile: the profile whose passes are predicted.
    """
    return max(profile.pass_overhead_s, _LEAST_PASS_S)


def analytic_profile(
    device: Device, shape: ModelShape, num_devices_per_stage: int = 1, *, link: Link | None = None
) -> Profile:
    """Return the profile of a backbone on a device by its data sheet; its `source` is "analytic".

    Args:
        device: the data sheet of the device.
        shape: the shape of the backbone.
        num_devices_per_stage: devices among which tensor parallelism divides a stage. Eq. 3 divides base operators by
            it in the cost model, so that here it only limits how well small products fill each device.
        link: the link between devices, where there are several.

    Raises:
        ValueError: for fewer than one device.
    """
    if num_devices_per_stage < 1:
        raise ValueError(
            f"num_devices_per_stage is {num_devices_per_stage}; allowed: 1 or more. Use 1 for no sharding."
        )
    roof = Roofline(device, shape, num_devices_per_stage)
    widths = np.array(sorted({float(width) for width in roof.widths}))
    rank, width, tokens = np.meshgrid(_RANKS, widths, _COUNTS, indexing="ij")
    return Profile(
        device=device.name,
        dtype=f"{8 * shape.activation_bytes}-bit",
        model=shape_signature(shape),
        layer=Curve.measured(_COUNTS, roof.layer_s(_COUNTS)),
        attention=Curve.measured(_COUNTS, roof.attention_s(_COUNTS), is_quadratic=True),
        adapter=AdapterTable.measured(_RANKS, widths, _COUNTS, roof.adapter_s(rank, width, tokens)),
        utilization=AdapterTable.measured(_RANKS, widths, _COUNTS, roof.utilization(width, tokens), level=False),
        head=Curve.measured(_COUNTS, roof.head_s(_COUNTS)),
        embedding=Curve.measured(_COUNTS, roof.bytes_s(6 * _COUNTS * shape.hidden_size * shape.activation_bytes)),
        # Weights, gradients and two moments are read and three of them written; the norm and the copy read once more.
        optimizer=Curve.measured(_PARAMETERS, roof.bytes_s(40 * _PARAMETERS) + 10 * roof.launch_s),
        pass_overhead_s=20 * roof.launch_s,
        step_overhead_s=50 * roof.launch_s,
        versions=(("analytic", "1"),),
        link=link,
        # On a CPU the same cores compute and sum: what that leaves to hide only a measurement tells.
        overlap=None if device.name.startswith("cpu") else _SHEET_OVERLAP,
        source="analytic",
    )


def shape_signature(shape: ModelShape) -> str:
    """Return a readable name of a backbone's shape, which takes part in the key of a profile.

    Args:
        shape: the shape of the backbone.
    """
    return (
        f"L{shape.num_layers}-D{shape.hidden_size}-I{shape.intermediate_size}-A{shape.attention_size}"
        f"-K{shape.key_value_size}-V{shape.vocab_size}-W{shape.backbone_bytes}"
    )


def _tuples(values: Any) -> Any:
    return tuple(map(_tuples, values)) if isinstance(values, list) else values


_TOKENS = (64, 256, 1024, 4096)


def profile_text(profile: Profile) -> str:
    """Return the main times of a profile, forward and backward together.

    Args:
        profile: the profile to be shown, measured or analytic.
    """
    lines = [
        f"profile ({profile.source})  {profile.device}, {profile.dtype}, {profile.model}",
        f"  {'tokens':>8}  {'a layer':>10}  {'one sequence':>13}  {'head, loss':>10}",
    ]
    for tokens in _TOKENS:
        times = profile.layer_s(tokens), profile.attention_s(tokens), profile.head_s(tokens)
        layer, attention, head = (f"{1e3 * float(seconds):.3f} ms" for seconds in times)
        lines.append(f"  {tokens:>8,}  {layer:>10}  {attention:>13}  {head:>10}")
    lines.append(
        f"  a pass costs {1e3 * profile.pass_overhead_s:.2f} ms whatever its size, of which the forward takes"
        f" {profile.forward_fraction:.0%}"
    )
    if profile.overlap is not None:
        known = profile.overlap
        lines.append(
            f"  passes in turns: a turn costs {1e6 * known.turn_s:,.0f} us, computing is {known.slowdown:.0%} slower"
            f" beside a sum; one after another, a sum is waited for {known.skew:.0%} of the computing before it longer;"
            f" the host takes {1e6 * known.host_s:,.0f} us more for what lies between two sums"
        )
    if profile.source == "measured":
        reach = {name: f"{last:,.0f}" for name, last in profile.reach.items()}
        lines.append(
            f"  measured up to {reach['layer']} tokens of a layer, {reach['attention']} of one sequence, "
            f"{reach['adapter']} of an adapter, {reach['head']} targets; larger sizes are continued from there"
        )
    return "\n".join(lines)
