"""Folders of the store: adapters and states of models, written whole by one thread in the order they are asked for.

Every folder holds a plain PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`). That of a state also has
`state.safetensors` and `state.json` with moments, accumulated gradients and settings.
"""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig

from peft_mux.calls import TaskState
from peft_mux.errors import CheckpointError, ConfigError, shown
from peft_mux.serve.ledger import StoreError
from peft_mux.storage import (
    crashpoint,
    load_tensors,
    pack_state,
    save_tensors,
    sealed_json,
    unpack_state,
    unsealed_json,
    verify_folder,
    write_folder,
)

ALPHA = 32
KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Kinds of checkpoints as they are in paths, and as they are listed."""
MIN_TTL_S, MAX_TTL_S = 3600, 10 * 365 * 86_400
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_RETRY_S = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made from.

    Attributes:
        base_model: the served name.
        rank: rank of its adapter.
        seed: fixes its initial weights.
        train_attn: adapt attention.
        train_mlp: adapt the MLPs.
        train_unembed: adapt the output head.
    """

    base_model: str
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def lora(self, modules: Mapping[str, list[str]]) -> LoraConfig:
        """Return the PEFT configuration, for modules as `modules_of` names them.

        Raises:
            ConfigError: if nothing is trained.
        """
        parts = {"attn": self.train_attn, "mlp": self.train_mlp, "unembed": self.train_unembed}
        targets = [name for part, is_trained in parts.items() if is_trained for name in modules[part]]
        if not targets:
            got = ", ".join(f"train_{part}={is_trained}" for part, is_trained in parts.items())
            raise ConfigError(f"lora_config must train at least one part that the model has, got {got}.")
        if not 1 <= self.rank <= 256:
            raise ConfigError(f"lora_config.rank must be an integer from 1 to 256, got {self.rank}.")
        return LoraConfig(
            r=self.rank,
            lora_alpha=ALPHA,
            target_modules=targets,
            task_type="CAUSAL_LM",
            base_model_name_or_path=self.base_model,
        )


def modules_of(backbone: Any) -> dict[str, list[str]]:
    """Return the linear modules of attention, of MLPs, and of the output head, by the shortest names that are clear."""
    head = backbone.get_output_embeddings()
    # GPT-2 has a linear layer of its own.
    kinds = {name: module for name, module in backbone.named_modules() if type(module).__name__ in ("Linear", "Conv1D")}
    parts: dict[str, list[str]] = {"attn": [], "mlp": [], "unembed": []}
    for name, module in kinds.items():
        is_attention = any("attn" in word or "attention" in word for word in name.lower().split("."))
        parts["unembed" if module is head else "attn" if is_attention else "mlp"].append(name)
    leaves = {part: {name.rpartition(".")[2] for name in names} for part, names in parts.items()}
    for part, names in parts.items():
        others = set().union(*(leaves[other] for other in parts if other != part))
        parts[part] = names if leaves[part] & others else sorted(leaves[part])
    return parts


def check_name(name: object) -> None:
    """Raise `ConfigError` for what cannot be the name of a checkpoint."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = "1 to 128 letters, digits, '.', '_' and '-', not beginning with '.'"
        raise ConfigError(f"path must be {allowed}, got {shown(name)}.")


def check_ttl(ttl_s: int | None) -> None:
    """Raise `ConfigError` for a time to live that is not served."""
    if ttl_s is not None and not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
        raise ConfigError(f"ttl_seconds must be from {MIN_TTL_S} to {MAX_TTL_S} or left out, got {ttl_s}.")


def split_path(path: str) -> tuple[str, str, str]:
    """Return the model, kind and name of a `tinker://` path.

    Raises:
        ConfigError: if it is none.
    """
    parts = path.removeprefix("tinker://").split("/")
    if not path.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
        allowed = f"tinker://MODEL/KIND/NAME with a KIND of {', '.join(KINDS)}"
        raise ConfigError(f"the path must be {allowed}, got {shown(path)}.")
    return parts[0], parts[1], parts[2]


def write_adapter(
    folder: Path, config: LoraConfig, state: TaskState, facts: Mapping[str, Any], *, with_state: bool
) -> int:
    """Write a folder with the adapter of a model, and its state if wanted; return its size in bytes.

    Raises:
        CheckpointError: if it could not be written; then there is no folder.
    """

    def fill(scratch: Path) -> None:
        save_tensors(scratch / "adapter_model.safetensors", state.weights)
        crashpoint("mid_export")
        config.save_pretrained(str(scratch))
        crashpoint("mid_export")
        if with_state:
            rest = {item.name: getattr(state, item.name) for item in fields(state) if item.name != "weights"}
            tensors, tree = pack_state(rest)
            save_tensors(scratch / "state.safetensors", tensors)
            crashpoint("mid_export")
            (scratch / "state.json").write_bytes(sealed_json(tree))

    folder.parent.mkdir(parents=True, exist_ok=True)
    write_folder(folder, fill, facts=facts)
    return sum(path.stat().st_size for path in folder.iterdir())


def read_adapter(folder: Path) -> tuple[TaskState, dict[str, Any]]:
    """Return the state in a folder, or the weights alone if no state was saved, and the facts of the folder.

    Raises:
        CheckpointError: if a file is missing or changed.
    """
    facts = verify_folder(folder)
    weights = load_tensors(folder / "adapter_model.safetensors")
    if not (folder / "state.json").exists():
        return TaskState(weights, {}, {}, {}), facts
    rest = unpack_state(load_tensors(folder / "state.safetensors"), unsealed_json(folder / "state.json"))
    return TaskState(weights=weights, **rest), facts


class Writer:
    """One thread that writes folders one after another; one that finds no space tries again until there is some.

    Attributes:
        reason: why the thread waits; "" if it does not.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self.reason = ""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        """Run a job after those before it; one that raises `CheckpointError` or `StoreError` runs again."""
        self._jobs.put(job)

    def close(self) -> None:
        """Run the jobs that wait, without waiting for space, and end."""
        self._stop.set()
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            while True:
                try:
                    job()
                    break
                except (CheckpointError, StoreError, OSError) as error:
                    self.reason = f"the store cannot be written: {error}"
                    if self._stop.wait(_RETRY_S):
                        break
            self.reason = ""
