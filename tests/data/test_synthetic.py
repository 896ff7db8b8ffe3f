"""Synthetic sequences: endless, addressable, learnable, and in need of nothing but NumPy."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.data.synthetic import SyntheticWindows


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


def test_windows_seeds_and_splits_differ():
    """No two of them share a window."""
    found = [
        SyntheticWindows(seed, split, 1000, 64).read(np.arange(5))[0]
        for seed in (0, 1)
        for split in ("train", "eval")
    ]
    assert len({row.tobytes() for rows in found for row in rows}) == 20


def test_the_two_splits_have_one_law():
    """Held-out loss can fall: eval has the strides of training."""
    train = SyntheticWindows(3, "train", 1000, 8).strides()
    assert np.array_equal(train, SyntheticWindows(3, "eval", 1000, 8).strides())
    assert len(set(train.tolist())) == 4
    assert not np.array_equal(train, SyntheticWindows(4, "train", 1000, 8).strides())


def test_the_next_token_is_a_few_strides_away_with_the_chances_told():
    """Chances 0.7, 0.15, 0.1, 0.05: entropy 0.91 nats, the lowest loss there is."""
    windows = SyntheticWindows(0, "train", 257, 512)
    tokens = windows.read(np.arange(100))[0].astype(np.int64)
    steps = np.diff(tokens, axis=1) % 257
    shares = [np.mean(steps == stride) for stride in windows.strides()]
    # 51,100 steps: the largest standard deviation of a share is 0.002.
    assert shares == pytest.approx([0.7, 0.15, 0.1, 0.05], abs=0.01)
    assert -np.sum(windows.chances() * np.log(windows.chances())) == pytest.approx(0.914, abs=1e-3)


def test_a_vocabulary_of_two_has_two_strides():
    """Chances 0.7 and 0.15, scaled to 1."""
    windows = SyntheticWindows(0, "train", 2, 8)
    assert sorted(windows.strides().tolist()) == [0, 1]
    assert windows.chances() == pytest.approx([0.7 / 0.85, 0.15 / 0.85])


def test_the_windows_stay_the_same_between_versions():
    """A run that goes on must not meet other data."""
    tokens, _ = SyntheticWindows(7, "train", 100, 8).read(np.array([3]))
    assert tokens[0].tolist() == [47, 35, 22, 10, 97, 85, 73, 61]


PROGRAM = """
import sys, types
for missing in ("grain", "jax", "orbax", "absl"):
    sys.modules[missing] = None  # import raises ImportError
from maxdiloco.data import order, pipeline, read_ahead
keys = dict(dataset_type="synthetic", data_shuffle_seed=0, max_target_length=16, vocab_size=257)
data = pipeline.open_dataset(types.SimpleNamespace(**keys), split="train")
mine = dict(replicas=[[0], [1]], rows=range(3))
with pipeline.batches(data, order.first_position(2, 3), steps=range(1, 3), **mine) as batches:
    print([batch["tokens"].shape for batch in batches])
read_ahead.read_ahead(abs, 3)
"""


def test_synthetic_data_need_neither_grain_nor_jax():
    """Benchmark machines have neither Grain nor Orbax. What reads text ahead asks for Grain."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.stdout == "[(2, 3, 16), (2, 3, 16)]\n", done.stderr
    assert "import of grain halted" in done.stderr
