"""Every way in which one task's own code, data, rate, metric, callback or stream fails: one named entry each.

To add an attack, add a line to the table of its kind. `blames` is what the reason of the failed task must name.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, set_seed

from peft_mux import EarlyStopping
from tests.adapters.prompts.prompt_cases import PROMPTS, config_of
from tests.attacks.attack_lab import ATTACKED, LENGTH, OTHERS, VOCABULARY, rows
from tests.modeling.adapters.cases import CASES_BY_NAME

FAILED = ("failed",)
FAILED_OR_STOPPED = ("failed", "stopped_early")


@dataclass(frozen=True)
class Attack:
    """One way to fail.

    Attributes:
        name: of the attack.
        blames: regular expression that the reason of the failed task must match, whatever the case.
        settings: returns the fields of the attacked task, new ones for every run.
        at_begin: what happens before which step of the run.
        ends: how the attacked task may end.
        may_be_refused: whether the package may refuse the task by name before it trains, as well as fail it.
        cleanup: called when the run is over.
        arguments: of the run, where the attack needs some.
    """

    name: str
    blames: str
    settings: Callable[[], dict[str, Any]] = dict
    at_begin: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    ends: tuple[str, ...] = FAILED
    may_be_refused: bool = False
    cleanup: Callable[[], None] = lambda: None
    arguments: Mapping[str, Any] = field(default_factory=dict)


class OwnError(Exception):
    """An error of the task's own."""


class OwnBaseError(BaseException):
    """An error of the task's own that `except Exception` does not catch."""


class Unspeakable(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("boom in __str__")


def raises(error: Callable[[], BaseException]) -> Callable[..., Any]:
    """Return a function that raises, whatever it is given."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error()

    return fail


class Untraceable(Exception):
    """An error whose class, traceback and context cannot be read."""

    __class__ = __traceback__ = __cause__ = __context__ = property(raises(SystemExit))  # type: ignore[assignment]


def recurses(*args: Any, **kwargs: Any) -> Any:
    """Call itself for ever."""
    return recurses(*args, **kwargs)


def boom(kind: type[BaseException]) -> Callable[[], BaseException]:
    """Return what makes an error of a kind."""
    return lambda: kind("boom")


ERRORS: dict[str, tuple[Callable[..., Any], str]] = {
    "ValueError": (raises(boom(ValueError)), "ValueError: boom"),
    "KeyError": (raises(boom(KeyError)), "KeyError: 'boom'"),
    "OSError": (raises(lambda: OSError(28, "boom")), "boom"),
    "MemoryError": (raises(boom(MemoryError)), "MemoryError"),
    "OutOfMemoryError": (raises(boom(torch.OutOfMemoryError)), "OutOfMemoryError"),
    "AssertionError": (raises(boom(AssertionError)), "AssertionError"),
    "RecursionError": (recurses, "RecursionError"),
    "StopIteration": (raises(boom(StopIteration)), "StopIteration"),
    "an own error": (raises(boom(OwnError)), "OwnError: boom"),
    "an own BaseException": (raises(boom(OwnBaseError)), "OwnBaseError: boom"),
    "an error that cannot be printed": (raises(Unspeakable), "Unspeakable"),
    "an error whose traceback exits": (raises(boom(Untraceable)), "Untraceable: boom"),
    "SystemExit": (raises(lambda: SystemExit(0)), "SystemExit"),
    "KeyboardInterrupt": (raises(boom(KeyboardInterrupt)), "KeyboardInterrupt"),
}
"""What own code may raise, and how that is named."""


# ------------------------------------------------------------------------ weights, moments and rates


def weights_become(value: float) -> Callable[[Any], None]:
    """Return what fills the attacked task's weights."""

    def spoil(trainer: Any) -> None:
        for weight in trainer.model.task_parameters(ATTACKED).values():
            weight.data.fill_(value)

    return spoil


def moments_become(value: float) -> Callable[[Any], None]:
    """Return what fills the attacked task's optimizer state."""

    def spoil(trainer: Any) -> None:
        for state in trainer.table[ATTACKED].optimizer.optimizer.state.values():
            for entry in state.values():
                if isinstance(entry, torch.Tensor) and entry.dim():
                    entry.fill_(value)

    return spoil


def rate_becomes(value: Any) -> Callable[[Any], None]:
    """Return what sets the attacked task's learning rate."""

    def spoil(trainer: Any) -> None:
        for group in trainer.table[ATTACKED].optimizer.optimizer.param_groups:
            group["lr"] = value

    return spoil


# Weights of 1e30 alone may end in a finite loss: a norm can turn them into zeros, which depends on the CPU. With weight
# decay the weights themselves are beyond fp32 after two steps.
NUMBERS = [
    *(
        Attack(f"weights of {value} before step {step}", "non_finite", at_begin={step: weights_become(value)})
        for value in (math.nan, math.inf, -math.inf, 1e30)
        for step in (0, 3, 5)
    ),
    Attack("moments of NaN", "non_finite", at_begin={2: moments_become(math.nan)}),
    Attack("moments of -1 under a root", "non_finite", at_begin={2: moments_become(-1.0)}),
    *(
        Attack(
            f"a rate of {value} from step 2 on", "non_finite", lambda: {"weight_decay": 1.0}, {2: rate_becomes(value)}
        )
        for value in (math.nan, math.inf, -math.inf, 1e30, 1e308)
    ),
    Attack("a rate of 1e30", "non_finite", lambda: {"learning_rate": 1e30, "weight_decay": 1.0}, may_be_refused=True),
    Attack(
        "a rate of 1e30 with SGD", "non_finite", lambda: {"learning_rate": 1e30, "optim": "sgd", "weight_decay": 1.0}
    ),
    Attack("a rate of 1e308", "non_finite|learning_rate", lambda: {"learning_rate": 1e308}, may_be_refused=True),
    Attack("a weight decay of 1e30", "non_finite", lambda: {"weight_decay": 1e30, "learning_rate": 1.0}),
    Attack(
        "a schedule that explodes",
        "non_finite|lr_scheduler",
        lambda: {
            "lr_scheduler_type": "polynomial",
            "lr_scheduler_kwargs": {"power": -1000, "lr_end": 1e-7},
            "learning_rate": 1e-2,
        },
        may_be_refused=True,
    ),
    Attack(
        "a schedule that raises",
        "lr_scheduler|schedule",
        lambda: {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"power": "two"}},
        may_be_refused=True,
    ),
]


