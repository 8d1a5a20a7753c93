"""The engine: one thread that owns the model, and in which the requests of all tenants share passes.

A round of its loop runs the next request of each model: it makes, loads and wakes models, and steps all models that
ask for a step together. Then it computes one pass with at most one piece of each call, and samples for its share of the
time. Models of tenants that have had fewer tokens lately come first. Before a pass it waits a moment for models that
the last pass has answered, so that tenants that train at the same time share all passes.
"""

from __future__ import annotations

import json
import math
import queue
import shutil
import sys
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from peft_mux.calls import AdamSettings, Call, CallFailure, Calls, Example, Frozen
from peft_mux.errors import CheckpointError, ConfigError, DataError, is_integer, is_real, shown
from peft_mux.generation.requests_and_completions import Completion, GenerationRequest
from peft_mux.modeling.sampling import SamplingOptions
from peft_mux.serve.checkpoints import Writer, read_adapter, write_adapter
from peft_mux.serve.ledger import SERVER, USER, Ledger, Request, digest, finish_request, request_of
from peft_mux.serve.losses import example_of, loss_of
from peft_mux.serve.models import Model, Models
from peft_mux.serve.wire import TrainingRequest, read_training_request, write_samples, write_training_result
from peft_mux.storage import crashpoint, remove_stale

_WAVE_S = 0.002
_RETURN_SHARE, _MOST_RETURN_S = 0.25, 0.05
"""How long a pass waits for models that the last one has answered: a share of its time, and the most."""
_HALF_LIFE_S = 60.0
"""Seconds after which tokens of a tenant count half for fairness."""
_PASSES_S = 60.0
_MOST_SAMPLED_TOKENS = 2**16
"""Most tokens of prompts and completions in the batch that is sampled; a larger request is a batch by itself."""


@dataclass(frozen=True)
class Settings:
    """Settings of a service.

    Attributes:
        served_names: names of the base model; the first one is the main one.
        max_models: most models open at once.
        piece_tokens: most tokens of a call in a pass; `None` for the default of `Calls`.
        pass_tokens: most tokens of a pass; `None` for the default of `Calls`.
        sample_share: share of the time for sampling while there is training, too.
        max_wait_s: most seconds that a request waits for an earlier one of its model that has not arrived.
    """

    served_names: tuple[str, ...]
    max_models: int = 64
    piece_tokens: int | None = None
    pass_tokens: int | None = None
    sample_share: float = 0.5
    max_wait_s: float = 600.0


def training_call(request: TrainingRequest) -> Call:
    """Return the call that a training request asks for.

    Raises:
        ConfigError: if its loss or a setting is not served.
        DataError: naming a row that cannot be used.
    """
    loss = loss_of(request.loss_fn, request.loss_fn_config)
    examples = [
        Example(*example_of(row, request.loss_fn, f"data[{number}]")) for number, row in enumerate(request.rows())
    ]
    if not examples:
        raise DataError("data must have at least one row, got none.")

    def guarded(outputs: Any) -> Any:
        crashpoint("mid_pass")
        return loss(outputs)

    return Call(request.model_id, examples, guarded, not request.forward_only)


@dataclass(frozen=True)
class SampleCall:
    """A sampling request, read.

    Attributes:
        prompt: token ids.
        options: how completions are drawn.
        num_samples: number of completions.
        seed: seed of the first completion, the others follow; `None` for one made of the request's id.
        wants_prompt: whether log-probabilities of the prompt are wanted.
        num_scored: of how many of its last tokens.
        prompt_scores: number of likeliest tokens at each of these; `None` if nothing of the prompt is wanted.
        sample_topk: number of likeliest tokens at each token of a completion.
    """

    prompt: list[int]
    options: SamplingOptions
    num_samples: int
    seed: int | None
    wants_prompt: bool
    num_scored: int
    prompt_scores: int | None
    sample_topk: int

    @property
    def num_tokens(self) -> int:
        """Most tokens that it computes."""
        return len(self.prompt) + self.num_samples * self.options.max_new_tokens


