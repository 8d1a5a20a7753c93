"""What the invariant tests share: a tiny random backbone, random tasks, runs that are recorded, and a judge.

The judge is plain PEFT: `get_peft_model` on a copy of the backbone and an ordinary loop. It shares no code
with the product but the rows of each global batch, and computes one sequence at a time.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, get_scheduler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer

VOCABULARY = 97


def fill(model: torch.nn.Module, seed: int) -> None:
    """Draw all weights again with NumPy, so that no library's own initialisation takes part."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = torch.from_numpy(rng.normal(0.0, 0.1, tuple(weight.shape)).astype(np.float32))
            weight.copy_(1.0 + 0.1 * draws if "norm" in name or "ln_" in name else draws)


@cache
def _llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config)
    fill(model, 0)
    return model


def tiny_llama() -> LlamaForCausalLM:
    """Return a fresh copy of the backbone: hidden 32, 2 layers, vocabulary 97, fp32."""
    return copy.deepcopy(_llama())


def rows(seed: int, count: int, low: int, high: int) -> list[dict[str, list[int]]]:
    """Return rows of random tokens, of lengths in [low, high]."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(low, high + 1, size=count)
    return [{"input_ids": rng.integers(1, VOCABULARY, size=length).tolist()} for length in lengths]


def small_task(name: str, *, data_seed: int, rank: int = 4, length: int = 12, **settings: Any) -> Task:
    """Return a task whose rows all have one length, so that its shapes do not depend on its content."""
    targets = settings.pop("target_modules", "all-linear")
    dropout = settings.pop("lora_dropout", 0.0)
    options: dict[str, Any] = {
        "train_batch_size": 4,
        "learning_rate": 3e-3,
        "max_steps": 8,
        "seed": 1,
        **settings,
    }
    config = LoraConfig(r=rank, target_modules=targets, lora_dropout=dropout)
    return Task(name=name, peft_config=config, train_dataset=rows(data_seed, 10, length, length), **options)


@dataclass
class Recorder(TrainerCallback):
    """Records every task at every step, and acts at the given steps.

    Attributes:
        losses: of each task, by its own steps; exact.
        before: weights of each task at the beginning of each of its steps.
        digests: of weights and optimizer state of each task after each of its steps.
        at_begin: what to do before a run step, counted from 0.
        at_end: what to do after a run step, counted from 1.
        keep_weights: whether to fill `before` and `digests`.
        watched: tasks for which to fill them; by default all.
    """

    at_begin: Mapping[int, Callable[[MultiTaskTrainer], None]] = field(default_factory=dict)
    at_end: Mapping[int, Callable[[MultiTaskTrainer], None]] = field(default_factory=dict)
    keep_weights: bool = True
    watched: Sequence[str] | None = None
    losses: dict[str, list[float]] = field(default_factory=dict)
    before: dict[str, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    digests: dict[str, list[str]] = field(default_factory=dict)
    trainer: MultiTaskTrainer | None = None
    _running: list[str] = field(default_factory=list)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act, and keep the weights that the step begins with."""
        assert self.trainer is not None
        self._running = [run.name for run in self.trainer.table.running]
        for name in self._running:
            if self._watches(name):
                self.before.setdefault(name, []).append(weights(self.trainer, name))
        if state.global_step in self.at_begin:
            self.at_begin[state.global_step](self.trainer)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep losses and digests, and act."""
        assert self.trainer is not None
        for name in self._running:
            self.losses.setdefault(name, []).append(self.trainer.table[name].last_loss)
            if self._watches(name):
                self.digests.setdefault(name, []).append(digest(task_tensors(self.trainer, name)))
        if state.global_step in self.at_end:
            self.at_end[state.global_step](self.trainer)

    def _watches(self, name: str) -> bool:
        return self.keep_weights and (self.watched is None or name in self.watched)


@dataclass
class Run:
    """A finished run: the trainer, and what its recorder saw."""

    trainer: MultiTaskTrainer
    recorder: Recorder

    @property
    def losses(self) -> dict[str, list[float]]:
        """Losses of each task by its own steps."""
        return self.recorder.losses

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Return a task's final weights."""
        return weights(self.trainer, name)


def train(
    tasks: Sequence[Task],
    folder: Path,
    *,
    model: Any = None,
    recorder: Recorder | None = None,
    resume: bool = False,
    **arguments: Any,
) -> Run:
    """Train tasks on a fresh copy of the backbone and record it."""
    recorder = recorder or Recorder()
    trainer = make_trainer(tasks, folder, model=model, recorder=recorder, **arguments)
    trainer.train(resume_from_checkpoint=resume or None)
    return Run(trainer, recorder)


def make_trainer(
    tasks: Sequence[Task],
    folder: Path,
    *,
    model: Any = None,
    recorder: Recorder | None = None,
    **arguments: Any,
) -> MultiTaskTrainer:
    """Return a quiet trainer on the CPU that writes no checkpoints unless requested."""
    options = {
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        **arguments,
    }
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    callbacks = [] if recorder is None else [recorder]
    trainer = MultiTaskTrainer(model if model is not None else tiny_llama(), args, list(tasks), callbacks=callbacks)
    if recorder is not None:
        recorder.trainer = trainer
    return trainer


def weights(trainer: MultiTaskTrainer, name: str) -> dict[str, torch.Tensor]:
    """Return a copy of a task's weights."""
    return {key: value.detach().clone() for key, value in trainer.model.task_parameters(name).items()}


