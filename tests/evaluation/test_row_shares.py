"""Which held-out rows a replica evaluates: all of them once, over all replicas, and equally many passes on each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.errors import MetricsError
from peft_mux.trainer.evaluation import agreed_metrics, merged, own_batches
from peft_mux.user_code import UserCodeError


@given(st.integers(0, 40), st.integers(1, 6))
def test_every_batch_is_given_to_one_replica_and_all_get_equally_many(num_batches: int, num_replicas: int) -> None:
    batches = [f"batch {number}" for number in range(num_batches)]
    shares = [list(own_batches(batches, replica, num_replicas)) for replica in range(num_replicas)]  # type: ignore[arg-type]
    own = [(number, batch) for share in shares for number, batch in share if number is not None]
    assert sorted(own) == list(enumerate(batches))
    assert {len(share) for share in shares} == {-(-num_batches // num_replicas)}
    assert all(batch in batches for share in shares for _, batch in share)


def test_what_replicas_have_found_is_put_together_in_the_order_of_the_batches() -> None:
    found = [{0: "a", 2: "c"}, {1: "b", 3: "d"}]
    assert list(merged(found).items()) == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


def test_a_function_that_fails_on_one_process_fails_the_evaluation_on_all() -> None:
    own = UserCodeError("ValueError: here")
    for found, error, reason in (
        ([({}, "ValueError: here"), ({"eval_f": 1.0}, None)], own, "here"),
        ([({"eval_f": 1.0}, None), ({}, "ValueError: there")], None, "there"),
    ):
        with pytest.raises(MetricsError, match=reason):
            agreed_metrics(found, error)
    assert agreed_metrics([(None, None), ({"eval_f": 1.0}, None)], None) == {"eval_f": 1.0}, "a stage has no logits"
