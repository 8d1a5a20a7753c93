"""`EvenShares`: how equal replicas divide the rows of a step, evenly by tokens, each row whole."""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.data.batch import TaskBatch


class EvenShares:
    """Divides the rows of one step among processes, evenly by tokens: longest first, each to whoever has least.

    Args:
        world_size: number of processes, or of replicas, that share the rows.

    Example:
        >>> shares = EvenShares(2)
        >>> [[len(rows) for rows in share] for share in shares.divide([])]
        [[], []]
    """

    def __init__(self, world_size: int) -> None:
        """Start with no tokens given out."""
        self.num_tokens = [0] * world_size

    def divide(self, batches: Sequence[TaskBatch]) -> list[list[list[int]]]:
        """Divide global batches; what earlier calls left uneven is made up for.

        Args:
            batches: global batches of the tasks that share their passes.

        Returns:
            For each process and each batch, the indices of its sequences, ascending.
        """
        # Ties by task and index, as every process divides by itself and has to find the same shares.
        lengths = sorted(
            (-len(sequence), task, index)
            for task, batch in enumerate(batches)
            for index, sequence in enumerate(batch.sequences)
        )
        shares: list[list[list[int]]] = [[[] for _ in batches] for _ in self.num_tokens]
        for length, task, index in lengths:
            # Tokens of earlier hTasks count too, so the step comes out even, not each hTask by itself.
            rank = self.num_tokens.index(min(self.num_tokens))
            self.num_tokens[rank] -= length
            shares[rank][task].append(index)
        return [[sorted(rows) for rows in share] for share in shares]
