"""Who trains in `benchmarks.gpu.train`, `.sweep` and `.default_run`: the floor, PEFT task by task, padded and packed,
peft_mux, and the padded joint batch.

Each gets a backbone and leaves it as it was; one that raises leaves anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.rehearsal import graphs_here, stand_ins
from benchmarks.gpu.settings import Settings


class Trained(NamedTuple):
    """What a trainer has measured.

    Attributes:
        steps_s: seconds of each step of all tasks.
        losses: for each step, the loss of each task; for the floor, of the first step alone.
        calls: how often peft_mux computed a group of layers through "kernels" and through "slices"; `None` for others.
        num_captures: passes captured as CUDA graphs; `None` if graphs were not asked for.
    """

    steps_s: list[float]
    losses: list[list[float]]
    calls: dict[str, int] | None = None
    num_captures: int | None = None


def train_floor(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """The packed tokens through the frozen backbone, forward and input gradients; attention in one call on a GPU."""
    from benchmarks.training.baselines import floor

    packed = [[_moved(part, settings) for part in floor.pack(workload.tasks, s, pass_tokens)]
              for s in range(workload.num_steps)]  # fmt: skip
    losses = torch.zeros(len(workload.tasks), device=settings.device)
    with _attention_in_one_call(backbone):
        timer = _StepTimer(settings.device)
        for step in range(workload.num_steps):
            for part, bounds in packed[step]:
                embeddings = backbone.get_input_embeddings()(part.input_ids).requires_grad_()
                terms = _weighted_losses(backbone, part, bounds, inputs_embeds=embeddings)
                terms.sum().backward()
                if step == 0:
                    losses.index_add_(0, part.task_of_target, terms.detach().float())
            timer.tick()
    return Trained(timer.steps_s, [losses.tolist()])


def train_packed(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """PEFT, one task after the other, without padding: what is left to gain over it comes from sharing passes.

    Rows are packed, attention over them is one call, logits are computed by blocks, and on a GPU norms, rotary
    embeddings and MLPs are Liger's if it is installed.
    """
    from benchmarks.training.baselines import floor
    from peft_mux.modeling.backbone import liger

    def parts_of(task: Any, step: int) -> list[Any]:
        return [_moved(part, settings) for part in floor.pack((task,), step, pass_tokens)]

    def loss_of(_: Any, part: Any) -> torch.Tensor:
        packed, bounds = part
        return _weighted_losses(backbone, packed, bounds, input_ids=packed.input_ids).sum()

    with _attention_in_one_call(backbone):
        if settings.device.type == "cuda" and liger.has_liger():
            liger._patch(backbone, {})
        try:
            return _one_after_the_other(settings, backbone, workload, parts_of, loss_of)
        finally:
            liger.unfuse(backbone)


def train_hf(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """PEFT, one task after the other, batches padded to their longest row, gradients of large ones accumulated."""

    def parts_of(task: Any, step: int) -> list[Any]:
        shares = shares_of(task.batches[step], pass_tokens)
        return [(_padded(part, settings.device), share) for part, share in shares]

    def loss_of(model: Any, part: Any) -> torch.Tensor:
        batch, share = part
        return model(**batch).loss * share

    return _one_after_the_other(settings, backbone, workload, parts_of, loss_of)


def _one_after_the_other(
    settings: Settings,
    backbone: Any,
    workload: Any,
    parts_of: Callable[[Any, int], list[Any]],
    loss_of: Callable[[Any, Any], torch.Tensor],
) -> Trained:
    """Train each task alone with PEFT, and sum the seconds of their steps.

    Args:
        settings: device and precision.
        backbone: the backbone; it has no adapters afterwards.
        workload: tasks and steps.
        parts_of: returns what the passes of a task's step read; it is not timed.
        loss_of: returns the loss of one pass of a PEFT model, as a share of the step's.
    """
    from peft import get_peft_model

    totals = [0.0] * workload.num_steps
    losses: list[list[float]] = [[] for _ in totals]
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        model = get_peft_model(backbone, task.lora_config())
        model.train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _adamw(parameters, workload)
        steps = [parts_of(task, step) for step in range(workload.num_steps)]
        timer = _StepTimer(settings.device)
        for step, parts in enumerate(steps):
            total = torch.zeros((), device=settings.device)
            for part in parts:
                with settings.precision():
                    loss = loss_of(model, part)
                loss.backward()
                total += loss.detach()
            losses[step].append(total.item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            timer.tick()
        totals = [total + own for total, own in zip(totals, timer.steps_s, strict=True)]
        model.unload()
        vars(backbone).pop("peft_config", None)
    return Trained(totals, losses)


@contextlib.contextmanager
def _attention_in_one_call(backbone: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("benchmark_gpu_floor", _floor_attention)
    AttentionMaskInterface.register("benchmark_gpu_floor", lambda *args, **kwargs: None)
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("benchmark_gpu_floor")
    try:
        yield
    finally:
        backbone.set_attn_implementation(before)


def _weighted_losses(backbone: Any, part: Any, bounds: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the loss of each target of a packed pass, over the number of targets of its task's step."""
    from peft_mux.kernels.cross_entropy.linear import Head, linear_cross_entropy

    hidden = backbone.model(
        position_ids=part.position_ids,
        use_cache=False,
        floor_rectangles=part.rectangles,
        floor_bounds=bounds,
        **inputs,
    ).last_hidden_state[0]
    head = Head(backbone.lm_head.weight)
    return linear_cross_entropy(hidden.index_select(0, part.target_rows), head, part.targets) * part.weights


