"""What `train --json` and `profile --json` print: one JSON object on standard output, all else on standard error."""

# MERGED: `peft-mux plan --devices`: the plan for devices that are not here, shared as the file's arguments say.
# MERGED: `peft-mux plan --deployment`: which replicas to deploy, shown as tables, JSON and a picture.
# MERGED: `peft-mux train --sweep`: tasks of a file, each with many settings.
# MERGED: `peft-mux`: the same as in Python, from a file and from a shell; `docs/commands.md` lists its commands.

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from peft_mux.cli import live
from peft_mux.errors import ConfigError, PeftMuxError, closest
from peft_mux.scheduler.plan import Plan

if TYPE_CHECKING:
    from peft_mux.trainer.trainer import MultiTaskTrainer


def told_aside(*, is_json: bool) -> AbstractContextManager[Any]:
    """Send what is told on the way to standard error, where JSON is to stand alone on standard output."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite, which JSON has not, as null."""
    print(json.dumps(_plain(value), indent=1))  # noqa: T201


def run_summary(trainer: Any, results: Sequence[Any]) -> dict[str, Any]:
    """Return what a run came to: its folder and steps, each task's line of the report, and the rankings of sweeps.

    Args:
        trainer: has trained.
        results: the result of each sweep.
    """
    rows = [row._asdict() for row in trainer.report().rows]
    return {
        "output_dir": trainer.args.output_dir,
        "step": trainer.state.global_step,
        "interrupted_by": trainer.interrupted_by or None,
        "tasks": {row.pop("name"): row for row in rows},
        "sweeps": [asdict(result) for result in results],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def plan_for_devices(arguments: argparse.Namespace, config: Any, make_trainer: Callable[[Any], Any]) -> Plan:
    """Return the plan for `--devices`.

    A trainer lays out the processes that it is in, and this is one process, whatever devices are asked about. So it is
    made as for one, and the planner is told how the devices share the backbone.

    Args:
        arguments: parsed options of `peft-mux plan`, among them `devices`.
        config: `RunConfig` that was read from the file; its arguments are changed to those of one process.
        make_trainer: takes a `RunConfig` and returns the trainer of its tasks.

    Raises:
        ConfigError: for unknown devices, or a number of them that cannot be divided so.
    """
    args = config.args
    devices_per_stage, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    args.tensor_parallel_size = args.pipeline_parallel_size = 1
    trainer = make_trainer(config)
    return trainer.plan(arguments.devices, num_stages=num_stages, devices_per_stage=devices_per_stage)


def show_deployment(trainer: MultiTaskTrainer, arguments: argparse.Namespace) -> int:
    """Plan and print a deployment; return the exit status.

    Args:
        trainer: trainer of the tasks that the file describes; nothing of it is changed.
        arguments: parsed options of `peft-mux plan`.

    Raises:
        ConfigError: for options that do not go together, unknown devices, or tasks that no replica can hold.
    """
    from peft_mux.planning.replica_facts import LayerProfile
    from peft_mux.scheduler.deployment.report import save_deployment

    _refuse_options_of_passes(arguments)
    measured = LayerProfile(arguments.layer_profile, arguments.max_tokens) if arguments.layer_profile else None
    report = trainer.plan_deployment(arguments.devices, measured=measured)
    print(report.to_json() if arguments.json else f"{report}\n\n{report.picture()}")  # noqa: T201
    if arguments.image:
        drawn = save_deployment(report, arguments.image)
        if not arguments.json:
            print(f"drawn: {drawn}")  # noqa: T201
    return 0


def _refuse_options_of_passes(arguments: argparse.Namespace) -> None:
    for option in ("explain", "gantt"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option}: got it together with --deployment; allowed: one of them. Leave --deployment out."
            )
    if arguments.max_tokens and not arguments.layer_profile:
        raise ConfigError("--max-tokens: got it without --layer-profile; allowed: both. Add the measured times.")


