"""Batches for replicas: the order, who reads what, workers, evaluation, what is refused."""

import multiprocessing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from maxdiloco.data import order, pipeline
from maxdiloco.errors import DataError

S = 256
FIRST = 65  # byte of window 0: what is read as text has no control characters


@pytest.fixture
def text(settings, folder):
    """Opens 30 windows of 4 tokens: window i is S, 3 times FIRST + i; `seed` None is file order."""
    root = folder({f"{number:02}.txt": bytes([FIRST + number] * 3) for number in range(30)})

    def make(split="train", **changed):
        keys = {"dataset_path": root, "eval_dataset_path": root, "enable_data_shuffling": False}
        return pipeline.open_dataset(settings(**keys | changed), split=split)

    return make


def box(replicas, rows):
    """All these rows of all these replicas, as `read` takes them."""
    return dict(zip(("replicas", "rows"), np.ix_(replicas, rows), strict=True))


def numbers(batch):
    return (batch["tokens"][..., 1] - FIRST).tolist()


def test_batches_are_what_read_gives_step_by_step(text):
    """Two replicas of three rows: step 2 reads 6 to 11, step 6 windows 0 to 5 of the next epoch."""
    data, position = text(), order.first_position(2, 3)
    with pipeline.batches(data, position, steps=range(2, 7), **box(range(2), range(3))) as batches:
        found = list(batches)
    assert len(found) == 5
    for step, batch in enumerate(found, start=2):
        alone = pipeline.read(data, position, step, **box(range(2), range(3)))
        assert batch.keys() == alone.keys() == {"tokens", "segment_ids"}
        for name, leaf in batch.items():
            assert leaf.dtype == np.int32
            assert np.array_equal(leaf, alone[name])
    assert numbers(found[0]) == [[6, 7, 8], [9, 10, 11]]
    assert found[0]["tokens"][0, 0].tolist() == [S, *3 * [FIRST + 6]]
    assert np.all(found[0]["segment_ids"] == 1)
    assert numbers(found[-1]) == [[0, 1, 2], [3, 4, 5]]


def test_shuffled_epochs_read_every_window_once_in_orders_of_their_own(text):
    data = text(enable_data_shuffling=True, data_shuffle_seed=4)
    position = order.first_position(2, 3)
    with pipeline.batches(data, position, steps=range(1, 11), **box(range(2), range(3))) as batches:
        read = np.array([numbers(batch) for batch in batches]).reshape(2, 30)
    assert sorted(read[0]) == sorted(read[1]) == list(range(30))
    assert len({tuple(read[0]), tuple(read[1]), tuple(range(30))}) == 3
    same = text(enable_data_shuffling=True, data_shuffle_seed=4)
    other = text(enable_data_shuffling=True, data_shuffle_seed=5)
    first = box(range(2), range(3))
    assert numbers(pipeline.read(same, position, 1, **first)) == read[0, :6].reshape(2, 3).tolist()
    assert numbers(pipeline.read(other, position, 1, **first)) != read[0, :6].reshape(2, 3).tolist()


def test_scattered_rows_are_read_and_no_other(text, monkeypatch):
    """Pairs (m, b) that are no box, as a host of a TPU torus holds them: three windows read."""
    data, position = text(), order.first_position(2, 4)
    asked = []
    read = type(data.windows).read
    monkeypatch.setattr(
        type(data.windows), "read", lambda self, found: asked.append(found) or read(self, found)
    )
    mine = {"replicas": [0, 0, 1], "rows": [1, 3, 0]}
    with pipeline.batches(data, position, steps=range(2, 3), **mine) as batches:
        assert numbers(next(batches)) == [9, 11, 12]
    assert [windows.tolist() for windows in asked] == [[9, 11, 12]]


