"""Optimizer, schedule, clipping and length of each task: those that Trainer or torch would give it alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
import transformers.trainer_optimizer
from transformers import Trainer, TrainerCallback, get_scheduler

from peft_mux import ConfigError, MultiTaskTrainer
from peft_mux.arguments import PLATEAU, MultiTaskTrainingArguments, supported_optimizers, supported_schedules
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.tasks.optimizer import OPTIONS, LastFiniteWeights, TaskOptimizer
from peft_mux.engine.work import StepResult
from peft_mux.kernels import adamw as multi_adamw
from peft_mux.kernels.adamw import PageUpdate
from peft_mux.modeling import slabs
from peft_mux.modeling.slabs import TaskSlab
from peft_mux.task import task_arguments
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, train, weights
from tests.runs import SAVING, Acts, assert_equal_weights, small_tasks, stops_after

RATE = 3e-3
SCHEDULES_OF_STEPS = [name for name in supported_schedules() if name != PLATEAU]
Weights = dict[str, torch.Tensor]


class Spy(TrainerCallback):
    """Keeps weights and gradients of each task just before each of its updates, and the weights after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer: MultiTaskTrainer | None = None
        self.first: dict[str, Weights] = {}
        self.gradients: dict[str, list[Weights]] = {}
        self.after: dict[str, list[Weights]] = {}
        original = TaskTable.apply

        def apply(table: TaskTable, result: StepResult) -> None:
            assert self.trainer is not None
            for name in result.losses:
                self.first.setdefault(name, weights(self.trainer, name))
                # a parameter that took no part has no gradient
                parameters = self.trainer.model.task_parameters(name).items()
                gradients = {key: p.grad.clone() for key, p in parameters if p.grad is not None}
                self.gradients.setdefault(name, []).append(gradients)
            original(table, result)
            for name in result.losses:
                self.after.setdefault(name, []).append(weights(self.trainer, name))

        monkeypatch.setattr(TaskTable, "apply", apply)

    def replay(self, name: str, make: Callable[[list[torch.Tensor]], torch.optim.Optimizer], clip: float = 0) -> None:
        """Assert that the given optimizer, alone and at a constant rate, makes the same weights of the gradients."""
        parameters = {key: torch.nn.Parameter(value.clone()) for key, value in self.first[name].items()}
        optimizer = make(list(parameters.values()))
        assert self.after[name], f"{name} took no step"
        for gradients, after in zip(self.gradients[name], self.after[name], strict=True):
            for key, parameter in parameters.items():
                parameter.grad = gradients[key].clone()
            if clip:
                torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
            optimizer.step()
            for key, parameter in parameters.items():
                torch.testing.assert_close(parameter.detach(), after[key], rtol=1e-6, atol=1e-9, msg=f"{name} {key}")


def run_with(spy: Spy, tasks: list[Any], folder: Path) -> MultiTaskTrainer:
    trainer = make_trainer(tasks, folder)
    spy.trainer = trainer
    trainer.train()
    return trainer


# ----------------------------------------------------------------- optimizers


def test_every_supported_optimizer_steps_as_trainer_would_or_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constant = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 2, "rank": 2}
    plain = like("adamw_torch")
    wanted: dict[str, tuple[Any, dict[str, Any]]] = {}
    for optim in supported_optimizers():
        own_args = task_arguments(replace(plain.table["own"].hyper, optim=optim), plain.args)
        try:
            wanted[optim] = Trainer.get_optimizer_cls_and_kwargs(own_args)
        except (ImportError, ValueError):
            with pytest.raises(ConfigError, match=f"tasks.own: optim='{optim}'"):
                make_trainer([small_task("own", data_seed=1, optim=optim, **constant)], tmp_path)
    assert {"adamw_torch", "sgd", "adafactor"} <= wanted.keys()
    spy = Spy(monkeypatch)
    tasks = [small_task(optim, data_seed=1, optim=optim, **constant) for optim in wanted]
    trainer = run_with(spy, tasks, tmp_path / "run")
    assert trainer.task_statuses == dict.fromkeys(wanted, "succeeded")
    for optim, (kind, options) in wanted.items():
        assert any(not torch.equal(spy.after[optim][-1][key], value) for key, value in spy.first[optim].items())
        spy.replay(optim, lambda own, kind=kind, options=options: kind(own, **{"weight_decay": 0.0, **options}))


