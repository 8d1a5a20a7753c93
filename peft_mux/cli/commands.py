"""`peft-mux train | plan | profile | demo`: run the trainer of a file's tasks from a shell."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer, TrainerCallback

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.run_folder import refuse_held_folder, require_state
from peft_mux.cli.config_file import RECORD_NAME, RunConfig, located, parse_value, read_cluster, read_config
from peft_mux.errors import ConfigError, PeftMuxError, closest, raise_faults
from peft_mux.log.lines import window_width, wrapped
from peft_mux.planning.replica_facts import LayerProfile
from peft_mux.scheduler.costs.profile import profile_text
from peft_mux.scheduler.deployment.deployment_report import save_deployment
from peft_mux.scheduler.plan_views import Plan, memory_bar, memory_bars
from peft_mux.storage import FolderLock, write_file
from peft_mux.sweeps import add_referee, end_sweeps, sweep_tasks
from peft_mux.task import Task
from peft_mux.trainer.run import output_folder
from peft_mux.trainer.trainer import MultiTaskTrainer

_PAUSED = 3
"""Exit status of a training that has ended while a task was paused, and none failed."""


def demo(arguments: argparse.Namespace) -> int:
    """Train the tasks of the demo; return the exit status."""
    # By name, because in a checkout the modules of the demo are in examples/demo.
    run = importlib.import_module("peft_mux.demo.run")
    return run.run_demo(arguments.output_dir, fast=arguments.fast, verbose=arguments.verbose)


def train(arguments: argparse.Namespace) -> int:
    """Train the tasks of a file; return the exit status.

    A launcher starts this command once for each process; only the main one prints.
    """
    if arguments.early_stop is not None and not arguments.sweep:
        raise ConfigError("--early-stop needs --sweep. Name what is swept, or leave it out.")
    # Standard output gets nothing but the JSON.
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext(), ExitStack() as stack:
        locks: list[FolderLock] = []

        def keep_folder(args: MultiTaskTrainingArguments) -> None:
            """Keep and check the run folder before rows are read; `peft-mux status` then says what is loaded."""
            if args.process_index == 0:
                locks.append(FolderLock(output_folder(args), "data"))
                locks[0].acquire()
                stack.callback(locks[0].release)
            # Several processes check it once they are connected.
            if args.world_size == 1 and args.save_strategy != "no" and arguments.resume != "auto":
                if not arguments.resume:
                    refuse_held_folder(output_folder(args))
                elif args.upload_to is None:  # otherwise the state may be there alone
                    require_state(output_folder(args))

        config = read_config(arguments.file, arguments.overrides, keep_folder)
        config, contests = _swept(config, arguments.sweep)
        trainer = make_trainer(config)
        words = [word for word in arguments.words if word not in ("--resume", "--resume=auto", "--resume-auto")]
        program = "peft-mux" if config.args.world_size == 1 else "LAUNCHER -m peft_mux"
        trainer.use_command(f"{program} {shlex.join([*words, '--resume'])}", locks[0] if locks else None)
        referee = add_referee(trainer, contests, early_stop=arguments.early_stop)
        if trainer.is_world_process_zero():
            print(_shown(trainer.plan()), flush=True)
        record = _Record(config)
        trainer.add_callback(record)
        trainer.control_channel.read_tasks = record.add_tasks
        trainer.train(resume_from_checkpoint=arguments.resume or None)
        results = [] if trainer.interrupted_by else end_sweeps(trainer, referee)
    if arguments.json and trainer.is_world_process_zero():
        rows = [row._asdict() for row in trainer.report().rows]
        summary = {
            "output_dir": trainer.args.output_dir,
            "step": trainer.state.global_step,
            "interrupted_by": trainer.interrupted_by or None,
            "tasks": {row.pop("name"): row for row in rows},
            "sweeps": [asdict(result) for result in results],
        }
        print(json.dumps(_plain(summary), indent=1))
    if trainer.interrupted_by:
        return 128 + trainer.interrupted_by
    statuses = trainer.task_statuses.values()
    return 1 if "failed" in statuses else _PAUSED if "paused" in statuses else 0


def plan(arguments: argparse.Namespace) -> int:
    """Print the plan of a file's tasks, or of their deployment; return the exit status.

    Raises:
        ConfigError: for options that do not go together, unknown devices, or tasks that no replica can hold.
    """
    config, devices = read_config(arguments.file, arguments.overrides), arguments.devices
    if devices and Path(devices).suffix in (".yaml", ".yml"):
        devices = read_cluster(devices)
    if arguments.deployment:
        for option in ("explain", "gantt"):
            if getattr(arguments, option):
                raise ConfigError(f"--{option} cannot be combined with --deployment. Leave --deployment out.")
        if arguments.max_tokens and not arguments.layer_profile:
            raise ConfigError("--max-tokens needs --layer-profile. Add the measured times.")
        failures = {
            name: value for name in ("storage_gb_per_s", "restart_s") if (value := getattr(arguments, name)) is not None
        }
        if failures and arguments.failures_per_day is None:
            raise ConfigError(f"--{next(iter(failures)).replace('_', '-')} needs --failures-per-day. Add it.")
        measured = LayerProfile(arguments.layer_profile, arguments.max_tokens) if arguments.layer_profile else None
        report = make_trainer(config).plan_deployment(
            devices,
            measured=measured,
            free_exchange=arguments.free_exchange,
            failures_per_day=arguments.failures_per_day,
            **failures,
        )
        print(report.to_json() if arguments.json else wrapped(f"{report}\n\n{report.picture()}", window_width()))
        if arguments.image:
            drawn = save_deployment(report, arguments.image)
            if not arguments.json:
                print(f"drawn: {drawn}")
        return 0
    for option in ("layer_profile", "max_tokens", "free_exchange", "failures_per_day", "storage_gb_per_s", "restart_s"):
        if getattr(arguments, option) not in (None, False):
            raise ConfigError(f"--{option.replace('_', '-')} needs --deployment. Add it.")
    layout = {}
    if devices is not None:
        # A trainer lays out the processes that it runs in, and this is a single one, whatever devices the plan is for.
        # So the trainer is made for one process, and the planner gets how the devices share the backbone.
        args = config.args
        layout = {"num_stages": args.pipeline_parallel_size, "devices_per_stage": args.tensor_parallel_size}
        args.tensor_parallel_size = args.pipeline_parallel_size = 1
    planned = make_trainer(config).plan(devices, **layout)
    if arguments.json:
        print(planned.to_json())
    elif arguments.explain:
        try:
            print(wrapped(planned.explain(arguments.explain), window_width()))
        except ValueError as error:
            raise ConfigError(f"--explain: {error}") from error
    else:
        print(_shown(planned))
    if arguments.gantt:
        print(f"\n{planned.gantt(min(window_width(), 120))}\n\n{memory_bars(planned)}")
    if arguments.image:
        print(f"drawn: {planned.save_gantt(arguments.image)}")
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Measure the backbone on this device, and write and print its profile; return the exit status."""
    path = Path(arguments.output)
    with redirect_stdout(sys.stderr) if arguments.json else nullcontext():
        trainer = make_trainer(read_config(arguments.file, arguments.overrides))
        is_main = trainer.is_world_process_zero()
        # On every process, as the link between them is measured too; the main one stores the result by device, dtype,
        # shapes and versions.
        folder = path.parent / "profiles" if is_main else None
        measured = trainer.measure_profile(arguments.seconds, folder=folder, refresh=arguments.refresh)
    if not is_main:
        return 0
    write_file(path, measured.to_json().encode())
    if arguments.json:
        print(json.dumps(_plain({"written": path, "profile": json.loads(measured.to_json())}), indent=1))
    else:
        text = f"{profile_text(measured)}\nwritten: {path}; to plan with it, set run.cost_profile: {path.absolute()}"
        print(wrapped(text, window_width()))
    return 0


