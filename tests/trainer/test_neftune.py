"""Noise on embeddings: as from Trainer's hook, with the task's own random numbers, whatever trains with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F
from transformers.integrations.neftune import neftune_post_forward_hook

from peft_mux import Task
from peft_mux.kernels import philox
from tests.invariants import mux_lab as lab
from tests.trainer.parts import random_task as task
from tests.trainer.parts import rows_with_one_beginning

ALPHA = 20.0


def with_the_hook_of_transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what gives the loss of a global batch row by row, each embedded under Trainer's own hook.

    The hook's draws are replaced by those of the task, which no other library has; its scale is its own.
    """
    draws: list[torch.Tensor] = []

    def fill(self: torch.Tensor, low: float, high: float) -> torch.Tensor:
        return self.copy_((low + (high - low) * draws[-1])[None])

    def losses(model: Any, batch: Any) -> Iterator[torch.Tensor]:
        embedding = model.base_model.model.get_input_embeddings()
        embedding.neftune_noise_alpha = ALPHA
        handle = embedding.register_forward_hook(neftune_post_forward_hook)
        place, seed = 0, philox.draw_seed(batch.seed, batch.step, "neftune")
        for sequence in batch.sequences:
            ids = torch.tensor(sequence.input_ids)
            places = torch.arange(place, place + len(ids))
            draws.append(philox.uniform_rows(seed, places, model.config.hidden_size))
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "uniform_", fill)
                logits = model(input_ids=ids[None]).logits[0]
            yield F.cross_entropy(logits[:-1], ids[1:], reduction="sum") / (batch.num_tokens - len(batch.sequences))
            place += len(ids)
        handle.remove()

    return losses


@pytest.mark.parametrize("targets", [pytest.param("all-linear", marks=pytest.mark.slow), ["v_proj", "embed_tokens"]])
def test_a_task_with_noise_goes_as_under_the_hook_of_transformers(
    targets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = task("noisy", 1, neftune_noise_alpha=ALPHA, config=LoraConfig(r=4, target_modules=targets))
    plain = task("plain", 2)
    run = lab.train([noisy, plain], tmp_path, max_tokens_per_micro_batch=60)
    judged = lab.judge(run.trainer, noisy, with_the_hook_of_transformers(monkeypatch))
    silent = lab.judge(run.trainer, plain)
    lab.assert_as_judged(run, {"noisy": judged, "plain": silent})
    assert abs(lab.judge(run.trainer, noisy).losses[0] / judged.losses[0] - 1) > 1e-3, "the noise shows"


def small(name: str, seed: int, **settings: Any) -> Task:
    return lab.small_task(name, data_seed=seed, max_steps=4, seed=seed, **settings)


def test_neighbours_and_their_noise_change_no_bit_of_a_task(tmp_path: Path) -> None:
    def run(name: str, *others: Task) -> lab.Run:
        return lab.train([small("own", 1, neftune_noise_alpha=ALPHA), *others], tmp_path / name)

    first = run("a", small("other", 2, neftune_noise_alpha=ALPHA))
    # What a run says holds for tasks that say nothing.
    tasks = [small("own", 1), small("other", 2, neftune_noise_alpha=0)]
    second = lab.train(tasks, tmp_path / "b", neftune_noise_alpha=ALPHA)
    lab.assert_bit_identical(first, second, "own")
    assert first.losses["other"] != second.losses["other"]
    assert second.losses["other"] == run("c", small("other", 2)).losses["other"]
    lab.assert_same(run("alone"), first, "own", 1e-5)


def test_passes_that_are_cut_otherwise_draw_the_same(tmp_path: Path) -> None:
    cut = {"max_tokens_per_micro_batch": 16, "split_long_sequences": True, "activation_checkpointing": True}
    own = task("own", 1, rows=lab.rows(3, 9, 20, 40), neftune_noise_alpha=ALPHA)
    whole = lab.train([own], tmp_path / "whole")
    lab.assert_same(lab.train([own], tmp_path / "cut", chunk_size=8, **cut), whole, "own", 1e-5)


def test_a_task_with_noise_shares_no_prefixes_and_says_so(tmp_path: Path) -> None:
    rows = rows_with_one_beginning()
    tasks = [task("noisy", 1, rows=rows, neftune_noise_alpha=ALPHA), task("plain", 2, rows=rows)]
    run = lab.train(tasks, tmp_path)
    table = run.trainer.table
    assert table["noisy"].loader.batch(0).trie is None
    assert table["plain"].loader.batch(0).trie is not None
    assert table["noisy"].sharing_remark.endswith("because its neftune_noise_alpha=20 is drawn for each row")


def test_draws_of_rows_are_even_and_of_the_place_alone() -> None:
    draws = philox.uniform_rows(7, torch.arange(2000), 37)
    assert 0 < draws.min() < draws.max() < 1
    assert abs(draws.mean().item() - 0.5) < 0.005
    assert abs(draws.var().item() - 1 / 12) < 0.002
    some = torch.tensor([1999, 3, 40])
    assert torch.equal(philox.uniform_rows(7, some, 37), draws[some])
    assert not torch.equal(philox.uniform_rows(8, some, 37), draws[some])
