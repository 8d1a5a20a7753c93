"""Inputs of a pipeline: the load of each bucket on each stage, and the time of a message between stages."""

from __future__ import annotations

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
        ValueError: if fields differ in the number of stages, or there is no micro-batch.
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
        lengths = {len(self.forward_s), len(self.backward_s), len(self.activation_bytes)}
        if len(lengths) > 1 or not self.forward_s or self.num_micro_batches < 1:
            raise ValueError(
                f"bucket {self.name!r}: forward_s, backward_s and activation_bytes must have a number for each of at "
                f"least one stage, and num_micro_batches must be 1 or more, got {self}."
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
