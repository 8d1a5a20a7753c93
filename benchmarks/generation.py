"""Completions of many tasks' prompts: mixed batches of peft_mux against plain PEFT.

Contenders, all greedy, on the same prompts and adapters, for the same number of new tokens:

    task by task   one `PeftModel` with all adapters; `set_adapter`, then `generate` on the task's left-padded batch
    adapter_names  PEFT's mixed batches: all rows in one left-padded batch (adapters of one type)
    mux            `peft_mux.generate`
    base           the frozen backbone's own `generate` on all rows in one batch, without adapters

Before anything is timed, the tokens of the first three are compared; where they differ the benchmark ends with an
error. Timed runs are interleaved, so that whatever else the machine does affects all contenders equally.

    python -m benchmarks.generation --tasks 8 --prompts 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.harness import Table, in_turns
from benchmarks.training.workloads import ModelSpec

Completions = list[tuple[int, ...]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, one line a contender."""
    options = _parser().parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    contenders = make_contenders(options)
    require_equal({name: run() for name, run in contenders.items() if name != "base"})
    times = in_turns(contenders, options.repeats, time.perf_counter, num_warm=0)
    num_tokens = options.tasks * options.prompts * options.new_tokens
    print(f"{options.tasks} tasks, {options.prompts} prompts each, {options.new_tokens} new tokens a prompt")
    table = Table("contender:<14", "median s:>8.2f", "best s:>6.2f", "tokens/s:>8.0f", "task by task / this:>19.2f")
    slowest_s = statistics.median(times["task by task"])
    for name, seconds in times.items():
        median_s = statistics.median(seconds)
        table.row(name, median_s, min(seconds), num_tokens / median_s, slowest_s / median_s)


def make_contenders(options: argparse.Namespace) -> dict[str, Callable[[], Completions]]:
    """Return what completes all prompts, task after task, in each way."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model

    from peft_mux import MultiTaskPeftModel, generate

    spec = ModelSpec(hidden_size=options.hidden_size, num_layers=options.layers)
    names = [f"task{number}" for number in range(options.tasks)]
    config = LoraConfig(r=options.rank, target_modules="all-linear", init_lora_weights=False)
    rng = np.random.default_rng(0)
    prompts = {
        name: [rng.integers(3, spec.vocab_size, size=rng.integers(10, 70)).tolist() for _ in range(options.prompts)]
        for name in names
    }
    model = MultiTaskPeftModel(spec.build().eval(), dict.fromkeys(names, config), verify=False)
    plain: Any = get_peft_model(spec.build().eval(), config, adapter_name=names[0])
    for name in names[1:]:
        plain.add_adapter(name, config)
    for name in names:
        weights = {key: value for key, value in plain.named_parameters() if f".{name}." in key}
        with torch.no_grad():
            for key, value in model.task_parameters(name).items():
                weights[key.replace(".weight", f".{name}.weight")].copy_(value)
    plain.eval()
    backbone = spec.build().eval()
    every = {"do_sample": False, "max_new_tokens": options.new_tokens, "use_cache": True, "pad_token_id": 0}
    for decoder in (plain.base_model.model, backbone, model.backbone):
        decoder.generation_config.eos_token_id = None  # all complete to the end
    rows = [row for prompts_of_task in prompts.values() for row in prompts_of_task]
    owners = [name for name, prompts_of_task in prompts.items() for _ in prompts_of_task]

    def task_by_task() -> Completions:
        completions = []
        for name in names:
            plain.set_adapter(name)
            completions += _appended(plain, prompts[name], every)
        return completions

    return {
        "task by task": task_by_task,
        "adapter_names": lambda: _appended(plain, rows, {**every, "adapter_names": owners}),
        "mux": lambda: [row.token_ids for row in generate(model, prompts, max_new_tokens=options.new_tokens)],
        "base": lambda: _appended(backbone, rows, every),
    }


def _appended(model: Any, rows: Sequence[Sequence[int]], settings: dict[str, Any]) -> Completions:
    """Return what `generate` of transformers appends to rows in one left-padded batch."""
    import torch

    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    with torch.no_grad():
        out = model.generate(input_ids=ids, attention_mask=mask, **settings)
    return [tuple(row) for row in out[:, length:].tolist()]


def require_equal(by_contender: dict[str, Completions]) -> None:
    """Refuse to compare contenders that complete prompts differently.

    Raises:
        RuntimeError: naming two contenders and the first row that differs.
    """
    (first, wanted), *others = by_contender.items()
    for name, completions in others:
        for number, (completion, other) in enumerate(zip(completions, wanted, strict=True)):
            if completion != other:
                raise RuntimeError(f"row {number}: {name} completes it with {completion}, {first} with {other}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Completions of many tasks' prompts")
    parser.add_argument("--tasks", type=int, default=8, help="tasks, each with an adapter of its own")
    parser.add_argument("--prompts", type=int, default=4, help="prompts a task, of 10 to 69 tokens")
    parser.add_argument("--new-tokens", type=int, default=32, help="tokens that are appended to each prompt")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA on all linear layers")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
