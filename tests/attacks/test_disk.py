"""The disk is full, read-only or broken, for a while or permanently; or the run folder contains a trap.

None of this ends the run or changes a bit of what is trained; and no task is reported as succeeded whose adapter is
not on the disk.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from peft_mux import PeftMuxError
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import Outcome, nano_task, sampled
from tests.attacks.kill_cases import Running, Whole
from tests.attacks.run_files import SAVING, assert_told_truly, remove, snapshot, two_tasks
from tests.runs import Acts, raising

pytestmark = pytest.mark.timeout(60)

# ------------------------------------------------------------------------ calls that fail


@dataclass(frozen=True)
class Fault:
    """A call of the system that fails.

    Attributes:
        call: which one.
        code: with which error.
        first: which call from the first step on is the first that fails.
        lasts: whether all later calls fail too.
    """

    call: str
    code: str
    first: int
    lasts: bool

    @property
    def name(self) -> str:
        return f"{self.call} {self.code} {'from' if self.lasts else 'at'} call {self.first}"


FAULTS = [
    Fault(*values)
    for values in product(
        ("fsync", "rename", "replace", "mkdir", "open", "unlink"),
        ("ENOSPC", "EROFS", "EIO"),
        (1, 3, 8, 14),
        (False, True),
    )
]


class Faults:
    """Makes calls below a folder fail, once it is armed."""

    def __init__(self, fault: Fault, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.fault, self.root, self.count, self.is_armed = fault, root, 0, False
        if fault.call == "open":
            guarded = self._guarded(io.open, lambda mode="r", *_: "r" not in mode)
            patch.setattr(io, "open", guarded)
            patch.setattr(builtins, "open", guarded)
            writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
            patch.setattr(os, "open", self._guarded(os.open, lambda flags, *_: bool(flags & writes)))
        else:
            patch.setattr(os, fault.call, self._guarded(getattr(os, fault.call), lambda *_: True))

    def arm(self, _: Any = None) -> None:
        self.is_armed = True

    def disarm(self, _: Any = None) -> None:
        self.is_armed = False

    def _guarded(self, call: Callable[..., Any], changes: Callable[..., bool]) -> Callable[..., Any]:
        def guarded(what: Any, *rest: Any, **more: Any) -> Any:
            if self.is_armed and changes(*rest) and (isinstance(what, int) or str(self.root) in os.fspath(what)):
                self._count(None if isinstance(what, int) else os.fspath(what))
            return call(what, *rest, **more)

        return guarded

    def _count(self, path: str | None) -> None:
        self.count += 1
        if self.count == self.fault.first or (self.fault.lasts and self.count > self.fault.first):
            code = getattr(errno, self.fault.code)
            raise OSError(code, os.strerror(code), path)


def assert_trained_alike(run: Outcome, sound: Outcome) -> None:
    """Assert that every bit of the trained weights is the same."""
    assert run.losses == sound.losses
    assert run.weights == sound.weights


def assert_goes_on(folder: Path, sound: Outcome) -> None:
    """Assert that, with the disk sound again, the folder resumes to the same end, or says what it lacks."""
    for _ in range(3):
        try:
            resumed = attacks.train(two_tasks(), folder, resume=True, **SAVING)
        except PeftMuxError as error:
            refusal = str(error)
        else:
            assert resumed.weights == sound.weights
            assert set(resumed.statuses.values()) == {"succeeded"}
            assert_told_truly(resumed, folder)
            return
        if "holds no state" in refusal:
            return
        # A task none of whose states came through; the others must not be lost with it.
        lost = re.match(r'task "(\w+)" has no valid checkpoint .*remove the task\'s folder', refusal)
        assert lost is not None, refusal
        remove(folder / lost[1])
    raise AssertionError(f"its own advice does not help: {refusal}")


@pytest.mark.slow
@pytest.mark.parametrize("fault", sampled(FAULTS, fast=2, ci=12))
def test_a_call_that_fails_ends_no_run_and_changes_no_bit(
    fault: Fault, sound: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        faults = Faults(fault, folder, patch)
        run = attacks.train(two_tasks(), folder, at_begin={1: faults.arm}, **SAVING)
        faults.disarm()
    assert_trained_alike(run, sound)
    assert_told_truly(run, folder)
    assert_goes_on(folder, sound)


# ------------------------------------------------------------------------ a limit of the system


@dataclass(frozen=True)
class Room:
    """How large files may get, from which step on and until which one."""

    size_bytes: int
    begins: int
    ends: int | None

    @property
    def name(self) -> str:
        return f"{self.size_bytes} bytes from step {self.begins} to {self.ends}"


SIZES = [Room(*room) for room in product((600, 1500, 2500, 6000), (1, 2, 4), (3, 5, None))]


@pytest.mark.parametrize("room", sampled(SIZES, fast=1, ci=7))
def test_a_disk_without_room_ends_no_run_and_changes_no_bit(
    room: Room, disk: Callable[[int | None], None], sound: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    acts = {room.begins: lambda _: disk(room.size_bytes)}
    if room.ends is not None and room.ends > room.begins:
        acts[room.ends] = lambda _: disk(None)
    try:
        run = attacks.train(two_tasks(), folder, at_begin=acts, **SAVING)
    finally:
        disk(None)
    assert_trained_alike(run, sound)
    assert_told_truly(run, folder)
    assert_goes_on(folder, sound)


@pytest.mark.parametrize("ends", [3, 5, None])
def test_too_many_open_files_end_no_run_and_change_no_bit(ends: int | None, sound: Outcome, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def forbid(_: Any) -> None:
        os.close(lowest := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))

    def allow(_: Any = None) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    folder = tmp_path / "run"
    try:
        run = attacks.train(two_tasks(), folder, at_begin={2: forbid, ends or 99: allow}, **SAVING)
    finally:
        allow()
    assert_trained_alike(run, sound)
    assert_told_truly(run, folder)
    assert_goes_on(folder, sound)


class FullOutput(io.StringIO):
    """An output on a disk without room, such as a log that `nohup` writes."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


