"""A server in a process of its own, its tenants with the real client, and the rows that they send."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.paths import ROOT

os.environ["TINKER_TELEMETRY"] = "0"
import tinker
from tinker import types

from peft_mux.serve.keys import create_key

NAME = "benchmark/random"
MUX, IN_TURN = ("peft_mux", "serve"), ("benchmarks.service.in_turn",)


class Server:
    """A service with tenants; a context manager, at whose end it is stopped.

    Args:
        model: folder of the backbone.
        store: folder of the service, a new one.
        tenants: how many keys it has.
        module: what runs it, `MUX` or `IN_TURN`.
        **options: of the command line.
    """

    def __init__(
        self, model: Path, store: Path, tenants: int = 1, module: tuple[str, ...] = MUX, **options: int
    ) -> None:
        self.store = store
        self.keys = [create_key(store, f"tenant{number}", is_admin=True) for number in range(tenants)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        words = [*module, str(model), "--store", str(store), "--served-name", NAME, "--port", str(self.port)]
        words += [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self._words = [sys.executable, "-m", *words]
        self.start()
        self.services = [tinker.ServiceClient(base_url=self.url, api_key=key) for key in self.keys]

    def start(self) -> None:
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(self._words, env=os.environ | variables, stdout=subprocess.DEVNULL)
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/api/v1/healthz").close()
                return
            except urllib.error.URLError:
                if self._process.poll() is not None:
                    raise RuntimeError(f"the server has ended: {' '.join(self._words)}") from None
                time.sleep(0.05)

    def end(self, how: int = signal.SIGTERM) -> None:
        self._process.send_signal(how)
        self._process.wait()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for service in self.services if kind is None else ():
            service.close("success").result()
        self.end(signal.SIGTERM if kind is None else signal.SIGKILL)

    def processor_s(self) -> float:
        """Return the seconds of the processor that it has had."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def status(self) -> dict[str, Any]:
        asked = urllib.request.Request(f"{self.url}/api/v1/status", headers={"X-API-Key": self.keys[0]})
        with urllib.request.urlopen(asked) as answer:
            return json.load(answer)

    def model(self, tenant: int = 0, rank: int = 16, seed: int = 0) -> Any:
        """Make a model of a tenant; return its client."""
        return self.services[tenant].create_lora_training_client(base_model=NAME, rank=rank, seed=seed).result()


def rows(num_rows: int, num_tokens: int, num_words: int, seed: int) -> list[types.Datum]:
    """Return random rows for the loss `cross_entropy`."""
    drawn = np.random.default_rng(seed).integers(3, num_words, (num_rows, num_tokens + 1)).tolist()
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * num_tokens},
        )
        for row in drawn
    ]


def trained(client: Any, data: list[types.Datum], learning_rate: float = 1e-4) -> Any:
    """Send a call and a step; return the result of the call once both are done."""
    call = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(types.AdamParams(learning_rate=learning_rate))
    step.result()
    return call.result()
