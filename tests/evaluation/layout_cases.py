"""Runs of tasks with metrics of their own, over any layout of real processes: what each process sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction
from transformers.trainer_utils import PredictionOutput

from peft_mux import EarlyStopping, Task
from peft_mux.errors import PeftMuxError
from tests.engine.processes import cases as parallel_cases
from tests.evaluation.generation_cases import evaluations
from tests.invariants import mux_lab as lab
from tests.parallel.replicas import layout_cases
from tests.runs import SAVING

HELD_OUT = lab.rows(90, 5, 5, 9)


@dataclass
class Measured:
    """What a run showed to one process.

    Attributes:
        statuses: final ones, with reasons.
        evaluations: what was logged of each evaluation, by task.
        num_calls: of the functions of all tasks.
        evaluated: what `trainer.evaluate` returned after the run.
        predicted: what `trainer.predict` returned after the run.
        refusals: messages of what a part of a model does not do.
    """

    statuses: dict[str, tuple[str, str]]
    evaluations: dict[str, list[dict[str, float]]]
    num_calls: int
    evaluated: dict[str, float]
    predicted: PredictionOutput
    refusals: list[str] = field(default_factory=list)


class Calls:
    """Functions of tasks that count their calls."""

    def __init__(self) -> None:
        self.num = 0

    def nll(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the mean loss of whole logits, and how many rows came."""
        self.num += 1
        logits, labels = torch.from_numpy(prediction.predictions)[:, :-1], torch.from_numpy(prediction.label_ids)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"nll": loss.item(), "rows": len(labels)}

    def accuracy(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return the share of targets that were predicted, from predictions that `preprocess` has shrunk."""
        self.num += 1
        predicted, labels = np.asarray(prediction.predictions)[:, :-1], np.asarray(prediction.label_ids)[:, 1:]
        return {"accuracy": float((predicted == labels)[labels != -100].mean())}

    def broken(self, prediction: EvalPrediction) -> dict[str, float]:
        """Fail at the second call."""
        self.num += 1
        if self.num > 1:
            raise ValueError("no such column")
        return {"score": 1.0}

    def declining(self, prediction: EvalPrediction) -> dict[str, float]:
        """Return worse and worse scores."""
        self.num += 1
        return {"score": -float(self.num)}


def preprocess(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the likeliest token of each place."""
    return logits.argmax(-1)


def refuse_rows(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Fail at once, while passes are still to come."""
    raise KeyError("logits")


def metric_tasks(calls: dict[str, Calls]) -> list[Task]:
    """Return tasks whose metrics are well, broken, broken before the last pass, and declining."""
    stops = EarlyStopping(metric="score", patience=1)
    settings: dict[str, dict[str, Any]] = {
        "well": {"compute_metrics": calls["well"].nll},
        "shrunk": {"compute_metrics": calls["shrunk"].accuracy, "preprocess_logits_for_metrics": preprocess},
        "broken": {"compute_metrics": calls["broken"].broken},
        "odd": {"compute_metrics": calls["odd"].nll, "preprocess_logits_for_metrics": refuse_rows},
        "declining": {"compute_metrics": calls["declining"].declining, "early_stopping": stops},
        "plain": {},
    }
    return [
        lab.small_task(name, data_seed=seed, max_steps=4, eval_steps=1, eval_dataset=HELD_OUT, **own)
        for seed, (name, own) in enumerate(settings.items())
    ]


def train(rank: int, folder: Path, arguments: dict[str, Any]) -> Measured:
    """Train the tasks on a tiny Llama; passes of evaluation hold two rows or so, so that there are several."""
    calls = {name: Calls() for name in ("well", "shrunk", "broken", "odd", "declining")}
    options = {**SAVING, "max_tokens_per_micro_batch": 16, "ddp_timeout": 3 * parallel_cases.TIMEOUT_S, **arguments}
    recorder, model = lab.Recorder(keep_weights=False), layout_cases.backbone("llama")
    trainer = lab.make_trainer(metric_tasks(calls), folder, model=model, recorder=recorder, **options)
    trainer.train()
    evaluated, predicted = trainer.evaluate("well"), trainer.predict("plain", HELD_OUT)
    refusals = _refusals(trainer.model, "well") if trainer.model.num_stages * trainer.model.tp_size > 1 else []
    trainer._run.processes.wait_for_all()
    return Measured(
        statuses={run.name: (run.status.value, run.reason) for run in trainer.table},
        evaluations={run.name: evaluations(trainer, run.name) for run in trainer.table},
        num_calls=sum(one.num for one in calls.values()),
        evaluated=evaluated,
        predicted=predicted,
        refusals=refusals,
    )


def _refusals(model: Any, name: str) -> list[str]:
    """Return what a part of a model says to what it cannot do."""
    view, ids = model.task_view(name), torch.tensor([[1, 2, 3]])
    attempts: list[Callable[[], Any]] = [
        lambda: view.generate(input_ids=ids),
        lambda: view(input_ids=ids),
        lambda: model(input_ids=ids),
        view.merge_and_unload,
    ]
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("done")
        except PeftMuxError as error:
            found.append(str(error))
    return found
