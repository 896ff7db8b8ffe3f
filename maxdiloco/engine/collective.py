"""The mean of outer gradients over the replicas, inside compiled programs.

Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, lines 8 and 10, as functions that may be called in
different programs: `send` encodes, `all_gather_chunk` moves encoded chunks between slices, and
`receive` decodes and averages. With reduce-scatter (reduce_scatter.py) `all_to_all_chunk` moves
each part to the slice that averages it, `reduce` averages, and `all_gather_chunk` moves the means.

A chunk crosses the link in its wire format, as a rank-1 array or in whole tiles. No compiler can
then widen or pad it.

    # R replicas  S replicas of this slice  C wire elements of a replica on one device
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer
from maxdiloco.engine import reduce_scatter
from maxdiloco.engine.payload import (
    Cut,
    Payload,
    ValueSums,
    assemble,
    bad_flags,
    decode,
    encode,
    flags,
    new_residual,
    spread_norms,
    tensor_norms,
    value_sums,
)
from maxdiloco.parallel.mesh import devices_of_slice, in_slice_axes

LARGEST_INDEX = 2**31 - 1  # JAX indexes with 32 bits
LANES = 128  # lanes of a TPU's tile; a chunk is whole tiles of eight rows

Chunks = tuple[jax.Array, ...]


class Sizes(NamedTuple):
    """Sizes of the decoded outer gradients of one exchange, for the metrics.

    Attributes:
      norm_R: L2 norm of each replica's outer gradient.
      drift_R: mean magnitude of its values: the distance of the replica from the outer parameters.
      mean_norm: L2 norm of the mean outer gradient.
    """

    norm_R: jax.Array
    drift_R: jax.Array
    mean_norm: jax.Array


class Sent(NamedTuple):
    """The result of a send.

    Attributes:
      chunks: the encoded outer gradients, sharded by `outgoing_spec`.
      residual: error-feedback residual after the send, leaves [R, ...]; () without error feedback.
      norm_R: L2 norm of the residual; () without error feedback.
    """

    chunks: Chunks
    residual: Sequence[jax.Array] = ()
    norm_R: jax.Array | tuple[()] = ()


class Received(NamedTuple):
    """The result of an exchange.

    Attributes:
      mean: mean outer gradient, leaves [...]; eager: [R, ...], each replica has its own.
      bad_RF: whether a replica's leaf was not finite.
      sizes: sizes of the outer gradients.
      own_bad_RF: eager: whether a replica's leaf of this round was not finite; () otherwise.
    """

    mean: list[jax.Array]
    bad_RF: jax.Array
    sizes: Sizes
    own_bad_RF: jax.Array | tuple[()] = ()


def outgoing_spec(mesh: Mesh) -> P:
    """Return the sharding of a chunk before it is sent: rank 1, a part on every device."""
    return P(("diloco", *in_slice_axes(mesh)))


def incoming_spec(mesh: Mesh) -> P:
    """Return the sharding of a chunk that has arrived: every slice holds all replicas' values."""
    axes = in_slice_axes(mesh)
    return P(axes) if axes else P()


def _on_every_device(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# -- lines 7 and 8 ---------------------------------------------------------------------------------


def send(
    payload: Payload,
    leaves_R: Sequence[jax.Array],
    cut: Cut,
    residual_R: Sequence[jax.Array] = (),
) -> Sent:
    """Encode a fragment's outer gradients and cut them into chunks: Algorithm 2, line 8.

    Nothing crosses slices. With error feedback there is traffic inside a slice.

    Args:
      payload: the fragment's payload.
      leaves_R: outer gradients, [R, ...] float32 each.
      cut: chunks of a replica's payload; reduce-scatter: of its payload for one slice.
      residual_R: error-feedback residuals, shaped like leaves_R; () without error feedback.
    """
    mesh, specs = payload.mesh, [P("diloco", *shard.spec) for shard in payload.shards]

    def on_device(g_S, residual_S):
        wanted_S = outer.add_residual(g_S, residual_S) if residual_S else g_S
        if payload.parts:
            codes_SDC, decoded_SN, bad_SF = reduce_scatter.encode(payload, wanted_S)
        else:
            codes_SDC = encode(payload, wanted_S)[:, None]  # the same for every slice
        padding = (0, cut.size - payload.sent_size)
        padded_DSC = jnp.pad(codes_SDC, ((0, 0), (0, 0), padding)).swapaxes(0, 1)
        chunks = tuple(padded_DSC[..., chunk].reshape(-1) for chunk in cut.slices())
        if not residual_S:
            return Sent(chunks)
        if not payload.parts:
            decoded_SN, bad_SF = jax.vmap(lambda c: (decode(payload, c), flags(payload, c)))(
                codes_SDC[:, 0]
            )
        residual_S, squares_S = new_residual(payload, decoded_SN, bad_SF, wanted_S, residual_S)
        return Sent(chunks, residual_S, jnp.sqrt(jax.lax.psum(squares_S, in_slice_axes(mesh))))

    residual_specs = specs if residual_R else []
    sent_specs = Sent((outgoing_spec(mesh),) * cut.count)
    if residual_R:
        sent_specs = sent_specs._replace(residual=specs, norm_R=P("diloco"))
    program = _on_every_device(on_device, mesh, (specs, residual_specs), sent_specs)
    return program(list(leaves_R), list(residual_R))


def all_gather_chunk(chunk: jax.Array, mesh: Mesh) -> jax.Array:
    """Send one chunk of every replica to every slice: Algorithm 2, line 8, over the link."""

    def on_device(codes):
        dtype = codes.dtype
        if dtype == jnp.bfloat16:
            # As integers: CPU widens collectives of bfloat16 to float32.
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint16)
        gathered = jax.lax.all_gather(codes, "diloco", tiled=True)
        return jax.lax.bitcast_convert_type(gathered, dtype)

    return _on_every_device(on_device, mesh, outgoing_spec(mesh), incoming_spec(mesh))(chunk)


