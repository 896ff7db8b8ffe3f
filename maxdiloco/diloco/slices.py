"""Taking a fragment's slices out of the leaves and putting them back.

Where a slice starts is an argument of a compiled program. Fragments whose slices differ in
nothing else, such as those of other layers, share the program.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Up to this many entries are taken one by one; beyond it a gather compiles smaller (our choice).
MOST_SINGLE_SLICES = 64

Move = Callable[[jax.Array], jax.Array]


def identity(x: jax.Array) -> jax.Array:
    """Return x unchanged."""
    return x


class LeafSlice(NamedTuple):
    """The entries of one leaf that a fragment takes, along dim `axis` of one replica's view.

    leaf: its index in tree order. pattern: 'whole', all of the leaf (`axis` means nothing); 'run',
    `count` neighbours; 'stride', every `stride`-th entry of a dim that divides by it; 'list', any
    others. start_or_indices: the first entry; of a list all of them.
    """

    leaf: int
    pattern: str
    axis: int = 0
    count: int = 0
    stride: int = 1
    start_or_indices: int | tuple[int, ...] | None = 0

    @property
    def form(self) -> "LeafSlice":
        """The slice without its start: what a compiled program is made for."""
        return self._replace(start_or_indices=None)

    @property
    def entries(self) -> Sequence[int]:
        """The entries it takes, in order; of a whole leaf any."""
        start, count = self.start_or_indices, self.count
        if isinstance(start, tuple):
            return start
        count = 1 << 62 if self.pattern == "whole" else count  # more than a dim has
        return range(start, start + count * self.stride, self.stride)

    def shape(self, leaf_shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of what it takes of a leaf of `leaf_shape`."""
        if self.pattern == "whole":
            return tuple(leaf_shape)
        return (*leaf_shape[: self.axis], self.count, *leaf_shape[self.axis + 1 :])


def slice_along(leaf: int, axis: int, entries: Sequence[int], shape: Sequence[int]) -> LeafSlice:
    """The slice that takes `entries`, ascending, of dim `axis` of a leaf of one replica's shape."""
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
    lead: int = 0,
    load: Move = identity,
) -> jax.Array:
    """The slice's entries of leaf x, in order; `lead` dims (R) come before the leaf's own.

    start_or_indices: int32, may be traced; used in place of the slice's own.
    load: moves each contiguous piece, say from host memory, before they are concatenated.
    """
    axis, count, stride = leaf_slice.axis + lead, leaf_slice.count, leaf_slice.stride
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
    lead: int = 0,
    store: Move = identity,
) -> jax.Array:
    """Leaf x with the slice's entries replaced by `values`, shaped as `gather_slice` returns them.

    store: moves each contiguous piece to where x is.
    """
    axis, count, stride = leaf_slice.axis + lead, leaf_slice.count, leaf_slice.stride
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
