"""The balancing loss of routers: of each task, over the tokens of its global batch and all layers of a mixture.

It is the auxiliary loss of Switch Transformer (equations 4 to 6), as transformers and TRL have it::

    loss = coefficient * E * sum_e f_e P_e      f_e = counts_e / n   P_e = probabilities_e / n   n = tokens * layers

`counts_e` is how many tokens have expert e among their k most probable ones, and has no gradient. So a token adds to
the gradient by itself as soon as the counts of the whole global batch are known: if one pass holds all of it, in its
own backward, and otherwise after passes without gradient that count (`Executor.with_reference_values`). The gradient
enters at each router, on the way back through the layers, so a pipeline stage needs only its own routers.

Shape letters: U computed rows, E experts, k experts of a token, N tasks, D hidden features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.modules import language_model, modules_below_adapters
from peft_mux.modeling.objectives.objective import ROUTER_TOTALS
from peft_mux.modeling.objectives.task_objective import MuxOutput
from peft_mux.modeling.stream import RowSegment, Stream, temporary_attributes

STATISTIC = "aux_loss"
"""Name under which the loss is logged, before it is multiplied by its coefficient, as in TRL."""


def default_coefficient(config: Any) -> float:
    """Return the coefficient that TRL takes for a backbone by default; 0 if the backbone has no such loss."""
    text = config.get_text_config()
    return (getattr(text, "router_aux_loss_coef", 0.0) or 0.0) if hasattr(text, "output_router_logits") else 0.0


class RoutedTokens:
    """The tokens and probabilities that the routers of one pass give to experts, by task.

    Args:
        loss: the losses of the model; while it counts, totals go there instead of into a dictionary of this pass.
        weights: for each task of the pass that has the loss, by internal adapter id, how many of its tokens each of its
            computed rows stands for.
        given: `[2, E]`, totals of tasks that were counted before.
    """

    def __init__(
        self, loss: RouterLoss, weights: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> None:
        self.num_experts, self._top_k = loss.num_experts, loss.top_k
        self._coefficients = {adapter: loss.coefficients[adapter] for adapter in weights}
        self._weights, self._given = weights, given
        self._counted: dict[str, torch.Tensor] = {} if loss.counted is None else loss.counted
        self._seen: set[tuple[nn.Module, str]] = set()

    def totals(self, adapter: str) -> torch.Tensor:
        """Return counts and sums of probabilities `[2, E]` of a task, over tokens and layers."""
        return self._given[adapter] if adapter in self._given else self._counted[adapter]

    def add(self, router: nn.Module, logits_UE: torch.Tensor, segments: Sequence[RowSegment]) -> None:
        """Count the tokens of the tasks that were not counted before; a layer that is recomputed counts once."""
        counting = [
            segment
            for segment in segments
            if segment.adapter in self._coefficients
            and segment.adapter not in self._given
            and (router, segment.adapter) not in self._seen
        ]
        if not counting:
            return
        self._seen.update((router, segment.adapter) for segment in counting)
        probabilities_UE = logits_UE.detach().float().softmax(dim=-1)
        chosen_Uk = probabilities_UE.topk(self._top_k, dim=-1).indices
        counts_UE = torch.zeros_like(probabilities_UE).scatter_(1, chosen_Uk, 1.0)
        for segment in counting:
            weights_N1, rows = self._weights[segment.adapter][:, None], slice(segment.start, segment.end)
            # Sums and no products of matrices, which autocast would round to bf16.
            totals_2E = torch.stack([(weights_N1 * x_UE[rows]).sum(dim=0) for x_UE in (counts_UE, probabilities_UE)])
            before_2E = self._counted.get(segment.adapter)
            self._counted[segment.adapter] = totals_2E if before_2E is None else before_2E + totals_2E

    def value(self, adapter: str) -> torch.Tensor:
        """Return the loss of a task whose tokens are all counted, without its coefficient."""
        counts_E, probabilities_E = self.totals(adapter)
        return self.num_experts * (counts_E * probabilities_E).sum() / (counts_E.sum() / self._top_k) ** 2

    def gradient(self, logits_UE: torch.Tensor, segments: Sequence[RowSegment]) -> torch.Tensor:
        """Return `[U, E]`, the gradient of the losses, times their coefficients, at the logits of one router."""
        probabilities_UE = logits_UE.float().softmax(dim=-1)
        # By slices of rows: a NaN of one task reaches no other.
        slopes_UE = torch.zeros_like(probabilities_UE)
        for segment in segments:
            if segment.adapter in self._coefficients:
                counts_E = self.totals(segment.adapter)[0]
                slope_E = self._coefficients[segment.adapter] * self.num_experts * counts_E
                slope_E = slope_E / (counts_E.sum() / self._top_k) ** 2
                slopes_UE[segment.start : segment.end] = self._weights[segment.adapter][:, None] * slope_E
        means_U1 = (probabilities_UE * slopes_UE).sum(dim=-1, keepdim=True)
        return (probabilities_UE * (slopes_UE - means_U1)).to(logits_UE.dtype)


class _AddGradient(torch.autograd.Function):
    """Returns an output of a router as it is, and adds the gradient of the balancing losses at its logits."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, logits_UE: torch.Tensor, routed: RoutedTokens, segments: Sequence[RowSegment]
    ) -> torch.Tensor:
        ctx.save_for_backward(logits_UE)
        ctx.routed, ctx.segments = routed, segments
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (logits_UE,) = ctx.saved_tensors
        return gradient, ctx.routed.gradient(logits_UE, ctx.segments), None, None


