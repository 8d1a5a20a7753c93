"""The models of a service: open in the engine, at rest on disk, woken and replayed when something is asked of them.

A model's history is linear: the requests of its numbers, in order. Its newest snapshot has the state after one of them;
the ledger has all later ones. So a model that is asked for after a restart is opened from its snapshot, and the
requests behind it run again, whose answers were given already.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft_mux.calls import Calls, Frozen, TaskState
from peft_mux.errors import CheckpointError
from peft_mux.serve.checkpoints import ModelConfig, Writer, read_adapter, write_adapter
from peft_mux.serve.ledger import QUEUED, Ledger, Request, request_of

SNAPSHOT_S = 10.0
"""Seconds of passes behind the last snapshot after which the next one is written."""
_PATIENCE_S = 2.0
"""Seconds after which a waiting model takes the place of a model that has work, too."""


@dataclass(eq=False)
class Model:
    """A model that is open, or has requests.

    Attributes:
        id: its id, of the client.
        number: its number in the store, which names it in `Calls`.
        key: name of the key.
        config: what it is made from.
        snapshot: number of the last request in its newest snapshot; -1 without one.
        next_seq: number of the request whose turn it is.
        queue: requests by number.
        running: the request that the passes compute.
        is_open: whether it is in `Calls`.
        has_tail: whether the requests behind its snapshot were queued again.
        is_wanted: whether weights are wanted that its replay makes.
        is_written: whether no snapshot waits for the writer.
        state: its state, at rest, until that is on disk.
        failure: why its requests fail.
        pass_s: seconds of passes behind the snapshot.
        used: when its last request ended.
        opened: when it was opened.
    """

    id: str
    number: int
    key: str
    config: ModelConfig
    snapshot: int
    next_seq: int
    queue: dict[int, Request] = field(default_factory=dict)
    running: Request | None = None
    is_open: bool = False
    has_tail: bool = False
    is_wanted: bool = False
    is_written: bool = True
    state: TaskState | None = None
    failure: str | None = None
    pass_s: float = 0.0
    used: float = 0.0
    opened: float = 0.0

    @property
    def name(self) -> str:
        """Its name in `Calls`."""
        return f"m{self.number}"

    @property
    def is_dirty(self) -> bool:
        """Whether the snapshot is not of the last request."""
        return self.snapshot != self.next_seq - 1


class Models:
    """Opens, rests and wakes models, in the engine's thread.

    Args:
        calls: the engine's door.
        ledger: the ledger.
        writer: writes folders.
        store: the folder of the service.
        modules: the backbone's modules, from `modules_of`.
        max_models: most models open at once.
        tell: runs a function in the engine's thread, soon.

    Attributes:
        by_id: models that are open, that have requests, or whose state is not on disk yet.
    """

    def __init__(
        self,
        calls: Calls,
        ledger: Ledger,
        writer: Writer,
        store: Path,
        modules: dict[str, list[str]],
        max_models: int,
        tell: Callable[[Callable[[], None]], None],
    ) -> None:
        self.by_id: dict[str, Model] = {}
        self._calls, self._ledger, self._writer, self._store, self._tell = calls, ledger, writer, store, tell
        self._modules, self._max_models = modules, max_models
        self._frozen: OrderedDict[str, Frozen] = OrderedDict()
        self._unwritten: dict[str, Frozen] = {}

    def get(self, model_id: str) -> Model:
        """Return a model of the ledger."""
        if model_id not in self.by_id:
            (row,) = self._ledger.read("SELECT * FROM models WHERE id = ?", model_id)
            config = ModelConfig(**json.loads(row["config"]))
            snapshot = row["snapshot"]
            self.by_id[model_id] = Model(model_id, row["number"], row["key"], config, snapshot, snapshot + 1)
        return self.by_id[model_id]

    def forget_idle(self) -> None:
        """Drop what is at rest on disk and has no requests from memory."""
        for model in list(self.by_id.values()):
            if not (model.is_open or model.queue or model.is_wanted or model.state is not None):
                del self.by_id[model.id]

    # ------------------------------------------------------------------ places

    @property
    def open_models(self) -> list[Model]:
        """The models in `Calls`."""
        return [model for model in self.by_id.values() if model.is_open]

    def has_place(self, waiting_s: float) -> bool:
        """Make a place for one more model, if there is none, by putting another one to rest.

        Args:
            waiting_s: how long the model that needs it waits.
        """
        opened = self.open_models
        if len(opened) < self._max_models:
            return True
        idle = [model for model in opened if not model.running and model.next_seq not in model.queue]
        if not idle and waiting_s > _PATIENCE_S:
            now = time.monotonic()
            idle = [model for model in opened if not model.running and now - model.opened > _PATIENCE_S]
            idle = sorted(idle, key=lambda model: model.opened)[:1]
        if idle:
            self.rest(min(idle, key=lambda model: model.used))
        return bool(idle)

    def open(self, model: Model) -> None:
        """Open a new model; there is a place for it.

        Raises:
            ConfigError: if its configuration cannot be used.
        """
        self._calls.open(model.name, model.config.lora(self._modules), seed=model.config.seed)
        model.is_open, model.opened = True, time.monotonic()

    def restore(self, model: Model, state: TaskState, *, only_weights: bool = False) -> None:
        """Give a model a state; close it if the state is not its own."""
        try:
            self._calls.restore(model.name, state, only_weights=only_weights)
        except Exception:
            self.drop(model)
            raise

    def wake(self, model: Model) -> None:
        """Open a model that is at rest, and queue the requests behind its snapshot; there is a place for it.

        One whose files are damaged gets a `failure`.
        """
        model.has_tail = True
        if model.state is not None:
            self.open(model)
            self.restore(model, model.state)
            model.state = None
            return
        sql = f"SELECT * FROM requests WHERE target = ? AND seq > ? AND state != '{QUEUED}'"
        for row in self._ledger.read(sql, model.id, model.snapshot):
            model.queue[row["seq"]] = request_of(row, is_replay=True)
        if model.snapshot < 0:  # its first request makes it again
            return
        try:
            state, _ = read_adapter(self._folder(model, model.snapshot))
            self.open(model)
            self.restore(model, state)
        except CheckpointError as error:
            model.failure = f"the state of the model is damaged: {error}"

    def rest(self, model: Model) -> None:
        """Take a model out of `Calls`; its state goes to disk if that is not there yet."""
        if model.is_dirty:
            model.state = self.snapshot(model, model.next_seq - 1)
        self.drop(model)

    def drop(self, model: Model) -> None:
        """Take a model out of `Calls`."""
        self._calls.drop(model.name)
        model.is_open = model.has_tail = False

    # ------------------------------------------------------------------ snapshots

    def _folder(self, model: Model, seq: int) -> Path:
        return self._store / "models" / model.name / f"snapshot-{seq}"

    def snapshot(self, model: Model, seq: int, then: Callable[[Any], None] | None = None) -> TaskState:
        """Copy the state of a model, and have it written.

        Args:
            model: an open model without a running call.
            seq: number of its last request.
            then: writes more into the ledger in the same commit.
        """
        state, lora = self._calls.state(model.name), model.config.lora(self._modules)
        model.pass_s, model.is_written = 0.0, False
        folder = self._folder(model, seq)

        def note_written() -> None:
            model.snapshot, model.is_written = seq, True
            if model.state is state:
                model.state = None

        def commit(connection: Any) -> None:
            connection.execute("UPDATE models SET snapshot = ? WHERE number = ?", (seq, model.number))
            # No restart reads these bodies again.
            connection.execute(
                "UPDATE requests SET body = NULL WHERE target = ? AND seq <= ? AND body NOT NULL", (model.id, seq)
            )
            if then is not None:
                then(connection)

        def write() -> None:
            if not folder.exists():
                write_adapter(folder, lora, state, {"model": model.number, "seq": seq}, with_state=True)
            self._ledger.write(commit).result()
            for old in folder.parent.iterdir():
                if old != folder:
                    shutil.rmtree(old, ignore_errors=True)
            self._tell(note_written)

        self._writer.put(write)
        return state

    def age_snapshots(self) -> None:
        """Write the states of models behind whose snapshots the passes took long."""
        for model in self.open_models:
            if model.pass_s >= SNAPSHOT_S and model.is_dirty and model.is_written and not model.running:
                self.snapshot(model, model.next_seq - 1)

    # ------------------------------------------------------------------ frozen weights

    def freeze(self, model: Model, folder: Path) -> None:
        """Copy the weights of a model for sampling, and have them written to a folder."""
        frozen = self._unwritten[folder.name] = self._calls.freeze(model.name)
        state = TaskState(dict(frozen.weights), {}, {}, {})

        def write() -> None:
            if not folder.exists():
                write_adapter(folder, frozen.config, state, {"config": vars(model.config)}, with_state=False)
            self._tell(lambda: self._keep(folder.name, self._unwritten.pop(folder.name)))

        self._writer.put(write)

    def _keep(self, name: str, frozen: Frozen) -> None:
        """Keep weights in memory; those used longest ago make place."""
        self._frozen[name] = frozen
        while len(self._frozen) > self._max_models:
            self._frozen.popitem(last=False)

    def frozen(self, folder: Path) -> Frozen | None:
        """Return the weights in a folder for sampling; `None` if it is not there.

        Raises:
            CheckpointError: if the folder is damaged.
        """
        if folder.name in self._unwritten:
            return self._unwritten[folder.name]
        if folder.name not in self._frozen:
            if not folder.exists():
                return None
            state, facts = read_adapter(folder)
            self._keep(folder.name, Frozen(ModelConfig(**facts["config"]).lora(self._modules), state.weights))
        self._frozen.move_to_end(folder.name)
        return self._frozen[folder.name]
