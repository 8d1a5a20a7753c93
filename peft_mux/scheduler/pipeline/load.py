"""Inputs of a pipeline: the load of each bucket on each stage, and the time of a message between stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.scheduler.costs.hardware import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketLoad:
    """What one micro-batch of a bucket of hTasks costs on each of the S stages (M §3.4.1, "Computation Homogeneity").

    M takes all micro-batches of a bucket as equal. Rows are not split, so some micro-batches are longer: `weights` says
    by how much each differs from the mean. Bytes are those of the largest, which has to fit a limit; messages are of
    the mean.

    Attributes:
        name: the name in messages and drawings.
        forward_s: seconds of a forward on each stage.
        backward_s: seconds of a backward on each stage; empty for the same as `forward_s`, which is M's premise for
            PEFT (no weight gradients of the backbone).
        activation_bytes: bytes held on each stage from the start of the forward until the end of the backward.
        output_bytes: bytes of one message between neighbouring stages, in either direction.
        num_micro_batches: C, micro-batches of the bucket in one iteration.
        weights: seconds of each micro-batch over the mean ones, `forward_s` and `backward_s`; empty if all are equal.

    Raises:
        ValueError: if a number is negative or not finite, or fields differ in the number of stages.
    """

    name: str
    forward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    num_micro_batches: int
    backward_s: tuple[float, ...] = ()
    output_bytes: int = 0
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.backward_s:
            # A frozen dataclass can be completed in this way only.
            object.__setattr__(self, "backward_s", self.forward_s)
        where, num_stages, count = f"bucket {self.name!r}", len(self.forward_s), self.num_micro_batches
        if num_stages == 0:
            raise ValueError(f"{where}: forward_s must have the seconds of at least one stage, got none.")
        for field in ("forward_s", "backward_s", "activation_bytes"):
            values = getattr(self, field)
            if len(values) != num_stages:
                raise ValueError(
                    f"{where}: {field} must have {num_stages} numbers, as many as forward_s has, got {len(values)}."
                )
            for value in values:
                if not math.isfinite(value) or value < 0:
                    raise ValueError(f"{where}: {field} must be finite numbers of 0 or more, got {value}.")
        if self.output_bytes < 0:
            raise ValueError(f"{where}: output_bytes must be 0 or more, got {self.output_bytes}.")
        if count < 1:
            raise ValueError(f"{where}: num_micro_batches must be 1 or more, got {count}.")
        if self.weights:
            are_numbers = all(math.isfinite(weight) and weight >= 0 for weight in self.weights)
            if (
                len(self.weights) != count
                or not are_numbers
                or not math.isclose(sum(self.weights), count, rel_tol=1e-6)
            ):
                raise ValueError(
                    f"{where}: weights must be empty, or {count} numbers of 0 or more that add up to {count}, one "
                    f"for each micro-batch, got {self.weights}."
                )

    @property
    def num_stages(self) -> int:
        """S."""
        return len(self.forward_s)

    def chunk_bytes(self, stage: int, chunk: int, num_chunks: int) -> int:
        """Return the bytes that one virtual stage of a device holds of a micro-batch.

        Args:
            stage: the device, counted from 0.
            chunk: the virtual stage on that device, counted from 0.
            num_chunks: virtual stages of a device.
        """
        share, rest = divmod(self.activation_bytes[stage], num_chunks)
        # The first chunks take the remainder, so that all chunks add up to the whole.
        return share + (chunk < rest)


def message_s(link: Link | None, source: int, target: int, message_bytes: int) -> float:
    """Return the seconds of a message between two stages; none within one, or without a link."""
    return 0.0 if link is None or source == target else link.transfer_s(message_bytes)


def checked_num_stages(buckets: Sequence[BucketLoad]) -> int:
    """Return S, the number of stages of all buckets.

    Args:
        buckets: the loads of all buckets.

    Raises:
        ValueError: if there is no bucket, or buckets differ in the number of stages.
    """
    if not buckets:
        raise ValueError("buckets must have at least one bucket, got none.")
    num_stages = buckets[0].num_stages
    for bucket in buckets:
        if bucket.num_stages != num_stages:
            raise ValueError(
                f"bucket {bucket.name!r} must have {num_stages} stages, as bucket {buckets[0].name!r} has, got "
                f"{bucket.num_stages}."
            )
    return num_stages
