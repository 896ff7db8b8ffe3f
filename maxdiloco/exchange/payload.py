"""What one device puts on the wire for one fragment, and how it decodes what arrives.

    # R replicas  S replicas of this mesh slot  N values a device carries of a leaf
    # C wire elements of a replica on one device  F leaves of the fragment

Each payload value leaves a slice once: a device carries its own shard of every leaf, and where
several devices of a slice hold the same values each carries an equal part of them. Blocks of the
wire format never cross a leaf, a shard or such a part. The payload begins with one flag per leaf,
zero when all values are finite, so an all-zero payload decodes to finite zeros.
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
    """What one device carries of one leaf of the fragment.

    spec, local: of the leaf in a slice, and the shape of a device's shard. replicated_axes:
    in-slice axes over which the shard is repeated, on `copies` devices.
    count: values carried; start, length: where they are in the payload [wire elements].
    """

    spec: P
    local: tuple[int, ...]
    replicated_axes: tuple[str, ...]
    copies: int
    count: int
    start: int
    length: int


class Owned(NamedTuple):
    """How slots own parts of a payload: see owners.py.

    reduced: wire of the means. replicas: of a slot. values: of a part. size: of what a replica
    sends of it [wire elements].
    """

    reduced: str
    replicas: int
    values: int
    size: int


class Payload(NamedTuple):
    """A fragment's payload on one device: a shard of each leaf.

    size: of what arrives everywhere of a replica, or of an owner's part where slots own parts [wire
    elements].
    """

    wire: str
    shards: tuple[WireShard, ...]
    size: int
    mesh: Mesh
    owned: Owned | None = None

    @property
    def dtype(self) -> np.dtype:
        """Of a wire element of `size`."""
        return quantize.words(self.owned.reduced) if self.owned else self.first_dtype

    @property
    def first_dtype(self) -> np.dtype:
        """Of a wire element that a replica sends."""
        return quantize.words(self.wire) if self.owned else quantize.wire_format(self.wire).dtype

    @property
    def first_size(self) -> int:
        """Wire elements that a replica sends to a slot."""
        return self.owned.size if self.owned else self.size


class Note(NamedTuple):
    """Of a replica's values on one device, decoded: which leaves were not finite, and two sums."""

    bad_F: jax.Array
    squares: jax.Array
    magnitudes: jax.Array

    @classmethod
    def of(cls, x_N: Sequence[jax.Array], bad_F: jax.Array) -> "Note":
        """Of each leaf's values [N]."""
        squares = sum(jnp.sum(x * x) for x in x_N)
        return cls(bad_F, squares, sum(jnp.sum(jnp.abs(x)) for x in x_N))


def for_leaves(
    shapes: Sequence[tuple[int, ...]], specs: Sequence[P], *, wire: str, mesh: Mesh
) -> Payload:
    """The payload for a fragment's leaves, one replica's view; specs name in-slice axes only."""
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
    return Payload(wire, tuple(shards), start, mesh)


def pad_to_tile(size: int) -> int:
    """`size` wire elements rounded up to whole tiles."""
    return quantize.ceil_div(size, TILE) * TILE


def encode(payload: Payload, leaves_S: Sequence[jax.Array]) -> jax.Array:
    """A device's shards of the fragment, [S, *local] float32 each, as codes [S, C]."""
    bad_SF, clean_SN = cleaned(payload, leaves_S)
    codes = [jax.vmap(lambda x_N: quantize.encode(payload.wire, x_N))(x_SN) for x_SN in clean_SN]
    return jnp.concatenate([bad_SF.astype(payload.dtype), *codes], axis=1)


