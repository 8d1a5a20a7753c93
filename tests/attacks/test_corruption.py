"""Every file of a run folder is flipped, cut, emptied, deleted, exchanged, or gets another file next to it.

A resumed run then continues exactly from one of the saved states, with sound adapters on the disk, or is refused
by name; adapters are loaded bit for bit as they were trained, or not at all.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback

from peft_mux import MultiTaskPeftModel, PeftMuxError, storage
from peft_mux.checkpoint.records import read_record, read_task_state
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.storage import make_manifest
from tests.attacks import attack_lab as attacks
from tests.attacks import run_files
from tests.attacks.attack_lab import COUNT, IS_FULL, Outcome, nano_llama, sampled
from tests.attacks.run_files import SAVING, assert_told_truly, remove, two_tasks
from tests.invariants import mux_lab as lab

pytestmark = pytest.mark.timeout(600)  # the full form makes a hundred changes a test

# ------------------------------------------------------------------------ what is done to a file

Mutation = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flip_the_last_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(1, path.stat().st_size)])


def cut_the_last_byte(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path, rng: random.Random) -> None:
    path.write_bytes(b"")


def fill_with_zeros(path: Path, rng: random.Random) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def fill_with_noise(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(path.stat().st_size))


def append_a_byte(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def delete(path: Path, rng: random.Random) -> None:
    path.unlink()


def exchange(path: Path, rng: random.Random) -> None:
    """Exchange the content with that of the same file of the other task, or of any other file."""
    root = path.parents[0]
    while not (root / "state").is_dir():
        root = root.parent
    names = {"long": "short", "short": "long"}
    own = path.relative_to(root)
    other = root / names.get(own.parts[0], own.parts[0]) / Path(*own.parts[1:])
    if other == path or not other.is_file():
        others = [one for one in sorted(path.parent.iterdir()) if one.is_file() and one != path]
        others = others or [one for one in sorted(root.rglob("*.json")) if one != path]
        other = rng.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def put_beside(path: Path, rng: random.Random) -> None:
    (path.parent / f"extra-{rng.randrange(100)}.bin").write_bytes(b"extra")


def put_a_folder_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe_instead(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def put_another_type_instead(path: Path, rng: random.Random) -> None:
    path.write_text(rng.choice(["null", "5", "[]", '"text"', "{}", "[[[" * 1000, "NaN"]), encoding="utf-8")


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        flip_a_bit,
        flip_the_last_bit,
        cut,
        cut_the_last_byte,
        empty,
        fill_with_zeros,
        fill_with_noise,
        append_a_byte,
        delete,
        exchange,
        put_beside,
        put_a_folder_instead,
        put_a_pipe_instead,
        put_another_type_instead,
    )
}


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


# ------------------------------------------------------------------------ resuming


class StopAtOnce(TrainerCallback):
    """Ends a run before its first step: its state is the one that was resumed."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = True


def resume_and_stop(folder: Path) -> Outcome:
    trainer = attacks.make_trainer(two_tasks(), folder, watcher=None, **SAVING)
    trainer.add_callback(StopAtOnce())
    trainer.train(resume_from_checkpoint=True)
    return attacks.outcome_of(trainer, attacks.Watcher())


def fault_of_resuming(folder: Path, sound: Outcome) -> str | None:
    """Return what is wrong with how a run continues in a folder; `None` where nothing is, or where it is refused."""
    try:
        run = resume_and_stop(folder)
        for name in ("long", "short"):
            own = run.trainer.table[name]
            if own.step == 0 or own.optimizer is None:  # it has ended; its weights are those of its end
                same = run.weights[name] == sound.weights[name] and own.step in (3, 6)
            else:
                digest = lab.digest(lab.task_tensors(run.trainer, name))
                same = digest == sound.digests[name][own.step - 1]
            if not same:
                return f"{name} stands at step {own.step} in no state that was saved"
        assert_told_truly(run, folder)
    except PeftMuxError as error:
        return None if str(folder) in str(error) else f"refused without a path: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def assert_none_slips_through(
    mutation: str, files: list[Path], folder: Path, seeds: int, work: Path, find_fault: Callable[[Path], str | None]
) -> int:
    """Spoil one file in each copy of a folder; assert that nothing is wrong with any copy; return their number."""
    faults, count = [], 0
    for seed, path in product(range(seeds), files):
        own, copy = path.relative_to(folder), work / f"{count}"
        shutil.copytree(folder, copy)
        count += 1
        MUTATIONS[mutation](copy / own, random.Random(f"{mutation} {own} {seed}"))
        fault = find_fault(copy)
        if fault is not None:
            faults.append(f"{mutation} {own} (seed {seed}): {fault}")
        remove(copy)
    assert count
    assert not faults, "\n".join(faults)
    return count


