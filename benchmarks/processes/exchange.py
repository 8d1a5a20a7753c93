"""The predicted exchange of gradients against two processes that add them, over the link that they measure.

    python -m benchmarks.processes.exchange            two processes over gloo, one thread each; a minute
    python -m benchmarks.processes.exchange --write    also into benchmarks/results/

Adapters of several sizes are added as `peft_mux.engine.gradients` adds them: one all-reduce for each task, all started
before the first is waited for. `predicted` is `GradientExchange` with the link of `measure_link`; both are taken in
every round, and the row shows medians over rounds. A CPU that adds is busy, which the model of a ring leaves out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Table, hand_over, in_own_process
from benchmarks.stored import host_kind, write_result
from peft_mux.planning.profiling.measured_links import measure_link
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.loads import ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.facts import ReplicaFacts
from peft_mux.scheduler.replicas.time_model import ReplicaGroup

NUM_PROCESSES = 2
CASES = ((1, 100_000), (1, 1_000_000), (1, 10_000_000), (8, 100_000), (8, 1_000_000))
"""Number of tasks, and adapter parameters of each."""
SHAPE = ModelShape(2, 64, 128, 64, 64, 100, backbone_bytes=1_000_000, activation_bytes=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each case (%(default)s)")
    parser.add_argument("--write", action="store_true", help="write the result into benchmarks/results/")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _work(options.rounds)
        return
    rows = in_own_process(
        "benchmarks.processes.exchange", "--worker", "--rounds", str(options.rounds), processes=NUM_PROCESSES
    )
    table = Table(
        "tasks:>5", "parameters:>11,", "link MB/s:>9.0f", "predicted ms:>12.2f", "measured ms:>11.2f", "ratio:>5.2f"
    )
    for row in rows:
        predicted_ms, measured_ms = 1e3 * row["predicted_s"], 1e3 * row["measured_s"]
        speed = row["bytes_per_s"] / 1e6
        table.row(row["num_tasks"], row["parameters"], speed, predicted_ms, measured_ms, predicted_ms / measured_ms)
    if options.write:
        write_result(f"exchange-{host_kind()}", {"rows": rows})


def _work(rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [_case(num_tasks, parameters, rounds) for num_tasks, parameters in CASES]
    if dist.get_rank() == 0:
        hand_over(rows)
    dist.destroy_process_group()


def _case(num_tasks: int, parameters: int, rounds: int) -> dict[str, Any]:
    """Return what adding the adapters took, in the median over rounds, and what was predicted."""
    gradients = [torch.ones(parameters) for _ in range(num_tasks)]
    measured_s, predicted_s, speeds = [], [], []
    for _ in range(rounds):
        link = measure_link("cpu")
        predicted_s.append(_predicted_s(num_tasks, parameters, link))
        speeds.append(link.bytes_per_s)
        dist.barrier()
        start_s = time.perf_counter()
        for pending in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            pending.wait()
        measured_s.append(time.perf_counter() - start_s)
    medians = map(statistics.median, (speeds, predicted_s, measured_s))
    figures = dict(zip(("bytes_per_s", "predicted_s", "measured_s"), medians, strict=True))
    return {"num_tasks": num_tasks, "parameters": parameters, **figures}


def _predicted_s(num_tasks: int, parameters: int, link: Link) -> float:
    """Return the seconds that `GradientExchange` predicts for two replicas with a measured link."""
    loads = tuple(TaskLoad(f"task-{number}", (1,), 1, (), parameters) for number in range(num_tasks))
    facts = ReplicaFacts(
        SHAPE, analytic_profile(DEVICES["cpu"], SHAPE, link=link), loads, MemoryModel(SHAPE), None, pass_tokens=1
    )
    return GradientExchange(loads, facts).seconds_of([ReplicaGroup(ParallelConfig(1, 1), NUM_PROCESSES, 1)])


if __name__ == "__main__":
    main()