def _moved(part: Any, settings: Settings) -> tuple[Any, torch.Tensor]:
    """Return the packed tokens on the device, and where each sequence begins and the last one ends."""
    moved = {
        field.name: value.to(settings.device)
        for field in dataclasses.fields(part)
        if isinstance(value := getattr(part, field.name), torch.Tensor)
    }
    bounds = [0]
    for count, length in part.rectangles:
        for _ in range(count):
            bounds.append(bounds[-1] + length)
    return dataclasses.replace(part, **moved), torch.tensor(bounds, dtype=torch.int32, device=settings.device)


def _floor_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float | None = None,
    floor_rectangles: Any = (), floor_bounds: Any = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    from benchmarks.training.baselines.floor import rectangle_attention
    from peft_mux.modeling.attention.varlen import varlen_attention, varlen_support

    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    if varlen_support(query.device, query.dtype, query.shape[-1]) is not None:
        return rectangle_attention(module, query, key, value, attention_mask, scale, floor_rectangles)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    longest = max(length for _, length in floor_rectangles)
    out = varlen_attention(q, k, v, floor_bounds, longest, is_causal=True, window=None, scaling=scale)
    return out[None], None


def train_mux(settings: Settings, backbone: Any, workload: Any, pass_tokens: int, cuda_graphs: bool = False) -> Trained:
    """The package's model, executor and update of all tasks."""
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.engine.executor import Executor
    from peft_mux.engine.work import StepWork
    from peft_mux.modeling.adapters.injection import detach
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.parallel.cuda_graphs import CapturedPasses

    configs = {task.name: task.lora_config() for task in workload.tasks}
    seeds = {task.name: task.seed for task in workload.tasks}
    model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False)
    model.train()
    table = started_tasks(settings, model, workload)
    executor, collator, losses = Executor(model, bf16=not settings.is_rehearsal), ChunkPackingCollator(), []
    if cuda_graphs:
        executor.runner = CapturedPasses(model, executor.precision, graphs_here(settings))
    works = []
    for step in range(workload.num_steps):
        batches = [task_batch(task, step) for task in workload.tasks]
        streams = tuple(collator.micro_batches(batches, max_tokens=pass_tokens))
        works.append(StepWork(tuple(configs), streams, {item.task: item.num_tokens for item in batches}))
    with counted_paths() as calls, stand_ins(settings, with_attention=cuda_graphs):
        timer = _StepTimer(settings.device)
        for work in works:
            table.apply(executor.run(work))  # reads the losses, for which it waits
            losses.append([table[name].last_loss for name in configs])
            timer.tick()
    detach(backbone)
    return Trained(timer.steps_s, losses, dict(calls), getattr(executor.runner, "num_captures", None))


