"""Results as JSON in `benchmarks/results/`, with the command, the machine and the versions that they come from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS

PACKAGES = ("torch", "transformers", "peft", "accelerate", "peft_mux")


def write_result(name: str, contents: dict[str, Any], folder: Path | None = None) -> Path:
    """Write a result behind what is known of its circumstances, and print where it is.

    Args:
        name: name of the file, without its ending.
        contents: plain values.
        folder: folder of the file; by default the folder of results.
    """
    path = (folder or RESULTS) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**circumstances(), **contents}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path.name}")
    return path


def read_result(name: str, folder: Path | None = None) -> dict[str, Any]:
    """Return what a file has, or nothing where there is none."""
    path = (folder or RESULTS) / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def circumstances() -> dict[str, Any]:
    """Return with which command, when, on what and with which versions something was measured."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = "" if module is None else module.name.removesuffix(".__main__")
    return {
        "command": shlex.join(["python", "-m", name, *sys.argv[1:]]),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hardware": hardware(),
        "versions": versions(),
    }


def hardware() -> dict[str, Any]:
    """Return what the figures were measured on."""
    import torch

    return {
        "cpu": cpu_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "system": platform.platform(),
    }


def cpu_name() -> str:
    """Return the processor's name as the system reports it."""
    cpuinfo = Path("/proc/cpuinfo")
    model_name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return model_name[1].strip() if model_name else platform.processor() or platform.machine()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_kind() -> str:
    """Return a short name of the kind of machine, for file names."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return f"{slug}-{num_cores()}-cores"


def versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Return the versions of what was measured, and of further packages."""
    installed = {"python": platform.python_version()}
    for name in (*PACKAGES, *more):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = "not installed"
    return installed
