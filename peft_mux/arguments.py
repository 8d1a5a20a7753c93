"""The fields of `transformers.TrainingArguments`: which of them a run heeds, of which types, and why not the others."""

# MERGED: What a `TrainingArguments`, an `SFTConfig` or a trainer says of one task, as settings of a `Task`.
# MERGED: A setting of the run (`bf16`, `logging_steps`) is none of a task:
# MERGED: `MultiTaskTrainingArguments.from_training_arguments`
# MERGED: takes those. One that means nothing here is refused with its reason, so that none is lost on the way.
# MERGED: `MultiTaskTrainingArguments`: what holds for the whole run, and completes the settings of its tasks.
# MERGED: It is `transformers.TrainingArguments` plus the knobs of multiplexing. An inherited field that cannot mean
# MERGED: anything for
# MERGED: many tasks (or is not built yet) is refused when it is set, never accepted and ignored.

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import TrainingArguments

from peft_mux.errors import ConfigError, Fault, closest, is_integer, is_real, raise_faults, shown
from peft_mux.hyper_parameters import (
    MOST_STEPS,
    hyper_parameter_faults,
    is_interval,
    supported_optimizers,
    supported_schedules,
)
from peft_mux.moved_names import refuse_unknown
from peft_mux.scheduler.dispatching.dispatch import Policy
from peft_mux.scheduler.pipeline.template import SCHEDULES
from peft_mux.scheduler.planner.policies import policy_names

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


_AS_THEY_ARE = (
    "learning_rate num_train_epochs weight_decay lr_scheduler_kwargs warmup_steps max_grad_norm optim_args adam_beta1 "
    "adam_beta2 adam_epsilon seed max_length completion_only_loss assistant_only_loss hub_model_id "
    "label_smoothing_factor neftune_noise_alpha"
).split()
_OF_EVALUATION = "eval_delay eval_on_start load_best_model_at_end metric_for_best_model greater_is_better".split()
_SAME_LOSS = (None, "nll", "chunked_nll")
"""TRL computes the last of them block by block, which is how it is always done here."""
_OWN_DEFAULTS = ("transformers.", "trl.")


