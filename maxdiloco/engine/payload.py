"""The payload of a fragment on one device: the values that it encodes, and their decoding.

    # R replicas  S replicas of this slice  N values a device encodes of a leaf
    # C wire elements of a replica on one device  F leaves of the fragment

Every value leaves a slice once. A device encodes its own shard of every leaf. If several devices of
a slice hold the same values, each of them encodes an equal part. Blocks of the wire format never
cross a leaf, a shard or such a part. The payload begins with one flag for each leaf. A flag is zero
when all values are finite, so an all-zero payload decodes to finite zeros.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer, quantize
from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.parallel.mesh import devices_of_slice, in_slice_axes
from maxdiloco.parallel.sharding import axes_of

# TPU lays rank-1 arrays out in tiles of 1024 elements; other lengths are padded to them.
TILE = 1024


class WireShard(NamedTuple):
    """The part of one leaf of the fragment that one device encodes.

    Attributes:
      spec: sharding of the leaf inside a slice.
      local: shape of the shard.
      replicated_axes: in-slice axes over which the shard is repeated.
      copies: devices that hold the same shard.
      count: values that one device encodes.
      start: position of their codes in the payload [wire elements].
      length: number of their codes [wire elements].
    """

    spec: P
    local: tuple[int, ...]
    replicated_axes: tuple[str, ...]
    copies: int
    count: int
    start: int
    length: int


class Parts(NamedTuple):
    """How reduce-scatter cuts a payload into one part for each slice; see reduce_scatter.py.

    Attributes:
      mean_dtype: wire format of the means.
      values: number of values of a part.
      size: length of the encoded part that a replica sends to one slice [wire elements].
    """

    mean_dtype: str
    values: int
    size: int


class Cut(NamedTuple):
    """How a payload is cut into chunks of equal length. Zeros pad the last one.

    Attributes:
      count: number of chunks.
      length: length of a chunk of one payload on one device [wire elements].
    """

    count: int
    length: int

    @property
    def size(self) -> int:
        """Length of all chunks together [wire elements]."""
        return self.count * self.length

    def slices(self) -> list[slice]:
        """Return the position of each chunk in the padded payload."""
        return [slice(start, start + self.length) for start in range(0, self.size, self.length)]


class Payload(NamedTuple):
    """A fragment's payload on one device.

    Attributes:
      wire: wire format of outer gradients.
      shards: one for each leaf of the fragment.
      size: length of the codes of a replica that all slices receive [wire elements]; with
        reduce-scatter, length of the codes of a slice's means.
      mesh: the mesh.
      num_replicas: number of replicas, M.
      parts: None with all-gather.
    """

    wire: str
    shards: tuple[WireShard, ...]
    size: int
    mesh: Mesh
    num_replicas: int
    parts: Parts | None = None

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return self.mesh.shape["diloco"]

    @property
    def replicas_per_slice(self) -> int:
        """Number of replicas of a slice."""
        return self.num_replicas // self.num_slices

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a wire element of `size`."""
        return quantize.words(self.parts.mean_dtype) if self.parts else self.sent_dtype

    @property
    def sent_dtype(self) -> np.dtype:
        """Dtype of a wire element that a replica encodes."""
        return quantize.words(self.wire) if self.parts else quantize.wire_format(self.wire).dtype

    @property
    def sent_size(self) -> int:
        """Wire elements that a replica sends to one slice."""
        return self.parts.size if self.parts else self.size

    def gather_bytes(self, size: int) -> int:
        """Return the bytes that one replica sends to one slice in an all-gather.

        With reduce-scatter these are means: a slice sends them once for all its replicas.

        Args:
          size: length of a payload or chunk on one device [wire elements].
        """
        sent = size * self.dtype.itemsize
        if self.parts:
            sent = quantize.ceil_div(sent, self.replicas_per_slice)
        return sent * devices_of_slice(self.mesh)

    def scatter_bytes(self, size: int) -> int:
        """Return the bytes that one replica sends to one slice to be averaged there.

        Args:
          size: length of a payload or chunk on one device [wire elements].
        """
        return size * self.sent_dtype.itemsize * devices_of_slice(self.mesh)


class ValueSums(NamedTuple):
    """Two sums of a replica's decoded values on one device, and which leaves were not finite."""

    bad_F: jax.Array
    squares: jax.Array
    magnitudes: jax.Array


