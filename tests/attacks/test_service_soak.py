"""Tenants of a service come and go: the memory of its process stays flat, and so do file descriptors and threads.

`PEFT_MUX_SOAK_S` says for how many seconds (`make attack SOAK_S=7200`). The server is a process of its own, which this
file is the script of.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import linear_regression
from typing import Any

import httpx
import pytest

from peft_mux.serve.keys import create_key, revoke_key
from tests.attacks.attack_lab import COUNT, how_many
from tests.paths import ROOT
from tests.serve.lab import BASE, Client, Server, body_of, rows_of, train

DURATION_S = float(os.environ.get("PEFT_MUX_SOAK_S", how_many(usually=90, full=300)))
NUM_VISITORS, MAX_MODELS = 3, 6
MOST_MB_PER_HOUR = 1.0
_LONG_S = 1200.0
"""Shorter soaks, in which single pages count for much, may grow by 2 %."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(int(DURATION_S) + 600),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]


def visit(url: str, store: Path, name: str, rng: random.Random) -> None:
    """Come with a new key, train, save, load and sample; go in one of several ways."""
    client = Client(url, create_key(store, name))
    with client.http:
        model = client.model(rank=rng.choice((1, 4, 16)))
        train(client, model, rng.randrange(100), rng.choice(("cross_entropy", "ppo")), rounds=4)
        failed = client.result(client.future("forward_backward", body_of(model, 9, rows_of(0), "custom")))
        assert failed[0] == "user"
        session = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": BASE}
        client.samples(client.sample(client.ok("create_sampling_session", session)["sampling_session_id"]))
        model = client.model(1, rank=rng.choice((2, 8)))
        train(client, model, 7, rounds=1)
        path = client.result(client.future("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))["path"]
        load = {"session_id": client.session, "model_seq_id": 2, "path": path, "optimizer": True}
        train(client, client.result(client.future("load_weights", load))["model_id"], 8, rounds=1)
        save = {"model_id": model, "seq_id": 4, "sampling_session_seq_id": 2}
        sampler = client.result(client.future("save_weights_for_sampler", save))["sampling_session_id"]
        client.samples(client.sample(sampler, samples=rng.randint(1, 4), temperature=1.0, seed=rng.randrange(99)))
        leaves = rng.randrange(3)  # the third way is to stay away
        if leaves == 0:
            client.http.post(f"sessions/{client.session}/finish", json={})
        elif leaves == 1:
            client.future("unload_model", {"model_id": model})
    revoke_key(store, name)


def test_a_service_holds_no_more_after_many_tenants(tmp_path: Path, record_property: Any) -> None:
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    process = subprocess.Popen([sys.executable, __file__, str(tmp_path)], env={**os.environ, **environment})
    address, begin, faults, num_visits = tmp_path / "url", time.monotonic(), list[BaseException](), [0] * NUM_VISITORS
    while not address.exists():
        assert process.poll() is None
        time.sleep(0.1)

    def come_and_go(number: int) -> None:
        try:
            rng = random.Random(number)
            while time.monotonic() - begin < DURATION_S and not faults:
                num_visits[number] += 1
                with suppress(httpx.TransportError):  # this one loses its connection
                    visit(address.read_text(), tmp_path, f"v{number}-{num_visits[number]}", rng)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(NUM_VISITORS)]
    for thread in threads:
        thread.start()
    samples: list[tuple[float, float, int, int]] = []
    own, page_mb = Path(f"/proc/{process.pid}"), os.sysconf("SC_PAGE_SIZE") / 2**20
    while any(thread.is_alive() for thread in threads):
        memory_mb = int((own / "statm").read_text().split()[1]) * page_mb
        samples.append(
            (time.monotonic() - begin, memory_mb, len(os.listdir(own / "fd")), len(os.listdir(own / "task")))
        )
        time.sleep(min(5.0, DURATION_S / 100))
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert not faults, faults
    third = len(samples) // 3  # to fill caches and the allocator
    times_s, memory, descriptors, tasks = (list(series) for series in zip(*samples, strict=True))
    slope, _ = linear_regression(times_s[third:], memory[third:])
    print(
        f"{sum(num_visits)} visits in {times_s[-1]:.0f} s: {memory[third]:.1f} -> {memory[-1]:.1f} MB, "
        f"{3600 * slope:+.2f} MB an hour, at most {max(descriptors)} open files and {max(tasks)} threads"
    )
    growth_mb = 3600 * slope if times_s[-1] >= _LONG_S else 50 * (memory[-1] / memory[third] - 1)
    assert growth_mb <= MOST_MB_PER_HOUR
    for series in (descriptors, tasks):
        assert max(series[-third:]) <= max(series[third:-third]) + 2, series
    record_property(COUNT, sum(num_visits))


if __name__ == "__main__":
    store = Path(sys.argv[1])
    server = Server(store, max_models=MAX_MODELS)
    scratch = store / "url.tmp"
    scratch.write_text(server.url)
    scratch.rename(store / "url")
    signal.signal(signal.SIGTERM, lambda *_: (server.close(), sys.exit(0)))
    while True:
        signal.pause()
