"""`MultiTaskPeftModel`: a PEFT model that holds the adapters of many tasks and runs them all in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftConfig

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError
from peft_mux.modeling import classification, losses
from peft_mux.modeling.adapter_files import AdapterFiles
from peft_mux.modeling.attention import ATTENTION_NAME, AttentionStream, register
from peft_mux.modeling.injection import as_it_was, check_configs, is_meta, own_copy, peft_refusals, seeded
from peft_mux.modeling.lora_pass import LoraPass
from peft_mux.modeling.quantized import prepare_quantized
from peft_mux.modeling.support import check_backbone, position_offset
from peft_mux.modeling.task_registry import TaskRegistry
from peft_mux.modeling.view import TaskView, require_all_layers


@dataclass(frozen=True, slots=True)
class MuxOutput:
    """What a multiplexed forward pass returns.

    Attributes:
        losses: `[N]`, each task's part of its mean loss; their sum may be differentiated.
        task_names: the N tasks, in the order of `losses`.
    """

    losses: torch.Tensor
    task_names: tuple[str, ...]


class MultiTaskPeftModel(AdapterFiles, TaskRegistry):
    """Any number of adapters on one frozen backbone, each computing on its own rows of a packed stream.

    It is a `PeftModel`: parameter names, saving and merging are PEFT's. Tasks are known to PEFT under internal ids,
    because an adapter that is named like a module (`mlp`) empties the checkpoints of its neighbours there.

    Args:
        model: a transformers causal language model, or a model for sequence classification. Its modules are kept and
            its weights frozen.
        peft_configs: `PeftConfig` of each task by name; at least one.
        seeds: fixes the initial adapter weights of a task, as `torch.manual_seed` before `get_peft_model` would; 42
            where absent.
        num_labels: classes of a task's head, for sequence classification; the backbone's where absent.
        is_head_new: the backbone's classification head was not loaded but made at random; then each task's head is
            drawn from the task's seed instead of copied.
        verify: hold packed against separate results on the backbone before anything else (a few short sequences).

    Raises:
        ConfigError: naming every task and field that cannot be trained.
        UnsupportedModelError: if packing would change the model's results.

    Example:
        >>> model = MultiTaskPeftModel(base, {"sst2": LoraConfig(r=8), "qa": LoraConfig(r=64)})  # doctest: +SKIP
        >>> model(mux_batch).losses.sum().backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        peft_configs: Mapping[str, PeftConfig],
        *,
        seeds: Mapping[str, int] | None = None,
        num_labels: Mapping[str, int] | None = None,
        is_head_new: bool = False,
        verify: bool = True,
    ) -> None:
        """Inject the adapters, attach the multiplexed layers, and probe the backbone."""
        check_backbone(model)
        prepare_quantized(model)
        if not peft_configs:
            raise ConfigError("peft_configs: got no task; allowed: at least one task name with its PeftConfig.")
        check_configs(peft_configs, model, taken=())
        register()
        first, *others = peft_configs
        config = own_copy(peft_configs[first], model)
        adapter = "t000001"
        with seeded((seeds or {}).get(first, 42)), peft_refusals(first), as_it_was(model):
            super().__init__(model, config, adapter, is_head_new=is_head_new, low_cpu_mem_usage=is_meta(model))
        self._given_configs[first] = peft_configs[first].to_dict()
        with as_it_was(model):
            self._adopt(first, adapter, (num_labels or {}).get(first), (seeds or {}).get(first, 42))
            self._freeze_backbone()
            self._register({name: peft_configs[name] for name in others}, seeds or {}, num_labels or {})
            if verify and not is_meta(model):
                self.verify()

    # ------------------------------------------------------------------ views

    def task_view(self, name: str) -> TaskView:
        """Return one task's model, for `generate` and plain forward passes."""
        return TaskView(self, self.adapter_of(name))

    def verify(self) -> None:
        """Hold packed against separate results on the backbone; see `peft_mux.modeling.probe`.

        Raises:
            UnsupportedModelError: if they differ.
        """
        from peft_mux.modeling.probe import check_packing

        check_packing(self)

    # ---------------------------------------------------------------- forward

    def forward(self, mux_batch: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Run a `MuxBatch` through the backbone and all of its tasks' adapters at once.

        Args:
            mux_batch: the packed stream, on the model's device; anything else goes to PEFT's own forward.
            *args: for PEFT's forward.
            **kwargs: for PEFT's forward.

        Returns:
            `MuxOutput` with one loss a task.

        Raises:
            ConfigError: for one of several stages of a pipeline.
        """
        require_all_layers(self, "a forward pass")
        if not isinstance(mux_batch, MuxBatch):
            args = args if mux_batch is None else (mux_batch, *args)
            return super().forward(*args, **kwargs)
        self.prepare(mux_batch.task_names)
        with self.multiplexing(mux_batch):
            return MuxOutput(self.losses_of(self._hidden_states(mux_batch), mux_batch), mux_batch.task_names)

    def losses_of(self, hidden_TD: torch.Tensor, mux_batch: MuxBatch) -> torch.Tensor:
        """Return the losses `[N]` from the `[T, D]` last hidden states, while the stream is read."""
        if self.is_classifier:
            logits = classification.task_logits(hidden_TD, self.backbone, mux_batch, self.stream, self._adapters)
            terms, bounds = classification.task_losses(logits, mux_batch), mux_batch.sequence_offsets
        else:
            terms = losses.token_losses(hidden_TD, self.backbone, mux_batch, self.stream, self._adapters)
            bounds = mux_batch.target_offsets
        counts = [end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True)]
        return losses.per_task(terms, counts, mux_batch.loss_weights)

    def target_losses(self, mux_batch: MuxBatch, lora_pass: LoraPass, attention: AttentionStream) -> torch.Tensor:
        """Return the `[M]` negative log-likelihoods of a language model's targets, for passes that are captured.

        Nothing is bound or refreshed, and nothing that is made here needs to outlive the pass.

        Args:
            mux_batch: the packed stream, on the model's device.
            lora_pass: its rows, bound to adapters.
            attention: of the same batch.
        """
        with self.multiplexing(mux_batch, lora_pass):
            hidden_TD = self._hidden_states(mux_batch, attention)
            return losses.token_losses(hidden_TD, self.backbone, mux_batch, self.stream, self._adapters)

    @torch.no_grad()
    def sequence_logits(self, mux_batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence: `[L, V]` for language models, `[C]` for classifiers."""
        self.prepare(mux_batch.task_names)
        with self.multiplexing(mux_batch):
            return self.logits_of(self._hidden_states(mux_batch), mux_batch)

    def logits_of(self, hidden_TD: torch.Tensor, mux_batch: MuxBatch) -> list[torch.Tensor]:
        """Return the logits of every sequence from the `[T, D]` last hidden states, while the stream is read."""
        if self.is_classifier:
            logits = classification.task_logits(hidden_TD, self.backbone, mux_batch, self.stream, self._adapters)
            return [row for part in logits for row in part]
        return losses.stream_logits(hidden_TD, self.backbone, mux_batch, self.stream, self._adapters)

    @contextmanager
    def multiplexing(self, batch: MuxBatch, lora_pass: LoraPass | None = None) -> Iterator[None]:
        """Let the attached layers and attention read `batch` for the time of the `with` block.

        Args:
            batch: the micro-batch, its tensors on the model's device.
            lora_pass: of the same batch, where its activations are recomputed.
        """
        config = self.backbone.config
        attention = config._attn_implementation
        if attention != ATTENTION_NAME:
            config._attn_implementation = ATTENTION_NAME
        try:
            with self.stream.reading(batch, self._adapters, lora_pass):
                yield
        finally:
            if attention != ATTENTION_NAME:
                config._attn_implementation = attention

    def _hidden_states(self, batch: MuxBatch, attention: AttentionStream | None = None) -> torch.Tensor:
        """Return `[T, D]` last hidden states."""
        position_ids = batch.position_ids + position_offset(self.backbone)
        arguments: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": position_ids}
        arguments["mux_stream"] = attention or AttentionStream(self.stream, batch, self._module_names)
        if batch.token_type_ids is not None:
            arguments["token_type_ids"] = batch.token_type_ids
        if hasattr(self.backbone.config, "use_cache"):
            arguments["use_cache"] = False
        with classification.without_pooler(self.backbone) if self.is_classifier else nullcontext():
            return self.backbone.base_model(**arguments).last_hidden_state[0]

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Switch all adapters off for the time of the `with` block."""
        with self.disable_adapter():
            yield
        self._mark_trainable()

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """Recompute each layer's activations in the backward pass, reading the micro-batch they came from.

        Args:
            **kwargs: for `torch.utils.checkpoint.checkpoint`; it is always non-reentrant.

        Raises:
            ConfigError: if reentrant checkpointing is asked for.
        """
        if kwargs.pop("use_reentrant", False):
            raise ConfigError(
                "use_reentrant: got True; allowed: False, as adapters sit inside the checkpointed layers."
            )
        arguments = {"use_reentrant": False, "context_fn": self._checkpoint_contexts, "preserve_rng_state": False}
        enable = getattr(self.backbone, "activation_checkpointing_enable", None)
        if enable is not None:
            enable(activation_checkpointing_kwargs={**arguments, **kwargs})
        else:
            self.backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={**arguments, **kwargs})

    gradient_checkpointing_enable = activation_checkpointing_enable

    def _checkpoint_contexts(self) -> tuple[Any, Any]:
        batch = self.stream.batch
        if batch is None:
            return nullcontext(), nullcontext()
        return nullcontext(), self.multiplexing(batch, self.stream.lora_pass)

    @torch.compiler.disable()
    def prepare(self, tasks: Iterable[str]) -> None:
        """Bind the gradients of a pass, and let kernels in another dtype see the weights as they are now.

        Args:
            tasks: of the pass.
        """
        for name in tasks:
            slab = self.task_slab(name)
            if torch.is_grad_enabled():
                slab.bind_gradients()
            slab.refresh_copies()