def all_to_all_chunk(chunk: jax.Array, mesh: Mesh) -> jax.Array:
    """Send every slice its part of one chunk of all replicas: Algorithm 2, line 8."""

    def on_device(codes):
        # XLA:TPU pads a rank-1 payload of bytes x2 to x4, and rows of whole tiles not at all.
        parts = codes.reshape(mesh.shape["diloco"], -1, LANES)
        return jax.lax.all_to_all(parts, "diloco", 0, 0, tiled=True).reshape(-1)

    return _on_every_device(on_device, mesh, outgoing_spec(mesh), outgoing_spec(mesh))(chunk)


def reduce(payload: Payload, parts: Sequence[jax.Array], cut: Cut) -> Chunks:
    """Average this slice's part of a fragment in float32, and encode the mean. No traffic.

    Args:
      payload: the fragment's payload.
      parts: the chunks that arrived by `all_to_all_chunk`.
      cut: chunks of the encoded mean.
    """
    spec = outgoing_spec(payload.mesh)

    def on_device(chunks):
        row = functools.partial(_row, chunks, payload.num_replicas, payload.sent_size)
        mean = reduce_scatter.reduce(payload, row)
        mean = jnp.pad(mean, (0, cut.size - payload.size))
        return tuple(mean[chunk] for chunk in cut.slices())

    in_specs, out_specs = ([spec] * len(parts),), (spec,) * cut.count
    return _on_every_device(on_device, payload.mesh, in_specs, out_specs)(list(parts))


# -- line 10 ---------------------------------------------------------------------------------------


def receive(
    payload: Payload,
    incoming: Sequence[jax.Array],
    *,
    leaf_axes: Sequence[Any] | None = None,
) -> Received:
    """Decode and average all replicas' outer gradients of a fragment: Algorithm 2, line 10.

    The mean of line 8 is computed here, on arrival, in float32 and in replica order.

    Args:
      payload: the fragment's payload.
      incoming: the chunks of all replicas, sharded by `incoming_spec`; reduce-scatter: the chunks
        of all slices' means.
      leaf_axes: see fragments.leaf_axes_of, for outer.radial_directional_mean. None: the
        plain mean, to which the sizes always refer.
    """
    num_replicas, num_slices = payload.num_replicas, payload.num_slices

    def average(chunks):
        term = _decoded_terms(payload, chunks, num_replicas)
        mean_N, sums_R = outer.ordered_mean(term, num_replicas)
        sizes, bad_RF = _sizes(payload, sums_R, mean_N), bad_flags(payload, sums_R.bad_F)
        if leaf_axes is not None:
            mean_N = outer.radial_directional_mean(
                lambda r: term(r)[0],
                mean_N,
                num_replicas,
                norm=functools.partial(tensor_norms, payload, leaf_axes),
                spread=functools.partial(spread_norms, payload, leaf_axes),
            )
        return Received(_assembled(payload, mean_N), bad_RF, sizes)

    def decode_means(chunks):
        shared = [_row(chunks, num_slices, payload.size, j) for j in range(num_slices)]
        mean_N, sums_R = reduce_scatter.receive(payload, jnp.stack(shared))
        sizes, bad_RF = _sizes(payload, sums_R, mean_N), bad_flags(payload, sums_R.bad_F)
        return Received(_assembled(payload, mean_N), bad_RF, sizes)

    in_specs = ([incoming_spec(payload.mesh)] * len(incoming),)
    out_specs = Received([shard.spec for shard in payload.shards], P(), P())
    on_device = decode_means if payload.parts else average
    return _on_every_device(on_device, payload.mesh, in_specs, out_specs)(list(incoming))


