"""Who trains in `benchmarks.gpu.train`: the floor, PEFT task by task, peft_mux, and the padded joint batch.

Each gets a backbone and leaves it as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

from benchmarks.gpu.settings import Settings


class Trained(NamedTuple):
    """What a trainer has measured.

    Attributes:
        steps_s: seconds of each step of all tasks.
        losses: for each step, the loss of each task; for the floor, of the first step alone.
        calls: how often peft_mux computed a group of layers through "kernels" and through "slices"; `None` for others.
    """

    steps_s: list[float]
    losses: list[list[float]]
    calls: dict[str, int] | None = None


def train_floor(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """The packed tokens through the frozen backbone, forward and input gradients; attention in one call on a GPU."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from benchmarks.training.baselines import floor
    from peft_mux.kernels.cross_entropy.linear import Head, linear_cross_entropy

    AttentionInterface.register("benchmark_gpu_floor", _floor_attention)
    AttentionMaskInterface.register("benchmark_gpu_floor", lambda *args, **kwargs: None)
    before = backbone.config._attn_implementation
    backbone.set_attn_implementation("benchmark_gpu_floor")
    packed = [[_moved(part, settings) for part in floor.pack(workload.tasks, s, 16384)]
              for s in range(workload.num_steps)]  # fmt: skip
    losses = torch.zeros(len(workload.tasks), device=settings.device)
    timer = _StepTimer(settings.device)
    for step in range(workload.num_steps):
        for part, bounds in packed[step]:
            embeddings = backbone.get_input_embeddings()(part.input_ids).requires_grad_()
            hidden = backbone.model(
                inputs_embeds=embeddings,
                position_ids=part.position_ids,
                use_cache=False,
                floor_rectangles=part.rectangles,
                floor_bounds=bounds,
            ).last_hidden_state[0]
            head = Head(backbone.lm_head.weight)
            terms = linear_cross_entropy(hidden.index_select(0, part.target_rows), head, part.targets) * part.weights
            terms.sum().backward()
            if step == 0:
                losses.index_add_(0, part.task_of_target, terms.detach().float())
        timer.tick()
    backbone.set_attn_implementation(before)
    return Trained(timer.steps_s, [losses.tolist()])


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


def train_mux(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """The model and executor of the package, with one AdamW a task over its slab."""
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.engine.executor import Executor
    from peft_mux.engine.work import StepWork
    from peft_mux.modeling.adapters.attach import detach
    from peft_mux.modeling.model import MultiTaskPeftModel

    configs = {task.name: task.lora_config() for task in workload.tasks}
    seeds = {task.name: task.seed for task in workload.tasks}
    model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False)
    model.train()
    update = _updates(model, workload)
    executor, collator, losses = Executor(model, bf16=not settings.is_dry), ChunkPackingCollator(), []
    with counted_paths() as calls, interpreted(settings):
        timer = _StepTimer(settings.device)
        for step in range(workload.num_steps):
            batches = [_batch(task, step) for task in workload.tasks]
            streams = tuple(collator.micro_batches(batches, max_tokens=16384))
            work = StepWork(tuple(configs), streams, {item.task: item.num_tokens for item in batches})
            result = executor.run(work)
            losses.append(torch.stack([result.losses[name] for name in configs]).tolist())
            update()
            timer.tick()
    detach(backbone)
    return Trained(timer.steps_s, losses, dict(calls))


def _batch(task: Any, step: int) -> Any:
    import numpy as np

    from peft_mux.data.batch import TaskBatch, TokenSequence

    rows = [
        TokenSequence(np.asarray(row["input_ids"], np.int64), np.asarray(row["labels"], np.int64), index)
        for index, row in enumerate(task.batches[step])
    ]
    return TaskBatch(task.name, step, task.seed, tuple(rows))


def _updates(model: Any, workload: Any) -> Callable[[], None]:
    """Return what clips, updates and clears each task's slab."""
    pages_of = {}
    for task in workload.tasks:
        slab = model.task_slab(task.name)
        slab.bind_gradients()
        pages_of[task.name] = [page.values for page in slab.pages]
    optimizers = {name: _adamw(pages, workload) for name, pages in pages_of.items()}

    def update() -> None:
        for name, optimizer in optimizers.items():
            torch.nn.utils.clip_grad_norm_(pages_of[name], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return update


@contextlib.contextmanager
def counted_paths() -> Iterator[Counter[str]]:
    """Count how often the model computes a group of layers forward through kernels, and how often through slices."""
    from peft_mux.kernels.lora.group import LoraGroup
    from peft_mux.modeling.adapters.lora import layer as layers
    from peft_mux.modeling.adapters.lora import lora_pass

    calls: Counter[str] = Counter(kernels=0, slices=0)

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counted

    places = [
        (LoraGroup, "forward", "kernels"),
        (layers, "grouped_lora_slices", "slices"),
        (lora_pass, "slices_forward", "slices"),  # in compiled graphs
    ]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in places:
            function = getattr(owner, attribute)
            stack.enter_context(mock.patch.object(owner, attribute, counting(name, function)))
        yield calls


@contextlib.contextmanager
def interpreted(settings: Settings) -> Iterator[None]:
    """Let the model take the kernels on a CPU too where Triton's interpreter runs them; on a GPU it does by itself."""
    from peft_mux.modeling.adapters.lora import lora_pass

    if settings.device.type == "cuda" or not settings.has_kernels:
        yield
        return
    with mock.patch.object(lora_pass, "runs_kernels", return_value=True):
        yield


def train_hf(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """PEFT, one task after the other, batches padded to their longest row."""
    from peft import get_peft_model

    totals = [0.0] * workload.num_steps
    losses: list[list[float]] = [[] for _ in totals]
    for task in workload.tasks:
        torch.manual_seed(task.seed)
        model = get_peft_model(backbone, task.lora_config())
        model.train()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = _adamw(parameters, workload)
        timer = _StepTimer(settings.device)
        for step, rows in enumerate(task.batches):
            batch = _padded(rows, settings.device)
            with settings.precision():
                loss = model(**batch).loss
            loss.backward()
            losses[step].append(loss.detach().item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            timer.tick()
        totals = [total + own for total, own in zip(totals, timer.steps_s, strict=True)]
        backbone = model.unload()
        vars(backbone).pop("peft_config", None)
    return Trained(totals, losses)


def train_padded(settings: Settings, backbone: Any, workload: Any) -> Trained:
    """All tasks in one padded batch with LoRA by `bmm`."""
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
    timer = _StepTimer(settings.device)
    for batches in zip(*(task.batches for task in workload.tasks), strict=True):
        batch = _padded([row for rows in batches for row in rows], settings.device)
        with settings.precision():
            losses_N = padded_joint.task_losses(model, batch, len(batches))
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


TRAINERS: dict[str, Callable[[Settings, Any, Any], Trained]] = {
    "floor": train_floor,
    "hf": train_hf,
    "mux": train_mux,
    "padded": train_padded,
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
