"""Runs the notebooks and stores them with their outputs: `python -m tools.notebooks [NAME ...]`, or all of them.

The stored outputs say nothing about the machine: paths of temporary folders become relative, and the name of the host
goes. `metadata.peft_mux` of a notebook has a hash of its cells, by which a test finds outputs that are out of date.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
TIMEOUT_S = 280
"""Of each cell."""


def sources_hash(notebook: Any) -> str:
    """Return a hash of all cells of a notebook, without their outputs."""
    text = "\0".join(f"{cell.cell_type}\0{cell.source}" for cell in notebook.cells)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def executed(path: Path, folder: Path) -> Any:
    """Return a notebook after its last cell, run in an empty folder, without network and on one thread."""
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "80"}
    settings |= {name: str(folder / name) for name in ("TMPDIR", "IPYTHONDIR", "HF_HOME")}
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    (folder / "TMPDIR").mkdir()
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)  # which the kernel inherits
    try:
        notebook = nbformat.read(path, as_version=4)
        place = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(notebook, timeout=TIMEOUT_S, record_timing=False, resources=place).execute()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return notebook


def without_machine(text: str, folder: Path) -> str:
    """Return text of an output without what is of this machine alone: its folders, its name, colours of a terminal."""
    # A folder of `tempfile.mkdtemp(prefix="run-")` is called `run` in the outputs.
    text = re.sub(re.escape(str(folder / "TMPDIR")) + r"/([\w-]+?)-[a-z0-9_]{8}(?![a-z0-9_])", r"\1", text)
    for place, name in ((str(folder), "."), (sys.prefix, "venv"), (str(ROOT), "peft_mux"), (str(Path.home()), "~")):
        text = text.replace(place, name)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.replace(socket.gethostname(), "host"))


def clean(notebook: Any, folder: Path) -> None:
    """Take what is of this machine out of all outputs, join pieces of text, and drop what goes to standard error."""
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        cell.metadata = {}
        kept: list[Any] = []
        for output in cell.outputs:
            output.pop("transient", None)
            if output.output_type == "stream":
                if output.name == "stderr":
                    continue
                output.text = without_machine(output.text, folder)
                if kept and kept[-1].output_type == "stream":
                    kept[-1].text += output.text
                    continue
            else:
                output.metadata = {}
                output.data = {
                    kind: without_machine(data, folder) if isinstance(data, str) and kind != "image/png" else data
                    for kind, data in output.data.items()
                }
            kept.append(output)
        cell.outputs = kept


def refresh(path: Path) -> None:
    """Run a notebook and store it with its outputs."""
    with tempfile.TemporaryDirectory(prefix="notebook-") as name:
        folder = Path(name).resolve()
        metadata = dict(nbformat.read(path, as_version=4).metadata)
        notebook = executed(path, folder)
        clean(notebook, folder)
    notebook.metadata = {**metadata, "peft_mux": {"sources": sources_hash(notebook)}}
    nbformat.validate(notebook)
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print(f"{path.name}: {path.stat().st_size / 2**10:.0f} KiB", flush=True)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        refresh(FOLDER / f"{name}.ipynb")