@pytest.mark.parametrize("mutation", sampled(list(MUTATIONS), fast=1))
def test_of_all_files_no_change_slips_through_a_resumption(
    mutation: str, crashed: Path, sound: Outcome, tmp_path: Path, record_property: Any
) -> None:
    files, number = files_of(crashed), list(MUTATIONS).index(mutation)
    # One in ten, from another one on for each mutation: every file has its turn.
    files = files if IS_FULL else files[number % 10 :: 10]
    seeds = 3 if IS_FULL and mutation in ("flip_a_bit", "cut") else 1

    def find_fault(folder: Path) -> str | None:
        return fault_of_resuming(folder, sound)

    count = assert_none_slips_through(mutation, files, crashed, seeds, tmp_path, find_fault)
    record_property(COUNT, count)


def test_an_unharmed_folder_resumes_to_its_newest_state(crashed: Path, sound: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(crashed, folder)
    assert fault_of_resuming(folder, sound) is None
    assert resume_and_stop(folder).trainer.table["long"].step == 4


def test_two_spoilt_states_lead_to_the_one_before_them(crashed: Path, sound: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(crashed, folder)
    flip_a_bit(folder / "long" / "checkpoint-4" / "optimizer.safetensors", random.Random(1))
    run = attacks.train(two_tasks(), folder, resume=True, **SAVING)
    assert run.weights == sound.weights
    assert set(run.statuses.values()) == {"succeeded"}


@pytest.mark.parametrize("place", sampled(["long/checkpoint-4", "long", "short/checkpoint-3", "state"], fast=1))
def test_what_another_run_has_saved_is_refused_by_both_runs(place: str, crashed: Path, tmp_path: Path) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(crashed, folder)
    run_files.crash_run(other)
    (own_id,), (other_id,) = run_ids(folder), run_ids(other)
    remove(folder / place)
    shutil.copytree(other / place, folder / place)
    before = run_files.snapshot(folder)
    with pytest.raises(PeftMuxError, match=r"checkpoint-\d must be of run .* Put back") as refusal:
        attacks.train(two_tasks(), folder, resume=True, **SAVING)
    assert own_id in str(refusal.value)
    assert other_id in str(refusal.value)
    after = run_files.snapshot(folder)
    assert all(after[path] == before[path] for path in before if "checkpoint" in path or "state" in path)


def run_ids(folder: Path) -> set[str]:
    """Return the ids of runs in the records of a folder."""
    return {storage.unsealed_json(path)["run"] for path in (folder / "state").glob("run-*.json")}


# ------------------------------------------------------------------------ loading


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder of a run that came to its end."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, attacks.train(two_tasks(), folder, **SAVING)


def fault_of_loading(folder: Path, wanted: Outcome) -> str | None:
    """Return what is wrong with the adapters that are loaded from a folder; `None` also where they are refused."""
    try:
        model = MultiTaskPeftModel.from_pretrained(nano_llama(), folder)
    except PeftMuxError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    for name in model.tasks:
        if lab.digest(dict(model.task_parameters(name))) != wanted.weights.get(name):
            return f"other weights of {name}"
    return None


@pytest.mark.parametrize("mutation", sampled(list(MUTATIONS), fast=1))
def test_no_spoilt_adapter_is_loaded(
    mutation: str, finished: tuple[Path, Outcome], tmp_path: Path, record_property: Any
) -> None:
    folder, wanted = finished

    def find_fault(copy: Path) -> str | None:
        return fault_of_loading(copy, wanted)

    assert find_fault(folder) is None
    files = [path for path in files_of(folder) if path.parent.name in ("long", "short")]
    seeds = 5 if IS_FULL and mutation in ("flip_a_bit", "cut") else 1
    record_property(COUNT, assert_none_slips_through(mutation, files, folder, seeds, tmp_path, find_fault))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("has_checksums", [False, True], ids=["without checksums", "with checksums of its own"])
def test_weights_that_are_not_finite_are_refused_by_task_and_tensor(
    has_checksums: bool, value: float, finished: tuple[Path, Outcome], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(finished[0], tmp_path / "run"))
    path = folder / "long" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[1]
    tensors[name].view(-1)[0] = value
    save_file(tensors, path, metadata={"format": "pt"})
    if has_checksums:
        storage.write_checksums(folder / "long", ADAPTER_NAMES)
    else:
        (folder / "long" / "adapter_checksums.json").unlink()
    with pytest.raises(PeftMuxError, match=r'task "long": .*not finite') as caught:
        MultiTaskPeftModel.from_pretrained(nano_llama(), folder)
    assert name in str(caught.value)
    assert str(path) in str(caught.value)


# ------------------------------------------------------------------------ records that are sealed and wrong


def entry(**changes: Any) -> dict[str, Any]:
    return {"tasks": {"long": {"status": "running", "reason": "", "step": 4, **changes}}}


HOSTILE_RECORDS: dict[str, Any] = {
    "a list": [],
    "a text": "record",
    "tasks are a list": {"tasks": []},
    "tasks are None": {"tasks": None},
    "tasks are texts": {"tasks": {"long": "running", "short": "running"}},
    "a task without a step": {"tasks": {"long": {"status": "running", "reason": ""}}},
    "a task that leads out": {"tasks": {"../../victim": entry()["tasks"]["long"]}},
    "a task of an absolute path": {"tasks": {"/etc": entry()["tasks"]["long"]}},
    "a task without a name": {"tasks": {"": entry()["tasks"]["long"]}},
    "a step that is a text": entry(step="../../2"),
    "a step below zero": entry(step=-1),
    "a step beyond all": entry(step=10**30),
    "a step that is a list": entry(step=[4]),
    "a step that is NaN": entry(step=float("nan")),
    "a status that there is not": entry(status="rich"),
    "a reason that cannot be printed": entry(reason="\ud800"),
    "a generation that is a word": entry(generation="1"),
    "a run step that is a text": {"run_step": "four"},
    "a run step of another file": {"run_step": 3},
    "a run step with a fraction": {"run_step": 4.0},
    "a run step beyond all": {"run_step": 10**400},
    "a run step that is None": {"run_step": None},
    "a run step below zero": {"run_step": -4},
    "a run step that is a list": {"run_step": [4]},
    "an order that is None": {"order": None},
    "an order of numbers": {"order": [1, 2]},
    "an order of lists": {"order": [["long"], ["short"]]},
    "an order with strangers": {"order": ["../../etc", "long"]},
    "removed ones that lead out": {"removed": {"/etc": entry()["tasks"]["long"]}},
    "a removed one that is there": {"removed": entry()["tasks"]},
    "numerics that are a list": {"numerics": [1]},
    "numerics that are nested": {"numerics": {"bf16": {"x": 1}}},
    "a backbone that is None": {"backbone": None},
    "a backbone that is a list": {"backbone": []},
    "a version that is a text": {"format_version": "1"},
    "a version that is true": {"format_version": True},
    "a version that is None": {"format_version": None},
}
MISSING = ("format_version", "run_step", "backbone", "order", "tasks")
RECORDS = [*HOSTILE_RECORDS, *(f"without {key}" for key in MISSING)]


@pytest.mark.parametrize("hostile", sampled(RECORDS, fast=4))
def test_a_crafted_record_is_refused_by_name_or_passed_over(
    hostile: str, crashed: Path, sound: Outcome, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(crashed, tmp_path / "run"))
    path = max((folder / "state").glob("run-*.json"))
    record, change = storage.unsealed_json(path), HOSTILE_RECORDS.get(hostile, {})
    record = {**record, **change} if isinstance(change, dict) else change
    if hostile not in HOSTILE_RECORDS:
        del record[hostile.removeprefix("without ")]
    path.write_bytes(storage.sealed_json(record))
    with pytest.raises(CheckpointError, match=path.name):
        read_record(path)
    assert fault_of_resuming(folder, sound) is None
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("plant", ["nested", "pipe", "folder", "numbers"])
def test_a_record_that_is_hard_to_read_is_named_without_hanging(plant: str, tmp_path: Path) -> None:
    path = tmp_path / "run-00000004.json"
    body = {"nested": "[" * 200_000 + "]" * 200_000, "numbers": "9" * 10_000}
    if plant in body:
        path.write_text(json.dumps({"sha256": "", "body": body[plant]}))
    else:
        os.mkfifo(path) if plant == "pipe" else path.mkdir()
    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read"):
        read_record(path)


HOSTILE_STATES: dict[str, Any] = {
    "a list": [],
    "nothing": b"",
    "bytes": b"\xff",
    "deep lists": b"[" * 200_000,
    "a NaN": b'{"step": NaN}',
    "a step that is a text": {"step": "four"},
    "a step of another checkpoint": {"step": 2},
    "a step below zero": {"step": -1},
    "a status that there is not": {"status": "rich"},
    "a status of None": {"status": None},
    "settings of None": {"settings": None},
    "settings that are a list": {"settings": []},
    "a loss that is a text": {"last_loss": "low"},
    "a loss mean that is short": {"loss_mean": [1.0]},
    "a loss mean that is long": {"loss_mean": [1, 2, 3]},
    "a loss mean of texts": {"loss_mean": ["a", "b"]},
    "a best of None": {"best": None},
    "callbacks of None": {"callbacks": None},
    "callbacks of texts": {"callbacks": [["EarlyStoppingCallback", "many"]]},
    "an optimizer of None": {"optimizer": None},
    "an optimizer that is a text": {"optimizer": "sgd"},
    "an optimizer that is a list": {"optimizer": [[[]]]},
    "a trainer state of None": {"trainer_state": None},
    "a trainer state with strangers": {"trainer_state": {"stranger": 1}},
    "a history of numbers": {"trainer_state": {"log_history": [5]}},
    "a history of texts": {"trainer_state": {"log_history": [{"eval_loss": "much"}]}},
    "tokens that are a text": {"num_tokens": "many"},
    "tokens beyond all": {"num_tokens": 10**400},
}


@pytest.mark.parametrize("hostile", sampled(list(HOSTILE_STATES), fast=4))
def test_a_crafted_checkpoint_is_refused_by_name_or_passed_over(
    hostile: str, crashed: Path, sound: Outcome, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(crashed, tmp_path / "run"))
    checkpoint = folder / "long" / "checkpoint-4"
    path, change = checkpoint / "state.json", HOSTILE_STATES[hostile]
    if isinstance(change, bytes):
        path.write_bytes(change)
    else:
        state = json.loads(path.read_text(encoding="utf-8"))
        for key, value in change.items() if isinstance(change, dict) else ():
            # What is nested is changed in its place.
            state[key] = {**state[key], **value} if isinstance(value, dict) else value
        path.write_text(json.dumps(change if isinstance(change, list) else state), encoding="utf-8")
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(make_manifest(checkpoint, storage.unsealed_json(manifest)["facts"]))
    # Some is harmless, or read later.
    if not hostile.startswith(("a step of another", "an optimizer", "a trainer state with")):
        with pytest.raises(CheckpointError, match=r"state\.json"):
            read_task_state(path)
    assert fault_of_resuming(folder, sound) is None