# ------------------------------------------------------------------------ evaluation


def evaluated(**settings: Any) -> dict[str, Any]:
    """Return the fields of a task that is evaluated after every step."""
    return {"eval_dataset": rows(77, 2), "eval_steps": 1, **settings}


def metric(found: Any) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose metric gives a value, or is a function."""
    return lambda: evaluated(compute_metrics=found if callable(found) else lambda _: found)


def stops_on(found: Any, patience: int = 1) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task that is stopped early by a metric of this value."""
    rule = EarlyStopping(metric="own", patience=patience)
    return lambda: evaluated(compute_metrics=lambda _: {"own": found}, early_stopping=rule)


def preprocess(function: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose `preprocess_logits_for_metrics` is this function."""
    return lambda: evaluated(compute_metrics=lambda _: {"own": 1.0}, preprocess_logits_for_metrics=function)


METRICS = [
    *(Attack(f"a metric that raises {name}", blame, metric(act)) for name, (act, blame) in ERRORS.items()),
    *(
        Attack(f"a metric that returns {name}", "evaluation|metric", metric(lambda _, value=value: value))
        for name, value in {
            "None": None,
            "a text": "good",
            "a list": [1.0],
            "a dict with a text": {"own": "good"},
            "a dict with None": {"own": None},
            "a dict with a number for a key": {5: 1.0},
            "a dict with an array": {"own": np.zeros(3)},
            "a dict with a complex number": {"own": 1j},
        }.items()
    ),
    Attack("a metric that stays NaN, patience 1", "own|nan", stops_on(math.nan), ends=FAILED_OR_STOPPED),
    Attack("a metric that stays NaN, patience 3", "own|nan", stops_on(math.nan, 3), ends=FAILED_OR_STOPPED),
    Attack("a metric that stays at minus infinity", "own", stops_on(-math.inf), ends=FAILED_OR_STOPPED),
    Attack(
        "a metric that early stopping misses",
        "other",
        lambda: evaluated(compute_metrics=lambda _: {"own": 1.0}, early_stopping=EarlyStopping(metric="other")),
    ),
    Attack(
        "a rate of 1e30 with early stopping of patience 1",
        "non_finite|eval_loss",
        lambda: evaluated(learning_rate=1e30, weight_decay=1.0, early_stopping=EarlyStopping(patience=1)),
        ends=FAILED_OR_STOPPED,
    ),
    Attack("a preprocessing that raises", "ValueError: boom", preprocess(raises(boom(ValueError)))),
    Attack("a preprocessing that exits", "SystemExit", preprocess(raises(lambda: SystemExit(0)))),
    Attack("a preprocessing that returns None", "TypeError|AttributeError", preprocess(lambda *_: None)),
    Attack("a preprocessing that returns a text", "AttributeError|TypeError", preprocess(lambda *_: "logits")),
    Attack("a preprocessing that returns no row", "IndexError", preprocess(lambda logits, _: logits[:0])),
]


# ------------------------------------------------------------------------ callbacks


def calls(event: str, act: Callable[..., Any], *, at: int | None = None, **settings: Any) -> Callable[[], Any]:
    """Return the fields of a task one event of whose own callback is a function, from a step of the task on."""

    def own(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return act(args, state, control, **kwargs) if at is None or state.global_step >= at else None

    def fields() -> dict[str, Any]:
        callback = TrainerCallback()
        setattr(callback, event, own)
        return {"callbacks": [callback], **evaluated(), **settings}

    return fields


def sets_state(**values: Any) -> Callable[..., None]:
    """Return a callback that puts rubbish into the state that it is shown."""

    def spoil(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        vars(state).update(values)

    return spoil


def sets_rate(value: Any) -> Callable[..., None]:
    """Return a callback that sets the learning rate of its own optimizer."""

    def spoil(*args: Any, optimizer: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = value

    return spoil


def empties_control(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Take away all fields of the control."""
    vars(control).clear()


def freezes_one_by_one(model: Any) -> None:
    """Freeze all parameters."""
    for parameter in model.parameters():
        parameter.requires_grad = False


HANDLER = logging.Handler()
HANDLER.emit = raises(SystemExit)  # type: ignore[method-assign]


def layer_of(model: Any) -> Any:
    """Return the first layer of a model."""
    return model.backbone.model.layers[0]


def raises_dropout(model: Any) -> None:
    """Let all dropouts drop nearly everything."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9


def goes_back(model: Any) -> None:
    """Leave gradients on the weights of another task."""
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.enable_grad():
        model.task_view(OTHERS[0])(input_ids=ids, labels=ids).loss.backward()


SHARED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "casts the model": (lambda model: model.to(torch.bfloat16), "casts"),
    "casts the backbone": (lambda model: model.backbone.to(torch.float64), "float32, got torch.float64"),
    "halves a layer": (lambda model: model.backbone.model.layers[0].half(), "float32, got torch.float16"),
    "freezes the model": (lambda model: model.requires_grad_(False), "requires_grad True, got False"),
    "freezes one by one": (freezes_one_by_one, "requires_grad True, got False"),
    "thaws the backbone": (lambda model: model.backbone.requires_grad_(True), "requires_grad False, got True"),
    "raises dropout": (raises_dropout, "p 0.1, got 0.9"),
    "leaves a hook": (lambda model: layer_of(model).register_forward_hook(lambda *_: None), "forward_hooks"),
    "replaces a module": (lambda model: setattr(layer_of(model).mlp, "act_fn", torch.nn.Tanh()), "modules .act_fn"),
    "removes a module": (lambda model: delattr(layer_of(model), "mlp"), "modules .mlp"),
    "replaces a weight's memory": (
        lambda model: setattr(layer_of(model).input_layernorm.weight, "data", torch.ones(16)),
        "input_layernorm.weight in other memory",
    ),
    "replaces a buffer": (
        lambda model: setattr(model.backbone.model.rotary_emb, "inv_freq", torch.ones(4)),
        "buffers .inv_freq",
    ),
    "goes back through another task": (goes_back, f'gradients of task "{OTHERS[0]}"|another task|every token once'),
}
"""What own code may do to the model that all tasks share, and the reason that the task must give."""

EVALUATING: dict[str, Callable[[Any], Any]] = {
    "the model": lambda model: model.eval(),
    "the backbone": lambda model: model.backbone.eval(),
    "a layer": lambda model: layer_of(model).eval(),
}
"""What own code may leave in evaluation without being blamed."""

WRITTEN: dict[str, Callable[[Any], Any]] = {
    "a frozen weight": lambda model: layer_of(model).input_layernorm.weight.detach().mul_(2),
    "a buffer": lambda model: model.backbone.model.rotary_emb.inv_freq.mul_(2),
}
"""What own code may write that nothing can restore: the run ends."""


def acts_on_model(field: str, act: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the fields of a task whose loss or metric does something to the model, which its callback knows."""
    known: list[Any] = []
    callback = TrainerCallback()
    callback.on_train_begin = lambda *_, model, **__: known.append(model)  # type: ignore[method-assign]
    if field == "compute_metrics":
        return evaluated(callbacks=[callback], compute_metrics=lambda _: (act(known[0]), {"own": 1.0})[1])
    own = lambda outputs: (act(known[0]) if outputs.step == 2 else None, mean_loss(outputs))[1]  # noqa: E731
    return {"callbacks": [callback], "objective": own}


EVENTS = "train_begin epoch_begin step_begin step_end epoch_end log evaluate".split()
CALLBACKS = [
    *(
        Attack(
            f"a callback that leaves {name} in evaluation",
            "",
            calls("on_step_end", lambda *_, model, act=act, **__: (act(model), None)[1], at=2),
            ends=("succeeded",),
        )
        for name, act in EVALUATING.items()
    ),
    *(
        Attack(f"a {field} that {name}", blame, lambda field=field, act=act: acts_on_model(field, act))
        for field, (name, (act, blame)) in itertools.product(("compute_metrics", "objective"), SHARED.items())
        # The gradients of a step are lost with the memory of the weights, which ends the run.
        if field == "compute_metrics" or name != "halves a layer"
    ),
    Attack(
        "a callback that gives its optimizer weights of another task",
        "optimizer must hold the weights of its task only",
        calls(
            "on_step_end",
            lambda *_, optimizer, model, **__: optimizer.add_param_group(
                {"params": list(model.task_parameters(OTHERS[0]).values())}
            ),
            at=2,
        ),
    ),
    *(
        Attack(f"a callback that {name} in on_{event}", f"callback.*on_{event}.*{blame}", made)
        for event, (name, (act, blame)) in itertools.product(("step_end", "step_begin", "evaluate"), SHARED.items())
        for made in [calls(f"on_{event}", lambda *_, model, act=act, **__: (act(model), None)[1], at=2)]
    ),
    *(
        Attack(f"a callback that raises in on_{event}", f"callback.*on_{event}.*ValueError: boom", fields)
        for event in EVENTS
        for fields in [calls(f"on_{event}", raises(boom(ValueError)))]
    ),
    Attack(
        "a callback that raises in on_save",
        "callback.*on_save.*ValueError: boom",
        calls("on_save", raises(boom(ValueError))),
        arguments={"save_strategy": "steps", "save_steps": 2},
    ),
    *(
        Attack(f"a callback that raises {name}", f"callback.*{blame}", calls("on_step_end", act, at=2))
        for name, (act, blame) in ERRORS.items()
        if name != "ValueError"
    ),
    Attack("a callback that exits in on_train_begin", "SystemExit", calls("on_train_begin", raises(SystemExit))),
    Attack("a callback that exits in on_evaluate", "SystemExit", calls("on_evaluate", raises(SystemExit))),
    *(
        Attack(
            f"a callback that returns {name}",
            "callback.*it must return the TrainerControl or None, got ",
            calls("on_step_end", lambda *_, v=value, **__: v, at=2),
        )
        for name, value in {"a text": "stop", "a number": 7, "an object": object(), "a type": dict}.items()
    ),
    Attack(
        "a callback that empties its control",
        "callback|control",
        calls("on_step_end", empties_control, at=2),
        ends=("failed", "succeeded"),  # an empty control asks for nothing
    ),
    Attack(
        "a callback that puts None for its log history",
        "log_history|AttributeError|callback",
        calls("on_step_end", sets_state(log_history=None), at=2),
    ),
    Attack(
        "a callback that puts a text for its step",
        "global_step|callback|TypeError",
        calls("on_step_begin", sets_state(global_step="three"), at=2),
        ends=("failed", "succeeded"),  # the step of a task is not read from what its callbacks see
    ),
    Attack(
        "a callback that asks for its own stop with a text",
        "callback",
        calls("on_step_end", lambda args, state, control, **_: vars(control).update(should_training_stop="yes"), at=2),
        ends=FAILED_OR_STOPPED,
    ),
    *(
        Attack(
            f"a callback that sets its rate to {name}",
            "non_finite|lr|rate|callback|TypeError|ValueError",
            calls("on_step_begin", sets_rate(value), at=2),
        )
        for name, value in {"NaN": math.nan, "a text": "fast", "None": None}.items()
    ),
    Attack(
        "a callback that raises, with a log handler that exits",
        "ValueError: boom",
        calls("on_step_end", lambda *_, **__: (logging.getLogger().addHandler(HANDLER), raises(boom(ValueError))())),
        cleanup=lambda: logging.getLogger().removeHandler(HANDLER),
    ),
    Attack(
        "a callback that takes the groups out of its optimizer",
        "callback|optimizer|schedule|non_finite",
        calls("on_step_begin", lambda *_, optimizer, **__: optimizer.param_groups.clear(), at=2),
    ),
]


# ------------------------------------------------------------------------ losses of a task's own


WEIGHT = torch.nn.Parameter(torch.ones(2))
"""A tensor that needs a gradient, and is none of the outputs."""


def mean_loss(outputs: Any) -> torch.Tensor:
    """Return the mean negative log-likelihood, which is what the task is trained towards by default."""
    return outputs.mean_over_tokens(outputs.nll_M)


def loss(act: Callable[[Any], Any], *, at: int = 2) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose loss is a function of its own, sound up to a step."""
    return lambda: {"objective": lambda outputs: act(outputs) if outputs.step >= at else mean_loss(outputs)}


class BadBackward(torch.autograd.Function):
    """A sum whose backward pass does what an attack makes of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, act: Callable[[], Any]) -> torch.Tensor:
        """Return the sum."""
        ctx.act = act
        return x.sum()

    @staticmethod
    def backward(ctx: Any, *d_loss: torch.Tensor) -> Any:
        """Return what the attack gives."""
        return ctx.act(), None


