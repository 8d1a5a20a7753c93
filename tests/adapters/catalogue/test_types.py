"""Every member of `PeftType` has exactly one entry, and its facts are what happens."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoHaConfig, LoKrConfig, PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux import MultiTaskPeftModel, Task
from peft_mux.adapters.special_kinds import FactoredAdapter
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters import kind as kinds
from peft_mux.modeling.adapters.checks import config_faults
from peft_mux.modeling.adapters.kind import ENTRIES, KINDS, Category, entry_of
from peft_mux.modeling.stream import Stream
from tests.adapters.prompts.prompt_cases import PROMPTS, config_of
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.cases import CASES, CASES_BY_NAME
from tests.modeling.adapters.lora.test_lora_pass import batch
from tests.paths import ROOT
from tools.peft_types import COMMAND, page

EVERY_TYPE = pytest.mark.parametrize("peft_type", list(PeftType), ids=[one.name for one in PeftType])


@EVERY_TYPE
def test_a_type_is_trained_or_refused_with_a_reason_and_a_type_that_works(peft_type: PeftType) -> None:
    entry = entry_of(peft_type)
    assert entry.name == peft_type.name
    assert (
        bool(entry.refusal) is bool(entry.nearest) is (entry.category is Category.REFUSED) is (peft_type not in KINDS)
    )
    if entry.refusal:
        assert all(PeftType[name] in KINDS for name in entry.nearest if name in PeftType.__members__)
    else:
        kinds_of_prompts = {config_of(form).peft_type for form in PROMPTS}
        assert peft_type in {*CASES, *kinds_of_prompts}, "a conformance case of test_kinds.py, or a form of a prompt"
    known = {field.name for field in fields(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type])}
    assert set(entry_of(peft_type).reasons) <= known | {"modules_to_save"}


def test_a_task_of_a_refused_type_gets_the_reason_and_the_nearest_type(tmp_path: Path) -> None:
    refused = [entry for entry in ENTRIES.values() if entry.category is Category.REFUSED]
    tasks = []
    for number, entry in enumerate(refused):
        config: Any = PeftConfig(peft_type=PeftType[entry.name])
        tasks.append(Task(name=f"t{number}", peft_config=config, train_dataset=[{"input_ids": [1, 2]}]))
    with pytest.raises(ConfigError) as caught:
        lab.make_trainer(tasks, tmp_path)
    for number, entry in enumerate(refused):
        said = f"tasks.t{number}.peft_config must be one of the PEFT types LORA, "
        (line,) = [one for one in str(caught.value).splitlines() if said in one]
        assert f", got PeftConfig ({entry.name})" in line
        assert f"{entry.refusal[1:]}. Nearest: {', '.join(entry.nearest)}." in line


def test_types_that_are_not_known_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "ENTRIES", {name: entry for name, entry in ENTRIES.items() if name != "POLY"})
    (fault,) = config_faults(peft.PolyConfig(), "tasks.a")
    assert "PolyConfig (POLY)" in fault.got
    assert "This release of peft_mux does not know it. Nearest: LORA." in fault.fix
    config = peft.LoraConfig()
    config.peft_type = "SOMETHING"  # type: ignore[assignment]
    (fault,) = config_faults(config, "tasks.a")
    assert "LoraConfig (SOMETHING)" in fault.got


def test_the_page_of_types_is_what_the_entries_say() -> None:
    assert (ROOT / "docs" / "peft_types.md").read_text(encoding="utf-8") == page(), f"write it: {COMMAND} docs/..."


# ------------------------------------------- frozen layers that run once for all tasks


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (("VERA", "LOHA", "MISS"), 1),
        # Once more for each task that rotates its inputs.
        (("VERA", "OFT", "MISS"), 2),
        # If such tasks have most of the rows, nothing is computed for them that they do not use.
        (("OFT", "OFT", "MISS"), 3),
    ],
)
def test_a_frozen_layer_runs_as_often_as_tasks_need(names: tuple[str, ...], wanted: int) -> None:
    configs = {
        key: CASES_BY_NAME[name].make(index % 2) for index, (key, name) in enumerate(zip("abc", names, strict=True))
    }
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()  # type: ignore[arg-type]
    frozen: Any = model.backbone.get_submodule("model.layers.0.self_attn.q_proj").get_base_layer()  # type: ignore[operator]
    counts: Counter[str] = Counter()
    original = frozen.forward
    frozen.forward = lambda x: (counts.update(["calls"]), original(x))[1]
    model(batch("abc")).losses.sum().backward()
    assert counts["calls"] == wanted


@pytest.mark.parametrize("in_features", [24, 40])
@pytest.mark.parametrize("more", [None, {}, {"decompose_both": True}, {"decompose_factor": 4}])
def test_products_of_factors_are_those_of_the_weight_and_so_are_their_gradients(more: Any, in_features: int) -> None:
    make: Any = LoHaConfig if more is None else LoKrConfig
    config = make(r=2, alpha=3, target_modules=["0"], init_weights=False, **(more or {}))
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(in_features, 32)), config).double()  # type: ignore[arg-type]
    layer: Any = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    x = torch.randn(5, in_features, dtype=torch.float64, requires_grad=True)
    stream, results = Stream(), []
    forward = FactoredAdapter(layer, "0", stream)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for is_read in (False, True):
        stream.batch = object() if is_read else None  # type: ignore[assignment]
        added = forward.product("default", x)
        results.append([added, *torch.autograd.grad(added.square().sum(), [x, *weights])])
    assert len(results[0]) >= 4
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


# ----------------------------------------------------- AdaMSS, which needs a package

_IS_ABSENT = "ADAMSS" in PeftType.__members__ and PeftType.ADAMSS not in KINDS

_STAND_IN = """
import importlib.machinery, sys, types
import numpy as np

class KMeans:
    def __init__(self, n_clusters, **options):
        self.n_clusters = n_clusters
    def fit(self, rows):
        order = np.argsort(np.asarray(rows)[:, 0], kind="stable")
        self.labels_ = np.empty(len(order), dtype=np.int64)
        for cluster, part in enumerate(np.array_split(order, self.n_clusters)):
            self.labels_[part] = cluster
        return self
    def fit_predict(self, rows):
        return self.fit(rows).labels_

package, cluster = types.ModuleType("sklearn"), types.ModuleType("sklearn.cluster")
package.__spec__ = importlib.machinery.ModuleSpec("sklearn", None, is_package=True)
package.__path__, cluster.KMeans, package.cluster = [], KMeans, cluster
sys.modules |= {"sklearn": package, "sklearn.cluster": cluster}
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", "ignore", "-k", "ADAMSS", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not _IS_ABSENT, reason="scikit-learn is installed, so that test_kinds.py covers AdaMSS")
def test_with_the_package_it_is_tested_as_all_other_types_are() -> None:
    tests = ["tests/modeling/adapters/test_kinds.py", "tests/adapters/catalogue/test_training.py"]
    done = subprocess.run([sys.executable, "-c", _STAND_IN, *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(not _IS_ABSENT, reason="scikit-learn is installed")
def test_without_the_package_it_is_refused_by_name() -> None:
    assert entry_of(PeftType.ADAMSS).refusal == "PEFT needs the package sklearn for it, which is not installed"
