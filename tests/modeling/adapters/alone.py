"""Runs of several tasks, and plain PEFT's run of each alone, for what tasks train in addition to plain LoRA."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import Trainer

from peft_mux import Task
from peft_mux.kernels import philox
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.passes import IDS, assert_same_tensors, snapshot
from tests.modeling.backbones import backbone_of, drawn


def tiny_gpt2() -> Any:
    """Return a GPT-2: biases everywhere, weights as [in, out], tied embeddings."""
    return drawn(backbone_of("gpt2", vocab_size=lab.VOCABULARY))


def tied_llama() -> Any:
    """Return the tiny Llama with the head tied to the embedding."""
    model = lab.tiny_llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    return model


def task(name: str, config: PeftConfig, number: int, **settings: Any) -> Task:
    """Return a task with weight decay and rows of its own."""
    options = {"weight_decay": 0.1, "max_steps": 4, "length": 7 + number % 3, **settings}
    made = lab.small_task(name, data_seed=20 + number, **options)
    return Task(**{**{field: getattr(made, field) for field in made.__dataclass_fields__}, "peft_config": config})


class PhiloxDropout(torch.nn.Module):
    """Drops what a task's draws drop, in place of plain PEFT's dropout, in a pass of one sequence."""

    def __init__(self, p: float, seed: int) -> None:
        super().__init__()
        self.p, self.seed = p, seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return philox.dropout(rows, torch.arange(len(rows)), self.p, self.seed).view_as(x)


@dataclass(frozen=True)
class Side(lab.Verdict):
    """Plain PEFT's result for a task alone, with the trained model."""

    model: Any


def alone(
    trainer: Any,
    one: Task,
    base: Callable[[], Any],
    losses_of: Callable[[Any, Any], Iterator[torch.Tensor]] | None = None,
) -> Side:
    """Train a task with plain PEFT and AdamW, decaying what Trainer decays.

    Args:
        trainer: the trainer, which has the rows of each global batch.
        one: one of its tasks.
        base: makes the backbone.
        losses_of: gives the parts of the loss of a global batch; by default those of its sequences.
    """
    backbone, models = base(), []

    def optimizer_of(model: Any, hyper: Any) -> torch.optim.Optimizer:
        models.append(model)
        decaying = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
        named = [(name in decaying, item) for name, item in model.named_parameters() if item.requires_grad]
        groups = [
            {"params": [item for decays, item in named if decays is does], "weight_decay": hyper.weight_decay * does}
            for does in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=hyper.learning_rate, eps=hyper.adam_epsilon)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab, "tiny_llama", lambda: backbone)
        verdict = lab.judge(trainer, one, losses_of, optimizer_of)
    return Side(verdict.losses, verdict.weights, models[0].eval())


def assert_resumes(
    make: Callable[[], Sequence[Task]],
    folder: Path,
    base: Callable[[], Any] = lab.tiny_llama,
    whole: lab.Run | None = None,
) -> None:
    """Assert that a run which was cut after two steps ends with the bits of one that was not, which may be given."""
    whole = whole or lab.train(make(), folder / "whole", model=base())
    stop = lab.Recorder(at_end={2: lambda trainer: setattr(trainer.control, "should_training_stop", True)})
    lab.train(make(), folder / "cut", model=base(), recorder=stop, save_strategy="steps", save_steps=2)
    rest = lab.train(make(), folder / "cut", model=base(), resume=True, save_strategy="steps", save_steps=100)
    for name, losses in whole.losses.items():
        assert rest.losses[name] == losses[2:], name
        assert_same_tensors(rest.weights(name), whole.weights(name), name)


@dataclass
class Together:
    """A finished run of several tasks, saved, and the backbone that it ran on."""

    run: lab.Run
    tasks: dict[str, Task]
    base: Callable[[], Any]
    folder: Path
    before: dict[str, torch.Tensor]

    def side(self, name: str) -> Side:
        """Return plain PEFT's run of a task alone."""
        return alone(self.run.trainer, self.tasks[name], self.base)

    def saved(self, name: str) -> dict[str, torch.Tensor]:
        """Return the saved tensors of a task."""
        return load_file(self.folder / name / "adapter_model.safetensors")

    def saved_alone(self, side: Side) -> dict[str, torch.Tensor]:
        """Return the tensors that plain PEFT saves of a task alone."""
        side.model.save_pretrained(self.folder.parent / "alone")
        return load_file(self.folder.parent / "alone" / "adapter_model.safetensors")

    def assert_as_alone(self, name: str, *, but: tuple[str, ...] = ()) -> Side:
        """Assert losses, weights and outputs of plain PEFT alone, and that the saved adapter gives these outputs.

        Args:
            name: name of the task.
            but: ends of names whose gradients are zero except for rounding, which Adam turns into steps of their own.
        """
        side = self.side(name)
        lab.assert_close(self.run.losses[name], side.losses, 1e-5, name)
        assert side.losses[0] != side.losses[-1], "it has learned something"
        ours = {key.replace(".own_bias", ".bias"): value for key, value in self.run.weights(name).items()}
        theirs = side.weights
        assert ours.keys() == theirs.keys()
        for key, weight in theirs.items():
            if not key.endswith(but or ("nothing",)):
                assert lab.relative(ours[key], weight) <= 1e-4, f"{name} {key}"
        model = self.run.trainer.model.eval()
        loaded = PeftModel.from_pretrained(self.base(), str(self.folder / name)).eval()
        with torch.no_grad():
            wanted = side.model(input_ids=IDS).logits
            for what, other in (("view", model.task_view(name)), ("loaded", loaded)):
                assert lab.relative(other(input_ids=IDS).logits, wanted) <= 1e-4, what
        return side

    def assert_backbone_unchanged(self) -> None:
        """Assert that no bit of the shared backbone has moved."""
        now = self.run.trainer.model.backbone.named_parameters()
        plain = {_plain(name): item for name, item in now}
        assert self.before.keys() <= plain.keys()
        assert all(torch.equal(plain[name], item) for name, item in self.before.items())


def _plain(name: str) -> str:
    return name.replace(".token_adapter", "").replace(".base_layer", "").replace(".original_module", "")


def together(
    configs: Mapping[str, PeftConfig],
    base: Callable[[], Any],
    folder: Path,
    *,
    late: Collection[str] = (),
    **settings: Any,
) -> Together:
    """Train tasks of these configurations side by side, those in `late` from the second step on, and save them."""
    tasks = {name: task(name, config, number, **settings) for number, (name, config) in enumerate(configs.items())}
    model = base()
    before = snapshot(dict(model.named_parameters()))
    arriving = [tasks[name] for name in late]
    recorder = lab.Recorder(at_end={1: lambda trainer: trainer.register_tasks(arriving)} if arriving else {})
    first = [one for name, one in tasks.items() if name not in late]
    run = lab.train(first, folder / "run", model=model, recorder=recorder)
    run.trainer.model.save_pretrained(folder / "saved")
    return Together(run, tasks, base, folder / "saved", before)
