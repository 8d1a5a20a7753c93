"""Compares the planner's predictions with measurements: seconds of a step and peak memory, over many mixes of tasks.

    python -m benchmarks.planner.accuracy --mixes 24 --write        about 10 minutes on 2 cores

The backbone is that of `benchmarks.training.throughput`. Mixes are drawn by a seed: 1 to 8 tasks, 1 to 4 sequences of
10 to 250 tokens in a global batch, ranks 4 to 64; in every other mix all tasks are equal. The profile is measured once,
in this process, and knows nothing of the mixes.

Each mix is trained in a process of its own, through `MultiTaskTrainer` and whatever plan it makes, on the same batch in
every step. Measured time is the median over all steps but the first. Measured memory is the highest resident set of the
process during the run less the resident set before the backbone was made, which is after all imports and a training run
on a tiny model; the kernel's count (VmHWM) is set back in between through /proc/self/clear_refs, where it can be.

With `--clock cpu` (the default) both the profile and the steps are timed by the processor time of the process, on one
thread, which leaves out what other programs take from the machine though not what they do to its caches; with
`--clock wall`, by the clock on the wall, which asks for an idle machine.

Predictions are made from lengths, ranks and shapes alone, before the mix is run: `CostModel.step_s`, and
`MemoryModel.peak_bytes` with activations counted on the meta device. Neither is fitted to the mixes measured here: the
one number that comes from measurements of memory, the margin that the C library's allocator takes on a CPU, was read
off four mixes of seed 0. With `--malloc return`, which has that allocator give every large block back when it is freed
(MALLOC_MMAP_THRESHOLD_, read by glibc), no margin is added, and what is left is the model itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.paths import RESULTS, ROOT
from benchmarks.training.audit import _peak_bytes, _reset_peak, _resident_bytes, _return_free_memory
from benchmarks.training.report import host_kind
from benchmarks.training.workloads import ModelSpec

GOALS = {"step time": 0.15, "peak memory": 0.10}
"""Largest median error."""

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
RANKS = (4, 8, 16, 32, 64)
TARGETS = ("all-linear", "attention")
ATTENTION_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, slots=True)
class MixTask:
    """One task of a mix.

    Attributes:
        name: of the task.
        lengths: of the sequences of its global batch.
        rank: of its adapters.
        targets: one of `TARGETS`.
    """

    name: str
    lengths: tuple[int, ...]
    rank: int
    targets: str

    def lora_config(self) -> Any:
        from peft import LoraConfig

        modules: Any = "all-linear" if self.targets == "all-linear" else ATTENTION_MODULES
        return LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=modules, task_type="CAUSAL_LM")


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a child process reports.

    Attributes:
        steps_s: seconds of each step.
        peak_bytes: of the process, less what was there before.
        htasks: tasks and micro-batches of each hTask of the plan that ran.
    """

    steps_s: list[float]
    peak_bytes: int
    htasks: list[tuple[list[str], int]]

    @property
    def step_s(self) -> float:
        """Median over all steps but the first."""
        return statistics.median(self.steps_s[1:])


