"""The order of the sources of a mixture: exact shares, wherever one looks."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.data import interleave
from maxdiloco.data.interleave import Interleave

some_shares = st.lists(st.integers(0, 40), min_size=1, max_size=7).filter(any)


def test_two_sources_by_hand():
    """Shares 3 and 1: deadlines of source 0 are after 2, 3 and 4 places, of source 1 after 4.
    The last two are a tie, which source 0 wins."""
    order = Interleave.of((3, 1))
    sources, numbers = order.at(np.arange(9))
    assert sources.tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0]
    assert numbers.tolist() == [0, 1, 2, 0, 3, 4, 5, 1, 6]


def test_a_deadline_that_is_no_whole_place_is_rounded_up():
    """Shares 1, 2 and 5 of 8: number 1 of the last is due after 16/5, so after 4 places, as number
    0 of the second is, which comes first. A run that resumes reads on in this order."""
    sources, _ = Interleave.of((1, 2, 5)).at(np.arange(8))
    assert sources.tolist() == [2, 1, 2, 2, 2, 0, 1, 2]


@given(shares=some_shares)
def test_a_source_is_never_a_whole_sequence_from_its_share(shares):
    """After every n up to two periods and a bit, in exact numbers."""
    order, total = Interleave.of(shares), sum(shares)
    counts = np.zeros(len(shares), np.int64)
    sources, numbers = order.at(np.arange(2 * total + 3))
    for n, (source, number) in enumerate(zip(sources, numbers, strict=True)):
        assert number == counts[source]
        assert np.array_equal(order.before(n), counts)
        assert order.index_of(source, int(number)) == n
        counts[source] += 1
        off = counts * total - (n + 1) * np.array(shares)
        assert np.all(np.abs(off) < total)


def test_weights_are_taken_as_they_are_written():
    """0.7, 0.2 and 0.1 are 7, 2 and 1 of 10; a source of weight 0 has no part."""
    assert interleave.shares([Fraction(text) for text in ("0.7", "0.2", "0.1")]) == (7, 2, 1)
    assert interleave.shares([Fraction(3), Fraction(0), Fraction("1.5")]) == (2, 0, 1)


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=9).filter(any))
def test_shares_of_token_counts_are_within_the_rounding(weights):
    """Of 100,000 parts; what is not 0 stays above it."""
    found = interleave.shares([Fraction(weight) for weight in weights])
    most = interleave.LONGEST_PERIOD + len(weights)
    assert sum(found) <= most
    for share, weight in zip(found, weights, strict=True):
        assert (share > 0) == (weight > 0)
        exact = weight / sum(weights)
        assert abs(share / sum(found) - exact) <= (len(weights) + 1) / interleave.LONGEST_PERIOD
