"""`PackedTimeModel`: seconds of a replica that packs its sequences into passes, where L Eq. 10 to 12 pad buckets.

The engine pads nothing and puts sequences of all buckets into the same passes, so that a replica makes as many passes
as its tokens fill, and not some for each bucket with a remainder of its own. The curve of a layer stays the paper's:

    t(b, s) = fixed(s) + each(s) b        sum_j d_j each(s_j) + passes * fixed + bubble        passes = ceil(tokens / M)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel


@dataclass(frozen=True, slots=True)
class PackedTimeModel:
    """A `TimeModel` of `peft_mux.scheduler.replicas.configs` for replicas that pack; lengths are those of sequences.

    Attributes:
        padded: the curves of one layer, the layers, and what each configuration holds.
    """

    padded: ReplicaTimeModel

    @property
    def max_tokens(self) -> Mapping[ParallelConfig, int]:
        """Most tokens of a pass, by configuration."""
        return self.padded.max_tokens

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """What can be deployed: by GPUs, then by tensor parallel degree."""
        return self.padded.configurations

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds of one replica for `counts[j]` sequences of `lengths[j]` tokens; 0 for none.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket on this replica.
            lengths: tokens of the sequences of each bucket.
            max_tokens: most tokens of a pass on this replica.

        Raises:
            ValueError: for a configuration without a fit.
        """
        tokens = sum(count * length for count, length in zip(counts, lengths, strict=True))
        if not tokens:
            return 0.0
        fit, num_layers = self.padded.largest_stage(config)
        total_s, fullest_s, filled = 0.0, 0.0, tokens / max_tokens
        for count, length in zip(counts, lengths, strict=True):
            if count:
                full_s = self._full_pass_s(config, length, max_tokens)
                total_s += count * length / max_tokens * full_s
                fullest_s = max(fullest_s, full_s)
        # What is not full costs what a pass costs at all; so the seconds never fall with another row.
        empty_s, share = num_layers * fit.terms(0)[0], min(1.0, filled)
        total_s += (-(-tokens // max_tokens) - filled) * empty_s
        return total_s + (config.pp - 1) * (share * fullest_s + (1 - share) * empty_s)

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return seconds of a sequence of each length within full passes, and those of the costliest pass's bubble.

        Args:
            config: how the replica is spread over GPUs.
            lengths: tokens of the sequences of each bucket.
            max_tokens: most tokens of a pass on this replica.
        """
        full_s = np.array([self._full_pass_s(config, length, max_tokens) for length in lengths], dtype=np.float64)
        return full_s * np.asarray(lengths) / max_tokens, (config.pp - 1) * float(full_s.max(initial=0.0))

    def _full_pass_s(self, config: ParallelConfig, length: int, max_tokens: int) -> float:
        """Return the seconds that the largest stage takes for a pass filled with sequences of one length."""
        fit, num_layers = self.padded.largest_stage(config)
        fixed_s, each_s = fit.terms(length)
        return num_layers * (fixed_s + each_s * max_tokens / length)
