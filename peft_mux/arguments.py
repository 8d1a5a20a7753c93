"""`MultiTaskTrainingArguments`: the settings of a run and the defaults of its tasks, and the rules for all settings.

Every field of `transformers.TrainingArguments` is one of three kinds. `HONOURED` fields work as in Trainer, `HARMLESS`
fields cannot change a result here, and every other field must keep its default: a different value is refused with a
reason, never accepted and ignored. Values are checked against `_RULES`, `_CHOICES`, or the type of the field.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import json
import math
import os
import re
import reprlib
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import SchedulerType, TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.training_args import OptimizerNames

from peft_mux.errors import ConfigError, Fault, Rule, closest, is_integer, is_real, raise_faults, shown
from peft_mux.rendezvous import meet
from peft_mux.scheduler.names import DISPATCHES, POLICY_NAMES, SCHEDULES

LOGGERS_OF_MANY_RUNS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that can open one run per task (`reporting.trackers`); the others support one run per process."""
MOST_STEPS = 10**9
"""The largest number of steps, and the largest count of any kind, that is accepted: a larger one is a typo."""


# ---------------------------------------------------------------------------------------------------- unknown settings

Value = TypeVar("Value")
Settings = TypeVar("Settings")
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def by_name(table: Mapping[str, Value]) -> dict[str, Value]:
    """Expand a table whose keys list several names into one with an entry per name."""
    return {name: value for names, value in table.items() for name in names.split()}


ADAPTER_NAMES = by_name(
    {
        "r rank lora_r lora_rank": "r",
        "alpha lora_alpha": "lora_alpha",
        "dropout lora_dropout": "lora_dropout",
        "target_modules lora_target_modules": "target_modules",
    }
)
"""Names of an adapter's settings, and the field of `LoraConfig` that is meant."""
RENAMED = by_name(
    {
        # transformers
        "evaluation_strategy": "eval_strategy",
        "no_cuda": "use_cpu",
        "warmup_ratio": "warmup_steps, which is a share of all steps where it is below 1",
        "group_by_length": 'shuffle="group_by_length" of each Task',
        "overwrite_output_dir": "nothing: resume with train(resume_from_checkpoint=True), or use a new folder",
        "save_safetensors": "nothing: all files are safetensors",
        "tokenizer processing_class": "processing_class of the trainer",
        "per_device_train_batch_size gradient_accumulation_steps": (
            "train_batch_size, the sequences of an optimizer step over all processes"
        ),
        # TRL
        "max_seq_length": "max_length",
        "padding_free": "nothing: all sequences are packed, without attention between them",
        "dataset_text_field": 'row_format={"text": "your column"} of each Task',
        "dataset_num_proc": "nothing: rows are tokenised once, in one process",
        "formatting_func": "row_format, or map the rows beforehand",
        "beta": 'objective_args={"beta": ...} of each Task',
        "model_init_kwargs": "model_init_kwargs of the trainer",
        # habit
        "lr": "learning_rate",
        "batch_size": "train_batch_size of each Task, or per_device_train_batch_size of the run",
        "epochs num_epochs": "num_train_epochs",
        "steps": "max_steps",
        "dataset data train_data": "train_dataset of each Task",
        "peft config lora_config adapter": "peft_config of each Task",
    }
)
"""Names from older releases, TRL or common usage, and what to use here."""
_TASK_FIELDS = (
    "name peft_config train_dataset eval_dataset train_batch_size shuffle num_labels compute_metrics callbacks "
    "priority preprocess_logits_for_metrics eval_generate early_stopping objective objective_args loss_type row_format "
    "chat_template completion_only_loss assistant_only_loss packing truncation_mode"
).split()


def belongs(name: str, *, on_task: bool = False) -> str:
    """Return what to use in place of an unknown setting; "" if nothing is known about it.

    Args:
        name: name of the setting.
        on_task: whether it was set on a task rather than on the arguments of a run.
    """
    if on_task and name in ADAPTER_NAMES:
        return f"Use peft_config=LoraConfig({ADAPTER_NAMES[name]}=...)."
    if name in RENAMED:
        return f"Use {RENAMED[name]}."
    if on_task and name in SETTABLE_FIELDS:
        return "Use MultiTaskTrainingArguments: it applies to the whole run."
    if not on_task and name in _TASK_FIELDS:
        return f"Use {name}: it belongs to each Task."
    return ""


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str, needed: Iterable[str] = ()) -> None:
    """Refuse settings that a class does not have, and settings that are missing.

    Args:
        given: the settings by name.
        known: names of all settings of the class.
        where: the class in messages: "args", "tasks.sql".
        needed: names of settings that must be given.

    Raises:
        ConfigError: naming each, and where it belongs or which name is closest.
    """
    known = tuple(known)
    faults = []
    for name in [name for name in given if name not in known]:
        fix = belongs(name, on_task=where != "args") or closest(name, known) or "Take it out."
        faults.append(Fault(f"{where}.{name}", shown(given[name]), "a setting of this class", fix))
    for name in [name for name in needed if name not in given]:
        faults.append(Fault(f"{where}.{name}", "nothing", "set, because it has no default"))
    raise_faults(faults)


