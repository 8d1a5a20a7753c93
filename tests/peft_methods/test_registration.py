"""Our methods are PEFT's as soon as `peft_mux` is imported, whichever comes first, and whatever a later PEFT brings."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
from peft import PeftType
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

from peft_mux import BottleneckConfig, DiffPruningConfig
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
import importlib.util, sys, peft_mux
from pathlib import Path
assert "torch" not in sys.modules and "peft" not in sys.modules, "the import is no longer light"
# A look at PEFT, imports of it that fail, and a reload of ours change nothing.
assert importlib.util.find_spec("peft") is not None
broken = Path(sys.argv[1]) / "peft.py"
broken.write_text("raise ImportError('not yet')")
sys.path.insert(0, sys.argv[1])
for attempt in range(2):
    try:
        import peft
    except ImportError as error:
        assert str(error) == "not yet"
broken.unlink()
sys.path.remove(sys.argv[1])
importlib.invalidate_caches()
importlib.reload(peft_mux)
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
