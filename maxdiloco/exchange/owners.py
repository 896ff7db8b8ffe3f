"""Parts of a payload and the mesh slots that own them, so that the traffic does not grow with M.

What a device carries of a fragment is cut into as many parts as the mesh axis `diloco` has slots.
Slot j owns part j of every replica: they send it there (scatter), the owner decodes, takes the
ordered mean and encodes it again (reduce), and sends that to all (share). Everyone goes on from
these codes, the owner too: with its own finer sum theta would differ between slots.

A part is whole blocks of 256 values. A leaf begins with a block, and zeros fill up its last one; so
the same values share a block whatever the number of slots, and no bit of a mean depends on that.
A note about the replica goes before its codes: a flag for each leaf, as in payload.py, the sums of
the squares and of the magnitudes of its decoded values. All of it is unsigned integers, and an
all-zero part stands for finite zeros.

    # S replicas of this mesh slot  D slots  N values a device carries of a leaf  F leaves
    # V values of a part  B blocks of a part  K wire elements of a part  H of a note
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxdiloco.diloco import outer, quantize
from maxdiloco.diloco.codecs import BLOCK
from maxdiloco.exchange.payload import Note, Owned, Payload, cleaned, first_carried, real_values

# Wire of the means, unless the replicas' is finer. To encode again adds an error of 0.7 % of their
# norm; 4 bits would add 19 % (quantize.FORMATS). Our choice.
REDUCED = "int8"


def cut(payload: Payload, *, reduced: str, replicas: int) -> Payload:
    """The payload in parts that slots own. reduced: wire of the means; replicas: of a slot."""
    blocks = sum(quantize.ceil_div(shard.count, BLOCK) for shard in payload.shards)
    values = quantize.ceil_div(blocks, payload.mesh.shape["diloco"]) * BLOCK
    owned = Owned(reduced, replicas, values, 0)
    payload = payload._replace(owned=owned)
    sent = _note_size(payload, payload.first_dtype) + quantize.encoded_size(payload.wire, values)
    notes = replicas * _note_size(payload, payload.dtype)
    size = notes + quantize.encoded_size(reduced, values)
    return payload._replace(size=size, owned=owned._replace(size=sent))


def encode(
    payload: Payload, leaves_S: Sequence[jax.Array]
) -> tuple[jax.Array, list[jax.Array], jax.Array]:
    """A device's shards of the fragment, [S, *local] float32 each, as parts [S, D, K].

    And what a receiver decodes of them, [S, N] for each leaf, with the flags [S, F].
    """
    wire, dtype = payload.wire, payload.first_dtype
    bad_SF, clean_SN = cleaned(payload, leaves_S)
    of_parts = jax.vmap(lambda x_V, count_B: quantize.encode(wire, x_V, count_B))
    count_DB = jnp.asarray(_counts(payload))
    codes_SDK = jax.vmap(of_parts, in_axes=(0, None))(_parts(payload, clean_SN), count_DB)
    sent_SN = _decoded(payload, codes_SDK)
    note_SH = jax.vmap(lambda x_N, bad_F: _written(Note.of(x_N, bad_F), dtype))(sent_SN, bad_SF)
    notes_SDH = jnp.broadcast_to(note_SH[:, None], (*codes_SDK.shape[:2], note_SH.shape[1]))
    return jnp.concatenate([notes_SDH, _words(codes_SDK, dtype)], axis=2), sent_SN, bad_SF != 0


def sent(payload: Payload, parts_SDK: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """What receivers decode of the parts of `encode`, [S, N] for each leaf; the flags [S, F]."""
    size, wire = _note_size(payload, payload.first_dtype), quantize.wire_format(payload.wire)
    codes_SDK = jax.lax.bitcast_convert_type(parts_SDK[..., size:], wire.dtype)
    return _decoded(payload, codes_SDK), parts_SDK[:, 0, : len(payload.shards)] != 0


def reduce(payload: Payload, row: Callable[[Any], jax.Array], num_replicas: int) -> jax.Array:
    """What the owner shares of its part, [K]: the ordered mean, encoded, and its replicas' notes.

    row(r): what replica r has sent of it, [K]; r may be traced.
    """
    owned, wire = payload.owned, quantize.wire_format(payload.wire)
    mine, size = jax.lax.axis_index("diloco"), _note_size(payload, payload.first_dtype)
    place_V = mine * owned.values + jnp.arange(owned.values)

    def term(r):
        code_K = jax.lax.bitcast_convert_type(row(r)[size:], wire.dtype)
        x_V = quantize.decode(wire.name, code_K, owned.values)
        if wire.counts:  # it has no code for the zeros that fill up a block
            x_V = jnp.where(_is_real(payload, place_V), x_V, 0.0)
        return x_V, ()

    mean_V, _ = outer.ordered_mean(term, num_replicas)
    rows = [row(mine * owned.replicas + s) for s in range(owned.replicas)]
    notes = [_written(_read(payload, row_K[:size]), payload.dtype) for row_K in rows]
    return jnp.concatenate([*notes, _words(quantize.encode(owned.reduced, mean_V), payload.dtype)])


def receive(payload: Payload, shared_DK: jax.Array) -> tuple[list[jax.Array], Note]:
    """The mean of what the owners have shared, [N] for each leaf, and the notes of all replicas."""
    owned, size = payload.owned, _note_size(payload, payload.dtype)
    notes_RH = shared_DK[:, : owned.replicas * size].reshape(-1, size)
    notes_R = jax.vmap(lambda words_H: _read(payload, words_H))(notes_RH)
    dtype = quantize.wire_format(owned.reduced).dtype
    codes_DK = jax.lax.bitcast_convert_type(shared_DK[:, owned.replicas * size :], dtype)
    decode = jax.vmap(lambda code: quantize.decode(owned.reduced, code, owned.values))
    return [x[0] for x in _leaves(payload, decode(codes_DK)[None])], notes_R


# -- between leaves and parts ----------------------------------------------------------------------


def _made(payload: Payload, x: jax.Array) -> jax.Array:
    """x; on a CPU made before it is cut: XLA:CPU would compute each value anew for each use."""
    is_cpu = payload.mesh.devices.flat[0].platform == "cpu"
    return jax.lax.optimization_barrier(x) if is_cpu else x


def _padded(count: int) -> int:
    return quantize.ceil_div(count, BLOCK) * BLOCK


def _parts(payload: Payload, x_SN: Sequence[jax.Array]) -> jax.Array:
    """[S, N] of each leaf as [S, D, V]."""
    whole = [jnp.pad(x, ((0, 0), (0, _padded(x.shape[1]) - x.shape[1]))) for x in x_SN]
    flat, slots = jnp.concatenate(whole, axis=1), payload.mesh.shape["diloco"]
    missing = slots * payload.owned.values - flat.shape[1]
    return _made(payload, jnp.pad(flat, ((0, 0), (0, missing)))).reshape(len(flat), slots, -1)


def _leaves(payload: Payload, x_SDV: jax.Array) -> list[jax.Array]:
    """[S, D, V] as [S, N] of each leaf."""
    flat, start, out = _made(payload, x_SDV.reshape(len(x_SDV), -1)), 0, []
    for shard in payload.shards:
        x_SN = jax.lax.slice_in_dim(flat, start, start + shard.count, axis=1)
        out.append(jax.vmap(lambda x_N, shard=shard: real_values(shard, x_N))(x_SN))
        start += _padded(shard.count)
    return out


def _decoded(payload: Payload, codes_SDK: jax.Array) -> list[jax.Array]:
    """Codes of parts as [S, N] of each leaf."""
    decode = jax.vmap(lambda code: quantize.decode(payload.wire, code, payload.owned.values))
    return _leaves(payload, jax.vmap(decode)(codes_SDK))


def _counts(payload: Payload) -> np.ndarray:
    """Values of each block, [D, B]; of those that are left over 1."""
    counts = [
        np.minimum(shard.count - np.arange(0, shard.count, BLOCK), BLOCK)
        for shard in payload.shards
    ]
    flat, slots = np.concatenate(counts), payload.mesh.shape["diloco"]
    spare = slots * payload.owned.values // BLOCK - len(flat)
    return np.pad(flat, (0, spare), constant_values=1).reshape(slots, -1).astype(np.int32)


def _is_real(payload: Payload, place_V: jax.Array) -> jax.Array:
    """Whether a value of a leaf is at these places of [D, V]."""
    start, real_V = 0, jnp.zeros(place_V.shape, bool)
    for shard in payload.shards:
        end = start + jnp.minimum(shard.count, math.prod(shard.local) - first_carried(shard))
        real_V |= (place_V >= start) & (place_V < end)
        start += _padded(shard.count)
    return real_V


# -- notes -----------------------------------------------------------------------------------------


def _words(codes: jax.Array, dtype: np.dtype) -> jax.Array:
    """Codes as unsigned integers: CPU widens collectives of bfloat16."""
    return jax.lax.bitcast_convert_type(codes, dtype)


def _note_size(payload: Payload, dtype: np.dtype) -> int:
    """Elements of a note: a flag a leaf, and two sums in float32."""
    return len(payload.shards) + 2 * 4 // dtype.itemsize


def _written(note: Note, dtype: np.dtype) -> jax.Array:
    """[H] of a replica's note."""
    sums = jnp.stack([note.squares, note.magnitudes])
    words = jax.lax.bitcast_convert_type(sums, dtype).reshape(-1)
    return jnp.concatenate([note.bad_F.astype(dtype), words])


def _read(payload: Payload, words_H: jax.Array) -> Note:
    leaves, itemsize = len(payload.shards), words_H.dtype.itemsize
    words = words_H[leaves:].reshape((2, 4 // itemsize) if itemsize < 4 else (2,))
    squares, magnitudes = jax.lax.bitcast_convert_type(words, jnp.float32)
    return Note(words_H[:leaves] != 0, squares, magnitudes)
