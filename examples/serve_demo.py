"""Two tenants of a fine-tuning service, which is killed and started again while they train; then each of them alone.

make serve-demo    # or: python examples/serve_demo.py, with the extras serve and test installed
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"
import tinker
from tinker import types

from peft_mux.demo.small_model import save_small_model
from peft_mux.serve.keys import create_key

NAME = "demo/llama"
TENANTS = {"alice": (4, "cross_entropy"), "bob": (16, "importance_sampling")}
ROUNDS = 12


class Server:
    """`peft-mux serve` in a process of its own."""

    def __init__(self, model: str, store: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._words = [sys.executable, "-m", "peft_mux", "serve", model, "--store", str(store), "--served-name", NAME]
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen([*self._words, "--port", str(self.port)])
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz").close()
                return
            except urllib.error.URLError:
                assert self._process.poll() is None, "the server has ended"
                time.sleep(0.1)

    def end(self, how: int) -> None:
        self._process.send_signal(how)
        self._process.wait()


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


def main(output_dir: Path) -> None:
    model = str(output_dir / "backbone")
    save_small_model(model)
    stores = {how: output_dir / f"store-{how}-{time.time_ns()}" for how in ("together", "alone")}
    keys = {how: {name: create_key(store, name) for name in TENANTS} for how, store in stores.items()}

    print("Two tenants train together ...")
    server, done = Server(model, stores["together"]), []
    together: dict[str, list[Any]] = {}

    def run(name: str) -> None:
        together[name] = tenant(server.url, keys["together"][name], *TENANTS[name], done)

    threads = [threading.Thread(target=run, args=(name,)) for name in TENANTS]
    for thread in threads:
        thread.start()
    while len(done) < ROUNDS:
        time.sleep(0.01)
    server.end(signal.SIGKILL)
    print(f"... the server is killed after {len(done)} of {2 * ROUNDS} rounds, and started again ...")
    server.start()
    for thread in threads:
        thread.join()
    server.end(signal.SIGTERM)

    print("... and each of them alone, without a kill.")
    server = Server(model, stores["alone"])
    for name, (rank, loss) in TENANTS.items():
        alone = tenant(server.url, keys["alone"][name], rank, loss, [])
        first, last = alone[0]["loss:sum"], alone[3 * (ROUNDS - 1)]["loss:sum"]
        verdict = "equal to the bit" if together[name] == alone else "DIFFERENT"
        print(f"{name:6} rank {rank:2} {loss:20} loss {first:8.3f} -> {last:8.3f}   together = alone: {verdict}")
        assert together[name] == alone
    server.end(signal.SIGTERM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/serve-demo"))
    main(parser.parse_args().output_dir)
