"""A backbone on its way to the pretended device: where and by what packing is proven before the first step."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any
from unittest import mock

import torch

from peft_mux import MultiTaskTrainingArguments, Task
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.parallelize import ModelPart
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.kernels.availability import runs_kernels
from peft_mux.modeling.backbone import probe
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.pretended_cuda import backbones
from tests.pretended_cuda.device import PretendedCuda
from tests.pretended_cuda.steps import DTYPES, forget_the_last_card


def load(architecture: str, *, dtype: str, bf16: bool, is_held_by_user: bool = False) -> dict[str, Any]:
    """Load a backbone that was given as an object on the CPU, as a run on the device does.

    Args:
        architecture: name in `backbones.ARCHITECTURES`.
        dtype: of the backbone's weights.
        bf16: whether passes run under bf16 autocast.
        is_held_by_user: whether the object is a `MultiTaskPeftModel`, which was probed when it was built.

    Returns:
        Where the model was when each probe ran and in which precision, the attention operators and the launches of
        the probes, the device of the model afterwards, and the warnings.
    """
    forget_the_last_card()
    device, probes = PretendedCuda(), []
    original = probe.check_packing

    def noted(model: Any) -> None:
        probes.append([model.device.type, str(probe.path_of(model).dtype)])
        original(model)

    names = backbones.adapters(architecture)
    tasks = [Task(name=name, peft_config=names[name], train_dataset=[{"input_ids": [1, 2]}]) for name in names]
    with warnings.catch_warnings(record=True) as said, device.present():
        warnings.simplefilter("always")
        runs_kernels(torch.device("cuda"))
        device.number = 0.0  # of every difference that the probe reads
        moves = mock.patch.object(MultiTaskPeftModel, "_apply", moved(MultiTaskPeftModel._apply))
        with mock.patch("peft_mux.modeling.model.check_packing", noted), moves:
            backbone = backbones.make(architecture, DTYPES[dtype], device="cpu")
            given = MultiTaskPeftModel(backbone, names) if is_held_by_user else backbone  # type: ignore[arg-type]
            model = _trained_on_cuda(given, tasks, bf16=bf16)
    return {
        "probes": probes,
        "attention": dict(device.attention),
        "launches": dict(device.launches.counts),
        "device": model.device.type,
        "said": [str(warning.message) for warning in said],
    }


def moved(original: Any) -> Any:
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


def _trained_on_cuda(given: Any, tasks: list[Task], *, bf16: bool) -> MultiTaskPeftModel:
    with tempfile.TemporaryDirectory() as folder:
        options = {"use_cpu": True, "report_to": [], "bf16": bf16, "cuda_graphs": False}  # there is no pool for graphs
        args = MultiTaskTrainingArguments(output_dir=folder, **options)
    no_samples = mock.patch("peft_mux.engine.parallelize.weight_samples", return_value={})  # there are no numbers
    with mock.patch.object(MultiTaskTrainingArguments, "device", torch.device("cuda")), no_samples:
        source = BackboneSource(given, args, None, {})
        part = ModelPart(source, args, ParallelLayout.of(1), rank=0)
        resolved = resolve_tasks(tasks, args)
        loaded = part.parallelize(source.describe(resolved), resolved, None, Processes())
    return loaded.model
