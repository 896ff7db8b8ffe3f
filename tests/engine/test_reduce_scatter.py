"""Reduce-scatter: the mean to the bit, whatever the slices, its flags and sizes.

# R replicas
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of
from tiers import corner, full
from wire_codecs import CODECS

from maxdiloco.diloco import quantize
from maxdiloco.engine import collective, payload, reduce_scatter

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

# Sharded over fsdp or alike on all devices of a slice; whole blocks, a short one, a value alone.
LEAVES = {
    "fsdp": ((4, 300), P(None, "fsdp")),
    "alike": ((515,), P()),
    "blocks": ((2, 512), P("fsdp", None)),
    "one": ((), P()),
}
WIRES = [name for name in quantize.NAMES if name != "topk"]


def values(M, seed=0):
    numbers = np.random.default_rng(seed)
    return [numbers.normal(size=(M, *shape)).astype(np.float32) for shape, _ in LEAVES.values()]


@functools.cache
def program(mesh, wire, M, *, reduced, num_chunks, gathers):
    """Leaves [R, ...] -> what arrives of owners, and what everyone would have gathered."""
    whole = payload.for_leaves(
        *zip(*LEAVES.values(), strict=True), wire=wire, mesh=mesh, num_replicas=M
    )
    fragment = reduce_scatter.cut_payload(whole, mean_dtype=reduced)

    def cut(size):
        return payload.Cut(num_chunks, payload.pad_to_tile(-(-size // num_chunks)))

    @jax.jit
    def run(leaves_R):
        sent = collective.send(fragment, leaves_R, cut(fragment.sent_size)).chunks
        parts = [collective.all_to_all_chunk(chunk, mesh) for chunk in sent]
        shared = collective.reduce(fragment, parts, cut(fragment.size))
        arrived = [collective.all_gather_chunk(chunk, mesh) for chunk in shared]
        gathered = collective.send(whole, leaves_R, cut(whole.size)).chunks
        gathered = [collective.all_gather_chunk(chunk, mesh) for chunk in gathered]
        each = ((fragment, arrived), (whole, gathered))[: 1 + gathers]
        return [collective.receive(which, chunks) for which, chunks in each]

    return run


def exchange(mesh, wire, arrays, *, reduced="int8", num_chunks=1, gathers=True):
    """What arrives of owners and, where it `gathers`, what everyone would have gathered."""
    options = dict(reduced=reduced, num_chunks=num_chunks, gathers=gathers)
    return program(mesh, wire, len(arrays[0]), **options)([
        jax.device_put(x, NamedSharding(mesh, P("diloco", *spec)))
        for x, (_, spec) in zip(arrays, LEAVES.values(), strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("wire", "M"),
    corner(
        itertools.product(WIRES, [2, 3, 4, 8]),
        [("bfloat16", 2), ("int2", 3), ("float4_e3m0", 4)],
    ),
)
def test_the_mean_is_the_ordered_one_encoded_again(devices, wire, M):
    """On M slots of one device, to the bit, by the codecs of the table: what each replica sends,
    its float32 mean in replica order, and that in int8 or the finer wire of the replicas."""
    arrays = values(M)
    (found,) = exchange(mesh_of(devices, diloco=M), wire, arrays, gathers=False)
    again = CODECS[quantize.finer(wire, "int8")]
    for x_R, mean in zip(arrays, found.mean, strict=True):
        sent_R = [np.float32(CODECS[wire](x.reshape(-1))) for x in x_R]
        total = sent_R[0]
        for sent in sent_R[1:]:
            total = total + sent
        wanted = np.float32(again(total * np.float32(1 / M)))
        np.testing.assert_array_equal(np.asarray(mean).reshape(-1), wanted)


@pytest.mark.parametrize(
    ("wire", "slots", "chunks"),
    corner(
        [(wire, *cut) for wire in WIRES for cut in ((2, 1), (2, 3), (4, 3))],
        [("float4_e3m0", 2, 3)],
    ),
)
def test_bits_do_not_depend_on_slots_or_chunks_and_sizes_are_those_of_gathering(
    devices, wire, slots, chunks
):
    """Four replicas on one slot, and on 2 or 4, whole or in 3 chunks. Norms and magnitudes of the
    replicas are what gathering has, to the bit; the mean's is of what was encoded again."""
    (whole,) = exchange(mesh_of(devices, fsdp=2), wire, values(4), gathers=False)
    mesh = mesh_of(devices, diloco=slots, fsdp=2)
    found, gathered = exchange(mesh, wire, values(4), num_chunks=chunks)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(found.sizes.norm_R, gathered.sizes.norm_R)
    np.testing.assert_array_equal(found.sizes.drift_R, gathered.sizes.drift_R)
    squares = sum(np.sum(np.float64(x) ** 2) for x in whole.mean)
    np.testing.assert_allclose(whole.sizes.mean_norm, np.sqrt(squares), rtol=1e-5)
    same = [np.array_equal(x, y) for x, y in zip(found.mean, gathered.mean, strict=True)]
    assert all(same) == (wire == "float32") and (wire == "float32" or not any(same[:3]))


def test_a_narrower_wire_for_the_means_is_a_parameter(devices):
    """float4_e3m0 both ways: the mean of one replica alone is what it has sent."""
    found, gathered = exchange(mesh_of(devices), "float4_e3m0", values(1), reduced="float4_e3m0")
    assert quantize.finer("float4_e3m0", "float4_e3m0") == "float4_e3m0"
    for x, y in zip(found.mean, gathered.mean, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("bad", [np.nan, full(-np.inf)])
def test_a_bad_value_is_flagged_by_replica_and_leaf(devices, bad):
    """Its part has one owner; the flag is everywhere. Control: without it no flag is up."""
    mesh, arrays = mesh_of(devices, diloco=2, fsdp=2), values(4)
    assert not np.asarray(exchange(mesh, "float4_e3m0", arrays)[0].bad_RF).any()
    arrays[2][3, 1, 511] = bad
    found, gathered = exchange(mesh, "float4_e3m0", arrays)
    np.testing.assert_array_equal(found.bad_RF, gathered.bad_RF)
    assert np.argwhere(np.asarray(found.bad_RF)).tolist() == [[3, 2]]
