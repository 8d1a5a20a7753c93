"""A step for which memory does not suffice is taken again in smaller passes, and no task is the worse for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset

from peft_mux import MultiTaskTrainer, Task
from peft_mux.errors import MemoryBudgetError
from peft_mux.parallel.cuda_graphs import CapturedPasses
from tests.engine.processes.cases import assert_as_one, launch, values
from tests.invariants.mux_lab import Recorder, Run, assert_same, make_trainer, small_task, train
from tests.parallel.replicas import layout_cases
from tests.records import run_records
from tests.runs import raising

OF_CUDA = torch.OutOfMemoryError("CUDA out of memory.")
CPU = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


def tasks() -> list[Task]:
    return [small_task("one", data_seed=1, lora_dropout=0.2), small_task("two", data_seed=2, length=20)]


def have_memory_for(
    trainer: MultiTaskTrainer, max_tokens: int, error: BaseException, *, from_step: int = 0
) -> list[int]:
    """Let passes of more tokens fail in the middle of their backward; return the tokens of those that did."""
    failed: list[int] = []

    def look(module: Any, inputs: Any, output: torch.Tensor) -> None:
        num_tokens = output.shape[-2]

        def fail(gradient: torch.Tensor) -> None:
            failed.append(num_tokens)
            raise error

        if output.requires_grad and num_tokens > max_tokens and trainer.state.global_step >= from_step:
            output.register_hook(fail)

    trainer.model.backbone.model.layers[0].register_forward_hook(look)
    return failed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that never lacked memory."""
    return train(tasks(), tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_continues_in_passes_that_fit_with_the_results_of_one_that_never_lacked_memory(
    whole: Run, tmp_path: Path
) -> None:
    trainer = make_trainer(tasks(), tmp_path, recorder=(recorder := Recorder()))
    # Of 128 tokens a step; halved twice, and kept: later steps do not try again.
    failed = have_memory_for(trainer, 40, OF_CUDA, from_step=3)
    trainer.train()
    first, last = (event["max_tokens"] for event in run_records(tmp_path, "out_of_memory"))
    assert (failed[0], len(failed), first) == (128, 2, 64)
    assert last <= 40
    assert trainer.plan().max_tokens_per_micro_batch == last
    own, theirs = trainer.pass_reports[0], whole.trainer.pass_reports[0]
    assert (own.num_steps, own.tokens) == (theirs.num_steps, theirs.tokens), "no step counts twice"
    assert (own.asked_tokens, own.computed_tokens) == (theirs.asked_tokens, theirs.computed_tokens)
    for name in ("one", "two"):
        assert_same(Run(trainer, recorder), whole, name, 1e-5)


@pytest.mark.slow
def test_graphs_are_dropped_before_passes_become_smaller(
    whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(trainer: MultiTaskTrainer) -> None:
        # They find no memory, as the pool of captured passes takes it.
        executor = trainer._placement.executor
        executor.runner = CapturedPasses(executor.model, executor.precision)
        executor.runner.run = raising(OF_CUDA)  # type: ignore[method-assign]

    run = train(tasks(), tmp_path, recorder=Recorder(at_begin={2: capture}))
    assert capsys.readouterr().out.count("without CUDA graphs from now on") == 1
    assert run_records(tmp_path, "out_of_memory") == []
    for name in ("one", "two"):
        assert_same(run, whole, name, 1e-5)


@pytest.mark.slow
def test_rows_that_were_read_for_the_step_are_those_of_the_next_attempt(tmp_path: Path) -> None:
    starts: list[int] = []

    def streamed() -> list[Task]:
        one, two = tasks()
        rows = [dict(row) for row in two.train_dataset] * 4  # type: ignore[union-attr]
        stream = IterableDataset.from_generator(lambda: starts.append(1) or iter(rows))
        return [one, replace(two, train_dataset=stream)]

    trainer = make_trainer(streamed(), tmp_path / "short", recorder=(recorder := Recorder()))
    failed = have_memory_for(trainer, 70, OF_CUDA, from_step=2)
    trainer.train()
    assert (len(failed), len(starts)) == (1, 1), "the stream is not read again"
    whole = train(streamed(), tmp_path / "whole")
    assert len(run_records(tmp_path / "short", "out_of_memory")) == 1
    for name in ("one", "two"):
        assert_same(Run(trainer, recorder), whole, name, 1e-5)


@pytest.mark.slow
def test_a_resumed_run_keeps_to_what_fits(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    first = make_trainer(tasks(), tmp_path, **saving)
    have_memory_for(first, 70, OF_CUDA)
    first.train()
    (tmp_path / "state" / "run-00000008.json").unlink()
    second = train(tasks(), tmp_path, resume=True, **saving).trainer
    assert second.plan().max_tokens_per_micro_batch == 64


def test_a_row_that_does_not_fit_by_itself_is_reported_by_task_and_length(tmp_path: Path) -> None:
    trainer = make_trainer(tasks(), tmp_path)
    have_memory_for(trainer, 15, OF_CUDA)
    said = r"tasks\.two: a pass of one row of 20 tokens does not fit .* max_length"
    with pytest.raises(MemoryBudgetError, match=said):
        trainer.train()


def train_with_little_memory(rank: int, folder: Path, short_rank: int, max_tokens: int, arguments: Any) -> Any:
    """Train in one of several processes, of which one has no memory for large passes from step 2 on."""
    failed: list[int] = []

    def tighten(trainer: MultiTaskTrainer) -> None:
        failed.append(0)
        if rank == short_rank:
            failed.extend(have_memory_for(trainer, max_tokens, RuntimeError(CPU)))

    watcher = layout_cases.Watcher(at_begin={2: tighten})
    own = [small_task("one", data_seed=1, lora_dropout=0.2, max_steps=5), small_task("two", data_seed=2, max_steps=5)]
    return layout_cases.train(folder, layout_cases.backbone("llama"), own, watcher=watcher, **arguments)


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_take_a_step_again_together_if_one_has_no_memory(tmp_path: Path) -> None:
    options = {"max_tokens_per_micro_batch": 4096, "shard_optimizer": True}
    wanted = values(launch(2, train_with_little_memory, tmp_path / "whole", -1, 0, options))
    found = values(launch(2, train_with_little_memory, tmp_path / "short", 1, 25, options))
    assert len(run_records(tmp_path / "short", "out_of_memory")) >= 1
    assert run_records(tmp_path / "whole", "out_of_memory") == []
    for mine, theirs in zip(found, wanted, strict=True):
        assert_as_one(mine, theirs)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_pass_for_which_one_process_has_no_memory_ends_all_where_it_cannot_become_smaller(tmp_path: Path) -> None:
    options = {"max_tokens_per_micro_batch": 4096}
    for outcome in launch(2, train_with_little_memory, tmp_path / "rows", 1, 3, options):
        assert "MemoryBudgetError" in str(outcome)
        assert "a pass of one row of" in str(outcome)
    # Passes that communicate are not cut.
    options |= {"tensor_parallel_size": 2, "ddp_timeout": 20}
    first, second = launch(2, train_with_little_memory, tmp_path / "tp", 1, 3, options)
    assert "DefaultCPUAllocator" in str(second)
    assert "rank 1 failed with RuntimeError" in str(first)