def read_sample(body: Mapping[str, Any], context: int | None, num_words: int) -> SampleCall:
    """Read a sampling request.

    Args:
        body: its JSON.
        context: most tokens of a prompt with its completion; `None` for no limit.
        num_words: size of the vocabulary.

    Raises:
        ConfigError: naming the field that cannot be used, or is not served.
    """

    def refuse(where: str, allowed: str, got: Any, fix: str = "") -> NoReturn:
        raise ConfigError(f"{where} must be {allowed}, got {shown(got)}. {fix}".rstrip())

    for name, fix in _NOT_SAMPLED.items():
        if body.get(name):
            refuse(name, "left out", body[name], fix)
    prompt: list[int] = []
    chunks, stop = body["prompt"].get("chunks"), body["sampling_params"].get("stop")
    if not isinstance(chunks, list):
        refuse("prompt.chunks", "a list of chunks", chunks)
    if not isinstance(stop, (str, list, type(None))):
        refuse("sampling_params.stop", "a text, a list of texts, or a list of token ids", stop)
    for number, chunk in enumerate(chunks):
        if not isinstance(chunk, Mapping) or chunk.get("type", "encoded_text") != "encoded_text":
            kind = chunk.get("type") if isinstance(chunk, Mapping) else chunk
            refuse(f"prompt.chunks[{number}]", "text", kind, "Images and audio are not served: send token ids.")
        tokens = chunk.get("tokens")
        if not isinstance(tokens, list) or not all(is_integer(token, 0, num_words - 1) for token in tokens):
            refuse(f"prompt.chunks[{number}].tokens", f"a list of token ids from 0 to {num_words - 1}", tokens)
        prompt += tokens
    if not prompt:
        refuse("prompt", "at least one token", "none")
    given = dict(body["sampling_params"])
    for name in given:
        if name not in _SAMPLING:
            refuse(f"sampling_params.{name}", f"one of {', '.join(_SAMPLING)}", given[name])
    room = _MOST_NEW_TOKENS if context is None else context - len(prompt)
    max_tokens = room if given.get("max_tokens") is None else given["max_tokens"]
    if not is_integer(max_tokens, 1, room):
        allowed = f"an integer from 1 to {room} for {len(prompt)} tokens of prompt and a context of {context}"
        refuse("sampling_params.max_tokens", allowed, max_tokens, "Shorten the prompt." if room < 1 else "")
    num_samples, seed = body.get("num_samples", 1), given.get("seed")
    temperature, top_k, top_p = given.get("temperature", 1.0), given.get("top_k", -1), given.get("top_p", 1.0)
    for name, value, least, most in (
        ("num_samples", num_samples, 1, 1024),
        ("sampling_params.seed", 0 if seed is None else seed, -(2**63), 2**64 - 1),
        ("sampling_params.top_k", top_k, -1, 10**6),
        ("topk_prompt_logprobs", body.get("topk_prompt_logprobs", 0), 0, _MOST_TOPK),
        ("topk_sample_logprobs", body.get("topk_sample_logprobs", 0), 0, _MOST_TOPK),
    ):
        if not is_integer(value, least, most):
            refuse(name, f"an integer from {least} to {most}", value)
    if not is_real(temperature) or temperature < 0:
        refuse("sampling_params.temperature", "a finite number of at least 0", temperature)
    if not is_real(top_p) or not 0 < top_p <= 1:
        refuse("sampling_params.top_p", "above 0 and at most 1", top_p)
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    are_texts = all(isinstance(item, str) and item for item in stops)
    if not are_texts and not all(is_integer(item, 0, _NO_TOKEN) for item in stops):
        refuse("sampling_params.stop", "a text, a list of texts, or a list of token ids", stop)
    wants_prompt, prompt_topk = bool(body.get("prompt_logprobs")), body.get("topk_prompt_logprobs", 0)
    scored = len(prompt) - 1
    if (last := body.get("prompt_logprobs_last_n")) is not None:
        if not wants_prompt or not is_integer(last, 1, len(prompt) - 1):
            refuse("prompt_logprobs_last_n", f"from 1 to {len(prompt) - 1} with prompt_logprobs", last)
        scored = last
    # Settings of draws are refused where the likeliest token is taken, whatever they are.
    draws = {"do_sample": True, "temperature": temperature, "top_k": max(0, top_k), "top_p": top_p}
    options = SamplingOptions(
        max_new_tokens=max_tokens,
        stop_strings=stops if are_texts else (),
        # What is given replaces the end of a text, which then is a token like others.
        eos_token_id=None if stop is None else [_NO_TOKEN] if are_texts else [int(item) for item in stops],
        **(draws if temperature > 0 else {}),
    )
    seed = None if seed is None else seed % 2**63
    scores = prompt_topk if wants_prompt or prompt_topk else None
    return SampleCall(
        prompt, options, num_samples, seed, wants_prompt, scored, scores, body.get("topk_sample_logprobs", 0)
    )


_SAMPLING = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
_NOT_SAMPLED = {
    "target_prompt_logprobs": "Score the tokens with forward and several targets a token.",
    "prompt_alt_tokens_k": "Ask for topk_prompt_logprobs.",
    "record_stability_info": "It belongs to stable_reinforce, which is not served. Use importance_sampling.",
    "base_model": "Make a sampling session.",
    "model_path": "Make a sampling session.",
}
_MOST_NEW_TOKENS, _MOST_TOPK = 2**20, 128
_NO_TOKEN = 10**6
"""No vocabulary has it."""