def value_sums(x_N: Sequence[jax.Array], bad_F: jax.Array) -> ValueSums:
    """Sum the squares and the magnitudes of each leaf's values [N]."""
    squares = sum(jnp.sum(x * x) for x in x_N)
    return ValueSums(bad_F, squares, sum(jnp.sum(jnp.abs(x)) for x in x_N))


def for_leaves(
    shapes: Sequence[tuple[int, ...]],
    specs: Sequence[P],
    *,
    wire: str,
    mesh: Mesh,
    num_replicas: int,
) -> Payload:
    """Return the payload of a fragment.

    Args:
      shapes: shapes of its leaves, without R.
      specs: their shardings, over the axes inside a slice.
      wire: wire format.
      mesh: the mesh.
      num_replicas: number of replicas, M.
    """
    shards = []
    start = len(shapes)  # the flags come first
    for shape, spec in zip(shapes, specs, strict=True):
        entries = [axes_of(entry) for entry in (*spec, *([None] * (len(shape) - len(spec))))]
        sharded = {axis for axes in entries for axis in axes}
        local = tuple(
            dim // math.prod(mesh.shape[axis] for axis in axes)
            for dim, axes in zip(shape, entries, strict=True)
        )
        replicated = tuple(axis for axis in in_slice_axes(mesh) if axis not in sharded)
        copies = math.prod(mesh.shape[axis] for axis in replicated)
        count = quantize.ceil_div(math.prod(local), copies)
        length = quantize.encoded_size(wire, count)
        shards.append(WireShard(spec, local, replicated, copies, count, start, length))
        start += length
    return Payload(wire, tuple(shards), start, mesh, num_replicas)


def pad_to_tile(size: int) -> int:
    """Round `size` wire elements up to whole tiles."""
    return quantize.ceil_div(size, TILE) * TILE


def encode(payload: Payload, leaves_S: Sequence[jax.Array]) -> jax.Array:
    """Encode a device's shards of the fragment, [S, *local] float32 each, as [S, C]."""
    bad_SF, clean_SN = finite_values(payload, leaves_S)
    codes = [jax.vmap(lambda x_N: quantize.encode(payload.wire, x_N))(x_SN) for x_SN in clean_SN]
    return jnp.concatenate([bad_SF.astype(payload.dtype), *codes], axis=1)


