"""`peft-mux status | pause | resume | remove | add`: a look at a run, and requests to the process that trains it."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError

_FIX = (
    "Go on with it by peft-mux train FILE --resume, and add --next to have this done then, before its first step. (A "
    "run whose tasks all rest has ended.)"
)


def add_commands(commands: Any) -> None:
    """Add these commands to a parser."""
    status = commands.add_parser("status", help="show where each task of a run stands, whether or not it trains now")
    _run_argument(status)
    status.set_defaults(command=show_status)
    for name, text in {
        "pause": "let tasks of a running run rest, with their exact state",
        "resume": "let paused tasks go on where they stopped",
        "remove": "take tasks out of a running run; their adapters are written first",
    }.items():
        parser = commands.add_parser(name, help=text)
        _run_argument(parser)
        parser.add_argument("tasks", nargs="+", metavar="TASK", help="names of tasks")
        if name == "remove":
            parser.add_argument("--no-save", action="store_true", help="give the adapter up")
        _channel_arguments(parser)
        parser.set_defaults(command=ask, action=name)
    add = commands.add_parser("add", help="add tasks of a YAML file to a running run")
    _run_argument(add)
    add.add_argument("file", help="tasks.yaml, of which only tasks and defaults are read")
    add.add_argument("tasks", nargs="*", metavar="TASK", help="which of its tasks; by default those that are new")
    _channel_arguments(add)
    add.set_defaults(command=ask, action="add")


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of the run (its output_dir)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _channel_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for the answer (60)")
    parser.add_argument("--next", action="store_true", help="where nobody trains: leave it for peft-mux train --resume")


def show_status(arguments: argparse.Namespace) -> int:
    """Print where each task of a run stands; return the exit status.

    Raises:
        ConfigError: if the folder holds no run.
    """
    from peft_mux.reporting.metrics_file import METRICS_NAME, read_metrics
    from peft_mux.reporting.screen import table_text
    from peft_mux.reporting.views import interrupted, view_of_records
    from peft_mux.storage import keeper_of
    from peft_mux.trainer.control import Mailbox

    root = _run_folder(arguments.run)
    records = read_metrics(root / METRICS_NAME) if (root / METRICS_NAME).is_file() else []
    view, keeper = view_of_records(records, _num_steps(root)), keeper_of(root)
    waiting = [{"request": name, **request} for name, request in Mailbox(root).requests()]
    if arguments.json:
        tasks = {
            one.name: {
                "status": one.status,
                "step": one.step,
                "num_steps": one.num_steps,
                "loss": one.loss,
                "eval_loss": one.eval_loss,
                "reason": one.reason,
                "token_share": one.share,
            }
            for one in view.tasks
        }
        is_interrupted = not keeper and interrupted(view).is_interrupted
        found = {"run": str(root), "trained_by": keeper or None, "interrupted": is_interrupted, "tasks": tasks}
        found["requests"] = waiting
        print(json.dumps(found, indent=1, default=str))  # noqa: T201
        return 0
    width = shutil.get_terminal_size((100, 24)).columns
    print(table_text(view if keeper else interrupted(view), width))  # noqa: T201
    for one in view.tasks:
        if one.reason:
            print(f"{one.name}: {one.reason}")  # noqa: T201
    print(f"{f'{keeper} trains' if keeper else 'nobody trains'} in {root}")  # noqa: T201
    for request in waiting:
        print(f"not taken up yet: {request.get('command')} {request.get('task') or request.get('file')}")  # noqa: T201
    return 0


def ask(arguments: argparse.Namespace) -> int:
    """Send requests to the process that trains a run, and print its answers; return the exit status.

    Raises:
        ConfigError: if nobody trains there, or nobody answers in time.
    """
    from peft_mux.storage import keeper_of
    from peft_mux.trainer.control import Mailbox

    root, mailbox = _run_folder(arguments.run), Mailbox(Path(arguments.run))
    keeper = keeper_of(root)
    if not keeper and not arguments.next:
        raise ConfigError(f"{arguments.action}: got {root}, in which nobody trains; allowed: a run that trains. {_FIX}")
    requests = _requests(arguments)
    names = [mailbox.send(request) for request in requests]
    if keeper:
        answers = [_answer(root, name, arguments, keeper) for name in names]
    else:
        left = "left for the next peft-mux train FILE --resume: "
        answers = [{"ok": True, "said": f"{left}{one['command']} {one.get('task') or one['file']}"} for one in requests]
    if arguments.json:
        print(json.dumps(answers, indent=1))  # noqa: T201
    else:
        for answer in answers:
            print(answer["said"] if answer["ok"] else f"not done: {answer['said']}")  # noqa: T201
    return 0 if all(answer["ok"] for answer in answers) else 2


def _requests(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    if arguments.action == "add":
        file = str(Path(arguments.file).resolve())
        return [{"command": "add", "file": file, "tasks": list(arguments.tasks)}]
    more = {"save": not arguments.no_save} if arguments.action == "remove" else {}
    return [{"command": arguments.action, "task": name, **more} for name in dict.fromkeys(arguments.tasks)]


def _answer(root: Path, name: str, arguments: argparse.Namespace, keeper: str) -> Mapping[str, Any]:
    from peft_mux.storage import keeper_of
    from peft_mux.trainer.control import Mailbox

    mailbox = Mailbox(root)
    # A run may end, or be killed, before it looks: nobody answers then.
    answer = mailbox.wait(name, arguments.timeout, lambda: keeper_of(root))
    if answer is None:
        trains = keeper_of(root)
        until = f"within {arguments.timeout:g} s" if trains else "before its training ended"
        later = "it may still be done after the step in progress" if trains else "it may have been done"
        fix = "A step may take longer: raise --timeout." if trains else _FIX
        done = "it was taken back" if mailbox.withdraw(name) else later
        raise ConfigError(f"{arguments.action}: got no answer of {keeper} {until}; {done}. {fix}")
    return {"ok": bool(answer.get("ok")), "said": str(answer.get("said", ""))}


def _run_folder(given: str) -> Path:
    from peft_mux.reporting.metrics_file import METRICS_NAME

    root = Path(given)
    if not any((root / name).exists() for name in (METRICS_NAME, "config.json", "state", "run.lock")):
        raise ConfigError(f"run: got {given!r}, which holds no run; allowed: the output_dir of one.")
    return root


def _num_steps(root: Path) -> dict[str, int]:
    try:
        tasks = json.loads((root / "config.json").read_text(encoding="utf-8"))["tasks"]
        return {name: int(own["num_steps"]) for name, own in tasks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