def add_sweep_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of sweeps to a command.

    Args:
        parser: that of the command that trains.
    """
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="train a task once for each value, such as tasks.sql.learning_rate=1e-4,3e-4; may be repeated",
    )
    parser.add_argument("--early-stop", choices=["halving"], help="end the worse half of a sweep at doubling steps")


def swept(config: Any, options: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return a file's configuration with the tasks of its sweeps in place of those that are swept, and the sweeps.

    Args:
        config: the `RunConfig` that was read.
        options: texts such as `tasks.sql.peft.r=8,16`.

    Raises:
        ConfigError: naming what cannot be swept.
    """
    from peft_mux.trainer.sweep import sweep_tasks

    grids = _grids(options, [task.name for task in config.tasks])
    contests, tasks = [], []
    for task in config.tasks:
        if task.name not in grids:
            tasks.append(task)
            continue
        contest, own = sweep_tasks(task, grids[task.name])
        contests.append(contest)
        tasks += own
    return replace(config, tasks=tasks), contests


def _grids(options: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    from peft_mux.cli.config_file import parse_value

    grids: dict[str, dict[str, list[Any]]] = {}
    for option in options:
        key, separator, text = option.partition("=")
        parts = key.split(".", 2)
        if not separator or len(parts) != 3 or parts[0] != "tasks":
            raise ConfigError(f"--sweep: got {option!r}; allowed: tasks.NAME.FIELD=VALUE,VALUE.")
        if parts[1] not in names:
            hint = closest(parts[1], names)
            raise ConfigError(f"--sweep: got task {parts[1]!r}; allowed: {', '.join(names)}. {hint}".rstrip())
        field = parts[2].replace("peft.", "peft_config.", 1) if parts[2].startswith("peft.") else parts[2]
        # As a list of YAML, so that lists and texts with commas in them can be values.
        values = parse_value(text if text.startswith("[[") else f"[{text}]", f"--sweep {key}")
        grids.setdefault(parts[1], {})[field] = values
    return grids


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    It is 0 if all is well, 1 if a task failed, 2 for a fault of the user's, and 128 + the number of a signal that ended
    the training: 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        argv: words of the command line after the program's name; by default those that the process was started with.
    """
    arguments = _parser().parse_args(argv)
    try:
        with _short_warnings():
            return arguments.command(arguments)
    except PeftMuxError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 128 + signal.SIGINT


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Print warnings as one line: where in a package one was made tells nothing to who reads it in a shell."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="peft-mux",
        description="Train many PEFT adapters at once on one frozen backbone, each as if it were alone.",
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser("demo", help="train 6 small tasks together, without network or GPU (about 2 minutes)")
    demo.add_argument("--output-dir", default="runs/demo", help="where adapters, metrics and the plot go")
    demo.add_argument("--fast", action="store_true", help="a few steps only, to see that everything runs")
    demo.set_defaults(command=_demo)
    train = commands.add_parser("train", help="train the tasks of a YAML file")
    _file_arguments(train)
    train.add_argument("--resume", action="store_true", help="go on with the run in output_dir")
    train.add_argument("--json", action="store_true", help="print what it came to as JSON, all else on standard error")
    add_sweep_options(train)
    train.set_defaults(command=_train)
    plan = commands.add_parser("plan", help="show what would run together and in how much memory; loads no weights")
    _file_arguments(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument("--devices", metavar="NxNAME", help="plan for other devices, such as 4xA100-80GB")
    plan.add_argument("--explain", metavar="TASK", help="say in sentences what one task shares and needs")
    plan.add_argument("--gantt", action="store_true", help="draw when each pass runs, and the memory of each stage")
    plan.add_argument("--image", metavar="FILE", help="draw the same into a .png or .svg")
    deployment = plan.add_argument_group("replicas", "which replicas of the backbone to deploy, unlike ones included")
    deployment.add_argument("--deployment", action="store_true", help="plan replicas instead of passes, as LobRA does")
    deployment.add_argument("--layer-profile", metavar="CSV", help="measured times of a layer: tp, seq_len, mbs, time")
    deployment.add_argument("--max-tokens", metavar="CSV", help="most tokens of a micro-batch: tp, pp, max_tokens")
    plan.set_defaults(command=_plan)
    _add_other_commands(commands)
    live.add_commands(commands)
    profile = commands.add_parser("profile", help="measure the backbone on this device, to plan with; under a minute")
    _file_arguments(profile)
    profile.add_argument("--output", default="profile.json", help="where the measured profile goes")
    profile.add_argument("--seconds", type=float, default=60.0, help="how long it may take (60)")
    profile.add_argument("--refresh", action="store_true", help="measure anew although one that fits is stored")
    profile.add_argument("--json", action="store_true", help="print the profile as JSON")
    profile.set_defaults(command=_profile)
    return parser


def _add_other_commands(commands: Any) -> None:
    """Add what is done before a run and after it."""
    init = commands.add_parser("init", help="write a tasks.yaml to begin with")
    init.add_argument("file", nargs="?", default="tasks.yaml", help="where it goes (tasks.yaml)")
    init.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of the backbone")
    init.add_argument("--data", action="append", metavar="ROWS", help="a file of rows, one for each task")
    init.set_defaults(command=_of("starting", "init"))
    validate = commands.add_parser("validate", help="show what each task trains on; loads no weights")
    _file_arguments(validate)
    validate.add_argument("--json", action="store_true", help="print JSON")
    validate.set_defaults(command=_validate)
    export = commands.add_parser("export", help="serve, merge or copy the adapters of a run")
    export.add_argument("run", metavar="RUN", help="folder of the run (its output_dir)")
    export.add_argument("task", nargs="?", metavar="TASK", help="copy the adapter of one task")
    export.add_argument("--vllm", action="store_true", help="print the command that serves all adapters (the default)")
    export.add_argument("--merge", metavar="TASK", help="merge one adapter into its backbone")
    export.add_argument("--output", metavar="FOLDER", help="where a copy or a merged model goes")
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(command=_of("export", "export"))
    doctor = commands.add_parser("doctor", help="show versions, devices, kernels, disk and log-in of this machine")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=_of("starting", "doctor"))
    schema = commands.add_parser("config-schema", help="print the JSON schema of tasks.yaml, for editors")
    schema.set_defaults(command=_of("starting", "print_schema"))


def _of(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command of a module that is imported when it is called: --help must not wait for torch."""
    return lambda arguments: getattr(importlib.import_module(f"peft_mux.cli.{module}"), name)(arguments)


def _validate(arguments: argparse.Namespace) -> int:
    from peft_mux.cli.validate import show_rows

    return show_rows(_trainer_of_file(arguments), arguments)


def _file_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="tasks.yaml; see the README for its form")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="overrides",
        help="replace one value of the file, such as tasks.sql.learning_rate=1e-4; may be repeated",
    )


