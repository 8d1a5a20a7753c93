"""Two tenants of a fine-tuning service, which is killed and started again while they train; then each of them alone.

make serve-demo    # or: python examples/serve_demo.py, with the extras serve and test installed
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
import tinker
from tinker import types
from transformers import logging

from peft_mux.demo.small_model import save_small_model
from peft_mux.serve.keys import create_key

NAME = "demo/llama"
TENANTS = {"alice": (4, "cross_entropy"), "bob": (16, "importance_sampling")}
ROUNDS = 12


def free_port() -> int:
    """Return a port that stays free while the server is down: the system gives those above 32767 to any connection."""
    while True:
        port = random.randrange(20_000, 32_768)
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


class Server:
    """`peft-mux serve` in a process of its own, which ends with the block."""

    def __init__(self, model: str, store: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = [sys.executable, "-m", "peft_mux", "serve", model, "--store", str(store), "--served-name", NAME]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([*self._words, "--port", str(self.port)])
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz").close()
                return
            except (OSError, http.client.HTTPException):
                assert self._process.poll() is None, "the server has ended"
                time.sleep(0.1)

    def end(self, how: int) -> None:
        self._process.send_signal(how)
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.end(signal.SIGKILL if any(error) else signal.SIGTERM)


def rows(loss: str, seed: int) -> list[types.Datum]:
    """Return two rows of the demo's words, whose next one is the last one plus `seed`."""
    made = []
    for number in range(2):
        tokens = [(number + place * (seed + 1)) % 30 + 3 for place in range(17)]
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs["weights"] = [1.0] * 16
        else:
            inputs |= {"logprobs": [-2.0] * 16, "advantages": [1.0, -0.5] * 8}
        made.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return made


def tenant(url: str, key: str, rank: int, loss: str, rounds_done: list[int]) -> list[Any]:
    """Train a model with the real client; return what is compared: losses, log-probabilities, and a sample."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model=NAME, rank=rank, seed=1).result()
    results: list[Any] = []
    for number in range(ROUNDS):
        call = client.forward_backward(rows(loss, number), loss)
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        output = call.result()
        results += [output.metrics, [row["logprobs"].data for row in output.loss_fn_outputs], step.result().metrics]
        rounds_done.append(number)
    sampler = client.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(
        types.ModelInput.from_ints([3, 4, 5]), 1, types.SamplingParams(max_tokens=8, seed=7)
    ).result()
    service.close("success").result()
    return [*results, drawn.sequences[0].tokens, drawn.sequences[0].logprobs]


def in_thread(act: Any, *arguments: Any) -> Future[list[Any]]:
    """Call a function in a thread that does not outlive this process; return its result or error."""
    future: Future[list[Any]] = Future()

    def run() -> None:
        try:
            future.set_result(act(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def main(output_dir: Path) -> None:
    logging.disable_progress_bar()
    model = str(output_dir / "backbone")
    save_small_model(model)
    stores = {how: output_dir / f"store-{how}-{time.time_ns()}" for how in ("together", "alone")}
    keys = {how: {name: create_key(store, name) for name in TENANTS} for how, store in stores.items()}

    print("Two tenants train together ...")
    done: list[int] = []
    with Server(model, stores["together"]) as server:
        running = {
            name: in_thread(tenant, server.url, keys["together"][name], *TENANTS[name], done) for name in TENANTS
        }
        while len(done) < ROUNDS:
            for ended in wait(running.values(), timeout=0.01, return_when=FIRST_EXCEPTION).done:
                ended.result()  # raises what a tenant has raised
        server.end(signal.SIGKILL)
        print(f"... the server is killed after {len(done)} of {2 * ROUNDS} rounds, and started again ...")
        server.start()
        for ended in wait(running.values(), return_when=FIRST_EXCEPTION).done:
            ended.result()
        together = {name: future.result() for name, future in running.items()}

    print("... and each of them alone, without a kill.")
    with Server(model, stores["alone"]) as server:
        for name, (rank, loss) in TENANTS.items():
            alone = tenant(server.url, keys["alone"][name], rank, loss, [])
            first, last = alone[0]["loss:sum"], alone[3 * (ROUNDS - 1)]["loss:sum"]
            verdict = "equal to the bit" if together[name] == alone else "DIFFERENT"
            print(f"{name:6} rank {rank:2} {loss:20} loss {first:8.3f} -> {last:8.3f}   together = alone: {verdict}")
            assert together[name] == alone


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/serve-demo"))
    main(parser.parse_args().output_dir)
