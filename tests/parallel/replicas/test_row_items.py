"""The units of a step's dispatch, and their token counts: bundles if they fit, otherwise pieces and rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.prefixes import row_trie
from peft_mux.data.task_batch import TaskBatch, TokenSequence, prefix_trie
from peft_mux.parallel.dispatch import BatchRows, DispatchedShares, row_items
from peft_mux.parallel.layout import parse_layout
from tests.packing.tries import Rows, tries
from tests.parallel.replicas import dispatch_cases as cases

PROPERTY = settings(deadline=None, max_examples=30)
LAYOUT = parse_layout(cases.LAYOUT)


def batch_rows(sequences: Rows, task: str = "a") -> BatchRows:
    trie = row_trie([[one] for one in sequences], min_tokens=2)
    return BatchRows(task, 0, tuple(map(len, sequences)), trie)


def sharing_batch(task: str, sizes: list[tuple[int, int, int]]) -> TaskBatch:
    """Return rows in groups: how many, tokens that they begin with, tokens of their own."""
    draw, rows = np.random.default_rng(0), []
    for count, prefix, own in sizes:
        start = draw.integers(1, 10**6, prefix)
        for _ in range(count):
            ids = np.concatenate([start, draw.integers(1, 10**6, own)])
            rows.append(TokenSequence(ids, ids.copy(), len(rows)))
    return TaskBatch(task, 0, seed=0, sequences=tuple(rows), trie=prefix_trie(tuple(rows)))


def divided(batches: list[TaskBatch]) -> list[list[list[int]]]:
    shares = DispatchedShares(LAYOUT, cases.times())
    found = shares.divide(batches)
    shares.close()
    return found


@PROPERTY
@given(st.lists(tries(max_rows=8, words=3), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 60))
def test_each_row_is_in_one_item_and_items_of_several_rows_fit_everywhere(
    tasks: list[Rows], num_replicas: int, least: int
) -> None:
    batches = [batch_rows(own) for own in tasks if own]
    for found in row_items(batches, num_replicas, least):
        for batch, rows, tokens in zip(batches, found.rows, found.tokens, strict=True):
            assert sorted(row for own in rows for row in own) == list(range(len(batch.lengths)))
            computed = [batch.num_computed(own) for own in rows]
            for own, count, apart in zip(rows, tokens, computed, strict=True):
                assert 1 <= count <= apart
                assert len(own) == 1 or apart <= least
                assert apart <= least or count == apart, "what some replicas do not hold goes by what it is"
            together = batch.num_computed(range(len(batch.lengths)))
            # Half a token an item is lost to rounding.
            assert together - len(rows) / 2 <= sum(tokens) <= sum(batch.lengths)


def test_groups_of_completions_stay_on_one_replica() -> None:
    batch = sharing_batch("grpo", [(4, 60, 8)] * 12)
    for share in divided([batch]):
        rows = share[0]
        assert rows, "every replica has work"
        groups = {row // 4 for row in rows}
        assert sorted(rows) == [4 * group + place for group in sorted(groups) for place in range(4)]


def test_replicas_are_balanced_by_computed_tokens_where_one_task_shares_and_another_does_not() -> None:
    # By the lengths of rows the first task would be nine tenths of the work; it computes less than half of it.
    batches = [sharing_batch("shots", [(4, 200, 10)] * 8), cases.batch_of("plain", (120,) * 20)]
    trie = batches[0].trie
    assert trie is not None
    config = dict(zip(range(LAYOUT.num_replicas), LAYOUT.replicas, strict=True))
    computed = [
        trie.num_computed(own[0]) + 120 * len(own[1]) if own[0] else 120 * len(own[1]) for own in divided(batches)
    ]
    alike = [tokens for replica, tokens in enumerate(computed) if config[replica].tp == 1]
    assert max(alike) - min(alike) <= 240 + 120, "no more than an item apart"
    assert sum(computed) == 8 * 240 + 20 * 120, "no beginning twice"


def test_a_bundle_larger_than_a_replica_holds_is_cut_and_rows_too_long_for_it_go_to_others() -> None:
    # The smallest replicas hold 256 tokens, the largest 1,024.
    batch = sharing_batch("a", [(6, 150, 50), (2, 300, 100), (1, 0, 20)])
    found = divided([batch])
    assert sorted(row for share in found for row in share[0]) == list(range(9))
    for replica, share in enumerate(found):
        if LAYOUT.replicas[replica].tp == 1:
            assert not {6, 7} & set(share[0])