def task_settings_of(config: Any, *, has_eval: bool) -> dict[str, Any]:
    """Return the settings of a `Task` that a configuration of Trainer or TRL stands for.

    Args:
        config: a `TrainingArguments`, such as `SFTConfig`.
        has_eval: whether the task has held-out rows.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    raise_faults(_refused(config))
    settings = {name: getattr(config, name) for name in _AS_THEY_ARE if hasattr(config, name)}
    for name in ("optim", "lr_scheduler_type"):
        settings[name] = getattr(getattr(config, name), "value", getattr(config, name))
    if config.max_steps > 0:
        settings["max_steps"] = config.max_steps
    settings["train_batch_size"] = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    )
    if has_eval:
        settings |= {name: getattr(config, name) for name in _OF_EVALUATION}
        if getattr(config.eval_strategy, "value", config.eval_strategy) == "steps":
            settings["eval_steps"] = config.eval_steps
    if getattr(config, "loss_type", None) not in _SAME_LOSS:
        settings["loss_type"] = config.loss_type
    if getattr(config, "chat_template_path", None):
        settings["chat_template"] = Path(config.chat_template_path).read_text(encoding="utf-8")
    if getattr(config, "dataset_text_field", "text") != "text":
        settings["row_format"] = {"text": config.dataset_text_field}
    # What is left out has the same meaning on a `Task`: nothing of it is set.
    return {name: value for name, value in settings.items() if value is not None}


def _refused(config: Any) -> list[Fault]:
    """Return a fault for each field that is set although it means nothing here."""
    from transformers import TrainingArguments

    if not isinstance(config, TrainingArguments):
        allowed = "a TrainingArguments of transformers, or SFTConfig of TRL"
        return [Fault("config", type(config).__name__, allowed)]
    faults = [
        Fault(f"config.{name}", shown(getattr(config, name)), "its default", f"Reason: {why}.")
        for name, why in REASONS.items()
        if hasattr(config, name) and not is_default(config, name)
    ]
    template = getattr(config, "chat_template_path", None)
    if template and not Path(template).is_file():
        faults.append(Fault("config.chat_template_path", shown(template), "a file with a Jinja template"))
    return faults


def is_default(config: Any, name: str) -> bool:
    """Whether a field of `TrainingArguments` is at its default, in whatever form transformers keeps it.

    No arguments are made to compare with: that would take the state away from which other trainers read their devices.

    Args:
        config: the arguments.
        name: name of the field.
    """
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig

    item = TrainingArguments.__dataclass_fields__[name]
    default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
    value = getattr(config, name)
    if isinstance(value, AcceleratorConfig):
        return value == AcceleratorConfig()
    if value in ([], None, False) and default in ("", "none", [], None, False):
        return True
    return str(getattr(value, "value", value)) == str(getattr(default, "value", default))


def task_settings_of_trainer(trainer: Any) -> dict[str, Any]:
    """Return the settings of a `Task` that a trainer of transformers or TRL stands for: rows, adapter and all.

    Args:
        trainer: a `Trainer` or `SFTTrainer` that was made with an adapter and has not trained.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    config = getattr(trainer, "args", None)
    adapters: Any = getattr(getattr(trainer, "model", None), "peft_config", None)
    faults = []
    if not isinstance(adapters, Mapping) or len(adapters) != 1:
        allowed = "a trainer of a model with one adapter: SFTTrainer(peft_config=...), or a PeftModel"
        faults.append(Fault("trainer.model", type(getattr(trainer, "model", None)).__name__, allowed))
    if getattr(config, "packing", False):
        fix = "Give its rows before they were packed: Task.from_sft_config(name, config, train_dataset=rows)."
        faults.append(Fault("trainer.args.packing", "True", "False, as packed rows cannot be told apart", fix))
    if getattr(trainer, "formatting_func", None) is not None:
        faults.append(Fault("trainer.formatting_func", "a function", "rows that were mapped before"))
    raise_faults(faults)
    assert isinstance(adapters, Mapping), "anything else is a fault"
    eval_dataset = trainer.eval_dataset or None
    if isinstance(eval_dataset, Mapping):
        raise ConfigError("trainer.eval_dataset: got several; allowed: one. Give it to Task.from_sft_config.")
    settings = task_settings_of(config, has_eval=eval_dataset is not None)
    settings.pop("row_format", None)  # its rows are tokenised already
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        settings[name] = getattr(trainer, name, None)
    own = [one for one in trainer.callback_handler.callbacks if _is_own(one)]
    return {
        **settings,
        "peft_config": next(iter(adapters.values())),
        "train_dataset": _labelled(trainer.train_dataset, settings),
        "eval_dataset": None if eval_dataset is None else _labelled(eval_dataset, settings),
        "callbacks": own,
    }


def _is_own(callback: Any) -> bool:
    """Whether a callback is one that somebody gave, rather than a part of the trainer itself."""
    name = type(callback).__name__
    return name == "EarlyStoppingCallback" or not type(callback).__module__.startswith(_OWN_DEFAULTS)