def checks_settings(check: Callable[..., None]) -> Callable[[type[Settings]], type[Settings]]:
    """Return a decorator of a dataclass that calls `check` with the arguments of each constructor call first.

    Python's own error would not say what was meant. Unlike a `__new__`, it keeps the signature that `help` and editors
    show.
    """

    def decorate(kind: type[Settings]) -> type[Settings]:
        init = kind.__init__

        @functools.wraps(init)
        def checked_init(self: Any, *args: Any, **settings: Any) -> None:
            check(*args, **settings)
            init(self, *args, **settings)

        kind.__init__ = checked_init  # type: ignore[method-assign]
        return kind

    return decorate


def short_repr(self: Any) -> str:
    """Return a dataclass as a call of its class with the fields that differ from their defaults, on a few lines."""
    parts = []
    for item in fields(self):
        value, is_required = getattr(self, item.name), item.default is item.default_factory is MISSING
        is_unset = not is_required and (
            is_default(self, item.name, type(self))
            if isinstance(self, TrainingArguments)
            else _equals(value, _default(item))
        )
        if item.init and not is_unset and item.name not in ("peft_type", "peft_version"):  # which the class says
            parts.append(f"{item.name}={'...' if item.name.endswith('_token') else _short(value)}")
    text = f"{type(self).__name__}({', '.join(parts)})"
    return textwrap.fill(text, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _short(value: Any) -> str:
    if is_dataclass(type(value)):
        return short_repr(value)
    text = " ".join(_REPR.repr(value).split())
    return text if len(text) <= 60 or not hasattr(value, "__len__") else f"<{type(value).__name__} of {len(value):,}>"


# ----------------------------------------------------------------------------------------------------- rules of values


def is_interval(value: object, minimum: int = 1) -> bool:
    """Whether a value is a number of steps of at least `minimum`, or a share of all steps below 1, as in Trainer."""
    if is_integer(value):
        return is_integer(value, minimum, MOST_STEPS)
    return is_real(value) and (0 < value < 1 or (value == int(value) and is_interval(int(value), minimum)))  # type: ignore[operator, arg-type]


def _integer(minimum: int, maximum: int = MOST_STEPS) -> Rule:
    return Rule(lambda value: is_integer(value, minimum, maximum), f"an integer from {minimum} to {maximum}")


def _number(minimum: float, maximum: float = math.inf) -> Rule:
    allowed = f"a finite number of at least {minimum:g}" if maximum == math.inf else f"a number from 0 to {maximum}"
    return Rule(lambda value: is_real(value) and minimum <= value <= maximum, allowed)


def _interval(minimum: int) -> Rule:
    allowed = f"an integer from {minimum} to {MOST_STEPS}, or a share of all steps above 0 and below 1"
    return Rule(lambda value: is_interval(value, minimum), allowed)


def _optional(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.is_valid(value), f"{rule.allowed}, or None")


NUMBER_RULES: Mapping[str, Rule] = by_name(
    {
        "train_batch_size num_labels": _integer(1, 2**20),
        "learning_rate loraplus_lr_ratio": Rule(lambda value: is_real(value) and value > 0, "a finite number above 0"),
        "num_train_epochs": Rule(
            lambda value: is_real(value) and 0 < value <= MOST_STEPS, f"a number above 0, at most {MOST_STEPS}"
        ),
        "max_steps": Rule(
            lambda value: is_integer(value, 1, MOST_STEPS) or is_integer(value, -1, -1),
            f"an integer from 1 to {MOST_STEPS}, or -1 for num_train_epochs",
        ),
        "weight_decay max_grad_norm adam_epsilon eval_delay router_aux_loss_coef": _number(0),
        "warmup_steps": _number(0, MOST_STEPS),
        "adam_beta1 adam_beta2": Rule(lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)"),
        "seed": Rule(lambda value: is_integer(value, 0, 2**63 - 1), "an integer in [0, 2**63)"),
        "max_length": _integer(2),
        "eval_steps save_steps": _interval(0),
        "data_timeout_s": Rule(
            lambda value: is_real(value) and 0 < value <= 1e6, "a finite number of seconds above 0, at most 1,000,000"
        ),
        "label_smoothing_factor": _number(0, 1),
        "neftune_noise_alpha": _optional(_number(0, MOST_STEPS)),
        "priority": _integer(-MOST_STEPS),
    }
)
"""Rules of the numbers of a task and, where the run has a setting of the same name, of the run's default."""

_TYPES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("True, False", lambda value: isinstance(value, bool)),
    "int": ("an integer", lambda value: is_integer(value, -MOST_STEPS, MOST_STEPS)),
    "float": ("a number", is_real),
    "str": ("a string", lambda value: isinstance(value, str)),
    "dict": ("a dict", lambda value: isinstance(value, dict)),
    "None": ("None", lambda value: value is None),
}


def plain_types(annotation: object) -> tuple[str, ...]:
    """Return the names of the plain types of an annotation such as `str | None`; () if it has any other type."""
    words = [word.strip().removeprefix("<class '").removesuffix("'>") for word in str(annotation).split("|")]
    words = [word.split("[")[0] for word in words]
    return tuple(words) if all(word in _TYPES for word in words) else ()


def type_rule(annotation: object) -> Rule:
    """Return the rule that a value has one of the plain types of an annotation."""
    types = plain_types(annotation)
    assert types, f"{annotation} needs its own rule"
    words = ", ".join(_TYPES[name][0] for name in types).split(", ")
    allowed = " or ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else words[0]
    return Rule(lambda value: any(_TYPES[name][1](value) for name in types), allowed)


