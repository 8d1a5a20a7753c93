"""What to change when not even one task fits into memory: the cheapest changes first, each with its predicted peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.planner.admission import DoesNotFitError, least_pass_tokens
from peft_mux.scheduler.units import bytes_text

_NUM_FIXES = 3


class Fix(NamedTuple):
    """One change and what it is predicted to lead to.

    Attributes:
        change: the setting to change, as the user writes it.
        cost: what the change costs, in words.
        peak_bytes: predicted peak of the fullest device afterwards, in bytes.
    """

    change: str
    cost: str
    peak_bytes: int


def fixes_for(
    error: DoesNotFitError,
    loads: Sequence[TaskLoad],
    memory: MemoryModel,
    args: MultiTaskTrainingArguments,
    weight_bytes: int,
) -> str:
    """Return a sentence with the three cheapest fixes; those that suffice come first.

    Args:
        error: what does not fit, and by how much.
        loads: what the planner knows of each task.
        memory: the memory model that found so.
        args: the arguments of the run.
        weight_bytes: bytes of one frozen weight as it is held; 1 for quantised ones.
    """
    load = next(load for load in loads if load.name == error.task)
    found = [fix for fix in _all_fixes(load, memory, args, weight_bytes) if fix.peak_bytes < error.peak_bytes]
    enough = [fix for fix in found if fix.peak_bytes <= error.limit_bytes]
    rest = sorted((fix for fix in found if fix not in enough), key=lambda fix: fix.peak_bytes)
    # Those that suffice stay in the order of what they cost the owner; the others are ranked by what they bring.
    chosen = [*enough, *rest][:_NUM_FIXES]
    if not chosen:
        return "Take a smaller backbone or a larger device."
    listed = "; ".join(
        f"{number}. {fix.change} ({bytes_text(fix.peak_bytes)}"
        f"{'' if fix.peak_bytes <= error.limit_bytes else ', not enough by itself'}; {fix.cost})"
        for number, fix in enumerate(chosen, start=1)
    )
    return f"Cheapest fixes, with the peak that each is predicted to have: {listed}."


def _all_fixes(load: TaskLoad, memory: MemoryModel, args: MultiTaskTrainingArguments, weight_bytes: int) -> list[Fix]:
    """Return every change that could help, by what it costs the owner, least first."""
    fixes = []
    shape = memory.shape

    def add(change: str, cost: str, changed: MemoryModel, own: TaskLoad = load) -> None:
        fixes.append(Fix(change, cost, _peak(changed, own)))

    def in_precision(factor: float) -> MemoryModel:
        return replace(memory, shape=shape.in_precision(factor))

    kept = memory.activation_bytes_per_token
    if shape.activation_bytes > 2:
        # What was counted is of activations in the present dtype.
        halved = None if kept is None else kept * 2 / shape.activation_bytes
        in_16_bits = replace(memory, shape=replace(shape, activation_bytes=2), activation_bytes_per_token=halved)
        add("bf16=True", "activations in 16 bits, faster on a GPU", in_16_bits)
    if not args.uses_checkpointing:
        # What was counted is of passes that keep everything; with checkpointing the formula is used.
        recomputed = replace(memory, checkpointing=True, activation_bytes_per_token=None)
        add("gradient_checkpointing=True", "about a third more time", recomputed)
    if weight_bytes >= 4:
        add("a backbone in bf16", "rounds the frozen weights to 16 bits", in_precision(0.5))
    longest = load.longest
    if longest > 64:
        cut = tuple(min(length, longest // 2) for length in load.lengths)
        shorter = replace(load, lengths=cut, shared=(), trie=None, longest_row_tokens=longest // 2)
        add(f"max_length={longest // 2}", "cuts longer rows", memory, shorter)
    if weight_bytes >= 2:
        # Half a byte a weight and a scale for every 64; what is not linear stays as it is, which this leaves out.
        bits = in_precision(0.56 / weight_bytes)
        add("a backbone in 4 bits (BitsAndBytesConfig)", "quantises the frozen weights", bits)
    halves = {name: getattr(load, name) // 2 for name in ("trainable_parameters", "cut_parameters")}
    smaller = replace(load, **halves)
    add("half the rank", "a smaller adapter", memory, smaller)
    return fixes


def _peak(memory: MemoryModel, load: TaskLoad) -> int:
    tokens = least_pass_tokens([load])
    return max(int(memory.peak_bytes([load], tokens, in_flight=1, stage=stage)) for stage in range(memory.num_stages))
