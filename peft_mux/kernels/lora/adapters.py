"""Where the adapters of a group of linear layers lie, and the tables by which launches find them.

Shape letters: D features read, K features of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from peft_mux.kernels import philox
from peft_mux.kernels.lora.factors import Factors
from peft_mux.kernels.lora.tables import MAX_JOINT_RANK, MAX_RANK, RankTable

_COLUMNS = 8
"""Columns of S, and rows of A that follow each other in memory, come in groups of eight."""


class Adapter(NamedTuple):
    """One task's adapter in one linear layer, where kernels find it.

    Attributes:
        a_RD: values of A; rows up to the next multiple of eight are zeros that belong to it.
        b_RK: values of B transposed.
        da_RD: fp32 gradient of A that a backward pass adds to; `None` where nothing trains.
        db_RK: the same of B transposed.
        scale: alpha / rank, or alpha / sqrt(rank).
        dropout: probability of dropping an element of x.
    """

    a_RD: torch.Tensor
    b_RK: torch.Tensor
    da_RD: torch.Tensor | None
    db_RK: torch.Tensor | None
    scale: float
    dropout: float

    @property
    def rank(self) -> int:
        """Rank of the adapter, R."""
        return len(self.a_RD)

    @property
    def columns(self) -> int:
        """Number of columns of S that it takes, the rank rounded up to a multiple of eight."""
        return -(-self.rank // _COLUMNS) * _COLUMNS


class LaunchOfA(NamedTuple):
    """What launches of factors A need, be it those of all layers at once, or those of one layer with its own draws.

    Attributes:
        ranks: rank, scale and dropout of each segment.
        values: where the factors lie.
        gradients: where their gradients lie; `None` where nothing trains.
        module_seed: the layer's half of the dropout key; `None` for no dropout.
    """

    ranks: RankTable
    values: Factors
    gradients: Factors | None
    module_seed: int | None


class LaunchOfB(NamedTuple):
    """What launches of one layer's factors B need.

    Attributes:
        ranks: rank and scale of each segment.
        values: where the factors lie.
        gradients: where their gradients lie; `None` where nothing trains.
    """

    ranks: RankTable
    values: Factors
    gradients: Factors | None


def check_ranks(layers: Sequence[Sequence[Adapter | None]]) -> None:
    """Raise `ValueError` where a rank is greater than kernels can serve."""
    ranks = [adapter.rank for adapters in layers for adapter in adapters if adapter is not None]
    if max(ranks, default=0) > MAX_RANK:
        raise ValueError(f"the largest rank is {max(ranks)}; allowed: 1 to {MAX_RANK}.")


def first_columns(adapters: Sequence[Adapter | None]) -> list[int]:
    """Return the first column of S of each layer's adapter of one task, and where they end."""
    starts = [0]
    for adapter in adapters:
        starts.append(starts[-1] + (0 if adapter is None else adapter.columns))
    return starts


def work_as_one(adapters: Sequence[Adapter | None]) -> bool:
    """Whether the factors A of one task in all layers can work as one: no draws, and side by side in memory."""
    present = [adapter for adapter in adapters if adapter is not None]
    if any(philox.drop_threshold(adapter.dropout) for adapter in present):
        return False
    if sum(adapter.columns for adapter in present) > MAX_JOINT_RANK:
        return False
    return all(
        _follows(one.a_RD, one.columns, other.a_RD) and _follows(one.da_RD, one.columns, other.da_RD)
        for one, other in zip(present[:-1], present[1:], strict=True)
    )


def _follows(one_RD: torch.Tensor | None, rows: int, other_RD: torch.Tensor | None) -> bool:
    if one_RD is None or other_RD is None:
        return one_RD is other_RD
    end = one_RD.data_ptr() + rows * one_RD.shape[1] * one_RD.element_size()
    # Two storages may follow each other by chance, and a view must not reach from one into the other.
    same_memory = one_RD.untyped_storage().data_ptr() == other_RD.untyped_storage().data_ptr()
    return same_memory and other_RD.data_ptr() == end


def joint_launch(segments: Sequence[Sequence[Adapter | None]], is_joint: Sequence[bool]) -> LaunchOfA | None:
    """Return the launches of the tasks whose factors A work as one."""
    ranks: list[int] = []
    values: list[torch.Tensor | None] = []
    gradients: list[torch.Tensor | None] = []
    for adapters, joins in zip(segments, is_joint, strict=True):
        present = [adapter for adapter in adapters if adapter is not None] if joins else []
        # A group of one keeps its own rank, so that narrow ones stay narrow; of several, each takes whole groups.
        rank = present[0].rank if len(present) == 1 else sum(adapter.columns for adapter in present)
        ranks.append(rank)
        values.append(_rows_from(present[0].a_RD, rank) if present else None)
        gradients.append(_rows_from(present[0].da_RD, rank) if present else None)
    if not any(ranks):
        return None
    width = next(value.shape[1] for value in values if value is not None)
    # Scales of 1: those of the layers may differ, and enter with B.
    table = RankTable(ranks, [1.0] * len(ranks), device=_first_device(values))
    return LaunchOfA(table, Factors(values, width), _gradient_factors(gradients, values, width), None)


def launch_apart(
    adapters: Sequence[Adapter | None], is_joint: Sequence[bool], columns: Sequence[int], module_name: str
) -> LaunchOfA | None:
    """Return the launches of one layer's factors A of the other tasks."""
    own = [None if joins else adapter for adapter, joins in zip(adapters, is_joint, strict=True)]
    layer = launch_of_layer(own, columns, of_a=True)
    return None if layer is None else LaunchOfA(*layer, philox.hash_seed(module_name))


def launch_of_layer(
    adapters: Sequence[Adapter | None], columns: Sequence[int], *, of_a: bool = False
) -> LaunchOfB | None:
    """Return the launches of one layer's factors, B unless `of_a`; `None` where no task has an adapter."""
    values = [None if item is None else (item.a_RD if of_a else item.b_RK) for item in adapters]
    gradients = [None if item is None else (item.da_RD if of_a else item.db_RK) for item in adapters]
    if all(value is None for value in values):
        return None
    width = next(value.shape[1] for value in values if value is not None)
    table = RankTable(
        [0 if item is None else item.rank for item in adapters],
        [0.0 if item is None else 1.0 if of_a else item.scale for item in adapters],
        s_columns=[0 if item is None else column for item, column in zip(adapters, columns, strict=True)],
        dropouts=[0.0 if item is None or not of_a else item.dropout for item in adapters],
        device=_first_device(values),
    )
    return LaunchOfB(table, Factors(values, width), _gradient_factors(gradients, values, width))


def _gradient_factors(
    gradients: Sequence[torch.Tensor | None], values: Sequence[torch.Tensor | None], width: int
) -> Factors | None:
    """Return where gradients lie, or `None` unless every adapter has one."""
    is_bound = all(value is None or gradient is not None for value, gradient in zip(values, gradients, strict=True))
    return Factors(gradients, width) if is_bound else None


def _rows_from(first_RD: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    """Return a matrix of more rows that begins where another does."""
    return None if first_RD is None else first_RD.as_strided((rows, first_RD.shape[1]), (first_RD.shape[1], 1))


def _first_device(values: Sequence[torch.Tensor | None]) -> torch.device:
    return next(value.device for value in values if value is not None)
