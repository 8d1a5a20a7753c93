"""Several processes train what one would: the same losses, the same bits everywhere, and errors that say who."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peft_mux import ConfigError
from peft_mux.trainer.inputs import processes_asked_of_launcher
from peft_mux.trainer.loop import stop_at_signal
from tests.engine.processes import cases
from tests.engine.processes.cases import Part, assert_alike, assert_as_one, launch, named_in, values
from tests.invariants.mux_lab import small_task
from tests.records import run_records

pytestmark = pytest.mark.distributed
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Part:
    return cases.run(tmp_path_factory.mktemp("alone"), cases.five_tasks())


# -------------------------------------------------------------------- results


@SLOW
def test_processes_that_do_not_see_the_same_run_folder_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    for outcome in launch(2, cases.in_separate_folders, tmp_path):
        assert "args.output_dir must be the same folder for every process" in outcome.error
        assert "host-1/run (rank 1)" in outcome.error
    assert list((tmp_path / "host-0/run").glob(".tmp-*")) == []


@SLOW
def test_a_nan_on_one_process_quarantines_its_task_on_all_and_harms_no_neighbour(alone: Part, tmp_path: Path) -> None:
    parts = values(launch(2, cases.poisoned, tmp_path))
    for part in parts:
        status, reason = part.statuses["wide"]
        assert (status, reason) == ("failed", "non_finite: loss is nan at step 3")
        assert all(np.isfinite(weight).all() for weight in part.weights["wide"].values())
        assert_as_one(part, alone, but=("wide",))
    for key, weight in parts[0].weights["wide"].items():
        np.testing.assert_array_equal(weight, parts[1].weights["wide"][key])


@SLOW
def test_a_stream_that_blocks_on_one_process_fails_its_task_on_all(alone: Part, tmp_path: Path) -> None:
    parts = values(launch(2, cases.with_a_stream_that_blocks, tmp_path))
    assert parts[0].statuses == parts[1].statuses
    status, reason = parts[0].statuses["blocked"]
    assert status == "failed"
    assert "got no rows for 1 s" in reason
    assert "(on rank 1)" in reason
    assert_as_one(parts[0], alone, but=("blocked",))


# --------------------------------------------------------- stopping, resuming


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_at_one_step_and_any_number_of_them_resumes(
    alone: Part, tmp_path: Path
) -> None:
    parts = values(launch(3, cases.stopped_by_a_signal, tmp_path))
    assert [part.step for part in parts] == [5, 5, 5]
    assert_alike(parts)
    resumed = values(launch(2, cases.resume_five, tmp_path))
    assert_alike(resumed)
    assert_as_one(resumed[0], alone, from_step=5)


@pytest.mark.slow
def test_a_killed_process_is_named_at_once_and_one_process_resumes_from_the_last_state(
    alone: Part, tmp_path: Path
) -> None:
    outcomes = launch(3, cases.killed, tmp_path, 2)
    assert outcomes[2].exit_code == -9
    for survivor in outcomes[:2]:
        assert survivor.error.startswith("ProcessError: rank")
        assert ": rank 2 has died. " in survivor.error
        assert named_in(survivor.error) == {2}
        assert "resume_from_checkpoint=True" in survivor.error
        assert survivor.seconds < cases.TIMEOUT_S
    resumed = cases.resume_five(0, tmp_path)
    assert_as_one(resumed, alone, from_step=4)


@SLOW  # of which ten seconds are waited
def test_a_process_that_stands_still_is_named_when_the_time_limit_has_passed(tmp_path: Path) -> None:
    outcomes = launch(2, cases.hung, tmp_path, 2, limit_s=15.0)
    assert "no word from rank 1" in outcomes[0].error
    assert "2 s (args.ddp_timeout)" in outcomes[0].error
    assert outcomes[0].seconds < 10


@SLOW
def test_the_error_of_one_process_is_reported_by_the_others_though_a_launchers_file_cannot_take_it(
    tmp_path: Path,
) -> None:
    outcomes = launch(3, cases.failing_alone, tmp_path, "missing/error.json")
    assert outcomes[1].error == "OSError: the disk of rank 1 is full"
    for other in (outcomes[0], outcomes[2]):
        assert other.error.startswith("ProcessError")
        assert "failed with OSError: the disk of rank 1 is full" in other.error
        assert other.seconds < cases.TIMEOUT_S


@SLOW
def test_a_failure_is_named_within_seconds_though_the_device_waits_for_the_process_that_failed() -> None:
    outcomes = launch(2, cases.waiting_for_the_device)
    assert outcomes[1].error == "OSError: the disk of rank 1 is full"
    assert "rank 1 failed with OSError: the disk of rank 1 is full" in outcomes[0].error
    assert outcomes[0].seconds < 10


@SLOW
def test_a_process_that_waits_for_one_that_waited_for_the_failed_one_names_the_failed_one() -> None:
    outcomes = launch(3, cases.waiting_for_a_process_that_waited_for_another)
    assert outcomes[1].error == "OSError: the disk of rank 1 is full"
    for other in (outcomes[0], outcomes[2]):
        assert "rank 1 failed with OSError: the disk of rank 1 is full" in other.error
        assert other.seconds < cases.TIMEOUT_S


# ---------------------------------------------------------------- differences


@pytest.mark.parametrize(
    ("part", "said"),
    [
        pytest.param(
            cases.with_another_configuration,
            [
                "ConfigError: 2 things are wrong",
                "args.seed must be 42, as on the other processes, got 7",
                "rank 1: tasks.wide.learning_rate must be 0.001, as on the other processes, got 0.01",
            ],
            id="settings",
        ),
        pytest.param(
            cases.with_other_weights, ["ConfigError: rank 1: model.frozen weights (digest)"], id="weights", marks=SLOW
        ),
    ],
)
def test_what_differs_on_one_process_is_named_on_every_process(part: Any, said: list[str], tmp_path: Path) -> None:
    for outcome in launch(2, part, tmp_path):
        assert all(line in outcome.error for line in said), outcome.error
    assert not list(tmp_path.glob("*/adapter_model.safetensors"))


@SLOW
def test_what_threads_of_all_processes_ask_for_is_done_at_one_step_and_what_one_alone_asks_for_is_not(
    tmp_path: Path,
) -> None:
    outcomes = launch(2, cases.asked_by_threads, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    first, second = (outcome.value for outcome in outcomes)
    assert first.statuses == second.statuses
    assert {name: status for name, (status, _) in first.statuses.items()} == dict.fromkeys(
        [*(task.name for task in cases.five_tasks()), "late"], "succeeded"
    )
    assert first.losses == second.losses
    assert len(first.losses["late"]) == 4
    assert first.report == "pause narrow: not done, as the run has ended."
    assert second.report == "pause large: not done, as the run has ended."


@SLOW
def test_a_task_that_waits_runs_on_all_processes_when_the_one_before_it_fails_on_one(tmp_path: Path) -> None:
    outcomes = launch(2, cases.waiting_when_the_last_one_fails, tmp_path)
    assert [outcome.error for outcome in outcomes] == ["", ""]
    for outcome in outcomes:
        assert outcome.value.statuses["first"][0] == "failed"
        assert outcome.value.statuses["second"][0] == "succeeded"
        assert len(outcome.value.losses["second"]) == 3


# ------------------------------------------------------------ printing, files


@SLOW
def test_two_processes_train_to_the_result_of_one_and_the_first_alone_prints_and_writes(
    alone: Part, tmp_path: Path
) -> None:
    outcomes = launch(2, cases.watched, tmp_path)
    parts = values(outcomes)
    assert_alike(parts)
    assert_as_one(parts[0], alone)
    trainer = cases.lab.make_trainer(cases.five_tasks(), tmp_path / "one")
    running = [name for name, losses in parts[0].losses.items() if len(losses) == cases.NUM_STEPS]
    pages = [page.values for name in running for page in trainer.model.registry.slab_of(name).pages]
    assert parts[0].num_bytes == sum(page.numel() for page in pages) * 4 + len(running) * 4, "nothing of the backbone"
    assert parts[0].written
    assert parts[1].written == []
    assert "step 2" in outcomes[0].printed
    assert outcomes[1].printed == ""
    ranks = run_records(tmp_path, "rank")
    assert [record["rank"] for record in ranks] == [0, 1]
    assert all(record["tokens"] > 0 and record["seconds"] > record["waited_seconds"] > 0 for record in ranks)
    assert re.search(r"seconds +waiting", parts[0].report)
    assert len(list((tmp_path / "state").glob("run-*.json"))) == 4


# ------------------------------------------------------------ without processes


@pytest.mark.parametrize(
    ("environment", "promised"),
    [
        ({}, None),
        ({"MASTER_PORT": "29500"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500"}, "several"),
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_PORT": "29500", "WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "4"}, "4"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "2"),
    ],
)
def test_a_launcher_that_was_asked_for_more_processes_is_recognised(
    environment: dict[str, str], promised: str | None
) -> None:
    assert processes_asked_of_launcher(environment) == promised


def test_ctrl_c_that_a_launcher_repeats_forces_nothing_and_a_later_one_does() -> None:
    asked: list[str] = []
    with stop_at_signal(lambda number: asked.append("stop"), echo_s=0.2):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert asked == ["stop"]
        time.sleep(0.25)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_one_process_instead_of_several_is_shown_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(
        ConfigError,
        match=r"processes must be the several that the launcher was asked for, got 1.*torchrun --nproc-per-node",
    ):
        cases.lab.make_trainer([small_task("own", data_seed=1)], tmp_path)


def test_a_sharded_launch_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft_mux import MultiTaskTrainingArguments

    monkeypatch.setattr(MultiTaskTrainingArguments, "world_size", property(lambda args: 2))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(
        ConfigError,
        match=r"processes must be plain ones, each with the whole model \(accelerate launch --multi_gpu, or",
    ):
        cases.lab.make_trainer([small_task("own", data_seed=1)], tmp_path)
