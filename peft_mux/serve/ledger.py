"""The ledger: requests, their results, and whose they are, in one SQLite file of the store.

A request is committed, body included, before its future leaves, and its result before it is answered. Writes of all
threads go through one thread, in which those of 2 ms share one commit (`synchronous=FULL`); answers do not wait, as
those of a pass are one write. A commit that finds no space changes nothing, and its writers get `StoreError`.
"""

from __future__ import annotations

import hashlib
import queue
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from peft_mux.errors import CheckpointError
from peft_mux.storage import crashpoint

T = TypeVar("T")
Write = Callable[[sqlite3.Connection], Any]

VERSION = 1
FILE_NAME = "ledger.sqlite3"
QUEUED, DONE, FAILED, GONE = "queued", "done", "failed", "gone"
"""States of a request; the result of one that is gone was deleted."""
USER, SERVER = "user", "server"
"""Categories of failures."""
_GROUP_S = 0.002
_SCHEMA = """
CREATE TABLE keys (name TEXT PRIMARY KEY, sha TEXT UNIQUE, created REAL, expires REAL, max_models INTEGER,
    max_queued_tokens INTEGER, is_admin INTEGER);
CREATE TABLE sessions (id TEXT PRIMARY KEY, key TEXT, created REAL, seen REAL, finished REAL);
CREATE TABLE models (number INTEGER PRIMARY KEY, id TEXT UNIQUE, key TEXT, session TEXT, config TEXT, created REAL,
    used REAL, is_open INTEGER DEFAULT 1, snapshot INTEGER DEFAULT -1, metadata TEXT);
CREATE TABLE requests (number INTEGER PRIMARY KEY, id TEXT UNIQUE, key TEXT, session TEXT, target TEXT, seq INTEGER,
    kind TEXT, body BLOB, sha TEXT, state TEXT, result BLOB, category TEXT, num_tokens INTEGER,
    trained_tokens INTEGER DEFAULT 0, prompt_tokens INTEGER DEFAULT 0, sampled_tokens INTEGER DEFAULT 0, accepted REAL,
    finished REAL, UNIQUE (target, seq));
CREATE INDEX queued_requests ON requests (number) WHERE state = 'queued';
CREATE TABLE samplers (id TEXT PRIMARY KEY, key TEXT, session TEXT, seq INTEGER, sha TEXT, model TEXT, path TEXT,
    folder TEXT, used REAL);
CREATE TABLE checkpoints (id TEXT PRIMARY KEY, key TEXT, model TEXT, kind TEXT, name TEXT, folder TEXT, created REAL,
    expires REAL, size_bytes INTEGER, metadata TEXT);
"""


class StoreError(Exception):
    """The store cannot be written now, as when its disk is full."""


class ConflictError(Exception):
    """A sequence number that was used for another body."""


class UnknownIdError(Exception):
    """An id that does not exist, or belongs to another tenant."""


def connect(store: Path) -> sqlite3.Connection:
    """Open the ledger of a store, and make it if there is none.

    Raises:
        CheckpointError: if it is of another version, or cannot be opened.
    """
    path = store / FILE_NAME
    try:
        store.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        connection.row_factory = sqlite3.Row
        for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=OFF"):
            connection.execute(f"PRAGMA {setting}")
        connection.execute("BEGIN IMMEDIATE")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == 0 and not connection.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={VERSION}")
            version = VERSION
        connection.execute("COMMIT")
    except (sqlite3.Error, OSError) as error:
        raise CheckpointError(
            f"{path} cannot be opened ({error}). Give a folder that this process may write."
        ) from error
    if version != VERSION:
        raise CheckpointError(
            f"{path} must be of version {VERSION}, got {version}. Serve it with the peft_mux that wrote it, or start "
            "with a new --store."
        )
    return connection


