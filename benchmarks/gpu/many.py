"""Several GPUs of one machine, in one call of at most 5 minutes: layouts of processes, over NCCL.

    python -m benchmarks.gpu.many --name h100x8           all GPUs; writes benchmarks/results/gpu-many-h100x8.json
    python -m benchmarks.gpu.many --processes 4           the first four
    python -m benchmarks.gpu.many --parts data tensor     these layouts, after one process
    python -m benchmarks.gpu.many --list                  all parts with their computed seconds; needs no GPU
    python -m benchmarks.gpu.many --rehearse              two processes on the CPU with gloo, tiny shapes, a minute

Each layout is started by `torchrun` and trains twice with `MultiTaskTrainer`: a small backbone in fp32, whose losses
and adapters must be those of one process, and 16 layers of Llama-3-8B's shape in bf16, which is timed, and profiled by
every process at the end. All layouts train the same rows: 8 tasks, and 4 rows of a task's step for each GPU.

Communication is *exposed* while a GPU communicates and computes nothing. A stage of a pipeline also waits for its
neighbours within NCCL's kernels, so there it includes the bubbles. The exit code is 1 where a layout failed, was left
out, or differs from one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import llama
from benchmarks.gpu.device import versions
from benchmarks.gpu.profiler import TRACES_VARIABLE, StepWatch
from benchmarks.gpu.report import Deadline, Part, Report, Row, add_options
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free
from benchmarks.gpu.train import loss_difference
from benchmarks.harness import hand_over, in_own_process
from benchmarks.kernels.problem import greater
from benchmarks.paths import RESULTS

MINUTES = 5.0
NUM_WARM, NUM_TIMED, NUM_PROFILED = 3, 4, 2
NUM_TASKS, RANK, ROWS_PER_GPU = 8, 16, 4
MEAN_TOKENS, SIGMA, LEAST_TOKENS, MOST_TOKENS = 128, 0.8, 16, 1024
"""Of rows, whose lengths are lognormal."""
OWN_DIFFERENCE = 3.0
TIMED = roofline.LLAMA_8B.of_layers(16)
CHECKED = Backbone(512, 4, 1024, 32, 2048)
TINY = Backbone(64, 4, 96, 8, 64)
"""Shapes with as many layers as stages, and as many key-value heads as tensor parallel ranks, at least."""
CHECK_STEPS = 6
TOLERANCES = {"losses": 1e-5, "weights": 1e-4, "timed losses": 2e-2}
"""Weights may also differ by `OWN_DIFFERENCE` times what one process differs by if its passes have another size."""
ESTIMATED_S = {"one process": 62.0, "data": 46.0, "shard": 48.0, "tensor": 52.0, "pipeline": 50.0}
"""Computed: 25 s to start, 8 s for the small backbone, 10 s to compile for the first time, the rest for the steps."""


def layout_arguments(name: str, num_processes: int) -> dict[str, Any]:
    """Return the arguments of `MultiTaskTrainingArguments` that make a layout of so many processes."""
    degree = min(4, num_processes)
    return {
        "one process": {},
        "data": {},
        "shard": {"shard_backbone": True},
        "tensor": {"tensor_parallel_size": degree},
        "pipeline": {"pipeline_parallel_size": degree},
    }[name]


# ------------------------------------------------------------------------------------------ one process of a layout


def work(name: str, num_processes: int, folder: Path, *, is_rehearsal: bool) -> None:
    """Train as one process of a layout; leave what was found in `folder`."""
    rank = int(os.environ.get("RANK", "0"))
    checked, timed = (TINY, TINY) if is_rehearsal else (CHECKED, TIMED)
    found = {"check": _train(name, num_processes, folder / "check", checked, is_rehearsal=is_rehearsal, is_timed=False)}
    if name == "one process":
        again = {"max_tokens_per_micro_batch": 64 if is_rehearsal else 1024}
        _train(name, 1, folder / "again", checked, is_rehearsal=is_rehearsal, is_timed=False, **again)
    found["timed"] = _train(name, num_processes, folder / "timed", timed, is_rehearsal=is_rehearsal, is_timed=True)
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        hand_over(name)


def _train(
    name: str, num_processes: int, folder: Path, shape: Backbone, *, is_rehearsal: bool, is_timed: bool, **more: Any
) -> dict[str, Any]:
    """Train all tasks; the run's folder then has the adapters, unless the run is timed."""
    from benchmarks.training.mux import quiet_arguments
    from peft_mux import MultiTaskTrainer

    num_profiled = (1 if is_rehearsal else NUM_PROFILED) if is_timed else 0
    num_steps = (3 if is_rehearsal else NUM_WARM + NUM_TIMED + num_profiled) if is_timed else CHECK_STEPS
    rows_per_task = (2 if is_rehearsal else ROWS_PER_GPU * num_processes) if is_timed else 4
    workload = lognormal_workload(shape, 3 if is_rehearsal else NUM_TASKS, rows_per_task, num_steps)
    is_cuda = torch.cuda.is_available()
    args = quiet_arguments(
        str(folder),
        use_cpu=not is_cuda,
        bf16=is_timed and not is_rehearsal,
        lr_scheduler_type="constant",
        save_strategy="no" if is_timed else "steps",
        save_steps=10 * num_steps,
        use_liger_kernel="auto" if is_timed else False,  # it does not run in all layouts
        **layout_arguments(name, num_processes),
        **more,
    )
    settings = Settings(args.device, is_rehearsal)
    free(settings.device)
    backbone = llama(settings, shape)
    tasks = workload.to_tasks()
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(settings.device)
    watch = StepWatch(settings.device, num_steps, num_profiled)
    trainer = MultiTaskTrainer(backbone if is_timed else backbone.float(), args, tasks, callbacks=[watch])
    watch.trainer = trainer
    trainer.train()
    found: dict[str, Any] = {
        "losses": watch.losses,
        "steps_s": watch.steps_s[: num_steps - num_profiled],
        "tokens_per_step": [
            sum(len(row["input_ids"]) for own in workload.tasks for row in own.batches[step])
            for step in range(num_steps)
        ],
        "profile": watch.profile,
        "statuses": sorted({trainer.table[task.name].status.value for task in tasks}),
    }
    if is_cuda:
        found["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
        found["reserved_bytes"] = torch.cuda.max_memory_reserved(settings.device)
    return found


def lognormal_workload(shape: Backbone, num_tasks: int, rows_per_task: int, num_steps: int) -> Any:
    """Return tasks of one rank whose rows have lognormal lengths.

    Args:
        shape: the shape of the backbone, for its words.
        num_tasks: number of tasks.
        rows_per_task: rows of a task's step.
        num_steps: steps of each task.
    """
    from benchmarks.training.workloads import random_workload

    most = MOST_TOKENS if shape.vocab_size > 1000 else 24

    def length_of(draw: random.Random) -> int:
        return round(min(max(draw.lognormvariate(math.log(MEAN_TOKENS) - SIGMA**2 / 2, SIGMA), LEAST_TOKENS), most))

    return random_workload(
        "lognormal",
        ranks=[RANK] * num_tasks,
        batch_sizes=[rows_per_task] * num_tasks,
        num_steps=num_steps,
        vocab_size=shape.vocab_size,
        length_of=length_of,
    )


# ------------------------------------------------------------------------------------------------------ all layouts


def layout_part(
    name: str, num_processes: int, folder: Path, deadline: Deadline, *, is_rehearsal: bool
) -> Iterator[Row]:
    """Run a layout in processes of its own; yield its speed, and how far it is from one process.

    Raises:
        RuntimeError: if a process fails.
        subprocess.TimeoutExpired: if the time is up.
    """
    own = folder / name.replace(" ", "-")
    own.mkdir(parents=True)
    count = 1 if name == "one process" else num_processes
    given = ["--work", name, "--processes", str(num_processes), "--folder", str(own), *["--rehearse"] * is_rehearsal]
    in_own_process("benchmarks.gpu.many", *given, processes=count, limit_s=max(deadline.left_s(), 1.0))
    ranks = [json.loads((own / f"rank-{rank}.json").read_text()) for rank in range(count)]
    yield "speed", _speed(ranks, folder, is_rehearsal=is_rehearsal)
    yield "compared with one process", _comparison(name, ranks, folder)


def _speed(ranks: list[dict[str, Any]], folder: Path, *, is_rehearsal: bool) -> dict[str, Any]:
    """Return tokens per second of all processes, what the profiler saw of each, and memory."""
    timed = [rank["timed"] for rank in ranks]
    first = 1 if is_rehearsal else NUM_WARM
    steps_s = [max(own["steps_s"][step] for own in timed) for step in range(len(timed[0]["steps_s"]))]
    tokens = timed[0]["tokens_per_step"][first : len(steps_s)]
    found: dict[str, Any] = {"processes": len(ranks), "steps_s": steps_s}
    found["tokens_per_s"] = sum(tokens) / sum(steps_s[first:])
    one = _one_process(folder)
    if one is not None:
        found["over_one_process"] = found["tokens_per_s"] * sum(one["timed"]["steps_s"][first:]) / sum(tokens)
    for value in ("exposed_communication_share", "exposed_communication_s", "idle_share", "busy_s"):
        each = [own["profile"][value] for own in timed]
        found |= {value: statistics.fmean(each), f"{value}_by_rank": each}
    found["profiled_step_s"] = max(own["profile"]["step_s"] for own in timed)
    found["kernels_s"] = timed[0]["profile"]["kernels_s"]
    if "peak_bytes" in timed[0]:
        found |= {name: max(own[name] for own in timed) for name in ("peak_bytes", "reserved_bytes")}
    return found


def _comparison(name: str, ranks: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return how far losses of each process, and the saved adapters, are from those of one process."""
    statuses = sorted({status for rank in ranks for part in ("check", "timed") for status in rank[part]["statuses"]})
    one, found = _one_process(folder), {"losses": 0.0, "weights": 0.0, "timed losses": 0.0}
    if one is None:
        return {"skipped": "one process was not measured", "is_right": False}
    for rank in ranks:
        for ours, theirs in zip(rank["check"]["losses"], one["check"]["losses"], strict=True):
            for own, wanted in zip(ours, theirs, strict=True):
                found["losses"] = greater(abs(own - wanted) / abs(wanted), found["losses"])
        timed = loss_difference(rank["timed"]["losses"], one["timed"]["losses"])
        found["timed losses"] = greater(timed, found["timed losses"])
    wanted = _adapters(folder / "one-process" / "check")
    found["weights"] = _distance(_adapters(folder / name.replace(" ", "-") / "check"), wanted)
    of_one_process = _distance(_adapters(folder / "one-process" / "again"), wanted)
    limits = TOLERANCES | {"weights": max(TOLERANCES["weights"], OWN_DIFFERENCE * of_one_process)}
    is_right = statuses == ["succeeded"] and bool(wanted) and all(found[key] <= limits[key] for key in found)
    tolerances = {f"tolerance of {key}": value for key, value in limits.items()}
    return {**found, **tolerances, "adapters": len(wanted), "statuses": ", ".join(statuses), "is_right": is_right}


def _adapters(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the adapter of each task that a run has saved."""
    from safetensors.torch import load_file

    return {path.parent.name: load_file(path) for path in sorted(folder.glob("*/adapter_model.safetensors"))}


def _distance(found: dict[str, dict[str, torch.Tensor]], wanted: dict[str, dict[str, torch.Tensor]]) -> float:
    """Return the greatest relative Frobenius difference of an adapter."""
    worst = 0.0
    for task, adapter in wanted.items():
        own = found[task]
        assert own.keys() == adapter.keys(), f"{task} has other parameters than in one process"
        difference = torch.stack([(own[key] - value).norm() for key, value in adapter.items()]).norm()
        worst = greater(float(difference / torch.stack([value.norm() for value in adapter.values()]).norm()), worst)
    return worst


def _one_process(folder: Path) -> dict[str, Any] | None:
    path = folder / "one-process" / "rank-0.json"
    return json.loads(path.read_text()) if path.exists() else None


def main(arguments: list[str] | None = None) -> int:
    """Run the layouts that the command line names; return 1 where one failed or differs."""
    options = _options(arguments)
    num_gpus = torch.cuda.device_count()
    num_processes = options.processes or (2 if options.rehearse else num_gpus)
    if options.work:
        work(options.work, num_processes, options.folder, is_rehearsal=options.rehearse)
        return 0
    if options.list:
        lines = [f"{seconds:6.0f} s  {name}" for name, seconds in ESTIMATED_S.items()]
        print("\n".join([*lines, f"{sum(ESTIMATED_S.values()):6.0f} s  in all"]))
        return 0
    if not options.rehearse and not 2 <= num_processes <= num_gpus:
        raise SystemExit(f"--processes must be 2 to {num_gpus}, the GPUs of this machine, except with --rehearse.")
    if options.traces:
        os.environ[TRACES_VARIABLE] = str(options.traces.resolve())
    names = [name for name in ESTIMATED_S if not options.parts or name == "one process" or name in options.parts]
    name = options.name or ("rehearsal" if options.rehearse else f"{num_processes}")
    device = torch.device("cuda" if num_gpus else "cpu")
    head = {
        "command": sys.argv[1:],
        "is_rehearsal": options.rehearse,
        "processes": num_processes,
        "layouts": {name: layout_arguments(name, num_processes) for name in names},
        "versions": versions(device),
        "minutes": options.minutes,
    }
    with tempfile.TemporaryDirectory() as temporary:

        def part_of(layout: str) -> Part:
            def run(deadline: Deadline) -> Iterator[Row]:
                return layout_part(layout, num_processes, Path(temporary), deadline, is_rehearsal=options.rehearse)

            return Part(layout, ESTIMATED_S[layout], run, is_check=True)

        report = Report(options.output or RESULTS / f"gpu-many-{name}.json", head)
        report.run([part_of(layout) for layout in names], 60 * options.minutes)
    return report.print_faults()


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.many", description=(__doc__ or "").splitlines()[0])
    add, layouts = parser.add_argument, list(ESTIMATED_S)
    add_options(parser, MINUTES)
    add("--processes", type=int, help="by default one for each GPU")
    add("--parts", nargs="+", choices=layouts, help="layouts to run after one process; by default all")
    add("--work", choices=layouts, help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
