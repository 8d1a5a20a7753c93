"""Tasks of Adapter Tuning and Diff Pruning, a judge of each, and what a process of a layout does with them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig

from peft_mux import BottleneckConfig, DiffPruningConfig, Task
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.diff_pruning import DiffPruningLinear, Noise
from tests.engine.processes.cases import Part
from tests.engine.replicas.layout_cases import train
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.alone import Side, alone

CONFIGS: dict[str, PeftConfig] = {
    "houlsby": BottleneckConfig(bottleneck_size=6),
    "narrow": BottleneckConfig(
        bottleneck_size=3, non_linearity="relu", down_bias=False, target_modules=["down_proj", "v_proj"]
    ),
    "diff": DiffPruningConfig(target_modules=["q_proj", "down_proj"], alpha_init=1.0, l0_weight=1e-4),
    "rows": DiffPruningConfig(target_modules=["v_proj"], structured=True, alpha_init=2.0, l0_weight=1e-3),
    "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
}


def tasks_of(*names: str, max_steps: int = 4, **settings: Any) -> list[Task]:
    """Return tasks by the names of their configurations, of unequal rows."""
    tasks = []
    for number, name in enumerate(names or CONFIGS):
        task = lab.small_task(name, data_seed=20 + number, length=6 + 2 * number, max_steps=max_steps, **settings)
        tasks.append(replace(task, peft_config=copy.deepcopy(CONFIGS[name]), seed=3 + number))
    return tasks


def judge(trainer: Any, task: Task) -> Side:
    """Train one task alone with plain PEFT, on the same rows.

    Gates are drawn as the task's are, by its seed, its steps and the names of its layers; the penalty is added once a
    step.
    """

    def losses_of(model: Any, batch: Any) -> Iterator[torch.Tensor]:
        _draw_as_of(model, trainer.table[task.name].hyper.seed, batch.step)
        yield from lab._sequence_losses(model, batch)
        if isinstance(task.peft_config, DiffPruningConfig):
            yield model.base_model.l0_penalty()

    return alone(trainer, task, lab.tiny_llama, losses_of)


def _draw_as_of(model: Any, seed: int, step: int) -> None:
    for name, layer in model.base_model.model.named_modules():
        if isinstance(layer, DiffPruningLinear):
            height, width = layer.shape
            draws = [
                philox.uniform(philox.draw_seed(seed, step, key), *shape, torch.device("cpu")).logit().half()
                for key, shape in ((name, (height, width)), (f"{name}.rows", (1, height)))
            ]
            layer.draw = lambda adapter, own=draws: Noise(own[0], own[1][0])  # type: ignore[method-assign]


def train_some(rank: int, folder: Path, names: tuple[str, ...], arguments: dict[str, Any]) -> Part:
    """Train some of the tasks in one process of a layout."""
    return train(folder, lab.tiny_llama(), tasks_of(*names), **arguments)
