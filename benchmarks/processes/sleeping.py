"""The real engine on sleeping devices: makespans of layouts of 16 and more GPUs, against the planner's prediction.

    python -m benchmarks.processes.sleeping                 16 ranks, 7 layouts; 25 minutes on 2 cores, 3 GB
    python -m benchmarks.processes.sleeping --write         also into benchmarks/results/

Every rank is a process that trains a tiny Llama with the real engine over gloo, and sleeps for as long as its device
would compute (`sleeping_worker`). Order, dispatch, turns, the overlap of sums with passes and all waiting are those of
the engine; seconds of kernels and links are those of a profile, the same that the planner predicts with.

The profile comes from the data sheet of `--device`, for layers of width 4,096 with an MLP of 11,264. It is shrunk to
the tiny model: widths by 128, tokens by 16, ranks of adapters by 8, so that each pass, message and sum takes what the
large one would. Then all seconds are multiplied by `slow`, so that the cores of this machine, on which all ranks really
compute, have time for it: `late` is by how much that held up the rank that it held up most, as a share of the steps.
`planned` prices the layout as `peft-mux plan --deployment` does; `error` is planned / measured - 1. What the trainer
does between steps is not measured.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import Table
from benchmarks.processes.sleeping_worker import Load, Settings, train, trainer_of
from benchmarks.stored import host_kind, read_result, write_result
from peft_mux.parallel.layout import parse_layout
from peft_mux.planning.replica_facts import run_facts, time_model_of
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.costs.profile import AdapterTable, Curve, Parts, analytic_profile, corrected
from peft_mux.scheduler.deployment.composed import DeploymentPricer, PricedDeployment
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, candidate_configs, joint_sample
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner

LAYOUTS = ("<1,1>x16", "<2,1>x8", "<1,4>x4", "<2,4>x2", "<1,16>x1", "<1,2>x4, <2,4>x1", "planned")
WIDTHS, TOKENS, RANKS = 128, 16, 8
"""By how much the tiny model is smaller than the large one."""


def main() -> None:
    options = parser().parse_args()
    torch.set_num_threads(1)
    rows = []
    table = Table(
        "layout:<28", "GPUs:>4", "slow:>5.0f", "planned ms:>10.1f", "measured ms:>11.1f", "error:>+7.1%",
        "spread:>7.1%", "late:>6.1%",
    )  # fmt: skip
    for _ in range(options.repeats):
        for layout in options.layouts:
            rows.append(row := run(layout, options))
            spread = (max(row["steps_s"]) - min(row["steps_s"])) / row["measured_s"]
            # Those of the device, not slowed down.
            planned_ms, measured_ms = (1e3 * row[name] / row["slow"] for name in ("planned_s", "measured_s"))
            facts = (row[key] for key in ("layout", "num_ranks", "slow"))
            table.row(*facts, planned_ms, measured_ms, planned_ms / measured_ms - 1, spread, row["late_share"])
    errors = [abs(row["planned_s"] / row["measured_s"] - 1) for row in rows]
    print(f"mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}")
    if options.write:
        name = f"sleeping-{host_kind()}"
        devices, new = f"{options.nodes}x{options.per_node}x{options.device}", {row["layout"] for row in rows}
        # A run of some layouts leaves what is stored of the others.
        stored = read_result(name)
        kept = [row for row in stored.get(devices, {}).get("rows", ()) if row["layout"] not in new]
        contents = {"options": vars(options), "rows": [*kept, *rows]}
        write_result(name, {**{key: value for key, value in stored.items() if "x" in key}, devices: contents})


def run(layout: str, options: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Plan a layout and run it; "planned" is the one that the planner chooses.

    Args:
        layout: the replicas, in LobRA's notation.
        options: the command line.
        **changes: other values of the settings of all ranks.
    """
    cluster = parse_devices(f"{options.nodes}x{options.per_node}x{options.device}")
    if options.link:
        cluster = replace(cluster, intra_node=replace(cluster.intra_node, bytes_per_s=1e9 * options.link))
    with tempfile.TemporaryDirectory() as name:
        if layout == "planned":
            settings = prepared(layout, cluster, options, Path(name), 1.0)
            layout = trainer_of(settings).plan_deployment(settings.cluster).replicas
        parsed, slow = parse_layout(layout), options.slow
        if parsed.is_tensor_parallel:
            # Its ranks wait for each other within every layer, and each part of a layer really computes.
            slow *= options.slow_shards
        settings = replace(prepared(layout, cluster, options, Path(name), slow), **changes)
        # Deployments are priced for the default arguments; the plan of a run has others, but not the exchange.
        priced = None if changes else price(trainer_of(settings), settings, parsed.replicas)
        ranks = launch(settings, parsed.world_size, options.limit_s)
    failed = sorted({name for rank in ranks for name in rank["failed"]})
    if failed:
        raise SystemExit(f"tasks failed in {layout}: {failed}.")
    marks_of_steps = zip(*_of(ranks, "marks"), strict=True)
    seconds = [max(mark[1] for mark in marks) - min(mark[0] for mark in marks) for marks in marks_of_steps]
    steps_s = by_step(seconds, settings.num_steps)
    measured_s = statistics.median(steps_s)
    return {
        "layout": layout,
        "num_ranks": len(ranks),
        "slow": slow,
        "planned_s": priced.step_s if priced else by_step(ranks[0]["run_plan_s"], settings.num_steps)[0],
        "planned_exchange_s": priced.exchange_s if priced else None,
        "measured_s": measured_s,
        "steps_s": steps_s,
        "late_share": max(_of(ranks, "late_s")) / sum(seconds),
        "summed_share": max(_of(ranks, "summed_s")) / sum(seconds),
        "passed_s": [statistics.median(per_step[1:]) for per_step in _of(ranks, "passed_s")],
        "update_s": max(_of(ranks, "update_s")),
        **{name: ranks[0][name] for name in ("turns", "run_plan_s", "layers")},
        "counts": _of(ranks, "counts"),
    }