OUTPUTS: dict[str, Callable[[], Any]] = {
    "one without room": FullOutput,
    "none": lambda: None,
    "a closed one": closed,
    "one of ASCII": lambda: io.TextIOWrapper(io.BytesIO(), encoding="ascii"),
    "an object that only writes": lambda: type("Writes", (), {"write": len, "flush": lambda self: None})(),
}


@pytest.mark.parametrize("kind", sampled(list(OUTPUTS), fast=1))
def test_an_output_of_any_kind_ends_no_run(
    kind: str, sound: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = OUTPUTS[kind]()
    own = nano_task("own", 5, callbacks=[Acts(raising(ValueError("caf\xe9 \u2192")))])
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        patch.setattr(sys, "stderr", output)
        run = attacks.train([*two_tasks(), own], tmp_path / "run", disable_tqdm=False, **SAVING)
    assert run.statuses == {"long": "succeeded", "short": "succeeded", "own": "failed"}
    assert {name: run.losses[name] for name in sound.losses} == sound.losses
    if kind == "one of ASCII":
        assert rb"\u2192" in output.buffer.getvalue()


# ------------------------------------------------------------------------ a folder with two runs


@pytest.mark.slow
def test_a_second_run_in_a_folder_is_refused_and_the_first_ends_unharmed(whole: Whole, tmp_path: Path) -> None:
    folder, continues = tmp_path / "run", tmp_path / "continues"
    first = Running(folder, waits_for=continues)
    try:
        while not (folder / "state" / "run-00000002.json").exists():
            assert first.process.is_alive()
        for resume in (False, True):
            with pytest.raises(PeftMuxError, match=r"must have one writer at a time, got process \d+"):
                attacks.train([nano_task("epochs", 1)], folder, resume=resume, **SAVING)
    finally:
        continues.touch()
        outcome = first.finish()
    whole.assert_ended_alike(folder, outcome)


@pytest.mark.parametrize("content", [b'{"pid": 1, "host": "gone"}', b"\xff" * 5000])
def test_a_lock_that_a_dead_process_left_locks_no_one_out(content: bytes, sound: Outcome, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_bytes(content)
    assert attacks.train(two_tasks(), tmp_path, **SAVING).weights == sound.weights


# ------------------------------------------------------------------------ traps


FILES = "metrics.jsonl metrics.tmp config.json plan.json environment.json run.lock run.lock.json state long long/best"
PLACES = [*FILES.split(), "long/checkpoint-6"]
PLACES += [f"long/adapter_{name}" for name in ("model.safetensors", "config.json", "checksums.json")]


def link_to_file(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "precious")


def link_to_folder(place: Path, outside: Path) -> None:
    place.symlink_to(outside, target_is_directory=True)


def link_to_nowhere(place: Path, outside: Path) -> None:
    place.symlink_to(outside / "new")


def pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def folder_instead(place: Path, outside: Path) -> None:
    place.mkdir()


TRAPS = {trap.__name__: trap for trap in (link_to_file, link_to_folder, link_to_nowhere, pipe, folder_instead)}
SET_TRAPS = [f"{trap}: {place}" for trap in TRAPS for place in PLACES]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_resumed", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize("trap", sampled(SET_TRAPS, fast=2, ci=14))
def test_a_trap_in_the_folder_is_refused_or_harmless(
    trap: str, is_resumed: bool, crashed: Path, sound: Outcome, tmp_path: Path
) -> None:
    kind, place = trap.split(": ")
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    if is_resumed:
        shutil.copytree(crashed, folder)
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    TRAPS[kind](path, outside)
    try:
        run = attacks.train(two_tasks(), folder, resume=is_resumed, **SAVING)
    except PeftMuxError as error:
        assert str(folder) in str(error)  # noqa: PT017 the other outcome is tested below
    else:
        assert_told_truly(run, folder)
        assert run.weights == sound.weights
    assert snapshot(outside) == {"precious": b"precious"}


@pytest.mark.parametrize("place", ["state", "long", "short"])
def test_a_folder_that_becomes_a_link_during_training_is_not_written_through(
    place: str, sound: Outcome, tmp_path: Path
) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"

    def swap(_: Any) -> None:
        (folder / place).rename(outside)
        (folder / place).symlink_to(outside, target_is_directory=True)
        before.update(snapshot(outside))

    before: dict[str, bytes] = {}
    run = attacks.train(two_tasks(), folder, at_begin={5: swap}, **SAVING, save_total_limit=1)
    assert run.losses == sound.losses
    assert snapshot(outside) == before != {}
