"""`DiffPruningConfig`: what an adapter of Diff Pruning is like."""

# MERGED: Gates of Diff Pruning: the hard-concrete distribution and how many of its draws are not zero.
# MERGED:     s = sigmoid(log u - log(1 - u) + alpha)        z = min(1, max(0, s * (upper - lower) + lower))
# MERGED:     E[z > 0] = sigmoid(alpha - log(-lower / upper))
# MERGED: Shape letters: K output features, D input features.
# MERGED: A linear layer with a gated or a sparse difference to its weight, as PEFT runs it: one task at a time.
# MERGED: PEFT's tuner of Diff Pruning.

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from peft import PeftConfig
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.modeling.adapters.registration import (
    flag_faults,
    is_number,
    own_peft_type,
    regex_clash_faults,
    register_method,
)

DIFF_PRUNING = own_peft_type("DIFF_PRUNING")

MOST_KEPT = 0.5
"""Share of kept elements up to which values with their places are less than a dense difference."""


@dataclass
class DiffPruningConfig(PeftConfig):
    """Configuration of Diff Pruning (Guo et al., 2021, "Parameter-Efficient Transfer Learning with Diff Pruning").

    A targeted weight `W` becomes `W + z * w`. The gates `z` in [0, 1] are drawn from a hard-concrete distribution,
    whose location `alpha` is learned beside `w`; the number of open gates that is to be expected, times
    `l0_weight`, is added to the task's loss. In evaluation the gates are those of no noise. `DiffPruningModel.prune`
    keeps the elements of greatest magnitude over all targets (the L0-ball projection of the paper), for serving.

    While it trains, an adapter holds two numbers for each element of its targets, as the paper's does; once pruned,
    two for each element that was kept.

    Args:
        target_sparsity: share of the targets' elements that pruning keeps, as the paper calls it: 0.005 is 0.5 %.
        l0_weight: weight of the penalty, for each gate that is open in expectation.
        structured: gate each output feature as a whole beside its elements ("structured" there, with rows for groups).
        alpha_init: the locations at the beginning; 5 leaves nearly all gates open.
        concrete_lower: where the stretched distribution begins, below 0.
        concrete_upper: where it ends, above 1.
        target_modules: names of linear layers, a regular expression over full names, or "all-linear".
        exclude_modules: names of layers, or a regular expression, that are left out.
        layers_to_transform: numbers of the blocks that are adapted; all by default.
        layers_pattern: name of the list of blocks, where it has an unusual one.
        modules_to_save: modules of which a trained copy is saved beside the adapter, such as a new head.
        kept: elements that were kept of each target, by its name; written by `prune`, and `None` before it.

    Raises:
        ConfigError: naming each field with what it may hold.

    Example:
        >>> from peft_mux import DiffPruningConfig
        >>> DiffPruningConfig(target_modules=["q_proj", "v_proj"]).target_sparsity
        0.005
    """

    target_sparsity: float = 0.005
    l0_weight: float = 1.25e-7
    structured: bool = False
    alpha_init: float = 5.0
    concrete_lower: float = -1.5
    concrete_upper: float = 1.5
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = field(default=None)
    kept: dict[str, int] | None = field(default=None)

    def __post_init__(self) -> None:
        """Check the fields, and name the type."""
        super().__post_init__()
        self.peft_type = DIFF_PRUNING
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        raise_faults(diff_pruning_faults(self, type(self).__name__))


