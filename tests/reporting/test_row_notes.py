"""Reports on rows, when a task is made, when it begins, and of streams as they come: cut or left out, trained on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from peft_mux import MultiTaskTrainer, Task
from tests.invariants.mux_lab import Recorder, make_trainer, rows, small_task, tiny_llama
from tests.records import run_records
from tests.runs import task_of

LONG, SHORT = rows(1, 20, 40, 40), rows(2, 4, 9, 9)
MASKED = {"input_ids": [1, 2, 3], "labels": [-100] * 3}


def data_records(folder: Path) -> list[dict[str, Any]]:
    return run_records(folder, "data")


def own_task(train_dataset: Any, **settings: Any) -> Task:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    return task_of("own", train_dataset, config, **{"max_steps": 4, "max_length": 16, **settings})


def warned(task: Task, folder: Path, **arguments: Any) -> tuple[MultiTaskTrainer, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer([small_task("other", data_seed=1, max_steps=4), task], folder, **arguments)
    return trainer, [str(one.message) for one in caught if issubclass(one.category, UserWarning) and "own" in str(one)]


def test_rows_left_out_are_warned_of_when_the_trainer_is_made_with_counts_and_remedy(tmp_path: Path) -> None:
    trainer, lines = warned(own_task(SHORT + LONG), tmp_path, overlong_policy="drop")
    (line,) = lines
    assert line.startswith("tasks.own.train_dataset: 20 of 24 rows longer than 16 left out. ")
    assert "Raise max_length" in line
    assert 'overlong_policy="truncate"' in line
    assert trainer.table["own"].loader.report.num_kept == 4


def test_each_split_is_warned_of_once(tmp_path: Path) -> None:
    _, lines = warned(own_task(SHORT + LONG, eval_dataset=[*SHORT, MASKED]), tmp_path)
    assert [line.split(".")[2].split(":")[0] for line in lines] == ["train_dataset", "eval_dataset"]
    assert "20 of 24 rows cut to 16 tokens" in lines[0]
    assert "1 of 5 rows without targets" in lines[1]
    assert warned(own_task(SHORT), tmp_path)[1] == [], "whole rows are not warned of"


def test_held_out_rows_that_are_trained_on_and_float16_weights_are_warned_of_once(tmp_path: Path) -> None:
    for settings in ({}, {"packing": True}):
        _, lines = warned(own_task(SHORT, eval_dataset=SHORT[::-1], **settings), tmp_path)
        (line,) = lines
        assert line.startswith("tasks.own.eval_dataset has the rows of train_dataset: ")
    assert warned(own_task(SHORT, eval_dataset=rows(3, 4, 9, 9)), tmp_path)[1] == []
    with pytest.warns(UserWarning, match="model has float16 weights.*Load it with dtype=torch.bfloat16") as caught:
        make_trainer([own_task(SHORT)], tmp_path, model=tiny_llama().half())
    assert len(caught) == 1


def test_a_run_says_at_its_start_what_it_trains_on_without_being_asked_for_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = own_task(SHORT + LONG, eval_dataset=SHORT, eval_steps=4)
    trainer, _ = warned(task, tmp_path, overlong_policy="drop", disable_tqdm=False)
    trainer.train()
    printed = capsys.readouterr().out
    assert "tasks.own.train_dataset: 20 of 24 rows longer than 16 left out" in printed
    assert printed.count("own: loss on 32 of 36 tokens (labels and masks of the rows)\n") == 1
    assert printed.count("loss on") == 2
    records = {(record["task"], record["split"]): record for record in data_records(tmp_path)}
    assert records.keys() == {("other", "train_dataset"), ("own", "train_dataset"), ("own", "eval_dataset")}
    own = records["own", "train_dataset"]
    assert (own["num_rows"], own["num_kept"], own["num_dropped_long"], own["limit"]) == (24, 4, 20, 16)
    assert own["data_format"] == "tokenized"
    assert own["num_tokens"] == 4 * 9
    assert own["trained_on"] == "labels and masks of the rows"
    trainer.table["own"].num_steps += 1  # trained on, nothing is reported again
    trainer.train()
    assert len(data_records(tmp_path)) == 3


def test_the_rows_of_an_arrival_are_reported_when_it_begins(tmp_path: Path) -> None:
    late = own_task(SHORT + LONG)
    recorder = Recorder(at_begin={1: lambda trainer: trainer.register_tasks([late])})
    trainer = make_trainer([small_task("other", data_seed=1, max_steps=4)], tmp_path, recorder=recorder)
    with pytest.warns(UserWarning, match=r"tasks\.own\.train_dataset: 20 of 24 rows cut"):
        trainer.train()
    assert [(record["task"], record["run_step"]) for record in data_records(tmp_path)] == [("other", 0), ("own", 2)]


def test_a_stream_is_reported_of_with_its_first_row_left_out_and_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Rows:
        def __iter__(self) -> Iterator[Any]:
            yield from rows(3, 4, 9, 9)
            yield from LONG[:2]
            yield from rows(4, 50, 9, 9)
            yield from LONG

    trainer, lines = warned(own_task(Rows()), tmp_path, overlong_policy="drop", disable_tqdm=False)
    assert lines == [], "its first rows are whole"
    trainer.train()
    own = [record for record in data_records(tmp_path) if record["task"] == "own"]
    assert [(record["run_step"], record["num_rows"], record["num_dropped_long"]) for record in own] == [
        (0, 4, 0),
        (1, 10, 2),
        (4, 18, 2),
    ]
    printed = capsys.readouterr().out
    assert printed.count("2 of 10 rows longer than 16 left out") == 1
    assert printed.count("left out") == 2
    assert "own: loss on 32 of 36 tokens (labels and masks of the rows), in its first 4 rows\n" in printed


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_of_many_tasks_that_lose_rows_the_sum_is_reported_in_two_lines_and_a_plan_lists_a_dozen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [own_task(SHORT + LONG)] + [
        replace(own_task([*SHORT, *LONG[:number], MASKED]), name=f"t{number:02}") for number in range(13)
    ]
    trainer = make_trainer(tasks, tmp_path, disable_tqdm=False, max_steps=1)
    assert str(trainer.plan()).count("note  ") == 13
    assert "note  ... and 2 more, in notes" in str(trainer.plan())
    trainer.train()
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "loss on" in line] == [
        "loss on 1,918 of 2,072 tokens of 14 tasks; of each: metrics.jsonl"
    ]
    told_lines = [line for line in printed if "cut" in line or "worst: " in line]
    assert len(told_lines) == 2
    assert "98 cut to max_length tokens, 13 without targets" in told_lines[0]
    assert "tasks.t00.train_dataset: 1 of 5 rows without targets" in told_lines[1]
    assert {record["task"] for record in data_records(tmp_path)} == {task.name for task in tasks}, "the file has each"