def supported_optimizers() -> list[str]:
    """Return the `optim` names of Trainer that support one optimizer per task.

    Excluded are optimizers that step inside the backward pass or layer by layer (LOMO, layer-wise kinds), that project
    modules named for the whole model (GaLore, APOLLO), or that swap weights for evaluation (schedule-free).
    """
    names = [str(option.value) for option in OptimizerNames]
    refused = ("lomo", "galore", "apollo", "layerwise", "schedule_free")
    return [name for name in names if not any(part in name for part in refused)]


def supported_schedules() -> list[str]:
    """Return the `lr_scheduler_type` names of Trainer that depend on the step or on evaluations."""
    return [str(kind.value) for kind in SchedulerType if str(kind.value) != "greedy"]


PLATEAU = str(SchedulerType.REDUCE_ON_PLATEAU.value)
"""The schedule whose learning rates follow a metric of evaluations."""
ELEMENTWISE = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Optimizers that treat all elements in the same way, so it does not matter how weights are cut into tensors."""


def choice_faults(where: str, value: object, options: Iterable[str]) -> list[Fault]:
    """Return a fault if a value, or the value of a transformers enum member, is not one of the given names."""
    value, options = getattr(value, "value", value), list(options)
    if isinstance(value, str) and value in options:
        return []
    return [Fault(where, shown(value), f"one of {', '.join(options)}", closest(value, options))]  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------- the fields of `TrainingArguments`

HONOURED = (
    "output_dir per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate "
    "lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm label_smoothing_factor neftune_noise_alpha seed full_determinism bf16 tf32 use_cpu "
    "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs "
    "logging_strategy logging_steps logging_first_step log_on_each_node log_level log_level_replica disable_tqdm "
    "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir eval_strategy "
    "eval_steps eval_delay eval_on_start load_best_model_at_end metric_for_best_model greater_is_better save_strategy "
    "save_steps save_total_limit resume_from_checkpoint use_liger_kernel liger_kernel_config push_to_hub hub_model_id "
    "hub_strategy hub_token dataloader_drop_last torch_empty_cache_steps per_device_eval_batch_size "
    "hub_private_repo hub_always_push hub_revision local_rank ddp_timeout "
    # Flags for the user's script, which Trainer does not read either.
    "do_train do_eval do_predict"
).split()
"""Inherited fields that work as in Trainer."""
HARMLESS = (
    # Gradients are summed without DistributedDataParallel.
    "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
    # Rows are tokenised before the first step and packed, without a DataLoader; other columns are not read.
    "dataloader_pin_memory dataloader_persistent_workers dataloader_in_order dataloader_num_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context remove_unused_columns length_column_name "
    # Held-out rows are packed too, and predictions go to the CPU after every pass, gathered as objects.
    "eval_accumulation_steps eval_use_gather_object "
    # A task whose loss is not finite ends before it would be logged; memory is always measured, and the states of
    # callbacks are always restored.
    "logging_nan_inf_filter skip_memory_metrics restore_callback_states_from_checkpoint"
).split()
"""Inherited fields that do not affect results here."""
REASONS = by_name(
    {
        "fp16": "each task would need its own loss scaler; use bf16",
        "bf16_full_eval fp16_full_eval": (
            "losses are computed in fp32 or bf16, and evaluations use the dtype of the training"
        ),
        "prediction_loss_only batch_eval_metrics include_for_metrics label_names": (
            "evaluation computes eval_loss, or calls the task's own compute_metrics on all of its rows at once"
        ),
        "ignore_data_skip save_only_model": "resuming is exact, and needs the whole state",
        "torch_compile torch_compile_backend torch_compile_mode": (
            "which rows belong to which task changes in every pass; use_liger_kernel fuses norms, RoPE and MLPs"
        ),
        "fsdp fsdp_config": "adapters of many tasks are laid out by peft_mux; set shard_backbone=True for FSDP2",
        "deepspeed parallelism_config": (
            "adapters of many tasks are laid out by peft_mux; set shard_backbone, or the two parallel sizes"
        ),
        "accelerator_config": "rows are packed and distributed by peft_mux, without accelerate's loaders",
        "average_tokens_across_devices": "every task counts the tokens of its whole global batch, over all processes",
        "include_num_input_tokens_seen": "tokens are counted by task, in metrics.jsonl",
        "train_sampling_strategy": 'set shuffle=False or shuffle="group_by_length" on the Task',
        "auto_find_batch_size": "set max_tokens_per_micro_batch instead",
        "optim_target_modules": "every task trains exactly its own adapter",
        "data_seed": "it has no meaning for many tasks at once: the seed of a Task fixes its order of rows",
    }
)
"""Why fields that users often set must keep their defaults."""


def reason_against(name: str) -> str:
    """Return why a field of `TrainingArguments` must keep its default."""
    return REASONS.get(name, "it has no meaning for many tasks at once, or none yet")


def _default(item: Any) -> Any:
    return item.default if item.default is not MISSING else item.default_factory()


def _equals(value: object, default: object) -> bool:
    # 0 is not a bool: code that reads it later may fail with an unrelated message.
    if isinstance(default, bool) and not isinstance(value, bool):
        return False
    try:
        return bool(value == default)
    except Exception:  # comparing an array, or a user's object, may raise anything
        return False


def is_default(config: TrainingArguments, name: str, kind: type[TrainingArguments] = TrainingArguments) -> bool:
    """Whether a field of complete `TrainingArguments` has its default, in any of the forms that transformers uses.

    Defaults are read from the class `kind`.

    No new arguments are made to compare with: that would reset the state from which other trainers read their devices.
    """
    default, value = _default(kind.__dataclass_fields__[name]), getattr(config, name)
    if isinstance(value, AcceleratorConfig):
        return replace(value, dispatch_batches=None) == AcceleratorConfig()  # TRL sets it for streams
    if value in ([], None, False) and default in ("", "none", [], None, False):
        return True
    return str(getattr(value, "value", value)) == str(getattr(default, "value", default))


def _is_options(value: object) -> bool:
    """Whether a value is a dict, or the JSON text of one, which TrainingArguments accepts for command lines."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return value is None or isinstance(value, dict)


