"""The routes of the Tinker protocol: checks of keys, ids and bodies, and futures that are committed before they leave.

A caller's mistake is never a 5xx, which clients repeat for minutes: what cannot be read is a 4xx, and what is read but
cannot be served is a future that fails with the category "user" in its turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import tarfile
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import uvicorn
from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Query, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux.calls import Calls
from peft_mux.errors import ConfigError, DataError, PeftMuxError, shown
from peft_mux.serve.checkpoints import KINDS, ModelConfig, check_name, check_ttl, modules_of, split_path
from peft_mux.serve.engine import Engine, Settings, read_adam, training_call
from peft_mux.serve.keys import Key, UnknownKeyError, find_key
from peft_mux.serve.ledger import (
    DONE,
    FAILED,
    GONE,
    QUEUED,
    ConflictError,
    Ledger,
    Request,
    StoreError,
    UnknownIdError,
    add_request,
    digest,
    finish_request,
)
from peft_mux.serve.wire import MAX_BODY_BYTES, BodyError, decompressed, read_training_request
from peft_mux.storage import FolderLock

POLL_S = 30.0
"""Seconds for which a poll of a result waits; clients wait 45."""
KEEP_S = 86_400.0
"""Seconds for which results are kept."""
_LINK_S = 900.0
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_PROTOBUF = "application/x-protobuf"
_IN_PROTOBUF = ("forward_backward", "asample")
"""Kinds of requests whose results are protobuf."""


Number = Annotated[int, Field(ge=0, lt=2**63)]
"""A number of a request, a model or a sampling session, as the ledger can hold it."""
Named = Annotated[str, Body(embed=True)]
"""The only field of a body: the id of what it names. Fields that are not known mean nothing."""


class _Body(BaseModel):
    """A body in which an unknown field is refused, as ignoring it could change results."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class LoraBody(_Body):
    """How a model is adapted."""

    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class _TypedBody(_Body):
    """A body that may repeat what its route says."""

    type: str = ""


class CreateModel(_TypedBody):
    """A new model."""

    session_id: str
    model_seq_id: Number
    base_model: str
    lora_config: LoraBody | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None


class LoadWeights(_TypedBody):
    """A model that begins with a checkpoint."""

    path: str
    optimizer: bool
    session_id: str | None = None
    model_seq_id: Number | None = None
    model_id: str | None = None
    seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: dict[str, Any] | None = None
    user_metadata: dict[str, Any] | None = None
    weights_access_token: str | None = None


class OptimStep(_TypedBody):
    """A step of the optimizer."""

    model_id: str
    seq_id: Annotated[Number, Field(ge=1)]
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeights(_TypedBody):
    """A checkpoint of any kind, or weights for sampling that have no path."""

    model_id: str
    seq_id: Annotated[Number, Field(ge=1)]
    path: str | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    age_encryption_recipients: list[str] | None = None


class CreateSamplingSession(_TypedBody):
    """A client that samples from a base model or a checkpoint."""

    session_id: str
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Sample(_TypedBody):
    """A prompt to complete."""

    sampling_session_id: str
    seq_id: Number
    prompt: dict[str, Any]
    sampling_params: dict[str, Any]
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: dict[str, Any] | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


async def _tenant(http: HttpRequest) -> Key:
    """Return the tenant of a request's key."""
    given = http.headers.get("x-api-key") or http.headers.get("authorization", "").removeprefix("Bearer ")
    service: Service = http.app.state.service
    return find_key(service.ledger, given or None, service.development_key)


Tenant = Annotated[Key, Depends(_tenant)]
Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0)]
Kind = Literal["weights", "sampler_weights", "external_weights"]


async def _saved(model_id: str, kind: Kind, name: str, http: HttpRequest, key: Tenant) -> Any:
    """Return the row of the checkpoint that a route is about."""
    return http.app.state.service.ledger.resolve(key.name, "checkpoint", f"tinker://{model_id}/{kind}/{name}")


Saved = Annotated[Any, Depends(_saved)]


def _iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).isoformat()


