"""`peft-mux plan --deployment`: which replicas to deploy, shown as tables, JSON and a picture."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from peft_mux.errors import ConfigError

if TYPE_CHECKING:
    from peft_mux.trainer.trainer import MultiTaskTrainer


def show_deployment(trainer: MultiTaskTrainer, arguments: argparse.Namespace) -> int:
    """Plan and print a deployment; return the exit status.

    Args:
        trainer: trainer of the tasks that the file describes; nothing of it is changed.
        arguments: parsed options of `peft-mux plan`.

    Raises:
        ConfigError: for options that do not go together, unknown devices, or tasks that no replica can hold.
    """
    from peft_mux.planning.replica_facts import LayerProfile
    from peft_mux.scheduler.deployment.plot import save_deployment

    _refuse_options_of_passes(arguments)
    measured = LayerProfile(arguments.layer_profile, arguments.max_tokens) if arguments.layer_profile else None
    report = trainer.plan_deployment(arguments.devices, measured=measured)
    print(report.to_json() if arguments.json else f"{report}\n\n{report.picture()}")  # noqa: T201
    if arguments.image:
        drawn = save_deployment(report, arguments.image)
        if not arguments.json:
            print(f"drawn: {drawn}")  # noqa: T201
    return 0


def _refuse_options_of_passes(arguments: argparse.Namespace) -> None:
    for option in ("explain", "gantt"):
        if getattr(arguments, option):
            raise ConfigError(
                f"--{option}: got it together with --deployment; allowed: one of them. Leave --deployment out."
            )
    if arguments.max_tokens and not arguments.layer_profile:
        raise ConfigError("--max-tokens: got it without --layer-profile; allowed: both. Add the measured times.")
