"""A mean over the replicas inside compiled programs, over the mesh axis `diloco`.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 8 and 10, in three parts that can lie in
different programs: `send` encodes, `all_gather_chunk` moves wire codes between slices and nothing
else, `receive` decodes and averages. Where slots own parts of a payload (owners.py) there is a part
more: `all_to_all_chunk` moves codes to their owners, `reduce` averages there, and what
`all_gather_chunk` moves are means. Whatever crosses is already in wire format, as a rank-1 array or
in whole tiles, so no compiler can widen or pad it.

    # R replicas  S replicas of this mesh slot  C wire elements of a replica on one device
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from maxdiloco.diloco import outer
from maxdiloco.exchange import owners
from maxdiloco.exchange.payload import (
    Note,
    Payload,
    assemble,
    bad_flags,
    decode,
    encode,
    flags,
    left_over,
    spread_norms,
    tensor_norms,
)
from maxdiloco.parallel.mesh import devices_of_slice, in_slice_axes

LARGEST_INDEX = 2**31 - 1  # JAX indexes with 32 bits
LANES = 128  # of a TPU's tile; a chunk is whole tiles of eight such rows


class Sizes(NamedTuple):
    """Of the outer gradients of one exchange, as decoded: L2 norms, and mean |theta - x_m|."""

    norm_R: jax.Array
    drift_R: jax.Array
    mean_norm: jax.Array


class Received(NamedTuple):
    """What a fragment's exchange brought.

    mean: leaves [...] for all replicas, or [R, ...] when each has its own (eager). bad_RF: whether
    a replica's leaf was not finite; own_bad_RF: of the fresh values; () of others.
    """

    mean: list[jax.Array]
    bad_RF: jax.Array
    sizes: Sizes
    own_bad_RF: jax.Array | tuple[()] = ()


class Sent(NamedTuple):
    """What a send makes of a fragment's outer gradients.

    chunks: laid out by `outgoing_spec`. residual: leaves [R, ...], what is left over, and norm_R
    [R], its L2 norm; () without error feedback.
    """

    chunks: tuple[jax.Array, ...]
    residual: Sequence[jax.Array] = ()
    norm_R: jax.Array | tuple[()] = ()


def outgoing_spec(mesh: Mesh) -> P:
    """Of a chunk before it is sent: rank 1, a part on every device."""
    return P(("diloco", *in_slice_axes(mesh)))


def incoming_spec(mesh: Mesh) -> P:
    """Of a chunk that has arrived: every slice holds those of all replicas."""
    axes = in_slice_axes(mesh)
    return P(axes) if axes else P()


def _on_every_device(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def send(
    payload: Payload,
    leaves_R: Sequence[jax.Array],
    lengths: Sequence[int],
    residual_R: Sequence[jax.Array] = (),
) -> Sent:
    """Encode a fragment's outer gradients and cut them into chunks: Algorithm 2, line 8.

    leaves_R: [R, ...] float32 each. residual_R: likewise, of error feedback; () without. lengths:
    of the arrays to send [wire elements per replica and device, and slot that owns a part]; what is
    beyond the payload's size is zeros. No traffic over `diloco`, and none at all without error
    feedback.
    """
    mesh, specs = payload.mesh, [P("diloco", *shard.spec) for shard in payload.shards]
    ends = list(itertools.accumulate(lengths))

    def on_device(g_S, residual_S):
        wanted_S = outer.fed_back(g_S, residual_S) if residual_S else g_S
        if payload.owned:
            codes_SDC, *arrived = owners.encode(payload, wanted_S)
        else:
            codes_SDC = encode(payload, wanted_S)[:, None]  # the same for every slot
            of_codes = jax.vmap(lambda codes: (decode(payload, codes), flags(payload, codes)))
            arrived = of_codes(codes_SDC[:, 0]) if residual_S else ()
        beyond = (0, ends[-1] - payload.first_size)
        padded_DSC = jnp.pad(codes_SDC, ((0, 0), (0, 0), beyond)).swapaxes(0, 1)
        chunks = tuple(
            padded_DSC[..., end - length : end].reshape(-1)
            for end, length in zip(ends, lengths, strict=True)
        )
        if not residual_S:
            return Sent(chunks)
        left_S, squares_S = left_over(payload, *arrived, wanted_S, residual_S)
        return Sent(chunks, left_S, jnp.sqrt(jax.lax.psum(squares_S, in_slice_axes(mesh))))

    kept = specs if residual_R else []
    sent = Sent((outgoing_spec(mesh),) * len(lengths), *([kept, P("diloco")] if kept else ()))
    program = _on_every_device(on_device, mesh, (specs, kept), sent)
    return program(list(leaves_R), list(residual_R))


def all_gather_chunk(chunk: jax.Array, mesh: Mesh) -> jax.Array:
    """Bring one chunk of every replica to every slice: Algorithm 2, line 8, over the link."""

    def on_device(codes):
        dtype = codes.dtype
        if dtype == jnp.bfloat16:
            # As integers: CPU widens collectives of bfloat16 to float32.
            codes = jax.lax.bitcast_convert_type(codes, jnp.uint16)
        gathered = jax.lax.all_gather(codes, "diloco", tiled=True)  # the only line where they talk
        return jax.lax.bitcast_convert_type(gathered, dtype)

    return _on_every_device(on_device, mesh, outgoing_spec(mesh), incoming_spec(mesh))(chunk)


def all_to_all_chunk(chunk: jax.Array, mesh: Mesh) -> jax.Array:
    """Bring one chunk's part for each slot there, of all replicas: Algorithm 2, line 8."""

    def on_device(codes):
        # XLA:TPU pads a rank-1 payload of bytes x2 to x4, and rows of whole tiles not at all.
        parts = codes.reshape(mesh.shape["diloco"], -1, LANES)
        return jax.lax.all_to_all(parts, "diloco", 0, 0, tiled=True).reshape(-1)

    return _on_every_device(on_device, mesh, outgoing_spec(mesh), outgoing_spec(mesh))(chunk)


