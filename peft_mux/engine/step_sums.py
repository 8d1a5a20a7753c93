"""`StepSums`: losses and statistics of the tasks of a step, added up over micro-batches and over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.packed_forward import MuxOutput


class StepSums:
    """Sums of what the passes of a step gave for each task.

    Args:
        model: the model, which knows the statistics of each task's loss.
        tasks: names of the tasks of the step, also of those without rows in this process.
        device: device of the sums.

    Attributes:
        losses: mean loss of each task, as far as its parts were added.
        statistics: statistics `[K]` of each task whose loss has some, likewise.
    """

    def __init__(self, model: MultiTaskPeftModel, tasks: Sequence[str], device: torch.device) -> None:
        """Begin with zeros."""
        counts = {name: len(model.objectives.statistic_names(name)) for name in tasks}
        self.losses = {name: torch.zeros((), device=device) for name in tasks}
        self.statistics = {name: torch.zeros(count, device=device) for name, count in counts.items() if count}

    def add(self, output: MuxOutput) -> None:
        """Add what one pass gave."""
        for name, loss in zip(output.task_names, output.losses.unbind(), strict=True):
            self.losses[name] = self.losses[name] + loss
        for name, own in zip(output.task_names, output.statistics, strict=False):
            if own is not None:
                self.statistics[name] = self.statistics[name] + own


def pack(losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return losses and statistics in one float32 tensor, which travels in one message."""
    losses_N = torch.stack([loss.float() for loss in losses.values()])
    return torch.cat([losses_N, *statistics.values()]) if statistics else losses_N


def unpack(
    figures: torch.Tensor, losses: Mapping[str, torch.Tensor], statistics: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses and statistics from a tensor that `pack` has made of some of the same tasks and sizes."""
    losses_N, *rest = figures.split([len(losses), *map(len, statistics.values())])
    return dict(zip(losses, losses_N.unbind(), strict=True)), dict(zip(statistics, rest, strict=True))
