"""Keys of tenants: made here, stored as SHA-256, and found again for each request.

All that a tenant owns belongs to the name of its key, so a new key of that name is the same tenant.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import sqlite3
import string
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from peft_mux.errors import ConfigError, shown
from peft_mux.serve.ledger import Ledger, connect

_ALPHABET = string.ascii_letters + string.digits
LOCAL = "local"
"""The tenant of a server without keys, and of `--key`."""


@dataclass(frozen=True, slots=True)
class Key:
    """A tenant.

    Attributes:
        name: its name.
        max_models: most models that it may have open; `None` for no limit.
        max_queued_tokens: most tokens that may wait or run: beyond it samples are refused, and calls wait until others
            have ended; `None` for no limit.
        is_admin: whether it sees the usage of all.
    """

    name: str
    max_models: int | None = None
    max_queued_tokens: int | None = None
    is_admin: bool = False


class UnknownKeyError(Exception):
    """No key, or one that is unknown or expired."""


def _sha(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def create_key(
    store: Path,
    name: str,
    *,
    days: float | None = None,
    max_models: int | None = None,
    max_queued_tokens: int | None = None,
    is_admin: bool = False,
) -> str:
    """Make a key, also while a server runs; return it. The store has only its SHA-256.

    Args:
        store: folder of the service.
        name: name of the tenant.
        days: days until it expires.
        max_models: most models that it may have open.
        max_queued_tokens: most tokens that may wait or run.
        is_admin: whether `--status` shows it the usage of all.

    Raises:
        ConfigError: if a value cannot be used, or the name has a key.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) or name == LOCAL:
        allowed = f"1 to 64 letters, digits, '.', '_' and '-', and not {LOCAL}"
        raise ConfigError(f"the name of a key must be {allowed}, got {shown(name)}.")
    limits = {"days": days, "max-models": max_models, "max-queued-tokens": max_queued_tokens}
    for limit, value in limits.items():
        if value is not None and not value > 0:
            raise ConfigError(f"--{limit} must be above 0, got {value}.")
    key = "tml-" + "".join(secrets.choice(_ALPHABET) for _ in range(32))
    expires = None if days is None else time.time() + 86_400 * days
    values = name, _sha(key), time.time(), expires, max_models, max_queued_tokens, is_admin
    with closing(connect(store)) as connection:
        try:
            connection.execute("INSERT INTO keys VALUES (?, ?, ?, ?, ?, ?, ?)", values)
        except sqlite3.IntegrityError as error:
            raise ConfigError(f"the key {name} exists already. Revoke it first, or take another name.") from error
    return key


def revoke_key(store: Path, name: str) -> None:
    """Delete a key, also while a server runs; its models and checkpoints stay.

    Raises:
        ConfigError: if there is no key of this name.
    """
    with closing(connect(store)) as connection:
        if not connection.execute("DELETE FROM keys WHERE name = ?", (name,)).rowcount:
            names = ", ".join(row["name"] for row in list_keys(store)) or "none"
            raise ConfigError(f"there must be a key of the name, got {shown(name)}; there are: {names}.")


def list_keys(store: Path) -> list[sqlite3.Row]:
    """Return the keys of a store by name, without their digests."""
    sql = "SELECT name, created, expires, max_models, max_queued_tokens, is_admin FROM keys ORDER BY name"
    with closing(connect(store)) as connection:
        return connection.execute(sql).fetchall()


def find_key(ledger: Ledger, given: str | None, development_key: str | None) -> Key:
    """Return the tenant of a key.

    Args:
        ledger: has the keys.
        given: what the client has sent.
        development_key: the one of `--key`.

    Raises:
        UnknownKeyError: saying whether it is missing, unknown or expired.
    """
    if given and development_key and secrets.compare_digest(given.encode(), development_key.encode()):
        return Key(LOCAL, is_admin=True)
    if given and (rows := ledger.read("SELECT * FROM keys WHERE sha = ?", _sha(given))):
        row = rows[0]
        if row["expires"] is not None and row["expires"] < time.time():
            raise UnknownKeyError("the key has expired. Ask for a new one.")
        return Key(row["name"], row["max_models"], row["max_queued_tokens"], bool(row["is_admin"]))
    if not development_key and not ledger.read("SELECT 1 FROM keys LIMIT 1"):
        return Key(LOCAL, is_admin=True)  # such a server answers on loopback addresses only
    raise UnknownKeyError(f"X-API-Key must be a key of this service, got {'an unknown one' if given else 'none'}.")
