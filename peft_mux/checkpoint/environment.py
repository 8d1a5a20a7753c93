"""`environment.json` of a run folder: with what, and on what, a run was trained; no names of hosts, users or paths."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.numerics import numerics_of
from peft_mux.compat import installed_version
from peft_mux.reporting.banner import device_words

ENVIRONMENT_NAME = "environment.json"
_PACKAGES = "peft-mux torch transformers peft accelerate datasets tokenizers safetensors numpy triton".split()
_GIT_S = 2.0
"""Seconds after which a checkout is left alone: large ones on slow disks take minutes."""


def environment_of(args: MultiTaskTrainingArguments) -> dict[str, Any]:
    """Return versions, the device of this process, the number of processes and the checkout, as plain JSON.

    Args:
        args: the arguments of the run.
    """
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in _PACKAGES if (found := installed_version(name)) is not None},
        "device": device_words(args.device),
        "num_processes": args.world_size,
        "attention": numerics_of(args)["attention"],
        "git": _checkout(),
    }


def _checkout() -> dict[str, Any] | None:
    """Return the commit of the script's folder, and whether files differ from it; `None` outside of a checkout."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules"]
    # Whoever works in the checkout meanwhile does not find it locked.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        found = subprocess.run(
            command,
            cwd=_script_folder(),
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_S,
            check=True,
        )
    # No git, no checkout, one of another user, or one that takes too long.
    except (OSError, subprocess.SubprocessError):
        return None
    heads, changes = [], []
    for line in found.stdout.decode(errors="replace").splitlines():
        (heads if line.startswith("# ") else changes).append(line)
    commits = [line.split()[-1] for line in heads if line.startswith("# branch.oid ")]
    is_born = commits and commits[0] != "(initial)"
    return {"commit": commits[0], "is_dirty": bool(changes)} if is_born else None


def _script_folder() -> Path:
    """Return the folder of the script that was started; the working directory for commands, notebooks and prompts."""
    here, script = Path.cwd(), getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not (path := Path(script).resolve()).is_file():
        return here
    # What stands in an installation, such as peft-mux, pytest or a notebook's kernel, is not what was written for this.
    installed = (Path(sys.prefix).resolve(), Path(__file__).resolve().parents[1])
    return here if any(path.is_relative_to(folder) for folder in installed) else path.parent
