"""Batches for replicas: the order of sequences, every one once an epoch, whoever reads it; and
synthetic ones, which are endless, addressable, learnable, and in need of nothing but NumPy."""

import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from data.same_sequences import ROWS
from data.shards_on_disk import open_dataset
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from maxdiloco.data import order, pipeline
from maxdiloco.data.order import Position
from maxdiloco.data.synthetic import SyntheticWindows
from maxdiloco.errors import LostPeerError

S = 256
FIRST = 65  # byte of window 0: what is read as text has no control characters


@pytest.fixture
def text(settings, folder):
    """Opens 30 windows of 4 tokens: window i is S, 3 times FIRST + i; `seed` None is file order."""
    root = folder({f"{number:02}.txt": bytes([FIRST + number] * 3) for number in range(30)})

    def make(split="train", **changed):
        keys = {"dataset_path": root, "eval_dataset_path": root, "enable_data_shuffling": False}
        return open_dataset(settings(**keys | changed), split=split)

    return make


def numbers(batch):
    return (batch["tokens"][..., 1] - FIRST).tolist()


def test_batches_are_what_read_gives_step_by_step(text):
    """Two replicas of three rows: step 2 reads 6 to 11, step 6 windows 0 to 5 of the next epoch."""
    data, position = text(), order.first_position(2, 3)
    with pipeline.batches(data, position, steps=range(2, 7), **ROWS) as batches:
        found = list(batches)
    assert len(found) == 5
    for step, batch in enumerate(found, start=2):
        alone = data.read(position, step, **ROWS)
        assert batch.keys() == alone.keys() == {"tokens", "segment_ids"}
        for name, leaf in batch.items():
            assert leaf.dtype == np.int32
            assert np.array_equal(leaf, alone[name])
    assert numbers(found[0]) == [[6, 7, 8], [9, 10, 11]]
    assert found[0]["tokens"][0, 0].tolist() == [S, *3 * [FIRST + 6]]
    assert np.all(found[0]["segment_ids"] == 1)
    assert numbers(found[-1]) == [[0, 1, 2], [3, 4, 5]]


def test_each_shuffled_epoch_reads_every_window_once(text):
    data = text(enable_data_shuffling=True, data_shuffle_seed=4)
    position = order.first_position(2, 3)
    with pipeline.batches(data, position, steps=range(1, 11), **ROWS) as batches:
        read = np.array([numbers(batch) for batch in batches]).reshape(2, 30)
    assert sorted(read[0]) == sorted(read[1]) == list(range(30))
    assert len({tuple(read[0]), tuple(read[1]), tuple(range(30))}) == 3
    same = text(enable_data_shuffling=True, data_shuffle_seed=4)
    other = text(enable_data_shuffling=True, data_shuffle_seed=5)
    first = read[0, :6].reshape(2, 3).tolist()
    assert numbers(same.read(position, 1, **ROWS)) == first
    assert numbers(other.read(position, 1, **ROWS)) != first


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
    data = pipeline.Dataset(SimpleNamespace(num_windows=64, requests=0), None, "dataset_path=fake")
    position = order.next_position(order.first_position(2, 2), 1 + taken, M, B)
    last = data.last_step_of_epoch(position)
    assert order.indices(position, last + 1, [M - 1], [B - 1]) >= 64
    if last >= position.s0:
        assert order.indices(position, last, [M - 1], [B - 1]) < 64


def test_worker_processes_read_the_same_and_end(text):
    """grain_worker_count 0 and 2; after close no process is left, before it there are two."""
    data, position = text(enable_data_shuffling=True), order.first_position(2, 3)
    found = []
    for worker_count in (0, 2):
        mine = ROWS | {"worker_count": worker_count}
        with pipeline.batches(data, position, steps=range(1, 12), **mine) as batches:
            found.append([numbers(next(batches)) for _ in range(7)])
            assert len(multiprocessing.active_children()) == worker_count
        assert multiprocessing.active_children() == []
    assert found[0] == found[1]
    with pipeline.batches(data, position, steps=range(1, 999), **mine) as batches:
        next(batches)
        multiprocessing.active_children()[0].kill()
        with pytest.raises(LostPeerError, match="grain_worker_count=2"):
            list(batches)


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


