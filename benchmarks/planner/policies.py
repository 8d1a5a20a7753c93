"""Runs planned steps against the baselines' on this machine: all tasks in one batch, and every task by itself.

    python -m benchmarks.planner.policies --mixes 20 --write        about 10 minutes on one idle core

The backbone is that of `benchmarks.training.throughput`; mixes of short and long tasks are drawn by a seed (2 to 6
tasks, each of 2 to 12 sequences of 10 to 70, or 1 to 3 of 100 to 250 tokens, ranks 4 to 64; 600 to 2,000 tokens a
step). A pass holds at most 1,024 tokens by default, so that larger steps take several passes under every policy. The
profile is measured once, in this process, and knows nothing of the mixes. For every mix the three policies' plans are
made by `plan_tasks` and run by the package's own dispatcher and executor on the same global batches, in turn, round
after round; a step is all forward and backward passes (updates are the same for all policies). Times are medians over
rounds, by the processor time of the process on one thread by default, by the clock on the wall with `--clock wall`,
which asks for an idle machine.

Printed for each mix: tokens, hTasks and passes of each policy, seconds, and the planned step over each baseline and
over the better of the two; below 1 the plan is faster.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.paths import RESULTS, ROOT
from benchmarks.planner.accuracy import CLOCKS, RANKS, MixTask, load_of, rows_of
from benchmarks.training.report import host_kind
from benchmarks.training.workloads import ModelSpec

POLICIES = ("mux", "together", "interleaved")
TOKENS = (600, 2000)
"""Least and most tokens of a step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One mix.

    Attributes:
        num_tasks: of the mix.
        num_tokens: of a step.
        htasks: number of hTasks of each policy.
        passes: of a step, of each policy.
        predicted_s: of the passes, by policy.
        measured_s: likewise.
    """

    num_tasks: int
    num_tokens: int
    htasks: dict[str, int]
    passes: dict[str, int]
    predicted_s: dict[str, float]
    measured_s: dict[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Planned over each baseline, and over the better of them; below 1 the plan is faster."""
        over = {name: self.measured_s["mux"] / self.measured_s[name] for name in POLICIES[1:]}
        return {**over, "better": max(over.values())}


def draw_mix(number: int, seed: int) -> tuple[MixTask, ...]:
    """Return short and long tasks, drawn again until a step has a number of tokens within `TOKENS`."""
    draw = random.Random(f"policies-{seed}-{number}")
    while True:
        tasks = tuple(_draw_task(draw, index) for index in range(draw.randint(2, 6)))
        if TOKENS[0] <= sum(sum(task.lengths) for task in tasks) <= TOKENS[1]:
            return tasks


def _draw_task(draw: random.Random, index: int) -> MixTask:
    count, low, high = (draw.randint(2, 12), 10, 70) if draw.random() < 0.5 else (draw.randint(1, 3), 100, 250)
    lengths = tuple(draw.randint(low, high) for _ in range(count))
    return MixTask(f"task-{index}", lengths, draw.choice(RANKS), "all-linear")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the profile, run every mix under every policy, and print the table."""
    options = _parser().parse_args(arguments)
    import torch

    from peft_mux.planning.profiling.backbone import profile_backbone

    torch.set_num_threads(options.threads)
    timer = CLOCKS[options.clock]
    profile = profile_backbone(ModelSpec().build(), device="cpu", dtype=torch.float32, timer=timer)
    print(
        "tasks tokens   hTasks and passes: mux, interleaved   seconds: mux, together, interleaved"
        "   mux over: together, interleaved, better"
    )
    rows = []
    for number in range(options.mixes):
        rows.append(run_mix(draw_mix(number, options.seed), profile, options, timer))
        print(line(rows[-1]), flush=True)
    summary = summarise(rows)
    for over, numbers in summary.items():
        print(f"mux over {over}: " + ", ".join(f"{name} {value:.3f}" for name, value in numbers.items()))
    if options.write:
        path = RESULTS / f"planner-policies-{host_kind()}.json"
        contents = {
            "settings": vars(options),
            "summary": summary,
            "rows": [{**asdict(row), "ratios": row.ratios} for row in rows],
        }
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return median, worst and best of the planned step over each baseline, and over the better of them."""
    columns = {over: [row.ratios[over] for row in rows] for over in (*POLICIES[1:], "better")}
    return {
        over: {"median": statistics.median(own), "worst": max(own), "best": min(own)} for over, own in columns.items()
    }


