"""Stand-ins for W&B, MLflow, Trackio and TensorBoard, as far as runs ask for something."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


@dataclass
class Seen:
    """A run as a logger has it.

    Attributes:
        begun: how it was asked for.
        settings: configuration or parameters.
        logs: numbers of each log, with the step of the task.
        ending: as the logger names it; `None` while the run trains.
        notes: what its summary or tags say of the task's end.
        others: names of the other runs that were active at its first log.
    """

    name: str
    run_id: str
    begun: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    logs: list[tuple[dict[str, float], int]] = field(default_factory=list)
    ending: Any = None
    notes: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def steps_of(self, key: str) -> list[int]:
        return [step for numbers, step in self.logs if key in numbers]


@dataclass
class Logger:
    """All runs of a stand-in, in the order in which they began, and what it does in place of an answer.

    Attributes:
        fails: called with the name of a run and with "begin", "log" or "end"; may raise.
    """

    runs: list[Seen] = field(default_factory=list)
    fails: Callable[[str, str], None] = lambda name, what: None

    def begin(self, name: str, run_id: str | None, **begun: Any) -> Seen:
        self.fails(name, "begin")
        self.runs.append(Seen(name, run_id or f"id-{len(self.runs)}", begun))
        return self.runs[-1]

    def log(self, run: Seen, numbers: dict[str, float], step: int) -> None:
        self.fails(run.name, "log")
        assert run.ending is None, f"{run.name} has ended"
        if not run.logs:
            run.others = [one.name for one in self.runs if one is not run and one.ending is None]
        run.logs.append((numbers, step))

    def end(self, run: Seen, ending: Any) -> None:
        self.fails(run.name, "end")
        assert run.ending is None, f"{run.name} was ended before"
        run.ending = ending

    def of(self, task: str) -> list[Seen]:
        return [run for run in self.runs if run.name.endswith(f"/{task}")]


def wandb(logger: Logger) -> dict[str, ModuleType]:
    """Return the modules of a stand-in for W&B."""

    def init(*, name: str, id: str | None, config: dict[str, Any], allow_val_change: bool, **begun: Any) -> Any:
        seen = logger.begin(name, id, **begun)
        seen.settings.update(config)
        return SimpleNamespace(
            id=seen.run_id,
            define_metric=lambda *args, **options: None,
            log=lambda numbers, step: logger.log(seen, numbers, numbers["train/global_step"]),
            summary=seen.notes,
            finish=lambda exit_code: logger.end(seen, exit_code),
        )

    return {"wandb": _module("wandb", init=init)}


def trackio(logger: Logger) -> dict[str, ModuleType]:
    """Return the modules of a stand-in for Trackio."""

    current: ContextVar[Any] = ContextVar("current_run", default=None)

    def init(*, name: str, config: dict[str, Any], **begun: Any) -> Any:
        if current.get() is not None:  # as Trackio does with the one run that it thinks there is
            current.get().finish()
        seen = logger.begin(name, name, **begun)
        seen.settings = config
        run = SimpleNamespace(
            name=name,
            log=lambda numbers, step: logger.log(seen, numbers, step),
            finish=lambda: logger.end(seen, "finished"),
        )
        current.set(run)
        return run

    return {"trackio": _module("trackio", init=init, context_vars=SimpleNamespace(current_run=current))}


def mlflow(logger: Logger) -> dict[str, ModuleType]:
    """Return the modules of a stand-in for MLflow."""

    class Exception_(Exception):
        pass

    class Client:
        def run(self, run_id: str) -> Seen:
            return [run for run in logger.runs if run.run_id == run_id][-1]

        def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
            seen = logger.begin(run_name, None, experiment_id=experiment_id, group=tags["group"])
            return SimpleNamespace(info=SimpleNamespace(run_id=seen.run_id))

        def update_run(self, run_id: str, *, status: str) -> None:
            assert status == "RUNNING"
            if all(run.run_id != run_id for run in logger.runs):
                raise Exception_(f"no run {run_id}")
            logger.begin(self.run(run_id).name, run_id, resume="allow")

        def log_batch(self, run_id: str, *, synchronous: bool, params: Any = (), metrics: Any = ()) -> Any:
            assert not synchronous
            run = self.run(run_id)
            run.settings.update({one.key: one.value for one in params})
            if metrics:
                logger.log(run, {one.key: one.value for one in metrics}, metrics[0].step)
            return SimpleNamespace(wait=lambda: None)

        def set_tag(self, run_id: str, key: str, value: str) -> None:
            self.run(run_id).notes[key] = value

        def set_terminated(self, run_id: str, status: str) -> None:
            logger.end(self.run(run_id), status)

    def metric(key: str, value: float, timestamp: int, step: int) -> Any:
        return SimpleNamespace(key=key, value=value, step=step)

    entities = SimpleNamespace(Param=lambda key, value: SimpleNamespace(key=key, value=value), Metric=metric)
    limits = {"MAX_PARAM_VAL_LENGTH": 6000, "MAX_PARAMS_TAGS_PER_BATCH": 20}
    return {
        "mlflow": _module(
            "mlflow", MlflowClient=Client, MlflowException=Exception_, active_run=lambda: None, entities=entities
        ),
        "mlflow.utils.validation": _module("mlflow.utils.validation", **limits),
        "mlflow.tracking.fluent": _module("mlflow.tracking.fluent", _get_experiment_id=lambda: "7"),
        "mlflow.tracking.context.registry": _module("mlflow.tracking.context.registry", resolve_tags=dict),
    }


def _module(name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update({"__spec__": ModuleSpec(name, None), **contents})
    return module


class Writer:
    """Keeps what a `SummaryWriter` would write."""

    made: list[Writer]

    def __init__(self, log_dir: str) -> None:
        self.log_dir, self.scalars, self.texts, self.closed = log_dir, [], {}, 0
        Writer.made.append(self)

    def add_scalar(self, key: str, value: float, global_step: int) -> None:
        self.scalars.append((key, value, global_step))

    def add_text(self, key: str, text: str, global_step: int | None = None) -> None:
        self.texts[key] = text

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        self.closed += 1

    def steps_of(self, key: str) -> list[int]:
        return [step for name, _, step in self.scalars if name == key]