def digest(*parts: bytes) -> str:
    """Return the SHA-256 of some bytes, each with its length."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()


@dataclass(slots=True, eq=False)
class Request:
    """A request on its way into the ledger and through the engine.

    Attributes:
        key: name of the key that asks.
        session: id of its session.
        target: id of its model or sampler.
        seq: its number among the requests of the target.
        kind: what is asked for.
        body: what the engine reads, as it is in the ledger.
        num_tokens: tokens that it computes, for limits and fairness.
        failure: why it cannot be served; it then counts as executed in its turn.
        payload: the body, read.
        id: its id, which the ledger gives.
        is_replay: whether its answer was given before a restart.
        accepted: when it came, by the monotonic clock.
        waits_for: why it waits, as (state, reason) of a poll.
    """

    key: str
    session: str
    target: str
    seq: int
    kind: str
    body: bytes
    num_tokens: int = 0
    failure: str | None = None
    payload: Any = None
    id: str = ""
    is_replay: bool = False
    accepted: float = field(default_factory=time.monotonic)
    waits_for: tuple[str, str] = ("active", "")


class Ledger:
    """The ledger of a store, for all threads of a server.

    Args:
        store: the folder.

    Raises:
        CheckpointError: if it is of another version, or cannot be opened.
    """

    def __init__(self, store: Path) -> None:
        """Open it and start its thread."""
        self._store, self._local = store, threading.local()
        self._connection = connect(store)
        self._writes: queue.SimpleQueue[tuple[Write, Future, bool] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._commit_groups, name="ledger", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Commit what waits, and end."""
        self._writes.put(None)
        self._thread.join()

    def read(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query, of what is committed."""
        if not hasattr(self._local, "connection"):
            self._local.connection = connect(self._store)
        return self._local.connection.execute(sql, values).fetchall()

    def write(self, act: Callable[[sqlite3.Connection], T], *, at_once: bool = False) -> Future[T]:
        """Run statements in the next commit; the future has their result once they are safe on disk.

        `at_once` ends the wait for others that share the commit.

        The future's exception is what `act` has raised, whose statements are then undone, or `StoreError`.
        """
        future: Future[T] = Future()
        self._writes.put((act, future, at_once))
        return future

    def resolve(self, key: str, kind: str, name: str) -> sqlite3.Row:
        """Return what an id stands for: the only way from an id to a thing.

        Args:
            key: name of the key that asks.
            kind: "session", "model", "request", "sampler" or "checkpoint".
            name: the id.

        Raises:
            UnknownIdError: if there is none, or it is another tenant's.
        """
        rows = self.read(f"SELECT * FROM {kind}s WHERE id = ? AND key = ?", name, key)
        if not rows or (kind == "checkpoint" and rows[0]["expires"] is not None and rows[0]["expires"] < time.time()):
            raise UnknownIdError(kind)
        return rows[0]

    def _commit_groups(self) -> None:
        """Commit what arrives within 2 ms together, until the ledger is closed."""
        is_closed = False
        while not is_closed:
            group, until = [self._writes.get()], time.monotonic() + _GROUP_S
            while group[-1] is not None and not group[-1][2] and (left := until - time.monotonic()) > 0:
                try:
                    group.append(self._writes.get(timeout=left))
                except queue.Empty:
                    break
            is_closed = group[-1] is None
            self._commit([write[:2] for write in group if write is not None])
        self._connection.close()

    def _commit(self, group: list[tuple[Write, Future]]) -> None:
        """Run writes in one transaction, and resolve their futures afterwards."""
        results: list[tuple[Future, Any, BaseException | None]] = []
        execute = self._connection.execute
        try:
            execute("BEGIN IMMEDIATE")
            for act, future in group:
                execute("SAVEPOINT one")
                try:
                    results.append((future, act(self._connection), None))
                except sqlite3.OperationalError:
                    raise
                except Exception as error:
                    execute("ROLLBACK TO one")
                    results.append((future, None, error))
                execute("RELEASE one")
            crashpoint("before_commit")
            execute("COMMIT")
            crashpoint("after_commit")
        except sqlite3.OperationalError as error:  # the disk is full, or fails
            if self._connection.in_transaction:
                execute("ROLLBACK")
            failure = StoreError(f"the store cannot be written ({error})")
            results = [(future, None, failure) for _, future in group]
        for future, value, error in results:
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)


def add_request(connection: sqlite3.Connection, new: Request) -> tuple[str, bool]:
    """Add a request; return its id, and whether it is new.

    Raises:
        ConflictError: if the target has another request of this number.
    """
    sha = digest(new.kind.encode(), new.body)
    old = connection.execute(
        "SELECT id, sha, key FROM requests WHERE target = ? AND seq = ?", (new.target, new.seq)
    ).fetchone()
    if old is not None:
        if old["sha"] != sha or old["key"] != new.key:
            raise ConflictError(
                f"seq_id {new.seq} of {new.target} was used for another request. Send each request with a number of "
                "its own, and repeat it unchanged."
            )
        return old["id"], False
    request_id = uuid.uuid4().hex
    connection.execute(
        "INSERT INTO requests (id, key, session, target, seq, kind, body, sha, state, num_tokens, result, category, "
        "accepted) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            request_id, new.key, new.session, new.target, new.seq, new.kind, new.body, sha, QUEUED, new.num_tokens,
            None if new.failure is None else new.failure.encode(), None if new.failure is None else USER, time.time(),
        ),
    )  # fmt: skip
    return request_id, True


def request_of(row: sqlite3.Row, *, is_replay: bool = False) -> Request:
    """Return a row of the ledger as a request."""
    return Request(
        row["key"],
        row["session"],
        row["target"],
        row["seq"],
        row["kind"],
        row["body"] or b"",
        row["num_tokens"],
        failure=row["result"].decode() if row["category"] is not None else None,
        id=row["id"],
        is_replay=is_replay,
    )


def finish_request(
    connection: sqlite3.Connection, request: str, result: bytes, category: str | None = None, **tokens: int
) -> None:
    """Store the result of a request, or why it has failed; one that has its result already keeps it.

    Args:
        connection: of the ledger.
        request: its id.
        result: what is answered; of a failure the reason.
        category: of a failure.
        **tokens: `trained_tokens`, `prompt_tokens` and `sampled_tokens`.
    """
    counts = [tokens.get(name, 0) for name in ("trained_tokens", "prompt_tokens", "sampled_tokens")]
    connection.execute(
        "UPDATE requests SET state = ?, result = ?, category = ?, finished = ?, trained_tokens = ?, prompt_tokens = ?, "
        "sampled_tokens = ? WHERE id = ? AND state = ?",
        (DONE if category is None else FAILED, result, category, time.time(), *counts, request, QUEUED),
    )
