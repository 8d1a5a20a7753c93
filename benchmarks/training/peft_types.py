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
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import PeftConfig, PeftType, get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import Table, in_turns, require_equal_losses
from benchmarks.stored import host_kind, write_result
from benchmarks.training.audit import measured_peak
from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.modeling.adapters.kind import Category, entry_of

NUM_TASKS, ROWS, LENGTH, VOCABULARY = 8, 2, 64, 4096
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


def row_of_type(name: str, base: Any, repeats: int) -> dict[str, Any]:
    """Return what eight tasks of a type cost, and what plain PEFT costs."""
    ours = together([name] * NUM_TASKS, copy.deepcopy(base))
    theirs = plain(name, copy.deepcopy(base), range(NUM_TASKS))
    # PVeRA draws for itself, and is only held to be near.
    require_equal_losses(name, ours(), theirs(), 0.05 if name == "PVERA" else 1e-4)
    runs = {"mux": ours, "plain": theirs}
    seconds = {way: statistics.median(times) for way, times in in_turns(runs, repeats).items()}
    return {
        "type": name,
        "category": entry_of(PeftType[name]).category.value,
        "mux_s": seconds["mux"],
        "plain_s": seconds["plain"],
        "plain_over_mux": seconds["plain"] / seconds["mux"],
        **{f"{way}_peak_bytes": max(0, measured_peak(run)[1]) for way, run in runs.items()},
    }


def mix_row(base: Any, repeats: int) -> dict[str, Any]:
    """Return what eight tasks of eight types cost together, each in a model of its own, and with plain PEFT."""
    runs: dict[str, Callable[[], Any]] = {"together": together(MIX, copy.deepcopy(base))}
    losses = []
    for number, name in enumerate(MIX):
        runs[f"alone {name}"] = together([name], copy.deepcopy(base), number)
        runs[f"plain {name}"] = plain(name, copy.deepcopy(base), [number])
        losses += runs[f"plain {name}"]()
    require_equal_losses("mix", runs["together"](), losses)
    seconds = {way: statistics.median(times) for way, times in in_turns(runs, repeats).items()}
    alone, theirs = (sum(s for way, s in seconds.items() if way.startswith(kind)) for kind in ("alone", "plain"))
    return {"types": MIX, "together_s": seconds["together"], "sum_alone_s": alone, "plain_s": theirs}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table, and write the JSON."""
    trained = [kind.name for kind in PeftType if entry_of(kind).category not in (Category.REFUSED, Category.PROMPT)]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="*", choices=trained, default=trained, help="types to measure")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each side")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    base = backbone()
    rows = []
    table = Table(
        "type:<17", "how:<11", "mux ms:>6.0f", "plain ms:>8.0f", "plain / mux:>11.2f", "mux MB:>6.0f", "plain MB:>8.0f"
    )
    for name in options.types:
        row = row_of_type(name, base, options.repeats)
        rows.append(row)
        peaks_mb = (row[f"{way}_peak_bytes"] / 1e6 for way in ("mux", "plain"))
        table.row(name, row["category"], 1e3 * row["mux_s"], 1e3 * row["plain_s"], row["plain_over_mux"], *peaks_mb)
    mix = mix_row(base, options.repeats)
    together, alone, theirs = mix["together_s"], mix["sum_alone_s"], mix["plain_s"]
    print(
        f"\n{len(MIX)} tasks of {len(MIX)} types in one pass: {1e3 * together:.0f} ms; the sum of their passes alone "
        f"{1e3 * alone:.0f} ms ({alone / together:.2f}x); plain PEFT {1e3 * theirs:.0f} ms ({theirs / together:.2f}x)"
    )
    write_result(f"peft-types-{host_kind()}", {"rows": rows, "mix": mix})


if __name__ == "__main__":
    main()
