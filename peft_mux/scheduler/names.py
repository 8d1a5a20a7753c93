"""The names of policies, schedules and dispatches, which settings are checked against; nothing of what they do."""

from __future__ import annotations

from typing import Literal, get_args

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "mux"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
Dispatching = Literal["balanced", "length", "uniform"]
DISPATCHES: tuple[str, ...] = get_args(Dispatching)
POLICY_NAMES = ["mux", "together", "interleaved", "sequential"]
"""Those of the package, then those that `register_policy` added."""
