"""Builds and loads the library of the pretended device; nothing here imports torch, which has to come after it."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def torch_folder() -> Path:
    """Return where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def reason_against() -> str | None:
    """Return why the library cannot be built here, or `None`."""
    if shutil.which("g++") is None:
        return "there is no g++ to build the pretended device with"
    if not (torch_folder() / "include" / "ATen" / "detail" / "CUDAHooksInterface.h").is_file():
        return "torch comes without the headers that the pretended device is built with"
    return None


def build(folder: Path) -> Path:
    """Compile the library into a folder and return its path; some two seconds."""
    torch, library = torch_folder(), folder / "pretended_cuda.so"
    include = torch / "include"
    command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{include}"]
    command += [f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE), f"-L{torch / 'lib'}"]
    command += ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}", "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return library


def load(library: str | Path) -> None:
    """Load the library into this process, which has not imported torch yet, and give torch its device."""
    handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401 - the guard is registered with what torch has set up

    handle.install()