def receive_eager(
    payload: Payload,
    incoming: Sequence[jax.Array],
    own: Sequence[jax.Array],
) -> Received:
    """Average with each replica's own outer gradient of this round: arXiv 2502.12996, Algorithm 3.

    Args:
      payload: the fragment's payload.
      incoming: all replicas' chunks of the round before, sharded by `incoming_spec`. The sizes
        refer to them.
      own: the chunks of this round before they are sent, sharded by `outgoing_spec`.
    """
    mesh, num_replicas, num_here = payload.mesh, payload.num_replicas, payload.replicas_per_slice

    def on_device(chunks, own):
        fresh = [_decoded_terms(payload, own, num_here)(s) for s in range(num_here)]
        first = jax.lax.axis_index("diloco") * num_here
        stale_term = _decoded_terms(payload, chunks, num_replicas)

        def term(r):
            stale, sums = stale_term(r)
            mixed = [
                outer.eager_own_term(stale, x_N, r, first + s) for s, (x_N, _) in enumerate(fresh)
            ]
            return (stale, mixed), sums

        (stale_mean_N, mixed_S), sums_R = outer.ordered_mean(term, num_replicas)
        sizes, bad_RF = _sizes(payload, sums_R, stale_mean_N), bad_flags(payload, sums_R.bad_F)
        mean = [
            assemble(shard, jnp.stack(x_S))
            for shard, *x_S in zip(payload.shards, *mixed_S, strict=True)
        ]
        own_SF = jnp.stack([sums.bad_F for _, sums in fresh])
        return Received(mean, bad_RF, sizes, bad_flags(payload, own_SF))

    in_specs = ([incoming_spec(mesh)] * len(incoming), [outgoing_spec(mesh)] * len(own))
    mean_specs = [P("diloco", *shard.spec) for shard in payload.shards]
    out_specs = Received(mean_specs, P(), P(), P("diloco"))
    return _on_every_device(on_device, mesh, in_specs, out_specs)(list(incoming), list(own))


def _row(chunks: Sequence[jax.Array], rows: int, size: int, r: Any) -> jax.Array:
    """Join row r of a device's chunks, [rows * length] each, without the padding beyond `size`."""
    pieces = []
    for chunk in chunks:
        length = chunk.shape[0] // rows
        if chunk.shape[0] <= LARGEST_INDEX:
            pieces.append(jax.lax.dynamic_slice_in_dim(chunk, r * length, length))
        else:  # slower, but every index fits JAX's 32 bits
            pieces.append(jax.lax.dynamic_index_in_dim(chunk.reshape(rows, length), r, 0, False))
    return jax.lax.slice_in_dim(jnp.concatenate(pieces), 0, size)


def _decoded_terms(
    payload: Payload, chunks: Sequence[jax.Array], rows: int
) -> Callable[[Any], tuple[list[jax.Array], ValueSums]]:
    """Return r -> (values of row r of the chunks of one device, their sums)."""

    def term(r):
        code_C = _row(chunks, rows, payload.size, r)
        x_N = decode(payload, code_C)
        return x_N, value_sums(x_N, flags(payload, code_C))

    return term


def _sizes(payload: Payload, sums_R: ValueSums, mean_N: list[jax.Array]) -> Sizes:
    """Add up the sums of a slice's devices. mean_N: this device's values of the plain mean."""
    sums = (sums_R.squares, sums_R.magnitudes, sum(jnp.sum(x * x) for x in mean_N))
    squares_R, total_R, mean_squares = jax.lax.psum(sums, in_slice_axes(payload.mesh))
    devices, shards = devices_of_slice(payload.mesh), payload.shards
    values = sum(math.prod(shard.local) * (devices // shard.copies) for shard in shards)
    drift_R = total_R / float(values)  # the number of values may exceed int32
    return Sizes(jnp.sqrt(squares_R), drift_R, jnp.sqrt(mean_squares))


def _assembled(payload: Payload, mean_N: list[jax.Array]) -> list[jax.Array]:
    """Gather the leaves of a mean inside the slice."""
    pairs = zip(payload.shards, mean_N, strict=True)
    return [assemble(shard, x_N[None])[0] for shard, x_N in pairs]