class Service:
    """The state that the routes share: the ledger, the engine, and who waits for which result.

    Args:
        engine: the engine, which has the ledger and the store.
        model: what the operator gave as the model, which clients load the tokenizer from.
        development_key: a key in addition to those of the store.

    Attributes:
        names: names of the model for clients.
        server: ends when the engine has failed.
        loop: the event loop of the routes.
        waiting: events of the polls that wait for a result, by the id of its request.
        links: of each link the file or folder that it leads to, and until when it is valid.
    """

    def __init__(self, engine: Engine, *, model: str, development_key: str | None = None) -> None:
        self.engine, self.ledger, self.store = engine, engine.ledger, engine.store
        self.names, self.model, self.development_key = engine.settings.served_names, model, development_key
        engine.notify = self._notify
        self.server: uvicorn.Server | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiting: dict[str, set[asyncio.Event]] = {}
        self.links: dict[str, tuple[Path, float]] = {}
        self.started = time.time()

    def _notify(self, ids: list[str]) -> None:
        """Wake the polls of some requests, from any thread; an empty list means that the engine has failed."""
        if not ids and self.server is not None:
            self.server.should_exit = True

        def wake() -> None:
            for request_id in ids:
                for event in self.waiting.get(request_id, ()):
                    event.set()

        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(wake)

    async def write(self, act: Callable[[Any], Any]) -> Any:
        """Run statements in the next commit of the ledger."""
        return await asyncio.wrap_future(self.ledger.write(act))

    async def accept(
        self, request: Request, also: Callable[[Any], None] = lambda connection: None, **more: Any
    ) -> dict[str, Any]:
        """Commit a request, hand it to the engine, and return its future."""

        def act(connection: Any) -> tuple[str, bool]:
            request_id, is_new = add_request(connection, request)
            if is_new:
                also(connection)
            return request_id, is_new

        request.id, is_new = await self.write(act)
        if is_new:
            self.engine.put(request)
        return {"request_id": request.id, **more}

    async def accept_json(
        self,
        key: Key,
        row: Any,
        kind: str,
        seq: int,
        body: Any,
        check: Callable[[dict[str, Any]], Any],
        also: Callable[[Any], None] = lambda connection: None,
    ) -> dict[str, Any]:
        """Commit a request about a model whose body is JSON; what `check` refuses fails in its turn."""
        content, failure = body.model_dump(exclude_none=True), None
        try:
            check(content)
        except ConfigError as error:
            failure = str(error)
        raw = json.dumps(content, sort_keys=True).encode()
        request = Request(key.name, row["session"], row["id"], seq, kind, raw, failure=failure)
        return await self.accept(request, also, model_id=row["id"])

    def status(self, key: Key) -> dict[str, Any]:
        """Return what the service does, and the tokens of each model: of all tenants for an admin, else of one."""
        where, values = ("", ()) if key.is_admin else ("WHERE key = ?", (key.name,))
        usage = self.ledger.read(
            "SELECT key, target, kind = 'asample' AS is_sampling, sum(trained_tokens) AS trained_tokens, "
            "sum(prompt_tokens) AS prompt_tokens, sum(sampled_tokens) AS sampled_tokens, count(*) AS requests "
            f"FROM requests {where} GROUP BY key, target HAVING sum(num_tokens) > 0",
            *values,
        )
        now, minute = time.monotonic(), time.monotonic() - 60.0
        waiting = list(self.engine.requests.values())
        passes = [entry for entry in list(self.engine.passes) if entry[0] > minute]
        return {
            "models": self.names,
            "uptime_s": round(time.time() - self.started, 1),
            "open_models": len(self.engine.models.open_models),
            "queued_requests": len(waiting),
            "writer": self.engine.writer.reason,
            "passes_of_last_minute": {
                "passes": len(passes),
                "seconds": round(sum(entry[1] for entry in passes), 3),
                "models_per_pass": round(sum(entry[2] for entry in passes) / max(1, len(passes)), 2),
                "tokens": sum(entry[3] for entry in passes),
            },
            "queue": [
                {
                    "key": request.key,
                    "target": request.target,
                    "seq": request.seq,
                    "kind": request.kind,
                    "tokens": request.num_tokens,
                    "age_s": round(now - request.accepted, 1),
                    "waits_for": " ".join(self.engine.waits_for(request.id)).strip(),
                }
                for request in waiting
                if key.is_admin or request.key == key.name
            ],
            "usage": [dict(row) for row in usage],
        }

    async def clean(self) -> None:
        """Delete results that are too old, and checkpoints that have expired."""
        now = time.time()

        def act(connection: Any) -> list[str]:
            connection.execute(
                "UPDATE requests SET state = ?, result = NULL, body = NULL WHERE state IN (?, ?) AND finished < ? AND "
                "NOT EXISTS (SELECT 1 FROM models WHERE models.id = target AND snapshot < seq)",
                (GONE, DONE, FAILED, now - KEEP_S),
            )
            old = connection.execute("SELECT folder FROM checkpoints WHERE expires < ?", (now,)).fetchall()
            connection.execute("DELETE FROM checkpoints WHERE expires < ?", (now,))
            samplers = connection.execute(
                "SELECT folder FROM samplers WHERE model NOT NULL AND used < ?", (now - KEEP_S,)
            ).fetchall()
            connection.execute("DELETE FROM samplers WHERE used < ?", (now - KEEP_S,))
            return [row["folder"] for row in (*old, *samplers)]

        for folder in await self.write(act):
            await asyncio.to_thread(shutil.rmtree, self.store / folder, ignore_errors=True)
        self.links = {name: link for name, link in self.links.items() if link[1] > now}