def cleaned(payload: Payload, leaves_S: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """What this device carries of each leaf, [S, N]; zeros for what is not finite.

    And [S, F] 1.0 where a leaf has such a value, else 0.0.
    """
    bad, clean = [], []
    for shard, leaf_S in zip(payload.shards, leaves_S, strict=True):
        x_SN = carried(shard, leaf_S)
        finite_SN = jnp.isfinite(x_SN)
        # A maximum of floats is one kernel of XLA:CPU, an `any` a chain of up to four.
        bad.append(jnp.max(jnp.where(finite_SN, 0.0, 1.0), axis=1))
        clean.append(jnp.where(finite_SN, x_SN, 0.0))
    return jnp.stack(bad, axis=1), clean


def carried(shard: WireShard, leaf_S: jax.Array) -> jax.Array:
    """[S, *local] -> [S, N]: the values of its shard that this device carries."""
    flat = leaf_S.reshape(leaf_S.shape[0], -1)
    if shard.copies == 1:
        return flat
    flat = jnp.pad(flat, ((0, 0), (0, shard.copies * shard.count - flat.shape[1])))
    return jax.lax.dynamic_slice_in_dim(flat, first_carried(shard), shard.count, axis=1)


def first_carried(shard: WireShard) -> jax.Array | int:
    """The first of its shard's values that this device carries."""
    if shard.copies == 1:
        return 0
    return jax.lax.axis_index(shard.replicated_axes) * shard.count


def decode(payload: Payload, code_C: jax.Array) -> list[jax.Array]:
    """One replica's codes as the values that this device carries, [N] float32 for each leaf."""
    values = []
    for shard in payload.shards:
        code = jax.lax.slice_in_dim(code_C, shard.start, shard.start + shard.length)
        values.append(real_values(shard, quantize.decode(payload.wire, code, shard.count)))
    return values


def real_values(shard: WireShard, x_N: jax.Array) -> jax.Array:
    """What fills up the last of equal parts is zero: int2 has no code for it."""
    if shard.copies * shard.count <= math.prod(shard.local):
        return x_N
    place_N = first_carried(shard) + jnp.arange(shard.count)
    return jnp.where(place_N < math.prod(shard.local), x_N, 0.0)


def left_over(
    payload: Payload,
    sent_SN: Sequence[jax.Array],
    bad_SF: jax.Array,
    wanted_S: Sequence[jax.Array],
    residual_S: Sequence[jax.Array],
) -> tuple[list[jax.Array], jax.Array]:
    """The residual after a send, [S, *local] for each leaf, and its squares' sum [S] of a device.

    sent_SN: what receivers decode of wanted_S; bad_SF: its flags. residual_S: before the send. See
    outer.left_over; what a device carries of a leaf with a bad value stays. Gathers inside the
    slice.
    """
    both = [
        [carried(shard, leaf) for shard, leaf in zip(payload.shards, leaves, strict=True)]
        for leaves in (wanted_S, residual_S)
    ]
    bad = [bad_SF[:, f, None] for f in range(len(payload.shards))]
    left_SN = outer.left_over(both[0], sent_SN, both[1], bad)
    squares_S = sum(jnp.sum(x_SN * x_SN, axis=1) for x_SN in left_SN)
    pairs = zip(payload.shards, left_SN, strict=True)
    return [assemble(shard, x_SN) for shard, x_SN in pairs], squares_S


def flags(payload: Payload, code_C: jax.Array) -> jax.Array:
    """[F] bool of one replica's codes on this device: true where a leaf was not finite."""
    return jax.lax.slice_in_dim(code_C, 0, len(payload.shards)) != 0


def bad_flags(payload: Payload, flags_RF: jax.Array) -> jax.Array:
    """[R, F] bool: whether a replica's leaf has a NaN or infinity on any device of its slice."""
    return jax.lax.pmax(flags_RF.astype(jnp.int32), in_slice_axes(payload.mesh)) > 0


def assemble(shard: WireShard, x_SN: jax.Array) -> jax.Array:
    """[S, N] -> [S, *local]: gather inside the slice what the devices carry of a shard."""
    if shard.copies > 1:
        x_SN = jax.lax.all_gather(x_SN, shard.replicated_axes, axis=1, tiled=True)
    flat = x_SN[:, : math.prod(shard.local)]
    return flat.reshape(flat.shape[0], *shard.local)


def tensor_norms(
    payload: Payload, kinds: Sequence[Any], x_N: Sequence[jax.Array]
) -> list[jax.Array]:
    """L2 norms of the tensors in each leaf of one replica: of a Stacked one a layer's, else all.

    kinds: of the leaves; a Vocabulary leaf has no norm, 0. x_N: what this device carries.
    """
    norms = []
    for shard, kind, x in zip(payload.shards, kinds, x_N, strict=True):
        if isinstance(kind, Vocabulary):
            norms.append(jnp.zeros((1,)))
            continue
        if shard.copies > 1:
            whole = jnp.zeros(shard.copies * shard.count)
            x = jax.lax.dynamic_update_slice_in_dim(whole, x, first_carried(shard), 0)
        values = x[: math.prod(shard.local)].reshape(shard.local)
        layer = kind.axis if isinstance(kind, Stacked) else None
        others = tuple(dim for dim in range(values.ndim) if dim != layer)
        squares = jnp.sum(values * values, axis=others).reshape(-1)
        apart = axes_of(shard.spec[layer]) if layer is not None and layer < len(shard.spec) else ()
        over = [axis for axis in in_slice_axes(payload.mesh) if axis not in apart]
        norms.append(jnp.sqrt(jax.lax.psum(squares, tuple(over))))
    return norms


def spread_norms(
    payload: Payload, kinds: Sequence[Any], norms: Sequence[jax.Array]
) -> list[jax.Array]:
    """What `tensor_norms` gave, or a function of it, at every value that this device carries."""
    spread = []
    for shard, kind, norm in zip(payload.shards, kinds, norms, strict=True):
        layer = kind.axis if isinstance(kind, Stacked) else None
        shape = [norm.size if dim == layer else 1 for dim in range(len(shard.local))]
        whole = jnp.broadcast_to(norm.reshape(shape), shard.local)
        spread.append(carried(shard, whole[None])[0])
    return spread


def payload_bytes(payload: Payload) -> int:
    """Bytes that one replica sends to one other, of all devices of a slice, no padding."""
    return sum(sent_bytes(payload, to_owners) for to_owners in (False, True))


def sent_bytes(payload: Payload, to_owners: bool) -> int:
    """Of these those to owners, 0 without any, or those to all."""
    owned, sent = payload.owned, payload.size * payload.dtype.itemsize
    if to_owners:
        sent = owned.size * payload.first_dtype.itemsize if owned else 0
    elif owned:  # an owner shares for all replicas of its slot
        sent = quantize.ceil_div(sent, owned.replicas)
    return sent * devices_of_slice(payload.mesh)
