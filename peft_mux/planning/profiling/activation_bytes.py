"""Host memory of this process, and the bytes that a pass keeps for its backward.

The bytes are counted on the meta device: neither weights nor a device are needed. A process keeps the last counts, 64
at most; each serves every model with the same description, so that trainers over the same tasks that are made one after
another (sweeps, resumed runs, notebooks) count once.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError
from peft_mux.kernels.attention import MAX_TOKENS
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.attention import packed
from peft_mux.modeling.attention.varlen import unsupported_attention
from peft_mux.modeling.backbone.liger import fused_without_data
from peft_mux.modeling.backbone.modules import find_layers, first_layers, is_meta, kinds_of_layers, num_telling_layers
from peft_mux.modeling.backbone.quantized import quantized_layers
from peft_mux.modeling.backbone.recompute import recomputing
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import in_mode, temporary_attributes
from peft_mux.planning.model_shape import config_of, model_shape, plain_backbone, shortened_config
from peft_mux.scheduler.costs import memory

Description = tuple[Hashable, ...]
_MOST = 64
_COUNTED: dict[tuple[Description, Hashable], float] = {}


def description_of(model: MultiTaskPeftModel) -> Description | None:
    """Return the key of a model without data: architecture, adapters and their kinds.

    `None` if a configuration has values that cannot be compared.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, PretrainedConfig) or (is_dataclass(value) and not isinstance(value, type)):
            return [type(value).__qualname__, vars(value)]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, torch.dtype):
            return str(value)
        raise TypeError(value)

    adapters = [model.peft_config[model.adapter_of(name)] for name in model.tasks]
    try:
        texts = [
            json.dumps(vars(config), default=plain, sort_keys=True) for config in (model.backbone.config, *adapters)
        ]
    except (TypeError, ValueError):
        return None
    kinds = [(type(config), kind_of(config)) for config in adapters]
    return (type(model.backbone), model.tasks, *texts, *(kind for pair in kinds for kind in pair))


def count_activation_bytes_per_token(
    model: MultiTaskPeftModel,
    lengths: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    device_type: str = "cpu",
    checkpointing: bool = False,
    liger: Mapping[str, bool] | None = None,
    selective: bool = False,
) -> float:
    """Return the bytes that a pass keeps for its backward, divided by its tokens.

    The forward of a copy of the model without data, with all of its tasks, runs on the meta device, and the storages
    that autograd saves are counted once each; weights are left out. Of equal layers, only the first ones are run.
    Attention is counted as a fused kernel keeps it: queries, keys, values, outputs, and one number per head.

    Args:
        model: the model with the tasks' adapters, or a description of it (on the meta device); not changed.
        lengths: number of tokens of each sequence of a typical micro-batch; the tasks get them in turn.
        dtype: the dtype of the weights; by default that of the model.
        autocast: the dtype of autocast, in which products are computed; `None` for none.
        device_type: "cuda" or "cpu", because autocast leaves other operations in fp32 on each.
        checkpointing: whether activations are recomputed: then each layer keeps only its input, and one of them
            everything while it is recomputed.
        liger: which of Liger's kernels the layers compute by, as `liger_kernel_config`; `None` for none.
        selective: whether inputs of linear layers are recomputed (`selective_recompute`).

    Returns:
        The analytic number, with a warning, if a part of the forward does not run without data.
    """
    backbone = plain_backbone(model)
    held: torch.dtype = dtype or backbone.dtype
    try:
        layers = find_layers(backbone)
        # A number for each layer, the same for equal layers; none if that is not known.
        kinds = [] if layers is None else kinds_of_layers(backbone, list(layers.layers))
        # A model on the meta device is run unchanged, and may differ from its configuration.
        description = None if is_meta(backbone) else description_of(model)
        kernels = None if liger is None else str(liger)
        how = (tuple(kinds), tuple(lengths), held, autocast, device_type, kernels, selective)
        counted = None if description is None else _COUNTED.get((description, how))
        if counted is None:
            counted = _kept_per_token(model, kinds, lengths, held, autocast, device_type, liger, selective)
            if len(_COUNTED) >= _MOST:
                _COUNTED.clear()
            if description is not None:
                _COUNTED[description, how] = counted
    # Also of a kind of adapter that needs weights.
    except (NotImplementedError, RuntimeError, ConfigError) as error:
        warnings.warn(
            f"activations are estimated by formula, as the forward does not run without data: {error}",
            stacklevel=2,
        )
        shape = model_shape(backbone, config_of(model), dtype=held, activation_dtype=autocast or held)
        return float(memory.activation_bytes_per_token(shape, checkpointing=checkpointing))
    if not checkpointing:
        return counted
    shape = model_shape(backbone, config_of(model), dtype=held, activation_dtype=held)
    # The residual stream is in the dtype of the weights, also under autocast.
    return shape.num_layers * shape.hidden_size * shape.activation_bytes + counted / shape.num_layers