class RouterLoss:
    """The balancing losses of all tasks of a model.

    Args:
        stream: says which rows of a pass belong to which task.

    Attributes:
        coefficients: coefficient of each task that has the loss, by internal adapter id.
        num_experts: number E of experts of a layer.
        top_k: number k of the experts of a token.
        counted: totals that passes add to while they are run to count; `None` at other times.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.coefficients: dict[str, float] = {}
        self.num_experts: int = 0
        self.top_k: int = 0
        self.counted: dict[str, torch.Tensor] | None = None
        self._hook: Callable[..., Any] | None = None
        self._handles: list[Any] = []

    def assign(self, adapter: str, coefficient: float, backbone: Any = None) -> None:
        """Give a task the loss with a coefficient, and hook onto the routers of its backbone; no loss if it is 0.

        Raises:
            UnsupportedModelError: if transformers does not say where the routers of the backbone are.
        """
        self.coefficients.pop(adapter, None)
        if coefficient:
            text, language = backbone.config.get_text_config(), language_model(backbone)
            counts = (getattr(text, name, None) for name in ("num_experts", "num_local_experts"))
            num_experts: Any = next((count for count in counts if count is not None), None)
            top_k: Any = getattr(text, "num_experts_per_tok", None)
            # What transformers records the logits of routers by.
            recorder: Any = (getattr(language, "_can_record_outputs", None) or {}).get("router_logits")
            is_known = isinstance(num_experts, int) and isinstance(top_k, int)
            if getattr(recorder, "target_class", None) is None or not is_known:
                raise UnsupportedModelError(
                    f"{type(backbone).__name__} has no balancing loss in peft_mux, because transformers does not say "
                    "which modules its routers are, or to how many experts a token is routed; mixtures such as "
                    "Mixtral, Qwen3-MoE and OLMoE have one. Set router_aux_loss_coef=0."
                )
            self.num_experts, self.top_k = num_experts, top_k
            self.coefficients[adapter] = coefficient
            stream, index, named = self._stream, recorder.index, recorder.layer_name or ""
            if self._hook is None:
                # A function and no method, as copies of a router that tasks train keep its hooks.
                self._hook = lambda router, _, outputs: _balanced(router, outputs, index, stream)
            for name, module in modules_below_adapters(language):
                is_router = isinstance(module, recorder.target_class) and named in name
                if is_router and self._hook not in module._forward_hooks.values():
                    self._handles.append(module.register_forward_hook(self._hook))
        elif not self.coefficients:
            while self._handles:
                self._handles.pop().remove()

    def of_pass(self, batch: MuxBatch, adapters: Mapping[str, str]) -> RoutedTokens | None:
        """Return what the routers of a pass write into; `None` if no task of the pass has the loss.

        Args:
            batch: the micro-batch, on the device.
            adapters: internal adapter id of each task name.
        """
        weights, given, counts_U = {}, {}, None
        if batch.shared is not None and self.coefficients:
            rows_T = batch.shared.row_of_token
            counts_U = torch.zeros(batch.num_computed, device=rows_T.device)
            counts_U.index_add_(0, rows_T, torch.ones(len(rows_T), device=rows_T.device))
        for index, (name, (start, end)) in enumerate(
            zip(batch.task_names, pairwise(batch.computed_offsets), strict=True)
        ):
            adapter = adapters[name]
            if adapter in self.coefficients:
                ones = torch.ones(end - start, device=batch.input_ids.device)
                weights[adapter] = ones if counts_U is None else counts_U[start:end]
                if batch.row_values and ROUTER_TOTALS in batch.row_values[index]:
                    given[adapter] = batch.row_values[index][ROUTER_TOTALS]
        return RoutedTokens(self, weights, given) if weights else None

    @contextmanager
    def counting(self) -> Iterator[dict[str, torch.Tensor]]:
        """Count tokens in all passes of the `with` block; yield the totals `[2, E]`, by internal adapter id."""
        counted: dict[str, torch.Tensor] = {}
        with temporary_attributes(self, counted=counted):
            yield counted

    def added_to(
        self, output: MuxOutput, hidden_TD: torch.Tensor, batch: MuxBatch, adapters: Mapping[str, str]
    ) -> MuxOutput:
        """Return the losses of a micro-batch with the balancing losses and their statistics.

        The pass that holds the first token of a task's global batch carries the value of all of it; each pass has the
        gradient of its own tokens.

        Args:
            output: the losses of the objectives.
            hidden_TD: the last hidden states.
            batch: the micro-batch.
            adapters: internal adapter id of each task name.
        """
        routed: RoutedTokens | None = self._stream.routing
        if routed is None:
            return output
        losses, statistics = list(output.losses.unbind()), list(output.statistics)
        for index, name in enumerate(batch.task_names):
            adapter = adapters[name]
            if adapter not in self.coefficients:
                continue
            places = batch.token_places[batch.task_offsets[index] : batch.task_offsets[index + 1]]
            value = routed.value(adapter) * (places == 0).sum()
            # A loss without a target may lead back to no router; an empty sum leads to all of them and adds nothing.
            losses[index] = losses[index] + self.coefficients[adapter] * value + hidden_TD[:0].sum()
            before = statistics[index]
            statistics[index] = value[None] if before is None else torch.cat([before, value[None]])
        return replace(output, losses=torch.stack(losses), statistics=tuple(statistics))


def _balanced(router: nn.Module, outputs: Any, index: int, stream: Stream) -> Any:
    """Count the tokens of a router's call, and return its outputs with the gradient of the balancing losses.

    Args:
        router: the router.
        outputs: what it returns.
        index: which of these are the logits.
        stream: the rows of the pass.
    """
    routed: RoutedTokens | None = stream.routing
    if routed is None:
        return None
    parts = list(outputs) if isinstance(outputs, tuple) else [outputs]
    logits_UE = parts[index].reshape(-1, parts[index].shape[-1])
    if logits_UE.shape != (stream.num_rows, routed.num_experts):
        raise UnsupportedModelError(
            f"{type(router).__name__} must return one row per token and one column per expert for a balancing loss, "
            f"got shape {list(logits_UE.shape)} for {stream.num_rows} tokens and {routed.num_experts} experts. Set "
            "router_aux_loss_coef=0."
        )
    routed.add(router, logits_UE, stream.segments)
    if not (torch.is_grad_enabled() and logits_UE.requires_grad):
        return None
    # What the layer computes with: many do not read the logits themselves.
    trained = (at for at, part in enumerate(parts) if isinstance(part, torch.Tensor) and part.requires_grad)
    used = next((at for at in trained if at != index), index)
    parts[used] = _AddGradient.apply(parts[used], logits_UE, routed, stream.segments)
    return tuple(parts) if isinstance(outputs, tuple) else parts[0]
