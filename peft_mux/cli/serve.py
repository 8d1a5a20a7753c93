"""`peft-mux serve | keys`: a fine-tuning service, and the keys of its tenants."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import urllib.error
import urllib.request
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


def serve(arguments: argparse.Namespace) -> int:
    """Serve a model until the process is asked to end, or show what a server does; return the exit status.

    Raises:
        ConfigError: if a setting cannot be used, or the server does not answer.
    """
    if arguments.status is not None:
        headers = {"X-API-Key": arguments.key or ""}
        asked = urllib.request.Request(f"{arguments.status.rstrip('/')}/api/v1/status", headers=headers)
        try:
            with urllib.request.urlopen(asked, timeout=30) as answer:
                status = json.load(answer)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise ConfigError(
                f"--status must be the address of a server that accepts the --key, got {arguments.status} ({error})."
            ) from error
        print(json.dumps(status, indent=2))
        return 0
    if arguments.model is None:
        raise ConfigError("serve needs a MODEL: a folder or hub id of a causal language model.")
    counts = {name: getattr(arguments, name) for name in ("max_models", "piece_tokens", "pass_tokens", "max_wait_s")}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}.")
    if not 0 < arguments.sample_share < 1:
        raise ConfigError(f"--sample-share must be above 0 and below 1, got {arguments.sample_share}.")
    try:
        app = importlib.import_module("peft_mux.serve.app")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"serve needs {error.name}. Install the extra in a checkout: pip install '.[serve]'"
        ) from error
    app.serve(
        arguments.model,
        Path(arguments.store),
        names=tuple(arguments.served_name),
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        key=arguments.key,
        say=functools.partial(print, flush=True),
        sample_share=arguments.sample_share,
        **counts,
    )
    return 0