class _MaskedRows:
    """Tokenised rows of TRL, whose masks become the labels that its collator would make of them."""

    def __init__(self, rows: Any, masks: list[str]) -> None:
        self._rows, self._masks = rows, masks
        self.column_names = ["input_ids", "labels"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        labels = list(row.get("labels", row["input_ids"]))
        for mask in self._masks:
            labels = [label if keep else -100 for label, keep in zip(labels, row[mask], strict=True)]
        return {"input_ids": list(row["input_ids"]), "labels": labels}


def _labelled(rows: Any, settings: dict[str, Any]) -> Any:
    """Return tokenised rows with labels where TRL has masks; others as they are."""
    names = getattr(rows, "column_names", None) or []
    wanted = {"completion_mask": settings.get("completion_only_loss", True), "assistant_masks": True}
    masks = [name for name, is_read in wanted.items() if name in names and is_read]
    if "input_ids" not in names or not masks:
        return rows
    # What the masks say is in the labels now.
    settings.pop("completion_only_loss", None)
    settings.pop("assistant_only_loss", None)
    return _MaskedRows(rows, masks)


_TASK_DEFAULTS = (
    "learning_rate num_train_epochs max_steps weight_decay warmup_steps max_grad_norm adam_beta1 adam_beta2 "
    "adam_epsilon seed max_length data_timeout_s label_smoothing_factor"
).split()


@dataclass
class MultiTaskTrainingArguments(TrainingArguments):
    """`transformers.TrainingArguments` with the run-wide knobs of multiplexing.

    Hyper-parameters (`learning_rate`, `max_steps`, ...) are the defaults of tasks that do not set their own. Steps are
    counted per task in `eval_steps` and a task's `save_steps`, and per run in `logging_steps` and the run's own
    `save_steps`.

    Attributes:
        max_length: tokens of a row after which `overlong_policy` applies.
        data_timeout_s: seconds for which the others wait for the rows of a task's stream before that task fails; where
            there are several processes, less than `ddp_timeout`, as these wait for one another meanwhile.
        overlong_policy: "truncate" keeps the start of longer rows, "drop" leaves them out, "error" refuses them.
        max_tokens_per_micro_batch: tokens that one forward and backward pass may hold; the global batches of all tasks
            are met by as many passes as that takes.
        chunk_size: tokens of a chunk; by default the rule of M §3.5 (greatest power-of-two divisor of all lengths).
        min_chunk_size: least chunk size of that rule.
        pad_to_chunks: fill each task's part of a stream up to a multiple of the chunk size, for equal shapes.
        split_long_sequences: cut sequences that are longer than a pass into whole chunks, which lie in consecutive
            passes and read the keys and values of those before them (M §3.5); gradients are exact. Otherwise a longer
            row gets a pass of its own.
        share_prefixes: compute tokens that rows of a task begin with alike once for all rows of a pass: forward,
            backward and loss. "auto", the default, does so wherever it is exact and spares enough; True also says why
            a task cannot: dropout of its adapter or of the backbone, tokens that see later ones, learnt prompts. Losses
            and gradients stay as promised.
        last_layer_at_targets: compute the last layer's queries, output projection and MLP for those rows alone that a
            loss reads. "auto", the default, does so wherever it was proven on the model and at most three quarters of a
            pass are read; True also says why it cannot be; False never. Losses and gradients stay as promised.
        planner: how tasks are put together: "mux" by predicted cost, or a baseline: "together" all in one batch,
            "interleaved" every task by itself in each step, "sequential" one task after another.
        memory_limit_gib: memory of a device that a plan may fill; by default 95 % of a GPU, and no limit on a CPU.
            Tasks that do not fit wait, by priority.
        cost_profile: JSON file of `peft-mux profile`, to plan with measured times instead of data sheets.
        measured_times: what comes of the times that passes and replicas are measured to take. "report": they are told
            beside the profile's at the end, and change nothing, so that equal runs have equal bits. "plan": tasks are
            fused and grouped, and rows dispatched among replicas, by them, while the run goes on; losses and adapters
            stay as promised, but for their last bits, which then depend on how fast the machine was.
        replan_steps: with "plan", number of steps after which another plan is looked for.
        replan_gain: with "plan", by what part it must be faster to be followed.
        quarantine_policy: what happens to a task with a non-finite loss or gradient: "quarantine" fails that task,
            keeps its last good adapter and goes on; "stop" ends the run.
        cuda_graphs: capture passes of equal shape as CUDA graphs and replay them, which spares the time that the host
            takes to launch them. "auto", the default, does so on CUDA for shapes that come again, where each process
            holds the whole backbone, once a replay is proven to give the losses and gradients of the eager pass. Where
            it does not, or a pass cannot be captured, passes run as ever, and the run says why. True leaves the proof
            out, and is refused where there is no GPU.
        tensor_parallel_size: processes that share every layer of a replica of the backbone.
        pipeline_parallel_size: stages of whole layers of a replica; the processes that are left over make further
            replicas, which share the rows of each step.
        replicas: unequal replicas instead, as LobRA writes them: "<2,1>, <1,1>x2" stands for one of tensor parallel
            degree 2 and two whole ones. Processes are given out in this order.
        dispatch: which of unequal replicas trains which sequences of a step (LobRA): "balanced" by its integer
            programme, or a baseline: "length" (the smallest replica that holds a length), "uniform" (evenly over all
            that do).
        redeploy: when tasks come or go, move to the replicas that LobRA's planner finds fastest, where that saves more
            than it costs; `trainer.redeploy` moves when told to.
        interleaved_passes: with tensor parallelism, how many passes of a bucket at most take turns at subgraph
            granularity, so that one computes while the sums of another are under way (M §3.4.2). They hold the memory
            of that many passes. "auto", the default, lets the planner decide: 1 where nothing is gained or fits, and
            where `cost_profile` has not measured on this device what turns hide. On GPUs it has not been measured yet.
        num_micro_batches: C, the number of passes into which the rows of tasks that share passes are cut in a step:
            fewer where there are fewer rows, more where passes would hold too many tokens. By default the number is
            searched for that is predicted to be fastest and fits into memory.
        pipeline_schedule: template of the pipeline: "mux" over all hTasks, or a baseline: "1f1b", "gpipe",
            "interleaved_1f1b".
        pipeline_flush: when a pipeline is drained: "every_step", or "auto" for only where something is due (a log, an
            evaluation, a checkpoint, the end of a task) and each 8 steps, where that is predicted to be faster: then a
            bucket's next step begins when its own is over. Results are the same.
        shard_backbone: divide the frozen weights (those of each stage, where there are stages) among replicas (FSDP2),
            which gather each layer before they use it.
        report_per_task: a run of its own for each task in each logger of `report_to` instead of one for all: with the
            task's own steps, arguments and plain keys (`train/loss`). TensorBoard, W&B, MLflow and Trackio can do so;
            others keep one run a process, and are refused.

    Raises:
        ConfigError: naming every field that cannot be run.
    """

    max_length: int = field(default=1024, metadata={"help": "Tokens of a row after which overlong_policy applies."})
    data_timeout_s: float = field(default=300.0, metadata={"help": "Seconds to wait for the rows of a stream."})
    overlong_policy: str = field(default="truncate", metadata={"help": "truncate, drop or error."})
    max_tokens_per_micro_batch: int = field(default=4096, metadata={"help": "Tokens of one forward and backward pass."})
    chunk_size: int | None = field(default=None, metadata={"help": "Tokens of a chunk; None for the rule of M 3.5."})
    min_chunk_size: int = field(default=64, metadata={"help": "Least chunk size of the rule."})
    pad_to_chunks: bool = field(default=False, metadata={"help": "Fill each task's part up to whole chunks."})
    split_long_sequences: bool = field(default=False, metadata={"help": "Cut rows longer than a pass into chunks."})
    share_prefixes: bool | str = field(
        default="auto", metadata={"help": "Compute what rows begin with alike once: True, False, auto."}
    )
    last_layer_at_targets: bool | str = field(
        default="auto", metadata={"help": "Compute the last layer where it is read alone: True, False, auto."}
    )
    planner: str = field(default="mux", metadata={"help": "mux, together, interleaved or sequential."})
    memory_limit_gib: float | None = field(default=None, metadata={"help": "Memory of a device that a plan may fill."})
    cost_profile: str | None = field(default=None, metadata={"help": "JSON file of peft-mux profile."})
    measured_times: str = field(default="report", metadata={"help": "report, or plan: what measured times decide."})
    replan_steps: int = field(default=20, metadata={"help": "Steps after which another plan is looked for."})
    replan_gain: float = field(default=0.05, metadata={"help": "By what part it must be faster to be followed."})
    quarantine_policy: str = field(default="quarantine", metadata={"help": "quarantine or stop."})
    cuda_graphs: bool | str = field(
        default="auto", metadata={"help": "Replay passes as CUDA graphs: True, False, auto."}
    )
    tensor_parallel_size: int = field(default=1, metadata={"help": "Processes that share every layer."})
    pipeline_parallel_size: int = field(default=1, metadata={"help": "Stages of whole layers."})
    replicas: str | None = field(default=None, metadata={"help": 'Unequal replicas, such as "<2,1>, <1,1>x2".'})
    dispatch: str = field(default="balanced", metadata={"help": "balanced, length or uniform."})
    redeploy: bool = field(default=False, metadata={"help": "Move to better replicas when tasks come or go."})
    interleaved_passes: int | str = field(
        default="auto", metadata={"help": "Passes in turns under tensor parallelism: a number, or auto."}
    )
    num_micro_batches: int | None = field(default=None, metadata={"help": "Passes of tasks in a step; None to search."})
    pipeline_schedule: str = field(default="mux", metadata={"help": "mux, 1f1b, gpipe or interleaved_1f1b."})
    pipeline_flush: str = field(default="auto", metadata={"help": "auto or every_step."})
    shard_backbone: bool = field(default=False, metadata={"help": "Divide the frozen weights among replicas (FSDP2)."})
    report_per_task: bool = field(default=False, metadata={"help": "A run of its own in report_to for each task."})

    def __new__(cls, *args: Any, **settings: Any) -> MultiTaskTrainingArguments:
        """Refuse settings that there are not by saying where they belong or what was meant, which Python would not."""
        refuse_unknown(settings, (item.name for item in fields(cls)), "args")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check all fields before `TrainingArguments` completes them."""
        raise_faults(_argument_faults(self))
        # transformers refuses bf16 on a machine without an accelerator unless it is told to use the CPU.
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        # Best weights are kept in memory, so that evaluations and checkpoints need not fall together, as Trainer asks.
        best = self.load_best_model_at_end, self.metric_for_best_model, self.greater_is_better
        self.load_best_model_at_end, self.metric_for_best_model = False, None
        # Nobody reads it here, so nobody minds that it asks for workers.
        loaders = self.dataloader_prefetch_factor, self.dataloader_num_workers
        self.dataloader_prefetch_factor, self.dataloader_num_workers = None, 0
        try:
            super().__post_init__()
        except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
            raise ConfigError(f"args: transformers refuses them: {error}") from error
        self.load_best_model_at_end, self.metric_for_best_model, self.greater_is_better = best
        self.dataloader_prefetch_factor, self.dataloader_num_workers = loaders
        raise_faults(tracker_faults(self))

    @classmethod
    def from_training_arguments(cls, config: TrainingArguments, **settings: Any) -> MultiTaskTrainingArguments:
        """Return the arguments of a run as a `TrainingArguments`, such as `SFTConfig`, has them.

        Args:
            config: whose settings the run has; those of a task (`Task.from_sft_config`) become defaults of all tasks.
            **settings: what shall be other than there.

        Raises:
            ConfigError: naming every field that cannot be run.
        """
        raise_faults([Fault("config", type(config).__name__, "a TrainingArguments")] * (not _is_arguments(config)))
        names = [item.name for item in fields(TrainingArguments) if item.init and not is_default(config, item.name)]
        own = {name: getattr(config, name) for name in names}
        own = {name: getattr(value, "value", value) for name, value in own.items()}
        if hasattr(config, "max_length") and config.max_length is not None:  # type: ignore[attr-defined]
            own["max_length"] = config.max_length  # type: ignore[attr-defined]
        return cls(**{"output_dir": config.output_dir, "use_cpu": config.use_cpu, **own, **settings})

    @property
    def place_model_on_device(self) -> bool:
        """Whether Trainer places the model: no, a model may still be a description without weights."""
        return False

    @property
    def uses_checkpointing(self) -> bool:
        """Whether activations are recomputed in the backward pass, under either of the two names."""
        return bool(getattr(self, "activation_checkpointing", None) or self.gradient_checkpointing)

    @property
    def checkpointing_kwargs(self) -> dict[str, Any]:
        """Options of `torch.utils.checkpoint`, under either of the two names."""
        options = getattr(self, "activation_checkpointing_kwargs", None) or self.gradient_checkpointing_kwargs
        return dict(options) if isinstance(options, dict) else {}


def _is_arguments(config: object) -> bool:
    return isinstance(config, TrainingArguments)


def _tf32_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    # As in Trainer, but said under its name.
    if args.tf32 is True and not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8):
        return [Fault("args.tf32", "True", "False or None", "Reason: it needs a GPU of Ampere or later.")]
    return []


def _auto_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    faults = [
        Fault(f"args.{name}", shown(value), 'True, False or "auto"')
        for name in ("share_prefixes", "last_layer_at_targets", "cuda_graphs")
        if not isinstance(value := getattr(args, name), bool) and not (isinstance(value, str) and value == "auto")
    ]
    if args.cuda_graphs is True and (args.use_cpu is True or not torch.cuda.is_available()):
        faults.append(Fault("args.cuda_graphs", "True", 'False or "auto"', "Reason: a CPU has no CUDA graphs."))
    return faults


def _argument_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    # train_batch_size is a property of TrainingArguments that sets up the process group.
    faults = hyper_parameter_faults(args, "args", but=("train_batch_size", "eval_steps", "save_steps", "seed"))
    faults += [
        Fault(f"args.{name}", shown(value), f"an integer from 1 to {MOST_STEPS}, or a share of all steps below 1")
        for name in ("logging_steps", "save_steps", "eval_steps")
        if not is_interval(value := getattr(args, name)) and (value is not None or name != "eval_steps")
    ]
    faults += [
        Fault(f"args.{name}", "None", "a value: it is the default of all tasks")
        for name in _TASK_DEFAULTS
        if getattr(args, name) is None
    ]
    faults += [*honoured_field_faults(args), *unheard_faults(args)]
    return faults + _refused_fields(args) + _own_field_faults(args) + _choice_faults(args)


def _own_field_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    faults = []
    for name in ("pad_to_chunks", "shard_backbone", "redeploy", "split_long_sequences", "report_per_task"):
        if not isinstance(getattr(args, name), bool):
            faults.append(Fault(f"args.{name}", shown(getattr(args, name)), "True or False"))
    faults += [*_auto_faults(args), *_tf32_faults(args)]
    for name in _COUNTS:
        if not _is_count(getattr(args, name)):
            faults.append(Fault(f"args.{name}", shown(getattr(args, name)), f"an integer from 1 to {MOST_STEPS}"))
    turns = args.interleaved_passes
    if not (isinstance(turns, str) and turns == "auto") and not _is_count(turns):
        allowed = f'"auto", or an integer from 1 to {MOST_STEPS}'
        faults.append(Fault("args.interleaved_passes", shown(turns), allowed))
    for name in ("chunk_size", "save_total_limit", "num_micro_batches"):
        value = getattr(args, name)
        if value is not None and not _is_count(value):
            faults.append(Fault(f"args.{name}", shown(value), f"an integer from 1 to {MOST_STEPS}, or None"))
    limit = args.memory_limit_gib
    if limit is not None and not (is_real(limit) and 0 < limit <= MOST_STEPS):
        faults.append(Fault("args.memory_limit_gib", shown(limit), "a number of GiB above 0, or None"))
    if not (is_real(args.replan_gain) and 0 <= args.replan_gain <= MOST_STEPS):
        faults.append(Fault("args.replan_gain", shown(args.replan_gain), "a part of 0 or more, such as 0.05 for 5 %"))
    if args.cost_profile is not None and not _is_file(args.cost_profile):
        faults.append(
            Fault("args.cost_profile", shown(args.cost_profile), "a file that peft-mux profile wrote, or None")
        )
    if args.replicas is not None and not (isinstance(args.replicas, str) and len(args.replicas) <= 1000):
        faults.append(Fault("args.replicas", shown(args.replicas), 'a string such as "<2,1>, <1,1>x2", or None'))
    return faults


_COUNTS = (
    "max_tokens_per_micro_batch min_chunk_size per_device_train_batch_size gradient_accumulation_steps "
    "tensor_parallel_size pipeline_parallel_size replan_steps"
).split()


def _is_count(value: object) -> bool:
    return is_integer(value, 1, MOST_STEPS)


def _is_file(path: object) -> bool:
    try:
        return isinstance(path, (str, os.PathLike)) and Path(path).is_file()
    except (OSError, ValueError):  # a name that no file system takes
        return False


def _choice_faults(args: MultiTaskTrainingArguments) -> list[Fault]:
    faults = []
    for name, options in {
        "overlong_policy": OVERLONG_POLICIES,
        "planner": policy_names(),
        "pipeline_schedule": SCHEDULES,
        "pipeline_flush": FLUSHES,
        "dispatch": get_args(Policy),
        "measured_times": ("report", "plan"),
        "quarantine_policy": QUARANTINE_POLICIES,
        "save_strategy": ("steps", "epoch", "no"),
        "eval_strategy": ("steps", "epoch", "no"),
        "logging_strategy": ("steps", "epoch", "no"),
        "hub_strategy": ("end", "every_save"),
        "optim": supported_optimizers(),
        "lr_scheduler_type": supported_schedules(),
    }.items():
        value = getattr(args, name)
        # transformers makes some of them enums, others stay texts.
        value = getattr(value, "value", value)
        if not isinstance(value, str) or value not in options:
            faults.append(Fault(f"args.{name}", shown(value), ", ".join(options), closest(value, options)))
    return faults


def _refused_fields(args: MultiTaskTrainingArguments) -> list[Fault]:
    faults = []
    own = MultiTaskTrainingArguments.__annotations__
    for item in fields(args):
        # Fields that are not among the constructor's arguments are derived from the others.
        if item.name in HONOURED or item.name in HARMLESS or item.name in own or not item.init:
            continue
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        value = getattr(args, item.name)
        if not _equals(value, default):
            reason = REASONS.get(item.name, "it has no meaning for many tasks at once, or none yet")
            faults.append(Fault(f"args.{item.name}", shown(value), f"its default {default!r}", f"Reason: {reason}."))
    return faults


def _equals(value: object, default: object) -> bool:
    # Where a switch is asked for, 0 is none: what reads it later may say so in words of its own.
    if isinstance(default, bool) and not isinstance(value, bool):
        return False
    try:
        return bool(value == default)
    except Exception:  # whatever the comparison of an array, or of an object of the user's, raises
        return False


def require_arguments(args: object) -> MultiTaskTrainingArguments:
    """Return `args` if it is of our class.

    Args:
        args: what the trainer was given as its arguments.

    Raises:
        ConfigError: for a plain `TrainingArguments` or anything else.
    """
    if isinstance(args, MultiTaskTrainingArguments):
        return args
    raise ConfigError(
        f"args: got {type(args).__name__}; allowed: MultiTaskTrainingArguments (it takes all TrainingArguments fields)."
    )


SETTABLE_FIELDS = frozenset(
    item.name
    for item in fields(MultiTaskTrainingArguments)
    if item.init
    and (item.name in HONOURED or item.name in HARMLESS or item.name in MultiTaskTrainingArguments.__annotations__)
)
"""Names of the arguments that may be set; all others must stay at their defaults."""