def run_mix(tasks: Sequence[MixTask], profile: Any, options: argparse.Namespace, timer: Callable[[], float]) -> Row:
    """Run one mix under every policy, in turn."""
    import torch

    from peft_mux.engine.allocator import keeping_freed_memory
    from peft_mux.engine.executor import Executor
    from peft_mux.modeling.backbone.shape import model_shape
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.scheduler.costs.latency import CostModel
    from peft_mux.scheduler.costs.memory import MemoryModel
    from peft_mux.scheduler.planner.planner import plan_tasks
    from peft_mux.scheduler.planner.values import Budget

    backbone = ModelSpec().build()
    shape = model_shape(backbone, backbone.config, dtype=torch.float32, activation_dtype=torch.float32)
    model = MultiTaskPeftModel(backbone, {task.name: task.lora_config() for task in tasks}, verify=False).train()
    executor = Executor(model)
    cost, memory = CostModel(profile, shape), MemoryModel(shape, device_type="cpu")
    loads = [load_of(task, shape) for task in tasks]
    outcomes = {name: plan_tasks(loads, cost, memory, Budget(options.max_tokens), policy=name) for name in POLICIES}
    work = {name: step_work(tasks, outcome.htasks, outcome.max_tokens) for name, outcome in outcomes.items()}
    times: dict[str, list[float]] = {name: [] for name in POLICIES}
    with keeping_freed_memory(torch.device("cpu")):  # as the trainer does
        for round_number in range(options.rounds + 1):
            for name in POLICIES:
                start_s = timer()
                executor.run(work[name])
                if round_number:  # the first round allocates
                    times[name].append(timer() - start_s)
    return Row(
        num_tasks=len(tasks),
        num_tokens=sum(load.tokens for load in loads),
        htasks={name: len(outcome.htasks) for name, outcome in outcomes.items()},
        passes={name: len(own.micro_batches) for name, own in work.items()},
        predicted_s={
            name: sum(htask.micro_batches * htask.pass_s for htask in outcome.htasks)
            for name, outcome in outcomes.items()
        },
        measured_s={name: statistics.median(own) for name, own in times.items()},
    )


def step_work(tasks: Sequence[MixTask], htasks: Any, max_tokens: int) -> Any:
    """Return a step's micro-batches as the trainer's own dispatcher cuts them under a plan of these hTasks."""
    from types import SimpleNamespace

    import numpy as np

    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.data.task_batch import TaskBatch, TokenSequence
    from peft_mux.engine.steps import StepSource
    from peft_mux.scheduler.costs.memory import MemoryEstimate
    from peft_mux.scheduler.plan import Plan

    plan = Plan(
        htasks=htasks,
        shares=(),
        max_tokens_per_micro_batch=max_tokens,
        chunk_size=64,
        pad_to_chunks=False,
        memory=MemoryEstimate(0, 0, 0, 0),
        device="cpu",
    )
    running = []
    for task in tasks:
        ids = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows_of(task, ModelSpec().vocab_size)]
        sequences = tuple(TokenSequence(own, own, index) for index, own in enumerate(ids))
        batch = TaskBatch(task.name, 0, 0, sequences)
        loader = SimpleNamespace(batch=lambda step, batch=batch: batch)
        running.append(SimpleNamespace(name=task.name, step=0, loader=loader))
    return StepSource(plan, ChunkPackingCollator()).next(running)


def line(row: Row) -> str:
    """Return one line of the table."""
    seconds = "  ".join(f"{row.measured_s[name]:7.3f}" for name in POLICIES)
    counts = "  ".join(f"{row.htasks[name]:>2} {row.passes[name]:>3}" for name in ("mux", "interleaved"))
    ratios = "  ".join(f"{value:.3f}" for value in row.ratios.values())
    return f"{row.num_tasks:>5} {row.num_tokens:>6}   {counts:^35}   {seconds}   {ratios}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Planned steps against all in one batch and one by one, measured.")
    parser.add_argument("--mixes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="cpu")
    parser.add_argument("--write", action="store_true", help="write JSON into benchmarks/results/")
    return parser


if __name__ == "__main__":
    main()