def _is_path(value: object) -> bool:
    """Whether a value is a valid path for the file system; it need not exist."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        return False
    try:
        os.stat(value)
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except ValueError:  # a null character
        return False
    return True


def _is_report(value: object) -> bool:
    """Whether a value names loggers that are installed: Trainer opens them at once."""
    from transformers.integrations import get_available_reporting_integrations

    names = [value] if isinstance(value, str) else value
    known = ("all", "none", *get_available_reporting_integrations())
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) and name in known for name in names)


LIGER_SWITCHES = ("rope", "rms_norm", "swiglu", "geglu", "layer_norm")
"""What `liger_kernel_config` may switch."""


def _is_liger_switch(item: tuple[object, object]) -> bool:
    name, value = item
    return (isinstance(name, str) and name in LIGER_SWITCHES and isinstance(value, bool)) or (
        name in ("cross_entropy", "fused_linear_cross_entropy") and value is False
    )


_COUNT = _integer(1)
_TEXT = Rule(lambda value: value is None or isinstance(value, str), "a string or None")
_OPTIONS = Rule(_is_options, "a dict of options, or None")
_SWITCH_OR_AUTO = Rule(lambda value: isinstance(value, bool) or _equals(value, "auto"), 'True, False or "auto"')
_AUTO_PASS_TOKENS = {"cpu": 4096, "cuda": 16384}
"""More tokens in a pass take as long for each: on a GPU products are at their best rate from 4,096 on."""
_SWITCHES = "share_prefixes use_liger_kernel cuda_graphs"
_IS_FLAG = {"nargs": "?", "const": True}
"""For `HfArgumentParser`: the name of a field without a value stands for `True`, as with fields of the type bool."""
_CHOICES: Mapping[str, Iterable[str]] = by_name(
    {
        "overlong_policy": ("truncate", "drop", "error"),
        "planner": POLICY_NAMES,
        "pipeline_schedule": SCHEDULES,
        "pipeline_flush": ("auto", "every_step"),
        "dispatch": DISPATCHES,
        "measured_times": ("report", "plan"),
        "quarantine_policy": ("quarantine", "stop"),
        "reduce_dtype": ("float32", "bfloat16"),
        "eval_strategy logging_strategy": ("steps", "epoch", "no"),
        "save_strategy": ("steps", "epoch", "no", "best"),
        "hub_strategy": ("end", "every_save"),
        "optim": supported_optimizers(),
        "lr_scheduler_type": supported_schedules(),
        "log_level log_level_replica": ("detail", "debug", "info", "warning", "error", "critical", "passive"),
    }
)
_RULES: Mapping[str, Rule] = {
    **NUMBER_RULES,
    **by_name(
        {
            # Trainer seeds NumPy with it too; the seed of a task may be greater.
            "seed": Rule(lambda value: is_integer(value, 0, 2**32 - 1), "an integer in [0, 2**32)"),
            "logging_steps save_steps": _interval(1),
            "eval_steps": _optional(_interval(1)),
            "per_device_train_batch_size gradient_accumulation_steps min_chunk_size": _COUNT,
            "tensor_parallel_size pipeline_parallel_size replan_steps": _COUNT,
            "chunk_size save_total_limit num_micro_batches torch_empty_cache_steps": _optional(_COUNT),
            "per_device_eval_batch_size": _COUNT,
            "dataloader_num_workers dataloader_prefetch_factor": _optional(_integer(0)),
            "ddp_bucket_cap_mb eval_accumulation_steps": _optional(_integer(0)),
            "local_rank": Rule(lambda value: is_integer(value, -1, 2**31 - 1), "the rank set by the launcher"),
            _SWITCHES: _SWITCH_OR_AUTO,
            "liger_kernel_config": Rule(
                lambda value: value is None or (isinstance(value, dict) and all(map(_is_liger_switch, value.items()))),
                f"a dict of {', '.join(LIGER_SWITCHES)}, each True or False, or None (losses are computed by peft_mux)",
            ),
            "lr_scheduler_kwargs activation_checkpointing_kwargs gradient_checkpointing_kwargs": _OPTIONS,
            "project trackio_static_space_id": _TEXT,
            "output_dir": Rule(lambda value: value is None or _is_path(value), "the path of a folder"),
            "resume_from_checkpoint": Rule(
                lambda value: value is None or isinstance(value, bool) or _is_path(value),
                'True, "auto", the folder of a run, or None',
            ),
            "report_to": Rule(_is_report, 'the name of a logger that is installed, a list of them, "all" or "none"'),
            "ddp_timeout": Rule(lambda value: is_integer(value, 1, MOST_STEPS), "a number of seconds of at least 1"),
            "interleaved_passes max_tokens_per_micro_batch": Rule(
                lambda value: _equals(value, "auto") or _COUNT.is_valid(value), f'"auto", or {_COUNT.allowed}'
            ),
            "memory_limit_gib": Rule(
                lambda value: value is None or (is_real(value) and 0 < value <= MOST_STEPS),
                "a number of GiB above 0, or None",
            ),
            "replan_gain": Rule(
                lambda value: is_real(value) and 0 <= value <= MOST_STEPS, "a share of at least 0, such as 0.05 for 5 %"
            ),
            "cost_profile": Rule(
                lambda value: value is None or (_is_path(value) and Path(value).is_file()),
                "a file that peft-mux profile wrote, or None",
            ),
            "upload_to": Rule(
                lambda value: value is None or (isinstance(value, str) and bool(re.fullmatch(r"[\w+.-]+://.+", value))),
                'a URL such as "s3://bucket/runs/support", or None',
            ),
            "replicas": Rule(
                lambda value: value is None or (isinstance(value, str) and len(value) <= 1000),
                '"auto", a string such as "<2,1>, <1,1>x2", or None',
            ),
        }
    ),
}
"""Rules of fields whose type is not specific enough."""


# ------------------------------------------------------------------------------------------------------------ arguments


def _setting(default: Any, text: str, **more: Any) -> Any:
    """Return a field with the text that `HfArgumentParser` and `peft-mux config-schema` show for it."""
    return field(default=default, metadata={"help": text, **more})


@checks_settings(lambda *_, **given: refuse_unknown(given, MultiTaskTrainingArguments.__dataclass_fields__, "args"))
@dataclass(repr=False)
class MultiTaskTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the settings of a multi-task run.

    Hyper-parameters (`learning_rate`, `max_steps`, ...) are the defaults of tasks that do not set their own. Steps are
    counted per task in `eval_steps` and a task's `save_steps`, and per run in `logging_steps` and the run's own
    `save_steps`.

    Attributes:
        max_length: tokens of a row above which `overlong_policy` applies.
        data_timeout_s: seconds that the other tasks wait for the rows of a task's stream before that task fails. With
            several processes it must be less than `ddp_timeout`, as they wait for one another during that time.
        overlong_policy: "truncate" keeps the start of longer rows, "drop" leaves them out, "error" refuses them.
        max_tokens_per_micro_batch: tokens that one forward and backward pass may hold; the global batches of all tasks
            are divided into as many passes as that takes. "auto", the default, is what fits into the memory of a GPU,
            16,384 at most, and 4,096 on a CPU.
        chunk_size: tokens of a chunk; by default the rule of M §3.5 (greatest power-of-two divisor of all lengths).
        min_chunk_size: smallest chunk size of that rule.
        pad_to_chunks: fill each task's part of a stream up to a multiple of the chunk size, for equal shapes.
        split_long_sequences: cut sequences that are longer than a pass into whole chunks, which are in consecutive
            passes and read the keys and values of the chunks before them (M §3.5); gradients are exact. Otherwise a
            longer row gets its own pass.
        share_prefixes: compute shared prefixes of a task's rows once for all rows of a pass: forward, backward and
            loss. "auto", the default, does so wherever it is exact and saves enough; True also reports why a task
            cannot: dropout of its adapter or of the backbone, tokens that see later ones, learnt prompts. Losses and
            gradients stay the same.
        planner: how tasks are combined: "mux" by predicted cost, or a baseline: "together" all in one batch,
            "interleaved" every task by itself in each step, "sequential" one task after another.
        memory_limit_gib: memory of a device that a plan may fill; by default 95 % of a GPU, and no limit on a CPU.
            Tasks that do not fit wait, by priority.
        cost_profile: JSON file of `peft-mux profile`, to plan with measured times instead of data sheets.
        measured_times: how the measured times of passes and replicas are used. "report": they are reported next to
            the profile's at the end and change nothing, so that equal runs have equal bits. "plan": tasks are fused
            and grouped, and rows are dispatched among replicas, by measured times during the run; losses and adapters
            change at most in their last bits, which then depend on how fast the machine was.
        replan_steps: with "plan", number of steps after which a new plan is considered.
        replan_gain: with "plan", how much faster the new plan must be, as a share, to be followed.
        quarantine_policy: what happens to a task with a non-finite loss or gradient: "quarantine" fails that task,
            keeps its last good adapter and continues; "stop" ends the run.
        raise_on_failure: whether `train()` raises a `TaskFailedError` at its end if tasks have failed.
        cuda_graphs: capture passes of equal shape as CUDA graphs and replay them, which saves the time that the host
            takes to launch them. Passes that cannot be captured run eagerly, and the run says why. "auto", the default,
            does so on one GPU for passes of at most 2,560 tokens whose shape recurs. True is refused without a GPU.
        use_liger_kernel: compute norms, rotary embeddings and gated MLPs of the backbone by Liger's fused kernels; its
            losses are not used. "auto", the default, does so on a GPU if liger-kernel is installed, each process holds
            all layers, and the results are those of the backbone's own code, which is tried before the first step;
            True also ends the run with the reason if it cannot be done. `liger_kernel_config` switches single kernels,
            as in `{"rope": False}`.
        selective_recompute: compute the inputs of linear layers that follow norms, and of `down_proj`, again in the
            backward pass instead of keeping them for the adapters, with the same results: a third fewer bytes for each
            token of a Llama with Liger's kernels, so that passes can be larger. Each process must hold the whole model.
        tensor_parallel_size: processes that share every layer of a replica of the backbone.
        pipeline_parallel_size: stages of whole layers of a replica; the remaining processes make further replicas,
            which share the rows of each step.
        replicas: unequal replicas instead, as LobRA writes them: "<2,1>, <1,1>x2" stands for one of tensor parallel
            degree 2 and two whole ones. Processes are assigned in this order. With "auto", LobRA's planner chooses them
            for the processes that there are when `train` loads the model; so a run that has lost a machine resumes.
        dispatch: which of unequal replicas trains which sequences of a step (LobRA): "balanced" by its integer
            program, or a baseline: "length" (the smallest replica that holds a length), "uniform" (evenly over all
            that do).
        redeploy: when tasks come or go, move to the replicas that LobRA's planner finds fastest, if that saves more
            than it costs; `trainer.redeploy` moves on demand.
        interleaved_passes: with tensor parallelism, the most passes of a bucket that take turns at subgraph
            granularity, so that one computes while another one waits for its all-reduces (M §3.4.2). They hold the
            memory of that many passes. "auto", the default, lets the planner decide: 1 if nothing would be gained, if
            two do not fit, or if `cost_profile` was not measured on this device with passes in turns. Not measured on
            GPUs yet.
        num_micro_batches: C, the number of passes into which the rows of tasks that share passes are cut in a step:
            fewer if there are fewer rows, more if passes would hold too many tokens. By default the number that is
            predicted to be fastest and fits into memory.
        pipeline_schedule: template of the pipeline: "mux" over all hTasks, or a baseline: "1f1b", "gpipe",
            "interleaved_1f1b".
        pipeline_flush: when a pipeline is drained: "every_step", or "auto" to drain it only when something is due (a
            log, an evaluation, a checkpoint, the end of a task) and every 8 steps, if that is predicted to be faster: a
            bucket's next step then begins when its own step is over. Results are the same.
        shard_backbone: divide the frozen weights (of each stage, if there are stages) among replicas (FSDP2), which
            gather each layer before they use it.
        shard_optimizer: with data parallelism, keep the optimizer state of each task on one process only, which sends
            the new weights to the others (ZeRO-1, by whole tasks). Saves 8 bytes of AdamW's moments for each adapter
            parameter on all other processes, and sends no more than before. Results are the same.
        reduce_dtype: dtype in which replicas send and add the gradients of adapters: "float32", or "bfloat16" for half
            the bytes. With "bfloat16", sums have 8 bits, and results depend on the number of replicas.
        upload_to: URL of fsspec, such as "s3://bucket/runs/support", to which the run folder is copied after each save,
            in the background, and from which a run resumes whose `output_dir` holds none.
        report_per_task: one run per task in each logger of `report_to` instead of one for all tasks, with the task's
            own steps, arguments and plain keys (`train/loss`). TensorBoard, W&B, MLflow and Trackio can do so; other
            loggers keep one run per process and are refused.

    Raises:
        ConfigError: naming every field that cannot be run.
    """

    max_length: int = _setting(1024, "Tokens of a row above which overlong_policy applies.")
    data_timeout_s: float = _setting(300.0, "Seconds to wait for the rows of a stream.")
    overlong_policy: str = _setting("truncate", "truncate, drop or error.")
    max_tokens_per_micro_batch: int | str = _setting(
        "auto", "Tokens of one forward and backward pass: a number, or auto."
    )
    chunk_size: int | None = _setting(None, "Tokens of a chunk; None for the rule of M 3.5.")
    min_chunk_size: int = _setting(64, "Smallest chunk size of that rule.")
    pad_to_chunks: bool = _setting(False, "Fill each task's part up to whole chunks.")
    split_long_sequences: bool = _setting(False, "Cut rows longer than a pass into chunks.")
    share_prefixes: bool | str = _setting("auto", "Compute shared prefixes once: True, False, auto.", **_IS_FLAG)
    planner: str = _setting("mux", "mux, together, interleaved or sequential.")
    memory_limit_gib: float | None = _setting(None, "Memory of a device that a plan may fill.")
    cost_profile: str | None = _setting(None, "JSON file of peft-mux profile.")
    measured_times: str = _setting("report", "report or plan: how measured times are used.")
    replan_steps: int = _setting(20, "Steps after which a new plan is considered.")
    replan_gain: float = _setting(0.05, "How much faster it must be, as a share.")
    quarantine_policy: str = _setting("quarantine", "quarantine or stop.")
    raise_on_failure: bool = _setting(False, "Raise at the end if tasks have failed.")
    use_liger_kernel: bool | str = _setting(
        "auto", "Fused norms, RoPE and MLPs of Liger: True, False, auto.", **_IS_FLAG
    )
    cuda_graphs: bool | str = _setting("auto", "Replay passes as CUDA graphs: True, False, auto.", **_IS_FLAG)
    selective_recompute: bool = _setting(False, "Recompute norms and products of MLPs in the backward pass.")
    tensor_parallel_size: int = _setting(1, "Processes that share every layer.")
    pipeline_parallel_size: int = _setting(1, "Stages of whole layers.")
    replicas: str | None = _setting(None, 'Unequal replicas, such as "<2,1>, <1,1>x2", or "auto".')
    dispatch: str = _setting("balanced", "balanced, length or uniform.")
    redeploy: bool = _setting(False, "Move to better replicas when tasks come or go.")
    interleaved_passes: int | str = _setting("auto", "Interleaved passes under tensor parallelism: a number, or auto.")
    num_micro_batches: int | None = _setting(None, "Passes of tasks in a step; None to search.")
    pipeline_schedule: str = _setting("mux", "mux, 1f1b, gpipe or interleaved_1f1b.")
    pipeline_flush: str = _setting("auto", "auto or every_step.")
    shard_backbone: bool = _setting(False, "Divide the frozen weights among replicas (FSDP2).")
    shard_optimizer: bool = _setting(False, "Divide optimizer states among replicas by task.")
    reduce_dtype: str = _setting("float32", "float32 or bfloat16: how gradients are sent.")
    upload_to: str | None = _setting(None, "URL of a copy of the run folder (fsspec).")
    report_per_task: bool = _setting(False, "One run per task in report_to.")

    def __post_init__(self) -> None:
        """Check all fields before `TrainingArguments` completes them."""
        if self.bf16 is False and _precision_of_launcher() == "bf16":
            self.bf16 = True
        raise_faults(_faults(self))
        # transformers refuses bf16 on a machine without an accelerator unless `use_cpu` is set.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        # The best weights are kept in memory, so evaluations and checkpoints need not be at the same steps, as Trainer
        # requires.
        follows = self.load_best_model_at_end or self.save_strategy == "best"
        metric = self.metric_for_best_model or ("loss" if follows else None)  # Trainer's default
        best = self.load_best_model_at_end, metric, self.greater_is_better
        self.load_best_model_at_end, self.metric_for_best_model = False, None
        # It has no effect here, so it needs no workers either.
        loaders = self.dataloader_prefetch_factor, self.dataloader_num_workers
        self.dataloader_prefetch_factor, self.dataloader_num_workers = None, 0
        if self.pipeline_parallel_size > 1 or self.replicas is not None:
            # Read when CUDA starts: each stream of a stage may wait for another process, so each has its own queue.
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        meet(is_cpu=bool(self.use_cpu), timeout_s=self.ddp_timeout)
        try:
            super().__post_init__()
        except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
            raise ConfigError(f"args: transformers refuses them: {error}") from error
        self.load_best_model_at_end, self.metric_for_best_model, self.greater_is_better = best
        self.dataloader_prefetch_factor, self.dataloader_num_workers = loaders
        raise_faults(_tracker_faults(self))

    __repr__ = __str__ = short_repr

    @classmethod
    def from_training_arguments(cls, config: TrainingArguments, **settings: Any) -> MultiTaskTrainingArguments:
        """Return the arguments of a run with the settings of a `TrainingArguments`, such as `SFTConfig`.

        Args:
            config: the source of the settings; those of a task (`Task.from_sft_config`) become defaults of all tasks.
            **settings: settings that replace those of `config`.

        Raises:
            ConfigError: naming every field that cannot be run.
        """
        if not isinstance(config, TrainingArguments):
            raise_faults([Fault("config", type(config).__name__, "a TrainingArguments")])
        names = [item.name for item in fields(TrainingArguments) if item.init and not is_default(config, item.name)]
        # A default of its class alone, such as the order of rows of a KTOConfig, concerns its task.
        names = [name for name in names if name in SETTABLE_FIELDS or not is_default(config, name, type(config))]
        if getattr(config.eval_strategy, "value", config.eval_strategy) != "steps":
            names = [name for name in names if name != "eval_steps"]  # Trainer does not read it then
        given = {name: getattr(getattr(config, name), "value", getattr(config, name)) for name in names}
        if getattr(config, "max_length", None) is not None:
            given["max_length"] = config.max_length  # type: ignore[attr-defined]
        return cls(**{"output_dir": config.output_dir, "use_cpu": config.use_cpu, **given, **settings})

    @property
    def place_model_on_device(self) -> bool:
        """Whether Trainer places the model: no, as the model may still be a description without weights."""
        return False

    @property
    def uses_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass, under either of the two names."""
        return bool(getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing)

    def pass_tokens(self, device_type: str | None = None) -> int:
        """Return the most tokens of a pass on a device of a type, by default the run's own, as asked for.

        With "auto", plans for a GPU lower the number to what fits into its memory.
        """
        asked = self.max_tokens_per_micro_batch
        return _AUTO_PASS_TOKENS[device_type or self.device.type] if isinstance(asked, str) else asked

    @property
    def checkpointing_kwargs(self) -> dict[str, Any]:
        """Options of `torch.utils.checkpoint`, under either of the two names."""
        options = getattr(self, "activation_checkpointing_kwargs", None) or self.gradient_checkpointing_kwargs
        return dict(options) if isinstance(options, dict) else {}


def _precision_of_launcher() -> str:
    """Return what `accelerate launch --mixed_precision` was given, "no" without that launcher."""
    # Older versions of transformers set the precision themselves, but only the launcher sets the backend of dynamo.
    is_launched = "ACCELERATE_DYNAMO_BACKEND" in os.environ
    return os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if is_launched else "no"


SETTABLE_FIELDS = frozenset(
    item.name
    for item in fields(MultiTaskTrainingArguments)
    if item.init and item.name in {*HONOURED, *HARMLESS, *MultiTaskTrainingArguments.__annotations__}
)
"""Names of the arguments that may be set; all others must keep their defaults."""


FIELD_TYPES = {
    name: annotation
    for owner in reversed(MultiTaskTrainingArguments.__mro__)
    for name, annotation in vars(owner).get("__annotations__", {}).items()
}
"""Types of the fields. `HfArgumentParser` rewrites those of the `Field` objects that all classes share."""


def _or_auto(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return how a command line is read where a field accepts "auto" besides values of one type."""

    def value_or_auto(text: str) -> Any:
        return text if text == "auto" else read(text)

    return value_or_auto


