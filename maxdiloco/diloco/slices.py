"""Taking a fragment's part out of a leaf and putting it back, at places known only when it runs.

Fragments that differ only in which layers they hold have equal cuts and differ in the places, so
one compiled program serves them all.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.diloco.fragments import Part

# Up to this many entries are taken one by one; beyond it a gather compiles smaller (our choice).
MOST_SINGLE_SLICES = 64


Move = Callable[[jax.Array], jax.Array]


def keep(x: jax.Array) -> jax.Array:
    """x where it is."""
    return x


class Cut(NamedTuple):
    """How a part lies in its leaf.

    pattern: 'whole'; 'run', neighbours; 'stride', every stride-th entry of a dim that divides by
    it; 'list', any others.
    """

    leaf: int
    axis: int
    count: int
    pattern: str
    stride: int


def cut_of(part: Part, shape: tuple[int, ...]) -> Cut:
    """The cut of `part` in a leaf of one replica's `shape`."""
    if part.axis is None:
        return Cut(part.leaf, 0, 0, "whole", 1)
    first, count = part.entries[0], len(part.entries)
    stride = part.entries[1] - first if count > 1 else 1
    regular = part.entries == tuple(range(first, first + stride * count, stride))
    if regular and stride == 1:
        return Cut(part.leaf, part.axis, count, "run", 1)
    if regular and stride > 1 and first < stride and count * stride == shape[part.axis]:
        return Cut(part.leaf, part.axis, count, "stride", stride)
    return Cut(part.leaf, part.axis, count, "list", 1)


def places_of(part: Part, cut: Cut) -> np.ndarray:
    """The places to hand to `take` and `put`: the first entry, or all of them for a list."""
    if cut.pattern == "whole":
        return np.zeros((), np.int32)
    if cut.pattern == "list":
        return np.array(part.entries, np.int32)
    return np.array(part.entries[0], np.int32)


def take(
    x: jax.Array, cut: Cut, places: jax.Array, *, lead: int = 0, load: Move = keep
) -> jax.Array:
    """The cut's entries of x, in order; `lead` dims (R) come before the leaf's own.

    load: moves each contiguous piece, say from host memory, before pieces are put together.
    """
    axis = cut.axis + lead
    if cut.pattern == "whole":
        return load(x)
    if cut.pattern == "run":
        return load(jax.lax.dynamic_slice_in_dim(x, places, cut.count, axis))
    if cut.pattern == "stride":
        folded = x.reshape(*x.shape[:axis], cut.count, cut.stride, *x.shape[axis + 1 :])
        return load(jax.lax.dynamic_index_in_dim(folded, places, axis + 1, keepdims=False))
    if cut.count > MOST_SINGLE_SLICES:
        return load(jnp.take(x, places, axis=axis, unique_indices=True, indices_are_sorted=True))
    single = [
        load(jax.lax.dynamic_slice_in_dim(x, places[i], 1, axis)) for i in range(cut.count)
    ]
    return jnp.concatenate(single, axis)


def put(
    x: jax.Array,
    cut: Cut,
    places: jax.Array,
    values: jax.Array,
    *,
    lead: int = 0,
    store: Move = keep,
) -> jax.Array:
    """x with the cut's entries replaced by `values`, shaped as `take` returns them.

    store: moves each contiguous piece to where x is.
    """
    axis = cut.axis + lead
    if cut.pattern == "whole":
        return store(values)
    if cut.pattern == "run":
        return jax.lax.dynamic_update_slice_in_dim(x, store(values), places, axis)
    if cut.pattern == "stride":
        folded = x.reshape(*x.shape[:axis], cut.count, cut.stride, *x.shape[axis + 1 :])
        folded = jax.lax.dynamic_update_index_in_dim(folded, store(values), places, axis + 1)
        return folded.reshape(x.shape)
    if cut.count > MOST_SINGLE_SLICES:
        index = (slice(None),) * axis + (places,)
        return x.at[index].set(store(values), unique_indices=True, indices_are_sorted=True)
    for i in range(cut.count):
        single = store(jax.lax.slice_in_dim(values, i, i + 1, axis=axis))
        x = jax.lax.dynamic_update_slice_in_dim(x, single, places[i], axis)
    return x
