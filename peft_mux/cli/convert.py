"""`peft-mux convert`: a `tasks.yaml` from a training file of LLaMA-Factory or Axolotl.

`convert.yaml` has the pairs of keys of each tool. A key that it does not have keeps its name if it is an argument of
Trainer that has its meaning here; all others are named, with the reason or the nearest setting.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from peft_mux.arguments import RENAMED, SETTABLE_FIELDS, by_name, reason_against
from peft_mux.cli.config_file import as_mapping, located, read_mapping
from peft_mux.data.sources import ROLES
from peft_mux.errors import (
    ConfigError,
    Fault,
    Rule,
    closest,
    is_integer,
    is_real,
    is_text,
    raise_faults,
    rule_faults,
    shown,
)
from peft_mux.log.lines import window_width, wrapped
from peft_mux.modeling.objectives.objective import OBJECTIVES
from peft_mux.storage import write_file

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_REASONS = by_name(_TABLES["reasons"])
_INFO = "dataset_info.json"
_TAGS = {"role_tag": ("from", "role"), "content_tag": ("value", "content")}
"""Keys of turns that are read, by their names in `dataset_info.json`; other tags are names of roles."""
_ENTRY_KEYS = (
    "path type split name data_files ds_type field field_messages field_system field_tools field_chosen field_rejected "
    "message_property_mappings message_field_role message_field_content roles"
).split()
"""Keys of Axolotl's datasets that are read, or that say what holds here anyway."""
_RULES = by_name(
    {
        "model_name_or_path base_model tokenizer_config adapter_name_or_path lora_model_dir output_dir dataset_dir": (
            Rule(lambda value: value is None or is_text(value), "a string")
        ),
        "per_device_train_batch_size micro_batch_size gradient_accumulation_steps lora_rank": Rule(
            lambda value: value is None or is_integer(value, 1), "an integer of at least 1"
        ),
        "num_train_epochs num_epochs evals_per_epoch saves_per_epoch val_size val_set_size": Rule(
            lambda value: value is None or (is_real(value) and value >= 0), "a number of at least 0"
        ),
    }
)
"""Rules of the keys with whose values others are computed; the others are checked by validate."""


def convert(arguments: argparse.Namespace) -> int:
    """Write a `tasks.yaml` with the settings of another tool's file; return the exit status.

    Raises:
        ConfigError: if the file is of neither tool, or describes what is not trained here.
    """
    path, out = Path(arguments.file), Path(arguments.output)
    marks = {_TABLES[tool]["mark"]: tool for tool in ("LLaMA-Factory", "Axolotl")}
    wanted = " or ".join(f"{key} ({tool})" for key, tool in marks.items())
    given, lines, faults = read_mapping(path, [wanted])
    tool = next((tool for key, tool in marks.items() if key in given), None)
    if tool is None:
        raise ConfigError(f"{path} must have the key {wanted}, got the keys {', '.join(map(str, given))}.")
    if out.exists():
        raise ConfigError(f"convert must write a new file, got {out}, which exists. Choose another one with -o.")
    raise_faults(located([*faults, *rule_faults(given, _RULES)], path.name, lines))
    notes = ["number of processes: train_batch_size counts the rows of all processes, and is written for one"]
    settings = _settings(given, tool, notes, faults)
    settings = {**_rows(given, tool, settings.get("task.objective", "sft"), path.parent, notes, faults), **settings}
    raise_faults(located(faults, path.name, lines))
    settings |= _targets(given, settings)
    key = "val_size" if "val_size" in given else "val_set_size"
    size = given.get(key) or 0
    if size and "task.eval_dataset" in settings:
        notes.append(f"{key}: eval_dataset has the held-out rows")
    elif size:
        settings["task.val_size"] = int(size) if size >= 1 else size
    elif "task.eval_dataset" not in settings:
        for key in [key for key in settings if key.startswith(("run.eval", "task.early_stopping", "run.load_best"))]:
            del settings[key]
            notes.append(f"{key.partition('.')[2]}: there are no held-out rows")
    parts = settings.get("task.dataset")
    path_keys = ("path", "model", "tokenizer", "output_dir", "task.init_adapter", "task.dataset", "task.eval_dataset")
    for section in (settings, *(parts if isinstance(parts, list) else ())):
        for key in path_keys:
            given_path = section.get(key)
            if isinstance(given_path, str) and (key == "output_dir" or Path(given_path).exists()):
                section[key] = os.path.relpath(given_path, out.parent)
    name = re.sub(r"\W", "-", path.stem, flags=re.ASCII)[:64]
    made: dict[str, Any] = {"model": None, "output_dir": f"runs/{name}", "model_init_kwargs": {}, "run": {}}
    for key, value in settings.items():
        *parents, last = re.sub("^task[.]", f"tasks.{name}.", key).split(".")
        section = made
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    made = {key: value for key, value in made.items() if value}
    head = f"# From {path.name} of {tool}. Not taken over:\n" + "".join(f"#   {note}\n" for note in notes)
    write_file(out, (head + yaml.safe_dump(made, sort_keys=False, allow_unicode=True, width=120)).encode())
    for note in notes:
        print(wrapped(f"not taken over: {note}", window_width()), file=sys.stderr)
    print(wrapped(f"written: {out}; next: peft-mux validate {out}", window_width()))
    return 0