def goes_back_itself(outputs: Any) -> torch.Tensor:
    """Call `backward`, and return what it was called on."""
    found = mean_loss(outputs)
    found.backward()
    return found


def writes_in_place(outputs: Any) -> torch.Tensor:
    """Fill what it was given with NaN, where nothing records it."""
    with torch.no_grad():
        outputs.nll_M.fill_(math.nan)
    return mean_loss(outputs)


def hooked(outputs: Any) -> torch.Tensor:
    """Leave a hook that raises in the backward pass."""
    outputs.nll_M.register_hook(raises(boom(OwnError)))
    return mean_loss(outputs)


def changes_given(act: Callable[[torch.Tensor], Any]) -> Callable[[Any], torch.Tensor]:
    """Return a loss that changes the memory of its inputs, and otherwise works."""

    def spoil(outputs: Any) -> torch.Tensor:
        found = mean_loss(outputs)
        act(outputs.nll_M)
        return found + 0 * outputs.nll_M.detach().sum()

    return spoil


def becomes_another(nll_M: torch.Tensor) -> None:
    """Make it a tensor of another length."""
    nll_M.data = torch.zeros(3)


def becomes_longer(nll_M: torch.Tensor) -> None:
    """Make it a tensor of more elements, in its own memory."""
    with torch.no_grad():
        nll_M.detach().resize_(9999).fill_(math.nan)


