"""`peft-mux`: the command line, which takes its tasks from a file; `docs/commands.md` lists its commands.

The module of a command is imported when the command runs: `--help` and faults of the command line must not wait for
torch.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from peft_mux.errors import PeftMuxError, closest, installed_version, printable

_RESUME_AUTO = "--resume-auto"
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # transformers reads it, too
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "critical",
}
"""Variables of the environment that keep libraries quiet; those that are set already stay."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    It is 0 for success, 1 if a task failed, 2 for an error of the user, 3 if the training ended while a task was
    paused, and 128 + the number of a signal that ended the training: 130 after Ctrl-C, 143 after SIGTERM.

    Args:
        argv: words of the command line after the program's name; by default those that the process was started with.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    before = warnings.formatwarning
    # On one line: the place in the code that issued a warning does not help in a shell.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        arguments = _parse(words)
        if not arguments.verbose:
            os.environ.update({name: value for name, value in _QUIET.items() if name not in os.environ})
            logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        module, name = arguments.command
        return getattr(importlib.import_module(f"peft_mux.cli.{module}"), name)(arguments)
    except PeftMuxError as error:
        lines = [printable(line) for line in str(error).split("\n")]
        print("error: " + "\n".join(lines), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        warnings.formatwarning = before


def _parse(given: list[str]) -> argparse.Namespace:
    """Return the parsed options of a command line."""
    parser = argparse.ArgumentParser(
        prog="peft-mux",
        description="Train many PEFT adapters at once on one frozen backbone, each as if it were alone.",
    )
    version = installed_version("peft-mux") or "0.0.0"  # a checkout that is not installed
    parser.add_argument("--version", action="version", version=f"peft-mux {version}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = _command(
        commands, "demo", "commands.demo", "train 6 small tasks together, without network or GPU (half a minute)"
    )
    demo.add_argument("--output-dir", default="runs/demo", help="where adapters, metrics and the plot go")
    demo.add_argument("--fast", action="store_true", help="a few steps only, to see that everything runs")

    train = _command(commands, "train", "commands.train", "train the tasks of a YAML file", reads_file=True)
    train.add_argument(
        "--resume", action="store_true", help="resume the run in output_dir; --resume=auto: start one if there is none"
    )
    train.add_argument(_RESUME_AUTO, dest="resume", action="store_const", const="auto", help=argparse.SUPPRESS)
    _json(train, "print the result as JSON, everything else on standard error")
    train.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=VALUES",
        help="train a task once for each value, such as tasks.sql.learning_rate=1e-4,3e-4; may be repeated",
    )
    train.add_argument("--early-stop", choices=["halving"], help="end the worse half of a sweep at doubling steps")

    words = "show which tasks would run together, and the memory; loads no weights"
    plan = _command(commands, "plan", "commands.plan", words, reads_file=True)
    _json(plan, "print the plan as JSON")
    words = "plan for other devices, such as 4xA100-80GB, 8x4xA100-80GB, or a file that describes a cluster"
    plan.add_argument("--devices", metavar="NxNAME|FILE.yaml", help=words)
    plan.add_argument("--explain", metavar="TASK", help="explain in words what one task shares and needs")
    plan.add_argument("--gantt", action="store_true", help="draw when each pass runs, and the memory of each stage")
    plan.add_argument("--image", metavar="FILE", help="write the drawing to a .png or .svg")
    deployment = plan.add_argument_group("replicas", "which replicas of the backbone to deploy, including unequal ones")
    deployment.add_argument("--deployment", action="store_true", help="plan replicas instead of passes, as LobRA does")
    deployment.add_argument("--layer-profile", metavar="CSV", help="measured times of a layer: tp, seq_len, mbs, time")
    deployment.add_argument(
        "--free-exchange", action="store_true", help="take the exchange of gradients as free, as LobRA does"
    )
    words = "also show what failures of devices, checkpoints and restarts cost"
    deployment.add_argument("--failures-per-day", metavar="N", type=float, help=words)
    words = "with --failures-per-day: speed at which checkpoints are written (1)"
    deployment.add_argument("--storage-gb-per-s", metavar="N", type=float, help=words)
    words = "with --failures-per-day: seconds from a failure to the next step (180)"
    deployment.add_argument("--restart-s", metavar="N", type=float, help=words)
    deployment.add_argument("--max-tokens", metavar="CSV", help="maximum tokens of a micro-batch: tp, pp, max_tokens")

    init = _command(commands, "init", "starting.init", "write a tasks.yaml to begin with")
    init.add_argument("file", nargs="?", default="tasks.yaml", help="file to write (tasks.yaml)")
    init.add_argument("--model", default="Qwen/Qwen3-0.6B", help="hub id or folder of the backbone")
    init.add_argument("--data", action="append", metavar="ROWS", help="a file of rows, one for each task")
    words = "write a tasks.yaml from an SFT, DPO or KTO file of LLaMA-Factory or Axolotl"
    convert = _command(commands, "convert", "convert.convert", words)
    convert.add_argument("file", help="YAML file of the other tool")
    convert.add_argument("-o", "--output", default="tasks.yaml", metavar="FILE", help="file to write (tasks.yaml)")
    words = "show what each task trains on; loads no weights"
    _json(_command(commands, "validate", "validate.validate", words, reads_file=True))
    export = _command(commands, "export", "export.export", "serve, merge or copy the adapters of a run", reads_run=True)
    export.add_argument("task", nargs="?", metavar="TASK", help="copy the adapter of one task")
    export.add_argument("--vllm", action="store_true", help="print the command that serves all adapters (the default)")
    export.add_argument("--unfinished", action="store_true", help="also serve or merge what has steps left or failed")
    export.add_argument("--merge", metavar="TASK", help="merge one adapter into its backbone")
    export.add_argument("--output", metavar="FOLDER", help="folder for a copy or a merged model")
    generate = _command(
        commands, "generate", "saved.generate", "complete prompts with saved adapters of a run", reads_run=True
    )
    generate.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to be completed")
    _tasks(generate)
    words = "take prompts as messages of a user, with the chat template (the default of tasks with messages)"
    generate.add_argument("--chat", action=argparse.BooleanOptionalAction, help=words)
    generate.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="most tokens to generate (64)")
    words = "sample with this temperature; 0, the default, takes the likeliest token"
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help=words)

    words = "evaluate saved adapters of a run on held-out rows"
    evaluate = _command(commands, "eval", "saved.evaluate", words, reads_run=True)
    _tasks(evaluate)
    evaluate.add_argument("--data", metavar="ROWS", help="held-out rows; by default those that the run evaluates on")
    words = "also run benchmarks of lm-evaluation-harness on each adapter, such as arc_easy,hellaswag"
    evaluate.add_argument("--harness", metavar="NAMES", help=words)

    words = "show versions, devices, kernels, disk and login of this machine"
    _json(_command(commands, "doctor", "starting.doctor", words))
    _command(commands, "config-schema", "config_file.print_schema", "print the JSON schema of tasks.yaml, for editors")

    words = "show the status of each task of a run, whether or not it trains now"
    _command(commands, "status", "live.show_status", words, reads_run=True)
    for name, words in {
        "pause": "pause tasks of a running run, keeping their exact state",
        "resume": "resume paused tasks where they stopped",
        "remove": "take tasks out of a running run; their adapters are written first",
        "add": "add tasks of a YAML file to a running run",
    }.items():
        ask = _command(commands, name, "live.ask", words, reads_run=True)
        ask.set_defaults(action=name)
        if name == "add":
            ask.add_argument("file", help="tasks.yaml, of which only tasks and defaults are read")
            ask.add_argument(
                "tasks", nargs="*", metavar="TASK", help="which of its tasks; by default those that are new"
            )
        else:
            ask.add_argument("tasks", nargs="+", metavar="TASK", help="names of tasks")
        if name == "remove":
            ask.add_argument("--no-save", action="store_true", help="do not save the adapter")
        ask.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the answer (60)")
        ask.add_argument(
            "--next", action="store_true", help="if no process trains, leave it for peft-mux train --resume"
        )

    words = "serve fine-tuning to clients of the Tinker API, whose tenants share every pass"
    service = _command(commands, "serve", "serve.serve", words)
    service.add_argument("model", nargs="?", metavar="MODEL", help="hub id or folder of a causal language model")
    service.add_argument("--store", default="runs/serve", help="folder of the service (runs/serve)")
    service.add_argument(
        "--served-name", action="extend", nargs="+", default=[], metavar="NAME", help="names for clients (MODEL)"
    )
    service.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    service.add_argument("--port", type=int, default=8000, help="port to listen on (8000)")
    service.add_argument("--dtype", default="auto", help="dtype of the model (auto)")
    service.add_argument("--max-models", type=int, default=64, metavar="N", help="most models open at once (64)")
    service.add_argument("--piece-tokens", type=int, metavar="N", help="most of a call in a pass (CPU 1024, GPU 4096)")
    service.add_argument("--pass-tokens", type=int, metavar="N", help="most of a pass (CPU 2048, GPU 16384)")
    words = "share of the time for sampling while there is training (0.5)"
    service.add_argument("--sample-share", type=float, default=0.5, metavar="N", help=words)
    words = "most seconds that a request waits for an earlier one of its model that has not arrived (600)"
    service.add_argument("--max-wait-s", type=float, default=600.0, metavar="N", help=words)
    service.add_argument("--key", help="a key for development; with --status the key to ask with")
    service.add_argument("--status", metavar="URL", help="show what a server does, and the tokens of each model")

    service_keys = _command(commands, "keys", "serve.keys", "make, list or revoke the keys of a service")
    service_keys.add_argument("action", choices=["create", "list", "revoke"], help="what to do")
    service_keys.add_argument("name", nargs="?", help="name of the key, which is its tenant")
    service_keys.add_argument("--store", default="runs/serve", help="folder of the service (runs/serve)")
    service_keys.add_argument("--days", type=float, metavar="N", help="days until it expires; never by default")
    service_keys.add_argument("--max-models", type=int, metavar="N", help="most models that it may have open")
    service_keys.add_argument("--max-queued-tokens", type=int, metavar="N", help="most tokens that may wait or run")
    service_keys.add_argument("--admin", action="store_true", help="may see the usage of all keys")

    words = "measure the backbone on this device, to plan with; under a minute"
    profile = _command(commands, "profile", "commands.profile", words, reads_file=True)
    profile.add_argument("--output", default="profile.json", help="file for the measured profile")
    profile.add_argument("--seconds", type=float, default=60.0, help="time limit in seconds (60)")
    profile.add_argument("--refresh", action="store_true", help="measure again even if a matching profile is stored")
    _json(profile, "print the profile as JSON")
    command = next((word for word in given if not word.startswith("-")), None)
    if command is not None and command not in commands.choices:
        names = list(commands.choices)
        parser.error(f"command must be one of {', '.join(names)}, got {command!r}. {closest(command, names)}".rstrip())
    # argparse cannot have an option whose value is optional and may stand before FILE.
    given = [_RESUME_AUTO if word == "--resume=auto" else word for word in given]
    return parser.parse_args(given, argparse.Namespace(words=given))


def _command(
    commands: Any, name: str, function: str, words: str, *, reads_file: bool = False, reads_run: bool = False
) -> argparse.ArgumentParser:
    """Add a command, whose `function` is "module.name"; return its parser."""
    parser = commands.add_parser(name, help=words)
    parser.set_defaults(command=function.split("."))
    parser.add_argument("--verbose", action="store_true", help="show what libraries log, and their progress bars")
    if reads_file:
        parser.add_argument("file", help="tasks.yaml; see the README for its form")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            dest="overrides",
            help="replace one value of the file, such as tasks.sql.learning_rate=1e-4; may be repeated",
        )
    if reads_run:
        parser.add_argument("run", metavar="RUN", help="folder of the run (its output_dir)")
        _json(parser)
    return parser


def _tasks(parser: argparse.ArgumentParser) -> None:
    words = "name of a task; may be repeated; by default all with a saved adapter"
    parser.add_argument("--task", action="append", default=[], dest="tasks", metavar="TASK", help=words)


def _json(parser: argparse.ArgumentParser, words: str = "print JSON") -> None:
    parser.add_argument("--json", action="store_true", help=words)
