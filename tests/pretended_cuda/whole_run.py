"""`MultiTaskTrainer.train()` on the pretended device: rows of unequal length, evaluations, saves and an arrival."""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import safetensors.torch
import torch
from peft import LoraConfig
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from transformers import TrainerCallback

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.kernels import availability
from peft_mux.modeling import model as modeling
from peft_mux.modeling.adapters import files
from peft_mux.modeling.adapters.lora.lora_pass import LoraGroups
from peft_mux.modeling.backbone import probe
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.cuda_graphs import CapturedPasses
from tests.pretended_cuda import backbones
from tests.pretended_cuda.allocator import allocated_bytes, reserved_bytes
from tests.pretended_cuda.checks import VARLEN
from tests.pretended_cuda.device import PretendedCuda
from tests.pretended_cuda.steps import DTYPES, Graph, forget_the_last_card

_PHASES = {
    "checkpoint/": "saves",
    "trainer/evaluation.py": "evaluations",
    "trainer/membership.py": "arrivals",
    "trainer/opening.py": "opening",
    "engine/tasks/active_task.py": "updates",
    "engine/executor.py": "passes",
}
"""The first of these files on the way to an operator decides to which phase it belongs; backward passes have a thread
of their own, where none of them is, and are "else"."""


class _Arrival(TrainerCallback):
    """Registers a task after the third step."""

    def __init__(self, trainer: MultiTaskTrainer, task: Task) -> None:
        self._trainer, self._task = trainer, task

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self._trainer.register_tasks([self._task])