def make_app(service: Service) -> FastAPI:
    """Return the application with all routes."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.loop = asyncio.get_running_loop()
        service.engine.start()

        async def clean_often() -> None:
            while True:
                with contextlib.suppress(StoreError):  # no space to note it; next time
                    await service.clean()
                await asyncio.sleep(60.0)

        cleaning = asyncio.create_task(clean_often())
        yield
        cleaning.cancel()
        await asyncio.to_thread(service.engine.stop)
        await asyncio.to_thread(service.ledger.close)

    app = FastAPI(title="peft-mux serve", lifespan=lifespan)
    app.state.service = service
    app.add_middleware(_BodyLimit)

    def answer(error: type[Exception], status: int, **headers: str) -> None:
        @app.exception_handler(error)
        async def handle(http: HttpRequest, raised: Any) -> Response:
            return JSONResponse({"detail": str(raised)}, getattr(raised, "status", status), headers)

    answer(BodyError, 400)
    answer(ConfigError, 400)
    answer(DataError, 400)
    answer(ConflictError, 409)
    answer(UnknownKeyError, 401)
    answer(UnicodeEncodeError, 422)  # half a character in an id
    answer(StoreError, 503, **{"retry-after": "2"})

    @app.exception_handler(UnknownIdError)
    async def unknown(http: HttpRequest, error: UnknownIdError) -> Response:
        return JSONResponse({"detail": f"there is no {error} of this id."}, 404)

    @app.exception_handler(RequestValidationError)
    async def invalid(http: HttpRequest, error: RequestValidationError) -> Response:
        words = [
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}, got {shown(fault.get('input'))}."
            for fault in error.errors()
        ]
        return JSONResponse({"detail": " ".join(words)}, 422)

    app.include_router(_open_routes(service))
    app.include_router(_routes(service))
    return app


class _BodyLimit:
    """Answers 413 to a body that is too large, before it is read as a whole."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        length = dict(scope["headers"]).get(b"content-length", b"0")
        refusal = JSONResponse({"detail": f"the body must have at most {MAX_BODY_BYTES} bytes. Send fewer rows."}, 413)
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return await refusal(scope, receive, send)
        size = 0

        async def limited() -> Any:
            nonlocal size
            part = await receive()
            size += len(part.get("body", b""))
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body must have at most {MAX_BODY_BYTES} bytes. Send fewer rows.")
            return part

        await self._app(scope, limited, send)


def _open_routes(service: Service) -> APIRouter:
    """Return the routes that need no key; a link is a secret by itself."""
    api = APIRouter(prefix="/api/v1")

    @api.get("/healthz")
    async def healthz() -> Any:
        if service.engine.failure:
            return JSONResponse({"status": "failed", "detail": service.engine.failure}, 503)
        return {"status": "ok"}

    @api.get("/links/{link}")
    def download(link: str) -> Any:
        path, until = service.links.get(link, (None, 0.0))
        if path is None or until < time.time() or not path.exists():
            raise UnknownIdError("link")
        if path.is_file():
            return FileResponse(path, filename=path.name)
        packed = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the answer
        with tarfile.open(fileobj=packed, mode="w:gz") as tar:
            for file in _ADAPTER_FILES:
                tar.add(path / file, arcname=file)
        packed.seek(0)
        return StreamingResponse(packed, media_type="application/gzip")

    return api


