"""`BucketBarriers`: how a bucket's step ends on all stages while other buckets are under way, in a window of steps.

Adapters of tasks are disjoint. So before the forwards of a bucket's next step, its own tasks must have stepped on every
stage, and nobody else. Whether a task steps, and how its gradient is clipped, follows from its loss, known on the last
stage, and from the norm of its whole gradient, of which each stage holds a part::

    stage 0      ... B(k) <- figures | update -> figures, F(k + 1) ...        time goes to the right
    stage 1   ... B(k) -> figures ...           update -> figures, F(k + 1)
    stage 2  B(k) -> figures ...                             update, F(k + 1)

Losses and squared norms (figures, `[2, N]` of the N tasks of the bucket) go down behind the last gradient and add up;
the first stage knows all of them as its own last backward is done, and sends them up before the next hidden states. So
they are on the way that backwards and forwards take in any case, and nobody waits longer for them than for these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from peft_mux.engine.gradients.all_reduce import BundledAllReduce
from peft_mux.engine.pipeline.links import PipelineLinks
from peft_mux.engine.pipeline.messages import FIGURES_DTYPE, StepEnd, StepEnds
from peft_mux.engine.step_sums import StepSums
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.pipeline.template import Action

UpdateTasks = Callable[[int, Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]], Collection[str]]
"""Steps tasks by their losses and gradient norms in a step of the window; returns those that step no more in it."""


class BucketBarriers:
    """Ends the steps of buckets on one stage of a window.

    Args:
        model: the part of the model that lies here.
        links: the channels of this stage.
        gradients: knows which cells of a gradient this process counts.
        row: the list of this stage.
        num_stages: S, stages of the pipeline.
        tasks: for each bucket the names of its tasks that take the steps, in stream order; only buckets that have some.
        sums: losses of each step, complete on the last stage where backwards are done.
        update: steps tasks.
    """

    def __init__(
        self,
        model: MultiTaskPeftModel,
        links: PipelineLinks,
        gradients: BundledAllReduce,
        row: Sequence[Action],
        *,
        num_stages: int,
        tasks: Mapping[int, Sequence[str]],
        sums: Sequence[StepSums],
        update: UpdateTasks,
    ) -> None:
        """Read where steps end in the list."""
        self._model, self._links, self._gradients = model, links, gradients
        self._ends, self._tasks, self._sums, self._update = StepEnds(row), tasks, sums, update
        self._is_last = links.stage == num_stages - 1
        self._dead: set[str] = set()
        self._figures: dict[StepEnd, torch.Tensor] = {}
        self.norms: list[dict[str, torch.Tensor]] = [{} for _ in sums]
        """Norm of the whole gradient of each task, by step of the window."""

    def before(self, action: Action) -> None:
        """Update a bucket's tasks before the first forward of their next step; called before every action."""
        end = self._ends.before.get(action)
        if end is not None:
            self._end_step(end)

    def after(self, action: Action) -> None:
        """Hand down what is known of a bucket's step behind its last backward; called after every action."""
        end = self._ends.after.get(action)
        if end is not None and end.bucket in self._tasks:
            self._hand_down(end)

    def finish(self) -> None:
        """Update the tasks of all buckets after their last step; called when the list is over."""
        for end in self._ends.last:
            self._end_step(end)

    def _hand_down(self, end: StepEnd) -> None:
        names = self._tasks[end.bucket]
        squares_N = self._gradients.squared_norms(names)
        if self._is_last:
            losses_N = torch.stack([self._sums[end.step].losses[name] for name in names])
            figures = torch.stack([losses_N.to(FIGURES_DTYPE), squares_N])
        else:
            figures = self._links.incoming["B", self._links.stage + 1].take(end)
            figures[1] += squares_N
        for index, name in enumerate(names):
            # An update may fail on one stage alone. Then no stage may step the task again.
            if name in self._dead:
                figures[1, index] = float("nan")
        if self._links.stage > 0:
            self._links.outgoing["B", self._links.stage - 1].put(end, figures)
        else:
            self._figures[end] = figures

    def _end_step(self, end: StepEnd) -> None:
        """Take losses and norms from the stage before, hand them on, and let the tasks of a bucket step."""
        names = self._tasks.get(end.bucket)
        if names is None:
            return
        stage = self._links.stage
        figures = self._links.incoming["F", stage - 1].take(end) if stage > 0 else self._figures.pop(end)
        if not self._is_last:
            # Before the update, which the next stage can then make at the same time.
            self._links.outgoing["F", stage + 1].put(end, figures)
        losses_N, norms_N = figures[0].float(), figures[1].sqrt().float()
        norms = dict(zip(names, norms_N.unbind(), strict=True))
        self.norms[end.step] |= norms
        self._dead.update(self._update(end.step, dict(zip(names, losses_N.unbind(), strict=True)), norms))
        # Kernels in another dtype read copies of the weights.
        self._model.packed.prepare(names)