def _demo(arguments: argparse.Namespace) -> int:
    # Imported here, as in all commands: --help and faults of the command line must not wait for torch.
    from peft_mux.demo.run import run_demo

    return run_demo(arguments.output_dir, fast=arguments.fast)


def _train(arguments: argparse.Namespace) -> int:

    with told_aside(is_json=arguments.json):
        status, trainer, results = _trained(arguments)
    if arguments.json and trainer.is_world_process_zero():
        print_json(run_summary(trainer, results))
    return status


def _trained(arguments: argparse.Namespace) -> tuple[int, Any, list[Any]]:
    """Train the tasks of a file; return the exit status, the trainer, and the results of sweeps."""
    # A launcher starts this command once for each process; what it prints shall be there once.
    from peft_mux.trainer.sweep import add_referee, end_sweeps

    if arguments.early_stop is not None and not arguments.sweep:
        raise ConfigError("--early-stop: got it without --sweep; allowed: both. Name what is swept, or leave it out.")
    config, contests = swept(_read_config(arguments), arguments.sweep)
    _check_folder(config.args, is_resumed=arguments.resume)
    trainer = _make_trainer(config)
    referee = add_referee(trainer, contests, early_stop=arguments.early_stop)
    is_shown = trainer.is_world_process_zero()
    if is_shown:
        print(_shown(trainer.plan()), flush=True)  # noqa: T201
    trainer.control_channel.read_tasks = _tasks_of_file
    trainer.train(resume_from_checkpoint=arguments.resume or None)
    if trainer.interrupted_by:
        return 128 + trainer.interrupted_by, trainer, []
    results = end_sweeps(trainer, referee)
    has_failed = any(status == "failed" for status in trainer.task_statuses.values())
    return int(has_failed), trainer, results


