"""The fields of `transformers.TrainingArguments`: which of them a run heeds, of which types, and why not the others."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from peft_mux.errors import Fault, shown
from peft_mux.hyper_parameters import is_interval

_Rule = tuple[Callable[[Any], bool], str]

OVERLONG_POLICIES = ("truncate", "drop", "error")
QUARANTINE_POLICIES = ("quarantine", "stop")
LOGGERS_OF_MANY_RUNS = ("tensorboard", "wandb", "mlflow", "trackio")
"""Loggers that keep a run of its own for each task (`reporting.trackers`); others know one run a process."""
FLUSHES = ("auto", "every_step")


def _is_options(value: object) -> bool:
    """Whether a value is a dict, or the text of one, as TrainingArguments takes it from command lines."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return False
    return value is None or isinstance(value, dict)


def _is_path(value: object) -> bool:
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        return False
    try:
        os.stat(value)
    except OSError as error:
        # It need not be there yet, but it must be possible.
        return error.errno != errno.ENAMETOOLONG
    except ValueError:  # a null character
        return False
    return True


def _is_report(value: object) -> bool:
    """Whether a value names loggers that are installed, for Trainer makes them at once."""
    from transformers.integrations import get_available_reporting_integrations

    names = [value] if isinstance(value, str) else value
    known = ("all", "none", *get_available_reporting_integrations())
    return isinstance(names, (list, tuple)) and all(isinstance(name, str) and name in known for name in names)


_FLAG: _Rule = (lambda value: isinstance(value, bool), "True or False")
_FLAG_OR_NONE: _Rule = (lambda value: value is None or isinstance(value, bool), "True, False or None")
_TEXT: _Rule = (lambda value: value is None or isinstance(value, str), "a string or None")
_OPTIONS: _Rule = (_is_options, "a dict of options, or None")
_LEVEL_NAMES = ("detail", "debug", "info", "warning", "error", "critical", "passive")
_LEVEL: _Rule = (lambda value: isinstance(value, str) and value in _LEVEL_NAMES, ", ".join(_LEVEL_NAMES))
# Looked at elsewhere: numbers in `hyper_parameters`, choices and counts in `arguments`.
_CHECKED: _Rule = (lambda _: True, "")

HONOURED: Mapping[str, _Rule] = {
    **dict.fromkeys(
        (
            "per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps learning_rate "
            "lr_scheduler_type warmup_steps optim weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm "
            "logging_strategy logging_steps eval_strategy eval_steps save_strategy save_steps save_total_limit "
            "eval_delay hub_strategy label_smoothing_factor neftune_noise_alpha"
        ).split(),
        _CHECKED,
    ),
    **dict.fromkeys("bf16 logging_first_step log_on_each_node use_cpu full_determinism".split(), _FLAG),
    # Flags that Trainer itself passes over too: they are there for the user's script to read.
    **dict.fromkeys("do_train do_eval do_predict".split(), _FLAG),
    **dict.fromkeys("load_best_model_at_end eval_on_start push_to_hub hub_always_push".split(), _FLAG),
    **dict.fromkeys("greater_is_better tf32 hub_private_repo".split(), _FLAG_OR_NONE),
    **dict.fromkeys("metric_for_best_model hub_token hub_model_id hub_revision".split(), _TEXT),
    **dict.fromkeys("disable_tqdm activation_checkpointing gradient_checkpointing".split(), _FLAG_OR_NONE),
    **dict.fromkeys(
        "lr_scheduler_kwargs activation_checkpointing_kwargs gradient_checkpointing_kwargs".split(), _OPTIONS
    ),
    **dict.fromkeys(
        "optim_args run_name project trackio_space_id trackio_bucket_id trackio_static_space_id logging_dir".split(),
        _TEXT,
    ),
    **dict.fromkeys("log_level log_level_replica".split(), _LEVEL),
    "output_dir": (lambda value: value is None or _is_path(value), "the path of a folder"),
    "resume_from_checkpoint": (
        lambda value: value is None or isinstance(value, bool) or _is_path(value),
        "True, the folder of a run, or None",
    ),
    "report_to": (_is_report, 'the name of a logger that is installed, a list of them, "all" or "none"'),
    # Trainer seeds NumPy with it too; a task's own seed may be greater.
    "seed": (lambda value: value is None or (type(value) is int and 0 <= value < 2**32), "an integer in [0, 2**32)"),
    "local_rank": (lambda value: type(value) is int and -1 <= value < 2**31, "the rank that the launcher gave"),
    "ddp_timeout": (lambda value: type(value) is int and 1 <= value <= 10**9, "a number of seconds of at least 1"),
}
"""Inherited fields that may be set, each with what may stand in it."""