def moments(trainer: MultiTaskTrainer, name: str) -> dict[str, torch.Tensor]:
    """Return a copy of the tensors of a task's optimizer state; nothing once it has ended."""
    optimizer = trainer.table[name].optimizer
    if optimizer is None:
        return {}
    states = optimizer.optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value.detach().clone()
        for index, state in states.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


def task_tensors(trainer: MultiTaskTrainer, name: str) -> dict[str, torch.Tensor]:
    """Return a task's weights and optimizer state."""
    return {
        **weights(trainer, name),
        **{f"optimizer.{key}": value for key, value in moments(trainer, name).items()},
    }


def digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, shapes, types and bytes."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        sha.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def backbone_tensors(backbone: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of the backbone under their own names, with or without adapters injected."""
    state = backbone.state_dict()
    return {key.replace(".base_layer", ""): value for key, value in state.items() if "lora_" not in key}


# ------------------------------------------------------------------ comparing


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference, relative to `b`."""
    return float((a - b).norm() / b.norm().clamp_min(1e-12))


def assert_close(losses: Sequence[float], wanted: Sequence[float], tolerance: float, what: str) -> None:
    """Assert that two trajectories agree at every step, relative to the second."""
    assert len(losses) == len(wanted) > 0, f"{what}: {len(losses)} steps instead of {len(wanted)}"
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)]
    assert all(error <= tolerance for error in errors), f"{what}: worst relative error {max(errors)} of {tolerance}"


def assert_same(first: Run, second: Run, name: str, tolerance: float) -> None:
    """Assert that a task has the same results in two runs."""
    assert_close(first.losses[name], second.losses[name], tolerance, name)
    theirs = second.weights(name)
    for key, weight in first.weights(name).items():
        assert relative(weight, theirs[key]) <= tolerance, f"{name} {key}: {relative(weight, theirs[key])}"


def assert_bit_identical(first: Run, second: Run, name: str, *, steps: int | None = None) -> None:
    """Assert equal losses, weights and optimizer states at each of the first `steps` steps (default all)."""
    mine, theirs = (run.recorder for run in (first, second))
    assert mine.digests.get(name), f"{name} has taken no step"
    assert mine.losses[name][:steps] == theirs.losses[name][:steps], f"losses of {name} differ"
    differing = [
        step
        for step, (a, b) in enumerate(zip(mine.digests[name][:steps], theirs.digests[name][:steps], strict=True))
        if a != b
    ]
    assert not differing, f"weights or optimizer state of {name} differ at steps {differing}"


# ---------------------------------------------------------------------- judge


@dataclass(frozen=True)
class Verdict:
    """Plain PEFT's result for one task.

    Attributes:
        losses: by step.
        weights: final, by PEFT name without the adapter's.
    """

    losses: list[float]
    weights: dict[str, torch.Tensor]


def judge(
    trainer: MultiTaskTrainer,
    task: Task,
    sequence_losses: Callable[..., Iterator[torch.Tensor]] | None = None,
    optimizer_of: Callable[[Any, Any], torch.optim.Optimizer] | None = None,
) -> Verdict:
    """Train one task alone with plain PEFT and an ordinary loop, on the same rows.

    Args:
        trainer: the trainer, which has the rows of each global batch.
        task: one of its tasks.
        sequence_losses: gives the parts of the loss of a global batch by a model; by default their mean.
        optimizer_of: makes the optimizer for a model and the hyper-parameters of the task; by default AdamW.
    """
    run = trainer.table[task.name]
    hyper = run.hyper
    torch.manual_seed(hyper.seed)
    model = get_peft_model(tiny_llama(), copy.deepcopy(task.peft_config))
    model.train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer_of is not None:
        optimizer = optimizer_of(model, hyper)
    else:
        optimizer = torch.optim.AdamW(
            parameters, lr=hyper.learning_rate, eps=hyper.adam_epsilon, weight_decay=hyper.weight_decay
        )
    schedule = get_scheduler(hyper.lr_scheduler_type, optimizer, int(hyper.warmup_steps), run.num_steps)
    losses = []
    for step in range(run.num_steps):
        parts = (sequence_losses or _sequence_losses)(model, run.loader.batch(step))
        loss = torch.stack(list(parts)).sum()
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, hyper.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    named = {key.replace(".default", ""): value for key, value in model.named_parameters() if value.requires_grad}
    return Verdict(losses, {key: value.detach() for key, value in named.items()})


def _sequence_losses(model: Any, batch: Any) -> Iterator[torch.Tensor]:
    for row in batch.sequences:
        for start, end in row.sequence_bounds:
            ids, labels = torch.tensor(row.input_ids[start:end]), torch.tensor(row.labels[start:end])
            logits = model(input_ids=ids[None]).logits[0]
            yield F.cross_entropy(logits[:-1], labels[1:], reduction="sum") / batch.num_targets


def assert_as_judged(run: Run, verdicts: Mapping[str, Verdict]) -> None:
    """Assert that every task has plain PEFT's results: losses within 1e-5, final weights within 1e-4."""
    for name, verdict in verdicts.items():
        assert_close(run.losses[name], verdict.losses, 1e-5, name)
        final = run.weights(name)
        assert final.keys() == verdict.weights.keys()
        for key, weight in verdict.weights.items():
            assert relative(final[key], weight) <= 1e-4, f"{name} {key}: {relative(final[key], weight)}"