def test_options_and_clipping_of_a_task_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    common = {"lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 3}
    sgd = {**common, "optim": "sgd", "weight_decay": 0.0}
    odd = {"adam_beta1": 0.5, "adam_beta2": 0.7, "adam_epsilon": 1e-3}
    tasks = [
        small_task("odd", data_seed=1, optim="adamw_torch", **odd, **common),
        small_task("plain", data_seed=2, optim="adamw_torch", **common),
        small_task("options", data_seed=1, optim="rmsprop", optim_args="momentum=0.9,alpha=0.5", **common),
        small_task("tight", data_seed=1, **{**sgd, "max_grad_norm": 1e-3}),
        small_task("loose", data_seed=2, **{**sgd, "max_grad_norm": 1e6}),
        small_task("free", data_seed=3, **sgd),
    ]
    trainer = run_with(spy, tasks, tmp_path)
    spy.replay("odd", lambda p: torch.optim.AdamW(p, lr=RATE, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.0))
    spy.replay("plain", lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.0))
    spy.replay("options", lambda p: torch.optim.RMSprop(p, lr=RATE, momentum=0.9, alpha=0.5))
    for name, clip in {"tight": 1e-3, "loose": 0, "free": 0}.items():
        spy.replay(name, lambda p: torch.optim.SGD(p, lr=RATE), clip=clip)
        norm = torch.cat([gradient.flatten() for gradient in spy.gradients[name][-1].values()]).norm().item()
        assert trainer.table[name].last_gradient_norm == pytest.approx(norm, rel=1e-5)
        assert norm > 1e-3, "the tight bound must bind"
    moved = [(spy.after["tight"][0][key] - value).flatten() for key, value in spy.first["tight"].items()]
    # sums of fp32 weights round at about 1e-8, the step is 3e-6 long
    assert torch.cat(moved).norm().item() == pytest.approx(RATE * 1e-3, rel=2e-2)


# ----------------------------------------------------------------- joint steps


class Joint:
    """Makes the CPU step jointly, as CUDA without Triton does, and remembers the pages of each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[list[PageUpdate]] = []

        def update(pages: list[PageUpdate], verdicts: torch.Tensor) -> list[list[float]]:
            self.steps.append(pages)
            return multi_adamw.foreach_update(pages, verdicts)

        monkeypatch.setattr(multi_adamw, "joint_update", lambda device: update)


def of_all_kinds(**settings: Any) -> list[Any]:
    """Return tasks of which five join, one of them for three steps only, and one cannot."""
    common: dict[str, Any] = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "warmup_steps": 2, **settings}
    return [
        small_task("decaying", data_seed=2, weight_decay=0.1, learning_rate=1e-2, **common),
        small_task("descent", data_seed=3, **{**common, "optim": "sgd"}),
        small_task("unclipped", data_seed=4, max_grad_norm=0, **common),
        small_task("clipped", data_seed=5, max_grad_norm=1e-3, **common),
        small_task("odd", data_seed=6, adam_beta1=0.5, adam_beta2=0.7, adam_epsilon=1e-3, rank=2, **common),
        small_task("short", data_seed=7, **{**common, "max_steps": 3}),
    ]


@pytest.fixture
def two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each task, a part that does not decay, as biases and norms do not."""
    monkeypatch.setattr(slabs, "decays", lambda name: "q_proj" not in name)


def assert_same_run(found: Run, wanted: Run) -> None:
    assert found.losses == wanted.losses
    assert found.recorder.digests == wanted.recorder.digests


