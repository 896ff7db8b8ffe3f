"""The exchange: what a payload holds, that its bytes leave a slice once, and the mean it brings;
the radial-directional mean and error feedback where the devices of a slice divide the leaves.

    # R replicas
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of
from tiers import corner, full

from maxdiloco.diloco import quantize
from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.engine import collective, payload

# One sharded over fsdp, one replicated in the slice, one of a size that they do not divide.
PLAIN = {"fsdp": ((4, 6), P("fsdp", None), None), "alike": ((5,), P(), None)}
PLAIN |= {"odd": ((3, 3), P(), None)}
# Layers along a dim that is divided or not; one tensor, divided or not, of odd sizes; a table.
DIVIDED = {
    "layers": ((4, 8), P(None, "fsdp"), Stacked(0, (0, 1, 2, 3))),
    "divided layers": ((3, 4), P(None, "fsdp"), Stacked(1, (0, 1, 2, 3))),
    "whole": ((3, 3), P(), None),
    "divided": ((4, 5), P("fsdp", None), None),
    "table": ((4, 3), P("fsdp", None), Vocabulary(0)),
}


def values(leaves, M=4, seed=0):
    numbers = np.random.default_rng(seed)
    return [numbers.normal(size=(M, *s)).astype(np.float32) for s, _, _ in leaves.values()]


def on_mesh(mesh, leaves, arrays):
    """Arrays [R, ...] as the specs have them."""
    return arrays and [
        jax.device_put(x, NamedSharding(mesh, P("diloco", *spec)))
        for x, (_, spec, _) in zip(arrays, leaves.values(), strict=True)
    ]


def exchange(
    mesh, wire, arrays, *, leaves=PLAIN, num_chunks=1, leaf_axes=None, residual=(), fresh=()
):
    """What is sent and what is received. fresh: of eager updates, what each replica has by then."""
    shapes, specs, _ = zip(*leaves.values(), strict=True)
    fragment = payload.for_leaves(shapes, specs, wire=wire, mesh=mesh, num_replicas=len(arrays[0]))
    cut = payload.Cut(num_chunks, payload.pad_to_tile(-(-fragment.size // num_chunks)))

    @jax.jit
    def run(arrays, residual, fresh):
        sent = collective.send(fragment, arrays, cut, residual)
        arrived = [collective.all_gather_chunk(chunk, mesh) for chunk in sent.chunks]
        if not fresh:
            return sent, collective.receive(fragment, arrived, leaf_axes=leaf_axes)
        own = collective.send(fragment, fresh, cut).chunks
        return sent, collective.receive_eager(fragment, arrived, own)

    return run(*(on_mesh(mesh, leaves, tree) for tree in (arrays, residual, fresh)))


def ordered_mean(terms):
    return (((terms[0] + terms[1]) + terms[2]) + terms[3]) * np.float32(0.25)


@pytest.mark.parametrize(
    "sizes", [{}, dict(diloco=2, data=2, fsdp=2), dict(diloco=4, fsdp=2), dict(diloco=2, fsdp=4)]
)
def test_float32_mean_is_the_ordered_mean(devices, sizes):
    """Whatever the mesh, the mean is x[0] + x[1] + ... in float32, to the bit."""
    arrays = values(PLAIN)
    _, found = exchange(mesh_of(devices, **sizes), "float32", arrays)
    for x, mean in zip(arrays, found.mean, strict=True):
        np.testing.assert_array_equal(np.asarray(mean), ordered_mean(x))
    flat = np.concatenate([x.reshape(4, -1) for x in arrays], axis=1).astype(np.float64)
    np.testing.assert_allclose(found.sizes.norm_R, np.linalg.norm(flat, axis=1), rtol=1e-5)
    np.testing.assert_allclose(found.sizes.drift_R, np.abs(flat).mean(1), rtol=1e-5)
    np.testing.assert_allclose(found.sizes.mean_norm, np.linalg.norm(flat.mean(0)), rtol=1e-5)


@pytest.mark.parametrize("wire", corner(quantize.NAMES, ["float4_e3m0", "topk"]))
def test_bits_do_not_depend_on_slots_or_chunks(devices, wire):
    """The same in-slice sharding: 1, 2 and 4 slots, whole or in 3 chunks, give the same bits."""
    whole, *others = (
        exchange(mesh_of(devices, diloco=slots, fsdp=2), wire, values(PLAIN), num_chunks=chunks)[1]
        for slots, chunks in ((1, 1), (2, 1), (4, 3))
    )
    for other in others:
        for x, y in zip(other.mean, whole.mean, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("bad", [np.nan, full(np.inf), full(-np.inf)])
@pytest.mark.parametrize("sizes", [full({}), dict(diloco=2, data=2, fsdp=2)])
def test_a_bad_value_is_flagged_by_replica_and_leaf(devices, sizes, bad):
    """Positive control: without it no flag is up."""
    mesh, arrays = mesh_of(devices, **sizes), values(PLAIN, M=2)
    assert not np.asarray(exchange(mesh, "float4_e3m0", arrays)[1].bad_RF).any()
    arrays[2][1, 2, 2] = bad
    flags = np.asarray(exchange(mesh, "float4_e3m0", arrays)[1].bad_RF)
    np.testing.assert_array_equal(flags, [[False, False, False], [False, False, True]])


def test_eager_mean_has_the_own_value_fresh(devices):
    """arXiv 2502.12996 Algorithm 3: (own(t) + sum over others(t-H)) / M, each replica its own."""
    old = values(PLAIN)
    new = [x * 3 for x in old]
    _, found = exchange(mesh_of(devices, diloco=2, fsdp=2), "float32", old, fresh=new)
    assert not np.asarray(found.own_bad_RF).any()
    for before, fresh, mean_R in zip(old, new, found.mean, strict=True):
        for m in range(4):
            expected = ordered_mean([fresh[r] if r == m else before[r] for r in range(4)])
            np.testing.assert_array_equal(np.asarray(mean_R)[m], expected)


def radial_directional_mean_of(x_R, kind):
    """mean(|v|) * u / |u|, u = mean(v / |v|), of each tensor in float64; the mean of a table."""
    x_R = x_R.astype(np.float64)
    if isinstance(kind, Vocabulary):
        return x_R.mean(0)
    if kind is not None:
        layers = np.moveaxis(x_R, 1 + kind.axis, 0)
        return np.moveaxis(
            np.stack([radial_directional_mean_of(layer_R, None) for layer_R in layers]),
            0,
            kind.axis,
        )
    norms = [np.linalg.norm(x) for x in x_R]
    u = np.mean([x / norm for x, norm in zip(x_R, norms, strict=True)], axis=0)
    return np.mean(norms) * u / np.linalg.norm(u)


of_divided_leaves = pytest.mark.parametrize(
    "sizes", [dict(diloco=2, data=2, fsdp=2), full(dict(data=2, fsdp=4))]
)


@of_divided_leaves
@pytest.mark.usefixtures("few_compiler_passes")
def test_radial_directional_mean_uses_norms_of_whole_tensors(devices, sizes):
    """Of each layer, of each other tensor; the table is averaged. The sizes that the metrics show
    are of the plain mean."""
    mesh, arrays = mesh_of(devices, **sizes), values(DIVIDED)
    leaf_axes = [kind for *_, kind in DIVIDED.values()]
    _, found = exchange(mesh, "float32", arrays, leaves=DIVIDED, leaf_axes=leaf_axes)
    for name, x_R, kind, mean in zip(DIVIDED, arrays, leaf_axes, found.mean, strict=True):
        np.testing.assert_allclose(
            mean, radial_directional_mean_of(x_R, kind), atol=1e-6, err_msg=name
        )
    plain = np.concatenate([x_R.mean(0).ravel() for x_R in arrays])
    assert float(found.sizes.mean_norm) == pytest.approx(np.linalg.norm(plain), rel=1e-5)


@of_divided_leaves
@pytest.mark.usefixtures("few_compiler_passes")
def test_what_arrives_and_what_is_left_over_are_what_was_wanted(devices, sizes):
    """Every value is left over once, on whichever devices it is, and counts once in the norm.

    int2 has no code for the zeros that fill up the last of equal parts."""
    g_R, before_R = values(DIVIDED), values(DIVIDED, seed=1)
    mesh = mesh_of(devices, **sizes)
    sent, found = exchange(mesh, "int2", g_R, leaves=DIVIDED, residual=before_R)
    for x, e, left, arrived in zip(g_R, before_R, sent.residual, found.mean, strict=True):
        np.testing.assert_allclose((x + e - left).mean(0), arrived, atol=1e-6)
    squares = sum(jnp.sum(x**2, axis=range(1, x.ndim)) for x in sent.residual)
    np.testing.assert_allclose(sent.norm_R, np.sqrt(squares), rtol=1e-5)
    assert min(np.asarray(sent.norm_R)) > 1
