"""Diff Pruning (Guo et al., 2021; M §2.1): a sparse difference to each of some frozen weights.

    s = sigmoid(log u - log(1 - u) + alpha)        z = min(1, max(0, s * (upper - lower) + lower))
    W becomes W + z * w                            E[z > 0] = sigmoid(alpha - log(-lower / upper))

The gates `z` follow a hard-concrete distribution, whose location `alpha` is learned along with `w`. PEFT lacks the
method, so its configuration and tuner stand here as well. For many tasks, the frozen layer runs once over the stream
and each task's difference on its own rows. No sum of a frozen weight and a difference is ever made, and a difference is
recomputed in the backward pass: between the two passes nothing of its size is held.

Shape letters: T rows of the stream, N of one task, D input and K output features of the frozen layer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from peft import PeftType
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from peft_mux.adapters.registration import (
    OwnMethodConfig,
    OwnMethodKind,
    OwnMethodModel,
    own_peft_type,
    register_method,
)
from peft_mux.errors import ConfigError, Fault, is_real, shown
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.kind import Category, MultiplexedForward, TypeEntry, register_kind
from peft_mux.modeling.backbone.quantized import base_output
from peft_mux.modeling.stream import RowSegment, Stream

DIFF_PRUNING = own_peft_type("DIFF_PRUNING")

MOST_KEPT = 0.5
"""Share of kept elements up to which values with their places take less memory than a dense difference."""


@dataclass
class DiffPruningConfig(OwnMethodConfig):
    """Configuration of Diff Pruning (Guo et al., 2021, "Parameter-Efficient Transfer Learning with Diff Pruning").

    A targeted weight `W` becomes `W + z * w`. The gates `z` in [0, 1] are drawn from a hard-concrete distribution,
    whose location `alpha` is learned together with `w`; the expected number of open gates, times `l0_weight`, is added
    to the task's loss. In evaluation the gates are those without noise. `DiffPruningModel.prune` keeps the elements of
    greatest magnitude over all targets (the L0-ball projection of the paper), for serving.

    While it trains, an adapter holds two numbers for each element of its targets, as the paper's does; once pruned,
    two for each element that was kept.

    Args:
        target_sparsity: share of the targets' elements that pruning keeps, as the paper calls it: 0.005 is 0.5 %.
        l0_weight: weight of the penalty, for each gate that is open in expectation.
        structured: also gate each output feature as a whole ("structured" in the paper, with rows for groups).
        alpha_init: the locations at the beginning; 5 leaves nearly all gates open.
        concrete_lower: where the stretched distribution begins, below 0.
        concrete_upper: where it ends, above 1.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, if it has an unusual one.
        modules_to_save: modules whose trained copy is saved with the adapter, such as a new head.
        kept: elements that were kept of each target, by its name; written by `prune`, and `None` before it.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import DiffPruningConfig
        >>> DiffPruningConfig(target_modules=["q_proj", "v_proj"]).target_sparsity
        0.005
    """

    own_type: ClassVar[PeftType] = DIFF_PRUNING
    target_sparsity: float = 0.005
    l0_weight: float = 1.25e-7
    structured: bool = False
    alpha_init: float = 5.0
    concrete_lower: float = -1.5
    concrete_upper: float = 1.5
    kept: dict[str, int] | None = field(default=None)

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with the values of the fields, beyond their types; `where` is their prefix."""
        allowed = {
            "target_sparsity": (lambda value: 0 < value <= MOST_KEPT, f"a share above 0, at most {MOST_KEPT}"),
            "l0_weight": (lambda value: value >= 0, "a finite number of at least 0"),
            "alpha_init": (lambda value: abs(value) <= 50, "a number from -50 to 50"),
            "concrete_lower": (lambda value: -100 <= value < 0, "a number from -100 to 0, without 0"),
            "concrete_upper": (lambda value: 1 < value <= 100, "a number above 1, at most 100"),
        }
        faults = super().faults(where)
        for name, (is_allowed, words) in allowed.items():
            value = getattr(self, name)
            if not is_real(value) or not is_allowed(value):
                faults.append(Fault(f"{where}.{name}", shown(value), words))
        return faults


class Stretch(NamedTuple):
    """The interval that draws are stretched to before they are clamped to [0, 1]."""

    lower: float
    upper: float