def _check_folder(args: Any, *, is_resumed: bool) -> None:
    """Look at the run folder before rows are tokenised; several processes do so when they have met."""
    from peft_mux.checkpoint.run_folder import refuse_held_folder, require_state
    from peft_mux.trainer.run import output_folder

    if args.world_size == 1 and args.save_strategy != "no":
        (require_state if is_resumed else refuse_held_folder)(output_folder(args))


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.deployment:
        return show_deployment(_trainer_of_file(arguments), arguments)
    for option in ("layer_profile", "max_tokens"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option.replace('_', '-')}: got it without --deployment; allowed: both. Add it.")
    if arguments.devices is None:
        plan = _trainer_of_file(arguments).plan()
    else:
        plan = plan_for_devices(arguments, _read_config(arguments), _make_trainer)
    if arguments.json:
        print(plan.to_json())  # noqa: T201
    elif arguments.explain:
        try:
            print(plan.explain(arguments.explain))  # noqa: T201
        except ValueError as error:
            raise ConfigError(f"--explain: {error}") from error
    else:
        print(_shown(plan))  # noqa: T201
    if arguments.gantt:
        print(f"\n{plan.gantt()}\n\n{plan.memory_bars()}")  # noqa: T201
    if arguments.image:
        print(f"drawn: {plan.save_gantt(arguments.image)}")  # noqa: T201
    return 0


def _shown(plan: Any) -> str:
    """Return a plan as text, its memory in red on a terminal where it takes more than 95 % of a device."""
    bar = plan.memory_bar
    if not bar.is_nearly_full or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return str(plan)
    line = bar.lines()[0]
    return str(plan).replace(line, f"\x1b[31m{line}\x1b[0m")


def _profile(arguments: argparse.Namespace) -> int:
    import json
    from pathlib import Path

    from peft_mux.scheduler.costs.profile import profile_text
    from peft_mux.storage import write_file

    path = Path(arguments.output)
    stored = path.parent / "profiles"  # by device, dtype, shapes and versions
    with told_aside(is_json=arguments.json):
        trainer = _trainer_of_file(arguments)
        is_main = trainer.is_world_process_zero()
        # On every process, as the link between them is measured too; one of them keeps the result.
        folder = stored if is_main else None
        profile = trainer.measure_profile(arguments.seconds, folder=folder, refresh=arguments.refresh)
    if not is_main:
        return 0
    write_file(path, profile.to_json().encode())
    if arguments.json:
        print_json({"written": path, "profile": json.loads(profile.to_json())})
    else:
        print(f"{profile_text(profile)}\nwritten: {path}; to plan with it, set run.cost_profile: {path}")  # noqa: T201
    return 0


def _tasks_of_file(file: str, names: Sequence[str]) -> list[Any]:
    """Return some tasks of a file, by default all, to be added to a run."""
    from peft_mux.cli.config_file import read_config

    tasks = read_config(file).tasks
    there = [task.name for task in tasks]
    missing = [name for name in names if name not in there]
    if missing:
        raise ConfigError(f"add: got {', '.join(missing)}; allowed: tasks of {file}: {', '.join(there)}.")
    return [task for task in tasks if not names or task.name in names]


def _read_config(arguments: argparse.Namespace) -> Any:
    from peft_mux.cli.config_file import read_config

    return read_config(arguments.file, arguments.overrides)


def _trainer_of_file(arguments: argparse.Namespace) -> Any:
    return _make_trainer(_read_config(arguments))


def _make_trainer(config: Any) -> Any:
    from peft_mux.trainer.trainer import MultiTaskTrainer

    tokenizer = None
    if config.tokenizer is not None:
        from transformers import AutoTokenizer

        try:
            # Said, not left open, as transformers would ask on standard input.
            is_trusted = config.model_init_kwargs.get("trust_remote_code") is True
            tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, trust_remote_code=is_trusted)
        except (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError) as error:
            raise ConfigError(f'tokenizer: got "{config.tokenizer}", which cannot be read: {error}') from error
    return MultiTaskTrainer(
        config.model,
        config.args,
        config.tasks,
        processing_class=tokenizer,
        model_init_kwargs=config.model_init_kwargs,
    )
