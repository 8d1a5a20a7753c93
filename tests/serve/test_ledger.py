"""The ledger and its keys: versions, group commits, repeated requests, a full disk, and who owns what."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.serve import ledger as module
from peft_mux.serve.keys import Key, UnknownKeyError, create_key, find_key, list_keys, revoke_key
from peft_mux.serve.ledger import (
    ConflictError,
    Ledger,
    Request,
    StoreError,
    UnknownIdError,
    add_request,
    finish_request,
)
from tests.shell import Shell


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    own = Ledger(tmp_path)
    yield own
    own.close()


def request(seq: int, body: bytes = b"a", key: str = "alice", target: str = "m") -> Request:
    return Request(key, "s", target, seq, "forward_backward", body)


def test_a_store_of_another_version_is_refused_by_its_version(tmp_path: Path) -> None:
    Ledger(tmp_path).close()
    with closing(sqlite3.connect(tmp_path / module.FILE_NAME)) as other:
        other.execute("PRAGMA user_version=7")
    with pytest.raises(CheckpointError, match="must be of version 1, got 7"):
        Ledger(tmp_path)


def test_the_same_request_again_is_the_same_future_and_other_content_is_a_conflict(ledger: Ledger) -> None:
    first, is_new = ledger.write(lambda db: add_request(db, request(1))).result()
    assert is_new
    assert ledger.write(lambda db: add_request(db, request(1))).result() == (first, False)
    for other in (request(1, b"b"), request(1, key="bob")):
        with pytest.raises(ConflictError, match="seq_id 1 of m was used for another request"):
            ledger.write(lambda db, other=other: add_request(db, other)).result()
    assert ledger.write(lambda db: add_request(db, request(1, target="n"))).result()[1]
    ledger.write(lambda db: finish_request(db, first, b"result", trained_tokens=3)).result()
    ledger.write(lambda db: finish_request(db, first, b"a replay", trained_tokens=3)).result()
    row = ledger.resolve("alice", "request", first)
    assert (row["state"], row["result"], row["trained_tokens"]) == ("done", b"result", 3)
    with pytest.raises(UnknownIdError):
        ledger.resolve("bob", "request", first)


def test_writes_that_arrive_together_share_a_commit_and_one_that_fails_undoes_itself_alone(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = []
    ledger.write(
        lambda db: db.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    ).result()
    commits.clear()
    gate = threading.Event()
    held = ledger.write(lambda db: gate.wait(10))
    time.sleep(0.02)

    def fail(db: sqlite3.Connection) -> None:
        add_request(db, request(99))
        raise ValueError("mine")

    futures = [ledger.write(lambda db, seq=seq: add_request(db, request(seq))) for seq in range(8)]
    failing = ledger.write(fail)
    gate.set()
    assert held.result()
    assert all(future.result()[1] for future in futures)
    with pytest.raises(ValueError, match="mine"):
        failing.result()
    assert len(commits) == 2
    assert [row["seq"] for row in ledger.read("SELECT seq FROM requests ORDER BY seq")] == list(range(8))
    monkeypatch.setattr(module, "_GROUP_S", 600.0)
    waiting = ledger.write(lambda db: None)
    ledger.write(lambda db: None, at_once=True).result(60)
    assert (waiting.done(), len(commits)) == (True, 3)


def test_a_full_disk_changes_nothing_and_the_ledger_continues_once_there_is_room(ledger: Ledger, disk) -> None:
    ledger.write(lambda db: add_request(db, request(1))).result()
    disk(200_000)
    with pytest.raises(StoreError, match="the store cannot be written"):
        ledger.write(lambda db: add_request(db, request(2, bytes(2**20)))).result()
    disk(None)
    assert [row["seq"] for row in ledger.read("SELECT seq FROM requests")] == [1]
    assert ledger.write(lambda db: add_request(db, request(2, bytes(2**20)))).result()[1]


def test_a_key_is_stored_as_its_digest_and_expires(ledger: Ledger, tmp_path: Path) -> None:
    assert find_key(ledger, None, None).name == "local"  # a server without keys
    alice = create_key(tmp_path, "alice", max_models=2, max_queued_tokens=1000)
    assert (alice[:4], len(alice)) == ("tml-", 36)
    assert alice.encode() not in b"".join(path.read_bytes() for path in tmp_path.glob("ledger*"))
    assert find_key(ledger, alice, None) == Key("alice", 2, 1000)
    assert find_key(ledger, "tml-dev", "tml-dev").is_admin
    old = create_key(tmp_path, "bob", days=1e-9)
    for given, words in ((None, "got none"), ("tml-other", "an unknown one"), (old, "has expired")):
        with pytest.raises(UnknownKeyError, match=words):
            find_key(ledger, given, None)
    revoke_key(tmp_path, "alice")
    with pytest.raises(UnknownKeyError):
        find_key(ledger, alice, None)
    assert [row["name"] for row in list_keys(tmp_path)] == ["bob"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": "a/b"}, "the name of a key must be"),
        ({"name": "local"}, "and not local"),
        ({"name": "twice"}, "exists already"),
        ({"name": "a", "max_models": 0}, "--max-models must be above 0"),
        ({"name": "a", "days": -1.0}, "--days must be above 0"),
    ],
)
def test_a_key_that_cannot_be_made_is_refused(tmp_path: Path, settings: dict, words: str) -> None:
    create_key(tmp_path, "twice")
    with pytest.raises(ConfigError, match=words):
        create_key(tmp_path, **settings)


def test_the_command_makes_lists_and_revokes_keys(shell: Shell, tmp_path: Path) -> None:
    made = shell("keys", "create", "alice", "--store", tmp_path, "--max-models", 3).strip()
    assert made.splitlines()[-1].startswith("tml-")
    listed = shell("keys", "list", "--store", tmp_path)
    assert listed.splitlines() == ["alice  models 3"]
    shell("keys", "revoke", "alice", "--store", tmp_path)
    assert "there are: none" in shell.refused("keys", "revoke", "alice", "--store", tmp_path)