def by_step(seconds: Sequence[float], num_steps: int) -> list[float]:
    """Return the seconds of each step of all tasks, which take it together or one task after another.

    The first step of each is left out: connections are opened in it.
    """
    turns = [seconds[start + 1 : start + num_steps] for start in range(0, len(seconds), num_steps)]
    return [sum(step) for step in zip(*turns, strict=True)]


def _of(ranks: Sequence[dict[str, Any]], key: str) -> list[Any]:
    return [rank[key] for rank in ranks]


def prepared(layout: str, cluster: Cluster, options: argparse.Namespace, folder: Path, slow: float) -> Settings:
    """Return what ranks are given; the profile is in the folder."""
    settings = Settings(
        layout=layout,
        folder=folder,
        cluster=shrunk_cluster(cluster, slow),
        loads=loads_of(options),
        num_layers=options.layers,
        max_tokens=options.max_tokens // TOKENS,
        num_steps=options.steps + 1,
    )
    write_profile(settings, cluster, slow)
    return settings


def price(trainer: Any, settings: Settings, replicas: Sequence[ParallelConfig]) -> PricedDeployment:
    """Return what the planner predicts for replicas, the exchange of gradients included."""
    planner, runs, cluster = trainer._plans.planner, trainer._run.table.plannable, settings.cluster
    facts = run_facts(planner, runs, cluster)
    configs = tuple(dict.fromkeys((*candidate_configs(facts, cluster.num_devices), *replicas)))
    curve = time_model_of(facts, configs, runs)
    tasks = [TaskLengths(load.name, load.lengths, len(load.lengths)) for load in settings.loads]
    exchange = GradientExchange(facts.loads, facts)
    options = {"interval": 1, "exchange": exchange, "budget_s": 4}
    expected = plan_deployment(*joint_sample(tasks), cluster.num_devices, curve, **options)
    replica_planner = ReplicaPlanner(facts, max_tokens=settings.max_tokens)
    pricer = DeploymentPricer(replica_planner, tasks, expected.bucketing, curve, exchange)
    return pricer.price(curve.groups(Counter(replicas)))


