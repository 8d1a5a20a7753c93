"""A service in a thread of this process, on a tiny random model, and a client that writes bodies itself."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvicorn
from tinker.proto import tinker_public_pb2 as client_pb
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from peft_mux import Calls
from peft_mux.serve.app import Service, load, make_app
from peft_mux.serve.checkpoints import modules_of
from peft_mux.serve.engine import Engine, Settings
from peft_mux.serve.keys import create_key, list_keys
from peft_mux.serve.ledger import Ledger
from tests.modeling.backbones import LANGUAGE_MODELS, VOCABULARY, drawn

BASE = "tiny/random"
PROTOBUF = {"content-type": "application/x-protobuf"}


class Server:
    """A service on a store, with keys of alice and bob that have no limits unless given.

    Args:
        store: its folder.
        keys: limits of further keys by name.
        port: where it listens; 0 for a free port.
        model: folder of a model in place of the tiny one.
        name: its name for clients.
        **sizes: fields of `Settings`.
    """

    def __init__(
        self,
        store: Path,
        keys: Mapping[str, Any] | None = None,
        port: int = 0,
        *,
        model: str = "",
        name: str = BASE,
        **sizes: Any,
    ) -> None:
        self.store = store
        known = store / "keys.json"  # a second server on this store has the same keys
        self.keys: dict[str, str] = json.loads(known.read_text()) if known.exists() else {}
        for tenant, limits in {"alice": {}, "bob": {}, **(keys or {})}.items():
            if tenant not in self.keys:
                self.keys[tenant] = create_key(store, tenant, **limits)
        scratch = known.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.keys))
        scratch.replace(known)  # as a whole: a kill may come at any time
        assert {row["name"] for row in list_keys(store)} == set(self.keys)
        ledger, settings = Ledger(store), Settings((name,), **sizes)
        if model:
            calls, tokenizer, modules = load(model, "auto", settings)
        else:
            backbone = drawn(LANGUAGE_MODELS["Llama"][0])
            modules, tokenizer, calls = modules_of(backbone), None, Calls(backbone, piece_tokens=settings.piece_tokens)
        self.engine = Engine(calls, tokenizer, modules, ledger, store, settings)
        self.service = Service(self.engine, model="tiny")
        self.app = make_app(self.service)
        self._server = uvicorn.Server(
            uvicorn.Config(self.app, port=port, log_level="warning", lifespan="on", timeout_keep_alive=75)
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        until = time.monotonic() + 60
        while not self._server.started and time.monotonic() < until:
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def client(self, name: str = "alice") -> Client:
        return Client(self.url, self.keys[name])

    def close(self) -> None:
        """End as after SIGTERM."""
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.engine.failure

    def crash(self) -> None:
        """End without a snapshot, as if all that is not in the ledger or the store were lost."""
        self.engine.models.snapshot = lambda *_, **__: None  # type: ignore[method-assign]
        self.close()


class Client:
    """A client of one key that waits for the results of what it asks."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"x-api-key": key}
        self.http = httpx.Client(base_url=f"{url}/api/v1", headers=headers, timeout=60.0)
        self._session = ""

    @property
    def session(self) -> str:
        self._session = self._session or self.ok("create_session", {})["session_id"]
        return self._session

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        if isinstance(body, bytes):
            return self.http.post(path, content=body, headers={**PROTOBUF, **headers})
        return self.http.post(path, json=body)

    def ok(self, path: str, body: Any) -> Any:
        answer = self.post(path, body)
        assert answer.status_code == 200, (answer.status_code, answer.text)
        return answer.json()

    def future(self, path: str, body: Any) -> str:
        return self.ok(path, body)["request_id"]

    def result(self, request: str) -> Any:
        """Return the result of a request; of one that has failed its category and its reason."""
        while True:
            answer = self.http.post(
                "retrieve_future", json={"request_id": request}, headers={"accept": PROTOBUF["content-type"]}
            )
            if answer.status_code != 408:
                break
        assert answer.status_code == 200, (answer.status_code, answer.text)
        if answer.headers["content-type"] != PROTOBUF["content-type"]:
            found = answer.json()
            return (found["category"], found["error"]) if "error" in found else found
        try:
            return deserialize_forward_backward_output(answer.content)
        except Exception:
            return deserialize_sample_response(answer.content)

    def samples(self, request: str) -> Any:
        answer = self.http.post("retrieve_future", json={"request_id": request})
        assert answer.status_code == 200, (answer.status_code, answer.text)
        if answer.headers["content-type"] == PROTOBUF["content-type"]:
            return deserialize_sample_response(answer.content)
        return answer.json()["category"], answer.json()["error"]

    def model(self, number: int = 0, **lora: Any) -> str:
        """Make a model; return its id."""
        config = {"rank": 4, "seed": 1, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": BASE, "lora_config": config}
        found = self.result(self.future("create_model", body))
        assert isinstance(found, dict), found
        return found["model_id"]

    def step(self, model: str, seq: int, **settings: float) -> str:
        settings = {"learning_rate": 1e-2, **settings}
        return self.future("optim_step", {"model_id": model, "seq_id": seq, "adam_params": settings})

    def sample(self, sampler: str, seq: int = 0, prompt: Any = (5, 6, 7), samples: int = 1, **params: Any) -> str:
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq,
            "num_samples": samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": [], **params},
        }
        return self.future("asample", body)


def rows_of(seed: int, lengths: tuple[int, ...] = (7, 12)) -> list[dict[str, np.ndarray]]:
    """Return random rows for every loss; a row is its tokens and inputs by name."""
    rng = np.random.default_rng(seed)
    return [
        {
            "tokens": rng.integers(0, VOCABULARY, length),
            "target_tokens": rng.integers(0, VOCABULARY, length),
            "weights": rng.normal(size=length).astype(np.float32),
            "logprobs": -rng.random(length).astype(np.float32) * 5,
            "advantages": rng.normal(size=length).astype(np.float32),
        }
        for length in lengths
    ]


INPUTS = {"cross_entropy": ("target_tokens", "weights")}
RL_INPUTS = ("target_tokens", "logprobs", "advantages")


def body_of(
    model: str,
    seq: int,
    rows: list[dict[str, np.ndarray]],
    loss: str = "cross_entropy",
    *,
    forward_only: bool = False,
    edit: Callable[[Any], None] = lambda request: None,
) -> bytes:
    """Return the body of a training request, written with the client's own messages."""
    request = client_pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for row in rows:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = row["tokens"].astype("<i4").tobytes()
        for name in INPUTS.get(loss, RL_INPUTS):
            values, tensor = row[name], datum.loss_fn_inputs[name]
            tensor.dtype = 2 if values.dtype.kind == "i" else 1
            tensor.dense = values.astype("<i8" if tensor.dtype == 2 else "<f4").tobytes()
            tensor.shape.extend(values.shape)
    edit(request)
    return request.SerializeToString()


def train(client: Client, model: str, seed: int, loss: str = "cross_entropy", first: int = 1, rounds: int = 3) -> list:
    """Train a model for some rounds of a call and a step; return what each has given, as plain values."""
    found = []
    for number in range(rounds):
        call = client.future("forward_backward", body_of(model, first + 2 * number, rows_of(seed + number), loss))
        step = client.step(model, first + 2 * number + 1)
        output, metrics = client.result(call), client.result(step)
        assert not isinstance(output, tuple), output
        found.append((output.metrics, [row["logprobs"].tolist() for row in output.loss_fn_outputs], metrics))
    return found
