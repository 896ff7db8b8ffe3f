"""The global order: every sequence once an epoch, whoever reads it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.data import order
from maxdiloco.data.order import Position

counts = st.integers(1, 5)
seeds = st.one_of(st.none(), st.integers(0, 2**70))


def step_indices(position, step):
    return order.indices(position, step, *np.ix_(range(position.M), range(position.B))).reshape(-1)


def test_replicas_take_turns_of_b_sequences():
    """Index base + ((s - s0)*M + m)*B + b, by hand: base 10, s0 3, M 2, B 3."""
    position = Position(base=10, s0=3, M=2, B=3)
    first = order.indices(position, 3, *np.ix_(range(2), range(3)))
    assert first.tolist() == [[10, 11, 12], [13, 14, 15]]
    # Step 5 is two steps on, 12 sequences; replica 1's row 2 is the last of the step.
    assert order.indices(position, 5, [1], [2]).tolist() == [10 + 12 + 5]
    # Two lists of one length are pairs: replica 0's row 2 and replica 1's row 0.
    assert order.indices(position, 3, [0, 1], [2, 0]).tolist() == [12, 13]


@given(
    size=st.integers(1, 90),
    seed=seeds,
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
            read += step_indices(position, step).tolist()
            step += 1
    assert read == list(range(len(read)))
    windows = order.windows(np.array(read, np.int64), size=size, seed=seed)
    for begin in range(0, len(read), size):
        epoch = windows[begin : begin + size].tolist()
        assert len(set(epoch)) == len(epoch)


def test_the_same_m_and_b_leave_the_position_as_it_is():
    """A plain resume writes the same checkpoint as a run that went on."""
    position = Position(base=7, s0=4, M=2, B=3)
    assert order.next_position(position, 9, 2, 3) is position
    # Steps 4 to 8 have read 5 * 6 sequences.
    assert order.next_position(position, 9, 3, 2) == Position(base=37, s0=9, M=3, B=2)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 99))
def test_the_shuffle_is_a_permutation_and_a_pure_function(size, seed, epoch):
    """Of (seed, epoch), place by place: asking in another order changes nothing."""
    places = np.arange(size)
    found = order.permute(places, size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(found), places)
    backwards = order.permute(places[::-1], size=size, seed=seed, epoch=epoch)
    assert np.array_equal(backwards[::-1], found)


def test_seeds_and_epochs_have_orders_of_their_own():
    """And none of them is near file order: the rank correlation of 10,000 places is small."""
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


def test_windows_far_beyond_32_bits_are_shuffled_without_a_table():
    """10^15 windows; four places stay distinct and in range."""
    found = order.permute(np.array([0, 1, 2, 10**15 - 1]), size=10**15, seed=3, epoch=0)
    assert len(set(found.tolist())) == 4
    assert found.min() >= 0 and found.max() < 10**15


def test_the_order_stays_the_same_between_versions():
    """A checkpoint's position counts on it. The mixer's first value is splitmix64's for seed 0."""
    assert order._mix_int(0) == 0xE220A8397B1DCDAF
    assert order._mix(np.array([order._GAMMA], np.uint64))[0] == 0xE220A8397B1DCDAF
    pinned = [3, 5, 1, 2, 11, 0, 10, 7, 8, 9, 6, 4]
    assert order.permute(np.arange(12), size=12, seed=5, epoch=2).tolist() == pinned
    position = Position(base=2**40, s0=17, M=3, B=8)
    assert position.to_dict() == {"base": 2**40, "s0": 17, "M": 3, "B": 8}
