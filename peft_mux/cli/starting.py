"""`peft-mux init | doctor`: a first file, and what this machine has.

torch takes seconds to import, so it is only asked on machines that may have a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
from pathlib import Path

from huggingface_hub import get_token

from peft_mux.errors import ConfigError, installed_version, raise_faults
from peft_mux.log.lines import window_width, wrapped
from peft_mux.storage import check_task_names, name_fault, write_file

_FILE = """\
# peft-mux validate {file}    what is trained on;    peft-mux plan {file}    what runs together
# peft-mux train {file}       every key: peft-mux config-schema; docs/data.md, docs/arguments.md
model: {model}  # hub id, or a folder
output_dir: {output_dir}  # adapters go to {output_dir}/TASK

run:  # settings of the whole run
  bf16: {bf16}
  logging_steps: 10
  save_steps: 500  # checkpoints to resume from

defaults:  # for every task that does not set its own
  learning_rate: 2e-4
  num_train_epochs: 1
  max_length: 1024  # tokens of a row
  train_batch_size: 16  # rows of a step
  peft: {{type: lora, r: 16, lora_alpha: 32, target_modules: all-linear}}

tasks:  # rows: text; prompt + completion; messages; others by row_format
{tasks}  # with held-out rows and its own settings:
  # another: {{dataset: rows.jsonl, split: "train[:90%]", eval_split: "train[90%:]", eval_steps: 50,
  #           learning_rate: 1e-4, peft: {{r: 64}}, early_stopping: {{patience: 3}}}}
"""
_PACKAGES = "peft-mux torch transformers peft accelerate datasets safetensors triton bitsandbytes trl".split()


def init(arguments: argparse.Namespace) -> int:
    """Write a first file; return the exit status.

    Raises:
        ConfigError: if the file exists already, or a task cannot be named after its file of rows.
    """
    path = Path(arguments.file)
    if path.exists():
        raise ConfigError(f"init must write a new file, got {path}, which exists. Choose another name.")
    data = arguments.data or ["data/first.jsonl", "data/second.jsonl"]
    names = [Path(file).stem.replace(".", "-").replace(" ", "-") for file in data]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"init: files must have different names, because tasks are named after them, got {', '.join(data)}."
        )
    raise_faults([fault for name in names if (fault := name_fault(name)) is not None])
    check_task_names(names)
    tasks = "".join(f"  {name}: {{dataset: {json.dumps(file)}}}\n" for name, file in zip(names, data, strict=True))
    bf16 = str(_may_have_gpu()).lower()
    filled = _FILE.format(file=path, model=arguments.model, output_dir=f"runs/{path.stem}", bf16=bf16, tasks=tasks)
    write_file(path, filled.encode())
    print(wrapped(f"written: {path}; next: peft-mux validate {path}", window_width()))
    return 0


def doctor(arguments: argparse.Namespace) -> int:
    """Print what this machine has that training needs, to be pasted into an issue.

    Returns:
        The exit status: 1 if something is wrong.
    """
    amiss: list[str] = []
    free_gib = shutil.disk_usage(".").free / 2**30
    if free_gib < 5:
        amiss.append(f"only {free_gib:.1f} GiB free on this disk")
    # As far as that is known without asking the Hub.
    hub = "a token was found" if get_token() else "no token: `hf auth login` before you push"
    devices, kernels = [], "torch (no GPU)"
    if _may_have_gpu():
        import torch

        from peft_mux.kernels.availability import reason_against_kernels

        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if not devices:
            amiss.append("torch sees no GPU, though a driver and torch for GPUs are installed")
        elif (reason := reason_against_kernels(torch.device("cuda"))) is not None:
            amiss.append(f"Triton's kernels do not run: {reason}")
            kernels = "torch, as Triton's do not run"
        else:
            kernels = "triton"
    facts = {
        "python": f"{platform.python_version()} on {platform.platform()}",
        "versions": {name: installed_version(name) or "not installed" for name in _PACKAGES},
        "devices": devices or [f"cpu, {os.cpu_count()} cores"],
        "kernels": kernels,
        "disk": f"{free_gib:.1f} GiB free here",
        "hub": hub + (" (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""),
        "amiss": amiss,
    }
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return 1 if amiss else 0
    for key, value in facts.items():
        if isinstance(value, list):
            value = "; ".join(map(str, value)) or "nothing"
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {part}" for name, part in value.items())
        print(wrapped(f"{key:<10}  {value}", window_width()))
    return 1 if amiss else 0


def _may_have_gpu() -> bool:
    """Whether the driver of a GPU, and torch for GPUs, are installed."""
    has_driver = any(shutil.which(tool) for tool in ("nvidia-smi", "rocm-smi"))
    return has_driver and not str(installed_version("torch")).endswith("+cpu")