def finite_values(
    payload: Payload, leaves_S: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """Return the values that this device encodes, with zeros for those that are not finite.

    Returns:
      ([S, F]: 1.0 where a leaf has a value that is not finite, else 0.0; [S, N] for each leaf).
    """
    bad, clean = [], []
    for shard, leaf_S in zip(payload.shards, leaves_S, strict=True):
        x_SN = own_values(shard, leaf_S)
        finite_SN = jnp.isfinite(x_SN)
        # XLA:CPU needs one kernel for a maximum of floats, and up to four for an `any`.
        bad.append(jnp.max(jnp.where(finite_SN, 0.0, 1.0), axis=1))
        clean.append(jnp.where(finite_SN, x_SN, 0.0))
    return jnp.stack(bad, axis=1), clean


def own_values(shard: WireShard, leaf_S: jax.Array) -> jax.Array:
    """Return the values of a shard that this device encodes: [S, *local] -> [S, N]."""
    flat = leaf_S.reshape(leaf_S.shape[0], -1)
    if shard.copies == 1:
        return flat
    flat = jnp.pad(flat, ((0, 0), (0, shard.copies * shard.count - flat.shape[1])))
    return jax.lax.dynamic_slice_in_dim(flat, first_own_value(shard), shard.count, axis=1)


def first_own_value(shard: WireShard) -> jax.Array | int:
    """Return the index of the first value of its shard that this device encodes."""
    if shard.copies == 1:
        return 0
    return jax.lax.axis_index(shard.replicated_axes) * shard.count


def decode(payload: Payload, code_C: jax.Array) -> list[jax.Array]:
    """Decode one replica's codes to the values of this device, [N] float32 for each leaf."""
    values = []
    for shard in payload.shards:
        code = jax.lax.slice_in_dim(code_C, shard.start, shard.start + shard.length)
        values.append(real_values(shard, quantize.decode(payload.wire, code, shard.count)))
    return values


def real_values(shard: WireShard, x_N: jax.Array) -> jax.Array:
    """Set the padding of the last device's part to zero; int2 has no code for zero."""
    if shard.copies * shard.count <= math.prod(shard.local):
        return x_N
    index_N = first_own_value(shard) + jnp.arange(shard.count)
    return jnp.where(index_N < math.prod(shard.local), x_N, 0.0)


def new_residual(
    payload: Payload,
    decoded_SN: Sequence[jax.Array],
    bad_SF: jax.Array,
    wanted_S: Sequence[jax.Array],
    residual_S: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """Compute the error-feedback residual after a send; it gathers inside the slice.

    Args:
      payload: the fragment's payload.
      decoded_SN: values that receivers decode, [S, N] for each leaf.
      bad_SF: whether a leaf was not finite. This device's part of the leaf keeps its residual.
      wanted_S: the values before they were encoded, [S, *local] for each leaf.
      residual_S: the residual before the send, [S, *local] for each leaf.

    Returns:
      (residual [S, *local] for each leaf, sum of its squares on this device [S]).
    """
    wanted_SN, old_SN = (
        [own_values(shard, leaf) for shard, leaf in zip(payload.shards, leaves, strict=True)]
        for leaves in (wanted_S, residual_S)
    )
    bad = [bad_SF[:, f, None] for f in range(len(payload.shards))]
    new_SN = outer.new_residual(wanted_SN, decoded_SN, old_SN, bad)
    squares_S = sum(jnp.sum(x_SN * x_SN, axis=1) for x_SN in new_SN)
    pairs = zip(payload.shards, new_SN, strict=True)
    return [assemble(shard, x_SN) for shard, x_SN in pairs], squares_S


def flags(payload: Payload, code_C: jax.Array) -> jax.Array:
    """Read the flags [F] of one replica's codes: True where a leaf was not finite."""
    return jax.lax.slice_in_dim(code_C, 0, len(payload.shards)) != 0


def bad_flags(payload: Payload, flags_RF: jax.Array) -> jax.Array:
    """Combine flags over a slice: [R, F], True if a device has a NaN or infinity in the leaf."""
    return jax.lax.pmax(flags_RF.astype(jnp.int32), in_slice_axes(payload.mesh)) > 0


def assemble(shard: WireShard, x_SN: jax.Array) -> jax.Array:
    """Gather the parts of a shard inside the slice: [S, N] -> [S, *local]."""
    if shard.copies > 1:
        x_SN = jax.lax.all_gather(x_SN, shard.replicated_axes, axis=1, tiled=True)
    flat = x_SN[:, : math.prod(shard.local)]
    return flat.reshape(flat.shape[0], *shard.local)


def tensor_norms(
    payload: Payload, leaf_axes: Sequence[Any], x_N: Sequence[jax.Array]
) -> list[jax.Array]:
    """Compute the L2 norms of the tensors in each leaf of one replica.

    A Stacked leaf has one tensor for each layer. A Vocabulary leaf gets norm 0, so that it is
    averaged plainly.

    Args:
      payload: the fragment's payload.
      leaf_axes: see fragments.leaf_axes_of.
      x_N: this device's values of each leaf.
    """
    norms = []
    for shard, axes, x in zip(payload.shards, leaf_axes, x_N, strict=True):
        if isinstance(axes, Vocabulary):
            norms.append(jnp.zeros((1,)))
            continue
        if shard.copies > 1:
            whole = jnp.zeros(shard.copies * shard.count)
            x = jax.lax.dynamic_update_slice_in_dim(whole, x, first_own_value(shard), 0)
        values = x[: math.prod(shard.local)].reshape(shard.local)
        layer = axes.axis if isinstance(axes, Stacked) else None
        others = tuple(dim for dim in range(values.ndim) if dim != layer)
        squares = jnp.sum(values * values, axis=others).reshape(-1)
        apart = axes_of(shard.spec[layer]) if layer is not None and layer < len(shard.spec) else ()
        over = [axis for axis in in_slice_axes(payload.mesh) if axis not in apart]
        norms.append(jnp.sqrt(jax.lax.psum(squares, tuple(over))))
    return norms


def spread_norms(
    payload: Payload, leaf_axes: Sequence[Any], norms: Sequence[jax.Array]
) -> list[jax.Array]:
    """Repeat one number for each tensor, such as its norm, at every value of this device."""
    spread = []
    for shard, axes, norm in zip(payload.shards, leaf_axes, norms, strict=True):
        layer = axes.axis if isinstance(axes, Stacked) else None
        shape = [norm.size if dim == layer else 1 for dim in range(len(shard.local))]
        whole = jnp.broadcast_to(norm.reshape(shape), shard.local)
        spread.append(own_values(shard, whole[None])[0])
    return spread
