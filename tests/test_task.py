"""`Task` by itself: every fault of a construction named at once, unsafe names refused, and no other exception ever."""

from __future__ import annotations

import inspect
import math
import pydoc
import re
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

from peft_mux.arguments import SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.task import TASK_FIELDS, EarlyStopping, Task, resolve, task_arguments

ROWS = [{"input_ids": [1, 2, 3]}]
CONFIG = LoraConfig(r=4)


def task(**settings: Any) -> Task:
    return Task(**{"name": "own", "peft_config": CONFIG, "train_dataset": ROWS, **settings})


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        task(**settings)
    return str(caught.value)


def refusal_of_arguments(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        run_arguments(**settings)
    return str(caught.value)


# ---------------------------------------------------------------------- names


def test_reserved_names_and_windows_devices_are_refused_whatever_their_case() -> None:
    for name in ("con", "PRN", "Aux", "COM1", "LPT0", "run", "State", "METRICS", "tmp", "plan"):
        assert re.search(rf"reserved.*got {name!r}", refusal(name=name))
    for name in ("a", "0", "A-b_C", "a" * 64, "sst2", "con1", "communication", "com10", "runs"):
        assert task(name=name).name == name


# -------------------------------------------------------------------- numbers

BAD_NUMBERS: dict[str, list[Any]] = {
    "train_batch_size": [0, -1, 1.5, True, "4", math.nan, 10**9],
    "learning_rate": [0.0, -1e-3, math.nan, math.inf, "1e-3", False],
    "num_train_epochs": [0, -1.0, math.nan, math.inf, 1e308],
    "max_steps": [0, -2, 1.5, True, "10", math.nan, 10**12],
    "weight_decay": [-0.1, math.nan, math.inf],
    "warmup_steps": [-1, math.nan, 1e300],
    "max_grad_norm": [-1.0, math.nan, math.inf],
    "adam_beta1": [1.0, -0.1, math.nan],
    "adam_beta2": [1.0, 2],
    "adam_epsilon": [-1e-8, math.nan],
    "seed": [-1, 2**63, 1.0, True],
    "max_length": [1, 0, -5, 8.0],
    "num_labels": [0, -1, 10**9],
    "eval_steps": [-1, 1.5, "all"],
    "save_steps": [-1, 1.5],
    "priority": [0.5, "high", True],
    "neftune_noise_alpha": [-1.0, math.nan, "5", True],
    "data_timeout_s": [0, -1.0, math.nan, math.inf, "60", True],
}


@pytest.mark.parametrize("field", BAD_NUMBERS)
def test_numbers_out_of_range_are_refused_by_task_and_arguments_with_what_came_and_what_is_allowed(field: str) -> None:
    for value in BAD_NUMBERS[field]:
        message = refusal(**{field: value})
        assert message.startswith(f"tasks.own.{field} must be ")
        assert message.endswith(f", got {value!r}.")
        assert len(message.splitlines()) == 1, "one fault, one line"
        if field in SETTABLE_FIELDS:
            message = refusal_of_arguments(**{field: value})
            assert f"args.{field} must be " in message
            assert f", got {value!r}." in message


def test_least_allowed_numbers_are_accepted() -> None:
    zeros = "weight_decay warmup_steps max_grad_norm adam_beta1 adam_epsilon seed eval_steps save_steps".split()
    least = {**dict.fromkeys(zeros, 0), **dict.fromkeys(("train_batch_size", "max_steps", "num_labels"), 1)}
    least |= {"learning_rate": 1e-30, "num_train_epochs": 0.01, "max_length": 2, "priority": -5}
    made = task(**least)
    assert {name: getattr(made, name) for name in least} == least
    assert task(max_steps=-1).max_steps == -1


def test_all_faults_of_one_construction_are_named_at_once() -> None:
    faults = {"train_batch_size": 0, "learning_rate": math.nan, "optim": "adamw_torhc", "loss_type": "dpo"}
    faults |= {"compute_metrics": "accuracy", "train_dataset": [], "peft_config": {"r": 8}, "early_stopping": 3}
    first, *lines = refusal(**faults).splitlines()
    assert first == f"{len(lines)} things are wrong:"
    for number, line in enumerate(lines, start=1):
        assert re.match(rf"  {number}\. tasks\.own\..* must be .*, got ", line)
    assert {f"tasks.own.{name}" for name in faults} <= {line.split(" must be ")[0].split(". ", 1)[-1] for line in lines}


# -------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [
        ("optim", "adamw_torhc", "adamw_torch"),
        ("lr_scheduler_type", "cosin", "cosine"),
        ("loss_type", "nl", "nll"),
        ("objective", "sff", "sft"),
        ("overlong_policy", "trunkate", "truncate"),
        ("planner", "sequental", "sequential"),
        ("save_strategy", "step", "steps"),
    ],
)
def test_a_misspelt_choice_is_refused_with_the_nearest_one(field: str, wrong: str, right: str) -> None:
    refusals = [refusal(**{field: wrong})] if field in TASK_FIELDS else []
    refusals += [refusal_of_arguments(**{field: wrong})] if field in SETTABLE_FIELDS else []
    for message in refusals:
        assert re.match(rf"(tasks\.own|args)\.{field} must be one of .*, got {wrong!r}", message)
        assert message.endswith(f'Did you mean "{right}"?')


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("optim", name) for name in ("lomo", "galore_adamw", "apollo_adamw", "galore_adamw_layerwise")),
        ("lr_scheduler_type", "greedy"),
    ],
)
def test_what_cannot_be_held_per_task_or_depends_on_more_than_the_step_is_refused(field: str, value: str) -> None:
    assert f"got {value!r}" in refusal(**{field: value})