def diff_pruning_faults(config: DiffPruningConfig, where: str) -> list[Fault]:
    """Return what is wrong with the fields of a configuration, whatever the backbone.

    Args:
        config: an adapter configuration, whose fields may have been set to anything.
        where: prefix of the fields.
    """
    ranges: list[tuple[str, Any, str]] = [
        ("target_sparsity", lambda value: 0 < value <= MOST_KEPT, f"a share above 0, at most {MOST_KEPT}"),
        ("l0_weight", lambda value: value >= 0, "a finite number of at least 0"),
        ("alpha_init", lambda value: abs(value) <= 50, "a number from -50 to 50"),
        ("concrete_lower", lambda value: -100 <= value < 0, "a number from -100 to 0, without 0"),
        ("concrete_upper", lambda value: 1 < value <= 100, "a number above 1, at most 100"),
    ]
    faults = []
    for name, is_allowed, allowed in ranges:
        value = getattr(config, name)
        if not is_number(value) or not is_allowed(value):
            faults.append(Fault(f"{where}.{name}", shown(value), allowed))
    if config.kept is not None and not _are_counts(config.kept):
        faults.append(Fault(f"{where}.kept", shown(config.kept), "None, or what `prune` has written"))
    return [*faults, *flag_faults([("structured", config.structured)], where), *regex_clash_faults(config, where)]


def _are_counts(kept: object) -> bool:
    return isinstance(kept, dict) and all(
        isinstance(name, str) and isinstance(count, int) and count >= 0 for name, count in kept.items()
    )


class Stretch(NamedTuple):
    """The interval that draws are stretched to before they are cut off at 0 and 1.

    Attributes:
        lower: its beginning, below 0.
        upper: its end, above 1.
    """

    lower: float
    upper: float


class Relaxed(NamedTuple):
    """The trained tensors of one target.

    Attributes:
        delta_KD: what is added to the weight where a gate is open.
        alpha_KD: location of each element's gate.
        row_alpha_K: location of each row's gate; `None` where rows have none.
    """

    delta_KD: torch.Tensor
    alpha_KD: torch.Tensor
    row_alpha_K: torch.Tensor | None = None


class Noise(NamedTuple):
    """What moves the locations of gates when they are drawn: `log u - log(1 - u)`, for `u` uniform in (0, 1).

    Attributes:
        noise_KD: one for each element.
        noise_K: one for each row; `None` where rows have no gate.
    """

    noise_KD: torch.Tensor
    noise_K: torch.Tensor | None = None


def gates(alpha: torch.Tensor, stretch: Stretch, noise: torch.Tensor | None = None) -> torch.Tensor:
    """Return gates in [0, 1] of the shape of `alpha`.

    Args:
        alpha: their locations.
        stretch: the interval of the distribution.
        noise: what moves them, of the same shape; `None` for nothing.
    """
    # In place where autograd keeps nothing of what is written over: each tensor here is as large as a weight.
    opened = torch.sigmoid(alpha) if noise is None else (alpha + noise).sigmoid_()
    stretched = (opened * (stretch.upper - stretch.lower)).add_(stretch.lower)
    return stretched.clamp(0.0, 1.0) if torch.is_grad_enabled() else stretched.clamp_(0.0, 1.0)


def gated_delta(parts: Relaxed, stretch: Stretch, noise: Noise | None = None) -> torch.Tensor:
    """Return what is added to the weight: `[K, D]`.

    Args:
        parts: the trained tensors.
        stretch: the interval of the distribution.
        noise: what the gates are drawn with; `None` for those of no noise.
    """
    delta_KD = parts.delta_KD * gates(parts.alpha_KD, stretch, None if noise is None else noise.noise_KD)
    if parts.row_alpha_K is None:
        return delta_KD
    rows_K = gates(parts.row_alpha_K, stretch, None if noise is None else noise.noise_K)
    return delta_KD * rows_K[:, None]


def expected_l0(parts: Relaxed, stretch: Stretch) -> torch.Tensor:
    """Return how many elements of the difference are to be expected other than zero, as a scalar."""
    shift = math.log(-stretch.lower / stretch.upper)
    open_KD = torch.sigmoid(parts.alpha_KD - shift)
    if parts.row_alpha_K is None:
        return open_KD.sum()
    # Both gates have to be open, and they are drawn apart.
    return (open_KD.sum(1) * torch.sigmoid(parts.row_alpha_K - shift)).sum()


