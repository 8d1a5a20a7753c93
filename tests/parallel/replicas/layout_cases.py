"""Runs of a whole trainer over any layout of real processes, for the tests of layouts: what each process does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peft_mux import Task
from tests.engine.processes import cases
from tests.engine.processes.cases import Part
from tests.invariants import mux_lab as lab

LAYERS, WIDTH = 4, 32


class Watcher(lab.Recorder):
    """Keeps losses and norms of every step."""

    def __init__(self, at_begin: Any = None, at_end: Any = None) -> None:
        """Act at given steps."""
        super().__init__(at_begin=at_begin or {}, at_end=at_end or {}, keep_weights=False)
        self.norms: dict[str, list[float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the norms too."""
        assert self.trainer is not None
        for name in self._running:
            self.norms.setdefault(name, []).append(self.trainer.table[name].last_gradient_norm)
        super().on_step_end(args, state, control, **kwargs)


def backbone(kind: str) -> Any:
    """Return a small model of random weights; the same at every call."""
    torch.manual_seed(7)
    shape = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    known = {"vocab_size": lab.VOCABULARY, "pad_token_id": None, "num_key_value_heads": 4}
    config = CONFIG_MAPPING[kind](max_position_embeddings=64, **known, **shape)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def saved_backbone(kind: str, folder: Path) -> str:
    """Return a folder with the model."""
    backbone(kind).save_pretrained(folder)
    return str(folder)


def tasks_of(kind: str, **changed: Any) -> list[Task]:
    """Return five unequal tasks, whose modules backbones of this kind have."""
    return cases.five_tasks(**changed)


def train(
    folder: Path,
    model: Any,
    tasks: Sequence[Task],
    *,
    watcher: Watcher | None = None,
    resume: bool = False,
    **arguments: Any,
) -> Part:
    """Train, and return what it showed."""
    options = {
        "max_tokens_per_micro_batch": 64,
        "ddp_timeout": cases.TIMEOUT_S,
        "save_strategy": "steps",
        "save_steps": 100,
        **arguments,
    }
    watcher = watcher or Watcher()
    trainer = lab.make_trainer(tasks, folder, model=model, recorder=watcher, **options)
    trainer.train(resume_from_checkpoint=resume or None)
    trainer._run.processes.wait_for_all()
    names = [run.name for run in trainer.table]
    adapters = {name: load_file(folder / name / "adapter_model.safetensors") for name in names}
    return Part(
        losses=watcher.losses,
        norms=watcher.norms,
        statuses={run.name: (run.status.value, run.reason) for run in trainer.table},
        step=trainer.state.global_step,
        weights={name: {key: value.numpy() for key, value in own.items()} for name, own in adapters.items()},
        held={name: sum(p.numel() for p in trainer.model.task_parameters(name).values()) for name in names},
        frozen=sum(p.numel() for p in trainer.model.backbone.parameters() if not p.requires_grad),
        report=trainer.report(),
        pass_reports=trainer.pass_reports,
    )


def train_five(rank: int, folder: Path, model: Any, kind: str, arguments: dict[str, Any]) -> Part:
    """Train the five tasks on a folder's model, or on one of a kind that is given as an object."""
    return train(folder, model or backbone(kind), tasks_of(kind), **arguments)


def train_even(
    rank: int, folder: Path, model: Any, num_rows: int, lengths: Sequence[int], arguments: dict[str, Any]
) -> Part:
    """Train tasks whose rows all have one length, and whose batches are all full."""
    tasks = [
        lab.small_task(f"t{index}", data_seed=index, length=length, train_batch_size=num_rows, max_steps=3)
        for index, length in enumerate(lengths)
    ]
    return train(folder, model or backbone("llama"), tasks, **arguments)


def unlike_tasks() -> list[Task]:
    """Return tasks of many short rows, and one of a long row a step."""
    short = {"train_batch_size": 10, "max_steps": 4}
    return [
        lab.small_task("chat", data_seed=1, length=8, **short),
        lab.small_task("sums", data_seed=2, length=12, **short),
        lab.small_task("books", data_seed=3, length=56, train_batch_size=1, max_steps=4),
    ]


