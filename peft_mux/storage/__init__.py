"""Files that appear whole or not at all, and tell when they have been changed since."""

from peft_mux.storage.atomic import (
    append_line,
    remove_stale,
    replace_file,
    scratch_folder,
    write_file,
    write_folder,
)
from peft_mux.storage.checksums import CHECKSUMS_NAME, has_checksums, verify_checksums, write_checksums
from peft_mux.storage.crashpoints import CRASHPOINTS, crashpoint
from peft_mux.storage.lock import FolderLock, unwritable
from peft_mux.storage.manifest import (
    Manifest,
    digest_file,
    is_intact,
    numbered_folders,
    prune,
    sealed_json,
    unsealed_json,
    verify_folder,
)
from peft_mux.storage.paths import safe_child
from peft_mux.storage.reading import open_regular, read_regular
from peft_mux.storage.tensors import load_tensors, pack_state, save_tensors, unpack_state

__all__ = [
    "CHECKSUMS_NAME",
    "CRASHPOINTS",
    "FolderLock",
    "Manifest",
    "append_line",
    "crashpoint",
    "digest_file",
    "has_checksums",
    "is_intact",
    "load_tensors",
    "numbered_folders",
    "open_regular",
    "pack_state",
    "prune",
    "read_regular",
    "remove_stale",
    "replace_file",
    "safe_child",
    "save_tensors",
    "scratch_folder",
    "sealed_json",
    "unpack_state",
    "unsealed_json",
    "unwritable",
    "verify_checksums",
    "verify_folder",
    "write_checksums",
    "write_file",
    "write_folder",
]
