"""Compares the planner's predictions with measurements: seconds of a step and peak memory, over many mixes of tasks.

    python -m benchmarks.planner.accuracy --mixes 24 --write        about 10 minutes on 2 cores

The backbone is that of `benchmarks.training.throughput`. Mixes are drawn by a seed: 1 to 8 tasks, 1 to 4 sequences of
10 to 250 tokens in a global batch, ranks 4 to 64; in every other mix all tasks are equal. The profile is measured once,
in this process, and knows nothing of the mixes.

Each mix is trained in a process of its own, through `MultiTaskTrainer` and whatever plan it makes, on the same batch in
every step. Measured time is the median over all steps but the first. Measured memory is the highest resident set of the
process during the run less the resident set before the backbone was made, which is after all imports and a training run
on a tiny model; the kernel's count (VmHWM) is set back in between through /proc/self/clear_refs, where it can be.

With `--clock processor` (the default) both the profile and the steps are timed by the processor time of the process, on
one thread, which leaves out what other programs take from the machine though not what they do to its caches; with
`--clock wall`, by the clock on the wall, which asks for an idle machine.

Predictions are made from lengths, ranks and shapes alone, before the mix is run: `CostModel.step_s`, and
`MemoryModel.peak_bytes` with activations counted on the meta device. Neither is fitted to the mixes measured here: the
one number that comes from measurements of memory, the margin that the C library's allocator takes on a CPU, was read
off four mixes of seed 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from benchmarks.harness import CLOCKS, Table, hand_over, in_own_process
from benchmarks.stored import host_kind, write_result
from benchmarks.training.audit import measured_peak
from benchmarks.training.baselines.hf_trainer import StepClock
from benchmarks.training.mux import quiet_arguments
from benchmarks.training.timing import use_clock
from benchmarks.training.workloads import ModelSpec
from peft_mux import MultiTaskPeftModel, MultiTaskTrainer, Task
from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes
from peft_mux.planning.model_shape import model_shape
from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token
from peft_mux.planning.profiling.backbone import profile_backbone
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel

GOALS = {"step time": 0.15, "peak memory": 0.10}
"""Largest median error."""
RANKS = (4, 8, 16, 32, 64)
ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


class MixTask(NamedTuple):
    """One task of a mix.

    Attributes:
        name: of the task.
        lengths: of the sequences of its global batch.
        rank: of its adapters.
        targets: "all-linear" or "attention".
    """

    name: str
    lengths: tuple[int, ...]
    rank: int
    targets: str

    def lora_config(self) -> LoraConfig:
        modules: Any = "all-linear" if self.targets == "all-linear" else ATTENTION_MODULES
        return LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=modules, task_type="CAUSAL_LM")

    def load(self, shape: Any) -> TaskLoad:
        """Return what the planner knows of the task."""
        d, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.key_value_size
        widths = [d + a, d + k, d + k, a + d]
        if self.targets == "all-linear":
            widths += [d + i, d + i, i + d]
        return TaskLoad(
            name=self.name,
            lengths=self.lengths,
            num_targets=sum(length - 1 for length in self.lengths),
            adapters=tuple(AdapterLoad(self.rank, width) for width in widths),
            trainable_parameters=shape.num_layers * self.rank * sum(widths),
        )


def draw_mix(number: int, seed: int) -> list[MixTask]:
    """Return the tasks of one mix."""
    draw = random.Random(f"{seed}-{number}")
    num_tasks = 1 + number % 8
    is_uniform = number % 2 == 0

    def task() -> tuple[tuple[int, ...], int, str]:
        lengths = tuple(draw.randint(10, 250) for _ in range(draw.randint(1, 8)))
        return lengths, draw.choice(RANKS), draw.choice(("all-linear", "attention"))

    common = task()
    return [MixTask(f"task-{n}", *(common if is_uniform else task())) for n in range(num_tasks)]


# ------------------------------------------------------------------- measured


def train(spec: ModelSpec, tasks: Sequence[MixTask], num_steps: int, clock: str) -> dict[str, Any]:
    """Train the same batch again and again; return the seconds of a step, and the hTasks of the plan."""
    use_clock(clock)
    timer, described = StepClock(), []
    for task in tasks:
        draw = random.Random(task.name)
        rows = [{"input_ids": [draw.randrange(spec.vocab_size) for _ in range(length)]} for length in task.lengths]
        described.append(
            Task(
                name=task.name,
                peft_config=task.lora_config(),
                train_dataset=rows * num_steps,
                train_batch_size=len(task.lengths),
                max_steps=num_steps,
                shuffle=False,
            )
        )
    with tempfile.TemporaryDirectory() as folder:
        trainer = MultiTaskTrainer(model=spec.build(), tasks=described, args=quiet_arguments(folder), callbacks=[timer])
        htasks = [(list(htask.tasks), htask.micro_batches) for htask in trainer.plan().htasks]
        trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(timer.ends_s)]
    return {"step_s": statistics.median(seconds), "htasks": htasks}


def run_mix(tasks: Sequence[MixTask], options: argparse.Namespace) -> dict[str, Any]:
    """Train a mix in this process, which must be a fresh one; return its time, plan and peak of memory."""
    tiny = ModelSpec(hidden_size=128, num_layers=1, intermediate_size=128, num_heads=2, vocab_size=64)
    train(tiny, tasks[:1], 2, options.clock)
    figures, peak_bytes = measured_peak(lambda: train(options.model, tasks, options.steps, options.clock))
    return {**figures, "peak_bytes": peak_bytes}


# ------------------------------------------------------------------ predicted


def predict(
    tasks: Sequence[MixTask], measured: dict[str, Any], profile: Any, backbone: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Return a mix as the planner's models see it, next to what was measured.

    Of the measurement only the plan is read: which tasks shared which passes.
    """
    shape = model_shape(backbone, backbone.config, dtype=torch.float32, activation_dtype=torch.float32)
    loads = {task.name: task.load(shape) for task in tasks}
    htasks = [([loads[name] for name in names], count) for names, count in measured["htasks"]]
    cost, step_s = CostModel(profile, shape), 0.0
    for members, count in htasks:
        rows = [TaskRows(load.lengths) for load in members]
        passes = cut_into_passes(rows, PassRules(), bound=sum(load.tokens for load in members), num_passes=count)
        step_s += float(cost.passes_s(members, passes).sum())
    with torch.device("meta"):
        described = options.model.build()
    model = MultiTaskPeftModel(described, {task.name: task.lora_config() for task in tasks}, verify=False)
    lengths = [length for task in tasks for length in task.lengths]
    memory = MemoryModel(
        shape,
        activation_bytes_per_token=count_activation_bytes_per_token(model, lengths),
        device_type="cpu",
    )
    largest = max(
        max(sum(load.tokens for load in members) / count, max(load.longest for load in members))
        for members, count in htasks
    )
    return {
        "num_tasks": len(tasks),
        "num_tokens": sum(lengths),
        "ranks": [task.rank for task in tasks],
        "predicted_s": step_s + cost.outside_s(list(loads.values())),
        "measured_s": measured["step_s"],
        "predicted_bytes": memory.peak_bytes(list(loads.values()), largest),
        "measured_bytes": measured["peak_bytes"],
    }


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return every mix, predicted and measured; prints each as it comes."""
    backbone = options.model.build()
    start_s = time.perf_counter()
    profile = profile_backbone(
        backbone, device="cpu", dtype=torch.float32, budget_s=options.budget, timer=CLOCKS[options.clock]
    )
    print(f"profile of {profile.device}: measured in {time.perf_counter() - start_s:.0f} s, clock: {options.clock}")
    table = Table(
        "tasks:>5", "tokens:>6", "predicted s:>11.3f", "measured s:>10.3f", "error:>+6.1%",
        "predicted MiB:>13.1f", "measured MiB:>12.1f", "error:>+6.1%", "ranks:<1",
    )  # fmt: skip
    given = ["--threads", str(options.threads), "--steps", str(options.steps), "--clock", options.clock]
    given += ["--layers", str(options.layers)]
    rows = []
    for number in range(options.mixes):
        tasks = draw_mix(number, options.seed)
        measured = in_own_process("benchmarks.planner.accuracy", *given, "--child", json.dumps(tasks))
        row = predict(tasks, measured, profile, backbone, options)
        rows.append(row)
        seconds, peaks = ((row[f"predicted_{of}"], row[f"measured_{of}"]) for of in ("s", "bytes"))
        pairs = (seconds, [peak / 2**20 for peak in peaks])
        values = (value for predicted, measured in pairs for value in (predicted, measured, predicted / measured - 1))
        table.row(row["num_tasks"], row["num_tokens"], *values, ",".join(map(str, row["ranks"])))
    return rows


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float | bool]]:
    """Print and return the median and the worst error of both."""
    summary: dict[str, dict[str, float | bool]] = {}
    for name, of in (("step time", "s"), ("peak memory", "bytes")):
        errors = [abs(row[f"predicted_{of}"] / row[f"measured_{of}"] - 1) for row in rows]
        median, worst, goal = statistics.median(errors), max(errors), GOALS[name]
        is_met = median <= goal
        print(
            f"{name}: median error {median:.1%}, worst {worst:.1%}, over {len(rows)} mixes; goal for the median "
            f"{goal:.0%}: {'met' if is_met else 'MISSED'}"
        )
        summary[name] = {"median_error": median, "worst_error": worst, "goal": goal, "is_met": is_met}
    return summary


def main() -> None:
    """Measure the profile, run every mix, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mixes", type=int, default=24, help="how many mixes to draw")
    add("--steps", type=int, default=5, help="optimizer steps of each; the first is not counted")
    add("--layers", type=int, default=ModelSpec().num_layers, help="layers of the backbone")
    add("--threads", type=int, default=1, help="of torch, in the profile and in the runs")
    add("--clock", choices=tuple(CLOCKS), default="processor", help="of the processor (one thread), or wall")
    add("--budget", type=float, default=60.0, help="seconds for the profile")
    add("--seed", type=int, default=1, help="of the mixes")
    add("--write", action="store_true", help="write the JSON into benchmarks/results")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings, options.model = dict(vars(options)), ModelSpec(num_layers=options.layers)
    if options.child is not None:
        tasks = [MixTask(name, tuple(lengths), *more) for name, lengths, *more in json.loads(options.child)]
        hand_over(run_mix(tasks, options))
        return
    rows = compare(options)
    summary = summarise(rows)
    if options.write:
        write_result(f"planner-accuracy-{host_kind()}", {"settings": settings, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