# ------------------------------------------------------------------- datasets


@pytest.mark.parametrize("field", ["train_dataset", "eval_dataset"])
@pytest.mark.parametrize(
    ("value", "shown", "fix"),
    [
        ([], "an empty dataset", ""),
        ("", "str", ""),
        (5, "int", ""),
        (np.array(5), "array(5)", ""),
        ({}, "dict", "Pick one split"),
        ({1, 2}, "set", "such as a list"),
        ({}.keys(), "dict_keys", "such as a list"),
        (iter(ROWS), "list_iterator", "can be read only once"),
    ],
)
def test_what_is_no_dataset_is_refused_by_field(field: str, value: Any, shown: str, fix: str) -> None:
    message = refusal(**{field: value})
    assert f"tasks.own.{field} must be a datasets.Dataset" in message
    assert f", got {shown}" in message
    assert fix in message


def test_a_stream_needs_a_number_of_steps() -> None:
    class Stream:
        def __iter__(self) -> Any:
            return iter(ROWS)

    assert refusal(train_dataset=Stream()).startswith("tasks.own.max_steps must be a number of steps")
    assert ", got None" in refusal(train_dataset=Stream())
    assert task(train_dataset=Stream(), max_steps=2).max_steps == 2
    message = refusal(train_dataset=Stream(), max_steps=2, shuffle="group_by_length")
    assert message.startswith("tasks.own.shuffle must be True or False for a stream")
    for settings in (
        {"train_dataset": Stream(), "max_steps": 2},
        {"objective": "dpo", "train_dataset": [{"chosen": "a", "rejected": "b"}]},
    ):
        assert refusal(packing=True, **settings).startswith("tasks.own.packing must be False for a stream and for")


# --------------------------------------------------------------- combinations


