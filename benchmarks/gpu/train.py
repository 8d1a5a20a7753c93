"""The parts `end to end` of `benchmarks.gpu`: training steps of all contenders, side by side.

MFU = (4 P + 6 P_lora + 7 H C n L) T / seconds / peak: T real tokens, P frozen weights of the linear layers with the
head (forward and input gradients), P_lora trained weights of a token's task, n layers with H heads of C channels on
sequences of mean square length over mean length L (causal attention, its backward 2.5 forwards); peak 989.4 TFLOP/s,
the dense bf16 rate of the H100 and H200 SXM data sheets.

A contender that needs more memory than there is, by `roofline.peak_bytes`, is left out with that number; one that runs
out of memory nevertheless, or fails, is reported, and the next one gets a new backbone.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import roofline
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free, out_of_memory
from benchmarks.gpu.trainers import TRAINERS, Trained
from benchmarks.kernels.problem import greater

NUM_STEPS = 4
"""The first two compile, allocate, capture, and make the state of optimizers."""
CONTENDERS = ("floor", "hf", "packed", "mux", "mux_graphs", "padded")
MOST_PASS_TOKENS = 16384
_MEAN_TOKENS = {"uniform": 29, "nonuniform": 52}
_SQUARE_LENGTH = {"uniform": 33, "nonuniform": 100}
_PADDED_TOKENS = {"uniform": 69, "nonuniform": 180}
_MEAN_RANK = {"uniform": 8, "nonuniform": 30}
_TINY = Backbone(32, 2, 48, 4, 64)


class Case(NamedTuple):
    """What is trained.

    Attributes:
        mix: "uniform" or "nonuniform", see `benchmarks.training.workloads`.
        num_tasks: number of tasks.
        batch_size: rows of a task's step.
    """

    mix: str
    num_tasks: int
    batch_size: int

    @property
    def name(self) -> str:
        """Such as `8 uniform x 32 rows`."""
        return f"{self.num_tasks} {self.mix} x {self.batch_size} rows"

    @property
    def num_tokens(self) -> int:
        """Tokens of a step, as expected of the mix."""
        return self.num_tasks * self.batch_size * _MEAN_TOKENS[self.mix]

    def padded_tokens(self, contender: str) -> int:
        """Tokens of a step that a contender computes, as expected of the mix."""
        if contender in ("hf", "padded"):
            return self.num_tasks * self.batch_size * _PADDED_TOKENS[self.mix]
        return self.num_tokens

    def trained_weights(self, backbone: Backbone, contender: str) -> int:
        """Trained weights that are there at once."""
        tasks = {"floor": 0, "hf": 1, "packed": 1}.get(contender, self.num_tasks)
        return tasks * _MEAN_RANK[self.mix] * backbone.rank_weights


# 7,400 tokens a step; then 1,900, where the host's time decides, and where the padded batch fits.
CASES = (
    Case("uniform", 8, 32),
    Case("uniform", 8, 8),
)
_REHEARSED = Case("nonuniform", 3, 4)


def end_to_end_part(settings: Settings, deadline: Deadline, backbones: Backbones, case: Case) -> Iterator[Row]:
    """The whole backbone, all contenders."""
    shape = _TINY if settings.is_rehearsal else roofline.LLAMA_8B.of_layers(settings.num_layers)
    yield from compare(settings, deadline, backbones, shape, _REHEARSED if settings.is_rehearsal else case)


def estimated_s(shape: Backbone, case: Case, contenders: tuple[str, ...] = CONTENDERS) -> float:
    """Return the seconds that a case is computed to take, without compiling and without making the backbone."""
    return 5.0 + sum(contender_s(shape, case, name) for name in contenders)


def contender_s(shape: Backbone, case: Case, contender: str) -> float:
    """Return the seconds that a contender is computed to take: its adapters, then its steps."""
    attaching = 0.0 if contender == "floor" else roofline.ATTACH_S * case.num_tasks * shape.num_layers
    passes = case.num_tasks if contender in ("hf", "packed") else 1
    each = roofline.step_s(shape, contender, case.padded_tokens(contender), _SQUARE_LENGTH[case.mix], max(1, passes))
    steps = NUM_STEPS + (4 if contender == "mux_graphs" else 0)  # capturing runs a pass some four times
    return attaching + steps * each


def compare(settings: Settings, deadline: Deadline, backbones: Backbones, shape: Backbone, case: Case) -> Iterator[Row]:
    """Train the same rows with every contender on one backbone, which each leaves as it was."""
    from benchmarks.training.workloads import make_workload

    num_steps = 2 if settings.is_rehearsal else NUM_STEPS
    workload = make_workload(
        case.mix,
        num_tasks=case.num_tasks,
        num_steps=num_steps,
        vocab_size=shape.vocab_size,
        batch_size=case.batch_size,
    )
    num_tokens = [sum(len(r["input_ids"]) for t in workload.tasks for r in t.batches[s]) for s in range(num_steps)]
    flops = flops_per_token(shape, workload)
    name = f"{shape.num_layers} layers, {case.name}"
    yield name, {"tokens_per_step": num_tokens, "lengths": workload.length_source, "flops_per_token": flops}
    measured: dict[str, dict[str, Any]] = {}
    for contender in CONTENDERS:
        needs_s = 0.0 if settings.is_rehearsal else contender_s(shape, case, contender)
        reason = too_large(settings, shape, case, contender, _largest_batch(workload, contender))
        if not deadline.has(needs_s):
            reason = f"the time budget is spent: needs {needs_s:.0f} s"
        if reason is not None:
            yield f"{name}: {contender}", {"skipped": reason}
            continue
        trained = case.trained_weights(shape, contender)
        pass_tokens = roofline.pass_tokens(shape, contender, trained, settings.device_bytes, MOST_PASS_TOKENS)
        row = train_safely(settings, backbones, shape, contender, workload, pass_tokens)
        if "steps_s" in row:
            row |= {"pass_tokens": pass_tokens} | rates(settings, row["steps_s"], num_tokens)
            row |= judged(settings, row, flops, measured)
            measured[contender] = row
        yield f"{name}: {contender}", row


def train_safely(
    settings: Settings, backbones: Backbones, shape: Backbone, contender: str, workload: Any, pass_tokens: int
) -> dict[str, Any]:
    """Return what a contender measured, or why it could not; then what was attached to the backbone is gone with it."""
    free(settings.device)
    if settings.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(settings.device)
    try:
        row = plain_values(settings, TRAINERS[contender](settings, backbones.of(shape), workload, pass_tokens))
    except Exception as error:  # the others are still measured
        first_line = (str(error).splitlines() or [""])[0][:300]
        if out_of_memory(error):
            row = {"skipped": f"out of memory: {first_line}"}
        else:
            row = {"failed": f"{type(error).__name__}: {first_line}", "is_right": False}
    if "steps_s" not in row:
        # Here, where the error is gone, and with it the frames that hold tensors.
        backbones.drop()
    return row


def too_large(settings: Settings, shape: Backbone, case: Case, contender: str, num_tokens: int) -> str | None:
    """Return why a contender cannot have the memory that it is computed to need, or `None`."""
    if settings.device_bytes is None:
        return None
    needed = roofline.peak_bytes(shape, contender, num_tokens, case.trained_weights(shape, contender))
    allowed = roofline.USABLE_SHARE * settings.device_bytes
    if needed <= allowed:
        return None
    return f"needs some {needed / 1e9:.0f} GB for {num_tokens} tokens at once, of {allowed / 1e9:.0f} GB"


def _largest_batch(workload: Any, contender: str) -> int:
    """Return the tokens that a contender must hold at once whatever the memory: all of them in one padded batch."""
    if contender != "padded":
        return 1024
    longest = max(len(row["input_ids"]) for task in workload.tasks for row in task.rows)
    return longest * sum(task.batch_size for task in workload.tasks)


def plain_values(settings: Settings, trained: Trained) -> dict[str, Any]:
    """Return what was measured as plain values."""
    row: dict[str, Any] = {"steps_s": trained.steps_s, "losses": trained.losses}
    if trained.calls is not None:
        row |= {"path": path_of(trained.calls), "group_calls": trained.calls}
    if trained.num_captures is not None:
        row["num_captures"] = trained.num_captures
    if settings.device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(settings.device)
    return row


def rates(settings: Settings, steps_s: list[float], num_tokens: list[int]) -> dict[str, float]:
    """Return the real tokens of a second, median of the steps that are warm."""
    warm_up = 1 if settings.is_rehearsal else 2
    found = [count / s for count, s in zip(num_tokens[warm_up:], steps_s[warm_up:], strict=True)]
    return {"tokens_per_s": statistics.median(found)}


def path_of(calls: dict[str, int]) -> str:
    """Return which path computed the adapters: "kernels", "slices", or "both"; "none" if neither did."""
    taken = [name for name in ("kernels", "slices") if calls.get(name)]
    return "both" if len(taken) == 2 else (taken or ["none"])[0]


def judged(
    settings: Settings, row: dict[str, Any], flops: float, measured: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return MFU, share of the floor, and whether the row is right.

    That is: the losses of two steps are those of PEFT, and ours ran through the kernels where there are any. The second
    step is the first that an update has changed; later ones drift apart in bf16. The floor has no adapters, so that
    only its first step is compared with PEFT's.
    """
    found: dict[str, Any] = {"mfu": None, "share_of_floor": 1.0 if not measured else None}
    peak = peak_flops(settings.device)
    if peak is not None:
        found |= {"mfu": flops * row["tokens_per_s"] / peak, "peak_flops_per_s": peak}
    if "floor" in measured:
        found["share_of_floor"] = row["tokens_per_s"] / measured["floor"]["tokens_per_s"]
    verdicts = path_verdicts(settings, row)
    reference = measured.get("hf") or measured.get("floor")
    if reference:
        found["loss_difference"] = loss_difference(row["losses"], reference["losses"])
        verdicts.append(found["loss_difference"] <= loss_tolerance(settings))
    return found | ({"is_right": all(verdicts)} if verdicts else {})