def _settings(given: Mapping[str, Any], tool: str, notes: list[str], faults: list[Fault]) -> dict[str, Any]:
    """Return our settings by dotted key, except for those of rows.

    Args:
        given: the other tool's file.
        tool: name of the tool.
        notes: gets a line for each key that is not taken over.
        faults: gets what cannot be trained.
    """
    table = _TABLES[tool]
    settings = {**table["defaults"]}
    for key, options in table["choices"].items():
        value = given.get(key)
        value = next(iter(options)) if value is None and key != "adapter" else value
        if not isinstance(value, str | None) or value not in options:
            fix = "peft-mux trains adapters, with supervised fine-tuning and the losses of preferences."
            faults.append(Fault(key, shown(value), f"one of {', '.join(filter(None, options))}", fix))
        elif key != "pref_loss" or given.get("stage") == "dpo":
            settings |= options[value]
    objective = settings.get("task.objective", "sft")
    known = [f"task.objective_args.{item.name}" for item in fields(OBJECTIVES[objective].Args)]
    names = {name: f"run.{name}" for name in SETTABLE_FIELDS} | _TABLES["names"] | table["names"]
    for key, value in given.items():
        if value is None or value in ("", [], {}) or key in _TABLES["read"].split() or key in table["choices"]:
            continue
        target = names.get(key, "")
        if key in _REASONS:
            notes.append(f"{key}: {_REASONS[key]}")
        elif ".objective_args." in target and target not in known:
            notes.append(f"{key}: {objective} has no such argument")
        elif target:
            value = value if isinstance(value, list | dict) else _TABLES["values"].get(target, {}).get(value, value)
            if tool == "LLaMA-Factory" and target.endswith(("modules", "to_save")) and value != "all-linear":
                value = [part.strip() for part in str(value).split(",")]
            if value is not None:
                settings[target] = value
        elif key not in TrainingArguments.__dataclass_fields__:
            notes.append(f"{key}: {f'use {RENAMED[key]}' if key in RENAMED else 'it has no counterpart here'}")
        elif value is not False:
            notes.append(f"{key}: {reason_against(key)}")
    if tool == "LLaMA-Factory":
        settings.setdefault("task.peft.lora_alpha", 2 * settings["task.peft.r"])
    key, default = table["batch"]
    settings["task.train_batch_size"] = (given.get(key) or default) * (given.get("gradient_accumulation_steps") or 1)
    if given.get("quantization_bit") == 4 or given.get("load_in_4bit"):
        settings["model_init_kwargs.quantization_config"] = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": given.get("quantization_type", "nf4"),
            "bnb_4bit_use_double_quant": given.get("double_quantization", True),
            "bnb_4bit_compute_dtype": "bfloat16",
        }
    elif given.get("quantization_bit") or given.get("load_in_8bit"):
        settings["model_init_kwargs.quantization_config"] = {"load_in_8bit": True}
    for key, target in (("evals_per_epoch", "run.eval_"), ("saves_per_epoch", "run.save_")):
        if given.get(key):
            share = 1 / (given[key] * (settings.get("task.num_train_epochs") or 3))
            settings[f"{target}strategy"] = "steps" if share < 1 else "epoch"
            if share < 1:
                settings[f"{target}steps"] = round(share, 6)
    return settings


