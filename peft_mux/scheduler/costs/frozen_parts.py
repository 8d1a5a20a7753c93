"""`FrozenParts`: which bytes of a frozen backbone lie before, in and after its layers, and what devices hold of them.

M Eq. 5 spreads a backbone evenly over stages. Its embedding lies on the first stage, though, its output head on the
last one; tensor parallelism cuts the linear layers and the head and leaves norms and the embedding whole
(`peft_mux.engine.tensor.parallel`); and FSDP2 gathers one unit after another (`peft_mux.engine.fsdp.backbone`).
"""

from __future__ import annotations

from dataclasses import dataclass

_GATHERED_COPIES = 2
"""A gathered unit, and beside it the message that it is copied out of, or the one that the next unit comes in."""


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Bytes of the frozen weights of a backbone.

    Attributes:
        before_bytes: bytes of the embeddings, learned positions included; they lie on the first stage.
        layer_bytes: bytes of one layer, as a mean over all layers.
        cut_bytes: the part of `layer_bytes` that tensor parallelism divides; the rest is whole on every device.
        after_bytes: bytes of the last norm and what else follows the layers; they lie on the last stage.
        head_bytes: bytes of the output head, which tensor parallelism divides; they lie on the last stage.
        is_tied: whether the head is the embedding's weight, which takes no room of its own where both lie.

    Raises:
        ValueError: for negative numbers, or more that is cut than a layer has.
    """

    before_bytes: int
    layer_bytes: int
    cut_bytes: int
    after_bytes: int
    head_bytes: int
    is_tied: bool = False

    def __post_init__(self) -> None:
        for field in ("before_bytes", "layer_bytes", "cut_bytes", "after_bytes", "head_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 0 or more. Count the weights anew.")
        if self.cut_bytes > self.layer_bytes:
            raise ValueError(f"cut_bytes is {self.cut_bytes}; allowed: 0 to {self.layer_bytes}, the bytes of a layer.")

    @classmethod
    def even(cls, backbone_bytes: int, num_layers: int) -> FrozenParts:
        """Return a backbone that is nothing but its layers, all of which can be cut.

        Args:
            backbone_bytes: bytes of all frozen weights and buffers.
            num_layers: layers of the backbone, taken to be of equal size.
        """
        layer_bytes = backbone_bytes // num_layers
        # Bytes that do not divide evenly come after the layers, so that the sum is right.
        return cls(0, layer_bytes, layer_bytes, backbone_bytes - num_layers * layer_bytes, 0)

    def device_bytes(self, num_layers: int, *, is_first: bool, is_last: bool, devices: int = 1) -> float:
        """Return the bytes that lie on each device of a stage.

        Args:
            num_layers: layers that the stage has.
            is_first: whether the stage has the embedding.
            is_last: whether the stage has the head.
            devices: devices that share every layer of the stage (tensor parallelism).
        """
        layer = self.layer_bytes - self.cut_bytes + self.cut_bytes / devices
        # On a single stage a tied head is the embedding, which is counted already.
        head = 0.0 if self.is_tied and is_first else self.head_bytes / devices
        return num_layers * layer + is_first * self.before_bytes + is_last * (self.after_bytes + head)

    def gathered_bytes(self, *, is_first: bool = True, is_last: bool = True) -> int:
        """Return what a device holds of whole weights while it computes, where the weights are divided among replicas.

        Args:
            is_first: whether its stage has the embedding.
            is_last: whether its stage has the head.
        """
        before = self.before_bytes if is_first else 0
        after = max(self.after_bytes, self.head_bytes) if is_last else 0
        return _GATHERED_COPIES * max(self.layer_bytes, before, after)

    def units(self, num_layers: int) -> tuple[tuple[float, int], ...]:
        """Return bytes of each kind of gathered unit, and how often one is gathered in a pass and its backward.

        The loss over a frozen head has its gradient in the forward already, and a frozen embedding needs none: both are
        gathered once. Layers, and what is in no other unit, are gathered for the backward again.

        Args:
            num_layers: layers of the whole backbone.
        """
        return (
            (self.layer_bytes, 2 * num_layers),
            (self.before_bytes, 1),
            (self.head_bytes, 1 if self.head_bytes else 0),
            (self.after_bytes, 2 if self.after_bytes else 0),
        )

    def scaled(self, factor: float) -> FrozenParts:
        """Return the same weights in another precision.

        Args:
            factor: bytes in the new precision over bytes in this one.
        """
        layer = int(factor * self.layer_bytes)
        return FrozenParts(
            before_bytes=int(factor * self.before_bytes),
            layer_bytes=layer,
            cut_bytes=min(layer, int(factor * self.cut_bytes)),
            after_bytes=int(factor * self.after_bytes),
            head_bytes=int(factor * self.head_bytes),
            is_tied=self.is_tied,
        )