def make_trainer(config: RunConfig) -> MultiTaskTrainer:
    """Return the trainer of the tasks that a file describes.

    Raises:
        ConfigError: if the tokenizer cannot be read, or the trainer refuses the tasks.
    """
    tokenizer = None
    if config.tokenizer is not None:
        try:
            # Explicit, as transformers would otherwise ask on standard input.
            is_trusted = config.model_init_kwargs.get("trust_remote_code") is True
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=is_trusted)
        except (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError) as error:
            raise ConfigError(
                f'tokenizer "{config.tokenizer}" cannot be read: {" ".join(str(error).split())} '
                f"{config.absent.get('tokenizer', '')}".rstrip()
            ) from error
    options = {"processing_class": tokenizer, "model_init_kwargs": config.model_init_kwargs}
    try:
        return MultiTaskTrainer(config.model, config.args, config.tasks, **options)
    except PeftMuxError as error:
        raise_faults(located(error.faults, config.file, config.lines, config.absent), type(error))
        if "model" in config.absent and str(error).startswith("model "):
            raise type(error)(f"{error} {config.absent['model']}") from error
        raise  # an error without faults


def _swept(config: RunConfig, options: Sequence[str]) -> tuple[RunConfig, list[Any]]:
    """Return a configuration in which the tasks of its sweeps replace the swept ones, and the sweeps.

    Args:
        config: the configuration of a file.
        options: texts such as `tasks.sql.peft.r=8,16`.

    Raises:
        ConfigError: naming what cannot be swept.
    """
    names = [task.name for task in config.tasks]
    grids: dict[str, dict[str, list[Any]]] = {}
    for option in options:
        key, separator, text = option.partition("=")
        parts = key.split(".", 2)
        if not separator or len(parts) != 3 or parts[0] != "tasks":
            raise ConfigError(f"--sweep must be tasks.NAME.FIELD=VALUE,VALUE, got {option!r}.")
        if parts[1] not in names:
            hint = closest(parts[1], names)
            raise ConfigError(
                f"--sweep must name one of the tasks {', '.join(names)}, got {parts[1]!r}. {hint}".rstrip()
            )
        field = parts[2].replace("peft.", "peft_config.", 1) if parts[2].startswith("peft.") else parts[2]
        # Read as a YAML list, so that values can be lists, or strings with commas.
        values = parse_value(text if text.startswith("[[") else f"[{text}]", f"--sweep {key}")
        grids.setdefault(parts[1], {})[field] = values
    contests, tasks = [], []
    for task in config.tasks:
        if task.name in grids:
            contest, trials = sweep_tasks(task, grids[task.name])
            contests.append(contest)
            tasks += trials
        else:
            tasks.append(task)
    return replace(config, tasks=tasks), contests