# `HfArgumentParser` calls the type of a field with a text. Of a union with `str` it would call the other type.
MultiTaskTrainingArguments.__annotations__ |= {
    **dict.fromkeys(_SWITCHES.split(), _or_auto(string_to_bool)),
    **dict.fromkeys(("interleaved_passes", "max_tokens_per_micro_batch"), _or_auto(int)),
}


def _faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    """Return a fault for each value that its field may not hold, and for fields that do not go together."""
    faults: list[Fault] = []

    def refuse(name: str, allowed: str, fix: str = "", *, got: str = "") -> None:
        faults.append(Fault(f"args.{name}", got or shown(getattr(args, name)), allowed, fix))

    for item in fields(args):
        if not item.init:  # it is derived from the other fields
            continue
        name, value = item.name, getattr(args, item.name)
        if name not in SETTABLE_FIELDS:
            default = _default(item)
            is_unset = default in ("", "no") and (value is None or value is False)  # as HfArgumentParser writes it
            if not is_unset and not _equals(value, default):
                refuse(name, f"its default {default!r}", f"Reason: {reason_against(name)}.")
        elif name in _CHOICES:
            faults += choice_faults(f"args.{name}", value, _CHOICES[name])
        else:
            rule = _RULES.get(name) or type_rule(FIELD_TYPES[name])
            if not rule.is_valid(value):
                refuse(name, rule.allowed)
    if args.tf32 is True and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8):
        refuse("tf32", "False or None", "Reason: it needs a GPU of Ampere or later.")
    on_cpu = args.use_cpu is True or not torch.cuda.is_available()
    if args.cuda_graphs is True and on_cpu:
        refuse("cuda_graphs", '"auto" or False', "Reason: a CPU has no CUDA graphs.")
    if args.use_liger_kernel is True and (on_cpu or importlib.util.find_spec("liger_kernel") is None):
        why = "Reason: its kernels need a GPU." if on_cpu else "Install it: pip install liger-kernel."
        refuse("use_liger_kernel", '"auto" or False', why)
    if args.selective_recompute is True and args.uses_checkpointing:
        got = "True with gradient_checkpointing=True"
        refuse("selective_recompute", "False if whole layers are recomputed", "Leave one of the two out.", got=got)
    if args.bf16 is False and (launched := _precision_of_launcher()) != "no":
        reason = f"Reason: {reason_against('fp16') if launched == 'fp16' else 'adapters train in bf16 or fp32'}."
        faults.append(Fault("accelerate launch --mixed_precision", launched, "bf16 or no", reason))
    saving, evaluating = (getattr(name, "value", name) for name in (args.save_strategy, args.eval_strategy))
    for name, unset in {"push_to_hub": False, "upload_to": None}.items():
        value = getattr(args, name)
        if not _equals(value, unset) and _equals(saving, "no"):
            allowed = f'{unset}, or used with save_strategy "steps" or "epoch"'
            refuse(name, allowed, "Only saved files are uploaded.", got=f'{shown(value)} with save_strategy="no"')
    if is_interval(args.eval_steps) and (_equals(evaluating, "no") or _equals(evaluating, "epoch")):
        got = f'{shown(args.eval_steps)} with eval_strategy="{evaluating}"'
        fix = "Or set eval_steps on individual tasks."
        refuse("eval_steps", 'None, or a number with eval_strategy="steps"', fix, got=got)
    return faults


