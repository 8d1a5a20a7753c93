"""Run folders that are copied to a URL of fsspec: what is there, how a run resumes from it, and what may go wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from peft_mux import CheckpointError, ConfigError, MultiTaskTrainingArguments, Task
from peft_mux.errors import PeftMuxError
from tests.engine.processes.cases import launch, values
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Run
from tests.parallel.replicas import layout_cases
from tests.runs import assert_ended_with_the_same_weights, files_in, stops_after

URL = "memory://bucket/runs/a"


class Flaky(MemoryFileSystem):
    """Storage that refuses some writes."""

    protocol = "flaky"
    failures = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def put_file(self, lpath: Any, rpath: Any, **options: Any) -> Any:
        if Flaky.failures:
            Flaky.failures -= 1
            raise OSError("the bucket is full")
        return super().put_file(lpath, rpath, **options)


@pytest.fixture(autouse=True)
def empty_storage() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.failures = 0
    yield
    MemoryFileSystem.store.clear()


def tasks() -> list[Task]:
    return [
        lab.small_task("long", data_seed=1, lora_dropout=0.2, max_steps=7),
        lab.small_task("short", data_seed=2, length=9, rank=2, max_steps=3),
    ]


def train(folder: Path, *, resume: Any = None, stop_after: int | None = None, url: str = URL, **options: Any) -> Run:
    recorder = None if stop_after is None else stops_after(stop_after)
    settings = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1, "upload_to": url, **options}
    return lab.train(tasks(), folder, recorder=recorder, resume=resume, **settings)


def uploaded() -> dict[str, bytes]:
    fs = MemoryFileSystem()
    return {path.removeprefix("/bucket/runs/a/"): fs.cat_file(path) for path in fs.find("/bucket/runs/a")}


def files_of(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_in(folder).items() if not name.startswith(("run.lock", "control/"))}


def test_the_copy_has_the_files_of_the_run_folder_and_no_others(tmp_path: Path) -> None:
    MemoryFileSystem().pipe_file("/bucket/runs/a/NOTES.md", b"mine")
    train(tmp_path / "run")
    found = uploaded()
    assert found.pop("NOTES.md") == b"mine", "files of the user stay"
    assert found == files_of(tmp_path / "run")
    some = {"long/adapter_model.safetensors", "short/adapter_config.json", "report.html", "metrics.jsonl"}
    assert some <= found.keys()
    # The limit of one checkpoint holds there too.
    assert {name.split("/")[1] for name in found if name.startswith("long/checkpoint-")} == {"checkpoint-7"}
    assert not [name for name in found if "tmp-" in name or "lock" in name]


@pytest.mark.parametrize("resume", [True, pytest.param("auto", marks=pytest.mark.slow)])
def test_a_run_whose_folder_is_lost_resumes_from_the_copy_with_the_same_bits(resume: Any, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", url="memory://elsewhere")
    train(tmp_path / "first", stop_after=3)
    shutil.rmtree(tmp_path / "first")
    rest = train(tmp_path / "second", resume=resume)
    assert rest.losses["long"] == whole.losses["long"][3:]
    assert_ended_with_the_same_weights(rest, whole, "long", "short")
    assert uploaded() == files_of(tmp_path / "second")
    adapter = "short/adapter_model.safetensors"
    assert uploaded()[adapter] == files_of(tmp_path / "whole")[adapter]


@pytest.mark.slow
def test_auto_begins_where_neither_folder_nor_url_holds_a_run(tmp_path: Path) -> None:
    assert len(train(tmp_path / "run", resume="auto").losses["long"]) == 7


def test_a_local_run_is_resumed_before_the_copy(tmp_path: Path) -> None:
    train(tmp_path / "run", stop_after=3)
    MemoryFileSystem().rm("/bucket", recursive=True)
    assert len(train(tmp_path / "run", resume="auto").losses["long"]) == 4
    assert uploaded() == files_of(tmp_path / "run")


@pytest.mark.slow
def test_a_new_run_does_not_overwrite_the_copy_of_another(tmp_path: Path) -> None:
    train(tmp_path / "first", stop_after=3)
    before = uploaded()
    with pytest.raises(CheckpointError, match=r"args\.upload_to must be a place without a run, got memory://bucket"):
        train(tmp_path / "second")
    assert uploaded() == before


def test_resuming_from_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no state of a run"):
        train(tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_damaged_copy_resumes_from_the_state_before(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", url="memory://elsewhere")
    train(tmp_path / "first", stop_after=5, save_total_limit=5)
    MemoryFileSystem().pipe_file("/bucket/runs/a/state/run-00000005.json", b'{"torn": ')
    rest = train(tmp_path / "second", resume=True, save_total_limit=5)
    assert rest.losses["long"] == whole.losses["long"][4:]
    assert_ended_with_the_same_weights(rest, whole, "long", "short")


@pytest.mark.parametrize("failures", [1, 10**6])
def test_a_copy_that_fails_ends_no_run_and_is_made_at_the_next_save(
    failures: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Flaky.failures = failures
    run = train(tmp_path / "run", url="flaky://bucket/runs/a")
    assert len(run.losses["long"]) == 7
    said = [line for line in capsys.readouterr().out.splitlines() if "upload_to: the copy to flaky" in line]
    assert "OSError: the bucket is full" in said[0]
    if failures == 1:
        assert len(said) == 1
        assert uploaded() == files_of(tmp_path / "run")
    else:
        assert uploaded() == {}


@pytest.mark.slow
def test_a_copy_that_cannot_be_read_back_leaves_no_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "first", stop_after=3)
    plain, calls = MemoryFileSystem.get_file, []

    def get_file(self: Any, rpath: str, *args: Any, **options: Any) -> Any:
        calls.append(rpath)
        if len(calls) == 4:
            raise OSError("the network is down")
        return plain(self, rpath, *args, **options)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    with pytest.raises(CheckpointError, match=r"could not be copied to .*the network is down.*Resume again"):
        train(tmp_path / "second", resume=True)
    assert not list((tmp_path / "second").glob("state/run-*.json"))
    assert len(train(tmp_path / "second", resume=True).losses["long"]) == 4


def test_names_that_lead_out_of_the_run_folder_are_not_copied(tmp_path: Path) -> None:
    train(tmp_path / "first", stop_after=3)
    for name in ("../outside", "long/../../outside", "a\\..\\outside"):
        MemoryFileSystem.store[f"/bucket/runs/a/{name}"] = MemoryFileSystem.store["/bucket/runs/a/plan.json"]
    train(tmp_path / "second", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "second"]
    assert not [path for path in tmp_path.rglob("*") if "outside" in path.name]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://bucket", r"args\.upload_to must be a URL of fsspec .*got 'nowhere://bucket'.*Protocol not known"),
        ("runs/a", r"args\.upload_to must be a URL such as .*got 'runs/a'"),
        ("", r"args\.upload_to must be a URL such as"),
        (5, r"args\.upload_to must be a URL such as .*got 5"),
    ],
)
def test_what_is_no_url_is_refused(url: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PeftMuxError, match=message):
        train(tmp_path / "run", url=url)


def test_a_copy_of_a_run_that_saves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"args\.upload_to must be None, or used with save_strategy"):
        MultiTaskTrainingArguments("runs/a", upload_to=URL, save_strategy="no")


def train_two(rank: int, folder: Path, url: str, resume: Any, max_steps: int) -> list[float]:
    arguments = {"save_steps": 2, "upload_to": url, "resume_from_checkpoint": resume}
    own = [lab.small_task("a", data_seed=1, max_steps=max_steps), lab.small_task("b", data_seed=2, max_steps=2)]
    return layout_cases.train(folder, layout_cases.backbone("llama"), own, **arguments).losses.get("a", [])


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_resume_from_the_copy(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'bucket'}"
    whole = values(launch(2, train_two, tmp_path / "whole", f"{url}/other", None, 6))
    values(launch(2, train_two, tmp_path / "first", f"{url}/run", None, 4))
    rest = values(launch(2, train_two, tmp_path / "second", f"{url}/run", "auto", 4))
    assert rest == [[], []], "the run was over"
    assert len(whole[0]) == 6
    assert (tmp_path / "second" / "a" / "adapter_model.safetensors").read_bytes() == (
        tmp_path / "first" / "a" / "adapter_model.safetensors"
    ).read_bytes()
    refused = launch(2, train_two, tmp_path / "third", "nowhere://bucket", None, 4)
    assert all("args.upload_to must be a URL of fsspec" in str(outcome) for outcome in refused)
