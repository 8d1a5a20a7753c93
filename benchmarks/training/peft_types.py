"""A row for each PEFT type: eight tasks in one pass, and in plain PEFT task by task; and eight tasks of eight types.

A pass is a forward and a backward over two rows of 64 tokens of each task, on a small Llama of random weights with the
shape of a real one, on one thread. Times are of the processor, which others that share the machine do not change. Both
sides begin with the same adapters and see the same rows, of one length, so that plain PEFT pads nothing; their losses
are compared before anything is timed, and passes of both are interleaved. Memory is what a pass takes in
addition to what was in use (the peak of the resident set; Linux only).

    python -m benchmarks.training.peft_types --types IA3 VERA LOHA --repeats 5
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
from peft import PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.paths import RESULTS
from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.modeling.adapters.catalogue import Category
from peft_mux.modeling.adapters.kind import entry_of

NUM_TASKS, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 4096
LOSS_TOLERANCE = 1e-4
MIX = ("LORA", "IA3", "VERA", "MISS", "LOHA", "OFT", "LN_TUNING", "ROAD")

_OTHER_TARGETS: Mapping[str, list[str]] = {
    "IA3": ["k_proj", "v_proj", "down_proj"],
    "LN_TUNING": ["input_layernorm", "post_attention_layernorm"],
    "TRAINABLE_TOKENS": ["embed_tokens"],
}
_SETTINGS: Mapping[str, dict[str, Any]] = {
    "IA3": {"feedforward_modules": ["down_proj"]},
    "TRAINABLE_TOKENS": {"token_indices": list(range(64))},
    "FROD": {"progressbar": False},
    # Plain training adds the penalty outside of the model, so its losses have none.
    "DIFF_PRUNING": {"l0_weight": 0.0},
    "C3A": {"block_size": 64},
    "VERA": {"r": 64},
    "PVERA": {"r": 64},
    "VBLORA": {"vector_length": 64},
    "MISS": {"r": 16},
    "GRALORA": {"r": 16},
    "SUPERTUNING": {"sparsity": 0.99},
}


class Cost(NamedTuple):
    """What one pass takes: median seconds of the processor, and peak bytes above those before it, where measured."""

    seconds: float
    peak_bytes: int | None


def config_of(name: str) -> PeftConfig:
    """Return an adapter of a type, on four linear layers of each decoder layer where it adapts such."""
    targets = _OTHER_TARGETS.get(name, ["q_proj", "v_proj", "o_proj", "down_proj"])
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType[name]](target_modules=targets, **_SETTINGS.get(name, {}))


def backbone() -> LlamaForCausalLM:
    """Return a Llama of random weights: hidden 512, 2 layers, 10 million parameters."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **shape))


def rows_of(task: int) -> torch.Tensor:
    """Return the rows of a task, `[ROWS, LENGTH]`."""
    return torch.randint(1, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(task))


def together(names: Sequence[str], base: Any, first: int = 0) -> Callable[[], list[float]]:
    """Return a pass of tasks of the given types in one model; it gives their losses.

    Args:
        names: type of each task.
        base: the backbone, which is used up.
        first: number of the first task, which its rows depend on.
    """
    configs = {f"task{first + number}": config_of(name) for number, name in enumerate(names)}
    model = MultiTaskPeftModel(base, configs, verify=False).train()
    given = [
        {"task": task, "input_ids": row.tolist()}
        for number, task in enumerate(configs)
        for row in rows_of(first + number)
    ]
    batch = ChunkPackingCollator()(given)

    def run() -> list[float]:
        losses = model(batch).losses
        losses.sum().backward()
        return losses.tolist()

    return run


def plain(name: str, base: Any, tasks: Sequence[int]) -> Callable[[], list[float]]:
    """Return passes of plain PEFT over the rows of some tasks, one after the other, with one adapter of a type."""
    torch.manual_seed(42)
    model = get_peft_model(base, config_of(name)).train()

    def run() -> list[float]:
        losses = []
        for task in tasks:
            rows = rows_of(task)
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            losses.append(loss.item())
        return losses

    return run


