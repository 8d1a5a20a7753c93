"""The host's time of a pass on the path that CUDA takes, without a GPU: milliseconds a layer, forward and backward.

    python -m benchmarks.kernels.host_time                      half a minute on one core
    python -m benchmarks.kernels.host_time --before ../before   another checkout in turn, and the ratio

Below a few thousand tokens a pass it is not the GPU but the host, which launches its work, that sets the speed. Here
tensors are so small that their arithmetic on a CPU vanishes; Triton's launches take the way that they take on a GPU up
to the driver, which a stand-in replaces; attention over the stream does nothing as well, but is called, saved
for and differentiated as the real one. What is left is what the host does: Python, autograd, a call an operation.
The plain backbone, without adapters, is measured in the same process by the same means.

Each checkout runs in a process of its own; the processes take turns, pass by pass. Seconds are processor seconds, the
least of all passes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paths import ROOT
from benchmarks.stored import cpu_name
from benchmarks.training.checkouts import Child

PASSES = Path(__file__).with_name("host_passes.py")


def measure(
    checkouts: dict[str, Path], setting: dict[str, int | float | str], *, num_passes: int
) -> dict[str, dict[str, float]]:
    """Return the least seconds of each part of a pass, and the launches, by checkout.

    Args:
        checkouts: folder of each checkout, by what it is called.
        setting: what is passed on to `host_passes.py`.
        num_passes: passes of each checkout; the first three are not counted.
    """
    children = {name: Child(PASSES, folder, json.dumps(setting)) for name, folder in checkouts.items()}
    found = {name: [] for name in children}
    for _ in range(num_passes):
        for name, child in children.items():
            found[name].append(child.step())
    return {name: {part: min(one[part] for one in passes[3:]) for part in passes[0]} for name, passes in found.items()}


def row(name: str, least: dict[str, float], num_layers: int) -> str:
    """Return what a checkout needs a layer, in words."""
    forward, backward, plain = (least[part] * 1e3 / num_layers for part in ("forward", "backward", "plain"))
    total = forward + backward
    return (
        f"{name:<8} forward {forward:.2f} + backward {backward:.2f} = {total:.2f} ms a layer; plain backbone "
        f"{plain:.2f} ms; ratio to it {total / plain:.2f}; {least['launches'] / num_layers:.1f} Triton launches a layer"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line a checkout."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.host_time", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--layers", type=int, default=32, help="layers of the backbone; an 8B Llama has 32")
    parser.add_argument("--tasks", type=int, default=8, help="tasks that share the pass, each with LoRA on all layers")
    parser.add_argument("--rank", type=int, default=16, help="rank of every adapter")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout of every adapter")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="dtype of the backbone")
    parser.add_argument("--passes", type=int, default=20, help="passes of each checkout, three of them to warm up")
    parser.add_argument("--before", type=Path, help="folder of another checkout, to take turns with")
    options = parser.parse_args(arguments)
    names = ("layers", "tasks", "rank", "dropout", "dtype")
    setting: dict[str, int | float | str] = {name: getattr(options, name) for name in names}
    checkouts = {} if options.before is None else {"before": options.before.resolve()}
    checkouts["after" if checkouts else "now"] = ROOT
    print(f"{cpu_name()}, one thread; " + ", ".join(f"{name} {value}" for name, value in setting.items()))
    found = measure(checkouts, setting, num_passes=options.passes)
    for name, least in found.items():
        print(row(name, least, options.layers))
    if options.before is not None:
        before, after = (found[name]["forward"] + found[name]["backward"] for name in ("before", "after"))
        print(f"before / after {before / after:.2f}")


if __name__ == "__main__":
    main()