def _targets(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return which tokens carry loss: those of the answers, unless the other tool trains on prompts as well."""
    row_format = settings.get("task.row_format", "sharegpt")  # rows of messages, or those that become such
    name, columns = (row_format, {}) if isinstance(row_format, str) else (row_format.get("format"), row_format)
    if "task.objective" in settings or name is None:
        return {}
    if given.get("train_on_prompt") or given.get("train_on_inputs"):
        return {} if name == "sharegpt" else {"task.completion_only_loss": False}
    if "history" in columns and not given.get("mask_history"):
        return {"task.completion_only_loss": False, "task.assistant_only_loss": True}
    return {"task.assistant_only_loss": True} if name == "sharegpt" else {}


def _rows(
    given: Mapping[str, Any], tool: str, objective: str, folder: Path, notes: list[str], faults: list[Fault]
) -> dict[str, Any]:
    """Return where the rows are and how they are read, given the folder of the file."""
    rows: dict[str, Any] = {}
    for key, is_training in zip(_TABLES[tool]["datasets"], (True, False), strict=True):
        entries = given.get(key) or ([None] if is_training else [])
        entries = entries.split(",") if isinstance(entries, str) else entries
        for place, entry in enumerate(entries if isinstance(entries, list) else [entries]):
            where, more = f"{key}.{place}", list[Fault]()
            if tool == "LLaMA-Factory":
                source = _described(entry, key, given.get("dataset_dir") or "data", folder, notes, more)
            else:
                source = _typed(entry, where, objective, folder, notes, more)
            faults += [fault for fault in more if fault not in faults]
            if more:
                continue
            if rows and source["row_format"] != rows["row_format"]:
                notes.append(f"{where} {source['dataset']}: a task has rows of one format; give it a task of its own")
            elif not is_training and (place or not rows):
                notes.append(f"{where} {source['dataset']}: the first one is the eval_dataset; write several by name")
            elif not is_training:
                rows |= {"eval_dataset": source["dataset"], "eval_split": source["split"]}
            elif not rows:
                rows = source
            else:  # joined, as there
                parts = rows["dataset"] if isinstance(rows["dataset"], list) else [_part(rows)]
                rows = {"dataset": [*parts, _part(source)], "row_format": rows["row_format"]}
    return {f"task.{name}": value for name, value in rows.items() if value}


def _part(rows: Mapping[str, Any]) -> dict[str, Any]:
    part = {"path": rows["dataset"], "dataset_config": rows["dataset_config"], "split": rows["split"]}
    return {key: value for key, value in part.items() if value}


def _row_format(name: str, columns: Mapping[str, str]) -> Any:
    differing = {ours: theirs for ours, theirs in columns.items() if ours != theirs}
    return {"format": name, **differing} if differing else name


def _described(name: Any, key: str, place: str, folder: Path, notes: list[str], faults: list[Fault]) -> dict[str, Any]:
    """Return the settings of a dataset of LLaMA-Factory, which `dataset_info.json` in the folder `place` describes."""
    name, known = str(name or "").strip(), None
    data = next((path for path in (Path(place), folder / place, folder) if (path / _INFO).is_file()), Path(place))
    with suppress(OSError, ValueError):
        known = json.loads((data / _INFO).read_text(encoding="utf-8"))
    if not isinstance(known, dict):
        faults.append(Fault("dataset_dir", f"{place!r}, where it is not", f"a folder with a JSON file {_INFO}"))
        return {}
    described = as_mapping(known.get(name))
    source, is_hub = described.get("hf_hub_url") or described.get("file_name"), "hf_hub_url" in described
    if not source:
        allowed = f"a name of {data / _INFO} with file_name or hf_hub_url"
        faults.append(Fault(key, shown(name), allowed, closest(name, known)))
    kind = "alpaca_chat" if described.get("formatting", "alpaca") == "alpaca" else "sharegpt"
    ours, theirs = _TABLES[kind], as_mapping(described.get("columns"))
    tags = {tag: text for tag, text in as_mapping(described.get("tags")).items() if text not in _TAGS.get(tag, ROLES)}
    unread = [*(f"column {column}" for column in theirs if column not in ours), *tags]
    unread += [item for item in ("num_samples", "folder") if item in described]
    notes += [f"{key} {name}, {item}: it is not read; rename or map the rows" for item in unread]
    return {
        "dataset": source if is_hub else str(data / str(source)),
        "dataset_config": described.get("subset"),
        "split": described.get("split"),
        "row_format": _row_format(kind, {ours[column]: text for column, text in theirs.items() if column in ours}),
    }


def _typed(
    entry: Any, where: str, objective: str, folder: Path, notes: list[str], faults: list[Fault]
) -> dict[str, Any]:
    """Return the settings of an entry of Axolotl's datasets."""
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        faults.append(Fault(where, shown(entry), "a dataset with path and type"))
        return {}
    kind, is_sft = str(entry.get("type")), objective == "sft"
    types = _TABLES["Axolotl"]["types"]["sft" if is_sft else "kto" if objective == "kto" else "pairs"]
    short = re.sub("^(chatml|llama3)[.]", "", kind)
    if kind == "completion" and is_sft:
        row_format: Any = {"text": entry.get("field") or "text"}
    elif kind in ("chat_template", "chat_template.default") and objective != "kto":
        names = as_mapping(entry.get("message_property_mappings"))
        for name, tag in (("role", "role_tag"), ("content", "content_tag")):
            text = names.get(name) or entry.get(f"message_field_{name}") or name
            if text not in _TAGS[tag]:
                faults.append(Fault(f"{where} {name} of messages", shown(text), f"one of {', '.join(_TAGS[tag])}"))
        columns = {name: entry.get(f"field_{name}") or name for name in ("system", "tools", "chosen", "rejected")}
        columns["conversations"] = entry.get("field_messages") or "messages"
        row_format = _row_format("sharegpt", columns)
    elif short in types and (short == kind or not is_sft):
        row_format = types[short]
        if short != kind:
            notes.append(f"{where}.type {kind}: {_REASONS['chat_template']}")
    else:
        allowed = ", ".join([*types, *(["completion"] if is_sft else []), "chat_template"])
        faults.append(Fault(f"{where}.type", shown(kind), f"one of {allowed}, for {objective}", "Map the rows."))
        return {}
    unread = [name for name in entry if name not in _ENTRY_KEYS and entry[name]]
    notes += [f"{where}.{name}: it has no counterpart; map the rows beforehand" for name in unread]
    source = entry.get("data_files") or entry["path"]
    source = source[0] if isinstance(source, list) and len(source) == 1 else source
    if not isinstance(source, str):
        faults.append(Fault(f"{where}.data_files", shown(source), "one file"))
        return {}
    return {
        "dataset": str(folder / source) if (folder / source).exists() else source,
        "dataset_config": entry.get("name"),
        "split": None if entry.get("split") == "train" else entry.get("split"),
        "row_format": row_format,
    }
