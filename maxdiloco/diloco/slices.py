"""Reading and writing a fragment's slices of the parameter leaves.

The start of a slice is an argument of a compiled program. Fragments whose slices differ only in
their starts, such as fragments of different layers, share the program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Up to this number entries are sliced one by one; for more a gather compiles to a smaller program.
MOST_SINGLE_SLICES = 64

Move = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """Return x unchanged."""
    return x


class LeafSlice(NamedTuple):
    """A fragment's entries of one leaf, along dim `axis` of one replica's array.

    Attributes:
      leaf: index of the leaf in tree order.
      pattern: 'whole', the entire leaf, `axis` is unused; 'run', `count` adjacent entries;
        'stride', every `stride`-th entry of a dim that `stride` divides; 'list', any others.
      axis: the dim. count: number of entries. stride: distance of entries.
      start_or_indices: the first entry; for 'list' all entries; None in a `form`.
    """

    leaf: int
    pattern: str
    axis: int = 0
    count: int = 0
    stride: int = 1
    start_or_indices: int | tuple[int, ...] | None = 0

    @property
    def form(self) -> "LeafSlice":
        """The slice without its start: slices of equal form share a compiled program."""
        return self._replace(start_or_indices=None)

    @property
    def entries(self) -> Sequence[int]:
        """The entries of the slice, in order; for a whole leaf a range that exceeds every dim."""
        start, count = self.start_or_indices, self.count
        if isinstance(start, tuple):
            return start
        count = 1 << 62 if self.pattern == "whole" else count  # more than a dim has
        return range(start, start + count * self.stride, self.stride)

    def shape(self, leaf_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice's entries of a leaf of `leaf_shape`."""
        if self.pattern == "whole":
            return tuple(leaf_shape)
        return (*leaf_shape[: self.axis], self.count, *leaf_shape[self.axis + 1 :])


def slice_along(leaf: int, axis: int, entries: Sequence[int], shape: Sequence[int]) -> LeafSlice:
    """Return the slice with `entries`, ascending, of dim `axis` of a leaf; shape: without R."""
    first, count = entries[0], len(entries)
    stride = entries[1] - first if count > 1 else 1
    regular = tuple(entries) == tuple(range(first, first + stride * count, stride))
    if regular and stride == 1:
        return LeafSlice(leaf, "run", axis, count, 1, first)
    if regular and stride > 1 and first < stride and count * stride == shape[axis]:
        return LeafSlice(leaf, "stride", axis, count, stride, first)
    return LeafSlice(leaf, "list", axis, count, 1, tuple(entries))


def gather_slice(
    x: jax.Array,
    leaf_slice: LeafSlice,
    start_or_indices: jax.Array,
    *,
    num_leading: int = 0,
    load: Move = identity,
) -> jax.Array:
    """Return the slice's entries of leaf x, in order.

    Args:
      x: the leaf, with `num_leading` dims (R) before its own.
      leaf_slice: the slice; its start is not used.
      start_or_indices: start or indices, int32; may be traced.
      num_leading: number of dims before the leaf's own.
      load: moves each contiguous piece, for example from host memory, before the concatenation.
    """
    axis, count, stride = leaf_slice.axis + num_leading, leaf_slice.count, leaf_slice.stride
    if leaf_slice.pattern == "whole":
        return load(x)
    if leaf_slice.pattern == "run":
        return load(jax.lax.dynamic_slice_in_dim(x, start_or_indices, count, axis))
    if leaf_slice.pattern == "stride":
        folded = x.reshape(*x.shape[:axis], count, stride, *x.shape[axis + 1 :])
        entries = jax.lax.dynamic_index_in_dim(folded, start_or_indices, axis + 1, keepdims=False)
        return load(entries)
    indices = start_or_indices
    if count > MOST_SINGLE_SLICES:
        return load(jnp.take(x, indices, axis=axis, unique_indices=True, indices_are_sorted=True))
    single = [load(jax.lax.dynamic_slice_in_dim(x, indices[i], 1, axis)) for i in range(count)]
    return jnp.concatenate(single, axis)


def scatter_slice(
    x: jax.Array,
    leaf_slice: LeafSlice,
    start_or_indices: jax.Array,
    values: jax.Array,
    *,
    num_leading: int = 0,
    store: Move = identity,
) -> jax.Array:
    """Return leaf x with the slice's entries replaced by `values`.

    `values` has the shape of the result of `gather_slice`, and the other arguments are as there.
    `store` moves each contiguous piece to the memory of x.
    """
    axis, count, stride = leaf_slice.axis + num_leading, leaf_slice.count, leaf_slice.stride
    if leaf_slice.pattern == "whole":
        return store(values)
    if leaf_slice.pattern == "run":
        return jax.lax.dynamic_update_slice_in_dim(x, store(values), start_or_indices, axis)
    if leaf_slice.pattern == "stride":
        folded = x.reshape(*x.shape[:axis], count, stride, *x.shape[axis + 1 :])
        folded = jax.lax.dynamic_update_index_in_dim(
            folded, store(values), start_or_indices, axis + 1
        )
        return folded.reshape(x.shape)
    indices = start_or_indices
    if count > MOST_SINGLE_SLICES:
        where = (slice(None),) * axis + (indices,)
        return x.at[where].set(store(values), unique_indices=True, indices_are_sorted=True)
    for i in range(count):
        single = store(jax.lax.slice_in_dim(values, i, i + 1, axis=axis))
        x = jax.lax.dynamic_update_slice_in_dim(x, single, indices[i], axis)
    return x
