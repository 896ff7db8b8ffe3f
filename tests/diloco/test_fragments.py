"""Fragments: every value in exactly one, by layers as the model declares them."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxdiloco.diloco.fragments import (
    Part,
    Stacked,
    Vocabulary,
    deal,
    lopsided,
    part_shape,
    partition,
)


def shapes(**leaves):
    return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in leaves.items()}


MODEL = shapes(embedding=(6, 2), norm=(2,), w=(5, 3, 2))  # tree order: embedding, norm, w
AXES = {"embedding": Vocabulary(0), "norm": None, "w": 0}


def test_one_fragment_holds_everything():
    """P=1 is DiLoCo: one fragment, every leaf whole."""
    (only,) = partition(MODEL, AXES, num_fragments=1)
    assert only.parts == (Part(0, None, ()), Part(1, None, ()), Part(2, None, ()))
    assert only.size == 12 + 2 + 30


def test_strided_layers_follow_the_non_layer_fragment():
    """P=3, k=1: layers 0,2,4 in fragment 1 and 1,3 in fragment 2."""
    first, second, third = partition(MODEL, AXES, num_fragments=3)
    assert first.parts == (Part(0, None, ()), Part(1, None, ()))
    assert second.parts == (Part(2, 0, (0, 2, 4)),) and second.layers == (0, 2, 4)
    assert third.parts == (Part(2, 0, (1, 3)),) and third.size == 12


def test_sequential_layers_are_runs_the_first_longer():
    """5 layers over 2 fragments: 0,1,2 and 3,4."""
    _, second, third = partition(MODEL, AXES, num_fragments=3, sequential=True)
    assert (second.layers, third.layers) == ((0, 1, 2), (3, 4))


def test_vocabulary_rows_are_dealt_to_k_fragments():
    """k=2: row v in fragment v mod 2, every other non-layer leaf in fragment 0."""
    first, second, _ = partition(MODEL, AXES, num_fragments=3, num_nonlayer=2)
    assert first.parts == (Part(0, 0, (0, 2, 4)), Part(1, None, ()))
    assert second.parts == (Part(0, 0, (1, 3, 5)),)


def test_repeated_blocks_follow_the_layers_they_name():
    """A leaf that holds layers 0, 3 and 6 and one that holds the rest; P=2 with only layers."""
    params = shapes(big=(3, 2), small=(4, 2))
    axes = {"big": Stacked(0, (0, 3, 6)), "small": Stacked(0, (1, 2, 4, 5))}
    even, odd = partition(params, axes, num_fragments=2)
    assert even.parts == (Part(0, 0, (0, 2)), Part(1, 0, (1, 2)))
    assert odd.parts == (Part(0, 0, (1,)), Part(1, 0, (0, 3)))


def test_without_layer_axis_leaves_are_dealt():
    """layer_axis=None: leaf i in tree order -> fragment i mod P, or contiguous."""
    params = shapes(a=(1,), b=(2,), c=(3,))
    strided = partition(params, None, num_fragments=2)
    assert [[p.leaf for p in f.parts] for f in strided] == [[0, 2], [1]]
    runs = partition(params, None, num_fragments=2, sequential=True)
    assert [[p.leaf for p in f.parts] for f in runs] == [[0, 1], [2]]


@given(st.integers(1, 40), st.data(), st.booleans())
def test_dealing_uses_every_fragment_and_balances(n, data, sequential):
    """No fragment is empty, and sizes differ by one at most, the first ones longer."""
    P = data.draw(st.integers(1, n))
    counts = np.bincount(deal(n, P, sequential), minlength=P)
    assert counts.min() >= 1
    assert list(counts) == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 3), st.booleans(), st.data())
def test_every_value_is_in_exactly_one_fragment(layers, rows, k, sequential, data):
    """Section 2.2: the fragments are disjoint and cover the parameters."""
    params = shapes(embedding=(rows + 2, 2), norm=(2,), w=(3, layers))
    axes = {"embedding": Vocabulary(0), "norm": None, "w": 1}
    P = data.draw(st.sampled_from([1, *range(k + 1, layers + k + 1)]))
    found = partition(params, axes, num_fragments=P, num_nonlayer=k, sequential=sequential)
    leaves = jax.tree.leaves(params)
    seen = [np.zeros(leaf.shape, int) for leaf in leaves]
    for fragment in found:
        for part in fragment.parts:
            index = [slice(None)] * len(leaves[part.leaf].shape)
            if part.axis is not None:
                index[part.axis] = list(part.entries)
            seen[part.leaf][tuple(index)] += 1
        assert fragment.size == sum(
            np.prod(part_shape(part, leaves[part.leaf])) for part in fragment.parts
        )
    assert all((count == 1).all() for count in seen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_fragments=7), r"num_diloco_fragments=7 does not fit 5 layers.*Use 1, or 2 to 6"),
        (dict(num_fragments=2, num_nonlayer=2), r"num_diloco_fragments=2 .* Use 1, or 3 to 7"),
    ],
)
def test_counts_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        partition(MODEL, AXES, **options)


def test_more_fragments_than_leaves_are_refused():
    with pytest.raises(ValueError, match=r"num_diloco_fragments=2 is more than the 1 leaves.*Use"):
        partition(shapes(a=(3,)), None, num_fragments=2)


def test_a_layer_that_no_leaf_holds_leaves_an_empty_fragment():
    params, axes = shapes(w=(2, 3)), {"w": Stacked(0, (0, 2))}
    with pytest.raises(ValueError, match=r"num_diloco_fragments=3 leaves fragment 1 empty.*fewer"):
        partition(params, axes, num_fragments=3)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"w": 2}, "is not a dim of a leaf of shape"),
        ({"w": Stacked(0, (0,))}, "names 1 layers but dim 0 .* has 2 entries. Name one layer"),
        ([0, 1], r"layer_axis has 2 entries but params has 1 leaves. Give one"),
    ],
)
def test_layer_axis_that_does_not_fit_is_refused(axes, message):
    with pytest.raises(ValueError, match=message):
        partition(shapes(w=(2, 3)), axes, num_fragments=2)


def test_a_fragment_above_twice_the_median_is_lopsided():
    assert lopsided([10, 4, 4, 4]) == [0]
    assert lopsided([8, 4, 4, 4]) == []
