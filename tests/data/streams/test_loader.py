"""Global batches from streams: in the stream's order, whatever was asked for before, and every fault a task's own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
from datasets import Dataset, interleave_datasets

from peft_mux.data.dataset import open_rows
from peft_mux.data.sources import load_rows
from peft_mux.data.streams import ReadAhead, StreamLoader
from peft_mux.data.task_batch import TaskBatch
from peft_mux.data.tokenize import TokenizeOptions
from peft_mux.errors import ConfigError, DataError, ForcedInterrupt
from tests.children import run_code

OPTIONS = TokenizeOptions(task="own", max_length=64)
MASKED = {"input_ids": [1, 2], "labels": [-100, -100]}


class Rows:
    """A stream that can be read again and counts how often it was."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        self.num_reads = 0

    def __iter__(self) -> Any:
        self.num_reads += 1
        return iter(self.rows)


def make_stream(stream: Any, batch_size: int = 3, *, timeout_s: float = 60.0) -> StreamLoader:
    opener = partial(open_rows, options=OPTIONS, tokenizer=None)
    where = "tasks.own.train_dataset"
    return StreamLoader(stream, opener, where=where, task="own", batch_size=batch_size, seed=5, timeout_s=timeout_s)


def rows_of(num_rows: int) -> list[dict[str, Any]]:
    return [{"input_ids": [row + 1, row + 2]} for row in range(num_rows)]


def first_tokens(batch: TaskBatch) -> list[int]:
    return [int(sequence.input_ids[0]) for sequence in batch.sequences]


def tokens_of(loader: StreamLoader, steps: Iterable[int]) -> list[list[int]]:
    """Return the first tokens of the rows of some steps."""
    return [first_tokens(loader.batch(step)) for step in steps]


def hub_stream(num_rows: int = 10) -> Any:
    return Dataset.from_list(rows_of(num_rows)).to_iterable_dataset().shuffle(seed=3, buffer_size=4)


def mixed_stream() -> Any:
    """Return rows of two streams of unequal lengths, mixed as docs/data.md shows."""
    parts = [
        Dataset.from_list([{"input_ids": [first + row, 1]} for row in range(count)]).to_iterable_dataset()
        for first, count in ((1, 9), (100, 4))
    ]
    return interleave_datasets(parts, probabilities=[0.7, 0.3], seed=0, stopping_strategy="all_exhausted")


def plain_stream() -> Rows:
    return Rows(rows_of(10))


@pytest.mark.parametrize("make", [plain_stream, hub_stream, mixed_stream])
def test_reading_on_seeking_and_reading_again_give_the_same_batches(make: Callable[[], Any]) -> None:
    sequential = make_stream(make())
    batches = tokens_of(sequential, range(9))
    assert all(len(batch) == 3 for batch in batches)
    for step in (8, 3, 0, 5, 5):
        assert first_tokens(make_stream(make()).batch(step)) == batches[step], "a fresh loader that seeks"
        assert first_tokens(sequential.batch(step)) == batches[step], "the same loader, going back"


def test_a_stream_that_ends_is_read_again_without_losing_a_row() -> None:
    stream = plain_stream()
    loader = make_stream(stream)
    assert list(chain(*tokens_of(loader, range(10)))) == list(range(1, 11)) * 3
    assert stream.num_reads == 3


def test_a_shuffled_stream_has_another_order_in_its_next_epoch() -> None:
    loader = make_stream(hub_stream(12))
    epochs = [list(chain(*tokens_of(loader, steps))) for steps in (range(4), range(4, 8))]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 13))
    assert epochs[0] != epochs[1]


def test_a_bad_row_of_a_stream_is_named_when_it_comes() -> None:
    loader = make_stream(Rows([{"input_ids": [1, 2]}] * 4 + [{"input_ids": None}]))
    assert len(loader.batch(0).sequences) == 3
    with pytest.raises(DataError, match=r"tasks\.own\.train_dataset row 4 column input_ids"):
        loader.batch(1)


def test_an_error_of_ours_that_a_stream_raises_fails_its_task_like_any_other() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from rows_of(3)
        yield from load_rows("absent.jsonl")

    class Own(Rows):
        def __iter__(self) -> Any:
            return rows()

    loader = make_stream(Own([]))
    assert len(loader.batch(0).sequences) == 3
    with pytest.raises(DataError, match=r"ConfigError: .*absent\.jsonl"):
        loader.batch(1)


