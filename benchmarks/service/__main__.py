"""The numbers that the service holds, over HTTP with the client of the Tinker API, in fp32, next to their bars.

python -m benchmarks.service             # about 10 minutes on 2 idle cores
python -m benchmarks.service --write     # also rewrites the table of docs/measurements.md
python -m benchmarks.service --rehearse  # tiny, in a minute; its figures mean nothing
"""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from tinker import types

from benchmarks.harness import in_turns, ratio, require_equal_losses, timed
from benchmarks.papers.simulated import write_table
from benchmarks.paths import ROOT
from benchmarks.service.calls import SIZES
from benchmarks.service.clients import IN_TURN, MUX, Server, rows, trained
from benchmarks.stored import host_kind, write_result
from benchmarks.training.workloads import ModelSpec
from peft_mux import Call, Calls, Example

BARS = {"64 tokens": 1.8, "192 tokens": 1.3, "bound by computing": 0.95}
ROUNDS = {"64 tokens": 10, "192 tokens": 8, "bound by computing": 2}
"""Calls and steps of each client in one timed run."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        clients: tenants of the throughput.
        repeats: timed runs of each contender.
        samples: calls whose times give a percentile.
        open_models: `--max-models` of the server whose models rest.
        resting: models of its store.
    """

    clients: int = 8
    repeats: int = 7
    samples: int = 100
    open_models: int = 64
    resting: int = 1000


@dataclass(frozen=True)
class Row:
    """A number: what it is, its value and bar with their unit, and the figures behind it."""

    name: str
    value: float
    bar: float
    unit: str
    is_least: bool = False
    figures: Any = None

    @property
    def holds(self) -> bool:
        return self.value >= self.bar if self.is_least else self.value <= self.bar

    def cells(self) -> list[str]:
        value = f"{self.value:.0e}" if 0 < self.value < 1e-3 else f"{self.value:.2f}" if self.value else "0"
        return [self.name, f"{value} {self.unit}".strip(), f"{'>=' if self.is_least else '<='} {self.bar:g}"]


