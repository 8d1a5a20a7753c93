"""PEFT's own layer, task by task on its rows: for any adapted layer without a fused path, and the kinds made of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from peft_mux.modeling.adapters.kind import AdapterKind, MultiplexedForward
from peft_mux.modeling.stream import RowSegment, Stream


class SlicedAdapter(MultiplexedForward):
    """PEFT's own layer, task by task on its rows; for layers that treat every token by itself.

    The layer may wrap layers of other tasks and PEFT types, and may contain dropout: while it runs for one
    task, the stream shows them the rows of that task alone. If all of them pass their inputs on to the frozen layer
    unchanged, that one runs once over the stream (BaseOp, M §3.2), and each layer finds its rows of the output ready.

    Args:
        module: the module whose `forward` this is.
        name: the module's name within the backbone.
        stream: knows which rows belong to which task.
        draws: whether the layer draws random numbers in training; then they are those of the task's step, the same in
            all of its micro-batches.
        shares_base: whether the layer calls the frozen one with its own inputs.
    """

    def __init__(
        self, module: nn.Module, name: str, stream: Stream, *, draws: bool = False, shares_base: bool = False
    ) -> None:
        super().__init__(module, name, stream)
        self._draws, self._shares_base = draws, shares_base
        is_embedding = isinstance(module.get_base_layer(), nn.Embedding)  # type: ignore[operator]
        what = "a task adapts embeddings" if is_embedding else "a task's adapter runs on its own rows"
        self.against_graphs = f"{what} ({{name}})"

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what PEFT's layer returns for `x`, row by row of the stream if one is read."""
        layer: Any = self.module
        if not self.stream.is_idle:
            return self.multiplexed(x)
        # Layers of several tasks lie around one another, and not every type skips a layer that is not its own.
        if layer.disable_adapters or not any(self._has(adapter) for adapter in layer.active_adapters):
            return layer.base_layer(x, *args, **kwargs)
        with _on_frozen_layer(layer):
            return self.original(x, *args, **kwargs)

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all tasks, in stream order: `[1, T, K]` for token ids, else `[..., K]`."""
        is_ids, segments = not x.is_floating_point(), self.stream.segments
        if x.dim() > 3 and tuple(x.shape[:2]) == (1, self.stream.num_rows):
            rows = x  # norms of single heads see `[1, T, heads, features]`
        else:
            width = 1 if is_ids else x.shape[-1]
            self.check_rows(x, width)
            rows = x.reshape(1, -1) if is_ids else x.reshape(1, -1, width)
        # This forward and those of the sliced layers directly inside its module, the outermost first.
        forwards: list[SlicedAdapter] = []
        forward: Any = self
        while isinstance(forward, SlicedAdapter):
            forwards.append(forward)
            forward = forward.module._modules["base_layer"].__dict__.get("forward")  # type: ignore[union-attr]
        below: Any = forwards[-1].module.base_layer
        enabled = [forward for forward in forwards if not forward.module.disable_adapters]
        owners = [next((forward for forward in enabled if forward._has(segment.adapter)), None) for segment in segments]
        # No task adapts this layer, so it runs once over the stream and nothing is sliced.
        if not any(owners):
            return below(rows if is_ids else x)
        # Whether a segment uses the frozen layer's output for its own inputs. If these are few of the rows, computing
        # the output of all would cost more than it saves.
        hands_on = [owner is None or owner._shares_base for owner in owners]
        num_rows = sum(segment.end - segment.start for segment, is_so in zip(segments, hands_on, strict=True) if is_so)
        is_once = not is_ids and 2 * num_rows >= self.stream.num_rows
        ready = self.by_segment(below(rows), 1) if is_once else (None,) * len(segments)
        parts = []
        for index, (segment, part) in enumerate(zip(segments, self.by_segment(rows, 1), strict=True)):
            owner, output = owners[index], ready[index] if hands_on[index] else None
            with self.stream.only(segment):
                if owner is not None:
                    parts.append(owner.run(part, segment, output))
                else:
                    parts.append(below(part) if output is None else output)
        y = torch.cat(parts, dim=1)
        return y if is_ids else y.view(*x.shape[:-1], -1)

    def run(self, rows: torch.Tensor, segment: RowSegment, ready: torch.Tensor | None = None) -> torch.Tensor:
        """Return what PEFT's layer gives for one task.

        Args:
            rows: the task's rows, `[1, T, D]`, or token ids `[1, T]`.
            segment: the task's segment of the stream.
            ready: what the frozen layer gives for these rows, if that is known.
        """
        layer: Any = self.module
        before = layer._active_adapter
        # The attribute, because PEFT's `set_adapter` would switch gradients on and off as well.
        layer._active_adapter = [segment.adapter]
        is_drawing, is_cuda = self._draws and layer.training, rows.device.type == "cuda"
        drawing = torch.random.fork_rng([rows.device] if is_cuda else [], enabled=is_drawing)
        try:
            with _on_frozen_layer(layer, rows, ready), drawing:
                if is_drawing:
                    seed = segment.draw_seed(self.name)
                    torch.random.default_generator.manual_seed(seed)
                    if is_cuda:
                        torch.cuda.manual_seed(seed)
                return self.original(rows)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            # Some types check their own numbers, or invert them: a task that has diverged would end all of them.
            weights = (weight for name, weight in layer.named_parameters() if segment.adapter in name.split("."))
            if all(bool(weight.isfinite().all()) for weight in weights):
                raise
            return (layer.get_base_layer()(rows) if ready is None else ready) * float("nan")
        finally:
            layer._active_adapter = before

    def _has(self, adapter: str) -> bool:
        layer: Any = self.module
        return any(adapter in getattr(layer, name) for name in layer.adapter_layer_names)


@contextmanager
def _on_frozen_layer(
    layer: Any, rows: torch.Tensor | None = None, output: torch.Tensor | None = None
) -> Iterator[None]:
    """Put a layer directly around the frozen one, as without other tasks: some types inspect the layer that they wrap.

    If its output for some rows is known, the frozen layer returns that, and computes other inputs as usual.
    """
    before = layer._modules["base_layer"]
    # Past `setattr`, which would register and check the module again in every pass.
    frozen = layer._modules["base_layer"] = layer.get_base_layer()
    forward, original = frozen.__dict__.get("forward"), frozen.forward
    if output is not None:
        frozen.forward = lambda x, *args, **kwargs: output if x is rows else original(x, *args, **kwargs)
    try:
        yield
    finally:
        layer._modules["base_layer"] = before
        if output is not None:
            del frozen.forward
            if forward is not None:
                frozen.forward = forward


class SlicedKind(AdapterKind):
    """A PEFT type whose layers run as PEFT wrote them, task by task.

    For types whose layers treat every token by itself, change nothing of the backbone, and can be told apart by an
    adapter id. `register_kind(SlicedKind(TypeEntry("IA3")))` is all that such a type needs.
    """

    forward_type: type[SlicedAdapter] = SlicedAdapter

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced."""
        # IA3 scales the inputs of its feed-forward layers, and the outputs of the others.
        shares_base = self.entry.shares_base and not getattr(module, "is_feedforward", False)
        return self.forward_type(module, name, stream, draws=self.entry.draws, shares_base=shares_base)
