"""AdaMSS, for which PEFT needs scikit-learn: held against plain PEFT with a stand-in where the package is absent."""

from __future__ import annotations

import subprocess
import sys

import pytest
from peft import PeftType

from peft_mux.modeling.adapters.catalogue import Category, category_of, entry_of
from peft_mux.modeling.adapters.kind import KINDS

_IS_THERE = PeftType.ADAMSS in KINDS if "ADAMSS" in PeftType.__members__ else None

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
@pytest.mark.skipif(_IS_THERE is not False, reason="scikit-learn is installed, so that test_kinds.py holds it")
def test_with_the_package_it_is_held_to_all_that_other_types_are_held_to() -> None:
    tests = ["tests/modeling/adapters/test_kinds.py", "tests/modeling/adapters/catalogue"]
    done = subprocess.run([sys.executable, "-c", _STAND_IN, *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "passed" in done.stdout


@pytest.mark.skipif(_IS_THERE is not False, reason="scikit-learn is installed")
def test_without_the_package_it_is_refused_by_name() -> None:
    assert category_of(PeftType.ADAMSS) is Category.REFUSED
    assert entry_of(PeftType.ADAMSS).refusal == "PEFT needs the package sklearn for it, which is not installed"