def greatest(deltas: Mapping[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Return which elements are kept of each difference: those of greatest magnitude over all.

    It is the L0-ball projection of the paper.

    Args:
        deltas: differences by name, of any shapes.
        share: share of all elements that is kept; at least one is.

    Returns:
        int32 places within each difference taken row by row, ascending.
    """
    count = max(1, round(share * sum(delta.numel() for delta in deltas.values())))
    best = {name: _best(delta, count) for name, delta in deltas.items()}
    # Of all differences only the best of each can be among the best of all, so they are never laid side by side.
    magnitudes = torch.cat([values for values, _ in best.values()])
    chosen = torch.zeros(len(magnitudes), dtype=torch.bool)
    chosen[magnitudes.topk(count).indices] = True
    parts = chosen.split([len(values) for values, _ in best.values()])
    return {
        name: places[is_chosen].sort().values.to(torch.int32)
        for (name, (_, places)), is_chosen in zip(best.items(), parts, strict=True)
    }


def _best(delta: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    magnitudes = delta.detach().flatten().abs().float()
    values, places = magnitudes.topk(min(count, len(magnitudes)))
    return values.cpu(), places.cpu()


def total(scalars: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of scalars, of which there is one at least."""
    return torch.stack(list(scalars)).sum()


class DiffPruningLayer(BaseTunerLayer):
    """What a layer with differences holds of each adapter, for K output and D input features.

    Attributes:
        diff_pruning_delta: `[K, D]` difference by adapter, before its gates.
        diff_pruning_alpha: `[K, D]` locations of the gates.
        diff_pruning_row_alpha: `[K]` locations of the rows' gates, of structured adapters.
        diff_pruning_values: the elements that were kept, of adapters that were pruned; these have none of the above.
        diff_pruning_places: int32, where these lie in the difference taken row by row.
    """

    adapter_layer_names: tuple[str, ...] = (
        "diff_pruning_delta",
        "diff_pruning_alpha",
        "diff_pruning_row_alpha",
        "diff_pruning_values",
    )
    other_param_names: tuple[str, ...] = ("diff_pruning_places", "stretches")

    def __init__(self, base_layer: nn.Module, shape: tuple[int, int]) -> None:
        """Begin without adapters.

        Args:
            base_layer: the frozen layer.
            shape: its output and its input features.
        """
        self.base_layer, self.shape = base_layer, shape
        self.out_features, self.in_features = shape
        self.diff_pruning_delta, self.diff_pruning_alpha = nn.ParameterDict(), nn.ParameterDict()
        self.diff_pruning_row_alpha, self.diff_pruning_values = nn.ParameterDict(), nn.ParameterDict()
        self.diff_pruning_places = BufferDict(persistent=True)
        self.stretches: dict[str, Stretch] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    def update_layer(self, adapter_name: str, config: DiffPruningConfig, kept: int | None = None) -> None:
        """Add an adapter.

        Args:
            adapter_name: its name.
            config: its configuration.
            kept: elements that were kept of it in this layer; `None` where it is not pruned.
        """
        self.stretches[adapter_name] = Stretch(config.concrete_lower, config.concrete_upper)
        if kept is None:
            self.diff_pruning_delta[adapter_name] = nn.Parameter(torch.zeros(self.shape))
            self.diff_pruning_alpha[adapter_name] = nn.Parameter(torch.full(self.shape, float(config.alpha_init)))
            if config.structured:
                rows = torch.full(self.shape[:1], float(config.alpha_init))
                self.diff_pruning_row_alpha[adapter_name] = nn.Parameter(rows)
        else:
            self.put_kept(adapter_name, torch.zeros(kept), torch.arange(kept, dtype=torch.int32))
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def put_kept(self, adapter: str, values: torch.Tensor, places: torch.Tensor) -> None:
        """Let an adapter be the elements that were kept of it."""
        for parts in (self.diff_pruning_delta, self.diff_pruning_alpha, self.diff_pruning_row_alpha):
            if adapter in parts:
                del parts[adapter]
        self.diff_pruning_values[adapter] = nn.Parameter(values)
        self.diff_pruning_places[adapter] = places

    def parts_of(self, adapter: str) -> Relaxed | None:
        """Return the trained tensors of an adapter; `None` for one that was pruned, or has nothing here."""
        if adapter not in self.diff_pruning_delta:
            return None
        rows = self.diff_pruning_row_alpha.get(adapter)
        return Relaxed(self.diff_pruning_delta[adapter], self.diff_pruning_alpha[adapter], rows)

    def draw(self, adapter: str) -> Noise:
        """Return what an adapter's gates are drawn with, from torch's generator."""
        alpha_KD = self.diff_pruning_alpha[adapter]
        # Away from 0 and 1, where the logit is infinite.
        return Noise(*(torch.logit(torch.rand_like(like), eps=1e-6) for like in (alpha_KD, alpha_KD[:, 0])))

    def delta(self, adapter: str, noise: Noise | None = None) -> torch.Tensor:
        """Return what an adapter adds to the weight, `[K, D]`, differentiable in its tensors.

        Args:
            adapter: one that has something here.
            noise: what its gates are drawn with; `None` for those of no noise.
        """
        parts = self.parts_of(adapter)
        if parts is not None:
            return gated_delta(parts, self.stretches[adapter], noise)
        values: torch.Tensor = self.diff_pruning_values[adapter]
        places: Any = self.diff_pruning_places[adapter]
        flat = values.new_zeros(self.shape[0] * self.shape[1]).index_put((places.long(),), values)
        return flat.view(self.shape)

    def expected_l0(self, adapter: str) -> torch.Tensor | None:
        """Return how many elements of a difference are expected other than zero; `None` for one that was pruned."""
        parts = self.parts_of(adapter)
        return None if parts is None else expected_l0(parts, self.stretches[adapter])

    # ----------------------------------------------------------------- merging

    def check_mergeable(self) -> None:
        """Refuse a frozen weight that nothing can be added to.

        Raises:
            ConfigError: if it is quantised.
        """
        weight = getattr(self.get_base_layer(), "weight", None)
        if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
            raise ConfigError(
                f"merge: got a DIFF_PRUNING adapter on {type(self.get_base_layer()).__name__}, whose weight is"
                " quantised; allowed: weights in full precision. Load the backbone unquantised, and merge there."
            )

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """Return what merging an adapter adds to the frozen layer's weight, in the shape of that weight."""
        self.check_mergeable()
        base: Any = self.get_base_layer()
        delta_KD = self.delta(adapter).detach().to(base.weight.dtype)
        return delta_KD.t() if isinstance(base, Conv1D) else delta_KD

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add adapters to the frozen weight, with the gates of no noise.

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
                    raise ConfigError(
                        f"merge: got adapter {adapter!r} with numbers that are not finite; nothing merged."
                    )
                base.weight.data = merged
                self.merged_adapters.append(adapter)

    def unmerge(self) -> None:
        """Take all merged adapters out of the frozen weight."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        while self.merged_adapters:
            adapter, base = self.merged_adapters.pop(), self.get_base_layer()
            base.weight.data -= self.get_delta_weight(adapter)  # type: ignore[operator, union-attr]


class DiffPruningLinear(nn.Module, DiffPruningLayer):
    """A linear layer to whose weight each active adapter adds its difference."""

    def __init__(
        self,
        base_layer: nn.Module,
        adapter_name: str,
        config: DiffPruningConfig,
        shape: tuple[int, int],
        kept: int | None = None,
    ) -> None:
        """Wrap a layer, with a first adapter."""
        super().__init__()
        DiffPruningLayer.__init__(self, base_layer, shape)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, kept)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `[..., K]`; in training the gates are drawn anew."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        y = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        return y + sum(self._added(x, adapter).to(y.dtype) for adapter in self._active_here())

    def _active_here(self) -> Sequence[str]:
        return [adapter for adapter in self.active_adapters if adapter in self.stretches]

    def _added(self, x: torch.Tensor, adapter: str) -> torch.Tensor:
        is_drawn = self.training and adapter in self.diff_pruning_delta
        delta_KD = self.delta(adapter, self.draw(adapter) if is_drawn else None)
        return F.linear(self._cast_input_dtype(x, delta_KD.dtype), delta_KD)


class DiffPruningModel(BaseTuner):
    """Adds gated differences to weights of linear layers of a model; see `DiffPruningConfig`.

    A loop of one's own adds the penalty to the loss: `loss + model.base_model.l0_penalty()`, once a step.
    """

    prefix: str = "diff_pruning_"
    tuner_layer_cls = DiffPruningLayer
    target_module_mapping = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        kept = None if peft_config.kept is None else peft_config.kept.get(current_key, 0)
        if isinstance(target, DiffPruningLayer):
            target.update_layer(adapter_name, peft_config, kept)
            return
        layer = DiffPruningLinear(target, adapter_name, peft_config, _shape(target, current_key), kept)
        if adapter_name not in self.active_adapters:
            # One more adapter beside the active one, which alone is trained.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _layers(self, adapter: str) -> Iterator[tuple[str, DiffPruningLayer]]:
        for name, module in self.model.named_modules():
            if isinstance(module, DiffPruningLayer) and adapter in module.stretches:
                yield name, module

    def l0_penalty(self, adapter_name: str = "default") -> torch.Tensor:
        """Return what belongs to an adapter's loss, once a step: `l0_weight` for each gate expected to be open.

        Args:
            adapter_name: one that was not pruned.

        Raises:
            ConfigError: if there is no such adapter, or it was pruned.
        """
        counts = [layer.expected_l0(adapter_name) for _, layer in self._layers(adapter_name)]
        found = [count for count in counts if count is not None]
        if not found:
            raise ConfigError(f"l0_penalty: got adapter {adapter_name!r}; allowed: {self._unpruned()}.")
        return self.peft_config[adapter_name].l0_weight * total(found)

    @torch.no_grad()
    def prune(self, adapter_name: str = "default", target_sparsity: float | None = None) -> int:
        """Keep the greatest elements of an adapter's difference, and those alone (the L0-ball projection of the paper).

        Afterwards it has one trainable number for each element that was kept, at a fixed place: it can be saved, which
        writes these alone, merged, or trained further, as the paper does.

        Args:
            adapter_name: one that was not pruned.
            target_sparsity: share of the elements that is kept; that of the configuration by default.

        Returns:
            the number of elements that were kept.

        Raises:
            ConfigError: if there is no such adapter, it was pruned or is merged, or the share is not allowed.
        """
        layers = dict(self._layers(adapter_name))
        if any(layer.parts_of(adapter_name) is None or layer.merged for layer in layers.values()) or not layers:
            raise ConfigError(f"prune: got adapter {adapter_name!r}; allowed: {self._unpruned()}, not merged.")
        config: Any = self.peft_config[adapter_name]
        if target_sparsity is not None:
            fields = {"target_modules": "all-linear", "target_sparsity": target_sparsity}
            config.target_sparsity = DiffPruningConfig(**fields).target_sparsity  # refused there, by name
        places = greatest({name: layer.delta(adapter_name) for name, layer in layers.items()}, config.target_sparsity)
        for name, layer in layers.items():
            delta_KD = layer.delta(adapter_name)
            own = places[name].to(delta_KD.device)
            layer.put_kept(adapter_name, delta_KD.flatten()[own.long()], own)
        config.kept = {name: len(own) for name, own in places.items()}
        return sum(config.kept.values())

    def _check_merge_allowed(self) -> None:
        """Refuse before anything is taken apart."""
        super()._check_merge_allowed()
        for layer in self.model.modules():
            if isinstance(layer, DiffPruningLayer):
                layer.check_mergeable()

    def _unpruned(self) -> str:
        configs: dict[str, Any] = self.peft_config
        return ", ".join(name for name, config in configs.items() if config.kept is None) or "one that was not pruned"


def _shape(target: Any, name: str) -> tuple[int, int]:
    if isinstance(target, nn.Linear):
        return target.out_features, target.in_features
    if isinstance(target, Conv1D):
        return target.nf, target.nx
    raise ConfigError(
        f"DiffPruningConfig.target_modules: got {name} ({type(target).__name__}); allowed: linear layers, to whose"
        " weight a difference can be added."
    )


register_method(DIFF_PRUNING, DiffPruningConfig, DiffPruningModel)
