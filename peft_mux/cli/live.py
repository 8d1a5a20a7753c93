"""`peft-mux status | pause | resume | remove | add`: show a run, and send requests to the process that trains it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError, printable
from peft_mux.log.lines import window_width, wrapped
from peft_mux.log.metrics_file import METRICS_NAME, read_metrics
from peft_mux.reporting.mailbox import Mailbox
from peft_mux.reporting.table import table_text
from peft_mux.reporting.views import RunView, interrupted, view_of_records
from peft_mux.storage import keeper_of, loading_of, read_regular

_SHOWN = ("status", "step", "num_steps", "loss", "eval_loss", "reason")
_FIX = (
    "Resume it with peft-mux train FILE --resume; with --next, this is done then, before its first step. (A run ends "
    "when all its tasks are paused.)"
)


def show_status(arguments: argparse.Namespace) -> int:
    """Print the status of each task of a run; return the exit status.

    Raises:
        ConfigError: if the folder holds no run.
    """
    root = _run_folder(arguments.run)
    view, keeper = view_of_folder(root), keeper_of(root)
    loading = loading_of(root) if keeper else ""
    requests = Mailbox(root).requests()
    if arguments.json:
        tasks = {
            task.name: {**{name: getattr(task, name) for name in _SHOWN}, "token_share": task.share}
            for task in view.tasks
        }
        status = {
            "run": str(root),
            "trained_by": keeper or None,
            "loading": loading or None,
            "interrupted": not keeper and interrupted(view).is_interrupted,
            "tasks": tasks,
            "requests": [{"request": name, **request} for name, request in requests],
        }
        print(json.dumps(status, indent=1, default=str))
        return 0
    lines = [f"{task.name}: {task.reason}" for task in view.tasks if task.reason]
    does = f"is loading the {loading} of the run" if loading else "trains"
    lines.append(f"{f'{keeper} {does}' if keeper else 'no process trains'} in {root}")
    for _, request in requests:
        lines.append(f"not carried out yet: {request.get('command')} {request.get('task') or request.get('file')}")
    if view.tasks:
        print(table_text(view if keeper else interrupted(view), window_width()))
    print(wrapped("\n".join(map(printable, lines)), window_width()))
    return 0


def view_of_folder(root: Path) -> RunView:
    """Return the view of a run's tasks that its folder has."""
    try:
        tasks = json.loads(read_regular(root / "config.json"))["tasks"]
        num_steps = {name: int(entry["num_steps"]) for name, entry in tasks.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        num_steps = {}
    path = root / METRICS_NAME
    return view_of_records(read_metrics(path) if path.is_file() else [], num_steps)


def ask(arguments: argparse.Namespace) -> int:
    """Send requests to the process that trains a run, and print its answers; return the exit status.

    Raises:
        ConfigError: if no process trains there, or none answers in time.
    """
    root = _run_folder(arguments.run)
    mailbox, keeper = Mailbox(root), keeper_of(root)
    if not keeper and not arguments.next:
        raise ConfigError(f"{arguments.action} needs a run that trains, got {root}, in which no process trains. {_FIX}")
    if arguments.action == "add":
        file = str(Path(arguments.file).resolve())
        requests: list[dict[str, Any]] = [{"command": "add", "file": file, "tasks": list(arguments.tasks)}]
    else:
        more = {"save": not arguments.no_save} if arguments.action == "remove" else {}
        names = dict.fromkeys(arguments.tasks)
        requests = [{"command": arguments.action, "task": name, **more} for name in names]
    sent = [mailbox.send(request) for request in requests]
    answers = []
    for name, request in zip(sent, requests, strict=True):
        if not keeper:
            what = f"{request['command']} {request.get('task') or request['file']}"
            answers.append({"ok": True, "said": f"left for the next peft-mux train FILE --resume: {what}"})
            continue
        answer = mailbox.wait(name, arguments.timeout, lambda: keeper_of(root))
        if answer is None:  # a run may end, or be killed, before it gives one
            trains = keeper_of(root)
            until = f"within {arguments.timeout:g} s" if trains else "before its training ended"
            later = "it may still be done after the step in progress" if trains else "it may have been done"
            fix = "A step may take longer: raise --timeout." if trains else _FIX
            done = "it was withdrawn" if mailbox.withdraw(name) else later
            raise ConfigError(f"{arguments.action}: no answer from {keeper} {until}; {done}. {fix}")
        answers.append({"ok": bool(answer.get("ok")), "said": str(answer.get("said", ""))})
    if arguments.json:
        print(json.dumps(answers, indent=1))
    else:
        for answer in answers:
            said = printable(answer["said"] if answer["ok"] else f"not done: {answer['said']}")
            print(wrapped(said, window_width()))
    return 0 if all(answer["ok"] for answer in answers) else 2


def _run_folder(given: str) -> Path:
    root = Path(given)
    if not any((root / name).exists() for name in (METRICS_NAME, "config.json", "state", "run.lock")):
        raise ConfigError(f"run must be the output_dir of a run, got {given!r}, which holds none.")
    return root
