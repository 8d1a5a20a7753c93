"""A plan of three tasks that run and one that waits."""

from __future__ import annotations

from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad, HTask, MemoryEstimate, TaskShare, Waiting
from peft_mux.scheduler.plan_views import Plan

SHAPE = ModelShape(
    num_layers=4,
    hidden_size=64,
    intermediate_size=160,
    attention_size=64,
    key_value_size=32,
    vocab_size=500,
    backbone_bytes=1_000_000,
    activation_bytes=4,
)
LOADS = (
    BucketLoad(name="hTask 1", forward_s=(0.2,), backward_s=(0.3,), activation_bytes=(1000,), num_micro_batches=2),
    BucketLoad(name="hTask 2", forward_s=(0.04,), backward_s=(0.06,), activation_bytes=(300,), num_micro_batches=1),
)
TEMPLATE = build_template(LOADS, "1f1b")


def a_plan() -> Plan:
    memory = MemoryEstimate(1_000_000, 6000, 4_718_592, 685_360, optimizer_bytes=2400)
    return Plan(
        htasks=(HTask(("sql", "tales"), 2, 150.25, 0.5), HTask(("sums",), 1, 40.0, 0.1)),
        shares=(
            TaskShare("sql", 8, 100.5, 30, 100),
            TaskShare("tales", 4, 200.0, 10, 200),
            TaskShare("sums", 2, 40.0, 5, 50),
        ),
        max_tokens_per_micro_batch=256,
        chunk_size=64,
        pad_to_chunks=False,
        memory=memory,
        device="cpu",
        buckets=((0,), (1,)),
        template=TEMPLATE,
        bucket_loads=LOADS,
        step_s=1.25,
        peak_bytes=(memory.peak_bytes,),
        limit_bytes=2**30,
        profile_source="analytic",
        waiting=(Waiting("late", "0.10 GiB too much next to sql; runs when others end"),),
        notes=("sql: 3 of 40 rows are cut",),
    )
