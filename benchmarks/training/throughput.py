r"""The end-to-end benchmark: many LoRA tasks on one backbone, by peft_mux and by today's ways.

Contenders, all on the same tokenised rows in the same order, for the same number of optimizer steps a task:

    hf      transformers.Trainer + peft, one task after the other
    padded  all tasks in one padded batch with batched LoRA (SL-PEFT of M §5.1)
    mux     peft_mux
    floor   the packed tokens through the frozen backbone, forward and input gradients only

What is reported, per contender:

    tokens/s            of all tokens that go through the backbone, padding included
    effective tokens/s  of real tokens
    / floor, vs hf      ratios of the median times (and of the least) of all steps but each task's first
    train()             the same ratios of whole `train()` calls
    memory              see `audit.py`; of `hf` also what it takes if every task keeps its own backbone, as
                        in M Fig. 17

Times run from the end of the first to the end of the last optimizer step of each task. The first step pays for
what a run does once: the start of `Trainer.train()` (some 0.3 s, mostly a garbage collection), memory that is
touched for the first time, optimizer state. A benchmark's few steps would weigh that far above its share of a
real run. `train()` counts everything.

Before anything is timed, each contender runs its first two steps in a process of its own, and the losses of
every task are compared: contenders that do not agree do not do equal work, and the benchmark ends with an
error. (The floor has no adapters, so only its first step is held to the others': adapters start at zero.)
Timed runs are interleaved, so that whatever else the machine does affects all contenders equally.

    python -m benchmarks.training.throughput --tasks 8 --mix uniform nonuniform
    python -m benchmarks.training.throughput --shape qwen3-0.6b --mix nonuniform --batch-size 2 --steps 3 \
        --repeats 1 --threads 1 --clock processor --contenders hf mux floor
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import CLOCKS, UnequalWorkError, require_equal_losses, rotated
from benchmarks.stored import host_kind, write_result
from benchmarks.training import report
from benchmarks.training.audit import NUM_STEPS, audit
from benchmarks.training.baselines import CONTENDERS, contender
from benchmarks.training.shapes import SHAPES
from benchmarks.training.timing import Run, use_clock
from benchmarks.training.workloads import MIXES, Case, ModelSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every case, print the tables, and write the JSON."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.clock == "processor" and options.threads != 1:
        parser.error("--clock processor: got no --threads 1; seconds of several threads add up")
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    use_clock(options.clock)
    model = _model(options)
    results = []
    for mix in options.mix:
        for num_tasks in options.tasks:
            case = Case(mix, num_tasks, options.steps, model, options.batch_size, options.rank)
            facts = measure(case, options.contenders, options.repeats, torch.get_num_threads())
            results.append({**asdict(case), **facts})
            report.print_table(case, facts)
    given = [options.shape] if options.shape else []
    given += [f"rank-{options.rank}"] if options.rank else []
    name = "-".join(["throughput", *given, host_kind()])
    write_result(name, {"cases": results}, options.output)


def _model(options: argparse.Namespace) -> ModelSpec:
    if options.shape:
        return ModelSpec.of_shape(options.shape, options.layers)
    size = options.hidden_size
    return ModelSpec(hidden_size=size, num_layers=options.layers or 8, intermediate_size=size * 43 // 16)


def measure(case: Case, names: Sequence[str], num_rounds: int, num_threads: int) -> dict[str, Any]:
    """Audit all contenders, then time them in turns; return what was measured as plain values.

    Args:
        case: what to train on.
        names: names of the contenders.
        num_rounds: number of timed runs of each contender.
        num_threads: number of torch's threads, for the audits.

    Raises:
        UnequalWorkError: if the losses of two contenders differ.
    """
    audits = {}
    for name in names:
        print(f"{case.mix}, {case.num_tasks} tasks: audit of {name}", file=sys.stderr, flush=True)
        audits[name] = audit(name, case, num_threads)
    check_equal_work({name: audited.losses for name, audited in audits.items()})
    backbone = case.model.build()
    warm_up = replace(case, num_tasks=1, num_steps=1)
    for name in names:
        _run(name, backbone, warm_up)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(num_rounds):
        print(f"{case.mix}, {case.num_tasks} tasks: round {turn + 1} of {num_rounds}", file=sys.stderr, flush=True)
        for name in rotated(names, turn):
            runs[name].append(_run(name, backbone, case))
    workload = case.workload()
    rows = [
        {
            "contender": name,
            "num_processed_tokens": runs[name][0].num_processed_tokens,
            "num_tokens": workload.num_timed_tokens,
            "steps_s": [run.steps_s for run in runs[name]],
            "train_s": [run.train_s for run in runs[name]],
            "peak_bytes": audits[name].peak_bytes,
            "peak_mebibytes": audits[name].peak_bytes / 2**20,
            "replicated_mebibytes": audits[name].replicated_bytes / 2**20 if name == "hf" else None,
        }
        for name in names
    ]
    report.add_figures(rows)
    return {"length_source": workload.length_source, "num_tokens": workload.num_tokens, "contenders": rows}


def check_equal_work(losses: dict[str, dict[str, list[float]]]) -> None:
    """Compare the losses of every task between all contenders, at every step that both have.

    Args:
        losses: for each contender, the losses of each task, by step.

    Raises:
        UnequalWorkError: naming the first difference.
    """
    # The floor reports its first step only, so it is no reference as long as there is another one.
    reference_name, *others = sorted(losses, key=lambda name: name == "floor")
    reference = losses[reference_name]
    for name in others:
        if list(losses[name]) != list(reference):
            raise UnequalWorkError(f"{name} trains {list(losses[name])}, {reference_name} {list(reference)}")
        num_steps = 1 if name == "floor" else NUM_STEPS
        for task, of_task in losses[name].items():
            require_equal_losses(f"{task} by {name} and {reference_name}", of_task, reference[task][:num_steps])


def _run(name: str, backbone: Any, case: Case) -> Run:
    gc.collect()
    return contender(name)(lambda: copy.deepcopy(backbone), case.workload())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.throughput", description=__doc__.splitlines()[0]
    )
    add = parser.add_argument
    add("--tasks", type=int, nargs="+", default=[8], help="numbers of tasks to measure, such as 1 4 8 16 32")
    add("--mix", nargs="+", choices=MIXES, default=list(MIXES), help="kinds of workload")
    add("--steps", type=int, default=6, help="optimizer steps of each task in a timed run")
    add("--repeats", type=int, default=2, help="timed runs of each contender")
    add("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="whom to measure")
    add(
        "--batch-size",
        type=int,
        help="sequences per optimizer step of a task; default 8 (uniform), 4 (nonuniform)",
    )
    add("--rank", type=int, help="rank of all adapters; default 8 (uniform), 8, 16 and 64 in turn (nonuniform)")
    add("--hidden-size", type=int, default=512, help="features of the backbone's hidden states")
    add(
        "--shape",
        choices=SHAPES,
        help="a published shape instead of your own sizes",
    )
    add("--layers", type=int, help="layers of the backbone; by default 8, or all of the shape")
    add("--clock", choices=CLOCKS, default="wall", help="what seconds are of; `processor` with `--threads 1` only")
    add("--threads", type=int, help="threads of torch; default is torch's own number")
    add("--output", type=Path, help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    main()
