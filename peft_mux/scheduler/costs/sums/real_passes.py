"""What the tasks of an hTask amount to in M Eq. 3 in real passes: `pass_sums`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from peft_mux.packing.passes import Member
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.model_shape import StageSize
from peft_mux.scheduler.costs.profile import Profile
from peft_mux.scheduler.costs.sums.attention import added_attention_s, attention_calls_of_passes
from peft_mux.scheduler.costs.sums.depth import TaskDepths
from peft_mux.scheduler.costs.sums.sums import Sums


def pass_sums(profile: Profile, loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]], size: StageSize) -> Sums:
    """Return the sums of each of P passes, as arrays `[P]`.

    Args:
        profile: seconds of the parts of a step on one device.
        loads: the loads of M tasks, whose loss terms are spread evenly over their tokens.
        passes: the members of each pass, whose `task` counts these loads.
        size: the layers of each stage, and the devices that share them; factors of adapters are as wide as their part.
    """
    num_passes, num_tasks = len(passes), len(loads)
    members = [(number, *member) for number, own in enumerate(passes) for member in own]
    columns = np.array(members, dtype=np.int64).reshape(len(members), 6).T
    number, task, _, start, end, shared = columns
    tokens = np.zeros((num_passes, num_tasks))
    np.add.at(tokens, (number, task), end - start - shared)
    targets_per_token = np.array([load.num_targets / max(load.tokens, 1) for load in loads])
    # A part sees the keys and values before it, and so does what a row has for itself of those that it shares.
    attention_s = added_attention_s(profile, end.astype(float), start + shared)
    return Sums(
        tokens=tokens.sum(axis=1),
        targets=tokens @ targets_per_token,
        products_s=profile.layer_s(tokens.sum(axis=1)),
        attention_s=np.bincount(number, weights=attention_s, minlength=num_passes),
        calls_s=profile.attention_call_s * attention_calls_of_passes(number, end - start, num_passes),
        adapters_s=_adapters_of_passes_s(profile, loads, tokens, size.devices),
        depth=TaskDepths(loads, size.layers).of(tokens),
    )


def _adapters_of_passes_s(
    profile: Profile, loads: Sequence[TaskLoad], tokens: NDArray[np.float64], devices: int
) -> NDArray[np.float64]:
    """Return the seconds of all adapters of one layer in each pass, fused as in Eq. 3, `[P]`."""
    adapters = [
        (task, adapter.rank, adapter.device_width(devices))
        for task, load in enumerate(loads)
        for adapter in load.adapters
    ]
    total_s = np.zeros(len(tokens))
    for width in sorted({width for _, _, width in adapters}):
        own = [(task, rank) for task, rank, one in adapters if one == width]
        task, rank = (np.array(column) for column in zip(*own, strict=True))
        number, place = np.nonzero(tokens[:, task])
        held = tokens[number, task[place]]
        alone_s = profile.adapter_s(rank[place], width, held)
        weighted_s = profile.adapter_utilization(rank[place], width, held) * alone_s
        # A task's own adapters of one width run one after another, and no pass ends before those of one task would.
        of_task = np.zeros_like(tokens)
        np.add.at(of_task, (number, task[place]), alone_s)
        total_s += np.maximum(np.bincount(number, weights=weighted_s, minlength=len(tokens)), of_task.max(axis=1))
    return total_s