def _routes(service: Service) -> APIRouter:
    """Return the routes that need a key."""
    ledger, engine = service.ledger, service.engine

    api = APIRouter(prefix="/api/v1", dependencies=[Depends(_tenant)])

    # ------------------------------------------------------------------ clients and sessions

    @api.post("/client/config")
    async def client_config() -> Any:
        # Larger requests share passes better; a request has at most 64 MiB.
        return {"fwdbwd_max_chunk_len": 65_536, "fwdbwd_max_chunk_bytes_count": MAX_BODY_BYTES // 2}

    @api.post("/client/dynamic_config")
    async def client_dynamic_config() -> Any:
        return {"sample_cancel_enabled": True}

    @api.get("/get_server_capabilities")
    async def capabilities() -> Any:
        facts = {"max_context_length": engine.context, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **facts} for name in service.names]}

    @api.post("/create_session")
    async def create_session(key: Tenant) -> Any:
        session, now = f"s-{secrets.token_hex(12)}", time.time()
        await service.write(
            lambda db: db.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, NULL)", (session, key.name, now, now))
        )
        return {"type": "create_session", "session_id": session}

    @api.post("/session_heartbeat")
    async def heartbeat(session_id: Named, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "session", session_id)
        if row["finished"] is not None:
            raise HTTPException(410, "the session is finished.")
        await service.write(
            lambda db: db.execute("UPDATE sessions SET seen = ? WHERE id = ?", (time.time(), session_id))
        )
        return {"type": "session_heartbeat"}

    @api.post("/sessions/{session_id}/finish")
    async def finish(session_id: str, key: Tenant) -> Any:
        ledger.resolve(key.name, "session", session_id)

        def act(db: Any) -> None:
            db.execute("UPDATE sessions SET finished = ? WHERE id = ?", (time.time(), session_id))
            db.execute("UPDATE models SET is_open = 0 WHERE session = ?", (session_id,))
            db.execute(
                "UPDATE requests SET state = ?, result = NULL WHERE session = ? AND state IN (?, ?) AND "
                "NOT EXISTS (SELECT 1 FROM models WHERE models.id = target AND snapshot < seq)",
                (GONE, session_id, DONE, FAILED),
            )

        await service.write(act)
        engine.nudge()
        return {}

    @api.post("/telemetry")
    async def telemetry() -> Any:
        return {"status": "accepted"}

    # ------------------------------------------------------------------ models

    def served(name: str | None) -> None:
        if name not in service.names:
            raise ConfigError(f"base_model must be one of {', '.join(service.names)}, got {shown(name)}.")

    def adam_only(config: dict[str, Any] | None) -> None:
        kind = (config or {}).get("type", "adamw")
        if kind != "adamw":
            raise ConfigError(f"optimizer_config.type must be adamw, got {shown(kind)}. Use the default optimizer.")

    def add_model(model: str, key: Key, session: str, config: ModelConfig, metadata: Any) -> Callable[[Any], None]:
        values = model, key.name, session, json.dumps(vars(config)), time.time(), time.time(), json.dumps(metadata)
        columns = "id, key, session, config, created, used, metadata"
        return lambda db: db.execute(f"INSERT INTO models ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    @api.post("/create_model")
    async def create_model(body: CreateModel, key: Tenant) -> Any:
        session = ledger.resolve(key.name, "session", body.session_id)
        model, lora = f"{body.session_id}:train:{body.model_seq_id}", body.lora_config or LoraBody()
        # A seed of its own makes a replay equal.
        seed = int(digest(model.encode())[:12], 16) if lora.seed is None else lora.seed % 2**63
        flags = lora.train_attn, lora.train_mlp, lora.train_unembed
        config = ModelConfig(body.base_model, lora.rank, seed, *flags)

        def check(content: dict[str, Any]) -> None:
            served(body.base_model)
            adam_only(body.optimizer_config)
            config.lora(engine.modules)

        new = {"id": model, "session": session["id"]}
        also = add_model(model, key, session["id"], config, body.user_metadata)
        return await service.accept_json(key, new, "create_model", 0, body, check, also=also)

    @api.post("/load_weights")
    async def load_weights(body: LoadWeights, key: Tenant) -> Any:
        split_path(body.path)
        config = config_of(ledger.resolve(key.name, "checkpoint", body.path)["model"])

        def check(content: dict[str, Any]) -> None:
            adam_only(body.optimizer_config)
            if body.base_model is not None:
                served(body.base_model)
            if body.weights_access_token is not None:
                raise ConfigError("weights_access_token is not served. Load checkpoints of your own key.")

        if body.session_id is None or body.model_seq_id is None:
            if body.model_id is None:
                raise ConfigError("load_weights must name a session_id and model_seq_id, or a model_id, got neither.")
            row = ledger.resolve(key.name, "model", body.model_id)
            if body.seq_id != 1:
                raise ConfigError(
                    f"load_weights must be the first request of a model (seq_id 1), got seq_id {body.seq_id}. Use "
                    "create_training_client_from_state, which makes a new model."
                )
            return await service.accept_json(key, row, "load_weights", 1, body, check)
        session = ledger.resolve(key.name, "session", body.session_id)
        model = f"{body.session_id}:train:{body.model_seq_id}"
        also = add_model(model, key, session["id"], ModelConfig(**config), body.user_metadata)
        row = {"id": model, "session": session["id"]}
        return await service.accept_json(key, row, "load_weights", 0, body, check, also=also)

    @api.post("/get_info")
    async def get_info(model_id: Named, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", model_id)
        config = json.loads(row["config"])
        data = {"arch": "", "model_name": config["base_model"], "tokenizer_id": service.model}
        return {
            "type": "get_info",
            "model_id": row["id"],
            "model_data": data,
            "optimizer_config": {"type": "adamw"},
            "is_lora": True,
            "lora_rank": config["rank"],
            "model_name": config["base_model"],
        }

    @api.post("/unload_model")
    async def unload_model(model_id: Named, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", model_id)
        request = Request(key.name, row["session"], f"unload/{model_id}", time.time_ns(), "unload_model", b"")

        def act(db: Any) -> str:
            request_id, _ = add_request(db, request)
            db.execute("UPDATE models SET is_open = 0 WHERE id = ?", (model_id,))
            finish_request(db, request_id, json.dumps({"type": "unload_model", "model_id": model_id}).encode())
            return request_id

        request_id = await service.write(act)
        engine.nudge()
        return {"request_id": request_id, "model_id": model_id}

    # ------------------------------------------------------------------ training

    @api.post("/forward_backward", openapi_extra={"requestBody": {"content": {_PROTOBUF: {}}}})
    async def forward_backward(http: HttpRequest, key: Tenant) -> Any:
        raw, content_type = await http.body(), http.headers.get("content-type", "")

        def read() -> Any:
            asked = read_training_request(decompressed(raw, http.headers.get("content-encoding", "")), content_type)
            # Maps may be written in any order, so a repeated request is recognised by this form.
            return asked, asked.message.SerializeToString(deterministic=True)

        asked, body = await asyncio.to_thread(read)
        row = ledger.resolve(key.name, "model", asked.model_id)
        if asked.seq_id < 1:
            raise ConfigError(f"seq_id must be an integer of at least 1, got {asked.seq_id}.")
        request = Request(key.name, row["session"], row["id"], asked.seq_id, "forward_backward", body)
        try:
            request.payload = await asyncio.to_thread(training_call, asked)
            request.num_tokens = sum(len(example.tokens) for example in request.payload.examples)
        except (ConfigError, DataError) as error:
            request.failure = str(error)
        return await service.accept(request, model_id=row["id"])

    @api.post("/optim_step")
    async def optim_step(body: OptimStep, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", body.model_id)
        return await service.accept_json(key, row, "optim_step", body.seq_id, body, read_adam)

    def check_save(content: dict[str, Any]) -> None:
        check_name(content.setdefault("path", f"step-{content['seq_id']:06d}"))
        check_ttl(content.get("ttl_seconds"))
        if content.get("age_encryption_recipients"):
            raise ConfigError("age_encryption_recipients is not served. Leave it out, and encrypt the files yourself.")

    @api.post("/save_weights")
    async def save_weights(body: SaveWeights, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", body.model_id)
        return await service.accept_json(key, row, "save_weights", body.seq_id, body, check_save)

    @api.post("/save_weights_external")
    async def save_weights_external(body: SaveWeights, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", body.model_id)
        return await service.accept_json(key, row, "save_weights_external", body.seq_id, body, check_save)

    @api.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(body: SaveWeights, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "model", body.model_id)
        sampler = f"{row['session']}:sample:{body.sampling_session_seq_id}"
        # A name that no tenant chooses, and that is the same when the request is repeated.
        folder = f"samplers/{digest(row['id'].encode(), str(body.seq_id).encode())}"

        def check(content: dict[str, Any]) -> None:
            if body.path is None and body.sampling_session_seq_id is None:
                raise ConfigError(
                    "save_weights_for_sampler must have a path or a sampling_session_seq_id, got neither."
                )
            if body.kind != "snapshot":
                raise ConfigError(f"kind must be snapshot, got {shown(body.kind)}. Make a new sampling client instead.")
            if body.path is not None:
                check_save(content)
            else:
                content.update(folder=folder, sampling_session_id=sampler)

        def also(db: Any) -> None:
            if body.path is None and body.kind == "snapshot" and body.sampling_session_seq_id is not None:
                values = sampler, key.name, row["session"], body.sampling_session_seq_id, "", row["id"], folder
                add_sampler(db, values)

        return await service.accept_json(key, row, "save_weights_for_sampler", body.seq_id, body, check, also=also)

    # ------------------------------------------------------------------ sampling

    def add_sampler(db: Any, values: tuple[Any, ...], path: str | None = None) -> None:
        name, _, _, _, sha, _, _ = values
        old = db.execute("SELECT sha FROM samplers WHERE id = ?", (name,)).fetchone()
        if old is not None:
            if sha and old["sha"] == sha:
                return
            raise ConflictError(f"sampling_session_seq_id of {name} was used for another sampling session.")
        columns = "id, key, session, seq, sha, model, folder, path, used"
        db.execute(f"INSERT INTO samplers ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", (*values, path, time.time()))

    @api.post("/create_sampling_session")
    async def create_sampling_session(body: CreateSamplingSession, key: Tenant) -> Any:
        session = ledger.resolve(key.name, "session", body.session_id)
        folder = None
        if body.model_path is not None:
            split_path(body.model_path)
            folder = ledger.resolve(key.name, "checkpoint", body.model_path)["folder"]
        if body.base_model is not None or body.model_path is None:
            served(body.base_model)
        name = f"{session['id']}:sample:{body.sampling_session_seq_id}"
        sha = digest(json.dumps(body.model_dump(), sort_keys=True).encode())
        values = name, key.name, session["id"], body.sampling_session_seq_id, sha, None, folder
        await service.write(lambda db: add_sampler(db, values, body.model_path))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    @api.get("/samplers/{sampler_id}")
    async def get_sampler(sampler_id: str, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "sampler", sampler_id)
        return {"sampler_id": row["id"], "base_model": service.names[0], "model_path": row["path"]}

    @api.post("/asample")
    async def asample(body: Sample, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "sampler", body.sampling_session_id)
        content, num_samples = body.model_dump(exclude_none=True), 1
        raw = json.dumps(content, sort_keys=True).encode()
        request = Request(key.name, row["session"], row["id"], body.seq_id, "asample", raw)
        try:
            request.payload = engine.read_sample(content)
            request.num_tokens, num_samples = request.payload.num_tokens, request.payload.num_samples
        except (ConfigError, DataError) as error:
            request.failure = str(error)
        queued = engine.queued_tokens[key.name]
        if key.max_queued_tokens is not None and queued and queued + request.num_tokens > key.max_queued_tokens:
            reason = f"{queued} tokens of {key.name} are queued, and the limit of the key is {key.max_queued_tokens}."
            raise HTTPException(429, reason, {"retry-after": "1"})
        names = [f"{row['id']}/{body.seq_id}/{number}" for number in range(num_samples)]
        used = time.time()

        def also(db: Any) -> None:
            db.execute("UPDATE samplers SET used = ? WHERE id = ?", (used, row["id"]))

        return await service.accept(request, also, sample_sequence_ids=names)

    # ------------------------------------------------------------------ results

    @api.post("/retrieve_future")
    async def retrieve_future(request_id: Named, key: Tenant) -> Any:
        event = asyncio.Event()
        service.waiting.setdefault(request_id, set()).add(event)
        try:
            row = ledger.resolve(key.name, "request", request_id)
            if row["state"] == QUEUED:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(event.wait(), POLL_S)
                row = ledger.resolve(key.name, "request", request_id)
        finally:
            events = service.waiting[request_id]
            events.discard(event)
            if not events:
                del service.waiting[request_id]
        if row["state"] == QUEUED:
            state, reason = engine.waits_for(request_id)
            body = {"type": "try_again", "request_id": request_id, "queue_state": state, "queue_state_reason": reason}
            return JSONResponse(body, 408)
        if row["state"] == GONE or (row["result"] is None):
            raise HTTPException(410, "the result was deleted: results are kept for a day, or until the session ends.")
        if row["state"] == FAILED:
            return {"error": row["result"].decode(), "category": row["category"]}
        media = _PROTOBUF if row["kind"] in _IN_PROTOBUF else "application/json"
        return Response(row["result"], media_type=media)

    @api.post("/cancel_future")
    async def cancel_future(request_id: Named, key: Tenant) -> Any:
        row = ledger.resolve(key.name, "request", request_id)
        if row["kind"] == "asample" and row["state"] == QUEUED:
            engine.cancel(request_id)
        return {}

    # ------------------------------------------------------------------ checkpoints

    def listed(row: Any) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{row['kind']}/{row['name']}",
            "checkpoint_type": KINDS[row["kind"]],
            "time": _iso(row["created"]),
            "tinker_path": row["id"],
            "size_bytes": row["size_bytes"],
            "public": False,
            "user_metadata": json.loads(row["metadata"] or "null"),
            "expires_at": _iso(row["expires"]),
        }

    def checkpoints_of(where: str, *values: Any) -> list[dict[str, Any]]:
        sql = f"SELECT * FROM checkpoints WHERE {where} AND (expires IS NULL OR expires > ?) ORDER BY created DESC"
        return [listed(row) for row in ledger.read(sql, *values, time.time())]

    def page(rows: list[Any], name: str, limit: int, offset: int) -> dict[str, Any]:
        cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
        return {name: rows[offset : offset + limit], "cursor": cursor}

    checkpoint_url = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

    def run_of(row: Any, key: Key) -> dict[str, Any]:
        config, saved = json.loads(row["config"]), checkpoints_of("model = ?", row["id"])
        newest = {checkpoint["checkpoint_type"]: checkpoint for checkpoint in reversed(saved)}
        return {
            "training_run_id": row["id"],
            "base_model": config["base_model"],
            "model_owner": key.name,
            "is_lora": True,
            "lora_rank": config["rank"],
            "last_request_time": _iso(row["used"]),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": json.loads(row["metadata"] or "null"),
        }

    @api.get("/training_runs")
    async def training_runs(key: Tenant, limit: Limit = 20, offset: Offset = 0) -> Any:
        rows = ledger.read("SELECT * FROM models WHERE key = ? ORDER BY number DESC", key.name)
        listed = page(rows, "training_runs", limit, offset)
        return {**listed, "training_runs": [run_of(row, key) for row in listed["training_runs"]]}

    @api.get("/training_runs/{model_id}")
    async def training_run(model_id: str, key: Tenant) -> Any:
        return run_of(ledger.resolve(key.name, "model", model_id), key)

    @api.get("/training_runs/{model_id}/checkpoints")
    async def checkpoints_of_run(model_id: str, key: Tenant) -> Any:
        ledger.resolve(key.name, "model", model_id)
        return {"checkpoints": checkpoints_of("model = ?", model_id), "cursor": None}

    @api.get("/checkpoints")
    async def checkpoints(key: Tenant, limit: Limit = 100, offset: Offset = 0) -> Any:
        return page(checkpoints_of("key = ?", key.name), "checkpoints", limit, offset)

    @api.delete(checkpoint_url)
    async def delete_checkpoint(saved: Saved) -> Any:
        await service.write(lambda db: db.execute("DELETE FROM checkpoints WHERE id = ?", (saved["id"],)))
        await asyncio.to_thread(shutil.rmtree, service.store / saved["folder"], ignore_errors=True)
        return {}

    @api.put(f"{checkpoint_url}/ttl")
    async def set_ttl(saved: Saved, ttl_seconds: Annotated[int | None, Body(embed=True)] = None) -> Any:
        check_ttl(ttl_seconds)
        until = None if ttl_seconds is None else time.time() + ttl_seconds
        await service.write(
            lambda db: db.execute("UPDATE checkpoints SET expires = ? WHERE id = ?", (until, saved["id"]))
        )
        return {}

    def link_to(http: HttpRequest, path: Path, until: float) -> str:
        link = secrets.token_urlsafe(24)
        service.links[link] = path, until
        return str(http.url_for("download", link=link))

    @api.get(f"{checkpoint_url}/external_weights_urls")
    async def external_weights_urls(saved: Saved, http: HttpRequest) -> Any:
        folder, until = service.store / saved["folder"], time.time() + _LINK_S
        return {"urls": {name: link_to(http, folder / name, until) for name in _ADAPTER_FILES}, "expires": _iso(until)}

    @api.get(f"{checkpoint_url}/archive")
    async def archive(saved: Saved, http: HttpRequest) -> Any:
        until = time.time() + _LINK_S
        return {"url": link_to(http, service.store / saved["folder"], until), "expires": _iso(until)}

    def config_of(model_id: str) -> dict[str, Any]:
        (row,) = ledger.read("SELECT config FROM models WHERE id = ?", model_id)
        return json.loads(row["config"])

    @api.post("/weights_info")
    async def weights_info(tinker_path: Named, key: Tenant) -> Any:
        split_path(tinker_path)
        config = config_of(ledger.resolve(key.name, "checkpoint", tinker_path)["model"])
        flags = {name: config[name] for name in ("train_unembed", "train_mlp", "train_attn")}
        return {"base_model": config["base_model"], "is_lora": True, "lora_rank": config["rank"], **flags}

    @api.get("/status")
    async def status(key: Tenant) -> Any:
        return service.status(key)

    return api


def serve(
    model: str,
    store: Path,
    *,
    names: tuple[str, ...] = (),
    host: str = "127.0.0.1",
    port: int = 8000,
    dtype: str = "auto",
    key: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    **sizes: Any,
) -> None:
    """Serve a model until the process is asked to end.

    Args:
        model: folder or hub id.
        store: folder of the service, which one process holds.
        names: names of the model for clients; by default `model` itself.
        host: address to listen on; other than loopback needs keys.
        port: port to listen on; 0 for a free one.
        dtype: dtype of the model.
        key: a key for development, in addition to those of the store.
        say: called with a line once the model is loaded.
        **sizes: `max_models`, `piece_tokens`, `pass_tokens`, `sample_share` and `max_wait_s`.

    Raises:
        ConfigError: if a setting cannot be used.
        CheckpointError: if the store is another process's, or of another version.
        UnsupportedModelError: if the model cannot be served.
    """
    # An adapter of the output head is an addition to its own logits: the embedding stays as it is.
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    names = names or (model,)
    settings = Settings(names, **sizes)
    if key is not None and not key.startswith("tml-"):
        raise ConfigError("--key must begin with tml-, as clients accept no other keys.")
    lock = FolderLock(store, setting="--store")
    lock.acquire()
    try:
        ledger = Ledger(store)
        is_loopback = host in ("localhost", "::1") or host.startswith("127.")
        if key is None and not is_loopback and not ledger.read("SELECT 1 FROM keys LIMIT 1"):
            raise ConfigError(
                f"--host must be a loopback address while there are no keys, got {host}. Make one: peft-mux keys "
                f"create NAME --store {store}"
            )
        engine = Engine(*load(model, dtype, settings), ledger, store, settings)
        service = Service(engine, model=model, development_key=key)
        # Clients close idle connections themselves before: a request on one that the server closes is lost.
        config = uvicorn.Config(
            make_app(service),
            host=host,
            port=port,
            log_level="warning",
            timeout_keep_alive=75,
            timeout_graceful_shutdown=5,
        )
        service.server = server = uvicorn.Server(config)
        shown_host = f"[{host}]" if ":" in host else host
        say(f"serving {', '.join(names)} on http://{shown_host}:{port} from {store}; Ctrl-C ends it")
        server.run()
        if engine.failure:
            raise PeftMuxError(f"the engine has failed: {engine.failure}. Start again: nothing is lost.")
    finally:
        lock.release()


def load(model: str, dtype: str, settings: Settings) -> tuple[Calls, Any, dict[str, list[str]]]:
    """Return the door to a model, its tokenizer if it has one, and its modules that adapters may have.

    Raises:
        ConfigError: if it cannot be loaded.
        UnsupportedModelError: if it cannot be served.
    """
    try:
        backbone: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"MODEL must be a folder or hub id of a causal language model, got {model} ({error})."
        ) from error
    if torch.cuda.is_available():
        backbone = backbone.cuda()
    modules = modules_of(backbone)
    calls = Calls(backbone, piece_tokens=settings.piece_tokens, pass_tokens=settings.pass_tokens)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError):  # requests with stop strings are then refused
        tokenizer = None
    return calls, tokenizer, modules
