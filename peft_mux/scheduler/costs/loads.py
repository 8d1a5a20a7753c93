"""What the planner knows of a task: the shape of one typical global batch, and its adapters. No model, no data."""

from __future__ import annotations

from dataclasses import dataclass

from peft_mux.packing.row_trie import RowTrie


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """One adapter of one linear layer of one decoder layer.

    Attributes:
        rank: R, the rank of its factors.
        width: input plus output features of the linear layer.
        cut_width: the part of `width` that tensor parallelism divides: outputs of column-parallel layers, inputs of
            row-parallel ones; 0 for a layer that stays whole.
        is_routed: whether `rank` is that of all experts of a mixture together, of which a token passes through some.

    Raises:
        ValueError: where rank or width is below 1, or `cut_width` is not within the width.
    """

    rank: int
    width: int
    cut_width: int = 0
    is_routed: bool = False

    def __post_init__(self) -> None:
        for field in ("rank", "width"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} is {getattr(self, field)}; allowed: 1 or more. Leave out layers without an adapter."
                )
        if not 0 <= self.cut_width <= self.width:
            raise ValueError(f"cut_width is {self.cut_width}; allowed: 0 to {self.width}, the width. Correct it.")

    def device_width(self, devices: int) -> float:
        """Return the input plus output features of the factors on each of the devices that share the layer.

        Args:
            devices: devices that share the layer (tensor parallelism).
        """
        return self.width - self.cut_width + self.cut_width / devices


@dataclass(frozen=True, slots=True)
class TaskLoad:
    """What one task brings into a step.

    Attributes:
        name: name of the task, which no other task of the run has.
        lengths: tokens of each sequence of one typical global batch; empty where no rows are known.
        num_targets: loss terms of that batch.
        adapters: the adapters of ONE decoder layer from `lowest_layer` on; averaged where these layers differ.
        trainable_parameters: number of trainable parameters of the whole task.
        num_steps: optimizer steps that it takes from its first to its last.
        priority: tasks of higher priority are admitted first.
        longest_row_tokens: tokens of the longest of all rows, which a typical batch may lack; 0 where that is not
            known.
        cut_parameters: the part of `trainable_parameters` that tensor parallelism divides; the rest is on every device.
        stays_whole: whether its rows are never cut into parts, as those with a class are not.
        has_reference_forward: whether its rows go through the backbone without adapters before the passes of a step, as
            the reference of DPO does.
        has_batch_forward: whether they go through it with adapters before, as the estimate of KTO's divergence does.
        shared: how many tokens of each sequence others compute, where all are in one pass; empty where none are shared.
        trie: what its rows begin with alike, to cut them into passes by; `None` where they share nothing.
        lowest_layer: the layer of its lowest adapter, counted from 0: below it its rows need no gradient.
        unmet_share: the part of the products with frozen weights that a backward is spared for them in a layer there.

    Raises:
        ValueError: for a sequence without tokens, negative numbers, or more that is cut than there is.
    """

    name: str
    lengths: tuple[int, ...]
    num_targets: int
    adapters: tuple[AdapterLoad, ...]
    trainable_parameters: int
    num_steps: int = 1
    priority: int = 0
    longest_row_tokens: int = 0
    cut_parameters: int = 0
    stays_whole: bool = False
    has_reference_forward: bool = False
    has_batch_forward: bool = False
    shared: tuple[int, ...] = ()
    trie: RowTrie | None = None
    lowest_layer: int = 0
    unmet_share: float = 1.0

    def __post_init__(self) -> None:
        if min(self.lengths, default=1) < 1:
            raise ValueError(
                f"lengths of task {self.name!r} include {min(self.lengths)}; allowed: 1 token or more. Leave out empty "
                "sequences."
            )
        counts = ("num_targets", "trainable_parameters", "num_steps", "longest_row_tokens", "cut_parameters")
        for field in (*counts, "lowest_layer", "unmet_share"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} of task {self.name!r} is {getattr(self, field)}; allowed: 0 or more.")
        if self.shared and len(self.shared) != len(self.lengths):
            raise ValueError(
                f"shared of task {self.name!r} has {len(self.shared)} numbers; allowed: {len(self.lengths)}, one for"
                " each of its lengths, or none."
            )
        if self.cut_parameters > self.trainable_parameters:
            raise ValueError(
                f"cut_parameters of task {self.name!r} is {self.cut_parameters}; allowed: up to its"
                f" {self.trainable_parameters} trainable_parameters."
            )

    @property
    def tokens(self) -> int:
        """Tokens of the global batch (C n_k in M), each shared one once."""
        return sum(self.lengths) - sum(self.shared)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that may come, which no micro-batch splits."""
        return max(self.longest_row_tokens, max(self.lengths, default=0))

    def device_parameters(self, devices: int) -> float:
        """Return the trainable parameters on each of the devices that share every layer.

        Args:
            devices: devices that share every layer (tensor parallelism).
        """
        return self.trainable_parameters - self.cut_parameters + self.cut_parameters / devices
