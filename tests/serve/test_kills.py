"""A service that is killed at any point loses no request that it has accepted, and its results are equal to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from peft_mux.serve import models
from tests.serve.lab import Client, Server, body_of, rows_of

POINTS = [
    *(f"before_commit:{count}" for count in (3, 5, 9)),
    *(f"after_commit:{count}" for count in (3, 5, 9)),
    *(f"mid_pass:{count}" for count in (1, 3)),
    *(f"before_result:{count}" for count in (2, 4)),
    *(f"mid_step:{count}" for count in (1, 3)),
    *(f"mid_export:{count}" for count in (1, 2, 4)),
    *(f"{name}:{count}" for name in ("before_fill", "after_fill", "after_manifest") for count in (1, 3)),
    *(f"{name}:{count}" for name in ("after_fsync", "after_rename", "after_cleanup") for count in (1, 3)),
]
FEW = {
    "before_commit:5",
    "after_commit:5",
    "mid_pass:3",
    "before_result:4",
    "mid_step:3",
    "mid_export:2",
    "after_rename:1",
}


class Forked:
    """A service in a child of this process, which is started again when it has died.

    Args:
        store: its folder.
        points: crash points of the first starts; later ones have none.
        snapshot_s: seconds of passes after which a snapshot is written.
    """

    def __init__(self, store: Path, *points: str, snapshot_s: float = 0.0) -> None:
        self.store, self._points, self._snapshot_s, self.num_starts = store, list(points), snapshot_s, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._stopped = threading.Event()
        self.pid = 0
        self._start()
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def _start(self) -> None:
        point = self._points.pop(0) if self._points else ""
        self.num_starts += 1
        pid = os.fork()
        if pid == 0:
            try:
                os.environ["PEFT_MUX_CRASHPOINT"] = point
                models.SNAPSHOT_S = self._snapshot_s
                Server(self.store, port=self.port)
                signal.pause()
            finally:
                os._exit(1)
        self.pid = pid

    def _keep(self) -> None:
        while not self._stopped.is_set():
            died, _ = os.waitpid(self.pid, os.WNOHANG)
            if died and not self._stopped.is_set():
                self._start()
            time.sleep(0.01)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self.kill()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


class Patient(Client):
    """A client that repeats what was not answered, as the real one does."""

    def __init__(self, server: Forked) -> None:
        keys = server.store / "keys.json"
        until = time.monotonic() + 60
        while not keys.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)

        super().__init__(f"http://127.0.0.1:{server.port}", json.loads(keys.read_text())["alice"])
        send = self.http.send

        def patiently(request: httpx.Request, **options: Any) -> httpx.Response:
            until = time.monotonic() + 60
            while True:
                try:
                    return send(request, **options)
                except httpx.TransportError:
                    assert time.monotonic() < until
                    time.sleep(0.02)

        self.http.send = patiently  # type: ignore[method-assign]


def life(client: Client, pause: Callable[[], None] = lambda: None) -> list[Any]:
    """Train, save and sample; return everything that is equal whatever happens in between."""
    model, found = client.model(rank=3), []
    seq = 1
    for number in range(3):
        call = client.future("forward_backward", body_of(model, seq, rows_of(number), "ppo"))
        step = client.step(model, seq + 1)
        pause()
        output = client.result(call)
        found += [output.metrics, output.loss_fn_outputs[0]["logprobs"].tolist(), client.result(step)]
        save = {"model_id": model, "seq_id": seq + 2, "sampling_session_seq_id": number}
        sampler = client.result(client.future("save_weights_for_sampler", save))["sampling_session_id"]
        pause()
        drawn = client.samples(client.sample(sampler, temperature=1.0, seed=5)).sequences[0]
        found += [drawn.tokens, drawn.logprobs]
        seq += 3
    path = client.result(client.future("save_weights", {"model_id": model, "seq_id": seq, "path": "end"}))["path"]
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    loaded = client.result(client.future("load_weights", body))["model_id"]
    call = client.future("forward_backward", body_of(loaded, 1, rows_of(9)))
    pause()
    return [*found, client.result(call).metrics, client.result(client.step(loaded, 2))]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    server = Forked(tmp_path_factory.mktemp("unharmed"))
    yield life(Patient(server))
    server.close()


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=pytest.mark.slow if point in FEW else pytest.mark.nightly) for point in POINTS]
)
def test_a_kill_at_a_named_point_changes_no_result(point: str, tmp_path: Path, unharmed: list[Any]) -> None:
    server = Forked(tmp_path, point)
    assert life(Patient(server)) == unharmed
    assert server.num_starts == 2, "it was not killed"
    server.close()
    assert not list(tmp_path.glob("*/.tmp-*"))


@pytest.mark.slow
def test_a_kill_while_requests_run_again_changes_no_result(tmp_path: Path, unharmed: list[Any]) -> None:
    server = Forked(tmp_path, "mid_step:3", "mid_replay:2", snapshot_s=1e9)
    assert life(Patient(server)) == unharmed
    assert server.num_starts == 3
    server.close()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20))
def test_kills_at_random_times_change_no_result(seed: int, tmp_path: Path, unharmed: list[Any]) -> None:
    server, rng = Forked(tmp_path), random.Random(seed)

    def pause() -> None:
        if rng.random() < 0.8:
            threading.Timer(rng.random() * 0.2, server.kill).start()

    assert life(Patient(server), pause) == unharmed
    server.close()