def points_elsewhere(nll_M: torch.Tensor) -> None:
    """Give it the memory of another tensor."""
    with torch.no_grad():
        nll_M.set_(torch.zeros(0).untyped_storage())


CHANGED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "frees its memory": (lambda nll_M: nll_M.untyped_storage().resize_(0), "objective: RuntimeError: .*resize"),
    "makes it longer": (becomes_longer, "objective: RuntimeError: .*resize"),
    "makes it another": (becomes_another, "objective: .*shape"),
    "points it elsewhere": (points_elsewhere, "objective"),
    "frees its graph": (lambda nll_M: torch.autograd.grad(nll_M.exp().sum(), nll_M), ""),
    "stops its gradient": (lambda nll_M: nll_M.requires_grad_(False), ""),
}
"""What a loss may do to its inputs, and the reason that the task must give; none if it harms no task."""


def spoils_batch(outputs: Any) -> torch.Tensor:
    """Overwrite all other inputs: the micro-batch, columns and values of rows."""
    found, batch = mean_loss(outputs), outputs.batch
    for given in (batch.input_ids, batch.labels, batch.target_rows, batch.position_ids, batch.token_places):
        given.zero_()
    return found


def frees_graph(outputs: Any) -> torch.Tensor:
    """Take the gradient of its loss, which frees the graph of it, and return that loss."""
    found = (outputs.nll_M**2).sum()
    torch.autograd.grad(found, outputs.nll_M)
    return found