def reduce(
    payload: Payload, parts: Sequence[jax.Array], lengths: Sequence[int], *, num_replicas: int
) -> tuple[jax.Array, ...]:
    """The chunks that owners share of a fragment: the mean of line 8, in float32, encoded again.

    parts: the chunks of `all_to_all_chunk`. lengths: of the chunks [wire elements per device]. No
    traffic.
    """
    spec, ends = outgoing_spec(payload.mesh), list(itertools.accumulate(lengths))

    def on_device(chunks):
        row = functools.partial(_row, chunks, num_replicas, payload.first_size)
        shared = jnp.pad(owners.reduce(payload, row, num_replicas), (0, ends[-1] - payload.size))
        pairs = zip(ends, lengths, strict=True)
        return tuple(shared[end - length : end] for end, length in pairs)

    in_specs, out_specs = ([spec] * len(parts),), (spec,) * len(lengths)
    return _on_every_device(on_device, payload.mesh, in_specs, out_specs)(list(parts))


def receive(
    payload: Payload,
    incoming: Sequence[jax.Array],
    own: Sequence[jax.Array] = (),
    before: Sequence[jax.Array] = (),
    *,
    num_replicas: int,
    kinds: Sequence[Any] | None = None,
) -> Received:
    """The mean of all replicas' outer gradients of a fragment: Algorithm 2, line 10.

    The mean of line 8 is taken here, on arrival, in float32 and replica order. incoming: the
    fragment's chunks, laid out by `incoming_spec`; from owners they are of the mean. kinds: of its
    leaves (fragments.kinds_of), for outer.radial_directional_mean; None: the plain mean, of which
    the sizes are. own: for eager updates (arXiv 2502.12996, Algorithm 3; see outer.own_fresh) the
    chunks of this round, laid out by `outgoing_spec`: each replica's mean is of its fresh and the
    others' previous outer gradients, of `incoming`, which the sizes are of. before: with owners,
    those of the previous round, whose terms are in `incoming`.
    """
    mesh = payload.mesh
    num_here = num_replicas // mesh.shape["diloco"]

    def on_device(chunks, own, _):
        fresh = []
        if own:
            first = jax.lax.axis_index("diloco") * num_here
            fresh = [_decoded(payload, own, num_here, s) for s in range(num_here)]

        def term(r):
            old, note = _decoded(payload, chunks, num_replicas, r)
            mixed = [outer.own_fresh(old, new, r, first + s) for s, (new, _) in enumerate(fresh)]
            return (old, mixed), note

        (mean_N, mixed), notes_R = outer.ordered_mean(term, num_replicas)
        received = _received(payload, notes_R, mean_N)
        if own:
            mean = [
                assemble(shard, jnp.stack(x_S))
                for shard, *x_S in zip(payload.shards, *mixed, strict=True)
            ]
            own_SF = jnp.stack([note.bad_F for _, note in fresh])
            return received._replace(mean=mean, own_bad_RF=bad_flags(payload, own_SF))
        if kinds is not None:
            mean_N = outer.radial_directional_mean(
                lambda r: term(r)[0][0],
                mean_N,
                num_replicas,
                norm=functools.partial(tensor_norms, payload, kinds),
                spread=functools.partial(spread_norms, payload, kinds),
            )
        return _with_mean(payload, received, mean_N)

    specs = incoming_spec(mesh), outgoing_spec(mesh), outgoing_spec(mesh)
    given = list(incoming), list(own), list(before)
    in_specs = tuple([spec] * len(chunks) for spec, chunks in zip(specs, given, strict=True))
    lead = ("diloco",) if own else ()
    mean_specs = [P(*lead, *shard.spec) for shard in payload.shards]
    out_specs = Received(mean_specs, P(), P(), P("diloco") if own else ())
    program = functools.partial(_of_owners, payload, num_replicas) if payload.owned else on_device
    return _on_every_device(program, mesh, in_specs, out_specs)(*given)


