"""A call and a step of 8 models: `peft_mux.Calls` in shared passes against PEFT's `set_adapter` in turn.

Both are in this process, in fp32, on the same random rows. First their losses are compared; where they differ by more
than 1e-4, relative, the benchmark ends with an error. Timed runs are interleaved.

    python -m benchmarks.service.calls
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

from benchmarks.harness import CLOCKS, in_turns, ratio, require_equal_losses
from benchmarks.stored import host_kind, write_result
from benchmarks.training.workloads import ModelSpec

SIZES = {
    "64 tokens": (1, 64, 64, 5, 512),
    "192 tokens": (3, 64, 64, 5, 512),
    "bound by computing": (4, 128, 512, 4, 2048),
}
"""Rows of a call, their tokens; features, layers and words of the backbone; by name."""


def main(arguments: list[str] | None = None) -> None:
    """Print and store the ratio of both for each size of call."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="processor")
    parser.add_argument("--pass-tokens", type=int, help="most of a pass")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    sizes = []
    for name in options.sizes:
        num_rows, num_tokens, width, num_layers, num_words = SIZES[name]
        spec = ModelSpec(width, num_layers, intermediate_size=3 * width, vocab_size=num_words)
        runs = contenders(spec, options.models, num_rows, num_tokens, options.pass_tokens)
        require_equal_losses(name, *(run() for run in runs.values()))
        seconds = in_turns(runs, options.repeats, CLOCKS[options.clock])
        gain = ratio(seconds["set_adapter"], seconds["calls"])
        medians = {kind: statistics.median(times) for kind, times in seconds.items()}
        shown = ", ".join(f"{kind} {1e3 * median:.0f} ms" for kind, median in medians.items())
        print(f"{name}: {shown}, {gain:.2f}x", flush=True)
        sizes.append(
            {"name": name, "model": spec.title, "rows": num_rows, "tokens": num_tokens, "ratio": gain} | seconds
        )
    write_result(f"calls-{host_kind()}", {"models": options.models, "clock": options.clock, "sizes": sizes})


def contenders(
    spec: ModelSpec, num_models: int, num_rows: int, num_tokens: int, pass_tokens: int | None = None
) -> dict[str, Callable[[], list[float]]]:
    """Return both ways to run a call and a step of each model; each returns the losses."""
    import numpy as np
    import torch
    from peft import LoraConfig, get_peft_model

    from peft_mux import AdamSettings, Call, CallResult, Calls, Example

    names = [f"model{number}" for number in range(num_models)]
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    rng = np.random.default_rng(0)
    ids = {name: rng.integers(3, spec.vocab_size, (num_rows, num_tokens + 1)) for name in names}
    calls, plain = (
        Calls(spec.build(), pass_tokens=pass_tokens),
        get_peft_model(spec.build(), config, adapter_name=names[0]),
    )
    for name in names:
        calls.open(name, config, seed=0)
        if name != names[0]:
            plain.add_adapter(name, config)
    params = {name: [weight for key, weight in plain.named_parameters() if f".{name}." in key] for name in names}
    with torch.no_grad():
        for name in names:
            for weight, source in zip(params[name], calls.model.task_parameters(name).values(), strict=True):
                weight.copy_(source)
    settings = AdamSettings(learning_rate=1e-4)
    optimizers = {
        name: torch.optim.AdamW(params[name], lr=1e-4, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0) for name in names
    }
    rows = {name: [Example(row[:-1], row[1:]) for row in ids[name]] for name in names}

    def fused() -> list[float]:
        results = calls.run([Call(name, rows[name], lambda outputs: outputs.nll_M.sum()) for name in names])
        calls.step(dict.fromkeys(names, settings))
        return [result.loss for result in results.values() if isinstance(result, CallResult)]

    def in_turn() -> list[float]:
        losses = []
        for name in names:
            plain.set_adapter(name)
            tokens = torch.from_numpy(ids[name])
            logits = plain(input_ids=tokens[:, :-1]).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses.append(loss.item())
        return losses

    return {"calls": fused, "set_adapter": in_turn}


if __name__ == "__main__":
    main()
