"""Contender `padded`: all tasks in one padded batch with batched LoRA (SL-PEFT of M §5.1, after S-LoRA).

Every step puts the sequences of all tasks into one `[B, L]` batch, padded to the longest of all. The backbone
runs once on it; the adapters, stacked and padded to the largest rank, are applied by one `bmm` over the
tasks. (Gathering a copy of the adapter for every row, the other way to write it, was measured 2-6% slower per
layer.) One backward pass of the sum of the tasks' mean losses; clipping, AdamW and the linear schedule are
per task, as Trainer's are.

Shape letters: B rows, L padded length, N tasks, P = B / N * L positions of a task, R largest rank, D input
features, K output features, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

from benchmarks.training.baselines import ModelFactory
from benchmarks.training.baselines.hf_trainer import PadToLongest
from benchmarks.training.timing import Run, now_s, timed
from benchmarks.training.workloads import IGNORE_INDEX, Workload


class BatchedLoraLinear(nn.Module):
    """A frozen linear layer with the adapters of all tasks; rows lie task after task, equally many."""

    def __init__(self, base: nn.Linear, down: list[torch.Tensor], max_rank: int, scaling_N: torch.Tensor) -> None:
        """Stack the adapters of all tasks.

        Args:
            base: the frozen linear layer.
            down: initial A of each task, `[r, D]`; B starts at zero.
            max_rank: largest rank of all tasks, R.
            scaling_N: alpha / rank of each task.
        """
        super().__init__()
        self.base, self.scaling_N11 = base, scaling_N[:, None, None]
        padded = [F.pad(weight, (0, 0, 0, max_rank - len(weight))) for weight in down]
        self.down_NRD = nn.Parameter(torch.stack(padded))
        self.up_NRK = nn.Parameter(torch.zeros(len(down), max_rank, base.out_features))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return `[B, L, K]`."""
        x_NPD = x_BLD.reshape(len(self.down_NRD), -1, x_BLD.shape[-1])
        low_NPR = torch.bmm(x_NPD, self.down_NRD.transpose(1, 2))
        y_NPK = torch.baddbmm(self.base(x_NPD), low_NPR, self.up_NRK * self.scaling_N11)
        return y_NPK.view(*x_BLD.shape[:2], -1)


def run_padded_joint(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Train all tasks together in padded batches.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks and their rows.
        record_losses: whether to keep the loss of each task at each step.
    """
    model = attach_batched_lora(model_factory(), workload)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW works element by element: one optimizer over the stacks is each task's own, as all share one rate.
    optimizer = torch.optim.AdamW(parameters, lr=workload.learning_rate, weight_decay=0.0, fused=True)
    collator, losses_by_step, clock_s = PadToLongest(), [], [now_s()]
    model.train()
    for step, batches in enumerate(zip(*(task.batches for task in workload.tasks), strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate * (1 - step / workload.num_steps)
        losses_N = task_losses(model, collator([row for batch in batches for row in batch]), len(batches))
        losses_N.sum().backward()
        clip_per_task(parameters, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses_by_step.append(losses_N.detach())
        clock_s.append(now_s())
    losses = {}
    if record_losses:
        by_task = torch.stack(losses_by_step, dim=1).tolist()
        losses = {task.name: values for task, values in zip(workload.tasks, by_task, strict=True)}
    steps_s = [end - begin for begin, end in pairwise(clock_s)]
    return Run(sum(steps_s), sum(timed(collator.tokens_per_batch)), sum(timed(steps_s)), losses)


def attach_batched_lora(backbone: Any, workload: Workload) -> Any:
    """Freeze the backbone and give each layer the adapters of all tasks, with PEFT's own initial weights."""
    down: dict[str, list[torch.Tensor]] = {}
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        peft_model = get_peft_model(backbone, task.lora_config())
        for name, module in peft_model.base_model.model.named_modules():
            if isinstance(module, LoraLayer):
                down.setdefault(name, []).append(module.lora_A["default"].weight.detach().clone())
        backbone = peft_model.unload()
    backbone.requires_grad_(False)
    configs = [task.lora_config() for task in workload.tasks]
    scaling_N = torch.tensor([config.lora_alpha / config.r for config in configs])
    for name, weights in down.items():
        owner_name, _, child_name = name.rpartition(".")
        owner = backbone.get_submodule(owner_name)
        max_rank = max(config.r for config in configs)
        setattr(owner, child_name, BatchedLoraLinear(getattr(owner, child_name), weights, max_rank, scaling_N))
    return backbone


def task_losses(model: Any, batch: dict[str, torch.Tensor], num_tasks: int) -> torch.Tensor:
    """Return `[N]`: each task's mean negative log-likelihood over its target tokens."""
    logits_BLV = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    targets_BL = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    losses = F.cross_entropy(
        logits_BLV.view(-1, logits_BLV.shape[-1]),
        targets_BL.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="none",
    )
    num_targets_N = (targets_BL != IGNORE_INDEX).view(num_tasks, -1).sum(dim=1)
    return losses.view(num_tasks, -1).sum(dim=1) / num_targets_N


@torch.no_grad()
def clip_per_task(parameters: list[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients of each task alone, as `clip_grad_norm_` does for a task that trains alone.

    Args:
        parameters: stacks of all tasks' factors, `[N, R, ...]`.
        max_norm: largest gradient norm of a task.
    """
    norms = torch.stack([torch.linalg.vector_norm(parameter.grad, dim=(1, 2)) for parameter in parameters])
    scale_N = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale_N[:, None, None])