def main(arguments: list[str] | None = None) -> None:
    """Print and store each number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--write", action="store_true", help="rewrite the table of docs/measurements.md")
    parser.add_argument("--folder", type=Path, help="where models and stores are, on the disk that is measured")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    scale, table = Scale(clients=2, repeats=1, samples=4, open_models=2, resting=6) if options.rehearse else Scale(), []
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="service-", dir=options.folder))
    try:
        for part in options.only:
            for row in PARTS[part](folder / part, scale):
                table.append(row)
                print(f"{' | '.join(row.cells())}{'' if row.holds else '   DOES NOT HOLD'}", flush=True)
    finally:
        shutil.rmtree(folder)
    print(f"{time.perf_counter() - start:.0f} s")
    if not options.rehearse:
        numbers = [vars(row) | {"holds": row.holds} for row in table]
        write_result(f"service-{host_kind()}", {"scale": vars(scale), "numbers": numbers})
    if options.write:
        write_table("benchmarks.service", [row.cells() for row in table], ROOT / "docs" / "measurements.md")


def saved(folder: Path, width: int = 64, num_layers: int = 5, num_words: int = 512) -> Path:
    """Write a random backbone; return its folder."""
    spec = ModelSpec(width, num_layers, intermediate_size=3 * width, vocab_size=num_words)
    spec.build().save_pretrained(folder / "model")
    return folder / "model"


def p95(seconds: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return float(np.percentile(seconds, 95))


# ---------------------------------------------------------------------- speed


def throughput(folder: Path, scale: Scale) -> list[Row]:
    """Clients that each send calls and steps, against the same service with `set_adapter` in turn."""
    measured_rows = []
    small, computing = ("64 tokens", "192 tokens"), ("bound by computing",)
    for width, num_layers, names in ((64, 5, small), (64, 16, small), (512, 4, computing)):
        num_words = SIZES[names[0]][-1]
        place = folder / f"{num_layers}x{width}"
        model = saved(place, width, num_layers, num_words)
        with ExitStack() as stack:
            servers, clients = {}, {}
            for kind, module in (("peft_mux", MUX), ("set_adapter", IN_TURN)):
                store = place / kind
                servers[kind] = stack.enter_context(Server(model, store, scale.clients, module))
                clients[kind] = [servers[kind].model(tenant) for tenant in range(scale.clients)]
            for name in names:
                num_rows, num_tokens, *_ = SIZES[name]
                data = [rows(num_rows, num_tokens, num_words, tenant) for tenant in range(scale.clients)]
                runs = {kind: Load(servers[kind], clients[kind], data, ROUNDS[name]) for kind in servers}
                seconds = in_turns({kind: run.send for kind, run in runs.items()}, scale.repeats, time.perf_counter)
                require_equal_losses(name, *(run.losses for run in runs.values()), tolerance=1e-3)
                spent = {kind: run.processor_s for kind, run in runs.items()}
                gain = ratio(seconds["set_adapter"], seconds["peft_mux"])
                figures = {"wall_s": seconds, "processor_s": spent}
                figures["processor_ratio"] = ratio(spent["set_adapter"], spent["peft_mux"])
                calls_of = name if name in computing else f"{name} a call, {num_layers} layers"
                title = f"{scale.clients} clients against `set_adapter` in turn, {calls_of}"
                measured_rows.append(Row(title, gain, BARS[name], "x", True, figures))
    return measured_rows


@dataclass
class Load:
    """Calls and steps of several clients of a server, again and again.

    Attributes:
        server: the server.
        clients: its clients.
        data: rows of a call of each client.
        rounds: calls and steps of each client each time.
        losses: last loss of each client, each time.
        processor_s: seconds of the processor that the server has had each time.
    """

    server: Server
    clients: Sequence[Any]
    data: Sequence[Any]
    rounds: int
    losses: list[float] = field(default_factory=list)
    processor_s: list[float] = field(default_factory=list)

    def send(self) -> None:
        before_s = self.server.processor_s()
        self.losses += all_at_once(self.clients, self.data, self.rounds)
        self.processor_s.append(self.server.processor_s() - before_s)


def all_at_once(clients: Sequence[Any], data: Sequence[Any], rounds: int) -> list[float]:
    """Let clients send their calls and steps, each in a thread; return the last loss of each."""

    def run(number: int) -> float:
        return [trained(clients[number], data[number]).metrics["loss:sum"] for _ in range(rounds)][-1]

    with ThreadPoolExecutor(len(clients)) as pool:
        return list(pool.map(run, range(len(clients))))


def overhead(folder: Path, scale: Scale) -> list[Row]:
    """The time of one client's call over the time of its pass in this process; both alternate."""
    model, data = saved(folder), rows(8, 64, 512, 0)
    calls = Calls(ModelSpec(64, 5, intermediate_size=192, vocab_size=512).build())
    calls.open(
        "model",
        LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"],
        ),
        seed=0,
    )
    examples = [
        Example(np.asarray(datum.model_input.to_ints()), np.asarray(datum.loss_fn_inputs["target_tokens"].data))
        for datum in data
    ]
    with Server(model, folder / "store") as server:
        client = server.model()
        runs = {
            "service": lambda: client.forward_backward(data, "cross_entropy").result(),
            "pass": lambda: calls.run([Call("model", examples, lambda outputs: outputs.nll_M.sum())]),
        }
        seconds = in_turns(runs, scale.samples, time.perf_counter, num_warm=3)
    own_ms = [1e3 * (time_s - statistics.median(seconds["pass"])) for time_s in seconds["service"]]
    return [Row("overhead over the bare pass, p95", p95(own_ms), 30, "ms", figures=seconds)]