@dataclass(frozen=True, slots=True)
class Row:
    """One mix, predicted and measured."""

    num_tasks: int
    num_tokens: int
    ranks: list[int]
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def draw_mix(number: int, seed: int) -> tuple[MixTask, ...]:
    """Return the tasks of one mix."""
    draw = random.Random(f"{seed}-{number}")
    num_tasks = 1 + number % 8
    is_uniform = number % 2 == 0

    def task() -> tuple[tuple[int, ...], int, str]:
        lengths = tuple(draw.randint(10, 250) for _ in range(draw.randint(1, 8)))
        return lengths, draw.choice(RANKS), draw.choice(TARGETS)

    common = task()
    return tuple(MixTask(f"task-{n}", *(common if is_uniform else task())) for n in range(num_tasks))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the profile, run every mix, and print the table."""
    options = _parser().parse_args(arguments)
    import torch

    torch.set_num_threads(options.threads)
    if options.child is not None:
        print(json.dumps(asdict(run_mix(json.loads(options.child), options))))
        return
    rows = compare(options)
    summary = summarise(rows)
    if options.write:
        path = RESULTS / f"planner-accuracy-{host_kind()}.json"
        path.parent.mkdir(exist_ok=True)
        settings = {key: value for key, value in vars(options).items() if key not in ("child", "write")}
        contents = {"settings": settings, "summary": summary, "rows": [asdict(row) for row in rows]}
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.relative_to(ROOT)}")


def compare(options: argparse.Namespace) -> list[Row]:
    """Return every mix, predicted and measured; prints each as it comes."""
    import torch

    from peft_mux.planning.profiling.backbone import profile_backbone

    backbone = ModelSpec().build()
    start_s = time.perf_counter()
    profile = profile_backbone(
        backbone, device="cpu", dtype=torch.float32, budget_s=options.budget, timer=CLOCKS[options.clock]
    )
    print(f"profile of {profile.device}: measured in {time.perf_counter() - start_s:.0f} s, clock: {options.clock}")
    print("tasks tokens  step s: predicted measured error   MiB: predicted measured error   ranks")
    rows = []
    for number in range(options.mixes):
        tasks = draw_mix(number, options.seed)
        measured = child(tasks, options)
        rows.append(predict(tasks, measured, profile, backbone, options))
        print(line(rows[-1]), flush=True)
    return rows


def predict(
    tasks: Sequence[MixTask], measured: Measurement, profile: Any, backbone: Any, options: argparse.Namespace
) -> Row:
    """Return a mix as the planner's models see it, next to what was measured.

    Of the measurement only the plan is read: which tasks shared which passes.
    """
    import torch

    from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes
    from peft_mux.modeling.backbone.shape import model_shape
    from peft_mux.scheduler.costs.latency import CostModel
    from peft_mux.scheduler.costs.memory import MemoryModel

    shape = model_shape(backbone, backbone.config, dtype=torch.float32, activation_dtype=torch.float32)
    loads = {task.name: load_of(task, shape) for task in tasks}
    htasks = [([loads[name] for name in names], count) for names, count in measured.htasks]
    cost, step_s = CostModel(profile, shape), 0.0
    for members, count in htasks:
        rows = [TaskRows(load.lengths) for load in members]
        passes = cut_into_passes(rows, PassRules(), bound=sum(load.tokens for load in members), num_passes=count)
        step_s += float(cost.passes_s(members, passes).sum())
    per_token = activation_bytes(tasks)
    margin = 0.0 if options.malloc == "return" else None
    memory = MemoryModel(shape, activation_bytes_per_token=per_token, device_type="cpu", allocator_margin=margin)
    largest = max(
        max(sum(load.tokens for load in members) / count, max(load.longest for load in members))
        for members, count in htasks
    )
    return Row(
        num_tasks=len(tasks),
        num_tokens=sum(load.tokens for load in loads.values()),
        ranks=[task.rank for task in tasks],
        predicted_s=step_s + cost.outside_s(list(loads.values())),
        measured_s=measured.step_s,
        predicted_bytes=memory.peak_bytes(list(loads.values()), largest),
        measured_bytes=measured.peak_bytes,
    )


def load_of(task: MixTask, shape: Any) -> Any:
    """Return what the planner knows of a task."""
    from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad

    d, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.key_value_size
    widths = [d + a, d + k, d + k, a + d]
    if task.targets == "all-linear":
        widths += [d + i, d + i, i + d]
    return TaskLoad(
        name=task.name,
        lengths=task.lengths,
        num_targets=sum(length - 1 for length in task.lengths),
        adapters=tuple(AdapterLoad(task.rank, width) for width in widths),
        trainable_parameters=shape.num_layers * task.rank * sum(widths),
    )


def activation_bytes(tasks: Sequence[MixTask]) -> float:
    """Return what a pass keeps for each token, counted on a description."""
    import torch

    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.planning.profiling.memory import count_activation_bytes_per_token

    with torch.device("meta"):
        backbone = ModelSpec().build()
    model = MultiTaskPeftModel(backbone, {task.name: task.lora_config() for task in tasks}, verify=False)
    return count_activation_bytes_per_token(model, [length for task in tasks for length in task.lengths])


def child(tasks: Sequence[MixTask], options: argparse.Namespace) -> Measurement:
    """Measure a mix in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planner.accuracy", "--child", json.dumps([asdict(t) for t in tasks])]
    command += ["--threads", str(options.threads), "--steps", str(options.steps), "--clock", options.clock]
    environment = dict(os.environ)
    if options.malloc == "return":
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"a mix ended with code {result.returncode}:\n{result.stderr[-3000:]}")
    return Measurement(**json.loads(result.stdout.splitlines()[-1]))


