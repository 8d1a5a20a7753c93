"""Shows that a refactoring changed no bit: `python tests/invariants/compare_runs.py --before /tmp/before`.

The trainings of `compare_cases.py` run on each of two checkouts, in processes of their own, and everything that they
show is compared bit for bit: losses, gradient norms, metrics, plans, and what is written. Then a run that the checkout
from before has stopped half way is resumed by the one from after. `--write` keeps what a checkout shows in a file, with
which `--against` compares later, on the same machine. It takes a minute or two.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CASES = Path(__file__).resolve().with_name("compare_cases.py")
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
LIMIT_S = 600
RESUMED, WHOLE, HALF = "resumed", "planner mux", "half"
"""Cases: a run that is resumed, the same one uninterrupted, and its first half."""
EQUAL = "equal"
TRAINED = ("failed", "statuses", "logs", "output", "tensors")
"""What of a case training decides; the rest is plans, whose predicted figures a change of the planner may move."""

Shown = dict[str, Any]
"""What each case shows, by its name."""


# --------------------------------------------------------------------- running


def run_checkout(checkout: Path, folder: Path, half: Path | None = None) -> Shown:
    """Return what all cases show on a checkout.

    Args:
        checkout: whose package is imported.
        folder: where the runs are written, which is made.
        half: folder of a run to resume; nothing is resumed without it.
    """
    folder.mkdir()
    arguments = [str(CASES), "--folder", str(folder)]
    _call(checkout, folder, *arguments, *([] if half is None else ["--half", str(half)]))
    _call(checkout, folder, *LAUNCHER, *arguments)
    found: Shown = {}
    for path in (folder / "shown.json", *sorted(folder.glob("shown-*.json"))):
        found |= json.loads(path.read_text(encoding="utf-8"))
    return found


def _call(checkout: Path, folder: Path, *command: str) -> None:
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{checkout}: the cases could not be run.\n{done.stderr[-3000:]}")


# ------------------------------------------------------------------- comparing


def first_difference(before: Any, after: Any, where: str = "") -> str:
    """Return where two values differ first, and how; an empty text where they are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key not in before or key not in after:
                return f"{where}/{key}: only {'before' if key in before else 'after'}"
            if found := first_difference(before[key], after[key], f"{where}/{key}"):
                return found
        return ""
    if isinstance(before, list) and isinstance(after, list):
        for number, (own, other) in enumerate(zip(before, after, strict=False)):
            if found := first_difference(own, other, f"{where}/{number}"):
                return found
        return "" if len(before) == len(after) else f"{where}: {len(before)} entries before, {len(after)} after"
    is_equal = type(before) is type(after) and before == after
    return "" if is_equal else f"{where}: {_told(before)} before, {_told(after)} after"


def _told(value: Any) -> str:
    text = repr(float.fromhex(value)) if isinstance(value, str) and "0x" in value[:3] else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def verdicts(before: Shown, after: Shown) -> Iterator[tuple[str, str]]:
    """Yield each case with `EQUAL` or what is wrong; a resumed run is compared with the uninterrupted one."""
    for name in dict.fromkeys([*before, *after]):
        if name == RESUMED:
            yield "old checkpoint, resumed", verdict(*as_resumed(after.get(WHOLE, {}), after[name]))
        else:
            yield name, verdict(before.get(name, {}), after.get(name, {}))


def verdict(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return `EQUAL`, or how a case differs first; a failed or missing case is never equal."""
    sides = (("before", before), ("after", after))
    faults = [f"{when} failed: {one['failed']}" for when, one in sides if "failed" in one]
    faults += [f"not run {when}" for when, one in sides if not one]
    if faults:
        return "; ".join(faults)
    difference = first_difference(before, after)
    own, other = ({name: one[name] for name in TRAINED if name in one} for one in (before, after))
    if difference and "tensors" in own and not first_difference(own, other):
        return f"trains to the same bits, but {difference}"
    return difference or EQUAL


def as_resumed(whole: dict[str, Any], resumed: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what must be equal of a run and of the same one that was resumed, which has a checkpoint more.

    The output of `train` has the means of the steps of that call alone.
    """
    compared = [name for name in TRAINED if name != "output"]
    own, other = ({name: one[name] for name in compared if name in one} for one in (whole, resumed))
    if "tensors" in own and "tensors" in other:
        other["tensors"] = {name: one for name, one in other["tensors"].items() if name in own["tensors"]}
    return own, other


# --------------------------------------------------------------------- storing


def store(path: Path, shown: Shown, half: Path) -> None:
    """Write what a checkout shows, and the run that it has stopped half way, to one file."""
    files = {file.relative_to(half).as_posix(): file.read_bytes() for file in half.rglob("*") if file.is_file()}
    encoded = {name: base64.b64encode(content).decode() for name, content in files.items()}
    path.write_text(json.dumps({"shown": shown, "half": encoded}), encoding="utf-8")


def load(path: Path, half: Path) -> Shown:
    """Return what `store` wrote; put the run that was stopped half way into a folder."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    for name, content in stored["half"].items():
        (half / name).parent.mkdir(parents=True, exist_ok=True)
        (half / name).write_bytes(base64.b64decode(content))
    return stored["shown"]


def main() -> int:
    """Run what the command line asks for; return 1 if anything differs."""
    parser = argparse.ArgumentParser(description="Show that two checkouts train to the same bits.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--before", type=Path, help="checkout from before the change")
    source.add_argument("--against", type=Path, help="file that --write has written, instead")
    parser.add_argument("--after", type=Path, default=CASES.parents[2], help="by default the one of this script")
    parser.add_argument("--write", type=Path, help="file for what the checkout from after shows")
    given = parser.parse_args()
    if not (given.before or given.against or given.write):
        parser.error("nothing to do: give --before CHECKOUT, --against FILE or --write FILE.")
    with tempfile.TemporaryDirectory() as scratch:
        root, before, half = Path(scratch), None, None
        if given.before:
            before, half = run_checkout(given.before.resolve(), root / "before"), root / "before" / HALF
        elif given.against:
            half = root / "before"
            before = load(given.against, half)
        after = run_checkout(given.after.resolve(), root / "after", half)
        if given.write:
            store(given.write, {name: one for name, one in after.items() if name != RESUMED}, root / "after" / HALF)
    found = {} if before is None else dict(verdicts(before, after))
    for name, verdict in found.items():
        print(f"{name:<24}  {verdict}")
    return int(any(verdict != EQUAL for verdict in found.values()))


if __name__ == "__main__":
    sys.exit(main())
