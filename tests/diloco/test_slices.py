"""A fragment's slice of a leaf is taken and put back where a start says, known when it runs."""

import jax
import numpy as np
import pytest

from maxdiloco.diloco import slices

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
    """With a leading R and without, on either dim, under jit with a traced start."""
    shape = (size, 3) if axis == 0 else (3, size)
    leaf_slice = slices.along(0, axis, entries, shape)
    assert leaf_slice.pattern == pattern
    x = np.random.default_rng(0).normal(size=(2,) * lead + shape).astype(np.float32)
    index = (slice(None),) * (axis + lead) + (list(entries),)
    start, form = np.array(leaf_slice.start_or_indices, np.int32), leaf_slice.form
    taken = jax.jit(lambda x, start: slices.take(x, form, start, lead=lead))(x, start)
    assert taken.shape == x.shape[:lead] + leaf_slice.shape(shape)
    np.testing.assert_array_equal(taken, x[index])
    expected = x.copy()
    expected[index] = -x[index]
    put = jax.jit(lambda x, start, v: slices.put(x, form, start, v, lead=lead))(x, start, -taken)
    np.testing.assert_array_equal(put, expected)


def test_a_whole_leaf_is_itself():
    leaf_slice = slices.whole(0)
    x = np.arange(8.0).reshape(4, 2)
    assert slices.take(x, leaf_slice, np.int32(0)) is x
    assert slices.put(x, leaf_slice, np.int32(0), x + 1)[0, 0] == 1
    assert leaf_slice.shape(x.shape) == x.shape


def test_slices_that_differ_in_layers_have_one_form():
    """8 layers strided over 4: all start elsewhere; so one compiled program serves them all."""
    all_four = [slices.along(0, 0, (p, p + 4), (8, 3)) for p in range(4)]
    assert len({leaf_slice.form for leaf_slice in all_four}) == 1
    assert [leaf_slice.start_or_indices for leaf_slice in all_four] == [0, 1, 2, 3]
    other = slices.along(0, 0, (1, 2), (8, 3)), slices.along(0, 0, (0, 3), (8, 3))
    assert len({leaf_slice.form for leaf_slice in (all_four[0], *other)}) == 3
