"""Prints what searching for the number C of micro-batches gains over four for each stage, and what rows make of both.

    python -m benchmarks.planner.micro_batches            seconds, one thread

Llama 7B shapes on 4 A40s and 4 H100s (analytic profiles), four stages, mixes of LoRA tasks of rank 16. "4 S" is the
default before C was searched (16), "best" the fastest of all C up to 64 by the same simulation; times are of a step.
The last lines are the passes of a light load on two stages, 4 tasks of 2 rows: as C = 8 cuts them, and as planned.
"""

from __future__ import annotations

import argparse

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.planner.planner import plan_tasks
from peft_mux.scheduler.planner.values import Budget, Outcome

LLAMA_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, 2 * 6_738_415_616, 2)
MIXED = (64, 128, 256, 64)
MIXES = {
    "4 tasks x 4 rows x 64": [(64,) * 4] * 4,
    "4 tasks x 4 mixed rows": [MIXED] * 4,
    "4 tasks x 8 mixed rows": [MIXED * 2] * 4,
}
LIGHT = [(30, 44), (25, 41), (38, 35), (52, 20)]
MAX_TOKENS = 16384


def load(number: int, lengths: tuple[int, ...]) -> TaskLoad:
    """Return a task with LoRA of rank 16 on the projections of attention."""
    adapters = tuple(AdapterLoad(16, 2 * LLAMA_7B.hidden_size) for _ in range(4))
    return TaskLoad(f"task {number}", lengths, sum(lengths), adapters, 16_777_216)


def planned(devices: str, num_stages: int, mix: list[tuple[int, ...]], count: int | None) -> Outcome:
    """Return the plan of a mix; C is searched where it is not given."""
    cluster = parse_devices(devices)
    profile = analytic_profile(cluster.device, LLAMA_7B, link=cluster.intra_node)
    cost = CostModel(profile, LLAMA_7B, num_stages=num_stages)
    budget = Budget(
        MAX_TOKENS, cluster.device.memory_bytes, num_micro_batches=count, links=cluster.intra_node, schedule="mux"
    )
    loads = [load(number, lengths) for number, lengths in enumerate(mix)]
    return plan_tasks(loads, cost, MemoryModel(LLAMA_7B, num_stages=num_stages), budget)


def print_table(most: int) -> None:
    """Print a row for each device and mix."""
    print(f"{'devices':<12} {'mix':<24} {'4 S':>10} {'searched':>10} {'C':>4} {'best':>10} {'4 S/searched':>13}")
    for devices in ("4xA40", "4xH100-80GB"):
        for name, mix in MIXES.items():
            before, searched = planned(devices, 4, mix, 16), planned(devices, 4, mix, None)
            best_s = min(planned(devices, 4, mix, count).step_s for count in range(1, most + 1))
            count = max(one.num_micro_batches for one in searched.bucket_loads)
            print(
                f"{devices:<12} {name:<24} {1e3 * before.step_s:>7.1f} ms {1e3 * searched.step_s:>7.1f} ms {count:>4}"
                f" {1e3 * best_s:>7.1f} ms {before.step_s / searched.step_s:>12.2f}x"
            )


def print_passes() -> None:
    """Print the passes of a light load on two stages."""
    print("\ntwo stages, 4 tasks x 2 rows: passes of a step, tasks and tokens of each")
    for name, count in (("C = 8", 8), ("searched", None)):
        outcome = planned("2xA40", 2, LIGHT, count)
        passes = ", ".join(f"{len(one.tasks)} x {one.tokens}" for one in outcome.passes)
        print(f"{name:<9} {1e3 * outcome.step_s:6.1f} ms, {len(outcome.passes)} passes: {passes}")


def main() -> None:
    """Print the table and the passes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.micro_batches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--most", type=int, default=64, help="the greatest C that is compared")
    print_table(parser.parse_args().most)
    print_passes()


if __name__ == "__main__":
    main()
