"""`peft-mux export RUN`: serve, merge or copy the adapters of a run."""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

from peft_mux.cli.live import view_of_folder
from peft_mux.errors import ConfigError, printable
from peft_mux.log.lines import window_width, wrapped
from peft_mux.reporting.views import interrupted
from peft_mux.storage import keeper_of

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM accepts for --max-lora-rank."""
# vLLM applies one scale, alpha / r, to all layers of an adapter, and adds no bias.
_NOT_SERVED = (
    "modules_to_save use_dora trainable_token_indices target_parameters rank_pattern alpha_pattern lora_bias use_bdlora"
).split()
"""Fields of `LoraConfig` with which vLLM does not serve an adapter, or serves another one."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


def export(arguments: argparse.Namespace) -> int:
    """Print the command that serves the adapters of a run, or merge or copy one; return the exit status.

    Raises:
        ConfigError: if the folder has no adapters, or one cannot be exported this way.
    """
    root = Path(arguments.run)
    adapters, view = adapters_of(root), view_of_folder(root)
    left_out = {
        task.name: printable(f"{task.status} at step {task.step} of {task.num_steps}")
        for task in (view if keeper_of(root) else interrupted(view)).tasks
        if task.name in adapters and task.status not in ("succeeded", "stopped_early") and not arguments.unfinished
    }
    if name := arguments.merge or arguments.task:
        if name in left_out and arguments.merge:
            raise ConfigError(f"export: {name} has not succeeded ({left_out[name]}). Add --unfinished to merge it.")
        if name not in adapters:
            raise ConfigError(f"export: the task must be one of {', '.join(adapters)}, got {name!r}.")
        output = Path(arguments.output) if arguments.output else None
        if output is None or output.exists():
            raise ConfigError(f"--output must be a folder that does not exist yet, got {arguments.output!r}.")
        if arguments.merge:
            _merge(adapters[name], output)
        else:
            # Without checkpoints and states.
            output.mkdir(parents=True)
            for file in _FILES:
                shutil.copyfile(adapters[name]["folder"] / file, output / file)
        done = "merged" if arguments.merge else "copied"
        print(json.dumps({done: str(output)}) if arguments.json else f"{done}: {output}")
        return 0
    # Without a task: the command that serves all adapters with vLLM, and why it does not serve the others.
    refused = {
        name: reason for name, entry in adapters.items() if name not in left_out and (reason := _reason_against(entry))
    }
    served = {name: entry for name, entry in adapters.items() if name not in refused and name not in left_out}
    command = ""
    if served:
        rank = max(entry["r"] for entry in served.values())
        max_rank = next((allowed for allowed in _RANKS if allowed >= rank), rank)
        base = next(iter(served.values())).get("base_model_name_or_path") or "BASE_MODEL"
        modules = " ".join(f"{name}={shlex.quote(str(entry['folder']))}" for name, entry in served.items())
        command = (
            f"vllm serve {shlex.quote(base)} --enable-lora --max-loras {len(served)} --max-lora-rank {max_rank} "
            f"--lora-modules {modules}"
        )
    if arguments.json:
        print(json.dumps({"command": command, "refused": refused, "unfinished": left_out}, indent=1))
    else:
        for name, how in left_out.items():
            print(wrapped(f"{name}: left out, {how}; --unfinished includes it", window_width()))
        for name, reason in refused.items():
            print(wrapped(f"{name}: vLLM does not serve it: {reason}", window_width()))
        if command:
            print(command)
    return 0 if command else 2


def adapters_of(root: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration of each task's adapter in a run folder, with its folder under "folder"."""
    adapters = {}
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if all((folder / name).is_file() for name in _FILES):
            try:
                config = json.loads((folder / _FILES[0]).read_text(encoding="utf-8"))
                adapters[folder.name] = {**config, "folder": folder}
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(
                    f"{folder / _FILES[0]} must be a file that PEFT wrote, but cannot be read ({error}). "
                    "Copy the adapter from its last checkpoint, or move its folder away."
                ) from error
    if not adapters:
        raise ConfigError(f"run must be the output_dir of a run, got {str(root)!r}, which holds no adapters.")
    return adapters


def _reason_against(config: dict[str, Any]) -> str:
    """Return why vLLM does not serve an adapter, as far as its configuration shows; "" if it does."""
    if config.get("peft_type") != "LORA":
        return f"it is of type {config.get('peft_type')}; LORA is served. Merge it: --merge"
    if str(config.get("task_type") or "CAUSAL_LM") != "CAUSAL_LM":
        return f"its task_type is {config['task_type']}"
    for name in _NOT_SERVED:
        if config.get(name):
            return f"it has {name}={config[name]}. Merge it: --merge"
    if config.get("bias", "none") != "none":
        return f"it has bias={config['bias']!r}. Merge it: --merge"
    return f"its rank {config['r']} is above {_RANKS[-1]}" if config["r"] > _RANKS[-1] else ""


def _merge(adapter: dict[str, Any], output: Path) -> None:
    """Merge an adapter into its backbone, and write the whole model."""
    import transformers
    from peft import PeftModel

    from peft_mux.modeling.adapters.files import saved_num_labels
    from peft_mux.modeling.backbone.modules import head_kind_for

    base = adapter.get("base_model_name_or_path")
    if not base:
        raise ConfigError(
            "export needs the adapter of a named model, got one whose configuration has no base_model_name_or_path."
        )
    kind = getattr(transformers, head_kind_for(adapter.get("task_type")).auto_class)
    try:
        number = saved_num_labels(adapter["folder"])
        options = {} if number is None else {"num_labels": number}
        model = PeftModel.from_pretrained(kind.from_pretrained(base, dtype="auto", **options), str(adapter["folder"]))
        model.merge_and_unload().save_pretrained(output)
        transformers.AutoTokenizer.from_pretrained(base).save_pretrained(output)
    except (OSError, ValueError, NotImplementedError, AttributeError, TypeError, LookupError) as error:
        raise ConfigError(f"export: {adapter['folder']} cannot be merged: {error}") from error
