"""A run folder has one writer: another is refused by name, and a dead one keeps no process out."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from peft_mux.errors import CheckpointError
from peft_mux.serve.app import serve
from peft_mux.storage import HOLDER_NAME, LOCK_NAME, FolderLock, keeper_of

fcntl = pytest.importorskip("fcntl")


def child_that(act: Callable[[], object]) -> tuple[int, int]:
    """Fork a child that acts, says so, and waits to be killed; return its process id and a pipe that ends with it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            act()
            os.write(writer, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"x", "the child has died"
    return child, reader


def acquired(folder: Path) -> FolderLock:
    lock = FolderLock(folder)
    lock.acquire()
    return lock


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_lock_is_refused_naming_folder_host_and_process_and_the_first_continues(tmp_path: Path) -> None:
    first, second = FolderLock(tmp_path), FolderLock(tmp_path)
    first.acquire()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on host '.+' there") as caught:
        second.acquire()
    assert str(tmp_path) in str(caught.value)
    assert first.is_held
    assert not second.is_held
    first.release()
    second.acquire()
    second.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_lock_whose_file_was_cleaned_away_is_taken_again(is_replaced: bool, tmp_path: Path) -> None:
    first, second = acquired(tmp_path), FolderLock(tmp_path)
    (tmp_path / LOCK_NAME).unlink()
    if is_replaced:
        (tmp_path / LOCK_NAME).touch()
    first.renew()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on host"):
        second.acquire()
    (tmp_path / LOCK_NAME).unlink()
    second.acquire()
    with pytest.raises(CheckpointError, match="must have one writer at a time"):
        first.renew()
    first.release()
    assert keeper_of(tmp_path), "the other one keeps the folder"
    second.release()


def test_a_trainer_that_starts_waits_for_processes_that_only_ask(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    with (tmp_path / LOCK_NAME).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as `keeper_of` does, in a process that then gets no time to run
        lock, errors = FolderLock(tmp_path), []

        def acquire() -> None:
            try:
                lock.acquire()
            except CheckpointError as error:
                errors.append(error)

        thread = threading.Thread(target=acquire)
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
    thread.join(10)
    assert errors == []
    assert lock.is_held
    lock.release()


def test_a_killed_process_locks_no_one_out(tmp_path: Path) -> None:
    child, pipe = child_that(FolderLock(tmp_path).acquire)
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=f"process {child} on host"):
        lock.acquire()
    kill(child)
    assert (tmp_path / LOCK_NAME).exists(), "it had no time to clear away"
    lock.acquire()
    lock.release()
    os.close(pipe)


def test_a_child_of_a_killed_process_locks_no_one_out(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def acquire_and_fork() -> None:
        lock = FolderLock(tmp_path)
        lock.acquire()
        pid, _ = child_that(lambda: None)
        os.write(writer, str(pid).encode())

    child, pipe = child_that(acquire_and_fork)
    pid = int(os.read(reader, 20))
    kill(child)
    os.kill(pid, 0)  # the grandchild lives, and has inherited the open file
    lock = acquired(tmp_path)
    with pytest.raises(CheckpointError):
        FolderLock(tmp_path).acquire()
    lock.release()
    os.kill(pid, signal.SIGKILL)
    for descriptor in (reader, writer, pipe):
        os.close(descriptor)


def test_a_folder_that_was_made_for_nothing_is_removed_and_one_with_content_stays(tmp_path: Path) -> None:
    lock = acquired(tmp_path / "run")
    lock.release()
    assert not (tmp_path / "run").exists()
    lock.acquire()
    (tmp_path / "run" / "file").write_text("content")
    lock.release()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_file_system_without_locks_locks_no_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    (tmp_path / LOCK_NAME).touch()  # a killed process has left it
    lock = acquired(tmp_path)
    assert lock.is_held
    assert keeper_of(tmp_path).startswith(f"process {os.getpid()} on host")
    lock.release()
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_lock_library_is_a_refusal_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("a deadlock")

    monkeypatch.setattr("peft_mux.storage.FileLock.acquire", fail)
    with pytest.raises(CheckpointError, match=r"output_dir must be a folder .*a deadlock"):
        FolderLock(tmp_path / "run").acquire()
    with pytest.raises(CheckpointError, match=r"--store must be a folder .* or set another --store"):
        serve("no model", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_forked_process_that_releases_leaves_the_lock_to_its_parent(tmp_path: Path) -> None:
    lock = acquired(tmp_path / "run")
    child, pipe = child_that(lock.release)
    try:
        assert {path.name for path in (tmp_path / "run").iterdir()} == {LOCK_NAME, HOLDER_NAME}
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on host"):
            FolderLock(tmp_path / "run").acquire()
    finally:
        kill(child)
        os.close(pipe)
    lock.release()
    assert not (tmp_path / "run").exists()


def within_5_s(act: Callable[[], object]) -> object:
    """Return what a function returns, which may not wait for anything."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(act()), daemon=True)
    thread.start()
    thread.join(5)
    assert results, "it waits, or has failed"
    return results[0]


def test_a_pipe_in_place_of_the_holder_file_stops_neither_training_nor_questions(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / HOLDER_NAME)
    lock = FolderLock(tmp_path)
    within_5_s(lambda: lock.acquire() or True)
    assert keeper_of(tmp_path).startswith(f"process {os.getpid()} on host")
    (tmp_path / HOLDER_NAME).unlink()
    os.mkfifo(tmp_path / HOLDER_NAME)
    assert within_5_s(lambda: keeper_of(tmp_path)) == "another process"
    lock.release()
    assert not list(tmp_path.iterdir())


def test_a_lock_whose_holder_cannot_be_noted_is_released(tmp_path: Path) -> None:
    (tmp_path / HOLDER_NAME).mkdir()
    lock = FolderLock(tmp_path)
    with pytest.raises(CheckpointError, match=HOLDER_NAME):
        lock.acquire()
    assert not lock.is_held
    (tmp_path / HOLDER_NAME).rmdir()
    FolderLock(tmp_path).acquire()
