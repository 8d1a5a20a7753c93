"""Models whose layers communicate through links, for the tests of turns: alone with links that only log, or as a shard
that fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.modeling.adapters.lora.layer import rows_needed_now
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.parallel.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.parallel.tensor.regions import reduce_input_gradient, reduce_output
from peft_mux.scheduler.plan import HTask, MemoryEstimate, PassParts, Plan, TurnPlan
from tests.engine import lab
from tests.engine.processes.cases import connected

POISONED = "c"


class LoggingLinks:
    """Links of a shard that is alone: nothing changes, but it takes time, and all is written down.

    Attributes:
        log: shape of each sum, in the order in which they began.
        most_in_flight: sums that were in flight at once.
    """

    index, size = 0, 1

    def __init__(self, delay_s: float = 0.0) -> None:
        self.log: list[tuple[int, ...]] = []
        self.delay_s, self.in_flight, self.most_in_flight = delay_s, 0, 0

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.log.append(tuple(tensor.shape))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return _Waiting(self, time.perf_counter() + self.delay_s)


class _Waiting:
    def __init__(self, links: LoggingLinks, there_s: float) -> None:
        self.links, self.there_s = links, there_s

    def wait(self) -> None:
        time.sleep(max(0.0, self.there_s - time.perf_counter()))
        self.links.in_flight -= 1


def whole_model(*, recomputes: bool = False) -> MultiTaskPeftModel:
    model = lab.mux_model()
    if recomputes:
        model.activation_checkpointing_enable()
    return model


def linked_model(links: Any, *, recomputes: bool = False) -> MultiTaskPeftModel:
    """Return a model that communicates at the places where shards of it would."""
    model = whole_model(recomputes=recomputes)
    link(model, links)
    return model


def link(model: MultiTaskPeftModel, links: Any) -> None:
    """Put links where shards would have them."""
    needed_rows = partial(rows_needed_now, model.stream)
    for layer in model.backbone.model.layers:
        reduce_input_gradient(layer.self_attn, links, needed_rows)
        reduce_input_gradient(layer.mlp, links, needed_rows)
        reduce_output(layer.self_attn.o_proj, links)
        reduce_output(layer.mlp.down_proj, links)


def poison(model: MultiTaskPeftModel) -> None:
    with torch.no_grad():
        for parameter in model.task_parameters(POISONED).values():
            parameter.fill_(float("nan"))


Result = tuple[list[torch.Tensor], dict[tuple[str, str], torch.Tensor]]


def run_in_turns(model: MultiTaskPeftModel, links: TurnLinks, batches: Sequence[MuxBatch], width: int) -> Result:
    """Return the losses of every micro-batch, and the gradients of all tasks."""
    interleaving = Interleaving(model, links, width=width)
    losses: dict[int, torch.Tensor] = {}
    for group in groups_of(interleaving, batches):
        found = interleaving.run(group, partial(_pass_of, model, group))
        losses |= {id(micro_batch): values for (micro_batch,), values in zip(group, found, strict=True)}
    return [losses[id(micro_batch)] for micro_batch in batches], gradients(model)


def drawn_parts(draw: random.Random, targets: int = 5) -> PassParts:
    """Return parts of a pass of 8 tokens, whose seconds are a few small numbers so that there are ties."""
    seconds = [draw.choice((1.0, 2.0, 3.0)) for _ in range(8)]
    return PassParts(8.0, float(targets), *seconds, head_block_rows=4, forward_fraction=0.5)


def plan_of(buckets: tuple[tuple[int, ...], ...], width: int) -> Plan:
    """Return a plan of `lab.HTASKS` in these buckets, with drawn latencies that are not in the order of tokens."""
    draw = random.Random(1)
    parts = tuple(replace(drawn_parts(draw), head_block_rows=2**20) for _ in lab.HTASKS)
    return Plan(
        htasks=tuple(HTask(names, 1, 8.0, 1.0) for names in lab.HTASKS),
        shares=(),
        max_tokens_per_micro_batch=64,
        chunk_size=8,
        pad_to_chunks=False,
        memory=MemoryEstimate(0, 0, 0, 0),
        device="2 x cpu",
        buckets=buckets,
        turns=TurnPlan(width, parts),
    )


def groups_of(interleaving: Interleaving, batches: Sequence[MuxBatch]) -> list[list[tuple[MuxBatch]]]:
    """Return the groups in which micro-batches run, each a chain by itself."""
    return [[(batches[index],) for index in group] for group in interleaving.groups(alone(batches))]


def alone(batches: Sequence[MuxBatch]) -> list[tuple[MuxBatch, ...]]:
    """Return each as a chain by itself."""
    return [(micro_batch,) for micro_batch in batches]


def _pass_of(model: MultiTaskPeftModel, group: Any, index: int) -> torch.Tensor:
    return one_pass(model, group[index][0])


def one_after_another(model: MultiTaskPeftModel, batches: Sequence[MuxBatch]) -> Result:
    """Return the same without turns."""
    return [one_pass(model, micro_batch) for micro_batch in batches], gradients(model)


def one_pass(model: MultiTaskPeftModel, micro_batch: MuxBatch) -> torch.Tensor:
    output = model(micro_batch)
    output.losses.sum().backward()
    return output.losses.detach()


def gradients(model: MultiTaskPeftModel) -> dict[tuple[str, str], torch.Tensor]:
    return {
        (name, key): parameter.grad.clone()
        for name in model.tasks
        for key, parameter in model.task_parameters(name).items()
        if parameter.grad is not None
    }


def failing_in_turns(rank: int, world: int) -> tuple[str, str, int]:
    """Be one of the shards; rank 0 fails during a forward. Return the error, and how many threads are left."""
    num_threads = threading.active_count()
    processes = connected()
    inner = TensorLinks([range(world)], processes)
    links, model = TurnLinks(inner), whole_model()
    TensorParallelModel(model, links)
    if rank == 0:
        model.backbone.model.layers[1].mlp.register_forward_pre_hook(_fail)
    try:
        with processes.together():
            try:
                run_in_turns(model, links, lab.step_work().micro_batches, 3)
            except BaseException:
                inner.close()
                raise
    except Exception as error:
        assert model.stream.is_idle
        # The thread that watches the other processes ends soon after connections are closed.
        others = [thread for thread in threading.enumerate() if thread.name != "peft_mux failures"]
        return type(error).__name__, str(error), len(others) - num_threads + 1
    return "nothing", "", threading.active_count()


def _fail(module: Any, args: Any) -> None:
    raise OSError("no more memory")