class EverySecond:
    """A loss that fails every second time that it is asked for, which is in evaluations."""

    def __init__(self) -> None:
        """Count the calls."""
        self.count = 0

    def __call__(self, outputs: Any) -> torch.Tensor:
        """Return the mean, or raise."""
        self.count += 1
        if self.count % 2 == 0:
            raise OwnError("boom")
        return mean_loss(outputs)


LAST_FORWARD = 7
"""Number of the pass that looks at what the last of six updates has left."""


class FailsAtLast(EverySecond):
    """A loss that fails when the last update is looked at."""

    def __call__(self, outputs: Any) -> torch.Tensor:
        """Return the mean, or raise."""
        self.count += 1
        if self.count == LAST_FORWARD:
            raise OwnError("boom")
        return mean_loss(outputs)


RETURNED: dict[str, Callable[[Any], Any]] = {
    "None": lambda outputs: None,
    "a text": lambda outputs: "low",
    "a term too many": lambda outputs: torch.cat([outputs.nll_M, outputs.nll_M[:1]]),
    "a column": lambda outputs: outputs.nll_M[:, None],
    "an integer": lambda outputs: torch.tensor(3),
    "a complex number": lambda outputs: mean_loss(outputs) * 1j,
    "a tensor of no device": lambda outputs: torch.zeros((), device="meta"),
}

