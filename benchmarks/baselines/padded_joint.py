"""Contender `padded`: all tasks in one padded batch with batched LoRA, the SL-PEFT baseline of M §5.1 (after S-LoRA).

Every step puts the sequences of all tasks into one `[B, L]` batch, padded to the longest of all. The backbone runs once
on it; each row's adapter is gathered from stacked weights, padded to the largest rank, and applied by `bmm`. One backward
pass of the sum of the tasks' mean losses; clipping, AdamW and the linear schedule are per task, as Trainer's are.

Shape letters: B rows, L padded length, N tasks, R largest rank, D input features, K output features, V vocabulary.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from peft import get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from torch.nn import functional as F

from benchmarks.baselines import ModelFactory, Run
from benchmarks.baselines.hf_trainer import PadToLongest
from benchmarks.workloads import IGNORE_INDEX, Workload


class RowTasks:
    """Which task owns each row of the batch in flight, shared by all layers.

    Attributes:
        task_of_row: int64 `[B]`.
        scaling: `[N]`, alpha / rank.
    """

    def __init__(self, workload: Workload) -> None:
        """Make it for the tasks of a workload; rows lie task after task."""
        sizes = torch.tensor([task.batch_size for task in workload.tasks])
        configs = [task.lora_config() for task in workload.tasks]
        self.task_of_row = torch.arange(len(sizes)).repeat_interleave(sizes)
        self.scaling = torch.tensor([config.lora_alpha / config.r for config in configs])


class BatchedLoraLinear(nn.Module):
    """A frozen linear layer with the adapters of all tasks, one of them for each row."""

    def __init__(self, base: nn.Linear, down: list[torch.Tensor], max_rank: int, rows: RowTasks) -> None:
        """Stack the adapters.

        Args:
            base: the frozen layer.
            down: initial A of each task, `[r, D]`; B starts at zero.
            max_rank: R.
            rows: of the batch in flight.
        """
        super().__init__()
        self.base, self.rows = base, rows
        padded = [F.pad(weight, (0, 0, 0, max_rank - len(weight))) for weight in down]
        self.down_NRD = nn.Parameter(torch.stack(padded))
        self.up_NRK = nn.Parameter(torch.zeros(len(down), max_rank, base.out_features))

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """Return `[B, L, K]`."""
        task_of_row = self.rows.task_of_row
        down_BRD = self.down_NRD.index_select(0, task_of_row)
        up_BRK = (self.up_NRK * self.rows.scaling[:, None, None]).index_select(0, task_of_row)
        low_BLR = torch.bmm(x_BLD, down_BRD.transpose(1, 2))
        return torch.baddbmm(self.base(x_BLD), low_BLR, up_BRK)


def run_padded_joint(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Train all tasks together in padded batches.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks.
        record_losses: keep the loss of each task at each step.
    """
    rows = RowTasks(workload)
    model = attach_batched_lora(model_factory(), workload, rows)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # AdamW works element by element, so one optimizer over the stacks is every task's own AdamW at the shared rate.
    optimizer = torch.optim.AdamW(parameters, lr=workload.learning_rate, weight_decay=0.0, fused=True)
    collator, losses_by_step = PadToLongest(), []
    steps = [[row for rows_ in group for row in rows_] for group in zip(*(t.batches for t in workload.tasks), strict=True)]
    model.train()
    start_s = time.perf_counter()
    for step, batch_rows in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = workload.learning_rate * (1 - step / len(steps))
        losses_N = task_losses(model, collator(batch_rows), rows)
        losses_N.sum().backward()
        clip_per_task(parameters, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses_by_step.append(losses_N.detach())
    train_s = time.perf_counter() - start_s
    by_task = torch.stack(losses_by_step, dim=1).tolist() if record_losses else []
    names = [task.name for task in workload.tasks] if record_losses else []
    return Run(train_s, collator.num_tokens, train_s, dict(zip(names, by_task, strict=True)))


def attach_batched_lora(backbone: Any, workload: Workload, rows: RowTasks) -> Any:
    """Freeze the backbone and give each targeted layer the adapters of all tasks, with PEFT's own initial weights."""
    down: dict[str, list[torch.Tensor]] = {}
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        peft_model = get_peft_model(backbone, task.lora_config())
        for name, module in peft_model.base_model.model.named_modules():
            if isinstance(module, LoraLayer):
                down.setdefault(name, []).append(module.lora_A["default"].weight.detach().clone())
        backbone = peft_model.unload()
    backbone.requires_grad_(False)
    max_rank = max(task.rank for task in workload.tasks)
    for name, weights in down.items():
        parent, _, child = name.rpartition(".")
        owner = backbone.get_submodule(parent)
        setattr(owner, child, BatchedLoraLinear(getattr(owner, child), weights, max_rank, rows))
    return backbone


def task_losses(model: Any, batch: dict[str, torch.Tensor], rows: RowTasks) -> torch.Tensor:
    """Return `[N]`: each task's mean negative log-likelihood over its target tokens."""
    logits_BLV = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    targets_BL = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE_INDEX)
    losses = F.cross_entropy(
        logits_BLV.view(-1, logits_BLV.shape[-1]), targets_BL.view(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )
    zeros_N = torch.zeros(len(rows.scaling))
    sums_N = zeros_N.index_add(0, rows.task_of_row, losses.view_as(targets_BL).sum(1))
    counts_B = (targets_BL != IGNORE_INDEX).sum(1).to(losses.dtype)
    return sums_N / zeros_N.index_add(0, rows.task_of_row, counts_B)


@torch.no_grad()
def clip_per_task(parameters: list[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients of each task alone, as `clip_grad_norm_` does for a task that trains alone.

    Args:
        parameters: stacks `[N, R, ...]`.
        max_norm: largest gradient norm of a task.
    """
    norms = torch.stack([torch.linalg.vector_norm(parameter.grad, dim=(1, 2)) for parameter in parameters])
    scale_N = (max_norm / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        parameter.grad.mul_(scale_N[:, None, None])
