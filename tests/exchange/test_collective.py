"""The exchange: what a payload holds, that its bytes leave a slice once, and the mean it brings."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of
from tiers import full

from maxdiloco.diloco import quantize
from maxdiloco.exchange import collective, payload

# one sharded over fsdp, one replicated in the slice, one of a size that they do not divide
SHAPES = [(4, 6), (5,), (3, 3)]
SPECS = [P("fsdp", None), P(), P()]


def on_mesh(mesh, arrays):
    """Leaves [R, ...] as the specs have them."""
    return [
        jax.device_put(x, NamedSharding(mesh, P("diloco", *spec)))
        for x, spec in zip(arrays, SPECS, strict=True)
    ]


def leaves(M):
    numbers = np.random.default_rng(0)
    return [numbers.normal(size=(M, *shape)).astype(np.float32) for shape in SHAPES]


def exchange(mesh, wire, arrays, *, num_chunks=1):
    fragment = payload.for_leaves(SHAPES, SPECS, wire=wire, mesh=mesh)
    chunk = payload.pad_to_tile(-(-fragment.size // num_chunks))

    def run(*leaves_R):
        sent = collective.send(fragment, leaves_R, (chunk,) * num_chunks)
        arrived = [collective.all_gather_chunk(c, mesh) for c in sent.chunks]
        return collective.receive(fragment, arrived, num_replicas=len(arrays[0]))

    return jax.jit(run)(*on_mesh(mesh, arrays))


def ordered_mean(terms):
    return (((terms[0] + terms[1]) + terms[2]) + terms[3]) * np.float32(0.25)


@pytest.mark.parametrize(
    "sizes", [{}, dict(diloco=2, data=2, fsdp=2), dict(diloco=4, fsdp=2), dict(diloco=2, fsdp=4)]
)
def test_float32_mean_is_the_ordered_mean(devices, sizes):
    """Whatever the mesh, the mean is x[0] + x[1] + ... in float32, to the bit."""
    arrays = leaves(M=4)
    received = exchange(mesh_of(devices, **sizes), "float32", arrays)
    for x, mean in zip(arrays, received.mean, strict=True):
        np.testing.assert_array_equal(np.asarray(mean), ordered_mean(x))
    flat = np.concatenate([x.reshape(4, -1) for x in arrays], axis=1).astype(np.float64)
    found = received.sizes
    np.testing.assert_allclose(found.norm_R, np.linalg.norm(flat, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.drift_R, np.abs(flat).mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.mean_norm, np.linalg.norm(flat.mean(0)), rtol=1e-5)


@pytest.mark.parametrize("wire", quantize.NAMES)
def test_bits_do_not_depend_on_slots_or_chunks(devices, wire):
    """The same in-slice sharding: 1, 2 and 4 slots, whole or in 3 chunks, give the same bits."""
    whole, *others = (
        exchange(mesh_of(devices, diloco=slots, fsdp=2), wire, leaves(M=4), num_chunks=num_chunks)
        for slots, num_chunks in ((1, 1), (2, 1), (4, 3))
    )
    for other in others:
        for x, y in zip(other.mean, whole.mean, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sizes", [full({}), dict(diloco=2, data=2, fsdp=2)])
def test_a_bad_value_is_flagged_by_replica_and_leaf(devices, sizes, bad):
    """Positive control: without it no flag is up."""
    mesh, arrays = mesh_of(devices, **sizes), leaves(M=2)
    assert not np.asarray(exchange(mesh, "float4_e3m0", arrays).bad_RF).any()
    arrays[2][1, 2, 2] = bad
    flags = np.asarray(exchange(mesh, "float4_e3m0", arrays).bad_RF)
    np.testing.assert_array_equal(flags, [[False, False, False], [False, False, True]])


def test_eager_mean_has_the_own_value_fresh(devices):
    """arXiv 2502.12996 Algorithm 3: (own(t) + sum over others(t-H)) / M, each replica its own."""
    mesh = mesh_of(devices, diloco=2, fsdp=2)
    old = leaves(M=4)
    new = [x * 3 for x in old]
    fragment = payload.for_leaves(SHAPES, SPECS, wire="float32", mesh=mesh)
    size = payload.pad_to_tile(fragment.size)

    def run(old, new):
        sent, own = (collective.send(fragment, x, (size,)).chunks for x in (old, new))
        arrived = [collective.all_gather_chunk(chunk, mesh) for chunk in sent]
        return collective.receive_with_own(fragment, arrived, own, num_replicas=4)

    received, own_bad = jax.jit(run)(on_mesh(mesh, old), on_mesh(mesh, new))
    assert not np.asarray(own_bad).any()
    for before, fresh, mean_R in zip(old, new, received.mean, strict=True):
        for m in range(4):
            expected = ordered_mean([fresh[r] if r == m else before[r] for r in range(4)])
            np.testing.assert_array_equal(np.asarray(mean_R)[m], expected)


def test_each_value_is_carried_by_one_device_of_a_slice(devices):
    """Of a leaf that 4 devices hold alike each carries a part: 3 of 9 values, not all 9."""
    mesh = mesh_of(devices, diloco=2, data=2, fsdp=2)
    fragment = payload.for_leaves(SHAPES, SPECS, wire="float32", mesh=mesh)
    assert [shard.copies for shard in fragment.shards] == [2, 4, 4]
    assert [shard.count for shard in fragment.shards] == [6, 2, 3]  # 24/2/2, 5/4 and 9/4 rounded up
    assert fragment.size == 3 + 6 + 2 + 3  # the flags first
