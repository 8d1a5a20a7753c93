"""The service over HTTP: bad input, isolation of tenants, order and retries, results, limits, rest and restarts."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from peft_mux import Sampling
from peft_mux.serve import app as app_module
from peft_mux.serve import checkpoints as checkpoints_module
from peft_mux.serve import engine as engine_module
from peft_mux.serve.wire import MAX_BODY_BYTES
from tests.serve.lab import BASE, Client, Server, body_of, rows_of, train

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    own = Server(tmp_path_factory.mktemp("store"))
    yield own
    own.close()


@pytest.fixture
def alice(server: Server) -> Client:
    return server.client("alice")


# ------------------------------------------------------------------ bad input: answers


@pytest.mark.parametrize("key", [None, "tml-unknown"])
def test_a_request_without_a_known_key_is_401(server: Server, key: str | None) -> None:
    for path in ("client/config", "create_session", "forward_backward"):
        assert Client(server.url, key).post(path, {}).status_code == 401


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"model_id": "a"}', {"content-type": "application/json"}, 415),
        (b"\xff\xff\xff\xff", {}, 415),
        (b"not a frame", {"content-encoding": "zstd"}, 400),
        (bytes(MAX_BODY_BYTES + 1), {}, 413),
        (zstandard.compress(bytes(MAX_BODY_BYTES + 1)), {"content-encoding": "zstd"}, 413),
    ],
)
def test_a_body_that_cannot_be_read_is_a_4xx(alice: Client, content: bytes, headers: dict, status: int) -> None:
    assert alice.post("forward_backward", content, **headers).status_code == status


def test_a_body_whose_fields_cannot_be_read_names_them(alice: Client) -> None:
    model = alice.model(1)
    for path, body, words in (
        ("optim_step", {"model_id": model, "seq_id": 0}, "body.seq_id"),
        ("optim_step", {"model_id": model, "seq_id": 1, "momentum": 1}, "body.momentum"),
        ("save_weights", {"model_id": model, "seq_id": 1, "overwrite": "perhaps"}, "body.overwrite"),
        ("load_weights", {"path": "tinker://a/b", "optimizer": True}, "the path must be tinker://MODEL/KIND/NAME"),
    ):
        answer = alice.post(path, body)
        assert answer.status_code in (400, 422)
        assert words in answer.text
    assert alice.post("forward_backward", body_of(model, 0, rows_of(0))).status_code == 400


def test_the_same_number_again_is_the_same_future_and_other_content_is_409(server: Server, alice: Client) -> None:
    model = alice.model(2)
    first = alice.future("forward_backward", body_of(model, 1, rows_of(0)))
    again = body_of(model, 1, rows_of(0), edit=lambda request: request.loss_fn_config.clear())
    assert alice.future("forward_backward", again) == first
    assert alice.future("forward_backward", body_of(model, 1, rows_of(0))) == first
    assert alice.post("forward_backward", body_of(model, 1, rows_of(1))).status_code == 409
    assert alice.post("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {}}).status_code == 409
    once = alice.result(first)
    assert alice.result(alice.step(model, 2))["metrics"]["grad_norm:mean"] > 0
    ((count,),) = server.service.ledger.read("SELECT count(*) FROM requests WHERE target = ?", model)
    assert (count, alice.result(first).metrics) == (3, once.metrics)


def test_load_weights_after_the_first_request_is_400(alice: Client) -> None:
    model = alice.model(3)
    path = alice.result(alice.future("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))["path"]
    other = alice.model(4)
    body = {"model_id": other, "seq_id": 2, "path": path, "optimizer": True}
    assert alice.post("load_weights", body).status_code == 400
    loaded = alice.result(alice.future("load_weights", {**body, "seq_id": 1}))
    assert loaded["path"] == path


STRANGE = [None, -1, 2**70, 1.5, "x", "", "\ud800", [], [1], ["a"], {}, {"a": 1}, {"chunks": 5}, {"stop": 5}, True]


@pytest.mark.slow
def test_no_value_of_any_field_is_a_5xx(server: Server, alice: Client) -> None:
    model = alice.model(9)
    session = {"session_id": alice.session, "sampling_session_seq_id": 3, "base_model": BASE}
    sampler = alice.ok("create_sampling_session", session)["sampling_session_id"]
    good = {
        "session_id": alice.session, "model_id": model, "sampling_session_id": sampler, "base_model": BASE,
        "prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}, "path": "tinker://a/weights/b",
        "tinker_path": "tinker://a/weights/b", "optimizer": True, "request_id": "x", "lora_config": {"rank": 1},
    }  # fmt: skip
    schema, numbers, codes = server.app.openapi(), iter(range(1, 10**6)), set()
    for route, methods in schema["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content:
            continue
        fields = schema["components"]["schemas"][content["application/json"]["schema"]["$ref"].split("/")[-1]][
            "properties"
        ]
        for field in fields:
            for value in STRANGE:
                seqs = {name: next(numbers) for name in fields if name.endswith("seq_id")}
                body = {name: own for name, own in good.items() if name in fields} | seqs | {field: value}
                raw = json.dumps(body).encode()
                headers = {"content-type": "application/json"}
                answer = alice.http.post(route.removeprefix("/api/v1/"), content=raw, headers=headers)
                codes.add(answer.status_code)
                assert answer.status_code < 500, (route, field, value, answer.text)
    assert {200, 404, 422} <= codes
    assert not server.engine.failure
    assert alice.http.get("healthz").json() == {"status": "ok"}


# ------------------------------------------------------------------ bad input: futures that fail


def _columns(name: str, values: Any) -> Callable[[Any], None]:
    def edit(request: Any) -> None:
        tensor = request.data[0].loss_fn_inputs[name]
        tensor.dense, tensor.shape[:] = values.tobytes(), values.shape
        tensor.dtype = 2 if values.dtype.kind == "i" else 1

    return edit


def _config(**config: float) -> Callable[[Any], None]:
    return lambda request: request.loss_fn_config.update(config)


def _tokens(values: list[int]) -> Callable[[Any], None]:
    def edit(request: Any) -> None:
        request.data[0].model_input[0].encoded_text.tokens = np.asarray(values, "<i4").tobytes()

    return edit


def _image(request: Any) -> None:
    request.data[1].model_input.add().image.format = "png"


def _long(request: Any) -> None:
    _tokens([1] * 65)(request)
    for name, kind in (("target_tokens", np.int64), ("weights", np.float32)):
        _columns(name, np.ones(65, kind))(request)


BAD_CALLS: list[tuple[str, Callable[[Any], None], str]] = [
    ("stable_reinforce", lambda _: None, "Use importance_sampling"),
    ("custom", lambda _: None, "Use forward_backward_custom"),
    ("cross_entropy", _image, r"data[1].model_input[1] must be text, got image"),
    ("cross_entropy", _tokens([1, 2, 3, 4, 5, 6, 10**6]), "data[0].tokens"),
    ("cross_entropy", _columns("target_tokens", np.full(7, -1, np.int64)), "data[0].targets"),
    (
        "cross_entropy",
        _columns("weights", np.ones(6, np.float32)),
        "data[0].loss_fn_inputs.weights must have the shape",
    ),
    ("cross_entropy", _columns("target_tokens", np.ones(6, np.int64)), "as model_input has 7 tokens, got [6]"),
    ("cross_entropy", _columns("weights", np.full(7, np.nan, np.float32)), "must be finite, got nan"),
    ("ppo", _columns("logprobs", np.full(7, np.inf, np.float32)), "must be finite, got inf"),
    ("ppo", _columns("logprobs", np.full(7, -3e38, np.float32)), "the loss is"),
    ("ppo", _config(clip=1.0), "loss_fn_config.clip"),
    ("cross_entropy", _long, "at most the backbone's 64 positions"),
    ("cross_entropy", lambda request: request.data.pop(), "as model_input has"),
]
BAD_CALLS[-1] = ("cross_entropy", lambda request: request.ClearField("data"), "data must have at least one row")


def test_a_call_that_cannot_be_served_fails_by_name_and_changes_nothing(server: Server, alice: Client) -> None:
    model, neighbour = alice.model(5), server.client("bob")
    theirs = neighbour.model(5)
    alice.result(alice.future("forward_backward", body_of(model, 1, rows_of(3))))
    seq = 2
    for loss, edit, words in BAD_CALLS:
        rows = neighbour.future("forward_backward", body_of(theirs, seq - 1, rows_of(0), forward_only=True))
        bad = alice.future("forward_backward", body_of(model, seq, rows_of(9), loss, edit=edit))
        category, reason = alice.result(bad)
        assert (category, words in reason) == ("user", True), (loss, reason)
        assert neighbour.result(rows).metrics == neighbour.result(rows).metrics
        seq += 1
    norm = alice.result(alice.step(model, seq))
    clean = alice.model(6)
    alice.result(alice.future("forward_backward", body_of(clean, 1, rows_of(3))))
    assert alice.result(alice.step(clean, 2)) == norm


@pytest.mark.parametrize(
    ("lora", "more", "words"),
    [
        ({"rank": 0}, {}, "lora_config.rank must be an integer from 1 to 256, got 0"),
        ({"rank": 257}, {}, "from 1 to 256, got 257"),
        ({"rank": 256}, {}, "lora_config.rank must be at most 61, the width of the widest target, got 256"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, {}, "must train at least one part"),
        ({}, {"base_model": "other"}, f"base_model must be one of {BASE}, got 'other'"),
        ({}, {"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type must be adamw, got 'dimuon'"),
    ],
)
def test_a_model_that_cannot_be_made_fails_by_name(alice: Client, lora: dict, more: dict, words: str) -> None:
    body = {"session_id": alice.session, "model_seq_id": 7, "base_model": BASE, "lora_config": {"rank": 2, **lora}}
    category, reason = alice.result(alice.future("create_model", {**body, **more}))
    assert (category, words in reason) == ("user", True), reason
    call = alice.future("forward_backward", body_of(f"{alice.session}:train:7", 1, rows_of(0)))
    assert words in alice.result(call)[1]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer_params.type must be adamw"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "learning_rate"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1"),
        ("optim_step", {"adam_params": {"nesterov": True}}, "adam_params.nesterov must be one of"),
        ("save_weights", {"path": "../../etc/passwd"}, "path must be 1 to 128 letters"),
        ("save_weights", {"path": "a", "ttl_seconds": 5}, "ttl_seconds must be from 3600"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["age1"]}, "is not served"),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 9, "kind": "inflight"}, "kind must be snapshot"),
        ("save_weights_for_sampler", {}, "must have a path or a sampling_session_seq_id"),
    ],
)
def test_a_request_about_a_model_that_cannot_be_served_fails_by_name(
    alice: Client, path: str, body: dict, words: str
) -> None:
    model = alice.model(8)
    category, reason = alice.result(alice.future(path, {"model_id": model, "seq_id": 1, **body}))
    assert (category, words in reason) == ("user", True), reason
    assert alice.result(alice.step(model, 2))["metrics"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "prompt.chunks[0] must be text, got 'image'"),
        (
            {"prompt": {"chunks": [{"tokens": [10**6]}]}},
            "prompt.chunks[0].tokens must be a list of token ids from 0 to",
        ),
        ({"prompt": {"chunks": []}}, "prompt must be at least one token"),
        ({"sampling_params": {"max_tokens": 1000}}, "sampling_params.max_tokens must be an integer from 1 to 62"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature must be a finite number of at least 0"),
        ({"sampling_params": {"top_p": 0}}, "sampling_params.top_p must be above 0"),
        ({"sampling_params": {"penalty": 1}}, "sampling_params.penalty must be one of"),
        ({"num_samples": 0}, "num_samples must be an integer from 1"),
        ({"record_stability_info": True}, "Use importance_sampling"),
        ({"topk_prompt_logprobs": 1000}, "topk_prompt_logprobs must be an integer from 0 to 128"),
        ({"sampling_params": {"stop": ["a"]}}, "as the model has no tokenizer"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k must be left out"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 9}, "prompt_logprobs_last_n must be from 1 to 1"),
    ],
)
def test_a_prompt_that_cannot_be_sampled_fails_by_name(alice: Client, change: dict, words: str) -> None:
    session = {"session_id": alice.session, "sampling_session_seq_id": 1, "base_model": BASE}
    sampler = alice.ok("create_sampling_session", session)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 2}}
    category, reason = alice.samples(alice.future("asample", {**body, **change}))
    assert (category, words in reason) == ("user", True), reason


# ------------------------------------------------------------------ tenants


def test_no_route_answers_to_an_id_of_another_tenant(server: Server, alice: Client) -> None:
    model = alice.model(20)
    future = alice.future("save_weights", {"model_id": model, "seq_id": 1, "path": "own"})
    path = alice.result(future)["path"]
    session = {"session_id": alice.session, "sampling_session_seq_id": 50, "model_path": path}
    sampler = alice.ok("create_sampling_session", session)["sampling_session_id"]
    ids = {
        "session_id": alice.session,
        "model_id": model,
        "request_id": future,
        "sampler_id": sampler,
        "sampling_session_id": sampler,
        "path": path,
        "tinker_path": path,
        "model_path": path,
        "kind": "weights",
        "name": "own",
        "link": "guessed",
    }
    plain = {"seq_id": 7, "model_seq_id": 9, "sampling_session_seq_id": 9, "base_model": BASE, "optimizer": True}
    plain |= {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "ttl_seconds": 4000}
    bob, no_key = server.client("bob"), Client(server.url, None)
    schema, seen = server.app.openapi(), []
    for route, methods in schema["paths"].items():
        for method, facts in methods.items():
            content = facts.get("requestBody", {}).get("content", {})
            names = [own["name"] for own in facts.get("parameters", ()) if own["in"] == "path"]
            body: Any = None
            if "application/json" in content:
                fields = schema["components"]["schemas"][content["application/json"]["schema"]["$ref"].split("/")[-1]]
                names += [name for name in fields["properties"] if name in ids and name not in names]
                body = {name: (ids | plain)[name] for name in fields["properties"] if name in ids | plain}
            elif content:
                names, body = ["model_id"], body_of(model, 7, rows_of(0))
            if not set(names) & ids.keys():
                continue
            url = route.removeprefix("/api/v1/").format(**ids)
            for client in (bob, no_key):
                kwargs: dict[str, Any] = {"content": body} if isinstance(body, bytes) else {"json": body}
                headers = {"content-type": "application/x-protobuf"} if isinstance(body, bytes) else {}
                answer = client.http.request(method, url, headers=headers, **kwargs)
                assert answer.status_code in (401, 403, 404), (method, route, answer.status_code, answer.text)
            seen.append(route)
    assert len(seen) >= 20
    # Your own session does not open the checkpoints of others.
    theirs = {"session_id": bob.session, "sampling_session_seq_id": 1, "model_path": path}
    assert bob.post("create_sampling_session", theirs).status_code == 404
    load = {"session_id": bob.session, "model_seq_id": 1, "path": path, "optimizer": True}
    assert bob.post("load_weights", load).status_code == 404
    assert bob.http.get("checkpoints").json()["checkpoints"] == []
    assert path in alice.http.get("checkpoints").text


def test_usage_is_counted_by_model_and_a_tenant_sees_its_own(tmp_path: Path) -> None:
    server = Server(tmp_path, {"carol": {}, "root": {"is_admin": True}})
    carol = server.client("carol")
    model = carol.model()
    train(carol, model, 0, rounds=1)
    carol.result(carol.future("forward_backward", body_of(model, 3, rows_of(0), forward_only=True)))
    session = {"session_id": carol.session, "sampling_session_seq_id": 1, "base_model": BASE}
    sampler = carol.ok("create_sampling_session", session)["sampling_session_id"]
    carol.samples(carol.sample(sampler, samples=2))
    usage = {row["target"]: row for row in carol.http.get("status").json()["usage"]}
    counts = {"trained_tokens": 19, "prompt_tokens": 19, "sampled_tokens": 0}
    assert {name: usage[model][name] for name in counts} == counts
    counts = {"trained_tokens": 0, "prompt_tokens": 3, "sampled_tokens": 8}
    assert {name: usage[sampler][name] for name in counts} == counts
    assert server.client("alice").http.get("status").json()["usage"] == []
    assert {row["key"] for row in server.client("root").http.get("status").json()["usage"]} == {"carol"}
    server.close()


# ------------------------------------------------------------------ order and results


def test_parts_that_arrive_out_of_order_run_in_their_order_and_polls_say_what_is_missing(
    alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "POLL_S", 0.05)
    model = alice.model(30)
    step = alice.step(model, 3)
    second = alice.future("forward_backward", body_of(model, 2, rows_of(1)))
    poll = alice.post("retrieve_future", {"request_id": step})
    assert (poll.status_code, poll.json()["type"]) == (408, "try_again")
    assert "request 1 of the model comes first, which has not arrived" in poll.json()["queue_state_reason"]
    first = alice.future("forward_backward", body_of(model, 1, rows_of(0)))
    norm = alice.result(step)
    assert alice.result(first).metrics != alice.result(second).metrics
    whole = alice.model(31)
    for seq in (1, 2):
        alice.result(alice.future("forward_backward", body_of(whole, seq, rows_of(seq - 1))))
    assert alice.result(alice.step(whole, 3)) == norm


def test_tenants_that_train_together_have_the_results_that_they_have_alone(server: Server) -> None:
    clients = [server.client(name) for name in ("alice", "bob") * 3]
    ranks = dict(zip(LOSSES, (2, 4, 8, 3, 16, 1), strict=True))
    together: dict[str, list] = {}

    def run(client: Client, loss: str) -> None:
        model = client.model(rank=ranks[loss], train_unembed=loss != "dro")
        together[loss] = train(client, model, 5, loss)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(clients, LOSSES, strict=True)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    for loss in LOSSES:
        client = server.client()
        alone = train(client, client.model(rank=ranks[loss], train_unembed=loss != "dro"), 5, loss)
        assert together[loss] == alone, loss


def test_checkpoints_are_listed_loaded_downloaded_and_deleted(server: Server, alice: Client) -> None:
    model = alice.model(40)
    train(alice, model, 0, rounds=2)
    save = {"model_id": model, "seq_id": 5, "path": "state", "user_metadata": {"a": "b"}}
    path = alice.result(alice.future("save_weights", save))["path"]
    again = alice.result(alice.future("save_weights", {**save, "seq_id": 6}))
    assert "Save with overwrite=True" in again[1]
    assert alice.result(alice.future("save_weights", {**save, "seq_id": 7, "overwrite": True}))["path"] == path
    adapter = {"model_id": model, "seq_id": 8, "path": "adapter"}
    external = alice.result(alice.future("save_weights_external", adapter))["path"]
    continued = train(alice, model, 9, first=9)
    load = {"session_id": alice.session, "model_seq_id": 41, "path": path, "optimizer": True}
    loaded = alice.result(alice.future("load_weights", load))["model_id"]
    assert loaded == f"{alice.session}:train:41"
    assert train(alice, loaded, 9) == continued
    info = alice.ok("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["is_lora"]) == (BASE, 4, True)
    assert alice.ok("get_info", {"model_id": loaded})["lora_rank"] == 4
    runs = alice.http.get("training_runs", params={"limit": 1}).json()
    assert (runs["training_runs"][0]["training_run_id"], runs["cursor"]["limit"]) == (loaded, 1)
    listed = alice.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert {own["checkpoint_id"] for own in listed} == {"weights/state", "external_weights/adapter"}
    assert listed[-1]["user_metadata"] == {"a": "b"}
    urls = alice.http.get(f"training_runs/{model}/checkpoints/external_weights/adapter/external_weights_urls").json()
    config = Client(server.url, None).http.get(urls["urls"]["adapter_config.json"]).json()
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    one = f"training_runs/{model}/checkpoints/weights/state"
    archive = Client(server.url, None).http.get(alice.http.get(f"{one}/archive").json()["url"]).content
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors"]
    assert alice.http.put(f"{one}/ttl", json={"ttl_seconds": 1}).status_code == 400
    assert alice.http.put(f"{one}/ttl", json={"ttl_seconds": 3600}).status_code == 200
    assert alice.http.delete(one).status_code == 200
    assert alice.http.delete(one).status_code == 404
    assert alice.post("load_weights", {**load, "model_seq_id": 42}).status_code == 404
    assert not list(server.store.glob("checkpoints/.*"))
    assert external.endswith("/external_weights/adapter")


def test_frozen_weights_sample_the_same_while_training_continues(alice: Client) -> None:
    model = alice.model(50)
    train(alice, model, 0, rounds=2)
    save = {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 60}
    sampler = alice.result(alice.future("save_weights_for_sampler", save))["sampling_session_id"]
    path = alice.result(alice.future("save_weights_for_sampler", {"model_id": model, "seq_id": 6, "path": "s"}))["path"]
    before = alice.samples(alice.sample(sampler, 0, samples=2))
    train(alice, model, 3, first=7)
    session = {"session_id": alice.session, "sampling_session_seq_id": 61, "model_path": path}
    saved = alice.ok("create_sampling_session", session)["sampling_session_id"]
    for name, seq in ((sampler, 1), (saved, 0)):
        after = alice.samples(alice.sample(name, seq, samples=2))
        assert [own.tokens for own in after.sequences] == [own.tokens for own in before.sequences]
        assert [own.logprobs for own in after.sequences] == [own.logprobs for own in before.sequences]
    first, second = alice.sample(saved, 5, temperature=1.0, seed=7), alice.sample(saved, 5, temperature=1.0, seed=7)
    assert first == second
    assert alice.http.get(f"samplers/{saved}").json()["model_path"] == path
    # Log-probabilities of a prompt, and those of the sampler, are those of a forward pass.
    load = {"session_id": alice.session, "model_seq_id": 51, "path": path, "optimizer": False}
    loaded = alice.result(alice.future("load_weights", load))["model_id"]
    (drawn, _) = before.sequences
    tokens = np.asarray([5, 6, 7, *drawn.tokens])
    row = {"tokens": tokens[:-1], "target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    forward = alice.result(alice.future("forward_backward", body_of(loaded, 1, [row], forward_only=True)))
    passed = forward.loss_fn_outputs[0]["logprobs"].to_numpy()
    np.testing.assert_allclose(passed[2:], drawn.logprobs, atol=1e-4)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens.tolist()}]}
    body = {"sampling_session_id": saved, "seq_id": 9, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    scored = alice.samples(alice.future("asample", {**body, "prompt_logprobs": True})).prompt_logprobs
    assert (len(scored), scored[0]) == (len(tokens), None)
    np.testing.assert_allclose(passed, scored[1:], atol=1e-4)
    last = {**body, "seq_id": 10, "prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    assert [one is None for one in alice.samples(alice.future("asample", last)).prompt_logprobs][-3:] == [
        True,
        False,
        False,
    ]


# ------------------------------------------------------------------ limits, rest, restarts


def test_a_request_fails_if_an_earlier_one_does_not_arrive_and_does_not_run_later(
    tmp_path: Path, alice: Client
) -> None:
    server = Server(tmp_path, max_wait_s=0.1)
    client = server.client()
    model = client.model()
    step = client.step(model, 2)
    client.future("save_weights_for_sampler", {"model_id": model, "seq_id": 3, "sampling_session_seq_id": 4})
    sample = client.sample(f"{client.session}:sample:4")
    reason = "request 1 of the model, which comes first, has not arrived in 0.1 s. Send it, or load a checkpoint"
    assert client.result(step)[0] == "user"
    assert client.result(step)[1].startswith(reason)
    assert "the weights of the sampling session were deleted" in client.samples(sample)[1]
    first = client.result(client.future("forward_backward", body_of(model, 1, rows_of(0))))
    server.crash()
    server = Server(tmp_path)
    client = server.client()
    norm = client.result(client.step(model, 4))
    whole = alice.model(80)
    assert first.metrics == alice.result(alice.future("forward_backward", body_of(whole, 1, rows_of(0)))).metrics
    assert norm == alice.result(alice.step(whole, 2))
    server.close()


def test_limits_of_a_key_are_a_429_for_samples_and_a_queue_state_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "POLL_S", 0.05)
    turn = threading.Semaphore(0)
    monkeypatch.setattr(engine_module, "crashpoint", lambda name: turn.acquire() if name == "mid_pass" else None)
    server = Server(tmp_path, {"carol": {"max_models": 2, "max_queued_tokens": 19}}, piece_tokens=1)
    carol = server.client("carol")
    model, other = carol.model(0), carol.model(1)
    body = {"session_id": carol.session, "model_seq_id": 2, "base_model": BASE, "lora_config": {"rank": 2}}
    second = carol.future("create_model", body)
    poll = carol.post("retrieve_future", {"request_id": second}).json()
    assert poll["queue_state"] == "paused_capacity"
    assert "carol has 2 open models, the limit of the key" in poll["queue_state_reason"]
    first = carol.future("forward_backward", body_of(model, 1, rows_of(0)))
    session = {"session_id": carol.session, "sampling_session_seq_id": 1, "base_model": BASE}
    sampler = carol.ok("create_sampling_session", session)["sampling_session_id"]
    refused = carol.post("asample", {**json.loads(_sample_body(sampler))})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    waiting = carol.future("forward_backward", body_of(other, 1, rows_of(0)))
    turn.release()  # the first piece ends
    until = time.monotonic() + 60
    while (poll := carol.post("retrieve_future", {"request_id": waiting}).json())["queue_state"] == "active":
        assert time.monotonic() < until
    assert poll["queue_state"] == "paused_rate_limit"
    assert "19 tokens of carol run, and the limit of the key is 19" in poll["queue_state_reason"]
    turn.release(100)
    assert carol.result(first).metrics == carol.result(waiting).metrics
    carol.result(carol.future("unload_model", {"model_id": model}))
    assert carol.result(second)["type"] == "create_model"
    server.close()


def _sample_body(sampler: str) -> str:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    return json.dumps({"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {}})


def test_models_beyond_the_limit_rest_and_return_as_they_were(tmp_path: Path, server: Server, alice: Client) -> None:
    small = Server(tmp_path, max_models=2)
    client = small.client()
    models = [client.model(number, rank=number + 1) for number in range(5)]
    found: list[list] = [[] for _ in models]
    for turn in range(2):
        for number, model in enumerate(models):
            found[number] += train(client, model, number, first=1 + 2 * turn, rounds=1)
        # In mid-accumulation, too.
        [
            client.result(client.future("forward_backward", body_of(model, 3 + 2 * turn, rows_of(8))))
            for model in models[:0]
        ]
    assert len(small.engine.models.open_models) <= 2
    for number in range(5):
        model, expected = alice.model(100 + number, rank=number + 1), []
        for turn in range(2):
            expected += train(alice, model, number, first=1 + 2 * turn, rounds=1)
        assert found[number] == expected
    small.close()


def test_a_model_whose_next_request_is_missing_takes_no_place_from_others(tmp_path: Path) -> None:
    server = Server(tmp_path, max_models=1)
    client = server.client()
    stuck = client.model()
    waiting = client.step(stuck, 2)
    wakes, wake = list[str](), server.engine.models.wake
    server.engine.models.wake = lambda model: (wakes.append(model.id), wake(model))[1]  # type: ignore[method-assign]
    other = client.model(1)
    train(client, other, 0, rounds=3)
    assert stuck not in wakes
    first = client.future("forward_backward", body_of(stuck, 1, rows_of(0)))
    assert client.result(first).metrics
    assert client.result(waiting)["metrics"]
    assert stuck in wakes
    server.close()


@pytest.mark.parametrize("ending", ["close", "crash"])
def test_a_restart_continues_with_the_bits_of_before(tmp_path: Path, alice: Client, ending: str) -> None:
    first = Server(tmp_path)
    client = first.client()
    model = client.model(rank=3)
    found = train(client, model, 0, rounds=2)
    sampler = client.result(
        client.future("save_weights_for_sampler", {"model_id": model, "seq_id": 5, "sampling_session_seq_id": 1})
    )["sampling_session_id"]
    drawn = client.samples(client.sample(sampler, temperature=1.0, seed=3)).sequences[0]
    # In mid-accumulation, with a request that waits for its head.
    accumulated = client.future("forward_backward", body_of(model, 6, rows_of(20)))
    client.result(accumulated)
    step = client.step(model, 8)
    getattr(first, ending)()
    second = Server(tmp_path)
    client = second.client()
    assert client.result(accumulated).metrics == client.result(accumulated).metrics
    client.result(client.future("forward_backward", body_of(model, 7, rows_of(21))))
    found += [client.result(step)]
    again = client.samples(client.sample(sampler, 1, temperature=1.0, seed=3)).sequences[0]
    assert (again.tokens, again.logprobs) == (drawn.tokens, drawn.logprobs)
    found += train(client, model, 30, first=9, rounds=1)
    usage = client.http.get("status").json()["usage"]
    assert sum(row["trained_tokens"] for row in usage) == 5 * 19  # replays are not counted again
    whole = alice.model(120 + (ending == "crash"), rank=3)
    expected = train(alice, whole, 0, rounds=2)
    body = {"model_id": whole, "seq_id": 5, "path": f"x-{ending}"}
    alice.result(alice.future("save_weights", body))
    for seq, seed in ((6, 20), (7, 21)):
        alice.result(alice.future("forward_backward", body_of(whole, seq, rows_of(seed))))
    expected += [alice.result(alice.step(whole, 8))]
    expected += train(alice, whole, 30, first=9, rounds=1)
    assert found == expected
    second.close()


def test_old_results_and_expired_checkpoints_are_deleted(
    server: Server, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = alice.model(45)
    save = {"model_id": model, "seq_id": 1, "path": "old", "ttl_seconds": 3600}
    request = alice.future("save_weights", save)
    path = alice.result(request)["path"]
    (row,) = server.service.ledger.read("SELECT folder FROM checkpoints WHERE id = ?", path)
    assert (server.store / row["folder"]).exists()
    monkeypatch.setattr(app_module, "KEEP_S", -1.0)
    server.service.ledger.write(lambda db: db.execute("UPDATE models SET snapshot = 1 WHERE id = ?", (model,))).result()
    server.service.ledger.write(
        lambda db: db.execute("UPDATE checkpoints SET expires = 1 WHERE id = ?", (path,))
    ).result()
    assert server.service.loop is not None
    asyncio.run_coroutine_threadsafe(server.service.clean(), server.service.loop).result(20)
    assert alice.post("retrieve_future", {"request_id": request}).status_code == 410
    assert alice.post("weights_info", {"tinker_path": path}).status_code == 404
    assert not (server.store / row["folder"]).exists()


def test_results_are_gone_after_the_session_and_a_heartbeat_says_so(alice: Client) -> None:
    client = Client(str(alice.http.base_url).removesuffix("/api/v1/"), alice.http.headers["x-api-key"])
    model = client.model()
    future = client.future("save_weights", {"model_id": model, "seq_id": 1, "path": "a"})
    client.result(future)
    assert client.post("session_heartbeat", {"session_id": client.session}).status_code == 200
    train(client, model, 0, first=2, rounds=1)
    assert client.http.post(f"sessions/{client.session}/finish", json={}).status_code == 200
    assert client.post("session_heartbeat", {"session_id": client.session}).status_code == 410


def test_a_full_disk_is_a_503_that_changes_nothing_and_work_continues_once_there_is_room(
    tmp_path: Path, disk: Callable[[int | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    client = server.client()
    model = client.model()
    train(client, model, 0, rounds=1)
    disk(100_000)
    rows = rows_of(1, (60,) * 400)
    full = client.post("forward_backward", body_of(model, 3, rows))
    assert (full.status_code, full.headers["retry-after"]) == (503, "2")
    disk(None)
    request = client.future("forward_backward", body_of(model, 3, rows_of(1)))
    assert client.result(request).metrics
    # A checkpoint that finds no room waits for some.
    save_tensors = checkpoints_module.save_tensors

    def full_disk(path: Path, tensors: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "save_tensors", full_disk)
    monkeypatch.setattr(app_module, "POLL_S", 0.5)
    saved = client.future("save_weights", {"model_id": model, "seq_id": 4, "path": "a"})
    poll = client.post("retrieve_future", {"request_id": saved}).json()
    assert poll["queue_state"] == "paused_capacity"
    assert "the store cannot be written" in poll["queue_state_reason"]
    monkeypatch.setattr(checkpoints_module, "save_tensors", save_tensors)
    assert client.result(saved)["path"].endswith("/weights/a")
    assert not list(tmp_path.glob("checkpoints/.*"))
    server.close()


def test_a_pass_without_memory_is_computed_in_smaller_ones_and_a_row_that_does_not_fit_fails_by_name(
    tmp_path: Path, alice: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    client, compute, sizes = server.client(), server.engine._calls._outputs, list[int]()

    def limited(batch: Any, num_models: int) -> Any:
        sizes.append(batch.task_offsets[num_models])
        if sizes[-1] > 40:
            raise torch.OutOfMemoryError("no memory for this")
        return compute(batch, num_models)

    monkeypatch.setattr(server.engine._calls, "_outputs", limited)
    model = client.model()
    fits = client.result(client.future("forward_backward", body_of(model, 1, rows_of(0, (30, 30)))))
    assert sizes == [60, 30, 30]
    large = client.future("forward_backward", body_of(model, 2, rows_of(1, (20, 50))))
    category, reason = client.result(large)
    assert (category, "data[1]: a row of 50 tokens does not fit into memory" in reason) == ("user", True), reason
    whole = alice.model(60)
    expected = [alice.result(alice.future("forward_backward", body_of(whole, 1, rows_of(0, (30, 30)))))]
    expected.append(alice.result(alice.step(whole, 2)))
    found = [fits, client.result(client.step(model, 3))]
    np.testing.assert_allclose(found[0].metrics["loss:sum"], expected[0].metrics["loss:sum"], rtol=1e-5)
    np.testing.assert_allclose(*(own[1]["metrics"]["grad_norm:mean"] for own in (found, expected)), rtol=1e-5)
    # Samples, too.
    session = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": BASE}
    sampler, advance = client.ok("create_sampling_session", session)["sampling_session_id"], server.engine._sampling

    def limited_rows() -> Any:
        if len(server.engine._rows) > 4:
            raise torch.OutOfMemoryError("no memory for this")
        return Sampling.advance(advance)

    monkeypatch.setattr(advance, "advance", limited_rows)
    requests = [client.sample(sampler, seq, samples=samples) for seq, samples in enumerate((3, 3, 8, 1))]
    *rest, refused, last = map(client.samples, requests)
    assert (refused[0], "does not fit into memory" in refused[1]) == ("user", True)
    assert [len(own.sequences) for own in (*rest, last)] == [3, 3, 1]
    server.close()


def test_a_sampling_request_that_raises_fails_alone(server: Server, alice: Client, monkeypatch: Any) -> None:
    session = {"session_id": alice.session, "sampling_session_seq_id": 71, "base_model": BASE}
    sampler = alice.ok("create_sampling_session", session)["sampling_session_id"]
    expected = alice.samples(alice.sample(sampler, 0)).sequences[0]
    advance = server.engine._sampling.advance

    def odd() -> Any:
        if any(request.payload.prompt == [9] for request, _ in server.engine._rows.values()):
            raise ValueError("an odd prompt")
        return advance()

    monkeypatch.setattr(server.engine._sampling, "advance", odd)
    requests = [alice.sample(sampler, 1), alice.sample(sampler, 2, prompt=[9]), alice.sample(sampler, 3)]
    first, failed, last = map(alice.samples, requests)
    assert failed == ("server", "the server has failed: ValueError: an odd prompt")
    for found in (first, last):
        assert (found.sequences[0].tokens, found.sequences[0].logprobs) == (expected.tokens, expected.logprobs)


def test_a_sampling_request_can_be_cancelled(alice: Client) -> None:
    session = {"session_id": alice.session, "sampling_session_seq_id": 70, "base_model": BASE}
    sampler = alice.ok("create_sampling_session", session)["sampling_session_id"]
    alice.sample(sampler, 0, samples=200, max_tokens=50)
    request = alice.sample(sampler, 1, samples=200, max_tokens=50)
    assert alice.post("cancel_future", {"request_id": request}).status_code == 200
    assert alice.samples(request) == ("user", "the request was cancelled.")


def test_a_pass_waits_for_models_that_the_last_one_has_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    alice = server.client()
    first, second = alice.model(0), alice.model(1)
    monkeypatch.setattr(engine_module, "_RETURN_SHARE", 1e9)
    monkeypatch.setattr(engine_module, "_MOST_RETURN_S", 60.0)
    alice.result(alice.future("forward_backward", body_of(first, 1, rows_of(0))))
    calls = [
        alice.future("forward_backward", body_of(model, seq, rows_of(0))) for model, seq in ((second, 1), (first, 2))
    ]
    assert [alice.result(call).metrics["loss:sum"] > 0 for call in calls] == [True, True]
    assert server.engine.passes[-1][2] == 2
    server.close()