def run_mix(described: list[dict[str, Any]], options: argparse.Namespace) -> Measurement:
    """Train a mix in this process, which must be a fresh one."""
    tasks = [MixTask(**{**task, "lengths": tuple(task["lengths"])}) for task in described]
    tiny = ModelSpec(hidden_size=128, num_layers=1, intermediate_size=128, num_heads=2, vocab_size=64)
    train(tiny, tasks[:1], 2, CLOCKS[options.clock])
    gc.collect()
    _return_free_memory()
    before_bytes = _resident_bytes()
    _reset_peak()
    steps_s, htasks = train(ModelSpec(), tasks, options.steps, CLOCKS[options.clock])
    return Measurement(steps_s, _peak_bytes() - before_bytes, htasks)


def train(
    spec: ModelSpec, tasks: Sequence[MixTask], num_steps: int, timer: Callable[[], float]
) -> tuple[list[float], list[tuple[list[str], int]]]:
    """Train the same batch again and again; return seconds of each step, and the hTasks of the plan."""
    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

    clock = make_clock(timer)
    with tempfile.TemporaryDirectory() as folder:
        arguments = MultiTaskTrainingArguments(
            output_dir=folder,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        described = [
            Task(
                name=task.name,
                peft_config=task.lora_config(),
                train_dataset=rows_of(task, spec.vocab_size) * num_steps,
                train_batch_size=len(task.lengths),
                max_steps=num_steps,
                shuffle=False,
            )
            for task in tasks
        ]
        trainer = MultiTaskTrainer(model=spec.build(), tasks=described, args=arguments)
        trainer.add_callback(clock)
        plan = trainer.plan()
        trainer.train()
    return clock.steps_s, [(list(htask.tasks), htask.micro_batches) for htask in plan.htasks]


def rows_of(task: MixTask, vocab_size: int) -> list[dict[str, list[int]]]:
    """Return one global batch of random tokens."""
    draw = random.Random(task.name)
    return [{"input_ids": [draw.randrange(vocab_size) for _ in range(length)]} for length in task.lengths]


def make_clock(timer: Callable[[], float]) -> Any:
    """Return a callback that times steps."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.steps_s: list[float] = []
            self.start_s = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start_s = timer()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.steps_s.append(timer() - self.start_s)

    return Clock()


def line(row: Row) -> str:
    """Return one row of the table."""
    mib = 2**20
    return (
        f"{row.num_tasks:5d} {row.num_tokens:6d}         {row.predicted_s:9.3f} {row.measured_s:8.3f} "
        f"{row.time_error:+6.1%}        {row.predicted_bytes / mib:8.1f} {row.measured_bytes / mib:8.1f} "
        f"{row.memory_error:+6.1%}   {','.join(map(str, row.ranks))}"
    )


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, float | bool]]:
    """Print and return the median and the worst error of both."""
    errors = {
        "step time": [abs(row.time_error) for row in rows],
        "peak memory": [abs(row.memory_error) for row in rows],
    }
    summary: dict[str, dict[str, float | bool]] = {}
    for name, values in errors.items():
        median, worst = statistics.median(values), max(values)
        is_met = median <= GOALS[name]
        print(
            f"{name}: median error {median:.1%}, worst {worst:.1%}, over {len(rows)} mixes; goal for the median "
            f"{GOALS[name]:.0%}: {'met' if is_met else 'MISSED'}"
        )
        summary[name] = {"median_error": median, "worst_error": worst, "goal": GOALS[name], "is_met": is_met}
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.accuracy", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--mixes", type=int, default=24, help="how many mixes to draw")
    add("--steps", type=int, default=5, help="optimizer steps of each; the first is not counted")
    add("--threads", type=int, default=1, help="of torch, in the profile and in the runs")
    add("--clock", choices=tuple(CLOCKS), default="cpu", help="processor time (one thread) or wall")
    add("--malloc", choices=("default", "return"), default="default", help="what becomes of freed blocks")
    add("--budget", type=float, default=60.0, help="seconds for the profile")
    add("--seed", type=int, default=1, help="of the mixes")
    add("--write", action="store_true", help="write the JSON into benchmarks/results")
    add("--child", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