def test_a_stream_without_usable_rows_is_refused_rather_than_read_for_ever() -> None:
    with pytest.raises(DataError, match="a stream without rows"):
        make_stream(Rows([])).batch(0)
    with pytest.raises(
        DataError, match=r"tasks\.own\.train_dataset must have at least one usable row, got a stream without any"
    ):
        make_stream(Rows([MASKED])).batch(0)


# --------------------------------------------------------- what goes wrong, and its messages


@pytest.mark.parametrize("step", [0, 1, 4])
def test_rows_that_a_forced_interrupt_lost_on_their_way_come_again(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, loader = tokens_of(make_stream(plain_stream()), range(6)), make_stream(plain_stream())
    tokens_of(loader, range(step))
    take = ReadAhead.take

    def interrupted(reader: ReadAhead[Any]) -> Any:
        take(reader)
        raise ForcedInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReadAhead, "take", interrupted)
        with pytest.raises(ForcedInterrupt):
            loader.batch(step)
    assert tokens_of(loader, range(step, 6)) == wanted[step:]


def test_a_batch_asked_for_again_is_not_read_again() -> None:
    stream = plain_stream()
    loader = make_stream(stream)
    loader.begin(0)
    assert loader.batch(0) is loader.batch(0)
    assert loader.sample_lengths == [2, 2, 2]
    assert loader.batch(1) is loader.batch(1)
    assert loader.tokens_per_step == 6, "of the sample that was kept"
    assert stream.num_reads == 1


def test_counts_of_rows_are_those_up_to_the_given_batch() -> None:
    loader = make_stream(Rows([*rows_of(3), MASKED, {"input_ids": list(range(80))}, *rows_of(2)]))
    loader.batch(0)
    loader.begin(1)
    assert loader.report is not None
    assert loader.report.remarks == []
    loader.batch(1)
    assert (loader.report.num_rows, loader.report.num_kept) == (7, 6)
    assert (loader.report.num_without_targets, loader.report.num_truncated) == (1, 1)
    assert loader.report.num_tokens == 5 * 2 + 64
    loader.batch(0)
    assert loader.report.num_rows == 3, "read again from the start, it counts again from the start"


# ------------------------------------------------------ the next row while the caller works

LIMIT_S = 60.0


def reader_of(items: Iterator[Any], timeout_s: float = LIMIT_S) -> ReadAhead[Any]:
    return ReadAhead(items, where="tasks.own.train_dataset", timeout_s=timeout_s)


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("peft_mux tasks.own")]


def test_errors_of_our_own_keep_their_kind() -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        reader_of(raising_at_once(ConfigError("no such setting"))).take()


def raising_at_once(error: BaseException) -> Iterator[int]:
    raise error
    yield 0


def test_an_iterator_that_gives_nothing_in_time_is_reported_of_and_waited_for_no_longer() -> None:
    goes_on = threading.Event()

    def items() -> Iterator[int]:
        goes_on.wait(LIMIT_S)
        yield 1

    reader = reader_of(items(), timeout_s=0.05)
    try:
        with pytest.raises(
            DataError, match=r"tasks\.own\.train_dataset must deliver all rows of a step within.*data_timeout_s"
        ):
            reader.take()
        assert len(own_threads()) == 1
        with pytest.raises(DataError, match="got no rows"):
            reader.settle()
    finally:
        goes_on.set()


def test_a_time_limit_beyond_what_a_lock_can_wait_for_is_none() -> None:
    assert reader_of(iter([1]), timeout_s=1e300).take() == 1


def test_a_thousand_readers_leave_no_thread() -> None:
    for number in range(1000):
        reader = reader_of(iter([number, number]))
        assert reader.take() == number
        reader.begin()
    for thread in own_threads():
        thread.join(LIMIT_S)
    assert own_threads() == []


def test_a_process_that_may_have_no_more_threads_fails_the_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader = reader_of(iter([1]))
    reader.begin()
    with pytest.raises(DataError, match="RuntimeError: can't start new thread"):
        reader.take()


@pytest.mark.slow
def test_a_blocked_thread_does_not_keep_the_interpreter_from_ending() -> None:
    code = (
        "import threading\n"
        "from peft_mux.data.streams import ReadAhead\n"
        "def items():\n"
        "    threading.Event().wait()\n"
        "    yield 1\n"
        "ReadAhead(items(), where='x', timeout_s=1.0).begin()\n"
        "print('ended')\n"
    )
    assert run_code(code) == "ended"
