"""`peft-mux plan --devices`: the plan for devices that are not here, shared as the file's arguments say."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from peft_mux.scheduler.plan import Plan


def plan_for_devices(arguments: argparse.Namespace, config: Any, make_trainer: Callable[[Any], Any]) -> Plan:
    """Return the plan for `--devices`.

    A trainer lays out the processes that it is in, and this is one process, whatever devices are asked about. So it is
    made as for one, and the planner is told how the devices share the backbone.

    Args:
        arguments: parsed options of `peft-mux plan`, among them `devices`.
        config: `RunConfig` that was read from the file; its arguments are changed to those of one process.
        make_trainer: takes a `RunConfig` and returns the trainer of its tasks.

    Raises:
        ConfigError: for unknown devices, or a number of them that cannot be divided so.
    """
    args = config.args
    devices_per_stage, num_stages = args.tensor_parallel_size, args.pipeline_parallel_size
    args.tensor_parallel_size = args.pipeline_parallel_size = 1
    trainer = make_trainer(config)
    return trainer.plan(arguments.devices, num_stages=num_stages, devices_per_stage=devices_per_stage)