def path_verdicts(settings: Settings, row: dict[str, Any]) -> list[bool]:
    """Return whether kernels and graphs served where they can."""
    verdicts = []
    if "path" in row:
        verdicts.append(row["path"] == ("kernels" if settings.wants_kernels else "slices"))
    if "num_captures" in row:
        verdicts.append((row["num_captures"] > 0) == settings.wants_kernels)
    return verdicts


def loss_tolerance(settings: Settings) -> float:
    """Return by how much losses may differ, relative, between two ways to compute them."""
    return 1e-4 if settings.is_rehearsal else 2e-2


def peak_flops(device: torch.device) -> float | None:
    """Return the rate that MFU is compared with, where it is known."""
    words = torch.cuda.get_device_name(device).split() if device.type == "cuda" else []
    return next((roofline.PEAK_FLOPS[word] for word in words if word in roofline.PEAK_FLOPS), None)


def loss_difference(losses: list[list[float]], reference: list[list[float]]) -> float:
    """Return the greatest relative difference over tasks and the first two steps that both have; NaN stays NaN."""
    worst = 0.0
    for own, wanted in zip(losses[:2], reference[:2], strict=False):
        for value, other in zip(own, wanted, strict=True):
            worst = greater(abs(value - other) / abs(other), worst)
    return worst


def flops_per_token(shape: Backbone, workload: Any) -> float:
    """Return what a step has to compute for a real token, averaged; the formula is at the top of the file."""
    lengths = [(len(row["input_ids"]), task.rank) for task in workload.tasks for row in task.rows]
    num_tokens = sum(length for length, _ in lengths)
    rank = sum(length * rank for length, rank in lengths) / num_tokens
    square = sum(length**2 for length, _ in lengths) / num_tokens
    return shape.flops_per_token(square, rank)
