"""Cuts: a fragment's part of a leaf is taken and put back at places known only when it runs."""

import jax
import numpy as np
import pytest

from maxdiloco.diloco import slices
from maxdiloco.diloco.fragments import Part

# (pattern, dim size, entries): the entries of one dim, by hand
CASES = [
    ("run", 6, (2, 3, 4)),
    ("run", 6, (5,)),
    ("stride", 6, (1, 3, 5)),
    ("stride", 6, (2, 5)),
    ("list", 7, (0, 3, 6)),  # 7 does not divide by 3
    ("list", 7, (1, 2, 5)),
    ("list", 140, tuple(i for i in range(140) if i % 3)),  # more than are taken one by one
]


@pytest.mark.parametrize(("pattern", "size", "entries"), CASES)
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_take_and_put_are_numpy_indexing(pattern, size, entries, lead, axis):
    """With a leading R and without, on either dim, under jit with traced places."""
    shape = (size, 3) if axis == 0 else (3, size)
    part = Part(0, axis, entries)
    cut = slices.cut_of(part, shape)
    assert cut.pattern == pattern
    x = np.random.default_rng(0).normal(size=(2,) * lead + shape).astype(np.float32)
    index = (slice(None),) * (axis + lead) + (list(entries),)
    places = slices.places_of(part, cut)
    taken = jax.jit(lambda x, p: slices.take(x, cut, p, lead=lead))(x, places)
    np.testing.assert_array_equal(taken, x[index])
    expected = x.copy()
    expected[index] = -x[index]
    put = jax.jit(lambda x, p, v: slices.put(x, cut, p, v, lead=lead))(x, places, -taken)
    np.testing.assert_array_equal(put, expected)


def test_a_whole_leaf_is_itself():
    part = Part(0, None, ())
    cut = slices.cut_of(part, (4, 2))
    x = np.arange(8.0).reshape(4, 2)
    assert slices.take(x, cut, slices.places_of(part, cut)) is x
    assert slices.put(x, cut, slices.places_of(part, cut), x + 1)[0, 0] == 1


def test_fragments_that_differ_in_layers_share_a_cut():
    """8 layers strided over 4: equal cuts, other places; so one compiled program serves all."""
    parts = [Part(0, 0, (p, p + 4)) for p in range(4)]
    cuts = {slices.cut_of(part, (8, 3)) for part in parts}
    assert len(cuts) == 1
    assert [int(slices.places_of(p, slices.cut_of(p, (8, 3)))) for p in parts] == [0, 1, 2, 3]