def loads_of(options: argparse.Namespace) -> tuple[Load, ...]:
    """Return tasks of short, middle and long rows, in proportion to the devices; lengths are of the tiny model."""
    draw, loads = np.random.default_rng(options.seed), []
    num_devices = options.nodes * options.per_node
    kinds = [(120, 3.0), (120, 3.0), (400, 1.0), (400, 1.0), (400, 1.0), (1000, 0.4), (1000, 0.4), (2400, 0.1)]
    for index, (mean_tokens, rows_each) in enumerate(kinds[: options.tasks]):
        count = max(1, round(rows_each * num_devices * options.rows))
        lengths = mean_tokens * draw.lognormal(-0.08, 0.4, count) / TOKENS
        lengths = np.clip(lengths, 2, options.max_tokens / TOKENS).astype(int)
        loads.append(Load(f"task-{index}", tuple(map(int, lengths)), (8, 16, 32, 64)[index % 4] // RANKS))
    return tuple(loads)


def shrunk_cluster(cluster: Cluster, slow: float) -> Cluster:
    """Return links that carry the bytes of the tiny model in the seconds of the large one, times `slow`."""
    # A hidden state has 4,096 bf16 numbers, or 32 of fp32; gradients are fp32 in both.
    factor = TOKENS * WIDTHS / 2
    assert factor == WIDTHS * RANKS, "one factor for gradients and hidden states"

    def shrunk(link: Link) -> Link:
        return Link(slow * link.latency_s, link.bytes_per_s / factor / slow)

    return replace(cluster, intra_node=shrunk(cluster.intra_node), inter_node=shrunk(cluster.inter_node))


def write_profile(settings: Settings, cluster: Cluster, slow: float) -> None:
    """Write the profile of the large backbone, shrunk to the tiny one and slowed down."""
    (settings.folder / "profile.json").write_text("{}", encoding="utf-8")
    tiny = trainer_of(settings)._plans.planner.shape
    large = replace(
        tiny,
        **{name: WIDTHS * getattr(tiny, name) for name in ("hidden_size", "intermediate_size", "attention_size")},
        key_value_size=WIDTHS * tiny.key_value_size,
        vocab_size=WIDTHS * tiny.vocab_size,
        activation_bytes=2,
        parts=None,
    )
    profile = analytic_profile(cluster.device, large)
    names = ("layer", "attention", "head", "embedding")
    profile = replace(
        profile,
        **{name: _fewer(getattr(profile, name), TOKENS) for name in names},
        optimizer=_fewer(profile.optimizer, WIDTHS * RANKS),
        adapter=_smaller(profile.adapter),
        utilization=_smaller(profile.utilization),
        link=settings.cluster.intra_node,
        # Sleeping costs no speed, and the baton is passed at once.
        overlap=replace(profile.overlap, slowdown=0.0, turn_s=0.0) if profile.overlap else None,
        source="measured",
    )
    slowed = corrected(replace(profile, link=None), Parts(*[slow] * 6))
    text = replace(slowed, link=profile.link).to_json()
    (settings.folder / "profile.json").write_text(text, encoding="utf-8")


def _fewer(curve: Curve, factor: float) -> Curve:
    return replace(curve, counts=tuple(count / factor for count in curve.counts))


def _smaller(table: AdapterTable) -> AdapterTable:
    divided = {"ranks": RANKS, "widths": WIDTHS, "tokens": TOKENS}
    return replace(table, **{name: tuple(x / by for x in getattr(table, name)) for name, by in divided.items()})


# ------------------------------------------------------------------ ranks


def launch(settings: Settings, num_ranks: int, limit_s: float) -> list[dict[str, Any]]:
    """Run all ranks, forked from this process; return what each found."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # Ranks share the pages of this process, which has imported and planned everything, but trained nothing.
    gc.freeze()
    context = multiprocessing.get_context("fork")
    running = []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(sender, rank, num_ranks, port, settings), daemon=True)
        process.start()
        sender.close()
        running.append((process, receiver))
    deadline, messages = time.monotonic() + limit_s, []
    try:
        for rank, (_, receiver) in enumerate(running):
            if not receiver.poll(max(1.0, deadline - time.monotonic())):
                raise SystemExit(f"rank {rank} of {settings.layout} is still running after {limit_s:.0f} s.")
            try:
                messages.append(receiver.recv())
            except EOFError:
                raise SystemExit(f"rank {rank} of {settings.layout} has died. See what it printed above.") from None
    finally:
        for process, _ in running:
            if len(messages) < num_ranks:
                process.kill()
            process.join(20)
    return messages


def _rank(sender: Any, rank: int, num_ranks: int, port: int, settings: Settings) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ |= {name: str(number) for name, number in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the trainer says of its run
    sender.send(train(settings))
    sender.close()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--layouts", nargs="+", default=list(LAYOUTS), help='replicas; "planned" is what the planner chooses')
    add("--nodes", type=int, default=2)
    add("--per-node", type=int, default=8, help="devices of a node")
    add("--device", default="H100-80GB", help="a device whose data sheet is known")
    add("--slow", type=float, default=40.0, help="how many times slower than the device everything is (%(default)s)")
    add("--slow-shards", type=float, default=3.0, help="factor over --slow with tensor parallelism (%(default)s)")
    add("--link", type=float, help="GB/s between the devices of a node; by default as in the data sheet")
    add("--layers", type=int, default=16, help="decoder layers (%(default)s)")
    add("--tasks", type=int, default=8, help="number of tasks, at most 8 (%(default)s)")
    add("--rows", type=float, default=2.0, help="factor over the rows of a step (%(default)s)")
    add("--max-tokens", type=int, default=4096, help="most tokens of a pass of the large backbone (%(default)s)")
    add("--steps", type=int, default=3, help="timed steps of a run (%(default)s)")
    add("--repeats", type=int, default=2, help="runs of each layout (%(default)s)")
    add("--limit-s", type=float, default=900.0, help="seconds after which a run is ended (%(default)s)")
    add("--seed", type=int, default=0, help="of the lengths")
    add("--write", action="store_true", help="write the result into benchmarks/results/")
    return parser


if __name__ == "__main__":
    main()
