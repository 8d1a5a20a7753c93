"""Files and folders that are whole or absent: crashes, corruption, full disks, retention, and paths that attack."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from peft_mux import storage
from peft_mux.errors import CheckpointError, ConfigError
from peft_mux.storage import MANIFEST_NAME, RESERVED_NAMES
from peft_mux.task import Task

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a child process that can be killed")
PROPERTY = settings(deadline=None, max_examples=40)


def fill_with(content: str) -> Callable[[Path], None]:
    def fill(folder: Path) -> None:
        (folder / "a.bin").write_bytes(content.encode() * 50)
        (folder / "b.json").write_text(f'{{"content": "{content}"}}', encoding="utf-8")
        storage.save_tensors(folder / "w.safetensors", {"w": torch.full((4,), float(len(content)))})

    return fill


def write(folder: Path, content: str, *, task: str = "own", step: int = 4) -> None:
    storage.write_folder(folder, fill_with(content), facts={"task": task, "step": step})


def content_of(folder: Path) -> str:
    storage.verify_folder(folder)
    return (folder / "a.bin").read_bytes()[:3].decode()


def assert_refused(folder: Path, *, said: str, expect: dict[str, Any] | None = None) -> None:
    with pytest.raises(CheckpointError, match=said):
        storage.verify_folder(folder, expect=expect)


def with_flipped_bit(content: bytes, rng: random.Random) -> bytes:
    bit, changed = rng.randrange(8 * len(content)), bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def in_child(act: Callable[[], str]) -> tuple[int, str]:
    """Run `act` in a child process; return its exit status as of `waitpid`, and what it returned."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.write(writer, act().encode()[:4000])
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    return os.waitpid(child, 0)[1], said


# ------------------------------------------------------------ crashes