def test_evaluation_reads_all_data_once_and_pads_the_last_batch(text):
    """The last batch of 30 in 8s: rows 6 and 7 are padding."""
    data = text("eval")
    found = eval_numbers(data, batch_size=8, num_sequences=-1)
    assert [len(batch) for batch in found] == [8, 8, 8, 8]
    assert sorted(found[0] + found[1] + found[2] + found[3][:6]) == list(range(30))
    assert found[3][6:] == [None, None]
    left = eval_numbers(data, batch_size=8, num_sequences=-1, rows=range(6))
    right = eval_numbers(data, batch_size=8, num_sequences=-1, rows=range(6, 8))
    assert [one + two for one, two in zip(left, right, strict=True)] == found


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


counts = st.integers(1, 5)


def test_replicas_take_turns_of_b_sequences():
    """Index base + ((s - s0)*M + m)*B + b, by hand: base 10, s0 3, M 2, B 3."""
    position = Position(base=10, s0=3, M=2, B=3)
    first = order.indices(position, 3, *np.ix_(range(2), range(3)))
    assert first.tolist() == [[10, 11, 12], [13, 14, 15]]
    # Step 5 is two steps on, 12 sequences; replica 1's row 2 is the last of the step.
    assert order.indices(position, 5, [1], [2]).tolist() == [10 + 12 + 5]
    # Two lists of one length are pairs: replica 0's row 2 and replica 1's row 0.
    assert order.indices(position, 3, [0, 1], [2, 0]).tolist() == [12, 13]
    # The same M and B leave the position as it is: a plain resume writes the same checkpoint.
    assert order.next_position(position, 9, 2, 3) is position
    # With others: steps 3 to 8 have read 6 * 6 sequences.
    assert order.next_position(position, 9, 3, 2) == Position(base=10 + 36, s0=9, M=3, B=2)
    assert position.to_dict() == {"base": 10, "s0": 3, "M": 2, "B": 3}


@given(
    size=st.integers(1, 90),
    seed=st.none() | st.integers(0, 2**70),
    parts=st.lists(st.tuples(counts, counts, st.integers(0, 4)), min_size=1, max_size=5),
)
def test_a_run_goes_on_with_the_next_unread_sequence(size, seed, parts):
    position, step, read = None, 1, []
    for M, B, steps in parts:
        if position is None:
            position = order.first_position(M, B)
        else:
            position = order.next_position(position, step, M, B)
        for _ in range(steps):
            found = order.indices(position, step, *np.ix_(range(M), range(B)))
            read += found.reshape(-1).tolist()
            step += 1
    assert read == list(range(len(read)))
    windows = order.windows(np.array(read, np.int64), size=size, seed=seed)
    for begin in range(0, len(read), size):
        epoch = windows[begin : begin + size].tolist()
        assert len(set(epoch)) == len(epoch)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 99))
def test_the_shuffle_is_a_permutation_and_a_pure_function(size, seed, epoch):
    """Of (seed, epoch), place by place: asking in another order changes nothing."""
    places = np.arange(size)
    found = order.permute(places, size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(found), places)
    backwards = order.permute(places[::-1], size=size, seed=seed, epoch=epoch)
    assert np.array_equal(backwards[::-1], found)
    # 10^15 windows, without a table: four places stay distinct and in range.
    found = order.permute(np.array([0, 1, 2, 10**15 - 1]), size=10**15, seed=seed, epoch=epoch)
    assert len(set(found.tolist())) == 4
    assert found.min() >= 0 and found.max() < 10**15


def test_every_seed_and_epoch_has_its_own_stable_order():
    """And none of them is near file order: the rank correlation of 10,000 places is small. A
    checkpoint's position counts on it. The mixer's first value is splitmix64's for seed 0."""
    assert order._mix_int(0) == 0xE220A8397B1DCDAF
    assert order._mix(np.array([order._GAMMA], np.uint64))[0] == 0xE220A8397B1DCDAF
    pinned = [3, 5, 1, 2, 11, 0, 10, 7, 8, 9, 6, 4]
    assert order.permute(np.arange(12), size=12, seed=5, epoch=2).tolist() == pinned
    places = np.arange(10_000)
    orders = [
        order.permute(places, size=10_000, seed=seed, epoch=epoch)
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    ]
    for i, one in enumerate([places, *orders]):
        for other in orders[i:]:
            # Chance puts 1 place of 10,000 alike; the correlation's deviation is 0.01.
            assert np.sum(one == other) < 10
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.05


