"""Fragments: every value in exactly one, by layers as the model declares them."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.diloco.fragments import Stacked, Vocabulary, assign, oversized, partition


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in leaves.items()}


MODEL = shapes(embedding=(6, 2), norm=(2,), w=(5, 3, 2))  # tree order: embedding, norm, w
AXES = {"embedding": Vocabulary(0), "norm": None, "w": 0}


def entries(leaf_slice):
    """The entries of dim `axis` that a slice takes."""
    first = leaf_slice.start_or_indices
    if leaf_slice.pattern == "list":
        return list(first)
    return list(range(first, first + leaf_slice.count * leaf_slice.stride, leaf_slice.stride))


def held(fragment):
    """[(leaf, None for all of it, or axis and entries)] of a fragment."""
    return [
        (s.leaf, None) if s.pattern == "whole" else (s.leaf, s.axis, entries(s))
        for s in fragment.slices
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(num_fragments=1), [[(0, None), (1, None), (2, None)]]),  # DiLoCo
        # Layers 0, 2, 4 and 1, 3 behind what is no layer.
        (dict(num_fragments=3), [[(0, None), (1, None)], [(2, 0, [0, 2, 4])], [(2, 0, [1, 3])]]),
        # Runs, the first longer.
        (dict(num_fragments=3, sequential=True),
         [[(0, None), (1, None)], [(2, 0, [0, 1, 2])], [(2, 0, [3, 4])]]),
        # Row v in fragment v mod 2, every other non-layer leaf in fragment 0.
        (dict(num_fragments=3, num_nonlayer=2),
         [[(0, 0, [0, 2, 4]), (1, None)], [(0, 0, [1, 3, 5])], [(2, 0, [0, 1, 2, 3, 4])]]),
    ],
)  # fmt: skip
def test_fragments_by_hand(options, expected):
    fragments = partition(MODEL, AXES, **options)
    assert [held(fragment) for fragment in fragments] == expected
    for fragment in fragments[1:]:
        assert [fragment.layers] == [tuple(s[2]) for s in held(fragment) if s[0] == 2] or [()]


def test_repeated_blocks_follow_the_layers_they_name():
    """A leaf that holds layers 0, 3 and 6 and one that holds the rest; P=2 with only layers."""
    params = shapes(big=(3, 2), small=(4, 2))
    axes = {"big": Stacked(0, (0, 3, 6)), "small": Stacked(0, (1, 2, 4, 5))}
    even, odd = partition(params, axes, num_fragments=2)
    assert held(even) == [(0, 0, [0, 2]), (1, 0, [1, 2])]
    assert held(odd) == [(0, 0, [1]), (1, 0, [0, 3])]


def test_without_layer_axis_leaves_are_assigned():
    """layer_axis=None: leaf i in tree order -> fragment i mod P, or contiguous."""
    params = shapes(a=(1,), b=(2,), c=(3,))
    strided = partition(params, None, num_fragments=2)
    assert [[s.leaf for s in f.slices] for f in strided] == [[0, 2], [1]]
    runs = partition(params, None, num_fragments=2, sequential=True)
    assert [[s.leaf for s in f.slices] for f in runs] == [[0, 1], [2]]


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
    ("params", "axes", "options", "message"),
    [
        (MODEL, AXES, dict(num_fragments=7), "=7 does not fit 5 layers.*Use 1, or 2 to 6"),
        (MODEL, AXES, dict(num_fragments=2, num_nonlayer=2), "=2 .* Use 1, or 3 to 7"),
        (MATRIX, None, dict(num_fragments=2), "=2 is more than the 1 leaves.*Use"),
        (MATRIX, {"w": Stacked(0, (0, 2))}, dict(num_fragments=3),
         "=3 leaves fragment 1 empty.*fewer"),
    ],
)  # fmt: skip
def test_counts_that_do_not_fit_are_refused(params, axes, options, message):
    with pytest.raises(ValueError, match=f"num_diloco_fragments{message}"):
        partition(params, axes, **options)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"w": 2}, "is not a dim of a leaf of shape"),
        ({"w": Stacked(0, (0,))}, "names 1 layers but dim 0 .* has 2 entries. Name one layer"),
        ([0, 1], r"layer_axis\['w'\] is missing, which params has. Give layer_axis the structure"),
        ({"w": 0, "v": 0}, r"params\['v'\] is missing, which layer_axis has"),
        ({"v": 0}, r"layer_axis\['w'\] is missing"),
        ({"w": "0"}, "layer_axis has '0' for a leaf of shape .* Give None, an axis"),
    ],
)
def test_layer_axis_that_does_not_fit_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        partition(MATRIX, axes, num_fragments=2)


def test_layer_axis_is_matched_by_path_and_a_none_of_params_is_no_leaf():
    """A tree of the structure of params fits it, where params has a None, too."""
    params = shapes(a=(4, 2), z=(3,)) | {"b": None}
    first, second = partition(params, {"z": None, "b": None, "a": 0}, num_fragments=2)
    assert (held(first), held(second)) == ([(1, None)], [(0, 0, [0, 1, 2, 3])])


def test_a_fragment_above_twice_the_median_is_oversized():
    assert oversized([10, 4, 4, 4]) == [0]
    assert oversized([8, 4, 4, 4]) == []