OBJECTIVES = [
    *(Attack(f"a loss that raises {name}", f"objective:.*{blame}", loss(act)) for name, (act, blame) in ERRORS.items()),
    Attack("a loss that raises GeneratorExit", "GeneratorExit", loss(raises(boom(GeneratorExit)))),
    *(Attack(f"a loss that returns {name}", "objective", loss(act)) for name, act in RETURNED.items()),
    *(
        Attack(f"a loss {name}", f"objective: DataError: the objective must {blame}", loss(act))
        for name, act, blame in (
            ("of a weight", lambda _: WEIGHT.square().sum(), "be computed from its outputs alone.*shape .2."),
            ("that is a weight", lambda _: WEIGHT[0], "be computed from its outputs alone"),
            ("with a penalty", lambda outputs: mean_loss(outputs) + WEIGHT.sum(), "be computed from its outputs alone"),
            ("without a gradient", lambda outputs: mean_loss(outputs).detach(), "depend on outputs.nll_M"),
        )
    ),
    Attack("a loss of NaN", "non_finite", loss(lambda outputs: mean_loss(outputs) * math.nan)),
    Attack("a loss beyond fp32", "non_finite", loss(lambda outputs: mean_loss(outputs).double() * 1e300)),
    Attack("a gradient of NaN", "non_finite", loss(lambda outputs: torch.sqrt(0 * outputs.nll_M).sum())),
    Attack("a loss that goes back itself", "objective.*backward", loss(goes_back_itself)),
    *(
        Attack(
            f"a loss that {name}", blame, loss(changes_given(act)), ends=FAILED if blame else ("succeeded", "failed")
        )
        for name, (act, blame) in CHANGED.items()
    ),
    Attack("a loss that writes in place", "non_finite", loss(writes_in_place)),
    Attack("a loss that takes its gradient itself", "objective: .*second time", loss(frees_graph)),
    Attack("a loss that writes over the batch", "", loss(spoils_batch), ends=("succeeded", "failed")),
    Attack("a loss with a hook that raises", "objective.*OwnError: boom", loss(hooked)),
    Attack(
        "a loss whose backward exits",
        "SystemExit",
        loss(lambda outputs: BadBackward.apply(outputs.nll_M, raises(SystemExit))),
    ),
    Attack(
        "a loss with gradients of another shape",
        "objective.*shape",
        loss(lambda outputs: BadBackward.apply(outputs.nll_M, lambda: torch.ones(3))),
    ),
    Attack(
        "a loss that spoils its totals",
        "non_finite",
        loss(lambda outputs: (outputs.totals.update(num_target_tokens=math.nan), mean_loss(outputs))[1]),
    ),
    Attack(
        "a loss that fails where it is evaluated",
        "evaluation failed: objective: OwnError: boom",
        lambda: evaluated(objective=EverySecond()),
    ),
    Attack("a loss that fails behind the last step", "objective: OwnError: boom", lambda: {"objective": FailsAtLast()}),
]


# ------------------------------------------------------------------------ settings of the process

KEPT: list[Any] = []
"""Contexts that a task's code has entered; kept, so that garbage collection does not exit them."""


