"""`AdapterFiles`: adapters that are written or uploaded because somebody asks for them, not because a step is due."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.checkpoint.sharing.hub import check_push, push_task
from peft_mux.trainer.membership import Membership
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run


class AdapterFiles:
    """Writes and uploads adapters as they are now, between two steps of a run.

    Args:
        run: the run.
        placement: the model of this process.
        plans: tells how a model that is not loaded yet is cut into stages.
        membership: knows the tasks, and when the run may be asked.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower, membership: Membership) -> None:
        """Write nothing yet."""
        self._run, self._placement, self._plans, self._membership = run, placement, plans, membership

    def save(self, folder: str | Path | None = None) -> None:
        """Write every task's adapter, each at the root of its sub-folder, loadable by plain PEFT.

        Args:
            folder: where the sub-folders go; by default the run's own.
        """
        self._membership.queue.ask("save_model", lambda: self._save(Path(folder or self._run.root)))

    def _save(self, folder: Path) -> None:
        self._placement.materialise(self._plans.plan_stages)
        saver = self._run.saver
        for run in self._run.table:
            # On every process: where each holds a part of the adapter, the writer needs all of them.
            weights = saver.full_weights(run)
            if saver.is_writer:
                RunFolder(folder, self._placement.model).save_adapter(run.name, weights)

    def push(self, task: str, repo_id: str, options: Mapping[str, Any]) -> Any:
        """Upload one task's adapter with a model card, and return what the Hub says; `None` where others write.

        Args:
            task: name of the task.
            repo_id: repository on the Hub, such as "me/sql-lora"; made where absent.
            options: `token`, `private`, `revision` and `commit_message`, as `huggingface_hub` takes them.

        Raises:
            ConfigError: for a task that is not there or not trained, or where the Hub refuses.
        """
        run, saver = self._membership.run_of(task), self._run.saver
        check_push(run, repo_id, options)

        def push() -> Any:
            weights = saver.full_weights(run)  # on every process, though one of them writes
            if not saver.is_writer:
                return None
            own = {"folder": saver.place(run), "num_tasks": len(list(self._run.table))}
            return push_task(self._placement.model, run, weights, repo_id, options, **own)

        return self._membership.queue.ask(f"push_to_hub {task}", push)
