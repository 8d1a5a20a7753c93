"""Files that appear whole or not at all, and tell when they have been changed since."""

from peft_mux.storage.atomic import append_line, remove_stale, scratch_folder, write_file, write_folder
from peft_mux.storage.crashpoints import CRASHPOINTS, crashpoint
from peft_mux.storage.manifest import (
    Manifest,
    numbered_folders,
    prune,
    sealed_json,
    unsealed_json,
    verify_folder,
)
from peft_mux.storage.paths import safe_child
from peft_mux.storage.tensors import load_tensors, pack_state, save_tensors, unpack_state

__all__ = [
    "CRASHPOINTS",
    "Manifest",
    "append_line",
    "crashpoint",
    "load_tensors",
    "numbered_folders",
    "pack_state",
    "prune",
    "remove_stale",
    "safe_child",
    "save_tensors",
    "scratch_folder",
    "sealed_json",
    "unpack_state",
    "unsealed_json",
    "verify_folder",
    "write_file",
    "write_folder",
]