def neighbours(folder: Path, scale: Scale) -> list[Row]:
    """Calls of a small tenant next to one that floods the server with large calls, over 2 passes and the call alone."""
    data, flood = rows(1, 64, 512, 0), rows(16, 128, 512, 1)
    with Server(saved(folder, 256), folder / "store", 2) as server:
        small, large = server.model(0), [server.model(1) for _ in range(4)]

        def call() -> float:
            return timed(lambda: small.forward_backward(data, "cross_entropy").result(), time.perf_counter)[1]

        alone = [call() for _ in range(scale.samples // 2)]
        is_over = threading.Event()

        def keep_busy(client: Any) -> None:
            waiting = [client.forward_backward(flood, "cross_entropy") for _ in range(3)]
            while not is_over.is_set():
                waiting.pop(0).result()
                waiting.append(client.forward_backward(flood, "cross_entropy"))
            for future in waiting:
                future.result()

        threads = [threading.Thread(target=keep_busy, args=(client,)) for client in large]
        for thread in threads:
            thread.start()
        try:
            time.sleep(3)
            crowded = [call() for _ in range(scale.samples)]
            passes = server.status()["passes_of_last_minute"]
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    pass_s = passes["seconds"] / passes["passes"]
    bound_s = 2 * pass_s + statistics.median(alone)
    figures = {"alone_s": alone, "crowded_s": crowded, "pass_s": pass_s}
    title = "a small tenant next to a flooding one, p95 over 2 passes and its own time"
    return [Row(title, p95(crowded) / bound_s, 1.2, "x", figures=figures)]


# ---------------------------------------------------------------------- exactness


def exactness(folder: Path, scale: Scale) -> list[Row]:
    """Models of three ranks that train at once against each alone; a sampler against the model that it is of."""
    ranks, prompt = (4, 16, 32), rows(1, 24, 512, 9)[0].model_input
    data = [rows(2 + number, 40 + number, 512, number) for number in range(len(ranks))]

    def run(client: Any, batch: Any, outputs: list[np.ndarray]) -> None:
        for _ in range(4):
            output = trained(client, batch, 1e-2)
            outputs += [np.asarray(row["logprobs"].data) for row in output.loss_fn_outputs]
            outputs.append(np.asarray(output.metrics["loss:sum"]))
        saved_as = client.save_weights_for_sampler("weights").result().path
        outputs += [values.numpy() for values in weights_of(server, saved_as).values()]

    with Server(saved(folder), folder / "store", len(ranks)) as server:
        together: list[list[np.ndarray]] = [[] for _ in ranks]
        alone: list[list[np.ndarray]] = [[] for _ in ranks]
        clients = [server.model(number, rank) for number, rank in enumerate(ranks)]
        threads = [threading.Thread(target=run, args=job) for job in zip(clients, data, together, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number, rank in enumerate(ranks):
            run(server.model(number, rank), data[number], alone[number])
        pairs = [pair for both in zip(together, alone, strict=True) for pair in zip(*both, strict=True)]
        difference = max(float(np.abs(ours - other).max()) for ours, other in pairs)

        params = types.SamplingParams(max_tokens=16, seed=1)
        sampler = clients[1].save_weights_and_get_sampling_client().result()
        drawn = sampler.sample(prompt, 4, params).result().sequences
        worst = 0.0
        for sequence in drawn:
            tokens = [*prompt.to_ints(), *sequence.tokens]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
            (row,) = clients[1].forward([datum], "cross_entropy").result().loss_fn_outputs
            scores = np.asarray(row["logprobs"].data)[-len(sequence.tokens) :]
            worst = max(worst, float(np.abs(scores - np.asarray(sequence.logprobs)).max()))
    return [
        Row("alone = together: losses, log-probabilities, weights after steps", difference, 0, ""),
        Row("log-probabilities of a sampler against the trainer", worst, 1e-4, "nats"),
    ]


def weights_of(server: Server, path: str) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint in the server's store."""
    from safetensors.torch import load_file

    from peft_mux.serve.ledger import connect

    ((folder,),) = connect(server.store).execute("SELECT folder FROM checkpoints WHERE id = ?", (path,)).fetchall()
    return load_file(server.store / folder / "adapter_model.safetensors")


# ---------------------------------------------------------------------- many models


def many_models(folder: Path, scale: Scale) -> list[Row]:
    """Models beyond those that are open at once: making one, waking one of many, and a start with all of them."""
    data, drawn = rows(1, 16, 512, 0), np.random.default_rng(0)
    with Server(saved(folder, num_layers=2), folder / "store", max_models=scale.open_models) as server:
        clients = [server.model(rank=8) for _ in range(scale.open_models)]
        for client in clients:
            trained(client, data)
        making = []
        while len(clients) < scale.resting:
            making.append(timed(lambda: clients.append(server.model(rank=8)), time.perf_counter)[1])
            if len(making) <= scale.samples:
                trained(clients[-1], data)
        resting = len(clients) - scale.open_models
        numbers = drawn.permutation(resting)[: scale.samples]
        waking = [timed(partial(trained, clients[number], data), time.perf_counter)[1] for number in numbers]
        server.end(signal.SIGKILL)
        start = time.perf_counter()
        server.start()
        trained(clients[0], data)
        back_s = time.perf_counter() - start
    return [
        Row(
            f"making a model beyond {scale.open_models}, one of which goes to disk, p95",
            p95(making[: scale.samples]),
            1,
            "s",
            figures=making,
        ),
        Row(f"waking one of {scale.resting} models, p95, with its call and step", p95(waking), 2, "s", figures=waking),
        Row(f"back after a kill with {scale.resting} models", back_s, 60, "s"),
    ]


PARTS: dict[str, Callable[[Path, Scale], list[Row]]] = {
    "throughput": throughput,
    "overhead": overhead,
    "neighbours": neighbours,
    "exactness": exactness,
    "many_models": many_models,
}

if __name__ == "__main__":
    main()