def run(
    tasks: int,
    rows: int,
    mean: int,
    steps: int,
    *,
    backbone: str = "llama",
    dtype: str = "bf16",
    memory_bytes: int = 85 * 10**9,
    cuda_graphs: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train tasks with lognormal lengths, the last of which arrives after the third step.

    Args:
        tasks: number of tasks.
        rows: rows of each task in a step.
        mean: mean length of a row in tokens.
        steps: optimizer steps of each task.
        backbone: name in `backbones.ARCHITECTURES` or `backbones.REAL_WIDTHS`.
        dtype: of the backbone's weights; passes run under bf16 autocast.
        memory_bytes: memory of the card.
        cuda_graphs: whether passes are captured.
        arguments: further fields of `MultiTaskTrainingArguments`.

    Returns:
        `probes` of packing: on which device and in which precision each ran, and how often it called attention
        and shrink; `steps` by task; `waits` and `blocking_copies` by phase and place; `launches` by kernel; of training
        passes the `micro_batches`, the `sets` of tasks that these held, the `misses`, in how many of them tables were
        made, and the `captures`; `memory`: the bytes at most that the plan predicts, that were allocated, and that
        torch's allocator would have reserved for them, and those that the plan may fill; `said`, the warnings.
    """
    forget_the_last_card()
    device = PretendedCuda(memory_bytes=memory_bytes)
    device.num_places = 30
    passes_with_tables: set[int] = set()
    in_step = False
    micro_batches: list[tuple[str, ...]] = []
    probes: list[tuple[str, str, int, int]] = []

    def called() -> tuple[int, int]:
        launched = device.launches.counts
        return device.attention[VARLEN] + launched["attention_forward_kernel"], launched["shrink_kernel"]

    make_tables, run_step, check_packing = LoraGroups.make_tables, Executor.run, modeling.check_packing

    def noted(groups: LoraGroups, *args: Any) -> Any:
        if in_step:
            passes_with_tables.add(trainer.model.stream.num_passes)
        return make_tables(groups, *args)

    def stepped(executor: Executor, work: StepWork, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_step
        micro_batches.extend(one.task_names for one in work.micro_batches)
        in_step = True
        result = run_step(executor, work, *args, **kwargs)
        in_step = False
        return result

    def probed(model: MultiTaskPeftModel) -> None:
        before = called()
        check_packing(model)
        after = called()
        probes.append((model.device.type, str(probe.path_of(model).dtype), after[0] - before[0], after[1] - before[1]))

    with ExitStack() as stack:
        said = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        args = MultiTaskTrainingArguments(
            output_dir=stack.enter_context(tempfile.TemporaryDirectory()),
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
            max_steps=steps,
            eval_strategy="steps",
            eval_steps=2,
            save_steps=2,
            report_to=[],
            **arguments,
        )
        args.cuda_graphs = cuda_graphs  # refused with `use_cpu`, which keeps accelerate from looking for a real card
        stack.enter_context(device.present())
        availability.runs_kernels(torch.device("cuda"))  # its trial kernel writes 1.0
        device.forget()
        device.number = 0.0  # also of all differences between packed and single rows, and with and without Liger
        for target, name, value in [
            *_with_numbers(device),
            (modeling, "check_packing", probed),
            (LoraGroups, "make_tables", noted),
            (Executor, "run", stepped),
        ]:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(mock.patch.object(MultiTaskTrainingArguments, "device", torch.device("cuda")))
        *first, last = [_task(number, rows, mean) for number in range(tasks)]
        trainer = MultiTaskTrainer(model=backbones.make(backbone, DTYPES[dtype], "cpu"), tasks=first, args=args)
        trainer.add_callback(_Arrival(trainer, last))
        plan = trainer.plan()
        trainer.train()
        runner = trainer._placement.executor.runner
    return {
        "probes": probes,
        "steps": {task.name: task.step for task in trainer.table},
        "waits": _by_phase(device.waits),
        "blocking_copies": _by_phase(device.blocking_copies),
        "launches": dict(device.launches.counts),
        "micro_batches": len(micro_batches),
        "sets": len(set(micro_batches)),
        "misses": len(passes_with_tables),
        "captures": getattr(runner, "num_captures", 0),
        "memory": {
            "predicted": plan.memory.peak_bytes,
            "limit": plan.limit_bytes,
            "allocated": allocated_bytes(device.memory),
            "reserved": reserved_bytes(device.memory, memory_bytes),
        },
        "said": list(dict.fromkeys(str(one.message) for one in said)),
    }


def _by_phase(counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for place, count in counts.items():
        phase = next((phase for file, phase in _PHASES.items() if file in place), "else")
        found[phase][" < ".join(place.split(" < ")[:5])] += count
    return {phase: dict(counted) for phase, counted in found.items()}


def _task(number: int, rows: int, mean: int) -> Task:
    rng = np.random.default_rng(number)
    lengths = np.clip(rng.lognormal(np.log(mean) - 0.7**2 / 2, 0.7, 64), 16, 512).astype(int)
    dataset = [{"input_ids": rng.integers(1, backbones.VOCABULARY, length).tolist()} for length in lengths]
    return Task(
        name=f"t{number}",
        peft_config=LoraConfig(r=8, target_modules="all-linear"),
        train_dataset=dataset,
        eval_dataset=dataset[:4],
        train_batch_size=rows,
        seed=number,
    )


def _with_numbers(device: PretendedCuda) -> list[tuple[Any, str, Any]]:
    """Return what lets a run save fake tensors and read them with numpy, as ones."""

    def ones(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.device.type == "cpu", "files and numpy read memory of the host"
        with unset_fake_temporarily():
            return torch.ones(tuple(tensor.shape), dtype=tensor.dtype)

    def save_file(tensors: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any) -> None:
        real = {name: ones(tensor) for name, tensor in tensors.items()}
        with unset_fake_temporarily():
            plain_save_file(real, *args, **kwargs)

    plain_save_file = safetensors.torch.save_file
    return [
        (FakeTensor, "numpy", lambda tensor: ones(tensor).numpy()),
        (safetensors.torch, "save_file", save_file),
        (files, "save_file", save_file),
        (MultiTaskPeftModel, "_apply", _moved(MultiTaskPeftModel._apply)),
        (CapturedPasses, "_graph_in_pool", lambda passes: Graph(device)),
    ]


def _moved(original: Any) -> Any:
    """Return `_apply` that lets moved parameters be those of their tasks: moving a fake one makes another object."""

    def apply(model: MultiTaskPeftModel, *args: Any, **kwargs: Any) -> Any:
        result = original(model, *args, **kwargs)
        parameters = dict(model.named_parameters())
        for name, adapter in model.adapters.items():
            own = {key.replace(f".{adapter}", ""): value for key, value in parameters.items() if f".{adapter}." in key}
            moved_own = {key: own[key] for key in model.task_parameters(name)}
            model.registry.adopt(name, moved_own, model.device)
        return result

    return apply
