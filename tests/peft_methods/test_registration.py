"""Our methods are PEFT's as soon as `peft_mux` is imported, whichever comes first, and whatever a later PEFT brings."""

from __future__ import annotations

import copy
import importlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from peft_mux import BottleneckConfig, DiffPruningConfig
from peft_mux.late_imports import after_import
from tests.children import run_script

CONFIGS = {"BOTTLENECK": BottleneckConfig, "DIFF_PRUNING": DiffPruningConfig}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_type_is_a_member_like_any_other(name: str) -> None:
    peft_type = PeftType(name)
    assert peft_type is PeftType[name] is getattr(PeftType, name)
    assert (peft_type.name, peft_type.value, str(peft_type.value), peft_type == name) == (name, name, name, True)
    assert list(PeftType).count(peft_type) == 1
    assert copy.deepcopy(peft_type) is peft_type is pickle.loads(pickle.dumps(peft_type))
    assert PEFT_TYPE_TO_CONFIG_MAPPING[peft_type] is CONFIGS[name]
    assert CONFIGS[name]().peft_type is peft_type
    assert PEFT_TYPE_TO_TUNER_MAPPING[peft_type].prefix == f"{name.lower()}_"


_FRESH = """
import sys, peft_mux
assert "torch" not in sys.modules and "peft" not in sys.modules, "the import is no longer light"
from peft import PeftConfig, PeftType
names = [PeftConfig.from_pretrained(folder).__class__.__name__ for folder in sys.argv[1:]]
# As a later PEFT might have it: types of these names, which are not ours.
from peft_mux.modeling.adapters.registration import own_peft_type
assert own_peft_type("BOTTLENECK") is PeftType.BOTTLENECK
foreign = own_peft_type("LORA")
assert (foreign.value, PeftType.LORA.value, own_peft_type("LORA") is foreign) == ("MUX_LORA", "LORA", True)
print(" ".join(names))
"""


def test_plain_peft_reads_our_files_in_a_process_that_imported_us_first(tmp_path: Path) -> None:
    folders = []
    for name, config in CONFIGS.items():
        config(target_modules=["o_proj"]).save_pretrained(str(tmp_path / name))
        folders.append(str(tmp_path / name))
    (tmp_path / "fresh.py").write_text(_FRESH)
    assert run_script(tmp_path / "fresh.py", *folders).split() == ["BottleneckConfig", "DiffPruningConfig"]


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder on the path, whose modules are forgotten in the end."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    (tmp_path / "late_second.py").write_text("import late_first\nassert late_first.done\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("late_"):
            del sys.modules[name]


def test_a_module_follows_another_whenever_that_is_imported(modules: Path) -> None:
    (modules / "late_first.py").write_text("import sys\nassert 'late_second' not in sys.modules\ndone = True\n")
    finders = list(sys.meta_path)
    after_import("late_first", "late_second")
    assert "late_second" not in sys.modules
    module = importlib.import_module("late_first")
    assert "late_second" in sys.modules
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__loader__)
    del sys.modules["late_second"]
    after_import("late_first", "late_second")
    assert "late_second" in sys.modules, "it follows at once where the first one is there"


def test_a_module_that_fails_is_waited_for_again(modules: Path) -> None:
    path = modules / "late_first.py"
    path.write_text("raise ImportError('not yet')\n")
    after_import("late_first", "late_second")
    with pytest.raises(ImportError, match="not yet"):
        importlib.import_module("late_first")
    assert "late_second" not in sys.modules
    path.write_text("done = True  # another length\n")
    importlib.invalidate_caches()
    importlib.import_module("late_first")
    assert "late_second" in sys.modules


def test_several_may_wait_for_one_module(modules: Path) -> None:
    """As where `peft_mux` is reloaded before PEFT is imported."""
    (modules / "late_first.py").write_text("done = True\n")
    (modules / "late_third.py").write_text("import late_first\nassert late_first.done\n")
    finders = list(sys.meta_path)
    for then in ("late_second", "late_third", "late_second"):
        after_import("late_first", then)
    module = importlib.import_module("late_first")
    assert {"late_second", "late_third"} <= sys.modules.keys()
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__loader__)


def test_waiting_for_what_there_is_not_disturbs_nobody(modules: Path) -> None:
    after_import("late_nothing", "late_second")
    with pytest.raises(ModuleNotFoundError, match="late_nothing"):
        importlib.import_module("late_nothing")
    assert importlib.util.find_spec("late_second") is not None