class Relaxed(NamedTuple):
    """The trained tensors of one target.

    Attributes:
        delta_KD: what is added to the weight if a gate is open.
        alpha_KD: location of each element's gate.
        row_alpha_K: location of each row's gate; `None` if rows have none.
    """

    delta_KD: torch.Tensor
    alpha_KD: torch.Tensor
    row_alpha_K: torch.Tensor | None = None


class Noise(NamedTuple):
    """Noise that is added to the locations of gates in training: `log u - log(1 - u)`, for `u` uniform in (0, 1).

    Attributes:
        noise_KD: one for each element.
        noise_K: one for each row; `None` if rows have no gate.
    """

    noise_KD: torch.Tensor
    noise_K: torch.Tensor | None = None


def gates(alpha: torch.Tensor, stretch: Stretch, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Return gates in [0, 1] for locations `alpha`, moved by noise of the same shape if there is any."""
    # In place if autograd does not need what is overwritten: each tensor here is as large as a weight.
    opened = torch.sigmoid(alpha) if noise is None else (alpha + noise).sigmoid_()
    stretched = (opened * (stretch.upper - stretch.lower)).add_(stretch.lower)
    return stretched.clamp(0.0, 1.0) if torch.is_grad_enabled() else stretched.clamp_(0.0, 1.0)


def gated_delta(parts: Relaxed, stretch: Stretch, noise: Noise | None = None) -> torch.Tensor:
    """Return what is added to the weight, `[K, D]`; without noise, the gates are those of evaluation."""
    delta_KD = parts.delta_KD * gates(parts.alpha_KD, stretch, None if noise is None else noise.noise_KD)
    if parts.row_alpha_K is None:
        return delta_KD
    rows_K = gates(parts.row_alpha_K, stretch, None if noise is None else noise.noise_K)
    return delta_KD * rows_K[:, None]


def expected_l0(parts: Relaxed, stretch: Stretch) -> torch.Tensor:
    """Return the expected number of elements of the difference that are not zero, as a scalar."""
    shift = math.log(-stretch.lower / stretch.upper)
    open_KD = torch.sigmoid(parts.alpha_KD - shift)
    if parts.row_alpha_K is None:
        return open_KD.sum()
    # Both gates have to be open, and they are drawn independently.
    return (open_KD.sum(1) * torch.sigmoid(parts.row_alpha_K - shift)).sum()


def greatest(deltas: Mapping[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Return which elements of differences are kept: those of greatest magnitude over all (the L0-ball projection).

    Args:
        deltas: differences by name, of any shapes.
        share: share of all elements that is kept; at least one is.

    Returns:
        int32 places within each difference taken row by row, ascending.
    """
    count = max(1, round(share * sum(delta.numel() for delta in deltas.values())))
    # Only the best of each difference can be among the best of all, so differences are never concatenated.
    flat = {name: delta.detach().flatten().abs().float() for name, delta in deltas.items()}
    best = {name: delta.topk(min(count, len(delta))) for name, delta in flat.items()}
    magnitudes = torch.cat([top.values.cpu() for top in best.values()])
    chosen = torch.zeros(len(magnitudes), dtype=torch.bool)
    chosen[magnitudes.topk(count).indices] = True
    parts = chosen.split([len(top.values) for top in best.values()])
    return {
        name: top.indices.cpu()[is_chosen].sort().values.to(torch.int32)
        for (name, top), is_chosen in zip(best.items(), parts, strict=True)
    }


class DiffPruningLinear(nn.Module, BaseTunerLayer):
    """A linear layer to whose weight each active adapter adds its difference, as PEFT runs it.

    Attributes:
        diff_pruning_delta: `[K, D]` difference by adapter, before its gates.
        diff_pruning_alpha: `[K, D]` locations of the gates.
        diff_pruning_row_alpha: `[K]` locations of the rows' gates, of structured adapters.
        diff_pruning_values: the elements that were kept, of adapters that were pruned; these have none of the above.
        diff_pruning_places: int32, the places of these in the difference taken row by row.
    """

    adapter_layer_names: tuple[str, ...] = (
        "diff_pruning_delta",
        "diff_pruning_alpha",
        "diff_pruning_row_alpha",
        "diff_pruning_values",
    )
    other_param_names: tuple[str, ...] = ("diff_pruning_places", "stretches")

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: DiffPruningConfig,
        shape: tuple[int, int],
        name: str = "",
    ) -> None:
        """Wrap a layer of so many output and input features, with a first adapter; `name` is that of the layer."""
        super().__init__()
        self.base_layer, self.shape = base_layer, shape
        self.out_features, self.in_features = shape
        self.diff_pruning_delta, self.diff_pruning_alpha = nn.ParameterDict(), nn.ParameterDict()
        self.diff_pruning_row_alpha, self.diff_pruning_values = nn.ParameterDict(), nn.ParameterDict()
        self.diff_pruning_places = BufferDict(persistent=True)
        self.stretches: dict[str, Stretch] = {}
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, name)

    def update_layer(self, adapter_name: str, config: DiffPruningConfig, name: str) -> None:
        """Add an adapter."""
        self.stretches[adapter_name] = Stretch(config.concrete_lower, config.concrete_upper)
        if config.kept is None:
            self.diff_pruning_delta[adapter_name] = nn.Parameter(torch.zeros(self.shape))
            self.diff_pruning_alpha[adapter_name] = nn.Parameter(torch.full(self.shape, float(config.alpha_init)))
            if config.structured:
                rows = torch.full(self.shape[:1], float(config.alpha_init))
                self.diff_pruning_row_alpha[adapter_name] = nn.Parameter(rows)
        else:
            count = config.kept.get(name, 0)
            self.put_kept(adapter_name, torch.zeros(count), torch.arange(count, dtype=torch.int32))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def put_kept(self, adapter: str, values: torch.Tensor, places: torch.Tensor) -> None:
        """Reduce an adapter to the elements that were kept of it."""
        for parts in (self.diff_pruning_delta, self.diff_pruning_alpha, self.diff_pruning_row_alpha):
            if adapter in parts:
                del parts[adapter]
        self.diff_pruning_values[adapter] = nn.Parameter(values)
        self.diff_pruning_places[adapter] = places

    def parts_of(self, adapter: str) -> Relaxed | None:
        """Return the trained tensors of an adapter; `None` if it was pruned, or has nothing here."""
        if adapter not in self.diff_pruning_delta:
            return None
        rows = self.diff_pruning_row_alpha.get(adapter)
        return Relaxed(self.diff_pruning_delta[adapter], self.diff_pruning_alpha[adapter], rows)

    def draw(self, adapter: str) -> Noise:
        """Return the noise of an adapter's gates, from torch's generator."""
        alpha_KD = self.diff_pruning_alpha[adapter]
        # Away from 0 and 1, where the logit is infinite.
        return Noise(*(torch.logit(torch.rand_like(like), eps=1e-6) for like in (alpha_KD, alpha_KD[:, 0])))

    def delta(self, adapter: str, noise: Noise | None = None) -> torch.Tensor:
        """Return what an adapter adds to the weight, `[K, D]`, differentiable in its tensors."""
        parts = self.parts_of(adapter)
        if parts is not None:
            return gated_delta(parts, self.stretches[adapter], noise)
        values: torch.Tensor = self.diff_pruning_values[adapter]
        places: Any = self.diff_pruning_places[adapter]
        flat = values.new_zeros(self.shape[0] * self.shape[1]).index_put((places.long(),), values)
        return flat.view(self.shape)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `[..., K]`; in training, each call draws the gates."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        added: Any = 0
        for adapter in self.active_adapters:
            if adapter in self.stretches:
                is_drawn = self.training and adapter in self.diff_pruning_delta
                delta_KD = self.delta(adapter, self.draw(adapter) if is_drawn else None)
                added = added + F.linear(self._cast_input_dtype(x, delta_KD.dtype), delta_KD).to(y.dtype)  # type: ignore[arg-type]
        return y + added

    # ----------------------------------------------------------------- merging

    def check_mergeable(self) -> None:
        """Refuse a frozen weight that nothing can be added to.

        Raises:
            ConfigError: if it is quantised.
        """
        weight = getattr(self.get_base_layer(), "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise ConfigError(
                "merge needs weights in full precision, got a DIFF_PRUNING adapter on a quantised "
                f"{type(self.get_base_layer()).__name__}. Load the backbone unquantised, and merge there."
            )

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """Return what merging an adapter adds to the frozen layer's weight, in the shape of that weight."""
        self.check_mergeable()
        base: Any = self.get_base_layer()
        delta_KD = self.delta(adapter).detach().to(base.weight.dtype)
        return delta_KD.t() if isinstance(base, Conv1D) else delta_KD

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the frozen weight, with the gates of evaluation.

        Args:
            safe_merge: refuse a result that is not finite, and leave the weight as it is.
            adapter_names: which adapters; the active ones by default.

        Raises:
            ConfigError: if the weight is quantised, or the result of `safe_merge` is not finite.
        """
        for adapter in check_adapters_to_merge(self, adapter_names) or ():
            if adapter in self.stretches:
                base: Any = self.get_base_layer()
                merged = base.weight.data + self.get_delta_weight(adapter)
                if safe_merge and not bool(torch.isfinite(merged).all()):
                    raise ConfigError(f"merge: adapter {adapter!r} has numbers that are not finite; nothing is merged.")
                base.weight.data = merged
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Take all merged adapters out of the frozen weight."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            adapter, base = self.merged_adapters.pop(), self.get_base_layer()
            base.weight.data -= self.get_delta_weight(adapter)  # type: ignore[operator, union-attr]


class DiffPruningModel(OwnMethodModel):
    """Adds gated differences to weights of linear layers of a model; see `DiffPruningConfig`.

    A training loop of your own adds the penalty to the loss: `loss + model.base_model.l0_penalty()`, once a step.
    """

    prefix: str = "diff_pruning_"
    tuner_layer_cls = DiffPruningLinear
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def _layers(self, adapter: str) -> Iterator[tuple[str, DiffPruningLinear]]:
        for name, module in self.model.named_modules():
            if isinstance(module, DiffPruningLinear) and adapter in module.stretches:
                yield name, module

    def l0_penalty(self, adapter_name: str = "default") -> torch.Tensor:
        """Return the penalty of an adapter, for once a step: `l0_weight` for each gate expected to be open.

        Raises:
            ConfigError: if there is no such adapter, or it was pruned.
        """
        trained = [
            (layer.parts_of(adapter_name), layer.stretches[adapter_name]) for _, layer in self._layers(adapter_name)
        ]
        counts = [expected_l0(parts, stretch) for parts, stretch in trained if parts is not None]
        if not counts:
            raise ConfigError(f"l0_penalty: the adapter must be {self._unpruned()}, got {adapter_name!r}.")
        return self.peft_config[adapter_name].l0_weight * torch.stack(counts).sum()

    @torch.no_grad()
    def prune(self, adapter_name: str = "default", target_sparsity: float | None = None) -> int:
        """Keep the greatest elements of an adapter's difference, and those alone (the L0-ball projection of the paper).

        Afterwards it has one trainable number for each element that was kept, at a fixed place: it can be saved, which
        writes these alone, merged, or trained further, as the paper does.

        Args:
            adapter_name: an adapter that was not pruned.
            target_sparsity: share of the elements that is kept; that of the configuration by default.

        Returns:
            the number of elements that were kept.

        Raises:
            ConfigError: if there is no such adapter, it was pruned or is merged, or the share is not allowed.
        """
        layers = dict(self._layers(adapter_name))
        if any(layer.parts_of(adapter_name) is None or layer.merged for layer in layers.values()) or not layers:
            raise ConfigError(f"prune: the adapter must be {self._unpruned()}, not merged, got {adapter_name!r}.")
        config: Any = self.peft_config[adapter_name]
        if target_sparsity is not None:
            fields = {"target_modules": "all-linear", "target_sparsity": target_sparsity}
            config.target_sparsity = DiffPruningConfig(**fields).target_sparsity  # refused there, by name
        places = greatest({name: layer.delta(adapter_name) for name, layer in layers.items()}, config.target_sparsity)
        for name, layer in layers.items():
            delta_KD = layer.delta(adapter_name)
            places_of_layer = places[name].to(delta_KD.device)
            layer.put_kept(adapter_name, delta_KD.flatten()[places_of_layer.long()], places_of_layer)
        config.kept = {name: len(places_of_layer) for name, places_of_layer in places.items()}
        return sum(config.kept.values())

    def _check_merge_allowed(self) -> None:
        """Refuse before the adapter is removed."""
        super()._check_merge_allowed()
        for layer in self.model.modules():
            if isinstance(layer, DiffPruningLinear):
                layer.check_mergeable()

    def _unpruned(self) -> str:
        configs: dict[str, Any] = self.peft_config
        return ", ".join(name for name, config in configs.items() if config.kept is None) or "one that was not pruned"


register_method(DIFF_PRUNING, DiffPruningConfig, DiffPruningModel)


class MultiplexedDiff(MultiplexedForward):
    """The frozen layer once over the stream, and each task's difference applied to its own rows.

    In training the gates are drawn once for a task's step and layer: all micro-batches of a global batch, on all
    processes, see the same ones, and they do not depend on other tasks.
    """

    against_graphs = "differences are applied to each task's own rows ({name})"

    def __init__(self, module: nn.Module, name: str, stream: Stream) -> None:
        super().__init__(module, name, stream)
        self._drawn: dict[str, tuple[int, Noise]] = {}

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `[..., K]`."""
        layer: Any = self.module
        self.check_rows(x, x.shape[-1])
        y = base_output(layer.base_layer, x, self.name)

        def changed(segment: RowSegment, y_NK: torch.Tensor, x_ND: torch.Tensor) -> Any:
            stretch, noise = layer.stretches[segment.adapter], self.noise(segment) if layer.training else None

            def with_difference(y_NK: torch.Tensor, x_ND: torch.Tensor, *parts: Any) -> torch.Tensor:
                # The frozen layer has settled the dtype; autocast would cast each product separately.
                with torch.autocast(y_NK.device.type, enabled=False):
                    delta_KD = gated_delta(Relaxed(*parts), stretch, noise)
                    return torch.addmm(y_NK, x_ND.to(y_NK.dtype), delta_KD.to(y_NK.dtype).t())

            parts = layer.parts_of(segment.adapter)
            # Recomputed in the backward pass, as a difference is as large as the frozen weight.
            return checkpoint(with_difference, y_NK, x_ND, *parts, use_reentrant=False, preserve_rng_state=False)

        deltas = {} if layer.disable_adapters else layer.diff_pruning_delta
        return self.by_task(deltas, y, changed, x.reshape(-1, x.shape[-1]))

    def noise(self, rows: RowSegment) -> Noise:
        """Return the noise of a task's gates in this step."""
        layer: Any = self.module
        seed, device = rows.draw_seed(self.name), layer.diff_pruning_delta[rows.adapter].device
        drawn_for, noise = self._drawn.get(rows.adapter, (None, None))
        # Of this step, and here: a model may be moved between two passes.
        if noise is None or drawn_for != seed or noise.noise_KD.device != device:
            num_rows, num_columns = layer.shape
            noise = Noise(philox.uniform(seed, num_rows, num_columns, device).logit_().half())
            if rows.adapter in layer.diff_pruning_row_alpha:
                uniform_K = philox.uniform(rows.draw_seed(f"{self.name}.rows"), 1, num_rows, device)[0]
                noise = noise._replace(noise_K=uniform_K.logit_().half())
            # Kept for the step, in 2 bytes an element, next to the 32 that AdamW holds of it.
            self._drawn[rows.adapter] = seed, noise
            held = layer.diff_pruning_delta
            self._drawn = {adapter: drawn for adapter, drawn in self._drawn.items() if adapter in held}
        return noise


class DiffPruningKind(OwnMethodKind):
    """Diff Pruning as a kind of adapters."""

    has_penalty = True
    forward_type = MultiplexedDiff

    def penalty(self, config: Any, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the penalty on gates that are expected to be open."""
        stretch = Stretch(config.concrete_lower, config.concrete_upper)
        counts = []
        for name, delta_KD in parameters.items():
            site, _, part = name.partition(self._mark)
            if part == "delta":
                alphas = parameters[f"{site}{self._mark}alpha"], parameters.get(f"{site}{self._mark}row_alpha")
                counts.append(expected_l0(Relaxed(delta_KD, *alphas), stretch))
        return config.l0_weight * torch.stack(counts).sum()


_ENTRY = TypeEntry(
    "DIFF_PRUNING",
    Category.FUSED,
    {
        "kept": "the adapter was pruned, which is for serving: load it with PeftModel.from_pretrained, or train the one"
        " that it was pruned from"
    },
    spans_layers="the penalties of other stages do not reach the loss on the last stage",
)
register_kind(DiffPruningKind(_ENTRY, "Diff Pruning"))