@given(
    seed=st.integers(0, 2**70),
    vocab_size=st.integers(2, 300_000),
    window=st.integers(0, 2**62),
    length=st.integers(2, 40),
)
def test_a_window_is_a_pure_function_of_seed_and_index(seed, vocab_size, window, length):
    """Whatever is read with it; tokens are in the vocabulary, segments are all 1."""
    windows = SyntheticWindows(seed, "train", vocab_size, length)
    alone, segments = windows.read(np.array([window]))
    together, _ = SyntheticWindows(seed, "train", vocab_size, length).read(
        np.array([0, window, window + 1])
    )
    assert np.array_equal(alone[0], together[1])
    assert alone.shape == (1, length) and alone.dtype == segments.dtype == np.int32
    assert alone.min() >= 0 and alone.max() < vocab_size
    assert np.all(segments == 1)


def test_seeds_and_splits_share_no_window_but_one_distribution():
    """Held-out loss can fall: eval has the strides of training. The windows stay the same between
    versions: a run that continues must not meet other data."""
    train, held, other = (
        SyntheticWindows(*seed_and_split, 1000, 64)
        for seed_and_split in ((0, "train"), (0, "eval"), (1, "train"))
    )
    found = [windows.read(np.arange(5))[0] for windows in (train, held, other)]
    assert len({row.tobytes() for rows in found for row in rows}) == 15
    assert np.array_equal(train.strides(), held.strides())
    assert len(set(train.strides().tolist())) == 4
    assert not np.array_equal(train.strides(), other.strides())
    tokens, _ = SyntheticWindows(7, "train", 100, 8).read(np.array([3]))
    assert tokens[0].tolist() == [47, 35, 22, 10, 97, 85, 73, 61]


def test_the_next_token_is_a_few_strides_away_with_known_chances():
    """Chances 0.7, 0.15, 0.1, 0.05: entropy 0.91 nats, the lowest loss there is. A vocabulary of
    two has two strides: 0.7 and 0.15, scaled to 1."""
    windows = SyntheticWindows(0, "train", 257, 512)
    tokens = windows.read(np.arange(100))[0].astype(np.int64)
    steps = np.diff(tokens, axis=1) % 257
    shares = [np.mean(steps == stride) for stride in windows.strides()]
    # 51,100 steps: the largest standard deviation of a share is 0.002.
    assert shares == pytest.approx([0.7, 0.15, 0.1, 0.05], abs=0.01)
    assert -np.sum(windows.chances() * np.log(windows.chances())) == pytest.approx(0.914, abs=1e-3)
    of_two = SyntheticWindows(0, "train", 2, 8)
    assert sorted(of_two.strides().tolist()) == [0, 1]
    assert of_two.chances() == pytest.approx([0.7 / 0.85, 0.15 / 0.85])


PROGRAM = """
import sys
for missing in ("grain", "jax", "orbax", "absl"):
    sys.modules[missing] = None  # import raises ImportError
from maxdiloco.data import order, pipeline, read_ahead
from maxdiloco.data.synthetic import SyntheticWindows
data = pipeline.Dataset(SyntheticWindows(0, "train", 257, 16), None, "synthetic")
mine = dict(replicas=[[0], [1]], rows=range(3))
with pipeline.batches(data, order.first_position(2, 3), steps=range(1, 3), **mine) as batches:
    print([batch["tokens"].shape for batch in batches])
read_ahead.read_ahead(abs, 3, 1)
"""


def test_synthetic_data_need_neither_grain_nor_jax():
    """Benchmark machines have neither Grain nor Orbax. What reads text ahead asks for Grain."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "[(2, 3, 16), (2, 3, 16)]\n", done.stderr
    assert "import of grain halted" in done.stderr
