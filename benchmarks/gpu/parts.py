"""What `benchmarks.gpu` runs, the most telling first, and how long each part is computed to take on an H100.

The first call has the checks in the precision that people train in, whole runs, and attention by the length of rows.
The second has the checks in fp32, tables, what training together gains, and TRL. Seconds of checks and tables are those
measured on an H100, given as running plus compiling some variants of kernels; the others are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

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
from benchmarks.gpu.report import Deadline, Part, Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.run import kernel_part

Rows = Callable[[Settings], Iterator[Row]]


def plan(settings: Settings, backbones: Backbones) -> list[Part]:
    """Return all parts in the order in which they run.

    Args:
        settings: where they run.
        backbones: makes and holds the backbone in use.
    """
    bf16, fp32 = torch.bfloat16, torch.float32

    def check(name: str, running_s: float, num_variants: int, rows: Rows, call: int = 1) -> Part:
        """Return a part that checks; none of them needs the backbone that others hold."""

        def run(deadline: Deadline) -> Iterator[Row]:
            del deadline
            backbones.drop()
            return rows(settings)

        return Part(name, running_s + num_variants * roofline.COMPILE_S, run, is_check=True, call=call)

    def train(name: str, estimated_s: float, rows: Callable[..., Iterator[Row]], call: int = 1) -> Part:
        """Return a part that trains on large backbones, and can fail."""
        return Part(name, estimated_s, lambda deadline: rows(settings, deadline, backbones), is_check=True, call=call)

    return [
        Part("device", 2, lambda _: device_part(settings)),
        check("lora bfloat16", 3, 30, partial(_kernel_rows, group_rows, bf16)),
        check("cross entropy", 2, 2, partial(_kernel_rows, lambda settings, _: cross_entropy_rows(settings), fp32)),
        check("attention", 4, 4, attention_rows),
        # The small backbone's kernels are compiled here, and taken up again by the two after it.
        check("task table", 4, 6, task_table_rows),
        check("captured pass", 4, 5, captured_rows),
        check("trainer bfloat16", 6, 1, partial(_trainer_rows, bf16)),
        train("default run", 200 + 16 * roofline.COMPILE_S, default_part),
        Part("attention by row length", 5, lambda _: attention_times(settings)),
        check("plain peft", 8, 12, plain_peft_rows, call=2),
        check("trainer float32", 16, 12, partial(_trainer_rows, fp32), call=2),
        check("lora float32", 3, 38, partial(_kernel_rows, group_rows, fp32), call=2),
        Part("kernels", 41, lambda deadline: kernel_part(settings, deadline), call=2),
        # Three seconds to make the backbone.
        train("gain 8B", sum(sweep.SECONDS.values()) + 3 + 16 * roofline.COMPILE_S, sweep.sweep_part, call=2),
        train("trl", 60 + 12 * roofline.COMPILE_S, trl_part, call=2),
    ]


def chosen(planned: list[Part], names: list[str] | None, call: int | None) -> list[Part]:
    """Return the parts that are asked for.

    Args:
        planned: all parts.
        names: names of the wanted ones, or how they begin; `None` for all of a call.
        call: which call; `None` for all.

    Raises:
        ValueError: for a name of no part.
    """
    for name in names or ():
        if not any(part.name.startswith(name) for part in planned):
            known = ", ".join(part.name for part in planned)
            raise ValueError(f"part {name!r} must be the start of a part's name ({known}).")
    wanted = [part for part in planned if names is not None and part.name.startswith(tuple(names))]
    return wanted or [part for part in planned if call in (None, part.call)]


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