def _of_owners(payload: Payload, num_replicas: int, chunks, own, before) -> Received:
    """On a device: what owners have reduced; eager: with each replica's own terms renewed."""
    slots, here = payload.mesh.shape["diloco"], payload.owned.replicas
    shared = [_row(chunks, slots, payload.size, slot) for slot in range(slots)]
    mean_N, notes_R = owners.receive(payload, jnp.stack(shared))
    received = _received(payload, notes_R, mean_N)
    if not own:
        return _with_mean(payload, received, mean_N)

    def sent(parts):
        rows = [_row(parts, slots * here, payload.first_size, r) for r in range(slots * here)]
        return owners.sent(payload, jnp.stack(rows).reshape(slots, here, -1).swapaxes(0, 1))

    (stale_SN, _), (fresh_SN, bad_SF) = sent(before), sent(own)
    mean_SN = outer.own_renewed(mean_N, stale_SN, fresh_SN, num_replicas)
    mean = [assemble(*each) for each in zip(payload.shards, mean_SN, strict=True)]
    return received._replace(mean=mean, own_bad_RF=bad_flags(payload, bad_SF))


def _row(chunks: Sequence[jax.Array], rows: int, size: int, r: Any) -> jax.Array:
    """Row r, `size` wire elements, of the chunks [rows * chunk] of one device."""
    pieces = []
    for chunk in chunks:
        length = chunk.shape[0] // rows
        if chunk.shape[0] <= LARGEST_INDEX:
            pieces.append(jax.lax.dynamic_slice_in_dim(chunk, r * length, length))
        else:  # slower, but r fits an index
            pieces.append(jax.lax.dynamic_index_in_dim(chunk.reshape(rows, length), r, 0, False))
    return jax.lax.slice_in_dim(jnp.concatenate(pieces), 0, size)


def _decoded(payload: Payload, chunks, rows: int, r) -> tuple[list[jax.Array], Note]:
    """The values of row r of the chunks of one device, and a note about them."""
    code_C = _row(chunks, rows, payload.size, r)
    x_N = decode(payload, code_C)
    return x_N, Note.of(x_N, flags(payload, code_C))


def _received(payload: Payload, notes_R: Note, mean_N: list[jax.Array]) -> Received:
    """Without its mean. mean_N: this device's values of the mean of one round."""
    sums = (notes_R.squares, notes_R.magnitudes, sum(jnp.sum(x * x) for x in mean_N))
    squares_R, total_R, mean_squares = jax.lax.psum(sums, in_slice_axes(payload.mesh))
    devices, shards = devices_of_slice(payload.mesh), payload.shards
    values = sum(math.prod(shard.local) * (devices // shard.copies) for shard in shards)
    drift_R = total_R / float(values)  # may exceed what int32 holds
    sizes = Sizes(jnp.sqrt(squares_R), drift_R, jnp.sqrt(mean_squares))
    return Received([], bad_flags(payload, notes_R.bad_F), sizes)


def _with_mean(payload: Payload, received: Received, mean_N: list[jax.Array]) -> Received:
    """With a mean that is the same for all replicas."""
    pairs = zip(payload.shards, mean_N, strict=True)
    return received._replace(mean=[assemble(shard, x_N[None])[0] for shard, x_N in pairs])