def _kept_per_token(
    model: MultiTaskPeftModel,
    kinds: Sequence[int],
    lengths: Sequence[int],
    held: torch.dtype,
    autocast: torch.dtype | None,
    device_type: str,
    liger: Mapping[str, bool] | None,
    selective: bool,
) -> float:
    """Return the bytes that a pass without checkpointing keeps for each token, the layers being of these kinds."""
    mode = _AutocastOnMeta(autocast, device_type)
    telling = _described(model, held, num_telling_layers(kinds))
    with mode.replaces_torch(), telling as described, fused_without_data(described.backbone, liger):
        kept = mode.kept = _SavedStorages(described)
        names = [described.tasks[number % len(described.tasks)] for number in range(len(lengths))]
        virtual = described.virtual_labels
        rows: list[dict[str, Any]] = [
            # The lengths count virtual tokens; the collator adds as many as the task has.
            {
                "task": name,
                "input_ids": [1] * max(1, length - len(virtual.get(name, ()))),
                "label": described.objectives.head.example_label,
            }
            for name, length in zip(names, lengths, strict=True)
        ]
        batch, objectives = ChunkPackingCollator(virtual_labels=virtual)(rows).to("meta"), described.objectives
        # The forward alone says what a pass keeps: autograd packs each tensor as it is saved.
        recomputed = recomputing(described.backbone, wanted=selective)
        hooks = torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor)
        with in_mode(described, training=True), temporary_attributes(objectives, are_rows_made_up=True):
            recorded = kept.by_layer(described.backbone)
            attention = _one_attention_call() if device_type == "cuda" else nullcontext()
            with mode, recorded, hooks, recomputed, attention, described.multiplexing(batch):
                hidden_TD = described.hidden_states(batch)
                # The heads of single tasks are small, and left out. Of the shared one the log-likelihoods take the
                # memory, whatever is computed from them; made-up rows lack what losses read.
                if objectives.head.kind.is_shared:
                    objectives.head.terms(hidden_TD, batch, described)
    # The layers after those that were run would have kept what the last one of their kind has.
    last = dict(zip(kinds, kept.layer_bytes, strict=False))
    of_others = sum(last[kind] for kind in kinds[len(kept.layer_bytes) :])
    per_token = (kept.num_bytes + of_others) / sum(lengths)
    if device_type != "cuda" or not min(lengths) <= MAX_TOKENS < max(lengths):
        return per_token
    # Short rows have kernels of their own on GPUs, next to which those of longer rows keep copies of what they read,
    # and their outputs.
    backbone = plain_backbone(model)
    shape = model_shape(backbone, config_of(model), dtype=held, activation_dtype=autocast or held)
    copied_bytes = 2 * shape.num_layers * (shape.attention_size + shape.key_value_size) * shape.activation_bytes
    return per_token + copied_bytes * sum(length for length in lengths if length > MAX_TOKENS) / sum(lengths)


@contextmanager
def _described(model: MultiTaskPeftModel, dtype: torch.dtype, num_layers: int) -> Iterator[MultiTaskPeftModel]:
    """Yield the model without data, with only its first layers in the `with` block.

    This is the model itself, if it has no data and runs like this, otherwise a new one.

    Args:
        model: the model.
        dtype: the dtype of the weights.
        num_layers: how many layers stay; 0 for all.
    """
    given = plain_backbone(model)
    is_whole = model.num_stages * model.tp_size == 1
    is_quantized = next(quantized_layers(given), None) is not None  # its layers compute only on data
    if is_meta(given) and given.dtype == dtype and is_whole and not is_quantized:
        with first_layers(given, num_layers):
            yield model
        return
    with torch.device("meta"):
        backbone = type(given)(shortened_config(given.config, None)).to(dtype)
    configs = {name: model.peft_config[model.adapter_of(name)] for name in model.tasks}
    with first_layers(backbone, num_layers):
        described = MultiTaskPeftModel(backbone, configs, verify=False)
        for name in model.tasks:
            described.objectives.assign(name, model.objectives.of(name), model.objectives.args_of(name))
        yield described