@pytest.mark.usefixtures("two_pages")
def test_a_joint_step_leaves_the_bits_of_single_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, moments and counters after each step; the tasks differ in every option of an optimizer."""
    single = train(of_all_kinds(), tmp_path / "single")
    joint = Joint(monkeypatch)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")  # "... before optimizer.step"
        patch.setattr(torch.optim.AdamW, "step", lambda *args: pytest.fail("a task that joins stepped by itself"))
        together = train(of_all_kinds(), tmp_path / "joint")
    assert_same_run(together, single)
    assert len(single.recorder.digests["decaying"]) == 8
    assert [len(pages) for pages in joint.steps] == [10] * 3 + [8] * 5
    assert sorted(page.weight_decay for page in joint.steps[0] if page.task == 0) == [0.0, 0.1]


def test_a_task_that_is_not_finite_leaves_a_joint_step_with_its_last_good_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poison(trainer: MultiTaskTrainer) -> None:
        parameter = next(iter(trainer.model.task_parameters("bad").values()))
        handle = parameter.register_hook(lambda gradient: (handle.remove(), gradient * math.nan)[1])

    def run(folder: Path) -> Run:
        tasks = small_tasks("good", "bad", optim="adamw_torch")
        return train(tasks, folder, recorder=Recorder(at_begin={4: poison}))

    single = run(tmp_path / "single")
    Joint(monkeypatch)
    joint = run(tmp_path / "joint")
    assert_same_run(joint, single)
    assert joint.trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    assert joint.trainer.table["bad"].step == 4
    # the weights that were good at last are those with which the step before began
    assert_equal_weights(joint.weights("bad"), joint.recorder.before["bad"][3])


@pytest.mark.slow
@pytest.mark.usefixtures("two_pages")
def test_a_jointly_stepped_run_resumes_with_equal_bits_even_from_single_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(of_all_kinds(), tmp_path / "whole")
    first = train(of_all_kinds(), tmp_path / "run", recorder=stops_after(3), **SAVING)
    assert first.losses["decaying"] == whole.losses["decaying"][:3]
    joint = Joint(monkeypatch)
    second = train(of_all_kinds(), tmp_path / "run", recorder=stops_after(6), resume=True, **SAVING)
    third = train(of_all_kinds(), tmp_path / "run", resume=True, **SAVING)
    assert len(joint.steps) == 5
    assert {page.step for page in joint.steps[0]} == {4}
    for name, digests in whole.recorder.digests.items():
        resumed = [digest for run in (first, second, third) for digest in run.recorder.digests.get(name, [])]
        assert resumed == digests, name


@cache
def like(optim: str) -> MultiTaskTrainer:
    """Return a trainer whose task has the settings of an optimizer."""
    return make_trainer([small_task("own", data_seed=1, optim=optim)], Path("unused"))


def slab_optimizer(*, optim: str = "adamw_torch", dtype: torch.dtype = torch.float32) -> TaskOptimizer:
    """Return an optimizer over a slab of one page, with a gradient."""
    generator = torch.Generator().manual_seed(0)
    parameters = {"q.lora_A.weight": torch.nn.Parameter(torch.randn(8, 8, generator=generator, dtype=dtype))}
    slab, trainer = TaskSlab(parameters), like(optim)
    optimizer = TaskOptimizer("own", parameters, trainer.table["own"].hyper, 9, trainer.args, slab)
    slab.bind_gradients()
    for page in slab.pages:
        assert page.values.grad is not None
        page.values.grad.fill_(0.1)
    return optimizer


NOT_JOINT: dict[str, Callable[[TaskOptimizer], object]] = {
    "somebody listens": lambda optimizer: optimizer.optimizer.register_step_post_hook(lambda *args: None),
    "no gradient": lambda optimizer: setattr(optimizer.parameters[0], "grad", None),
    **{
        name: lambda optimizer, name=name: optimizer.optimizer.param_groups[0].update({name: True})
        for name in ("amsgrad", "maximize", "capturable", "differentiable")
    },
}


@pytest.mark.parametrize("change", NOT_JOINT)
def test_what_a_joint_step_would_not_do_right_steps_by_itself(change: str) -> None:
    optimizer = slab_optimizer()
    last_good = LastFiniteWeights({"page": optimizer.parameters[0]})
    assert len(optimizer.page_updates(0, last_good)) == 1
    NOT_JOINT[change](optimizer)
    assert optimizer.page_updates(0, last_good) == []
    assert slab_optimizer(optim="sgd").page_updates(0, last_good) == []
    assert slab_optimizer(dtype=torch.float64).page_updates(0, last_good) == []


# ------------------------------------------------------------------- schedules

SCHEDULE_SETTINGS: dict[str, dict[str, Any]] = {
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"power": 2.0},
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


def rates_of(trainer: MultiTaskTrainer) -> dict[str, list[float]]:
    """Train, and return the rate with which each step of a task was taken."""
    rates: dict[str, list[float]] = {}

    def note(**_: Any) -> None:
        for run in trainer.table.running:
            (rate,) = {group["lr"] for group in run.optimizer.optimizer.param_groups}
            rates.setdefault(run.name, []).append(rate)

    trainer.add_callback(Acts(note, event="on_step_begin"))
    trainer.train()
    return rates


def test_every_schedule_of_a_task_is_that_of_transformers_over_its_own_steps(tmp_path: Path) -> None:
    tasks, expected = [], {}
    for index, schedule in enumerate(SCHEDULES_OF_STEPS):
        num_steps, warmup = 5 + index % 4, index % 3
        settings = SCHEDULE_SETTINGS.get(schedule)
        own = {"max_steps": num_steps, "warmup_steps": warmup, "lr_scheduler_kwargs": settings, "train_batch_size": 1}
        tasks.append(small_task(schedule, data_seed=index, rank=1, length=4, lr_scheduler_type=schedule, **own))
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        wanted = get_scheduler(schedule, optimizer, warmup, num_steps, scheduler_specific_kwargs=settings)
        expected[schedule] = []
        for _ in range(num_steps):
            expected[schedule].append(wanted.get_last_lr()[0])
            optimizer.step()
            wanted.step()
    trainer = make_trainer(tasks, tmp_path)
    assert rates_of(trainer) == expected
    assert all(entry.optimizer is None for entry in trainer.table), "the memory of ended tasks is freed"
    assert len({tuple(rates) for rates in expected.values()}) >= 8, "the schedules must differ for this to say anything"


def test_a_warmup_below_one_is_a_share_of_the_task_s_own_steps(tmp_path: Path) -> None:
    warmup = {"warmup_steps": 0.4, "lr_scheduler_type": "constant_with_warmup"}
    tasks = [small_task(name, data_seed=1, max_steps=steps, **warmup) for name, steps in (("long", 10), ("short", 5))]
    rates = rates_of(make_trainer(tasks, tmp_path))
    assert rates["long"] == pytest.approx([RATE * min(1, step / 4) for step in range(10)])
    assert rates["short"] == pytest.approx([RATE * min(1, step / 2) for step in range(5)])


# ---------------------------------------------------------------------- length


@pytest.mark.parametrize(
    ("own", "of_run", "num_steps"),
    [
        # ten rows in batches of four are three steps an epoch
        ({"max_steps": None, "num_train_epochs": 2.5}, {}, 8),
        ({"max_steps": None, "num_train_epochs": 0.1}, {}, 1),
        ({"max_steps": None, "num_train_epochs": 1}, {"max_steps": 50}, 3),
        ({"max_steps": None}, {"max_steps": 4}, 4),
        ({"max_steps": None}, {"num_train_epochs": 2}, 6),
        ({"max_steps": 2, "num_train_epochs": 9}, {}, 2),
    ],
)
def test_a_task_takes_as_many_steps_as_its_epochs_or_its_steps_say(
    tmp_path: Path, own: dict[str, Any], of_run: dict[str, Any], num_steps: int
) -> None:
    trainer = make_trainer([small_task("own", data_seed=1, **own)], tmp_path, **of_run)
    assert trainer.table["own"].num_steps == num_steps
    assert trainer.task_states["own"].max_steps == num_steps


# ------------------------------------------- options that nothing reads, rates that nothing can be trained with


def refusal(tmp_path: Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make_trainer([small_task("own", data_seed=1, **settings)], tmp_path / "run")
    return str(caught.value)


@pytest.mark.parametrize(
    ("optim", "options", "parts"),
    [
        ("sgd", "momentun=0.9", ("got 'momentun'", "momentum, dampening, nesterov", 'Did you mean "momentum"?')),
        ("sgd", "weight_decay=0.5", ("got 'weight_decay'", "Set weight_decay itself")),
        ("adamw_torch", "fused=1", ("got 'fused'", 'left out for optim="adamw_torch"')),
        ("sgd", "momentum", ("got 'momentum'", "key=value")),
        ("sgd", "momentum=0.9,momentum=0.5", ("got 'momentum=0.5'", "each once")),
        ("sgd", "momentum=nan", ("optim_args.momentum", "got 'nan'", "a finite number")),
        ("sgd", "momentum=0.9,nesterov=maybe", ("optim_args.nesterov", "got 'maybe'", "true or false")),
    ],
)
def test_an_option_that_the_optimizer_would_ignore_is_refused_with_those_that_it_knows(
    tmp_path: Path, optim: str, options: str, parts: tuple[str, ...]
) -> None:
    message = refusal(tmp_path, optim=optim, optim_args=options)
    assert message.startswith("tasks.own.optim_args")
    assert all(part in message for part in parts), message


def test_every_wrong_option_of_optimizer_and_schedule_is_named_at_once(tmp_path: Path) -> None:
    settings = {"optim_args": "a=1,b=2", "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"num_cycles": 2}}
    message = refusal(tmp_path, optim="sgd", **settings)
    assert "3 things are wrong" in message
    assert 'lr_scheduler_kwargs must be left out for lr_scheduler_type="constant", got' in message


@pytest.mark.parametrize("max_steps", [1, 10**9])
def test_every_schedule_with_its_usual_options_is_taken_for_any_number_of_steps(tmp_path: Path, max_steps: int) -> None:
    options: dict[str, Any] = {**dict.fromkeys(SCHEDULES_OF_STEPS), "warmup_stable_decay": {"num_decay_steps": 1}}
    options.update({f"{kind}_with_min_lr": {"min_lr_rate": 0.1} for kind in ("cosine", "cosine_warmup")})
    common: dict[str, Any] = {"data_seed": 1, "rank": 1, "max_steps": max_steps, "warmup_steps": 1}
    tasks = [small_task(name, lr_scheduler_type=name, lr_scheduler_kwargs=options[name], **common) for name in options]
    assert {run.num_steps for run in make_trainer(tasks, tmp_path).table} == {max_steps}


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "rmsprop", "adamw_torch", "adafactor"])
def test_the_options_that_are_known_are_those_that_trainer_reads(
    tmp_path: Path, optim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()

    class Watched(dict[str, str]):
        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def __bool__(self) -> bool:
            return True

    monkeypatch.setattr(transformers.trainer_optimizer, "_parse_optim_args", lambda _: Watched())
    monkeypatch.setattr(transformers.trainer, "_parse_optim_args", lambda _: Watched(), raising=False)
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, optim=optim)
    Trainer.get_optimizer_cls_and_kwargs(args)
    assert read - {"weight_decay"} == set(OPTIONS.get(optim, ()))


@pytest.mark.parametrize(
    ("schedule", "options", "part"),
    [
        ("polynomial", {"power": -1000}, "At step 5 of 8 the schedule raises OverflowError"),
        ("polynomial", {"power": math.nan}, "power must be a finite number, got nan"),
        ("polynomial", {"lr_end": -1.0}, "the learning rate is -"),
        ("polynomial", {"power": "2"}, "cannot be built"),
        ("polynomial", {1: 2}, 'must be one of lr_end, power for lr_scheduler_type="polynomial", got 1'),
        ("cosine_with_min_lr", {"min_lr_rate": 10**400}, "cannot be built"),
        ("inverse_sqrt", {"timescale": -5}, ""),
        ("warmup_stable_decay", {"num_decay_steps": 3, "min_lr_ratio": "x"}, "TypeError"),
    ],
)
def test_a_schedule_that_would_fail_at_some_step_is_refused_before_the_first(
    tmp_path: Path, schedule: str, options: dict[str, Any], part: str
) -> None:
    message = refusal(tmp_path, lr_scheduler_type=schedule, lr_scheduler_kwargs=options)
    assert "tasks.own" in message
    assert part in message, message


@pytest.mark.parametrize("fail", ["raises", pytest.param("nan", marks=pytest.mark.slow)])
def test_a_schedule_that_fails_later_ends_its_own_task_alone(
    tmp_path: Path, fail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = small_tasks("bad", "good", max_steps=5)
    alone = train(tasks[1:], tmp_path / "alone").trainer.table["good"]

    def factor(step: int) -> float:
        if step == 3 and fail == "raises":
            raise ZeroDivisionError("0.0 to a negative power")
        return math.nan if step == 3 else 1.0

    def break_schedule(trainer: MultiTaskTrainer) -> None:
        optimizer = trainer.table["bad"].optimizer
        assert optimizer is not None
        optimizer.schedule.lr_lambdas = [factor] * len(optimizer.schedule.base_lrs)

    run = train(tasks, tmp_path / "run", recorder=Recorder(at_begin={0: break_schedule}))
    bad, good = run.trainer.table["bad"], run.trainer.table["good"]
    assert (bad.status, bad.step, good.status, good.step) == ("failed", 3, "succeeded", 5)
    assert bad.reason.startswith("learning_rate: ")
    assert "at step 3" in bad.reason
    assert good.last_loss == pytest.approx(alone.last_loss, rel=1e-5)


def test_more_steps_than_can_be_counted_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, max_steps=None, num_train_epochs=2e8, train_batch_size=1)
    assert message.startswith("tasks.own.num_train_epochs must ")
    assert "Set max_steps" in message
