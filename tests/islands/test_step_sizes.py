"""The tokens of an island's steps, which are decided some steps ahead."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.data import read_ahead
from maxdiloco.islands.step_sizes import AHEAD, StepSizes


@given(st.integers(0, 10**6), st.integers(1, 9), st.lists(st.integers(1, 3), max_size=60))
def test_the_tokens_of_each_step_are_those_that_were_appended(t, tokens, appended):
    """The next steps have the first number, then one step each. The sums are sums of that list."""
    sizes = StepSizes(t, tokens, fixed=False)
    expected = [tokens] * AHEAD + appended
    changed = [sizes.append(size) for size in appended]
    pairs = itertools.pairwise(expected[AHEAD - 1 :])
    numbers = range(t + AHEAD + 1, t + len(expected) + 1)
    assert changed == [n if a != b else 0 for n, (a, b) in zip(numbers, pairs, strict=True)]
    assert [sizes.of(t + n) for n in range(1, len(expected) + 1)] == expected
    sums = [0, *itertools.accumulate(expected)]
    assert [sizes.until(t + n) for n in range(len(expected) + 1)] == sums
    with pytest.raises(ValueError, match="ahead"):
        sizes.of(t + len(expected) + 1)


def test_steps_of_a_fixed_number_of_tokens_are_known_for_ever():
    sizes = StepSizes(3, 4, fixed=True)
    assert (sizes.of(10**9), sizes.until(10**9)) == (4, 4 * (10**9 - 3))


def test_more_steps_are_decided_than_batches_are_read_ahead():
    """A batch is requested once the step before the oldest one in flight has begun."""
    assert AHEAD > read_ahead.batches_at_once(1) >= read_ahead.batches_at_once(10**6)