class _SavedStorages:
    """What autograd saves, each storage once."""

    def __init__(self, model: torch.nn.Module) -> None:
        # By the address of the storage object: on the meta device all data pointers are 0.
        self._weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._copies: list[torch.Tensor] = []
        self.layer_bytes: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all saved storages."""
        return sum(storage.nbytes() for storage in self._storages.values())

    @contextmanager
    def by_layer(self, backbone: Any) -> Iterator[None]:
        """Record in `layer_bytes` what is saved from the end of one layer to the end of the next, in the `with` block.

        Args:
            backbone: the model whose layers are run once each.
        """
        layers_there, ends = find_layers(backbone), [0]
        layers = () if layers_there is None else layers_there.layers
        hooks = [layer.register_forward_hook(lambda *given: ends.append(self.num_bytes)) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.layer_bytes = [end - start for start, end in itertools.pairwise(ends)]

    def note_cast(self, tensor: torch.Tensor, cast: torch.Tensor) -> None:
        """Do not count a tensor that is a weight in another dtype."""
        if tensor.untyped_storage()._cdata in self._weights:
            self._weights.add(cast.untyped_storage()._cdata)
            self._copies.append(cast)  # held, so that no other takes its place

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that is saved; the storage is held, so that no other takes its place."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._weights:
            self._storages[storage._cdata] = storage
        return tensor


_LOWER: frozenset[Callable[..., Any]] = frozenset(
    (F.linear, F.scaled_dot_product_attention, F.conv1d, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm,
     Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm, Tensor.__matmul__)
)  # fmt: skip
"""Products, in the dtype of autocast."""

_FULL_ON_CUDA: frozenset[Callable[..., Any]] = frozenset(
    (F.layer_norm, F.group_norm, F.softmax, F.log_softmax, F.softplus, torch.pow, torch.rsqrt, torch.exp, torch.log,
     torch.softmax, torch.sum, torch.cumsum, Tensor.pow, Tensor.__pow__, Tensor.rsqrt, Tensor.exp, Tensor.log,
     Tensor.softmax, Tensor.sum, Tensor.cumsum)
)  # fmt: skip
"""Operations that CUDA's autocast computes in fp32; CPUs compute them in the dtype of their inputs."""


class _AutocastOnMeta(TorchFunctionMode):
    """Applies autocast on the meta device, which torch does not support, and treats attention as a fused kernel.

    Which operations compute in which dtype follows the documentation of torch for CUDA and for CPUs
    (https://docs.pytorch.org/docs/stable/amp.html), for the operations that models of transformers use. Attention
    would otherwise be decomposed into weights that no fused kernel keeps.

    Args:
        dtype: the dtype of autocast; `None` if it is off.
        device_type: "cuda" or "cpu", the device whose lists are followed.

    Attributes:
        kept: the storages that are counted; knows which tensors are weights.
    """

    def __init__(self, dtype: torch.dtype | None, device_type: str) -> None:
        super().__init__()
        self._dtype = dtype
        self._full = _FULL_ON_CUDA if device_type == "cuda" else frozenset()
        self.kept: _SavedStorages | None = None

    @contextmanager
    def replaces_torch(self) -> Iterator[None]:
        """Answer queries about autocast on the meta device, where torch raises; pass other calls on."""
        is_enabled, dtype_of, autocast = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast

        def known(*args: Any) -> bool:
            return self._dtype is not None if args == ("meta",) else is_enabled(*args)

        def known_dtype(device_type: str) -> torch.dtype:
            if device_type == "meta" and self._dtype is not None:
                return self._dtype
            return dtype_of("cpu" if device_type == "meta" else device_type)

        def entered(device_type: str, *args: Any, **kwargs: Any) -> Any:
            if device_type != "meta":
                return autocast(device_type, *args, **kwargs)
            return nullcontext() if kwargs.get("enabled", True) else self._switched_off()

        torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast = known, known_dtype, entered  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast = is_enabled, dtype_of, autocast  # type: ignore[assignment]

    @contextmanager
    def _switched_off(self) -> Iterator[None]:
        before, self._dtype = self._dtype, None
        try:
            yield
        finally:
            self._dtype = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_full = self._dtype is not None and func in self._full
        dtype = torch.float32 if is_full else self._dtype if func in _LOWER else None
        if dtype is not None:
            args = tuple(self._cast(value, dtype) for value in args)
            kwargs = {name: self._cast(value, dtype) for name, value in kwargs.items()}
        if func is F.scaled_dot_product_attention:
            return _FusedAttentionStub.apply(*args[:3])
        with self._switched_off() if dtype is not None else nullcontext():  # an operation's parts are not cast again
            return func(*args, **kwargs)

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dtype in (dtype, torch.float64):
            return value
        cast = value.to(dtype)
        assert self.kept is not None, "set before anything runs"
        self.kept.note_cast(value, cast)
        return cast


def _one_attention_call() -> AbstractContextManager[None]:
    """Let attention be one call for all sequences in the `with` block, where a GPU has a kernel for it."""
    return temporary_attributes(
        packed,
        varlen_support=lambda device, dtype, head_dim, **options: unsupported_attention(dtype, head_dim, **options),
        varlen_attention=lambda q, k, v, *bounds, **options: _FusedAttentionStub.apply(q, k, v),
    )


class _FusedAttentionStub(torch.autograd.Function):
    """Saves what a fused attention kernel saves."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        # Flash attention keeps the log-sum-exp of each row in fp32, and no weights.
        normalisers = q.new_empty(q.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, normalisers)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        raise NotImplementedError("a description has no backward")
