"""`TensorLinks`: the all-reduces of a tensor parallel group during a pass, and how many bytes they sum.

All communication of tensor parallelism goes through `TensorLinks.all_reduce`; whoever wants another hTask to compute
while an all-reduce is under way need only come in between its beginning and its `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from peft_mux.engine.processes.processes import Pending, Processes
from peft_mux.errors import ProcessError

_WHAT = "a sum over the shards of a stage"


class TensorLinks:
    """All-reduces over the tensor parallel group of this process.

    Every process of the run must make it, with the same groups.

    Args:
        groups: global ranks of every tensor parallel group of the run, as `ParallelLayout.tensor_groups` has them.
        processes: the processes of the run, connected.

    Attributes:
        index: rank of this process within its group.
        size: number of ranks in its group.
        num_bytes: bytes of the tensors that were summed since `reset`.
        num_sums: number of tensors that were summed since `reset`.

    Raises:
        ProcessError: if another process does not come within the time limit.
        ValueError: if this process is in none of the groups, or in several.
    """

    def __init__(self, groups: Sequence[Sequence[int]], processes: Processes) -> None:
        """Make the groups, in the same order on every process."""
        own = [group for group in groups if processes.rank in group]
        if len(own) != 1:
            raise ValueError(
                f"rank {processes.rank} is in {len(own)} of the groups {[list(group) for group in groups]}; allowed: "
                "exactly one. Take them from ParallelLayout.tensor_groups."
            )
        self.index, self.size = list(own[0]).index(processes.rank), len(own[0])
        self.num_bytes, self.num_sums = 0, 0
        self._processes = processes
        self._group: Any = None
        # Every process makes every group, also those it is not in: `new_group` is collective over the whole run.
        for group in groups:
            if len(group) > 1:
                self._group = processes.open_group(group) or self._group

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin to replace a tensor by its sum over the group, with the same bits on all of its ranks.

        Args:
            tensor: contiguous tensor on the device, of one shape on every rank; all ranks begin their all-reduces in
                the same order.
        """
        if self.size == 1:
            return Pending(None, self._processes)
        if self._group is None:
            raise ProcessError(
                "the connections between these shards are closed, as the run has moved or a pass has failed; allowed:"
                " passes through the model of the present run. Take trainer.model anew."
            )
        self.num_bytes += tensor.numel() * tensor.element_size()
        self.num_sums += 1
        with self._processes.communicating(_WHAT):
            return Pending(dist.all_reduce(tensor, group=self._group, async_op=True), self._processes, _WHAT)

    def reset(self) -> None:
        """Count from zero."""
        self.num_bytes, self.num_sums = 0, 0

    def close(self) -> None:
        """Close the connections, so that no other rank waits for this process any longer."""
        # Forgotten first, so that a pass after this meets the error of `all_reduce`, in words, and not a closed group.
        group, self._group = self._group, None
        if group is not None:
            self._processes.close_group(group)
