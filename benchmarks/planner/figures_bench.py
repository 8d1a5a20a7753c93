"""What `benchmarks.planner.figures` is made of: a backbone on a simulated pipeline, and a line of its table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.planner.cluster.trace import TaskKind
from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import ModelShape, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad
from peft_mux.scheduler.planner.planner import Budget, Outcome, plan_tasks

LLAMA_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, 2 * 6_738_415_616, 2)
# Two matrices of 4 D in place of three: the width inside a gated MLP of as many parameters is 8/3 D.
GPT_2_7B = ModelShape(32, 2560, 6827, 2560, 2560, 50257, 2 * 2_651_307_520, 2)
LLAMA_13B = ModelShape(40, 5120, 13824, 5120, 5120, 32000, 2 * 13_015_864_320, 2)
OPT_30B = ModelShape(48, 7168, 19115, 7168, 7168, 50272, 2 * 29_974_540_288, 2)
TABLE_1 = (("GPT 2.7B", GPT_2_7B, 2), ("Llama 7B", LLAMA_7B, 4), ("Llama 13B", LLAMA_13B, 8), ("OPT 30B", OPT_30B, 16))
"""M's backbones and the GPUs of each."""
SST2, QA, RTE = 64, 128, 256
"""Tokens to which M pads or cuts the rows of its data sets."""
_BATCHES = (4, 2, 4, 4, 8, 2, 4, 4)
WORKLOADS = {
    "WL-A": tuple(zip((SST2, QA, QA, SST2, SST2, SST2, QA, QA), _BATCHES, strict=True)),
    "WL-B": tuple(zip((RTE, SST2, RTE, SST2, SST2, RTE, RTE, RTE), _BATCHES, strict=True)),
}
"""M Table 2: tokens of a row and batch of each of eight tasks."""
RANK = 16
MAX_TOKENS = 2**20


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        figure: of M.
        what: is compared.
        paper: as printed; "-" where M gives no number.
        ours: from this simulation.
        unit: "x" for a ratio, "%" for a percentage.
    """

    figure: str
    what: str
    paper: str
    ours: float
    unit: str

    @property
    def text(self) -> str:
        """Our figure with its unit."""
        return f"{self.ours:+.1f} %" if self.unit == "%" else f"{self.ours:.2f}x"


class Bench:
    """A backbone on a pipeline of A40 GPUs.

    Args:
        shape: of the backbone.
        num_stages: of the pipeline.
        device: name of the data sheet.
    """

    def __init__(self, shape: ModelShape, num_stages: int, device: str) -> None:
        self.devices = parse_devices(f"{num_stages}x{device}")
        self.shape = shape
        self.num_stages = num_stages
        self.cost = CostModel(analytic_profile(self.devices.device, shape), shape, num_stages=num_stages)
        self.memory = MemoryModel(shape, num_stages=num_stages)
        self.link = self.devices.intra_node

    def tasks(self, lengths: Sequence[int], batch_size: int, *, padded_to: int | None = None) -> list[TaskLoad]:
        """Return a task for each length of sequence, all with the same global batch."""
        return self.workload([(length, batch_size) for length in lengths], padded_to=padded_to)

    def workload(self, tasks: Sequence[tuple[int, int]], *, padded_to: int | None = None) -> list[TaskLoad]:
        """Return a task for each pair of tokens of a row and global batch."""
        kinds = [TaskKind(length, batch_size, RANK) for length, batch_size in tasks]
        return [kind.load(f"task {i}", self.shape, padded_to=padded_to) for i, kind in enumerate(kinds)]

    def bucket(self, loads: Sequence[TaskLoad], num_micro_batches: int, name: str = "bucket") -> BucketLoad:
        """Return the tasks of one hTask as a bucket of its own."""
        stages = range(self.num_stages)
        tokens = sum(load.tokens for load in loads) / num_micro_batches
        rows = [TaskRows(load.lengths) for load in loads]
        passes = cut_into_passes(rows, PassRules(), bound=MAX_TOKENS, num_passes=num_micro_batches)
        forward_s, _ = self.cost.pass_times(loads, passes)
        # Without the overhead of a pass, as Eq. 3 has it.
        overhead_s = self.cost.profile.forward_fraction * self.cost.profile.pass_s
        return BucketLoad(
            name=name,
            forward_s=tuple((forward_s.sum(axis=0) / num_micro_batches - overhead_s).tolist()),
            activation_bytes=tuple(self.memory.activation_bytes(tokens, stage) for stage in stages),
            output_bytes=int(tokens * self.shape.hidden_size * self.shape.activation_bytes),
            num_micro_batches=num_micro_batches,
        )

    def makespan_s(self, buckets: Sequence[BucketLoad], schedule: Schedule) -> float:
        """Return the time of one iteration within the memory of the device."""
        limit = self.devices.device.memory_bytes - self.memory.static_bytes([])
        template = build_template(buckets, schedule, memory_limit_bytes=(limit,) * self.num_stages, links=self.link)
        return simulate(template, buckets, links=self.link).makespan_s

    def plan(
        self, loads: Sequence[TaskLoad], num_micro_batches: int, policy: str, schedule: Schedule = "mux"
    ) -> Outcome:
        """Plan within the memory of the device, with a tenth kept free for what the memory model leaves out."""
        limit = int(0.9 * self.devices.device.memory_bytes)
        budget = Budget(MAX_TOKENS, limit, num_micro_batches=num_micro_batches, schedule=schedule, links=self.link)
        outcome = plan_tasks(loads, self.cost, self.memory, budget, policy=policy)
        if outcome.waiting:
            raise ValueError(
                f"no task may wait in a figure, got {len(outcome.waiting)} waiting tasks. Use fewer tasks."
            )
        return outcome


def tokens_of(loads: Sequence[TaskLoad]) -> int:
    """Return the tokens of all global batches."""
    return sum(load.tokens for load in loads)
