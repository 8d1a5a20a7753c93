"""A linear layer with a gated or a sparse difference to its weight, as PEFT runs it: one task at a time."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError
from peft_mux.peft_methods.diff_pruning.config import DiffPruningConfig
from peft_mux.peft_methods.diff_pruning.gates import Noise, Relaxed, Stretch, expected_l0, gated_delta


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
