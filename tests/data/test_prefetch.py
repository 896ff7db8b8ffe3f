"""Batches read ahead."""

import threading

import pytest

from maxdiloco.data.prefetch import DEPTH, Batches
from maxdiloco.errors import DataError


def data_threads():
    """Threads that read ahead."""
    return [thread for thread in threading.enumerate() if "maxdiloco-data" in thread.name]


def test_batches_come_in_order_and_end():
    """As many as were said."""
    with Batches(iter(range(100)), count=7) as batches:
        assert list(batches) == list(range(7))
        assert list(batches) == []


def test_at_most_depth_batches_are_read_ahead():
    """Nothing is read that would fill the memory."""
    read = []

    def source():
        for number in range(10):
            read.append(number)
            yield number

    with Batches(source(), count=10) as batches:
        for taken in range(3):
            batches._pool.submit(int).result()  # comes after every read asked for so far
            assert read == list(range(taken + DEPTH))
            assert next(batches) == taken


def test_an_error_is_raised_where_its_batch_would_come():
    """Not before, and not lost in the thread."""

    def source():
        yield 1
        raise DataError("dataset_path=x is gone")

    with Batches(source(), count=3) as batches:
        assert next(batches) == 1
        with pytest.raises(DataError, match="dataset_path=x is gone"):
            next(batches)


def test_close_leaves_no_thread_and_closes_the_source_once():
    """While open there is one; closing again does nothing."""
    closed = []
    batches = Batches(iter(range(9)), count=9, close_source=lambda: closed.append(data_threads()))
    assert next(batches) == 0
    assert len(data_threads()) == 1
    batches.close()
    batches.close()
    assert data_threads() == []
    assert closed == [[]], "the source is closed once, when the thread no longer reads it"
    assert list(batches) == []


def test_leaving_a_with_block_by_an_error_closes():
    """A run that ends by an exception ends."""
    with pytest.raises(KeyError), Batches(iter(range(9)), count=9):
        raise KeyError
    assert data_threads() == []
