"""`peft-mux serve | keys`: a fine-tuning service, and the keys of its tenants."""

from __future__ import annotations

import argparse
from datetime import datetime, timezone
from pathlib import Path

from peft_mux.errors import ConfigError
from peft_mux.serve.keys import create_key, list_keys, revoke_key


def keys(arguments: argparse.Namespace) -> int:
    """Make, list or revoke keys of a service; return the exit status.

    Raises:
        ConfigError: if the name is missing, taken, or unknown.
    """
    store = Path(arguments.store)
    if arguments.action == "list":
        for row in list_keys(store):
            until = row["expires"] and datetime.fromtimestamp(row["expires"], timezone.utc).date().isoformat()
            limits = {"until": until, "models": row["max_models"], "queued tokens": row["max_queued_tokens"]}
            words = [f"{name} {value}" for name, value in limits.items() if value is not None]
            print(row["name"], *words, *(["admin"] if row["is_admin"] else []), sep="  ")
        return 0
    if arguments.name is None:
        raise ConfigError(f"keys {arguments.action} needs the name of a key.")
    if arguments.action == "revoke":
        revoke_key(store, arguments.name)
        return 0
    key = create_key(
        store,
        arguments.name,
        days=arguments.days,
        max_models=arguments.max_models,
        max_queued_tokens=arguments.max_queued_tokens,
        is_admin=arguments.admin,
    )
    print(f"The key of {arguments.name}; it is not shown again:\n{key}")
    return 0
