"""Fragments: every value in exactly one, by layers as the model declares them; slices of leaves."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.diloco import slices
from maxdiloco.diloco.fragments import Stacked, Vocabulary, assign, oversized, partition


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in leaves.items()}


MODEL = shapes(embedding=(6, 2), norm=(2,), w=(5, 3, 2))  # tree order: embedding, norm, w
AXES = {"embedding": Vocabulary(0), "norm": None, "w": 0}


THREE = shapes(a=(1,), b=(2,), c=(3,))


def entries(s):
    """The entries of dim `axis` that a slice takes."""
    first = s.start_or_indices
    return list(first) if s.pattern == "list" else [first + i * s.stride for i in range(s.count)]


def held(fragment):
    """[(leaf, None for all of it, or axis and entries)] of a fragment."""
    return [
        (s.leaf, None) if s.pattern == "whole" else (s.leaf, s.axis, entries(s))
        for s in fragment.slices
    ]


@pytest.mark.parametrize(
    ("params", "axes", "options", "expected"),
    [
        (MODEL, AXES, dict(num_fragments=1), [[(0, None), (1, None), (2, None)]]),  # DiLoCo
        # Layers 0, 2, 4 and 1, 3 behind parameters outside the layers.
        (MODEL, AXES, dict(num_fragments=3),
         [[(0, None), (1, None)], [(2, 0, [0, 2, 4])], [(2, 0, [1, 3])]]),
        # Runs, the first longer.
        (MODEL, AXES, dict(num_fragments=3, sequential=True),
         [[(0, None), (1, None)], [(2, 0, [0, 1, 2])], [(2, 0, [3, 4])]]),
        # Row v in fragment v mod 2, every other non-layer leaf in fragment 0.
        (MODEL, AXES, dict(num_fragments=3, num_nonlayer=2),
         [[(0, 0, [0, 2, 4]), (1, None)], [(0, 0, [1, 3, 5])], [(2, 0, [0, 1, 2, 3, 4])]]),
        # Repeated blocks: a leaf that holds layers 0, 3 and 6 and one that holds the rest.
        (shapes(big=(3, 2), small=(4, 2)),
         {"big": Stacked(0, (0, 3, 6)), "small": Stacked(0, (1, 2, 4, 5))}, dict(num_fragments=2),
         [[(0, 0, [0, 2]), (1, 0, [1, 2])], [(0, 0, [1]), (1, 0, [0, 3])]]),
        # Without layers leaf i in tree order is in fragment i mod P, or contiguous.
        (THREE, None, dict(num_fragments=2), [[(0, None), (2, None)], [(1, None)]]),
        (THREE, None, dict(num_fragments=2, sequential=True),
         [[(0, None), (1, None)], [(2, None)]]),
        # Axes are matched by path, and a None of params is no leaf.
        (shapes(a=(4, 2), z=(3,)) | {"b": None}, {"z": None, "b": None, "a": 0},
         dict(num_fragments=2), [[(1, None)], [(0, 0, [0, 1, 2, 3])]]),
    ],
)  # fmt: skip
def test_fragments_by_hand(params, axes, options, expected):
    fragments = partition(params, axes, **options)
    assert [held(fragment) for fragment in fragments] == expected
    if axes is AXES:
        layers = [[tuple(s[2]) for s in part if s[0] == 2] for part in expected[1:]]
        assert [[f.layers] for f in fragments[1:]] == [found or [()] for found in layers]


@given(st.integers(1, 40), st.data(), st.booleans())
def test_assigning_uses_every_fragment_and_balances(n, data, sequential):
    """No fragment is empty, and sizes differ by one at most, the first ones longer."""
    P = data.draw(st.integers(1, n))
    counts = np.bincount(assign(n, P, sequential), minlength=P)
    assert counts.min() >= 1
    assert list(counts) == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.booleans(), st.data())
def test_every_value_is_in_exactly_one_fragment(layers, rows, k, sequential, data):
    """Section 2.2: the fragments are disjoint and cover the parameters."""
    params = shapes(embedding=(rows + 2, 2), norm=(2,), w=(3, layers))
    axes = {"embedding": Vocabulary(0), "norm": None, "w": 1}
    P = data.draw(st.sampled_from([1, *range(k + 1, layers + k + 1)]))
    fragments = partition(params, axes, num_fragments=P, num_nonlayer=k, sequential=sequential)
    counts = [np.zeros(leaf.shape, int) for leaf in jax.tree.leaves(params)]
    for fragment in fragments:
        size = 0
        for s in fragment.slices:
            index = [slice(None)] * counts[s.leaf].ndim
            if s.pattern != "whole":
                index[s.axis] = entries(s)
            counts[s.leaf][tuple(index)] += 1
            assert counts[s.leaf][tuple(index)].shape == s.shape(counts[s.leaf].shape)
            size += counts[s.leaf][tuple(index)].size
        assert fragment.size == size
    assert all((count == 1).all() for count in counts)


MATRIX = shapes(w=(2, 3))


@pytest.mark.parametrize(
    ("params", "axes", "P", "k", "named"),
    [
        (MODEL, AXES, 7, 1, "num_fragments=7 .*2 to 6"),
        (MODEL, AXES, 2, 2, "num_fragments=2 .*3 to 7"),
        (MATRIX, None, 2, 1, "num_fragments=2 "),
        (MATRIX, {"w": Stacked(0, (0, 2))}, 3, 1, "num_fragments=3 .*fragment 1 "),
        (MATRIX, {"w": 2}, 2, 1, r"2 .*\(2, 3\)"),
        (MATRIX, {"w": Stacked(0, (0,))}, 2, 1, "dim 0 "),
        (MATRIX, [0, 1], 2, 1, r"layer_axis\['w'\]"),
        (MATRIX, {"w": 0, "v": 0}, 2, 1, r"params\['v'\]"),
        (MATRIX, {"v": 0}, 2, 1, r"layer_axis\['w'\]"),
        (MATRIX, {"w": "0"}, 2, 1, "layer_axis .*'0'"),
    ],
)
def test_counts_and_axes_that_do_not_fit_are_named(params, axes, P, k, named):
    with pytest.raises(ValueError, match=named):
        partition(params, axes, num_fragments=P, num_nonlayer=k)


def test_a_fragment_above_twice_the_median_is_oversized():
    assert oversized([10, 4, 4, 4]) == [0]
    assert oversized([8, 4, 4, 4]) == []


# --- a slice is taken and put back where a start says, known when it runs -----------------------


@pytest.mark.parametrize(
    ("pattern", "size", "entries"),
    [
        ("run", 6, (2, 3, 4)),
        ("run", 6, (5,)),
        ("stride", 6, (1, 3, 5)),
        ("stride", 6, (2, 5)),
        ("list", 7, (0, 3, 6)),  # 7 does not divide by 3
        ("list", 7, (1, 2, 5)),
        ("list", 140, tuple(i for i in range(140) if i % 3)),  # more than are taken one by one
    ],
)
@pytest.mark.parametrize("lead", [0, 1])
@pytest.mark.parametrize("axis", [0, 1])
def test_take_and_put_are_numpy_indexing(pattern, size, entries, lead, axis):
    """With a leading R and without, on either dim, under jit with a traced start."""
    shape = (size, 3) if axis == 0 else (3, size)
    leaf_slice = slices.slice_along(0, axis, entries, shape)
    assert leaf_slice.pattern == pattern
    x = np.random.default_rng(0).normal(size=(2,) * lead + shape).astype(np.float32)
    index = (slice(None),) * (axis + lead) + (list(entries),)
    start, form = np.array(leaf_slice.start_or_indices, np.int32), leaf_slice.form
    taken = jax.jit(lambda x, start: slices.gather_slice(x, form, start, num_leading=lead))(
        x, start
    )
    assert taken.shape == x.shape[:lead] + leaf_slice.shape(shape)
    np.testing.assert_array_equal(taken, x[index])
    expected = x.copy()
    expected[index] = -x[index]
    scatter = jax.jit(lambda x, start, v: slices.scatter_slice(x, form, start, v, num_leading=lead))
    put = scatter(x, start, -taken)
    np.testing.assert_array_equal(put, expected)


def test_a_whole_leaf_is_itself():
    leaf_slice = slices.LeafSlice(0, "whole")
    x = np.arange(8.0).reshape(4, 2)
    assert slices.gather_slice(x, leaf_slice, np.int32(0)) is x
    assert slices.scatter_slice(x, leaf_slice, np.int32(0), x + 1)[0, 0] == 1
    assert leaf_slice.shape(x.shape) == x.shape


def test_slices_that_differ_in_layers_have_one_form():
    """8 layers strided over 4: all start elsewhere; so one compiled program serves them all."""
    all_four = [slices.slice_along(0, 0, (p, p + 4), (8, 3)) for p in range(4)]
    assert len({leaf_slice.form for leaf_slice in all_four}) == 1
    assert [leaf_slice.start_or_indices for leaf_slice in all_four] == [0, 1, 2, 3]
    other = slices.slice_along(0, 0, (1, 2), (8, 3)), slices.slice_along(0, 0, (0, 3), (8, 3))
    assert len({leaf_slice.form for leaf_slice in (all_four[0], *other)}) == 3