@needs_fork
@pytest.mark.parametrize("is_there", [False, True], ids=["creating", "overwriting"])
@pytest.mark.parametrize("point", storage.CRASHPOINTS)
def test_a_crash_at_any_point_leaves_the_old_folder_or_the_new_one(point: str, is_there: bool, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    if is_there:
        write(folder, "old")

    def act() -> str:
        os.environ["PEFT_MUX_CRASHPOINT"] = point
        write(folder, "new")
        return "finished"

    status, said = in_child(act)
    if point == "after_move_aside" and not is_there:
        assert said == "finished", "nothing is moved aside where nothing stands"
    else:
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
    storage.remove_stale(tmp_path)
    is_new = storage.CRASHPOINTS.index(point) >= storage.CRASHPOINTS.index("after_rename")
    is_new |= said == "finished"
    if is_new or is_there:
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
        assert content_of(folder) == ("new" if is_new else "old")
    else:
        assert list(tmp_path.iterdir()) == []
    write(folder, "yet")
    assert content_of(folder) == "yet", "the folder can be written again"


def test_what_a_crash_left_is_distinguished_from_what_a_user_put_there(tmp_path: Path) -> None:
    kept = [".tmp-mine", ".old-mine", ".tmp-" + "g" * 32, "checkpoint-3", ".old-x-" + "0" * 31]
    for name in kept:
        (tmp_path / name).mkdir()
    stale = tmp_path / f".tmp-{'0' * 32}"
    stale.mkdir()
    (tmp_path / f".tmp-{'1' * 32}").write_text("torn")
    storage.remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


# --------------------------------------------------------- corruption


def test_every_flipped_bit_cut_and_appended_byte_is_found_and_its_file_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    write(folder, "new")
    rng = random.Random(0)
    files = sorted(folder.iterdir())
    assert MANIFEST_NAME in [path.name for path in files]
    changes = []
    for path in files:
        whole = path.read_bytes()
        changes += [(path, content) for content in (b"", whole[: len(whole) // 2], whole[:-1], whole + b" ")]
    changes += [(path, with_flipped_bit(path.read_bytes(), rng)) for path in rng.choices(files, k=400)]
    for path, content in changes:
        whole = path.read_bytes()
        path.write_bytes(content)
        assert_refused(folder, said=path.name)
        path.write_bytes(whole)
    storage.verify_folder(folder)


def test_a_file_that_was_grown_to_a_tebibyte_is_refused_without_reading_it(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    write(folder, "new")
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        os.truncate(path, 2**40)
        assert_refused(folder, said=path.name)
        path.write_bytes(whole)
    storage.verify_folder(folder)


def test_missing_extra_linked_and_replaced_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    write(folder, "new")
    (folder / "extra.bin").write_bytes(b"")
    assert_refused(folder, said=r"extra\.bin is extra; the folder must have exactly the files of its manifest")
    (folder / "extra.bin").unlink()
    os.rename(folder / "a.bin", tmp_path / "a.bin")
    assert_refused(folder, said=r"a\.bin is missing; the folder")
    (folder / "a.bin").symlink_to(tmp_path / "a.bin")
    assert_refused(folder, said=r"a\.bin was changed since it was written")
    (folder / "a.bin").unlink()
    (folder / "a.bin").mkdir()
    assert_refused(folder, said=r"a\.bin was changed since it was written")
    (folder / "a.bin").rmdir()
    os.rename(tmp_path / "a.bin", folder / "a.bin")
    (folder / "sub").mkdir()
    assert_refused(folder, said=r"sub is extra")
    (folder / "sub").rmdir()
    (folder / MANIFEST_NAME).unlink()
    assert_refused(folder, said=MANIFEST_NAME)
    (folder / MANIFEST_NAME).write_bytes(storage.sealed_json({"run_step": 4, "tasks": {}}))
    assert_refused(folder, said="not an intact manifest")
    assert_refused(tmp_path / "absent", said="absent")


def test_a_swapped_file_and_a_swapped_folder_are_reported(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    write(mine, "one", task="a")
    write(theirs, "two", task="b")
    shutil.copy(theirs / "w.safetensors", mine / "w.safetensors")
    write(mine, "one", task="a")
    shutil.copy(theirs / "a.bin", mine / "a.bin")
    assert_refused(mine, said=r"a\.bin")
    shutil.rmtree(mine)
    shutil.copytree(theirs, mine)
    assert_refused(mine, expect={"task": "a"}, said="mine must have task 'a', got 'b'")
    assert_refused(mine, expect={"task": "b", "step": 8}, said="must have step 8, got 4")
    storage.verify_folder(mine, expect={"task": "b", "step": 4})


def test_sealed_json_tells_every_change(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    value = {"step": 4, "tasks": {"a": {"reason": 'quote " and \\ and é'}}}
    whole = storage.sealed_json(value)
    path.write_bytes(whole)
    assert storage.unsealed_json(path) == value
    rng = random.Random(1)
    flipped = [with_flipped_bit(whole, rng) for _ in range(200)]
    for content in (*flipped, b"", b"[]", b"{}", b"null", b'{"body": 1}', whole[:-1], b"\xff"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"record\.json"):
            storage.unsealed_json(path)


# ---------------------------------------------------------- full disks


@pytest.mark.parametrize("call", ["fsync", "rename", "last rename", "fill"])
def test_a_failing_write_is_a_typed_error_and_the_old_folder_stands(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoint-4"
    write(folder, "old")
    rename = os.rename

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    def fail_at_last(source: Path, target: Path) -> None:
        if Path(target) == folder and Path(source).name.startswith(".tmp-"):
            fail()
        rename(source, target)

    if call != "fill":
        monkeypatch.setattr(os, call.split()[-1], fail_at_last if call == "last rename" else fail)
    with pytest.raises(CheckpointError, match=r"checkpoint-4: could not be written .*No space .*previous content"):
        storage.write_folder(folder, fail if call == "fill" else fill_with("new"), facts={})
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert content_of(folder) == "old"


def test_a_file_is_replaced_and_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    outside, link = tmp_path / "outside.txt", tmp_path / "record.json"
    outside.write_bytes(b"precious")
    link.symlink_to(outside)
    storage.write_file(link, b"new")
    assert outside.read_bytes() == b"precious"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_a_link_in_the_place_of_a_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    outside, link = tmp_path / "outside", tmp_path / "run" / "checkpoint-4"
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    link.parent.mkdir()
    link.symlink_to(outside, target_is_directory=True)
    write(link, "new")
    assert content_of(link) == "new"
    assert not link.is_symlink()
    assert [path.name for path in outside.iterdir()] == ["precious"]


# ------------------------------------------------------------ retention


def small_folder(folder: Path, *, is_broken: bool) -> None:
    storage.write_folder(folder, lambda scratch: (scratch / "a.bin").write_bytes(b"content") and None, facts={})
    if is_broken:
        (folder / "a.bin").write_bytes(b"changed")


@PROPERTY
@given(
    st.dictionaries(st.integers(0, 300), st.booleans(), max_size=8),
    st.integers(0, 4),
    st.sets(st.integers(0, 300), max_size=2),
)
def test_pruning_keeps_the_newest_valid_ones_the_protected_and_always_one(
    tmp_path: Path, checkpoints: dict[int, bool], keep: int, others: set[int]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        root = Path(name)
        for number, is_broken in checkpoints.items():
            small_folder(root / f"checkpoint-{number}", is_broken=is_broken)
        foreign = [root / "best", root / "checkpoint-x", root / "checkpoint-7-mine", root / "checkpoint-999"]
        for path in foreign:
            path.mkdir()
            (path / "mine.txt").write_text("mine")
        protect = {root / f"checkpoint-{number}" for number in others & checkpoints.keys()}
        valid = sorted((n for n, is_broken in checkpoints.items() if not is_broken), reverse=True)
        deleted = storage.prune(root, keep=keep, protect=protect)
        left = set(storage.numbered_folders(root))
        assert all((path / "mine.txt").is_file() for path in foreign)
        assert all(path.is_dir() for path in protect)
        assert left | {int(path.name.split("-")[1]) for path in deleted} == checkpoints.keys()
        assert not valid or any(number in left for number in valid), "the last valid one is never deleted"
        if not protect:
            assert left >= set(valid[: max(keep, 1)])
            oldest_kept = valid[: max(keep, 1)][-1] if len(valid) >= max(keep, 1) else -1
            assert all(number >= oldest_kept for number in left)
        assert storage.prune(root, keep=keep, protect=protect) == []


def test_retention_goes_by_number_and_leaves_folders_whose_number_we_do_not_write(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "checkpoint-20", "checkpoint-3", "checkpoint-007"):
        small_folder(tmp_path / name, is_broken=False)
    storage.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-007", "checkpoint-100"]


# ---------------------------------------------------------------- paths


@pytest.mark.parametrize("target", ["outside", "run", "run/other", "nowhere"])
def test_a_link_in_the_place_of_a_task_is_refused(target: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "other").mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (root / "own").symlink_to(tmp_path / target, target_is_directory=True)
    with pytest.raises(CheckpointError, match=r'task "own" must have its folder inside .*, got .*Remove the link'):
        storage.safe_child(root, "own")


@settings(deadline=None, max_examples=40)
@given(st.text(max_size=70))
def test_a_name_is_accepted_by_both_or_by_none(name: str) -> None:
    root = Path(tempfile.gettempdir())
    try:
        child = storage.safe_child(root, name)
    except CheckpointError:
        with pytest.raises(ConfigError):
            Task(name=name, peft_config=LoraConfig(), train_dataset=[{"text": "a"}])
    else:
        assert child.parent == root
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name, re.ASCII)
        assert name.casefold() not in RESERVED_NAMES
        Task(name=name, peft_config=LoraConfig(), train_dataset=[{"text": "a"}])
