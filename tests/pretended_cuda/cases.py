"""Runs named cases on the pretended device and prints what was seen of each as JSON.

In a process of its own: `python tests/pretended_cuda/cases.py LIBRARY '{"name": {...}}'`; the fields of a case
are those of `steps.Case`, or with "kind" the arguments of `memory.kept` ("memory") or `whole_run.run` ("whole run").
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from tests.pretended_cuda import library as pretended_cuda


def main(library: str, cases: dict[str, dict[str, Any]]) -> None:
    """Run cases; one that raises has its error for a result."""
    pretended_cuda.load(library)
    # Only now, as this imports torch.
    from tests.pretended_cuda.memory import kept
    from tests.pretended_cuda.steps import train
    from tests.pretended_cuda.whole_run import run

    kinds: dict[str, Any] = {"train": train, "memory": kept, "whole run": run}
    found: dict[str, Any] = {}
    for name, fields in cases.items():
        started = time.perf_counter()
        try:
            found[name] = kinds[fields.pop("kind", "train")](**fields)
        except Exception as error:  # the test of this case reports it, and the other cases run
            found[name] = {"error": f"{type(error).__name__}: {error}\n{traceback.format_exc()[-3000:]}"}
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    print("\n" + json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
    sys.stdout.flush()
    # Autograd's thread of the stand-in device may still run when libraries are unloaded, which aborts the process.
    os._exit(0)