def enters(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return what enters a block and never leaves it."""

    def enter() -> None:
        KEPT.append(make())
        KEPT[-1].__enter__()

    return enter


class BadFunctions(TorchFunctionMode):
    """A mode in which no function of torch works."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise OwnError("boom")


class BadOperations(TorchDispatchMode):
    """A mode in which no operation of torch works."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Fail."""
        raise OwnError("boom")


def rings(number: int, timer: int) -> Callable[[], Any]:
    """Return a function that raises after a delay, wherever the process is by then."""

    def set_timer() -> None:
        signal.signal(number, raises(boom(OwnError)))
        signal.setitimer(timer, 0.01, 0.01)

    return set_timer


def sets(module: Any, name: str, value: Any) -> Callable[[], Any]:
    """Return what sets an attribute of a part of torch."""
    return lambda: setattr(module, name, value)


def halves(tensor: Any) -> torch.Tensor:
    """Return half of what a step has saved for its backward pass."""
    return tensor / 2 if tensor.is_floating_point() else tensor


SETTINGS: dict[str, Callable[[], Any]] = {
    "gradients off": lambda: torch.set_grad_enabled(False),
    "a dtype of fp64": lambda: torch.set_default_dtype(torch.float64),
    "another device": lambda: torch.set_default_device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "products of less precision": lambda: torch.set_float32_matmul_precision("medium"),
    "more threads": lambda: torch.set_num_threads(3),
    "another folder": lambda: os.chdir("/"),
    "another seed": lambda: set_seed(0),
    "warnings as errors": lambda: warnings.simplefilter("error"),
    "no output": lambda: vars(sys).update(stdout=object(), stderr=object()),
    "inference": enters(torch.inference_mode),
    "all products in bf16": sets(torch.backends, "fp32_precision", "bf16"),
    "products of oneDNN in bf16": sets(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "products in tf32 by its old name": sets(torch.backends.cuda.matmul, "allow_tf32", True),
    "no attention": lambda: [
        turn(False)
        for turn in (
            torch.backends.cuda.enable_flash_sdp,
            torch.backends.cuda.enable_mem_efficient_sdp,
            torch.backends.cuda.enable_math_sdp,
            torch.backends.cuda.enable_cudnn_sdp,
        )
    ],
    "no oneDNN": lambda: torch._C._set_mkldnn_enabled(False),
    "hooks of saved tensors": enters(lambda: torch.autograd.graph.saved_tensors_hooks(lambda one: one, halves)),
    "no hooks of saved tensors": enters(lambda: torch.autograd.graph.disable_saved_tensors_hooks("boom")),
    "a mode of functions": enters(BadFunctions),
    "a mode of operations": enters(BadOperations),
    "a device by a block": enters(lambda: torch.device("meta")),
    "anomalies sought": lambda: torch.autograd.set_detect_anomaly(True),
    "denormals flushed": lambda: torch.set_flush_denormal(True),
    "a timer": rings(signal.SIGALRM, signal.ITIMER_REAL),
    "a timer of processor time": rings(signal.SIGPROF, signal.ITIMER_PROF),
    "a handler of SIGTERM": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
}
"""Settings that a task's code may leave in the process, which would change all tasks or end the run."""


def left_by_a_callback(act: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose callback changes the process."""
    return calls("on_step_end", lambda *args, **kwargs: (act(), None)[1], at=2)


def left_by_a_metric(act: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose metric changes the process."""
    return metric(lambda found: (act(), {"own": 1.0})[1])


def left_by_a_loss(act: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose loss changes the process."""
    return loss(lambda outputs: (act(), mean_loss(outputs))[1])


LEAVING = {"a callback": left_by_a_callback, "a metric": left_by_a_metric, "a loss": left_by_a_loss}
LEFT_BEHIND = [
    Attack(f"{what} that leaves {name}", "", LEAVING[what](act), ends=("succeeded", "failed"), cleanup=KEPT.clear)
    # In this order every third one has each setting once, and code of each kind.
    for turn in range(3)
    for number, (name, act) in enumerate(SETTINGS.items())
    for what in [list(LEAVING)[(number + 2 * turn) % 3]]
]


# ------------------------------------------------------------------------ adapters, losses and rows of every kind

ANSWERS = [{"prompt": "a b c d e f g h", "chosen": "good a b", "rejected": "bad c"}] * 6
VERDICTS = [{"prompt": "a b c", "completion": "d e f", "label": bool(number % 2)} for number in range(6)]
ROLLOUTS = [{**one, "advantages": 0.5, "old_logprobs": [-1.0] * LENGTH} for one in rows(1)]
ALIKE = [{"input_ids": [*range(1, 12), *one["input_ids"][11:]]} for one in rows(1)]
_NEEDS_MORE = ("ADAMSS", "TRAINABLE_TOKENS", "OSF")
"""Types whose cases need another library, or a larger backbone."""

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        name: lambda case=case: {"peft_config": case.make(0)}
        for name, case in CASES_BY_NAME.items()
        if name not in _NEEDS_MORE
    },
    **{f"prompts ({form})": lambda form=form: {"peft_config": config_of(form)} for form in PROMPTS},
    "OSF": lambda: {"peft_config": replace(CASES_BY_NAME["OSF"].make(0), effective_rank=8)},
    "rows that begin alike": lambda: {"train_dataset": ALIKE},
    "dpo": lambda: {"train_dataset": ANSWERS, "objective": "dpo"},
    "orpo": lambda: {"train_dataset": ANSWERS, "objective": "orpo"},
    "kto": lambda: {"train_dataset": VERDICTS, "objective": "kto"},
    "policy": lambda: {"train_dataset": ROLLOUTS, "objective": "policy"},
    "noise on embeddings": lambda: {"neftune_noise_alpha": 5.0},
    "smoothed labels": lambda: {"label_smoothing_factor": 0.1},
    "prompts with noise": lambda: {"peft_config": config_of("prompt"), "neftune_noise_alpha": 5.0},
}
"""Fields of tasks of every type of adapter, and of losses and rows that have passes of their own."""

DIVERGED = [
    Attack(f"{kind} with weights of {value}", "non_finite", made, at_begin={3: weights_become(value)})
    for kind, made in KINDS.items()
    for value in (math.nan, -math.inf)
]


# ------------------------------------------------------------------------ streams and rows


class Stream:
    """Rows that are read as they come: sound ones, and from a row on what the attack makes of them.

    Args:
        at: number of the row from which on `act` gives the rows.
        act: called for each row; returns its replacement, or raises.
    """

    def __init__(self, at: int, act: Callable[[], Any]) -> None:
        """Read nothing yet."""
        self.at, self.act = at, act

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows."""
        for number, row in enumerate(rows(1, 1000)):
            yield row if number < self.at else self.act()


class EndsAtOnce:
    """A stream without rows."""

    def __iter__(self) -> Iterator[Any]:
        """Yield nothing."""
        return iter(())


class NoIterator:
    """A stream whose second iterator is not an iterator."""

    def __init__(self) -> None:
        """Count the iterators."""
        self.count = 0

    def __iter__(self) -> Any:
        """Return an iterator of four rows, then something else."""
        self.count += 1
        return iter(rows(1, 4)) if self.count <= 2 else 5


class SpoiltEpoch(Stream):
    """A short stream that fails when its second epoch is set."""

    def set_epoch(self, epoch: int) -> None:
        """Fail from epoch 1 on."""
        if epoch:
            raise OwnError("boom")

    def __iter__(self) -> Iterator[Any]:
        """Yield four rows."""
        return iter(rows(1, 4))


def stream(at: int, act: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task that reads a stream."""
    return lambda: {"train_dataset": Stream(at, act)}


def row(**columns: Any) -> Callable[[], Any]:
    """Return what makes one row."""
    return lambda: columns


ROWS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a number": lambda: 5,
    "a text": lambda: "row",
    "a list": lambda: [1, 2, 3],
    "no column": row(),
    "another column": row(text="hello"),
    "ids of None": row(input_ids=None),
    "ids without any": row(input_ids=[]),
    "ids of text": row(input_ids=["a"] * LENGTH),
    "ids of fractions": row(input_ids=[0.5] * LENGTH),
    "ids of NaN": row(input_ids=[math.nan] * LENGTH),
    "nested ids": row(input_ids=[[1, 2], [3]]),
    "an id beyond the vocabulary": row(input_ids=[VOCABULARY] * LENGTH),
    "a negative id": row(input_ids=[-1] * LENGTH),
    "an id of 2**70": row(input_ids=[2**70] * LENGTH),
    "labels of another length": row(input_ids=[1] * LENGTH, labels=[1]),
}

STREAMS = [
    *(Attack(f"a stream that raises {name} in row 5", blame, stream(5, act)) for name, (act, blame) in ERRORS.items()),
    *(
        Attack(f"a stream that raises {name} in its first row", "boom", stream(0, ERRORS[name][0]), may_be_refused=True)
        for name in ("ValueError", "OSError", "KeyError")
    ),
    *(
        Attack(f"a stream with a row of {name}", "train_dataset|row", stream(5, act), ends=FAILED)
        for name, act in ROWS.items()
    ),
    Attack(
        "a stream without rows", "train_dataset|stream", lambda: {"train_dataset": EndsAtOnce()}, may_be_refused=True
    ),
    Attack("a stream whose iterator is none", "TypeError|iterable", lambda: {"train_dataset": NoIterator()}),
    Attack(
        "a stream that fails in set_epoch", "OwnError: boom", lambda: {"train_dataset": SpoiltEpoch(0, lambda: None)}
    ),
]


def blocked(name: str, at: int) -> Attack:
    """Return a stream that waits for ever at a row."""
    event = threading.Event()

    def settings() -> dict[str, Any]:
        event.clear()
        return {"train_dataset": Stream(at, event.wait), "data_timeout_s": 0.3}

    return Attack(name, "data_timeout_s|0\\.3 s", settings, cleanup=event.set, may_be_refused=at == 0)


BLOCKED = [
    blocked("a stream that blocks at row 5", 5),
    blocked("a stream that blocks at its first row", 0),
]


class Rows:
    """Rows that are read by number; some fail.

    Args:
        act: called for the fourth row.
        count: says how many rows there are.
    """

    def __init__(self, act: Callable[[], Any], count: Callable[[], Any] = lambda: 6) -> None:
        """Read nothing yet."""
        self.act, self.count = act, count

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.count()

    def __getitem__(self, number: int) -> Any:
        """Return a row."""
        if number >= 6:
            raise IndexError(number)
        return self.act() if number == 3 else rows(1)[number]


def broken_rows(field_name: str, act: Callable[..., Any]) -> Callable[[], dict[str, Any]]:
    """Return the fields of a task whose rows, read by number, are spoilt."""
    return lambda: {**evaluated(), field_name: Rows(act)}


CONVERSATION = [{"messages": [{"role": "user", "content": "a b c"}, {"role": "assistant", "content": "good"}]}] * 4
TEMPLATES = {
    "raises": "{{ raise_exception('boom') }}",
    "divides by zero": "{{ 1 // 0 }}",
    "calls what there is not": "{{ nothing_here() }}",
    "is cut off": "{% for m in messages %}",
    "takes what there is not": "{{ messages[0]['no such key'].upper() }}",
    "gives nothing": "",
    "looks into classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}

ARRIVALS = [
    *(
        Attack(f"{split} that raises {name}", blame, broken_rows(split, act), may_be_refused=True)
        for split in ("train_dataset", "eval_dataset")
        for name, (act, blame) in ERRORS.items()
        if name not in ("SystemExit", "KeyboardInterrupt", "an own BaseException", "StopIteration")
    ),
    *(
        Attack(f"{split} with a row of {name}", split, broken_rows(split, act), may_be_refused=True)
        for split in ("train_dataset", "eval_dataset")
        for name, act in ROWS.items()
    ),
    Attack(
        "rows whose length raises",
        "train_dataset|OwnError",
        lambda: {"train_dataset": Rows(lambda: rows(1)[3], raises(boom(OwnError)))},
        may_be_refused=True,
    ),
    *(
        Attack(
            f"a chat template that {name}",
            "train_dataset|chat_template",
            lambda template=template: {"train_dataset": CONVERSATION, "chat_template": template},
            may_be_refused=True,
        )
        for name, template in TEMPLATES.items()
    ),
    *(
        Attack(
            f"a stream whose chat template {name}",
            "train_dataset|chat_template",
            lambda template=template: {"train_dataset": Conversations(), "chat_template": template},
            may_be_refused=True,
        )
        for name, template in TEMPLATES.items()
    ),
]
"""What is read when a task is registered; most of it comes while the others train."""


class Conversations:
    """A stream of conversations."""

    def __iter__(self) -> Iterator[Any]:
        """Yield one conversation again and again."""
        return iter(CONVERSATION * 50)