def train_unlike(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train short rows and long ones."""
    return train(folder, model, unlike_tasks(), **arguments)


def late_task() -> Task:
    """Return a task that comes while others train.

    Some of its gradients are so near to zero that AdamW's first steps would turn their rounding into whole steps: one
    process with other micro-batches ends 2e-4 away too. With this epsilon it does not.
    """
    return lab.small_task("late", data_seed=9, rank=4, length=11, max_steps=4, adam_epsilon=1e-6)


def comings_and_goings() -> dict[int, Callable[[Any], None]]:
    """Return what happens at the end of which run step, one arrival of which has no adapter in some stages."""

    def arrive(trainer: Any) -> None:
        first = lab.small_task(
            "first", data_seed=8, rank=4, length=7, max_steps=4, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        first.peft_config.layers_to_transform = [0]
        trainer.register_tasks([late_task(), first])
        trainer.pause_task("narrow")

    return {
        2: arrive,
        4: lambda trainer: trainer.remove_task("large"),
        5: lambda trainer: trainer.resume_task("narrow"),
    }


def train_with_comings_and_goings(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train the five tasks while others come and go."""
    return train(folder, model, tasks_of("llama"), watcher=Watcher(at_end=comings_and_goings()), **arguments)


def train_and_stop(rank: int, folder: Path, model: str, arguments: dict[str, Any], step: int) -> Part:
    """Train the five tasks up to a step, and save."""

    def stop(trainer: Any) -> None:
        trainer.control.should_training_stop = True

    return train(folder, model, tasks_of("llama"), watcher=Watcher(at_end={step: stop}), **arguments)


def go_on(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Resume the run of a folder."""
    return train(folder, model, tasks_of("llama"), resume=True, **arguments)


def train_and_move(rank: int, folder: Path, model: str, arguments: dict[str, Any], moves: dict[int, str]) -> Part:
    """Train the five tasks, moving to other replicas after some steps; a task comes in between, another pauses."""

    def move(replicas: str) -> Callable[[Any], None]:
        return lambda trainer: trainer.redeploy(replicas)

    acts: dict[int, Callable[[Any], None]] = {step: move(replicas) for step, replicas in moves.items()}
    acts |= {
        1: lambda trainer: trainer.pause_task("narrow"),
        3: lambda trainer: trainer.register_tasks([late_task()]),
        4: lambda trainer: trainer.resume_task("narrow"),
    }
    return train(folder, model, tasks_of("llama"), watcher=Watcher(at_end=acts), **arguments)


def move_on_one(rank: int, folder: Path, model: str) -> Part:
    """Train; only rank 1 gets the command to move."""
    acts = {2: lambda trainer: trainer.redeploy("<1,2>")} if rank == 1 else {}
    return train(folder, model, tasks_of("llama"), watcher=Watcher(at_end=acts))


def train_and_be_moved(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train with `redeploy=True`, where the planner finds that whole replicas pay as soon as a task has come."""
    from peft_mux.planning import relocation
    from peft_mux.scheduler.deployment.deployment_plan import Redeployment

    def decide(planner: Any, runs: Sequence[Any], old: Any, *, restart_s: float) -> Redeployment:
        assert rank == 0, "only the first process decides"
        pays = any(run.name == "late" for run in runs)
        return Redeployment(str(old), "<1,1>x2" if pays else str(old), 2.0, 1.0 if pays else 2.0, 1000.0, restart_s)

    relocation.decide_on_move = decide
    acts = {2: lambda trainer: trainer.register_tasks([late_task()]), 4: lambda trainer: trainer.remove_task("plain")}
    return train(folder, model, tasks_of("llama"), watcher=Watcher(at_end=acts), **arguments)


EVENTS = ("on_step_end", "on_step_begin", "on_evaluate")


def train_with_failing_callbacks(rank: int, folder: Path, model: str, arguments: dict[str, Any]) -> Part:
    """Train; of tasks that are named by events, callbacks raise on rank 1 alone, and rank 0 alone asks for a save."""
    spoilt = [
        lab.small_task(
            event,
            data_seed=8,
            max_steps=cases.NUM_STEPS,
            callbacks=[cases.FailsOnce(event, 1)],
            eval_steps=1,
            eval_dataset=lab.rows(3, 4, 6, 9),
        )
        for event in EVENTS
    ]

    def ask(trainer: Any) -> None:
        trainer.control.should_save = trainer.control.should_evaluate = True

    watcher = Watcher(at_end={4: ask} if rank == 0 else {})
    return train(folder, model, [*spoilt, *tasks_of("llama")], watcher=watcher, **arguments)