def _tracker_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    """Return why the tasks cannot have their own runs in the loggers of `report_to`, which Trainer has listed."""
    if not args.report_per_task:
        return []
    named = ", ".join(args.report_to or ())
    others = [name for name in args.report_to or () if name not in LOGGERS_OF_MANY_RUNS]
    if others or not named:
        allowed = f"False, or used with {', '.join(LOGGERS_OF_MANY_RUNS)} only"
        why = f"{', '.join(others)} supports one run per process; with one run for all tasks, keys are task/loss."
        return [Fault("args.report_per_task", f"True with report_to={named or 'none'}", allowed, why if others else "")]
    if "trackio" in named and args.trackio_static_space_id:
        fix = "Trackio's own `trackio.freeze` makes a static Space when all tasks have ended."
        got = f"{shown(args.trackio_static_space_id)} with report_per_task=True"
        return [Fault("args.trackio_static_space_id", got, "None", fix)]
    return []


def require_arguments(args: object) -> MultiTaskTrainingArguments:
    """Return `args` if it is of our class.

    Raises:
        ConfigError: for a plain `TrainingArguments` or anything else.
    """
    if isinstance(args, MultiTaskTrainingArguments):
        return args
    raise ConfigError(
        f"args must be MultiTaskTrainingArguments (it takes all TrainingArguments fields), got {type(args).__name__}."
    )