@hypothesis_settings(max_examples=20)
@given(M=st.integers(1, 4), B=st.integers(1, 4), taken=st.integers(0, 5))
def test_an_epoch_ends_before_a_window_would_be_read_again(M, B, taken):
    """last_step_of_epoch, also after a resume with another M, in a set of 64 windows."""
    data = pipeline.Dataset(FakeWindows(), None, "dataset_path=fake")
    position = order.next_position(order.first_position(2, 2), 1 + taken, M, B)
    last = pipeline.last_step_of_epoch(data, position)
    assert order.indices(position, last + 1, [M - 1], [B - 1]) >= 64
    if last >= position.s0:
        assert order.indices(position, last, [M - 1], [B - 1]) < 64


class FakeWindows:
    num_windows = 64


def test_worker_processes_read_the_same_and_end(text):
    """grain_worker_count 0 and 2; after close no process is left, before it there are two."""
    data, position = text(enable_data_shuffling=True), order.first_position(2, 3)
    found = []
    for worker_count in (0, 2):
        with pipeline.batches(
            data, position, steps=range(1, 12), **box(range(2), range(3)), worker_count=worker_count
        ) as batches:
            found.append([numbers(next(batches)) for _ in range(7)])
            assert len(multiprocessing.active_children()) == worker_count
        assert multiprocessing.active_children() == []
    assert found[0] == found[1]


def eval_numbers(data, **arguments):
    """Windows of each evaluation batch, None where it is padding."""
    with pipeline.eval_batches(data, **arguments) as batches:
        return [
            [
                int(tokens[1]) - FIRST if segments.all() else None
                for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True)
            ]
            for batch in batches
        ]


def test_evaluation_reads_all_of_the_data_once_and_pads_the_last_batch(text):
    found = eval_numbers(text("eval"), batch_size=8, num_sequences=-1)
    assert [len(batch) for batch in found] == [8, 8, 8, 8]
    assert sorted(found[0] + found[1] + found[2] + found[3][:6]) == list(range(30))
    assert found[3][6:] == [None, None]


def test_evaluation_is_always_the_same_and_samples_all_files(text):
    """Whatever the seed of training is; not the first files only."""
    found = eval_numbers(text("eval"), batch_size=4, num_sequences=8)
    other = text("eval", enable_data_shuffling=True, data_shuffle_seed=9)
    assert found == eval_numbers(other, batch_size=4, num_sequences=8)
    assert len(found) == 2 and max(found[0] + found[1]) > 8
    # Seven: another mesh has another batch and reads the same sequences.
    (at_once,) = eval_numbers(other, batch_size=7, num_sequences=7)
    assert eval_numbers(other, batch_size=4, num_sequences=7) == [at_once[:4], [*at_once[4:], None]]
    assert len(eval_numbers(other, batch_size=4, num_sequences=99)) == 8


def test_evaluation_rows_split_over_processes_are_those_of_one(text):
    """The last batch of 30 in 8s: rows 6 and 7 are padding."""
    data = text("eval")
    whole = eval_numbers(data, batch_size=8, num_sequences=-1)
    left = eval_numbers(data, batch_size=8, num_sequences=-1, rows=range(6))
    right = eval_numbers(data, batch_size=8, num_sequences=-1, rows=range(6, 8))
    assert right[-1] == [None, None]
    assert [one + two for one, two in zip(left, right, strict=True)] == whole


def test_data_shorter_than_one_step_are_refused_with_both_numbers(text):
    words = r"has 30 sequences of max_target_length=4, but a step reads 4 replicas \* 8 = 32\. Give"
    for read in (pipeline.check_size, pipeline.last_step_of_epoch):
        with pytest.raises(DataError, match=rf"^dataset_path=.* {words} more text, or lower"):
            read(text(), order.first_position(4, 8))
    pipeline.check_size(text(), order.first_position(5, 6))


def test_an_epoch_of_data_without_an_end_is_refused(settings):
    data = pipeline.open_dataset(settings(dataset_type="synthetic"), split="train")
    with pytest.raises(
        DataError, match=r"^steps=-1 .*dataset_type=synthetic has no end.*Set steps"
    ):
        pipeline.last_step_of_epoch(data, order.first_position(1, 1))
    with pytest.raises(DataError, match=r"^eval_steps=-1 .*synthetic has no end.*Set eval_steps"):
        pipeline.eval_batches(data, batch_size=1, num_sequences=-1)
