"""`Subject`: a few layers like those of a backbone, with random weights, set up to be run part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig
from torch import nn
from transformers import AttentionInterface

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.modeling.adapters.kind import MultiplexedForward
from peft_mux.modeling.adapters.lora.layer import LinearGroup
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.packed import packed_attention
from peft_mux.modeling.backbone.modules import find_layers, language_model
from peft_mux.modeling.backbone.recompute import gated_product, norms_and_gated_mlps
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import temporary_attributes
from peft_mux.planning.model_shape import config_of, model_shape, plain_backbone, shortened_config
from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad

RANKS = (4, 16, 64)
_TASKS_PER_RANK = {"cpu": 2}
_DEFAULT_TASKS_PER_RANK = 8
"""A CPU runs adapters one after another, so that a few of them are enough to time one."""
_MOST_LAYERS = 4
_LEFT_OUT_ATTENTION = "peft_mux_no_attention"


class Subject:
    """The first layers of a backbone with random weights, and tasks of several ranks on them.

    Args:
        model: the `MultiTaskPeftModel` or backbone whose shapes are taken; it may have no weights.
        device: the device to run on.
        dtype: the dtype to compute in.

    Attributes:
        model: the copy, with `tasks_per_rank` adapters of each of `RANKS`.
        tasks_per_rank: adapters that are run together.
        num_layers: number of decoder layers of the copy.
        device: the device of the copy.
        dtype: the dtype that the copy computes in.
        groups: the groups of linear layers that are computed together, of all layers.
    """

    def __init__(self, model: Any, *, device: torch.device, dtype: torch.dtype) -> None:
        """Build the copy, with an adapter for each task."""
        given, config = plain_backbone(model), config_of(model)
        layers = getattr(config.get_text_config(), "num_hidden_layers", _MOST_LAYERS)
        self.num_layers = min(_MOST_LAYERS, layers)
        self.device, self.dtype = device, dtype
        self.tasks_per_rank = _TASKS_PER_RANK.get(device.type, _DEFAULT_TASKS_PER_RANK)
        with torch.device(device):
            backbone = type(given)(shortened_config(config, self.num_layers))
        configs = {
            f"r{rank}_{n}": LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
            for rank in RANKS
            for n in range(self.tasks_per_rank)
        }
        self.model = MultiTaskPeftModel(backbone.to(dtype), configs, verify=False)
        self.model.train()
        for name in self.model.tasks:
            # As in training: gradients are added to flat buffers, so that no measurement allocates any.
            self.model.registry.slab_of(name).bind_gradients()
        group_of: dict[int, LinearGroup] = {}
        for module in self.model.backbone.base_model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, MultiplexedForward) and forward.group is not None:
                group_of.setdefault(id(forward.group), forward.group)
        self.groups = list(group_of.values())
        found = find_layers(self.model.backbone)
        if found is None:
            name = type(language_model(self.model.backbone)).__name__
            raise ValueError(
                f"{name} must keep its {self.num_layers} layers in one ModuleList, as transformers models do. Give a "
                "stored profile, or plan with data-sheet numbers."
            )
        self._layers = found
        # An attention module, the shapes of its queries, keys and values, and its other arguments.
        self._attention_call: tuple[nn.Module, tuple[torch.Size, ...], dict[str, Any]] | None = None

    @property
    def shape(self) -> ModelShape:
        """The shape of the copy, as the cost model takes it."""
        backbone = self.model.backbone
        return model_shape(backbone, backbone.config, dtype=self.dtype, activation_dtype=self.dtype)

    def loads(self, names: Sequence[str], lengths: Sequence[int], rank: int) -> list[TaskLoad]:
        """Return the loads of a pass with one sequence of each of some tasks, for the cost model.

        Args:
            names: the tasks.
            lengths: tokens of the sequence of each.
            rank: rank of their adapters.
        """
        layers: list[Any] = [member.module for group in self.groups for member in group.members]
        of_one_layer = layers[: len(layers) // self.num_layers]
        adapters = tuple(AdapterLoad(rank, layer.in_features + layer.out_features) for layer in of_one_layer)
        return [
            TaskLoad(name, (length,), num_targets=length - 1, adapters=adapters, trainable_parameters=0)
            for name, length in zip(names, lengths, strict=True)
        ]

    def batch(self, lengths: Sequence[int], names: Sequence[str]) -> MuxBatch:
        """Return a micro-batch of sequences, each of the task with the same index."""
        rows = [{"task": name, "input_ids": [1] * length} for name, length in zip(names, lengths, strict=True)]
        return ChunkPackingCollator()(rows).to(self.device)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context under which the engine would run."""
        if self.dtype == torch.bfloat16:
            return torch.autocast(self.device.type, dtype=self.dtype)
        return nullcontext()

    def layers_runner(self, tokens: int, *, has_layers: bool = True, forward_only: bool = False) -> Callable[[], None]:
        """Return a function that runs the base operators without adapters and without the attention product.

        Args:
            tokens: number of tokens of the stream, in sequences of 64 or less.
            has_layers: whether to run the layers too, or only the parts before and after them.
            forward_only: whether to leave the backward out.
        """
        lengths = [64] * (tokens // 64) + ([tokens % 64] if tokens % 64 else [])
        batch = self.batch(lengths, [self.model.tasks[0]] * len(lengths))

        def run() -> None:
            with self._base_operators(batch, has_layers), self.precision():
                hidden_TD = self.model.hidden_states(batch)
                if not forward_only:
                    hidden_TD.backward(torch.ones_like(hidden_TD))

        return run

    def recompute_runner(self, tokens: int) -> Callable[[], None]:
        """Return a function that computes what backward passes of all layers compute again (`recompute_inputs`)."""
        norms, mlps = norms_and_gated_mlps(self.model.backbone)
        hidden_size = config_of(self.model).get_text_config().hidden_size

        # The same states for all layers, as states of each take gigabytes.
        widths = {hidden_size, *(mlp.gate_proj.out_features for mlp in mlps)}
        states = {width: torch.randn(2, 1, tokens, width, device=self.device, dtype=self.dtype) for width in widths}

        def run() -> None:
            with torch.no_grad(), self.precision():
                for norm in norms:
                    norm(states[hidden_size][0])
                for mlp in mlps:
                    gated_product(mlp, *states[mlp.gate_proj.out_features])

        return run

    def pass_runner(self, lengths: Sequence[int], names: Sequence[str]) -> Callable[[], None]:
        """Return a function that runs a whole pass as the engine does, from collating on."""

        def run() -> None:
            batch = self.batch(lengths, names)
            with self.precision(), temporary_attributes(self.model.objectives, are_rows_made_up=True):
                output = self.model(batch)
            output.losses.sum().backward()

        return run

    def attention_runner(self, lengths: Sequence[int]) -> Callable[[], None]:
        """Return a function that runs one layer's attention product over sequences, forward and backward.

        The layers must be run before, because they show how attention is called.
        """
        assert self._attention_call is not None, "layers are run before attention"
        module, shapes, arguments = self._attention_call
        batch = self.batch(lengths, [self.model.tasks[0]] * len(lengths))
        stream = AttentionStream(self.model.stream, batch, self.model.module_names)
        q, k, v = (
            torch.randn(1, sum(lengths), shape[1], shape[3], device=self.device, dtype=self.dtype)
            .transpose(1, 2)
            .requires_grad_()
            for shape in shapes
        )

        def run() -> None:
            with self.model.multiplexing(batch):
                out = packed_attention(module, q, k, v, None, mux_stream=stream, **arguments)[0]
            torch.autograd.grad(out, [q, k, v], torch.ones_like(out))

        return run

    def group_runner(
        self, group: LinearGroup, batch: MuxBatch, x_TD: torch.Tensor, *, has_adapters: bool = True
    ) -> Callable[[], None]:
        """Return a function that runs a group of linear layers, forward and backward."""
        x_TD = x_TD.requires_grad_()
        layers: list[Any] = [member.module for member in group.members]
        gradients = [x_TD.new_ones(len(x_TD), layer.out_features) for layer in layers]

        def run() -> None:
            for layer in layers:
                layer._disable_adapters = not has_adapters
            with self.model.multiplexing(batch), self.precision():
                torch.autograd.backward(group.outputs(x_TD), gradients, inputs=[x_TD])
            for layer in layers:
                layer._disable_adapters = False

        return run

    def update_runner(self, count: int) -> Callable[[], None]:
        """Return a function that updates one page of parameters as a step of a task does."""
        page = nn.Parameter(torch.zeros(count, device=self.device))
        page.grad = torch.full_like(page, 1e-3)
        copied = page.detach().clone()
        optimizer = torch.optim.AdamW([page], lr=1e-4)

        def run() -> None:
            nn.utils.get_total_norm([page.grad])  # type: ignore[list-item]
            torch._foreach_copy_([copied], [page.detach()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        return run

    @contextmanager
    def _base_operators(self, batch: MuxBatch, has_layers: bool) -> Iterator[None]:
        """Run a batch with adapters off and attention that returns its queries, in the `with` block.

        Gradients flow down to the embeddings: without adapters nothing below would need one, and there would be no
        backward to time.

        Args:
            batch: the micro-batch that is run.
            has_layers: whether the decoder layers stay in.
        """

        def hand_queries_on(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> tuple[Any, None]:
            if self._attention_call is None:
                plain = {key: value for key, value in kwargs.items() if key != "mux_stream"}
                self._attention_call = module, (q.shape, k.shape, v.shape), plain
            return _QueriesOnly.apply(q, k, v), None

        AttentionInterface.register(_LEFT_OUT_ATTENTION, hand_queries_on)
        # As PEFT's own switch would, except for its report on all layers, which takes longer than a layer does.
        tuned: list[Any] = [member.module for group in self.groups for member in group.members]
        for layer in tuned:
            layer._disable_adapters = True
        backbone = self.model.backbone
        hook = backbone.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: output.detach().requires_grad_()
        )
        parent, name, layers = self._layers
        if not has_layers:
            setattr(parent, name, nn.ModuleList())
        try:
            with self.model.multiplexing(batch):  # which sets and resets the attention
                backbone.config._attn_implementation = _LEFT_OUT_ATTENTION
                yield
        finally:
            setattr(parent, name, layers)
            hook.remove()
            for layer in tuned:
                layer._disable_adapters = False


class _QueriesOnly(torch.autograd.Function):
    """`(q, k, v) -> q` in the layout of attention's output, with zero gradients for what is not used."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.shapes = k.shape, v.shape
        # Contiguous, as attention's output is: otherwise the projection after it would be timed with a copy.
        return q.transpose(1, 2)[..., : v.shape[-1]].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        grad = grads[0].transpose(1, 2)
        k_shape, v_shape = ctx.shapes
        return grad, grad[:, : k_shape[1]], grad[:, : v_shape[1]]