def read_adam(body: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of a step.

    Raises:
        ConfigError: naming what is not served.
    """
    given = next((body[name] for name in ("adam_params", "optimizer_params", "optim_params") if body.get(name)), {})
    names = {"grad_clip_norm": "max_grad_norm"}
    if given.get("type", "adamw") != "adamw":
        raise ConfigError(f"optimizer_params.type must be adamw, got {shown(given['type'])}. Use tinker.AdamParams.")
    known = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    for name in given:
        if name not in (*known, "type"):
            raise ConfigError(f"adam_params.{name} must be one of {', '.join(known)}, got {shown(given[name])}.")
    return AdamSettings(
        **{"learning_rate": 1e-4, **{names.get(name, name): given[name] for name in known if name in given}}
    )


def _in_words_of_clients(reason: str, model: Model) -> str:
    """Return a reason with the places of a request's body in place of those of `Calls`."""
    reason = reason.replace(f"calls.{model.name}.examples", "data")
    return reason.replace(f"tasks.{model.name}.peft_config.r", "lora_config.rank")


class Engine:
    """Serves a base model in a thread of its own.

    Args:
        calls: the door to the model.
        tokenizer: for stop strings; `None` without one.
        modules: the backbone's modules, from `modules_of`.
        ledger: the ledger of the store.
        store: folder of the service.
        settings: see `Settings`.

    Attributes:
        notify: called with ids of requests that are answered, from any thread; with none after a failure of the engine.
        context: most tokens of a prompt with its completion; `None` for no limit.
        num_words: size of the vocabulary.
        requests: requests that are not answered, by id.
        queued_tokens: their tokens by tenant.
        passes: end, seconds, models and finished tokens of each pass of the last minute.
        failure: what has ended the engine; "" before.
    """

    def __init__(
        self,
        calls: Calls,
        tokenizer: Any,
        modules: dict[str, list[str]],
        ledger: Ledger,
        store: Path,
        settings: Settings,
    ) -> None:
        self._calls, self.modules, self.ledger, self.store, self.settings = calls, modules, ledger, store, settings
        self.notify: Callable[[list[str]], None] = lambda ids: None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.writer = Writer()
        self.models = Models(calls, ledger, self.writer, store, modules, settings.max_models, self._inbox.put)
        config = calls.model.backbone.config.get_text_config()
        self.context: int | None = getattr(config, "max_position_embeddings", None)
        self.num_words: int = config.vocab_size
        self._finished: list[tuple[Request, bytes, str | None, dict[str, int]]] = []
        self._usage: dict[str, float] = {}
        self._usage_at = time.monotonic()
        self.requests: dict[str, Request] = {}
        self.queued_tokens, self._running_tokens = Counter[str](), Counter[str]()  # by tenant
        self._tokenizer, self._sampling = tokenizer, calls.sampling(tokenizer)
        self._answered: list[Model] = []
        self._rows: dict[int, tuple[Request, int]] = {}
        self._ended: dict[str, dict[int, Completion]] = {}
        self._waiting: list[Request] = []
        self._joining: list[Request] = []
        self._most_sampled_tokens = _MOST_SAMPLED_TOKENS
        self.passes = deque[tuple[float, float, int, int]]()
        self.failure = ""
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ other threads

    def start(self) -> None:
        """Clean up after a crash, queue what the ledger has, and start."""
        for folder in (self.store / "checkpoints", self.store / "samplers", *(self.store / "models").glob("*")):
            if folder.is_dir():
                remove_stale(folder)
        for row in self.ledger.read("SELECT * FROM requests WHERE state = 'queued' ORDER BY number"):
            self.put(request_of(row))
        self._thread.start()

    def put(self, request: Request) -> None:
        """Take a request that is in the ledger."""
        self._inbox.put(lambda: self._enqueue(request))

    def nudge(self) -> None:
        """Look again at what waits, as a limit may have changed."""
        self._inbox.put(lambda: None)

    def stop(self) -> None:
        """Write the state of each open model, and end."""

        def end() -> None:
            self._is_stopping = True

        self._inbox.put(end)
        self._thread.join()
        self.writer.close()

    def waits_for(self, request_id: str) -> tuple[str, str]:
        """Return the state of a request that is not answered, and why it waits, as polls report it."""
        request = self.requests.get(request_id)
        if self.writer.reason or request is None:
            return "paused_capacity" if self.writer.reason else "active", self.writer.reason
        model = self.models.by_id.get(request.target)
        if model is not None and request.seq > model.next_seq:
            missing = "" if model.next_seq in model.queue or model.running else ", which has not arrived"
            return request.waits_for[0], f"request {model.next_seq} of the model comes first{missing}"
        return request.waits_for

    # ------------------------------------------------------------------ the loop

    def _run(self) -> None:
        try:
            did_something, earned_s = True, 0.0
            while not self._is_stopping:
                self._drain(wait=not did_something)
                start = time.perf_counter()
                did_something = self._run_next_requests()
                self._flush()  # the answers of steps do not wait for a pass
                if self._await_answered_models():
                    self._run_next_requests()
                did_something |= self._run_pass()
                # Sampling spends the seconds that it has earned while there was training.
                share, seconds = self.settings.sample_share, time.perf_counter() - start
                earned_s = earned_s + seconds * share / (1 - share) if did_something else 0.0
                start = time.perf_counter()
                if (self._waiting or self._rows) and earned_s >= 0.0:
                    did_something |= self._sample(earned_s)
                    earned_s -= time.perf_counter() - start
                self._flush()
                self._end_overdue()
                self.models.age_snapshots()
                self.models.forget_idle()
            for model in self.models.open_models:
                if model.is_dirty and not model.running:
                    self.models.snapshot(model, model.next_seq - 1)
        except BaseException as error:  # a bug, or the device: the process ends, and the ledger has everything
            traceback.print_exc(file=sys.stderr)
            self.failure = f"{type(error).__name__}: {error}"
            self.notify([])

    def _drain(self, *, wait: bool) -> None:
        """Run what other threads have handed in; an idle engine waits for it, and then 2 ms for more."""
        until = None
        while True:
            try:
                if until is not None:
                    act = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
                elif wait:
                    act = self._inbox.get(timeout=1.0)
                    until = time.monotonic() + _WAVE_S
                else:
                    act = self._inbox.get_nowait()
            except queue.Empty:
                return
            act()

    def _await_answered_models(self) -> bool:
        """Wait a moment for the models that the last pass has answered, if there is a next pass; return if one came."""
        if not self._answered or not any(model.running for model in self.models.open_models):
            return False
        missing, self._answered = [model for model in self._answered if not (model.queue or model.running)], []
        num_missing, until = len(missing), time.monotonic() + min(_RETURN_SHARE * self.passes[-1][1], _MOST_RETURN_S)
        while missing and (left := until - time.monotonic()) > 0:
            try:
                self._inbox.get(timeout=left)()
            except queue.Empty:
                break
            missing = [model for model in missing if not model.queue]
        return len(missing) < num_missing

    def _enqueue(self, request: Request) -> None:
        self.requests[request.id] = request
        self.queued_tokens[request.key] += request.num_tokens
        if request.kind == "asample":
            self._waiting.append(request)
        else:
            self.models.get(request.target).queue[request.seq] = request

    def _finish(self, request: Request, result: bytes | Any, category: str | None = None, **tokens: int) -> None:
        """Answer a request; the answer of one that runs again was given already."""
        self._forget(request)
        if not request.is_replay:
            payload = result if isinstance(result, bytes) else json.dumps(result).encode()
            self._finished.append((request, payload, category, tokens))

    def _forget(self, request: Request) -> None:
        """Drop a request that is answered, or will be by the writer."""
        if self.requests.pop(request.id, None) is not None:
            self.queued_tokens[request.key] -= request.num_tokens
            self.queued_tokens += Counter()  # without zeros

    def _fail(self, request: Request, reason: str, category: str = USER) -> None:
        self._finish(request, reason.encode(), category)

    def _flush(self) -> None:
        """Commit the answers of this round, and notify who waits for them."""
        batch, self._finished = self._finished, []
        if batch:
            crashpoint("before_result")
            self._commit(batch)

    def _commit(self, batch: list[tuple[Request, bytes, str | None, dict[str, int]]]) -> None:
        def write(connection: Any) -> None:
            for request, result, category, tokens in batch:
                finish_request(connection, request.id, result, category, **tokens)
                if not request.body:
                    connection.execute("UPDATE requests SET body = NULL WHERE id = ?", (request.id,))

        def after(future: Future[None]) -> None:
            if future.exception() is None:
                self.notify([request.id for request, *_ in batch])
            else:  # no space: the answers wait in memory until there is some
                threading.Timer(1.0, self._commit, [batch]).start()

        self.ledger.write(write, at_once=True).add_done_callback(after)

    # ------------------------------------------------------------------ models

    def _by_fairness(self, models: Iterable[Model]) -> list[Model]:
        """Return models of tenants with fewer tokens of late first."""
        now = time.monotonic()
        decay, self._usage_at = 0.5 ** ((now - self._usage_at) / _HALF_LIFE_S), now
        self._usage = {key: tokens * decay for key, tokens in self._usage.items() if tokens > 1.0}
        return sorted(models, key=lambda model: self._usage.get(model.key, 0.0))

    def _run_next_requests(self) -> bool:
        """Run the next requests of all models, and begin their calls; return whether anything was done."""
        did_something = False
        steps: dict[str, tuple[Model, Request, AdamSettings]] = {}
        for model in self._by_fairness(model for model in self.models.by_id.values() if model.queue or model.is_wanted):
            while not model.running and model.name not in steps:
                if not model.is_open and not model.has_tail:
                    if model.opened and model.next_seq not in model.queue and not model.is_wanted:
                        break  # at rest, and the request whose turn it is has not arrived
                    if not self._has_place(next(iter(model.queue.values()), None)):
                        break
                    self.models.wake(model)
                    did_something = True
                model.is_wanted = False
                request = model.queue.get(model.next_seq)
                if request is None or not self._may_run(request) or not self._run_request(model, request, steps):
                    break
                did_something = True
        if steps:
            self._step_together(steps)
        return did_something

    def _run_request(self, model: Model, request: Request, steps: dict[str, Any]) -> bool:
        """Run a request whose turn it is, or begin its call; return `False` if it must wait."""
        # A step that had failed may have dropped gradients, so it runs again; one without its body has never run.
        is_step_again = request.is_replay and request.kind == "optim_step" and request.body
        failure = model.failure or (None if is_step_again else request.failure)
        try:
            if failure is not None:
                raise ConfigError(failure)
            if request.seq == 0 and not (self._has_place(request) and self._may_open(model, request)):
                return False  # it makes the model
            if request.kind == "forward_backward":
                request.payload = call = request.payload or training_call(read_training_request(request.body))
                if call.backward or not request.is_replay:
                    self._calls.submit(replace(call, model=model.name))
                    model.running = request
                    self._running_tokens[model.key] += request.num_tokens
                    return True
            elif request.kind == "optim_step":
                steps[model.name] = model, request, read_adam(json.loads(request.body))
                return True
            else:
                self._HANDLERS[request.kind](self, model, request, json.loads(request.body))
        except (ConfigError, DataError, CheckpointError) as error:
            reason = _in_words_of_clients(str(error), model)
            self._fail(request, reason, SERVER if isinstance(error, CheckpointError) else USER)
            if request.seq == 0:
                model.failure = model.failure or f"the model was not made: {reason}"
                self.ledger.write(lambda db: db.execute("UPDATE models SET is_open = 0 WHERE id = ?", (model.id,)))
        except Exception as error:  # a bug of ours, which must not come back at each restart
            traceback.print_exc(file=sys.stderr)
            self._fail(request, f"the server has failed: {type(error).__name__}: {error}", SERVER)
        self._end_turn(model)
        return True

    def _end_turn(self, model: Model) -> None:
        """Remove the request whose turn it is; the next one follows."""
        model.queue.pop(model.next_seq)
        model.next_seq += 1
        model.used = time.monotonic()

    def _end_overdue(self) -> None:
        """Answer requests that have waited too long for an earlier one of their model that has not arrived.

        In their turn, should that one arrive yet, they count as executed.
        """
        now_s = time.monotonic()
        for model in self.models.by_id.values():
            # Before it wakes, the requests behind its snapshot are missing, too.
            if model.running or model.next_seq in model.queue or not (model.has_tail or model.opened):
                continue
            for request in model.queue.values():
                if not request.is_replay and now_s - request.accepted > self.settings.max_wait_s:
                    request.failure = (
                        f"request {model.next_seq} of the model, which comes first, has not arrived in "
                        f"{self.settings.max_wait_s:g} s. Send it, or load a checkpoint into a new model."
                    )
                    request.body, request.payload = b"", None  # it does not run after a restart either
                    self._fail(request, request.failure)
                    request.is_replay = True

    def _has_place(self, request: Request | None) -> bool:
        if self.models.has_place(0.0 if request is None else time.monotonic() - request.accepted):
            return True
        if request is None:
            return False
        reason = f"{self.settings.max_models} models have work, which is all that are open at once (--max-models)"
        request.waits_for = ("paused_capacity", reason)
        return False

    def _may_run(self, request: Request) -> bool:
        """Whether the tokens of a tenant's calls that run are below its limit."""
        _, limit = self._limits(request.key)
        running = self._running_tokens[request.key]
        if limit is not None and not request.is_replay and running >= limit:
            reason = f"{running} tokens of {request.key} run, and the limit of the key is {limit}"
            request.waits_for = ("paused_rate_limit", reason)
            return False
        request.waits_for = ("active", "")
        return True

    def _may_open(self, model: Model, request: Request) -> bool:
        """Whether a tenant has fewer open models than its limit."""
        limit, _ = self._limits(model.key)
        if limit is None or request.is_replay:
            return True
        sql = "SELECT count(*) FROM models WHERE key = ? AND is_open AND number < ?"
        ((count,),) = self.ledger.read(sql, model.key, model.number)
        if count < limit:
            return True
        reason = f"{model.key} has {count} open models, the limit of the key; finish a session, or unload a model"
        request.waits_for = ("paused_capacity", reason)
        return False

    def _limits(self, key: str) -> tuple[int | None, int | None]:
        """Return the limits of a key: models that it may have open, and tokens of its calls that may run."""
        rows = self.ledger.read("SELECT max_models, max_queued_tokens FROM keys WHERE name = ?", key)
        return tuple(rows[0]) if rows else (None, None)

    def _create(self, model: Model, request: Request, body: Mapping[str, Any]) -> None:
        self.models.open(model)
        self._finish(request, {"type": "create_model", "model_id": model.id})

    def _load(self, model: Model, request: Request, body: Mapping[str, Any]) -> None:
        """Load a checkpoint into a new model, which is open already if it was made by a request of its own."""
        row = self.ledger.read("SELECT * FROM checkpoints WHERE id = ? AND key = ?", body["path"], model.key)
        if not row:
            raise ConfigError(f"path must be a checkpoint that exists, got {shown(body['path'])}, which was deleted.")
        state, facts = read_adapter(self.store / row[0]["folder"])
        for name in ("rank", "train_attn", "train_mlp", "train_unembed"):
            if facts["config"][name] != getattr(model.config, name):
                got = f"{getattr(model.config, name)} of the model and {facts['config'][name]} of {body['path']}"
                raise ConfigError(f"lora_config.{name} must be that of the checkpoint, got {got}.")
        if body["optimizer"] and not state.settings:
            raise ConfigError(f"{body['path']} has no optimizer. Save with save_state, or load without the optimizer.")
        if not model.is_open:
            self.models.open(model)
        self.models.restore(model, state, only_weights=not body["optimizer"])
        # It is answered once a snapshot has what was loaded: the checkpoint may be deleted at any time.
        result = json.dumps({"type": "load_weights", "path": body["path"], "model_id": model.id}).encode()
        self.models.snapshot(model, request.seq, lambda db: finish_request(db, request.id, result))
        self.writer.put(lambda: self.notify([request.id]))
        self._forget(request)

    # ------------------------------------------------------------------ passes and steps

    def _step_together(self, steps: Mapping[str, tuple[Model, Request, AdamSettings]]) -> None:
        """Step models together, and answer."""
        norms = self._calls.step({name: settings for name, (_, _, settings) in steps.items()})
        crashpoint("mid_step")
        for name, (model, request, _) in steps.items():
            norm = norms[name]
            if isinstance(norm, CallFailure):
                self._fail(request, norm.reason, USER if norm.is_callers else SERVER)
            else:
                self._finish(request, {"type": "optim_step", "metrics": {"grad_norm:mean": norm}})
            self._end_turn(model)

    def _run_pass(self) -> bool:
        """Compute one pass of the calls that run, and answer those that it ends; return whether there was one."""
        running = {model.name: model for model in self._by_fairness(self.models.open_models) if model.running}
        if not running:
            return False
        start = time.perf_counter()
        results = self._calls.advance(list(running))
        seconds = time.perf_counter() - start
        num_tokens = 0
        for name, model in running.items():
            model.pass_s += seconds
            if (result := results.get(name)) is None:
                continue
            request, model.running = model.running, None
            self._answered.append(model)
            assert request is not None
            num_tokens += request.num_tokens
            self._running_tokens[model.key] -= request.num_tokens
            if isinstance(result, CallFailure):
                reason = _in_words_of_clients(result.reason, model)
                self._fail(request, reason, USER if result.is_callers else SERVER)
            else:
                output = write_training_result(result.loss, result.logprobs)
                if request.payload.backward:
                    self._finish(request, output, trained_tokens=request.num_tokens)
                else:
                    self._finish(request, output, prompt_tokens=request.num_tokens)
            if request.is_replay:
                crashpoint("mid_replay")
            self._usage[model.key] = self._usage.get(model.key, 0.0) + request.num_tokens
            self._end_turn(model)
        now_s = time.monotonic()
        self.passes.append((now_s, seconds, len(running), num_tokens))
        while self.passes[0][0] < now_s - _PASSES_S:
            self.passes.popleft()
        return True

    # ------------------------------------------------------------------ sampling

    def _weights(self, request: Request) -> tuple[bool, Frozen | None]:
        """Return whether the weights that a request samples from are there, and these; `None` for the base model.

        Raises:
            ConfigError: if they were deleted.
            CheckpointError: if their files are damaged.
        """
        rows = self.ledger.read("SELECT model, folder FROM samplers WHERE id = ?", request.target)
        if not rows:
            raise ConfigError("the sampling session has ended. Make a new sampling client.")
        (model_id, name) = rows[0]
        if name is None:
            return True, None
        # A name without a folder stands for weights that were never saved under a path.
        frozen = self.models.frozen(self.store / name)
        if frozen is not None:
            return True, frozen
        model = None if model_id is None else self.models.get(model_id)
        # Requests that fail make no weights.
        if model is None or (
            model.has_tail and not model.running and all(queued.failure is not None for queued in model.queue.values())
        ):
            raise ConfigError("the weights of the sampling session were deleted. Save them again.")
        model.is_wanted = True  # after a restart, its replay makes them again
        return False, None

    def _sample(self, seconds: float) -> bool:
        """Add requests to the batch that is sampled, and advance it for some seconds; return whether there was one."""
        until = time.perf_counter() + seconds
        try:
            self._join_rows()
            while self._rows:
                for number, completion in self._sampling.advance().items():
                    request, place = self._rows.pop(number)
                    ended = self._ended.setdefault(request.id, {})
                    ended[place] = completion
                    if len(ended) == request.payload.num_samples:
                        del self._ended[request.id]
                        self._answer(request, [ended[place] for place in sorted(ended)])
                if time.perf_counter() >= until:
                    return True
        except Exception as error:
            is_shortage = isinstance(error, (MemoryError, torch.OutOfMemoryError))
            # After a fault of a device nothing is known of its memory.
            if not is_shortage and isinstance(error, RuntimeError) and self._calls.model.device.type != "cpu":
                raise
            # All begin again, with the same seeds, in batches of half the tokens: at last the cause is by itself.
            sampled = (request for request, _ in self._rows.values())
            requests = {request.id: request for request in (*self._joining, *sampled)}
            if not requests:
                raise
            self._sampling.cancel(self._sampling.numbers)
            self._rows, self._ended, self._joining = {}, {}, []
            self._most_sampled_tokens = sum(request.num_tokens for request in requests.values()) // 2
            self._waiting = [*requests.values(), *(waiting for waiting in self._waiting if waiting.id not in requests)]
            if len(requests) == 1:
                request = self._waiting.pop(0)
                if is_shortage:
                    self._fail(request, f"the request does not fit into memory ({error}). Ask for fewer tokens.")
                else:
                    traceback.print_exc(file=sys.stderr)
                    self._fail(request, f"the server has failed: {type(error).__name__}: {error}", SERVER)
                    self._most_sampled_tokens = _MOST_SAMPLED_TOKENS
            return True
        return bool(self._finished)

    def _join_rows(self) -> None:
        """Add the requests that wait to the batch, as many as its tokens allow."""
        chosen: list[tuple[Frozen | None, GenerationRequest]] = []
        places: list[tuple[Request, int]] = []
        num_tokens = sum({request.id: request.num_tokens for request, _ in self._rows.values()}.values())
        for request in sorted(self._waiting, key=lambda request: self._usage.get(request.key, 0.0)):
            try:
                if request.failure is not None:
                    raise ConfigError(request.failure)
                is_there, weights = self._weights(request)
            except (ConfigError, CheckpointError) as error:
                self._fail(request, str(error), SERVER if isinstance(error, CheckpointError) else USER)
                self._waiting.remove(request)
                continue
            if not is_there or (num_tokens and num_tokens + request.num_tokens > self._most_sampled_tokens):
                continue
            self._joining.append(request)
            call = request.payload = request.payload or self.read_sample(json.loads(request.body))
            first = int(digest(request.id.encode())[:15], 16) if call.seed is None else call.seed
            for place in range(call.num_samples):
                # Only the first row needs what is of the prompt.
                scores = {"top_logprobs": call.sample_topk, "prompt_logprobs": None if place else call.prompt_scores}
                seed, given = (first + place) % 2**63, {"prompt": call.prompt, "options": call.options}
                chosen.append((weights, GenerationRequest(task="sample", seed=seed, **given, **scores)))
                places.append((request, place))
            num_tokens += request.num_tokens
        if chosen:
            self._rows |= zip(self._sampling.add(chosen), places, strict=True)
            self._waiting = [request for request in self._waiting if request not in self._joining]
            self._joining = []

    def _answer(self, request: Request, rows: Sequence[Completion]) -> None:
        """Answer a request whose rows have all ended."""
        call: SampleCall = request.payload
        num_sampled = sum(len(row.token_ids) for row in rows)
        self._usage[request.key] = self._usage.get(request.key, 0.0) + len(call.prompt) + num_sampled
        # What a lack of memory has lowered grows again with what fits.
        self._most_sampled_tokens = min(self._most_sampled_tokens + request.num_tokens, _MOST_SAMPLED_TOKENS)
        if any(row.finish_reason == "non_finite" for row in rows):
            self._fail(request, "the logits of the model are not finite. Sample from other weights.")
            return
        skipped = len(call.prompt) - call.num_scored
        scores = [math.nan if logprob is None else logprob for logprob in rows[0].prompt_logprobs]
        topk = [None if place < skipped or not top else top for place, top in enumerate(rows[0].prompt_top_logprobs)]
        output = write_samples(
            [
                (
                    row.finish_reason == "stop",
                    row.token_ids,
                    row.logprobs,
                    row.top_logprobs if call.sample_topk else None,
                )
                for row in rows
            ],
            [math.nan] * skipped + scores[skipped:] if call.wants_prompt else None,
            topk if call.prompt_scores else None,
        )
        self._finish(request, output, prompt_tokens=len(call.prompt), sampled_tokens=num_sampled)

    def read_sample(self, body: Mapping[str, Any]) -> SampleCall:
        """Read a sampling request for this model; see `read_sample`."""
        call = read_sample(body, self.context, self.num_words)
        if call.options.stop_strings and self._tokenizer is None:
            raise ConfigError("sampling_params.stop must be token ids, as the model has no tokenizer, got texts.")
        return call

    def cancel(self, request_id: str) -> None:
        """End a sampling request whose result is not wanted any more."""

        def act() -> None:
            request = self.requests.get(request_id)
            if request is None:
                return
            numbers = [number for number, (sampled, _) in self._rows.items() if sampled is request]
            self._sampling.cancel(numbers)
            for number in numbers:
                del self._rows[number]
            self._ended.pop(request_id, None)
            if request in self._waiting:
                self._waiting.remove(request)
            self._fail(request, "the request was cancelled.")

        self._inbox.put(act)

    # ------------------------------------------------------------------ checkpoints

    def _save(self, model: Model, request: Request, body: Mapping[str, Any]) -> None:
        """Write a checkpoint, and answer once it is safe on disk."""
        if request.is_replay:
            return
        kind = {"save_weights": "weights", "save_weights_for_sampler": "sampler_weights"}.get(request.kind)
        kind, name = kind or "external_weights", body["path"]
        path, folder = f"tinker://{model.id}/{kind}/{name}", f"checkpoints/{uuid.uuid4().hex}"
        # Gradients that wait for a step are no part of a checkpoint.
        state, lora = replace(self._calls.state(model.name), copies={}), model.config.lora(self.modules)
        ttl_s, metadata = body.get("ttl_seconds"), json.dumps(body.get("user_metadata"))

        def write() -> None:
            facts = {"path": path, "config": vars(model.config)}
            size = write_adapter(self.store / folder, lora, state, facts, with_state=kind == "weights")
            now = time.time()

            def commit(connection: Any) -> str | None:
                old = connection.execute("SELECT folder, expires FROM checkpoints WHERE id = ?", (path,)).fetchone()
                is_live = old is not None and (old["expires"] is None or old["expires"] > now)
                if is_live and not body.get("overwrite"):
                    reason = f"path {name} must be new, as {path} exists. Save with overwrite=True, or another name."
                    finish_request(connection, request.id, reason.encode(), USER)
                    return folder
                values = path, model.key, model.id, kind, name, folder, now, ttl_s and now + ttl_s, size, metadata
                connection.execute(f"INSERT OR REPLACE INTO checkpoints VALUES ({', '.join('?' * 10)})", values)
                finish_request(connection, request.id, json.dumps({"type": request.kind, "path": path}).encode())
                return old and old["folder"]

            if (unused := self.ledger.write(commit).result()) is not None:
                shutil.rmtree(self.store / unused, ignore_errors=True)
            self.notify([request.id])

        self._forget(request)
        self.writer.put(write)

    def _save_for_sampler(self, model: Model, request: Request, body: Mapping[str, Any]) -> None:
        """Copy weights for sampling; the answer waits for the disk only where a path was asked for."""
        if body.get("path") is not None:
            self._save(model, request, body)
            return
        folder = self.store / body["folder"]
        is_wanted = self.ledger.read("SELECT 1 FROM samplers WHERE id = ?", body["sampling_session_id"])
        if is_wanted and not folder.exists():
            self.models.freeze(model, folder)
        self._finish(request, {"type": request.kind, "sampling_session_id": body["sampling_session_id"]})

    _HANDLERS: ClassVar[dict[str, Callable[..., None]]] = {
        "create_model": _create,
        "load_weights": _load,
        "save_weights": _save,
        "save_weights_external": _save,
        "save_weights_for_sampler": _save_for_sampler,
    }
