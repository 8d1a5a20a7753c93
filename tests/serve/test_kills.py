"""A service that is killed at any point loses no request that it has accepted, and its results are equal to the bit."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from peft_mux import storage
from peft_mux.serve import models
from tests.paths import ROOT
from tests.serve.lab import Client, Server, body_of, rows_of

KILLS = 20
"""Kills at each crash point, and in each life that is killed at random times."""
NUM_RANDOM_LIVES = 10
# Most times that a server passes a point before it is killed there: each file of a snapshot is a "mid_export", each
# write into the ledger a commit.
POINTS = {
    "before_commit": 9, "after_commit": 9, "mid_pass": 2, "before_result": 4, "mid_step": 2, "mid_export": 7,
    "mid_replay": 2, "before_fill": 3, "after_fill": 3, "after_manifest": 3, "after_fsync": 3, "after_rename": 3,
    "after_cleanup": 3,
}  # fmt: skip
FEW = ("mid_replay", "after_rename")


class Forked:
    """A service in a child of this process, which is started again when it has died.

    Args:
        store: its folder.
        points: crash points of the first starts; later ones have none.
        snapshot_s: seconds of passes after which a snapshot is written.
    """

    def __init__(self, store: Path, *points: str, snapshot_s: float = 0.0) -> None:
        self.store, self._points, self._snapshot_s, self.num_kills = store, list(points), snapshot_s, -1
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
        self.num_kills += 1
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
    """A client that repeats what was not answered, as the real one does.

    Attributes:
        outage_s: seconds of the longest time without an answer.
    """

    def __init__(self, server: Forked) -> None:
        keys = server.store / "keys.json"
        until = time.monotonic() + 60
        while not keys.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        super().__init__(f"http://127.0.0.1:{server.port}", json.loads(keys.read_text())["alice"])
        self.store, self.outage_s = server.store, 0.0
        send = self.http.send

        def patiently(request: httpx.Request, **options: Any) -> httpx.Response:
            start = time.monotonic()
            while True:
                try:
                    answer = send(request, **options)
                    self.outage_s = max(self.outage_s, time.monotonic() - start)
                    return answer
                except httpx.TransportError:
                    assert time.monotonic() - start < 60, "the server is not back within 60 s"
                    time.sleep(0.02)

        self.http.send = patiently  # type: ignore[method-assign]


def life(client: Patient, is_over: Callable[[int], bool], pause: Callable[[], None] = lambda: None) -> list[Any]:
    """Train and sample in rounds until it is over, then save; return all that is equal whatever happens in between."""
    model, found = client.model(rank=3), []
    for number in count():
        seq = 3 * number + 1
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
        if is_over(number + 1):
            break
    save = {"model_id": model, "seq_id": seq + 3, "path": "end"}
    path = client.result(client.future("save_weights", save))["path"]
    body = {"session_id": client.session, "model_seq_id": 1, "path": path, "optimizer": True}
    loaded = client.result(client.future("load_weights", body))["model_id"]
    call = client.future("forward_backward", body_of(loaded, 1, rows_of(9)))
    pause()
    found += [client.result(call).metrics, client.result(client.step(loaded, 2))]
    (folder,) = client.store.glob("checkpoints/*")
    return [*found, *((folder / f"{name}.safetensors").read_bytes() for name in ("adapter_model", "state"))]


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Return what a life of some rounds gives on a server that is not killed."""

    @cache
    def found(num_rounds: int) -> list[Any]:
        server = Forked(tmp_path_factory.mktemp("unharmed"))
        results = life(Patient(server), lambda number: number == num_rounds)
        server.close()
        return results

    return found


def assert_unharmed(server: Forked, unharmed: Callable[[int], list[Any]], kills: int, pause: Any = None) -> None:
    """Live until the server was killed so often, and assert that nothing is lost or other than in a life without."""
    client, num_rounds = Patient(server), 0

    def is_over(number: int) -> bool:
        nonlocal num_rounds
        num_rounds = number
        return number >= 3 and (server.num_kills >= kills or number >= 3 * kills)

    results = life(client, is_over, *([] if pause is None else [pause]))
    assert results == unharmed(num_rounds)
    server.close()
    assert server.num_kills >= kills, "it was not killed so often"
    assert not list(server.store.glob("*/.tmp-*"))
    print(f"{server.num_kills} kills in {num_rounds} rounds, without an answer for {client.outage_s:.1f} s at most")


def test_every_crash_point_has_its_kills() -> None:
    source = "".join(path.read_text() for path in (ROOT / "peft_mux/serve").glob("*.py"))
    named = {*re.findall(r'crashpoint\("(\w+)"\)', source), *storage.CRASHPOINTS}
    assert named - POINTS.keys() == {"after_move_aside"}  # no folder of a store is replaced


@pytest.mark.parametrize(
    ("point", "kills"),
    [
        *(pytest.param(point, 2, marks=pytest.mark.slow) for point in FEW),
        *(pytest.param(point, KILLS, marks=pytest.mark.nightly) for point in POINTS),
    ],
)
def test_kills_at_a_named_point_change_no_result(point: str, kills: int, tmp_path: Path, unharmed: Any) -> None:
    rng, is_replay = random.Random(point), point == "mid_replay"
    points = [f"{point}:{rng.randint(1, POINTS[point])}" for _ in range(kills)]
    first = ["mid_step:3"] if is_replay else []  # after which there is something to replay
    server = Forked(tmp_path, *first, *points, snapshot_s=1e9 if is_replay else 0.0)
    assert_unharmed(server, unharmed, kills + len(first))


@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        pytest.param(0, 3, marks=pytest.mark.slow),
        *(pytest.param(seed, KILLS, marks=pytest.mark.nightly) for seed in range(1, NUM_RANDOM_LIVES + 1)),
    ],
)
def test_kills_at_random_times_change_no_result(seed: int, kills: int, tmp_path: Path, unharmed: Any) -> None:
    server, rng = Forked(tmp_path), random.Random(seed)

    def pause() -> None:
        if rng.random() < 0.8 and server.num_kills < kills:
            threading.Timer(rng.random() * 0.2, server.kill).start()

    assert_unharmed(server, unharmed, kills, pause)