def train_mux_with_graphs(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """The same, with passes replayed as CUDA graphs."""
    return train_mux(settings, backbone, workload, pass_tokens, cuda_graphs=True)


def started_tasks(settings: Settings, model: Any, workload: Any) -> Any:
    """Return the tasks of a workload as a run has them once they train: a constant rate, no decay, clipping at 1."""
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.engine.tasks.active_task import TaskTable
    from peft_mux.engine.tasks.optimizer import LastFiniteWeights, TaskOptimizer
    from peft_mux.engine.tasks.setup import make_active_task, resolve_tasks
    from peft_mux.task import TaskStatus

    args = MultiTaskTrainingArguments(
        output_dir="unused", use_cpu=settings.device.type == "cpu", report_to="none", lr_scheduler_type="constant"
    )
    table = TaskTable()
    # One step more than is taken, so that no task ends.
    for task in dataclasses.replace(workload, num_steps=workload.num_steps + 1).to_tasks():
        run = make_active_task(*resolve_tasks([task], args), args, None, model.backbone.config)
        slab = model.registry.slab_of(task.name)
        slab.bind_gradients()
        run.optimizer = TaskOptimizer(task.name, model.task_parameters(task.name), run.hyper, run.num_steps, args, slab)
        run.last_good = LastFiniteWeights({f"page_{number}": page.values for number, page in enumerate(slab.pages)})
        run.status = TaskStatus.RUNNING
        table.runs[run.name] = run
    return table


def task_batch(task: Any, step: int) -> Any:
    import numpy as np

    from peft_mux.data.task_batch import TaskBatch, TokenSequence

    rows = [
        TokenSequence(np.asarray(row["input_ids"], np.int64), np.asarray(row["labels"], np.int64), index)
        for index, row in enumerate(task.batches[step])
    ]
    return TaskBatch(task.name, step, task.seed, tuple(rows))


@contextlib.contextmanager
def counted_paths() -> Iterator[Counter[str]]:
    """Count how often the model computes a group of layers forward through kernels, and how often through slices."""
    from peft_mux.kernels.lora.group import KernelCall
    from peft_mux.modeling.adapters.lora import layer as layers

    calls: Counter[str] = Counter(kernels=0, slices=0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    places = [
        (KernelCall, "forward", "kernels"),
        (layers, "grouped_lora_slices", "slices"),
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in places:
            function = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, counting(name, function)))
        yield calls


def shares_of(rows: Any, pass_tokens: int) -> list[tuple[Any, float]]:
    """Return a batch in parts of at most so many padded tokens, each with its share of the batch's targets."""
    longest = max(len(row["input_ids"]) for row in rows)
    count = max(1, pass_tokens // longest)
    parts = [rows[start : start + count] for start in range(0, len(rows), count)]
    # The first label of a row is never a target.
    targets = [sum(label >= 0 for row in part for label in row["labels"][1:]) for part in parts]
    return [(part, count / sum(targets)) for part, count in zip(parts, targets, strict=True)]


def train_trl(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """TRL's `SFTTrainer` with its defaults, one task after the other: batches padded to their longest row.

    Its hooks stay in the backbone.
    """
    del pass_tokens
    from transformers import TrainerCallback

    from benchmarks.training.baselines.trl_packing import sft_trainer

    class Clock(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            self.timer = _StepTimer(settings.device)

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.timer.tick()

    defaults = {"lr_scheduler_type": "constant", "bf16": not settings.is_rehearsal}
    totals = [0.0] * workload.num_steps
    losses = []
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        with tempfile.TemporaryDirectory() as folder:
            use_cpu = settings.device.type == "cpu"
            trainer = sft_trainer(task, workload, backbone, folder, True, use_cpu=use_cpu, **defaults)
            clock = Clock()
            trainer.add_callback(clock)
            trainer.train()
        losses.append(trainer.losses)
        totals = [total + own for total, own in zip(totals, clock.timer.steps_s, strict=True)]
        trainer.accelerator.unwrap_model(trainer.model).unload()
        vars(backbone).pop("peft_config", None)
    return Trained(totals, [list(step) for step in zip(*losses, strict=True)])


def train_padded(settings: Settings, backbone: Any, workload: Any, pass_tokens: int) -> Trained:
    """All tasks in one padded batch with LoRA by `bmm`, however large it is."""
    del pass_tokens
    from benchmarks.training.baselines import padded_joint

    plain = {name: module for name, module in backbone.named_modules() if isinstance(module, torch.nn.Linear)}
    model = padded_joint.attach_batched_lora(backbone, workload)
    vars(model).pop("peft_config", None)
    wrapped = [item for item in model.named_modules() if isinstance(item[1], padded_joint.BatchedLoraLinear)]
    for _, module in wrapped:
        module.to(settings.device)
        module.scaling_N11 = module.scaling_N11.to(settings.device)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = _adamw(parameters, workload), []
    steps = [
        _padded([row for rows in batches for row in rows], settings.device)
        for batches in zip(*(task.batches for task in workload.tasks), strict=True)
    ]
    timer = _StepTimer(settings.device)
    for batch in steps:
        with settings.precision():
            losses_N = padded_joint.task_losses(model, batch, len(workload.tasks))
        losses_N.sum().backward()
        losses.append(losses_N.tolist())
        padded_joint.clip_per_task(parameters, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        timer.tick()
    for name, _ in wrapped:
        owner, _, child = name.rpartition(".")
        setattr(backbone.get_submodule(owner), child, plain[name])
    return Trained(timer.steps_s, losses)


TRAINERS: dict[str, Callable[[Settings, Any, Any, int], Trained]] = {
    "floor": train_floor,
    "hf": train_hf,
    "packed": train_packed,
    "mux": train_mux,
    "mux_graphs": train_mux_with_graphs,
    "padded": train_padded,
    "trl": train_trl,
}


def _padded(rows: Any, device: torch.device) -> dict[str, torch.Tensor]:
    from benchmarks.training.baselines.hf_trainer import PadToLongest

    return {name: tensor.to(device) for name, tensor in PadToLongest()(list(rows)).items()}


def _adamw(parameters: list[Any], workload: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=workload.learning_rate, weight_decay=0.0, fused=True)


class _StepTimer:
    """Seconds of steps, each with all of its work on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.steps_s = device, []
        self._wait()
        self._last_s = time.perf_counter()

    def tick(self) -> None:
        """End a step, once its work on the device is done."""
        self._wait()
        now_s = time.perf_counter()
        self.steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
