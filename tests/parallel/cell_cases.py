"""Random layouts and the pieces of a task in each of their processes, for tests without processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from peft_mux.modeling.pieces import Piece
from peft_mux.parallel.cells import HeldPage, HeldParameter, Holding
from peft_mux.scheduler.parallel_layout import ParallelConfig, ParallelLayout

KINDS = ("rows", "columns", "fused", "partial", "doubled")
"""How shards have a parameter: rows or columns of it, rows of each third of it, whole with partial sums as gradients,
or whole with the whole gradient in each shard, of which one adds."""


@dataclass(frozen=True)
class Drawn:
    """A task over a layout: the kind, the shape and the layer of each parameter, by name."""

    layout: ParallelLayout
    kinds: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    layers: dict[str, int]
    num_layers: int
    seed: int

    def pieces(self, rank: int, layout: ParallelLayout | None = None) -> dict[str, Piece]:
        """Return what a process holds."""
        layout = layout or self.layout
        place = layout.place(rank)
        config = layout.replicas[place.replica]
        held = {}
        for name, layer in self.layers.items():
            if layer * config.pp // self.num_layers == place.stage:
                held[name] = piece(self.kinds[name], self.shapes[name], config.tp, place.tp_rank)
        return held

    def all_pieces(self) -> list[dict[str, Piece]]:
        """Return what every process holds."""
        return [self.pieces(rank) for rank in range(self.layout.world_size)]

    def whole(self, salt: int) -> dict[str, torch.Tensor]:
        """Return whole random tensors; small integers, so that every order of adding gives the same bits."""
        generator = torch.Generator().manual_seed(self.seed * 100 + salt)
        draws = {name: torch.randint(-9, 10, shape, generator=generator) for name, shape in self.shapes.items()}
        return {name: draw.double() for name, draw in draws.items()}

    def gradients(self) -> tuple[list[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Return the gradients of every process before they are summed, and the whole sums."""
        own: list[dict[str, torch.Tensor]] = [{} for _ in range(self.layout.world_size)]
        totals = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in self.shapes.items()}
        for replica in range(self.layout.num_replicas):
            whole = self.whole(replica)
            for name, total in totals.items():
                total += whole[name]
            ranks = [rank for rank in range(len(own)) if self.layout.place(rank).replica == replica]
            for rank in ranks:
                for name, held in self.pieces(rank).items():
                    own[rank][name] = self._gradient(name, whole[name], held, rank)
        return own, totals

    def _gradient(self, name: str, whole: torch.Tensor, held: Piece, rank: int) -> torch.Tensor:
        place = self.layout.place(rank)
        if self.kinds[name] != "partial":
            return held.take(whole).clone()
        # Shard i adds i + 1 times something; the first one adds the rest of the whole.
        tp = self.layout.replicas[place.replica].tp
        noise = torch.ones_like(whole) * 3
        return whole - noise * sum(range(2, tp + 1)) if place.tp_rank == 0 else noise * (place.tp_rank + 1)


def piece(kind: str, shape: tuple[int, ...], tp: int, shard: int) -> Piece:
    """Return what a shard holds of a parameter."""
    if tp == 1 or kind == "partial":
        return Piece.whole(shape)
    if kind == "doubled":
        return Piece.whole(shape, adds=shard == tp - 1)
    dim = 1 if kind == "columns" else 0
    parts = 3 if kind == "fused" else 1
    block = shape[dim] // parts
    size = block // tp
    starts = [number * block + shard * size for number in range(parts)]
    return Piece(shape, dim, tuple((start, start + size) for start in starts))


def page_of(pieces: dict[str, Piece]) -> HeldPage:
    """Return a page in which these lie one after another, with gaps."""
    members, offset = [], 0
    for name, held in pieces.items():
        size = torch.Size(held.part_shape)
        members.append(HeldParameter(name, offset, torch.empty(size, device="meta").stride(), held))
        offset += -(-size.numel() // 8) * 8
    return HeldPage(torch.float64, offset, tuple(members))


def holdings_of(pieces: list[dict[str, Piece]]) -> list[Holding]:
    """Return the reports of processes that have everything in one page."""
    return [(page_of(own),) if own else () for own in pieces]


def laid_out(
    holding: Holding, gradients: dict[str, torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return flat pages that hold gradients, and the views of them by parameter."""
    pages, views = [], {}
    for page in holding:
        flat = torch.zeros(page.num_elements, dtype=page.dtype)
        pages.append(flat)
        for name, offset, stride, held in page.parameters:
            views[name] = flat.as_strided(held.part_shape, stride, offset)
            views[name].copy_(gradients[name])
    return pages, views


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    """Draw replicas <tp,pp> of any mixture."""
    configs = st.builds(ParallelConfig, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
    return ParallelLayout(tuple(draw(st.lists(configs, min_size=1, max_size=3))))


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Draw a task over a layout; it may have no parameter in some layers."""
    num_layers = draw(st.integers(3, 5))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=8))
    names = {f"layer.{index}": kind for index, kind in enumerate(kinds)}
    shapes = {name: (12 * draw(st.integers(1, 2)), 4 * draw(st.integers(1, 2))) for name in names}
    layers = {name: draw(st.integers(0, num_layers - 1)) for name in names}
    return Drawn(draw(layouts()), names, shapes, layers, num_layers, draw(st.integers(0, 999)))
