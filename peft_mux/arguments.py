"""`MultiTaskTrainingArguments`: what holds for the whole run, and completes the settings of its tasks.

It is `transformers.TrainingArguments` plus the knobs of multiplexing. An inherited field that cannot mean anything for
many tasks (or is not built yet) is refused when it is set, never accepted and ignored.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import TrainingArguments

from peft_mux.argument_fields import (
    FLUSHES,
    HARMLESS,
    HONOURED,
    OVERLONG_POLICIES,
    QUARANTINE_POLICIES,
    REASONS,
    honoured_field_faults,
    tracker_faults,
    unheard_faults,
)
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
from peft_mux.task_interop import is_default

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