_COUNT_OR_NONE: _Rule = (
    lambda value: value is None or (type(value) is int and 0 <= value <= 10**9),
    "an integer of at least 0, or None",
)
_ANY_FLAG = "ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph"
_LOADER_FLAGS = "dataloader_pin_memory dataloader_persistent_workers dataloader_in_order"

HARMLESS: Mapping[str, tuple[_Rule, str]] = {
    **dict.fromkeys(_ANY_FLAG.split(), (_FLAG_OR_NONE, "gradients are summed without DistributedDataParallel")),
    "ddp_bucket_cap_mb": (_COUNT_OR_NONE, "gradients are summed without DistributedDataParallel"),
    **dict.fromkeys(_LOADER_FLAGS.split(), (_FLAG, "rows are tokenised before the first step, without a DataLoader")),
    **dict.fromkeys(
        "dataloader_num_workers dataloader_prefetch_factor".split(),
        (_COUNT_OR_NONE, "rows are tokenised before the first step, without a DataLoader"),
    ),
    "dataloader_multiprocessing_context": (_TEXT, "there is no DataLoader whose processes it would start"),
    "remove_unused_columns": (_FLAG, "only the columns of a row's form are read, whatever others there are"),
    "per_device_eval_batch_size": (
        (lambda value: type(value) is int and 1 <= value <= 10**9, "an integer of at least 1"),
        "held-out rows are packed into passes of max_tokens_per_micro_batch, with the same metrics",
    ),
    "eval_accumulation_steps": (_COUNT_OR_NONE, "predictions are moved to the CPU after every pass"),
    "eval_use_gather_object": (_FLAG, "predictions of all processes are gathered as objects"),
    "logging_nan_inf_filter": (_FLAG, "a task whose loss is not finite ends before it would be logged"),
    "length_column_name": (
        (lambda value: isinstance(value, str), "a string"),
        "sequences are packed, so their lengths need no grouping",
    ),
    "skip_memory_metrics": (_FLAG, "peft_mux measures memory itself, and logs it as run/memory_gib"),
}
"""Inherited fields that no result depends on here: each may be set, and why nothing comes of it."""