class _Record(TrainerCallback):
    """Writes what the tasks of a run were made from into its folder, and reads tasks that are added to it."""

    def __init__(self, config: RunConfig) -> None:
        self._args, self._record = config.args, config.record

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Write the file."""
        if self._args.process_index == 0:
            path = output_folder(self._args) / RECORD_NAME
            write_file(path, yaml.safe_dump(self._record, sort_keys=False, allow_unicode=True).encode())

    def add_tasks(self, file: str, names: Sequence[str]) -> list[Task]:
        """Return some tasks of a file, by default all, to be added to a run."""
        config = read_config(file, is_added=True)
        there = [task.name for task in config.tasks]
        missing = [name for name in names if name not in there]
        if missing:
            raise ConfigError(f"add: {', '.join(missing)} must be tasks of {file}: {', '.join(there)}.")
        self._record["tasks"] = {**config.record["tasks"], **self._record["tasks"]}
        self.on_train_begin()
        return [task for task in config.tasks if not names or task.name in names]


def _shown(plan: Plan) -> str:
    """Return a plan as text for the window, its memory in red on a terminal if it takes more than 95 % of a device."""
    bar, width = memory_bar(plan), window_width()
    text = wrapped(plan.summary(width), width)
    if not bar.is_nearly_full or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    line = wrapped(bar.lines()[0], width)
    return text.replace(line, f"\x1b[31m{line}\x1b[0m")


def _plain(value: Any) -> Any:
    """Return a value as JSON can hold it; numbers that are not finite, which JSON does not have, become null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