def test_early_stopping_needs_held_out_rows_and_a_metric_that_will_be_there() -> None:
    f1, by_loss = EarlyStopping(metric="eval_f1"), EarlyStopping(metric="loss")
    said = "tasks.own.eval_dataset must be held-out rows, because early_stopping is set, got None"
    assert said in refusal(early_stopping=f1)
    assert "metric must be eval_a_loss or eval_a_perplexity or eval_b_loss or" in refusal(
        early_stopping=EarlyStopping(), eval_dataset={"a": ROWS, "b": ROWS}
    )
    assert "eval_dataset.b must be a datasets.Dataset" in refusal(eval_dataset={"a": ROWS, "b": []})
    assert "eval_dataset must be named by printable words without spaces, got 'a b'" in refusal(
        eval_dataset={"a b": ROWS}
    )
    message = refusal(early_stopping=f1, eval_dataset=ROWS)
    assert "tasks.own.early_stopping.metric must be eval_loss or eval_perplexity if compute_metrics is not" in message
    assert "got 'eval_f1'" in message
    assert "Set compute_metrics so that it returns this metric." in message
    message = refusal(early_stopping=by_loss, eval_dataset=ROWS, metric_for_best_model="f1")
    assert "metric_for_best_model must be 'loss', the metric of early_stopping, or None, got 'f1'" in message
    task(early_stopping=f1, eval_dataset=ROWS, compute_metrics=lambda _: {"f1": 1.0})
    assert task(early_stopping=by_loss, eval_dataset=ROWS, metric_for_best_model="loss").early_stopping == by_loss


def test_a_task_without_held_out_rows_that_asks_to_be_evaluated_is_refused() -> None:
    for every in (5, 0.5, 3.0):
        message = refusal(eval_steps=every)
        assert message == "tasks.own.eval_dataset must be held-out rows, because eval_steps is set, got None."
    assert "tasks.own.compute_metrics" in refusal(compute_metrics=lambda _: {})
    assert task(eval_steps=0).eval_steps == 0
    assert task(eval_steps=5, eval_dataset=ROWS).eval_steps == 5


def test_numbers_and_names_of_early_stopping_are_checked() -> None:
    wrong: dict[str, list[Any]] = {"patience": [0, 1.5], "min_delta": [-1, math.nan], "greater_is_better": ["no"]}
    for field, value in [(name, one) for name, values in wrong.items() for one in values]:
        with pytest.raises(ConfigError, match=rf"early_stopping\.{field} .*got "):
            EarlyStopping(**{field: value})
    said = r'early_stopping\.patince must be a setting of this class, got 3.*Did you mean "patience"'
    with pytest.raises(ConfigError, match=said):
        EarlyStopping(patince=3)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="3 things are wrong"):
        EarlyStopping(metric="", patience=0, min_delta=-1)


def test_a_loss_is_made_smaller_and_other_metrics_greater_unless_told() -> None:
    assert not EarlyStopping().maximise
    assert not EarlyStopping(metric="eval_valid_loss").maximise
    assert not EarlyStopping(metric="eval_perplexity").maximise
    assert EarlyStopping(metric="eval_accuracy").maximise
    assert not EarlyStopping(metric="eval_accuracy", greater_is_better=False).maximise
    assert EarlyStopping(metric="eval_loss", greater_is_better=True).maximise


def test_a_task_cannot_be_changed_after_its_checks() -> None:
    with pytest.raises(FrozenInstanceError):
        task().learning_rate = -1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "where", "meant"),
    [
        ("learning_rte", "tasks.own", 'Did you mean "learning_rate"'),
        ("lr", "tasks.own", "Use learning_rate."),
        ("target_modules", "tasks.own", "Use peft_config=LoraConfig(target_modules="),
        ("max_seq_length", "tasks.own", "Use max_length"),
        ("per_device_train_batch_size", "tasks.own", "Use train_batch_size"),
        ("bf16", "tasks.own", "Use MultiTaskTrainingArguments"),
        ("tokenizer", "tasks.own", "Use processing_class of the trainer"),
        ("dataset", "tasks.own", "Use train_dataset"),
        ("zzz", "tasks.own", "Take it out."),
        ("nam", "task", ""),
    ],
)
def test_an_unknown_field_is_refused_with_what_was_meant(field: str, where: str, meant: str) -> None:
    message = refusal(**{field: 1, **({"name": "a/b"} if where == "task" else {})})
    assert f"{where}.{field} must be a setting of this class, got 1" in message
    assert meant in message


