"""What `benchmarks.gpu` runs, the most telling first, and how long each part is computed to take on an H100.

The first call has the checks in the precision that people train in, whole runs, and attention by the length of rows.
The second has the checks in fp32, tables, what training together gains, and TRL. Seconds of checks and tables are those
measured on an H100, given as running plus compiling some variants of kernels; the others are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.gpu import roofline, sweep
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.checks.attention import attention_rows, attention_times
from benchmarks.gpu.checks.cross_entropy import cross_entropy_rows
from benchmarks.gpu.checks.group import group_rows
from benchmarks.gpu.checks.passes import captured_rows
from benchmarks.gpu.checks.plain_peft import plain_peft_rows
from benchmarks.gpu.checks.trainer import trainer_rows
from benchmarks.gpu.checks.updates import task_table_rows
from benchmarks.gpu.default_run import default_part, trl_part
from benchmarks.gpu.device import device_part
from benchmarks.gpu.kernel_table import kernel_part
from benchmarks.gpu.report import Deadline, Part, Row
from benchmarks.gpu.settings import Settings

Rows = Callable[[Settings], Iterator[Row]]


class Planned(NamedTuple):
    """A part, before the machine is known.

    Attributes:
        name: name of the part.
        estimated_s: seconds that it is computed to take on an H100.
        run: yields its rows.
        is_check: whether it can fail.
        call: in which of the calls it runs, from 1.
    """

    name: str
    estimated_s: float
    run: Callable[[Settings, Deadline, Backbones], Iterator[Row]]
    is_check: bool = False
    call: int = 1


def plan() -> list[Planned]:
    """Return all parts in the order in which they run."""
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        Planned("device", 2, lambda settings, deadline, _: device_part(settings)),
        _check("lora bfloat16", 3, 30, partial(_kernel_rows, group_rows, bf16)),
        _check("cross entropy", 2, 2, partial(_kernel_rows, lambda settings, _: cross_entropy_rows(settings), fp32)),
        _check("attention", 4, 4, attention_rows),
        # The small backbone's kernels are compiled here, and taken up again by the two after it.
        _check("task table", 4, 6, task_table_rows),
        _check("captured pass", 4, 5, captured_rows),
        _check("trainer bfloat16", 6, 1, partial(_trainer_rows, bf16)),
        Planned("default run", 200 + 16 * roofline.COMPILE_S, default_part, is_check=True),
        Planned("attention by row length", 5, lambda settings, deadline, _: attention_times(settings)),
        _check("plain peft", 8, 12, plain_peft_rows, call=2),
        _check("trainer float32", 16, 12, partial(_trainer_rows, fp32), call=2),
        _check("lora float32", 3, 38, partial(_kernel_rows, group_rows, fp32), call=2),
        Planned("kernels", 41, lambda settings, deadline, _: kernel_part(settings, deadline), call=2),
        # Three seconds to make the backbone.
        Planned("gain 8B", sum(sweep.SECONDS.values()) + 3 + 16 * roofline.COMPILE_S, sweep.sweep_part, True, call=2),
        Planned("trl", 60 + 12 * roofline.COMPILE_S, trl_part, is_check=True, call=2),
    ]


def chosen(
    planned: list[Planned], names: list[str] | None, call: int | None, settings: Settings, backbones: Backbones
) -> list[Part]:
    """Return the parts that are asked for, ready to run.

    Args:
        planned: all parts.
        names: names of the wanted ones, or how they begin; `None` for all of a call.
        call: which call; `None` for all.
        settings: where they run.
        backbones: makes and holds the backbone in use.

    Raises:
        ValueError: for a name of no part.
    """
    for name in names or ():
        if not any(part.name.startswith(name) for part in planned):
            known = ", ".join(part.name for part in planned)
            raise ValueError(f"part {name!r} must be the start of a part's name ({known}).")
    wanted = [part for part in planned if names is not None and part.name.startswith(tuple(names))]
    wanted = wanted or [part for part in planned if call in (None, part.call)]
    return [Part(part.name, part.estimated_s, _bound(part, settings, backbones), part.is_check) for part in wanted]


def _bound(part: Planned, settings: Settings, backbones: Backbones) -> Callable[[Deadline], Iterator[Row]]:
    return lambda deadline: part.run(settings, deadline, backbones)


def _check(name: str, running_s: float, num_variants: int, rows: Rows, call: int = 1) -> Planned:
    """Return a part that checks; none of them needs the backbone that others hold."""

    def run(settings: Settings, deadline: Deadline, backbones: Backbones) -> Iterator[Row]:
        del deadline
        backbones.drop()
        return rows(settings)

    return Planned(name, running_s + num_variants * roofline.COMPILE_S, run, is_check=True, call=call)


def _kernel_rows(
    rows: Callable[[Settings, torch.dtype], Iterator[Row]], dtype: torch.dtype, settings: Settings
) -> Iterator[Row]:
    """Yield checks of Triton kernels, where they can run; a rehearsal knows fp32 alone."""
    if not settings.wants_kernels:
        yield "Triton kernels", {"skipped": "no GPU, and TRITON_INTERPRET is not 1"}
    elif settings.is_rehearsal and dtype is not torch.float32:
        yield "Triton kernels", {"skipped": "Triton's interpreter computes products of 16 bits wrong"}
    else:
        yield from rows(settings, dtype)


def _trainer_rows(dtype: torch.dtype, settings: Settings) -> Iterator[Row]:
    """Yield whole runs; in Triton's interpreter in fp32 alone."""
    if settings.is_rehearsal and settings.has_kernels and dtype is not torch.float32:
        yield "trainer", {"skipped": "Triton's interpreter computes products of 16 bits wrong"}
    else:
        yield from trainer_rows(settings, dtype)
