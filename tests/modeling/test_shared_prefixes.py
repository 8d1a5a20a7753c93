"""Shared = unshared: common prefixes are computed once, and no loss and no gradient changes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives import heads as token_losses
from tests.modeling.adapters.passes import assert_nan_stays
from tests.modeling.backbones import CLASSIFIERS, LANGUAGE_MODELS, MIXTURES, filled, multiplexed
from tests.packing.tries import Rows, hard_rows, tries

LEAST = 2
BACKBONES = {**LANGUAGE_MODELS, **{f"{name} classifier": case for name, case in CLASSIFIERS.items()}}


@cache
def model_of(name: str) -> MultiTaskPeftModel:
    """Return a model of two tasks with adapters that do something, in float64 where its products know it."""
    make, targets = BACKBONES[name]
    model = multiplexed(filled(make), targets)
    return model if name in MIXTURES else model.double()


def sequences_of(rows: Rows, seed: int = 0, classes: int | None = None) -> tuple[TokenSequence, ...]:
    """Return rows to train on, some labels of which are masked."""
    rng = np.random.default_rng(seed)
    labels = [np.where(rng.random(len(row)) < 0.2, IGNORE_INDEX, row) for row in rows]
    label = [None if classes is None else int(rng.integers(classes)) for _ in rows]
    return tuple(
        TokenSequence(row, own, index, class_label=one)
        for index, (row, own, one) in enumerate(zip(rows, labels, label, strict=True))
    )


def stream_of(*tasks: tuple[TokenSequence, ...]) -> MuxBatch:
    """Return the tasks `a`, `b` and so on as one micro-batch that shares nothing."""
    batches = [TaskBatch(name, 0, 7, rows) for name, rows in zip("abc", tasks, strict=False)]
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100_000)
    return batch


def losses_and_gradients(model: MultiTaskPeftModel, batch: MuxBatch) -> list[torch.Tensor]:
    """Return what a pass gives: losses, statistics, and the gradient of each parameter."""
    model.zero_grad(set_to_none=False)
    output = model(batch)
    output.losses.sum().backward()
    parameters = [one for name in batch.task_names for one in model.task_parameters(name).values()]
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in parameters]
    return [output.losses.detach(), *(one for one in output.statistics if one is not None), *gradients]


def assert_near(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that two tensors are one, up to a millionth of their size: losses are summed in fp32."""
    tolerance = 1e-6 if mine.dtype == torch.float64 else 3e-5
    assert (mine - theirs).norm() <= tolerance * theirs.norm() + 1e-3 * tolerance


def assert_shared_is_unshared(model: MultiTaskPeftModel, batch: MuxBatch, *, shares: bool = True) -> None:
    """Assert that a micro-batch whose tasks share tokens gives what it gives without."""
    shared = batch.sharing([True] * len(batch.task_names), LEAST)
    if shares:
        assert shared.num_computed < shared.num_tokens
    wanted, found = (losses_and_gradients(model, one) for one in (batch, shared))
    for mine, theirs in zip(found, wanted, strict=True):
        assert_near(mine, theirs)


# ------------------------------------------------------------- architectures


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_every_architecture_computes_the_same(name: str) -> None:
    rows = sequences_of(hard_rows()), sequences_of([np.tile(row, 4) for row in hard_rows()], seed=1)
    assert_shared_is_unshared(model_of(name), stream_of(*rows))


@pytest.mark.parametrize("name", ["Llama", pytest.param("Gemma3", marks=pytest.mark.slow)])
def test_any_trie_computes_the_same(name: str) -> None:
    @settings(max_examples=12)
    @given(tries(words=3), tries(words=3, max_run=20))
    def check(a: Rows, b: Rows) -> None:
        rows = sequences_of(a), sequences_of(b, seed=1)
        batch = stream_of(*rows)
        if len(batch.target_rows):
            assert_shared_is_unshared(model_of(name), batch, shares=False)

    check()


def test_classes_of_last_tokens_are_those_of_rows_that_others_begin_with() -> None:
    rows = sequences_of(hard_rows(), classes=3), sequences_of(hard_rows()[::-1], classes=3, seed=1)
    assert_shared_is_unshared(model_of("Llama classifier"), stream_of(*rows))


@pytest.mark.parametrize(
    ("targets", "recomputes"), [(["q_proj", "lm_head"], False), (["v_proj", "embed_tokens"], True)]
)
def test_adapters_on_the_head_and_on_embeddings_and_recomputed_activations_see_each_row_once(
    targets: list[str], recomputes: bool
) -> None:
    model = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), targets).double()
    if recomputes:
        model.gradient_checkpointing_enable()
    assert_shared_is_unshared(model, stream_of(sequences_of(hard_rows()), sequences_of(hard_rows()[2:], seed=1)))


def test_the_head_sees_each_row_with_a_label_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama")
    seen: list[int] = []
    plain = token_losses.linear_cross_entropy

    def counting(hidden_MD: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append(len(hidden_MD))
        return plain(hidden_MD, *arguments)

    monkeypatch.setattr(token_losses, "linear_cross_entropy", counting)
    rows = tuple(TokenSequence(row, row, index) for index, row in enumerate(hard_rows()))
    batch = stream_of(rows).sharing([True], LEAST)
    model(batch)
    # A row's last token has no label; the branches of a row have one each.
    different = {(row[: end + 1].tobytes(), row[end + 1]) for row in hard_rows() for end in range(len(row) - 1)}
    assert seen[0] < len(batch.target_rows)
    # [1] begins two nodes that are too short to be shared, [1 2 ..] and [1 7 8], and so on.
    assert len(different) <= seen[0] <= batch.num_computed


# ----------------------------------------------------------------- isolation


def test_a_nan_in_the_weights_of_one_task_leaves_the_bits_of_the_other() -> None:
    model = multiplexed(filled(LANGUAGE_MODELS["Llama"][0]), LANGUAGE_MODELS["Llama"][1])
    batch = stream_of(sequences_of(hard_rows()), sequences_of(hard_rows(), seed=1)).sharing([True, True], LEAST)
    assert_nan_stays(model, batch, "a")


def test_tasks_that_may_not_share_have_all_of_their_rows_and_the_bits_of_before() -> None:
    model = model_of("Llama")
    batch = stream_of(sequences_of(hard_rows()), sequences_of(hard_rows(), seed=1))
    assert batch.sharing([False, False], LEAST) is batch
    assert batch.sharing([True, True], 100).shared is None
    one = batch.sharing([False, True], LEAST)
    assert one.computed_offsets[1] == batch.task_offsets[1]
    wanted, found = (losses_and_gradients(model, part) for part in (batch, one))
    assert torch.equal(wanted[0][:1], found[0][:1])


def test_parts_of_a_stream_share_as_it_does() -> None:
    rows = [sequences_of(hard_rows(), seed=seed) for seed in range(3)]
    part = stream_of(*rows).sharing([True, False, True], LEAST).of_tasks([1, 2])
    wanted = stream_of(rows[1], rows[2]).sharing([False, True], LEAST)
    assert part.shared is not None
    assert wanted.shared is not None
    assert part.shared.may_share == (False, True)
    assert part.shared.tree.nodes == wanted.shared.tree.nodes
    assert part.of_tasks([0]).shared is None