def test_unknown_and_missing_fields_and_settings_without_names_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Task(nam="own", train_dataset=ROWS, lr=1.0)  # type: ignore[call-arg]
    assert [fault.where for fault in caught.value.faults] == ["task.nam", "task.lr", "task.name", "task.peft_config"]
    said = r"task must be created from settings by name, got 'own' without a name.*Task\(name="
    with pytest.raises(ConfigError, match=said):
        Task("own", LoraConfig(), ROWS)  # type: ignore[misc]


# ---------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 10**400) for name in ("learning_rate", "warmup_steps", "max_grad_norm")),
        *((name, np.zeros(2)) for name in ("optim", "lr_scheduler_type", "objective", "loss_type", "objective_args")),
        ("train_dataset", None),
        ("priority", None),
        ("callbacks", 5),
        ("callbacks", [5]),
        ("shuffle", "no"),
        ("assistant_only_loss", "false"),
        ("completion_only_loss", "no"),
        ("chat_template", 5),
        ("lr_scheduler_kwargs", 5),
        ("optim_args", 5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_when_the_task_is_made(field: str, value: Any) -> None:
    assert f"tasks.own.{field}" in refusal(**{field: value})


ANYTHING: list[Any] = [
    *(None, True, 0, -1, 5, 2**40, 10**5000, 2.5, 1e308, math.nan, object(), len),
    *("", "x", "{bad", "a\0b", "x" * 5000, b"x", [], [5], {"a"}, {"a": 1}, {1: 2}),
    *(np.zeros(3), np.int64(4), torch.zeros(3), CONFIG, EarlyStopping(), TrainerCallback(), ROWS),
]


@pytest.mark.parametrize("made", [*TASK_FIELDS, *(f"early_stopping.{item.name}" for item in fields(EarlyStopping))])
def test_any_value_in_any_field_gives_a_task_or_a_config_error(made: str) -> None:
    field, messages = made.removeprefix("early_stopping."), []
    for value in ANYTHING:
        try:
            found = task(**{field: value}) if field == made else EarlyStopping(**{field: value})
        except ConfigError as error:
            messages.append(str(error))
        else:
            assert getattr(found, field) is value
    assert [message for message in messages if " must " not in message or ", got " not in message] == []


def test_a_dataset_whose_length_raises_is_refused_with_what_it_raises() -> None:
    class Broken:
        def __len__(self) -> int:
            raise OSError("the disk of its owner is gone")

        def __getitem__(self, row: int) -> dict[str, str]:
            return {"text": "a row"}

    message = refusal(train_dataset=Broken())
    assert "train_dataset must be a datasets.Dataset or IterableDataset, or a list of dicts, with at least" in message
    assert "OSError: the disk of its owner is gone" in message


# ------------------------------------------------------- its own settings, and those of the run


def run_arguments(**settings: Any) -> MultiTaskTrainingArguments:
    return MultiTaskTrainingArguments(**{"output_dir": "unused", "use_cpu": True, **settings})


def test_a_task_takes_a_copy_of_what_it_does_not_set_from_the_run() -> None:
    args = run_arguments(learning_rate=3e-3, optim="sgd", seed=9, max_length=77, max_steps=5, weight_decay=0.2)
    hyper = resolve(task(learning_rate=1e-4, seed=0, weight_decay=0), args)
    assert (hyper.learning_rate, hyper.seed, hyper.weight_decay) == (1e-4, 0, 0), "a zero of the task is a setting"
    assert (hyper.optim, hyper.max_length, hyper.max_steps) == ("sgd", 77, 5)
    assert (type(hyper.optim), type(hyper.lr_scheduler_type)) == (str, str), "no enumerations"
    own = task_arguments(hyper, args)
    assert (own.learning_rate, own.max_length, own.optim) == (1e-4, 77, "sgd")
    assert isinstance(own, MultiTaskTrainingArguments)
    assert args.learning_rate == 3e-3
    args = run_arguments(per_device_train_batch_size=3, gradient_accumulation_steps=4)
    assert resolve(task(), args).train_batch_size == 12
    assert resolve(task(train_batch_size=5), args).train_batch_size == 5


@pytest.mark.parametrize(
    ("own", "of_run", "steps", "epochs"),
    [
        ({}, {"max_steps": 9}, 9, 3.0),
        ({"num_train_epochs": 2}, {"max_steps": 9}, -1, 2),
        ({"max_steps": 4}, {"max_steps": 9}, 4, 3.0),
        ({"max_steps": 4, "num_train_epochs": 2}, {}, 4, 2),
        ({"max_steps": -1}, {"max_steps": 9}, -1, 3.0),
        ({}, {"num_train_epochs": 1.5}, -1, 1.5),
    ],
)
def test_a_task_that_sets_only_epochs_is_not_held_to_the_steps_of_the_run(
    own: dict[str, Any], of_run: dict[str, Any], steps: int, epochs: float
) -> None:
    hyper = resolve(task(**own), run_arguments(**of_run))
    assert (hyper.max_steps, hyper.num_train_epochs) == (steps, epochs)


@pytest.mark.parametrize(
    ("own", "of_run", "every"),
    [
        ({"eval_dataset": ROWS}, {}, 0),
        ({}, {"eval_strategy": "steps", "eval_steps": 4}, 0),
        ({"eval_dataset": ROWS}, {"eval_strategy": "steps", "eval_steps": 4}, 4),
        ({"eval_dataset": ROWS}, {"eval_strategy": "steps", "logging_steps": 6}, 6),
        ({"eval_dataset": ROWS}, {"eval_strategy": "epoch"}, -1),
        ({"eval_dataset": ROWS, "eval_steps": 2}, {"eval_strategy": "epoch"}, 2),
        ({"eval_dataset": ROWS, "eval_steps": 0}, {"eval_strategy": "epoch"}, 0),
        ({"eval_dataset": ROWS, "early_stopping": EarlyStopping()}, {}, -1),
        ({"eval_dataset": ROWS}, {"load_best_model_at_end": True}, -1),
    ],
)
def test_how_often_a_task_is_evaluated(own: dict[str, Any], of_run: dict[str, Any], every: int) -> None:
    assert resolve(task(**own), run_arguments(**of_run)).eval_steps == every


_KINDS: dict[type, tuple[dict[str, Any], str]] = {
    Task: (
        {"peft_config": LoraConfig(r=4), "name": "own", "train_dataset": ROWS * 1000, "eval_dataset": ROWS, "seed": 3},
        f"Task(name='own', peft_config=LoraConfig(r=4), train_dataset=<list of {1000 * len(ROWS):,}>,\n"
        f"    eval_dataset={ROWS!r}, seed=3)",
    ),
    MultiTaskTrainingArguments: (
        {"output_dir": "x", "max_steps": 3, "hub_token": "secret", "use_cpu": True, "dataloader_pin_memory": False},
        "MultiTaskTrainingArguments(output_dir='x', max_steps=3, hub_token=..., use_cpu=True,\n"
        "    dataloader_pin_memory=False)",
    ),
    EarlyStopping: ({"patience": 2, "metric": "eval_loss"}, "EarlyStopping(patience=2)"),
}


@pytest.mark.parametrize("kind", list(_KINDS), ids=lambda kind: kind.__name__)
def test_signatures_show_all_fields_and_a_repr_those_that_are_set(kind: type) -> None:
    settings, text = _KINDS[kind]
    names = [item.name for item in fields(kind) if item.init]
    assert sorted(inspect.signature(kind).parameters) == sorted(names)
    assert f"{names[0]}: " in pydoc.render_doc(kind).splitlines()[3]
    made = kind(**settings)
    assert repr(made) == str(made) == text