_SAME_REASONS = {
    "losses are computed in fp32 or bf16, and an evaluation in the dtype of the training": (
        "bf16_full_eval fp16_full_eval"
    ),
    "evaluation computes eval_loss, or calls the task's own compute_metrics on all of its rows at once": (
        "prediction_loss_only eval_do_concat_batches batch_eval_metrics include_for_metrics label_names"
    ),
    "gradients are summed by peft_mux over the process groups of torch, with the backend of the device": "ddp_backend",
    "rows are packed and given out by peft_mux, without accelerate's loaders": "accelerator_config",
    "every task counts the tokens of its whole global batch, over all processes": "average_tokens_across_devices",
    "resuming is exact, and the whole state is written by one process": (
        "ignore_data_skip save_only_model save_on_each_node restore_callback_states_from_checkpoint "
        "enable_jit_checkpoint"
    ),
    "compile modules of the backbone (layer.mlp.compile()); grouped LoRA is one operator inside them": (
        "torch_compile torch_compile_backend torch_compile_mode"
    ),
    "it replaces the layers that are multiplexed": "use_liger_kernel liger_kernel_config",
    "adapters of many tasks are laid out by peft_mux; set shard_backbone=True for FSDP2": "fsdp fsdp_config",
    "tokens are counted by task, in metrics.jsonl": "include_num_input_tokens_seen",
    "what is kept of freed memory is decided by peft_mux": "torch_empty_cache_steps",
}
REASONS: Mapping[str, str] = {
    **{name: reason for reason, names in _SAME_REASONS.items() for name in names.split()},
    "fp16": "losses would need one scaler a task; use bf16",
    "train_sampling_strategy": "sequences are packed, so their lengths need no grouping; for the order of the rows set "
    "shuffle=False on the Task",
    "auto_find_batch_size": "set max_tokens_per_micro_batch instead",
    "optim_target_modules": "every task trains exactly its own adapter",
    "deepspeed": "adapters of many tasks are laid out by peft_mux; set shard_backbone, or the two parallel sizes",
    "parallelism_config": "set tensor_parallel_size, pipeline_parallel_size or shard_backbone",
    "dataloader_drop_last": "the last batch of an epoch is trained on",
    "use_cache": "training keeps no cache",
    "data_seed": "it has no meaning for many tasks at once: the seed of a Task fixes its order of rows",
    "debug": "its hooks belong to loops of Trainer that do not run here",
}
"""Why the other fields must stay at their defaults."""


def honoured_field_faults(values: Any) -> list[Fault]:
    """Return a fault for each field that may be set whose value is of a wrong type.

    Args:
        values: the arguments, as they were given.
    """
    return [
        Fault(f"args.{name}", shown(getattr(values, name)), allowed)
        for name, (is_valid, allowed) in {**HONOURED, **{name: rule for name, (rule, _) in HARMLESS.items()}}.items()
        if hasattr(values, name) and not is_valid(getattr(values, name))
    ]


def unheard_faults(values: Any) -> list[Fault]:
    """Return a fault for each field that is set although another one, as it stands, leaves it without a meaning.

    Args:
        values: the arguments, as they were given.
    """
    # transformers makes enums of some of them; what is neither enum nor text is told elsewhere.
    strategies = [getattr(one, "value", one) for one in (values.save_strategy, values.eval_strategy)]
    saving, evaluating = [one if isinstance(one, str) else "" for one in strategies]
    faults = []
    if values.push_to_hub is True and saving == "no":
        allowed, fix = 'save_strategy "steps" or "epoch"', "What is uploaded is what was saved."
        faults.append(Fault("args.push_to_hub", 'True with save_strategy="no"', allowed, fix))
    if is_interval(values.eval_steps) and evaluating in ("no", "epoch"):
        got = f'{shown(values.eval_steps)} with eval_strategy="{evaluating}"'
        allowed, fix = 'None, or a number with eval_strategy="steps"', "Or set eval_steps on single tasks."
        faults.append(Fault("args.eval_steps", got, allowed, fix))
    return faults


def tracker_faults(args: Any) -> list[Fault]:
    """Return why the tasks cannot have runs of their own in the loggers of `report_to`, which Trainer has listed.

    Args:
        args: the arguments of the run.
    """
    if not args.report_per_task:
        return []
    named = ", ".join(args.report_to or ())
    others = [name for name in args.report_to or () if name not in LOGGERS_OF_MANY_RUNS]
    if others or not named:
        allowed = f"True with some of {', '.join(LOGGERS_OF_MANY_RUNS)} alone, or False"
        why = f"{', '.join(others)} keeps one run a process; as one run, it has keys such as task/loss."
        return [Fault("args.report_per_task", f"True with report_to={named or 'none'}", allowed, why if others else "")]
    if "trackio" in args.report_to and args.trackio_static_space_id:
        fix = "Trackio's own `trackio.freeze` makes a static Space when all tasks have ended."
        got = f"{shown(args.trackio_static_space_id)} with report_per_task=True"
        return [Fault("args.trackio_static_space_id", got, "None", fix)]
    return []
