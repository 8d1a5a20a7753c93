"""`Parts`: what a run is made of once its model is placed, each part given what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.planning.planner import Planner
from peft_mux.trainer.control import AdapterFiles, Control
from peft_mux.trainer.evaluation import TaskEvaluator
from peft_mux.trainer.inputs import make_collator
from peft_mux.trainer.loop import StepLoop
from peft_mux.trainer.membership import Lifecycle, Membership
from peft_mux.trainer.opening import Opening
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.relocation import Relocation
from peft_mux.trainer.reporter import Reporter
from peft_mux.trainer.run import Run
from peft_mux.trainer.world import World


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run that methods of the trainer ask.

    Attributes:
        plans: the plan that is followed.
        evaluator: evaluates tasks on their held-out rows.
        membership: lets tasks come, leave, rest and go on.
        relocation: moves the run to other replicas.
        reporter: tells how the run stands.
        opening: begins and resumes a training.
        control: takes what is asked from outside of the process.
        files: writes and uploads adapters.
        loop: takes the steps.
    """

    plans: PlanFollower
    evaluator: TaskEvaluator
    membership: Membership
    relocation: Relocation
    reporter: Reporter
    opening: Opening
    control: Control
    files: AdapterFiles
    loop: StepLoop


def make_parts(run: Run, world: World, placement: Placement, source: BackboneSource, tokenizer: Any) -> Parts:
    """Return the parts of a run; the order in which they are made is that in which they know one another.

    Args:
        run: what all of them read.
        world: all processes of the run.
        placement: the model of this process, possibly not loaded yet.
        source: where the backbone comes from.
        tokenizer: the tokenizer of the trainer; `None` for none.
    """
    collator = make_collator(run.args, tokenizer)
    planner = Planner(placement.outline, source, run.args, collator, num_replicas=world.layout.num_replicas)
    plans = PlanFollower(run, world, placement, planner, collator)
    evaluator = TaskEvaluator(
        collator,
        run.log,
        run.saver,
        # Asked at each evaluation: a move makes another executor, a plan another bound.
        executor=lambda: placement.placed.executor,
        max_tokens=lambda: plans.max_tokens,
        share=lambda: placement.row_share,
        tokenizer=source.tokenizer,
    )
    lifecycle = Lifecycle(run, placement, plans)
    membership = Membership(run, world, placement, plans, lifecycle)
    parts: dict[str, Any] = {
        "plans": plans,
        "membership": membership,
        "relocation": Relocation(run, world, placement, plans),
        "reporter": Reporter(run, world, plans, evaluator),
        "opening": Opening(run, world, placement, plans),
        "control": Control(run, membership),
    }
    loop = StepLoop(run, world=world, placement=placement, collator=collator, lifecycle=lifecycle, **parts)
    return Parts(evaluator=evaluator, files=AdapterFiles(run, placement, plans, membership), loop=loop, **parts)