def compare(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, Cost]:
    """Return the cost of each run; they take turns, so that whatever else the machine does affects all equally."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    peaks = {name: peak_bytes_of(run) for name, run in runs.items()}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    return {name: Cost(statistics.median(seconds[name]), peaks[name]) for name in runs}


def peak_bytes_of(run: Callable[[], Any]) -> int | None:
    """Return by how much the resident set grows while something runs; `None` where the system does not tell."""
    run()  # gradients, and what libraries keep, stay afterwards
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    run()
    return max(0, _status("VmHWM") - before)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def check_losses(name: str, ours: list[float], theirs: list[float]) -> None:
    """Raise an error where two sides do not do the same work; PVeRA draws for itself, and is only held to be near."""
    tolerance = 0.05 if name == "PVERA" else LOSS_TOLERANCE
    if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(ours, theirs, strict=True)):
        raise RuntimeError(f"{name}: losses are {ours} of peft_mux, {theirs} of plain PEFT; the work is not equal.")


def row_of_type(name: str, base: Any, repeats: int) -> dict[str, Any]:
    """Return what eight tasks of a type cost, and what plain PEFT costs."""
    ours = together([name] * NUM_TASKS, copy.deepcopy(base))
    theirs = plain(name, copy.deepcopy(base), range(NUM_TASKS))
    check_losses(name, ours(), theirs())
    costs = compare({"mux": ours, "plain": theirs}, repeats)
    mux, alone = costs["mux"], costs["plain"]
    return {
        "type": name,
        "category": entry_of(PeftType[name]).category.value,
        "mux_s": mux.seconds,
        "plain_s": alone.seconds,
        "plain_over_mux": alone.seconds / mux.seconds,
        "mux_peak_bytes": mux.peak_bytes,
        "plain_peak_bytes": alone.peak_bytes,
    }


def mix_row(base: Any, repeats: int) -> dict[str, Any]:
    """Return what eight tasks of eight types cost together, each in a model of its own, and with plain PEFT."""
    runs: dict[str, Callable[[], Any]] = {"together": together(MIX, copy.deepcopy(base))}
    losses = []
    for number, name in enumerate(MIX):
        runs[f"alone {name}"] = together([name], copy.deepcopy(base), number)
        runs[f"plain {name}"] = plain(name, copy.deepcopy(base), [number])
        losses += runs[f"plain {name}"]()
    check_losses("mix", runs["together"](), losses)
    costs = compare(runs, repeats)
    alone = sum(cost.seconds for name, cost in costs.items() if name.startswith("alone"))
    theirs = sum(cost.seconds for name, cost in costs.items() if name.startswith("plain"))
    mux = costs["together"].seconds
    return {"types": MIX, "together_s": mux, "sum_alone_s": alone, "plain_s": theirs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON."""
    trained = [one.name for one in PeftType if entry_of(one).category not in (Category.REFUSED, Category.PROMPT)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", choices=trained, default=trained, help="types to measure")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each side")
    parser.add_argument("--output", type=Path, default=RESULTS / "peft_types.json", help="where the JSON goes")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    base = backbone()
    rows = []
    print("| type | how | mux ms | plain ms | plain / mux | mux MB | plain MB |\n|---|---|---|---|---|---|---|")
    for name in options.types:
        rows.append(row_of_type(name, base, options.repeats))
        print(_line(rows[-1]), flush=True)
    mix = mix_row(base, options.repeats)
    print(_mix_line(mix))
    facts = {"peft": peft.__version__, "torch": torch.__version__, "threads": 1, "rows": rows, "mix": mix}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def _line(row: Mapping[str, Any]) -> str:
    memory = " | ".join(_megabytes(row[key]) for key in ("mux_peak_bytes", "plain_peak_bytes"))
    times = f"{1e3 * row['mux_s']:.0f} | {1e3 * row['plain_s']:.0f} | {row['plain_over_mux']:.2f}"
    return f"| {row['type']} | {row['category']} | {times} | {memory} |"


def _megabytes(count: int | None) -> str:
    return "" if count is None else f"{count / 1e6:.0f}"


def _mix_line(mix: Mapping[str, Any]) -> str:
    mux, alone, theirs = mix["together_s"], mix["sum_alone_s"], mix["plain_s"]
    return (
        f"\n{len(mix['types'])} tasks of {len(mix['types'])} types in one pass: {1e3 * mux:.0f} ms; the sum of their "
        f"passes alone {1e3 * alone:.0f} ms ({alone / mux:.2f}x); plain PEFT {1e3 * theirs:.0f} ms "
        f"({theirs / mux:.2f}x)"
    )


if __name__ == "__main__":
    main()
