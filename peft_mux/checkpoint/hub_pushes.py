"""`HubPushes`: `push_to_hub=True`, one repository a task, while the run goes on; a failed upload costs a notice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.sharing.hub import push_folder
from peft_mux.errors import ConfigError
from peft_mux.tasks.task_run import TaskRun


class HubPushes:
    """Uploads the adapters of tasks from the run folder, in a thread of their own.

    `hub_strategy="every_save"` uploads with each state of the run, as far as the upload before it is done
    (`hub_always_push=True`: in any case), and every strategy when a task has ended well.

    Args:
        args: the arguments of the run: its `hub_*` fields.
        root: the folder of the run, in which each task has its own.
        warn: prints a line that nobody may miss.
    """

    def __init__(self, args: MultiTaskTrainingArguments, root: Path, warn: Callable[[str], None]) -> None:
        """Upload nothing yet."""
        self._args, self._root, self._warn = args, root, warn
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[Any]] = {}
        self._told: set[str] = set()

    def repo_id(self, run: TaskRun) -> str:
        """Return the repository of a task: its own, or that of the run or its folder with the task's name behind it."""
        return run.task.hub_model_id or f"{self._args.hub_model_id or self._root.resolve().name}-{run.name}"

    def saved(self, runs: list[TaskRun]) -> None:
        """Upload adapters that were written with a state of the run, where the strategy says so."""
        if getattr(self._args.hub_strategy, "value", self._args.hub_strategy) == "every_save":
            for run in runs:
                before = self._under_way.get(run.name)
                if before is None or before.done() or self._args.hub_always_push:
                    self._push(run)

    def ended(self, run: TaskRun) -> None:
        """Upload the adapter that a task has ended with."""
        self._push(run)

    def wait(self) -> None:
        """Wait for all uploads, and say which failed."""
        for name, future in list(self._under_way.items()):
            error = future.exception()
            if error is not None and name not in self._told:
                self._told.add(name)
                self._warn(f"{name}: not on the Hub: {error}")
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _push(self, run: TaskRun) -> None:
        if not self._args.push_to_hub:
            return
        # Read here, as the next state replaces the files while the upload goes on.
        try:
            upload = push_folder(self._root / run.name, self.repo_id(run), run.step, self._options())
        except (OSError, ConfigError) as error:
            self._warn(f"{run.name}: not on the Hub: {error}")
            return
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub")
        self._under_way[run.name] = self._pool.submit(upload)

    def _options(self) -> dict[str, Any]:
        args = self._args
        return {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
