"""What one device puts on the wire for one fragment, and how it reads what arrives.

    # R replicas  S replicas of this mesh slot  N values a device carries of a leaf
    # C wire elements of a replica on one device  F leaves of the fragment

Each payload value leaves a slice once: a device carries its own shard of every leaf, and where
several devices of a slice hold the same values each carries an equal share of them. Blocks of the
wire format never cross a leaf, a shard or a share. The payload begins with one flag per leaf, zero
when all values are finite, so that an all-zero payload means "no change, all well".
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import quantize
from maxdiloco.parallel.mesh import in_slice_axes
from maxdiloco.parallel.sharding import axes_of

# TPU lays rank-1 arrays out in tiles of 1024 elements; other lengths are padded to them.
TILE = 1024


class Share(NamedTuple):
    """What one device carries of one leaf.

    local: shape of the device's shard; spare: in-slice axes over which that shard is repeated;
    count: values carried; start, length: place in the payload [wire elements].
    """

    spec: P
    local: tuple[int, ...]
    spare: tuple[str, ...]
    copies: int
    count: int
    start: int
    length: int


class Payload(NamedTuple):
    """Layout of a fragment's payload on one device; `size` in wire elements per replica."""

    wire: str
    shares: tuple[Share, ...]
    size: int
    mesh: Mesh


def lay_out(
    shapes: Sequence[tuple[int, ...]], specs: Sequence[P], *, wire: str, mesh: Mesh
) -> Payload:
    """Layout for the leaves of a fragment, one replica's view.

    shapes, specs: of the fragment's leaves; specs name in-slice axes only and divide the dims.
    """
    shares = []
    start = len(shapes)  # the flags come first
    for shape, spec in zip(shapes, specs, strict=True):
        entries = [axes_of(entry) for entry in (*spec, *([None] * (len(shape) - len(spec))))]
        used = {axis for axes in entries for axis in axes}
        local = tuple(
            dim // math.prod(mesh.shape[axis] for axis in axes)
            for dim, axes in zip(shape, entries, strict=True)
        )
        spare = tuple(axis for axis in in_slice_axes(mesh) if axis not in used)
        copies = math.prod(mesh.shape[axis] for axis in spare)
        count = -(-math.prod(local) // copies)
        length = quantize.encoded_size(wire, count)
        shares.append(Share(spec, local, spare, copies, count, start, length))
        start += length
    return Payload(wire, tuple(shares), start, mesh)


def pad_to_tile(size: int) -> int:
    """`size` wire elements rounded up to whole tiles."""
    return -(-size // TILE) * TILE


def encode(payload: Payload, leaves_S: Sequence[jax.Array]) -> jax.Array:
    """A device's shards of the fragment, [S, *local] float32 each, as codes [S, C]."""
    dtype = quantize.wire(payload.wire).dtype
    flags, codes = [], []
    for share, leaf_S in zip(payload.shares, leaves_S, strict=True):
        mine_SN = _carried(share, leaf_S)
        finite_SN = jnp.isfinite(mine_SN)
        flags.append(jnp.any(~finite_SN, axis=1).astype(dtype))
        clean_SN = jnp.where(finite_SN, mine_SN, 0.0)
        codes.append(jax.vmap(lambda x_N: quantize.encode(payload.wire, x_N))(clean_SN))
    return jnp.concatenate([jnp.stack(flags, axis=1), *codes], axis=1)


def _carried(share: Share, leaf_S: jax.Array) -> jax.Array:
    """[S, *local] -> [S, N]: the share of the shard that this device carries."""
    flat = leaf_S.reshape(leaf_S.shape[0], -1)
    if share.copies == 1:
        return flat
    flat = jnp.pad(flat, ((0, 0), (0, share.copies * share.count - flat.shape[1])))
    place = jax.lax.axis_index(share.spare) * share.count
    return jax.lax.dynamic_slice_in_dim(flat, place, share.count, axis=1)


def decode(payload: Payload, code_C: jax.Array) -> list[jax.Array]:
    """One replica's codes as this device's shares, [N] float32 for each leaf."""
    return [
        quantize.decode(
            payload.wire,
            jax.lax.slice_in_dim(code_C, share.start, share.start + share.length),
            share.count,
        )
        for share in payload.shares
    ]


def flags(payload: Payload, code_C: jax.Array) -> jax.Array:
    """[F] of one replica's codes on this device: not zero where a leaf was not finite."""
    return jax.lax.slice_in_dim(code_C, 0, len(payload.shares)) != 0


def bad_flags(payload: Payload, flags_RF: jax.Array) -> jax.Array:
    """[R, F] bool: whether a replica's leaf held a NaN or infinity on any device of its slice."""
    return jax.lax.pmax(flags_RF.astype(jnp.int32), in_slice_axes(payload.mesh)) > 0


def assemble(share: Share, mine_SN: jax.Array) -> jax.Array:
    """[S, N] -> [S, *local]: gather the shares of a shard inside the slice."""
    if share.copies > 1:
        mine_SN = jax.lax.all_gather(mine_SN, share.spare, axis=1, tiled=True)
    flat = mine_SN[:, : math.prod(share.local)]
    return flat.reshape(flat.shape[0], *share.local)


def num_values(payload: Payload) -> int:
    """Values of one replica's fragment."""
    devices = math.prod(payload.mesh.shape[axis] for axis in in_slice_axes(payload.mesh))
    return sum(math.prod(share.local) * (devices // share.copies) for share in payload.shares)
