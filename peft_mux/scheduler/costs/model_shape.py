"""`ModelShape`: what estimates of seconds and bytes need to know of a backbone, and how its layers form stages.

M Eq. 5 spreads a backbone evenly over stages. Its embedding is on the first stage, though, its output head on the
last one; tensor parallelism cuts the linear layers and the head and leaves norms and the embedding whole
(`peft_mux.engine.tensor.parallel`); and FSDP2 gathers one unit after another (`peft_mux.engine.fsdp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class FrozenParts:
    """Bytes of the frozen weights of a backbone.

    Attributes:
        before_bytes: bytes of the embeddings, learned positions included; they are on the first stage.
        layer_bytes: bytes of one layer, as a mean over all layers.
        cut_bytes: the part of `layer_bytes` that tensor parallelism divides; the rest is whole on every device.
        after_bytes: bytes of the last norm and what else follows the layers; they are on the last stage.
        head_bytes: bytes of the output head, which tensor parallelism divides; they are on the last stage.
        is_tied: whether the head is the embedding's weight, which takes no room of its own if both are on one stage.
    """

    before_bytes: int
    layer_bytes: int
    cut_bytes: int
    after_bytes: int
    head_bytes: int
    is_tied: bool = False

    @classmethod
    def even(cls, backbone_bytes: int, num_layers: int) -> FrozenParts:
        """Return a backbone that consists of its layers only, all of which can be cut."""
        layer_bytes = backbone_bytes // num_layers
        # Bytes that do not divide evenly come after the layers, so that the sum is right.
        return cls(0, layer_bytes, layer_bytes, backbone_bytes - num_layers * layer_bytes, 0)

    def device_bytes(self, num_layers: int, *, is_first: bool, is_last: bool, devices: int = 1) -> float:
        """Return the bytes on each device of a stage.

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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What estimates need to know of a backbone.

    Attributes:
        num_layers: decoder or encoder layers.
        hidden_size: width of the residual stream.
        intermediate_size: width inside the MLP; of a mixture, of all experts of a token together.
        attention_size: query heads times channels.
        key_value_size: key-value heads times channels.
        vocab_size: rows of the output head.
        backbone_bytes: bytes of all backbone parameters and buffers as they are held.
        activation_bytes: bytes of one element of an activation.
        parts: where the bytes of the backbone lie; `None` spreads them evenly, as Eq. 5 does.
        held_intermediate_size: width of all experts of a layer together; `None` if a token passes through all of them.
        routed_share: part of the experts of a layer that a token passes through.
        caps_logits: whether logits are bounded smoothly (Gemma 2).
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    attention_size: int
    key_value_size: int
    vocab_size: int
    backbone_bytes: int
    activation_bytes: int
    parts: FrozenParts | None = None
    held_intermediate_size: int | None = None
    routed_share: float = 1.0
    caps_logits: bool = False

    def in_precision(self, factor: float) -> ModelShape:
        """Return the shape with frozen weights that take `factor` times the bytes."""
        parts = self.parts
        if parts is not None:
            names = ("before_bytes", "layer_bytes", "cut_bytes", "after_bytes", "head_bytes")
            parts = replace(parts, **{name: int(factor * getattr(parts, name)) for name in names})
        return replace(self, backbone_bytes=int(factor * self.backbone_bytes), parts=parts)


def split_layers(num_layers: int, num_stages: int, layers_per_stage: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the layers of each stage: those given, or as equal as can be, the first stages taking one more.

    Raises:
        ValueError: for stages without layers, or numbers that do not add up.
    """
    if not 1 <= num_stages <= num_layers:
        raise ValueError(f"num_stages must be 1 to {num_layers}, the layers of the backbone, got {num_stages}.")
    if not layers_per_stage:
        each, rest = divmod(num_layers, num_stages)
        return tuple(each + (stage < rest) for stage in range(num_stages))
    if len(layers_per_stage) != num_stages or sum(layers_per_stage) != num_layers or min(layers_per_stage) < 1:
        raise ValueError(
            f"layers_per_stage must be {num_stages} numbers of 1 or more that add up to {num_layers}, got "
            f"{layers_per_stage}."
        )
    return tuple(layers_per_stage)
