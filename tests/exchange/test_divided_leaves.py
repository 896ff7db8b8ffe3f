"""The merge rda and error feedback where the devices of a slice divide the leaves.

    # R replicas
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models.tiny_model import mesh_of

from maxdiloco.diloco.fragments import Stacked, Vocabulary
from maxdiloco.exchange import collective, payload

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

M = 4
# Layers along a dim that is divided or not; one tensor, divided or not, of odd sizes; a table.
LEAVES = {
    "layers": ((4, 8), P(None, "fsdp"), Stacked(0, (0, 1, 2, 3))),
    "divided layers": ((3, 4), P(None, "fsdp"), Stacked(1, (0, 1, 2, 3))),
    "whole": ((3, 3), P(), None),
    "divided": ((4, 5), P("fsdp", None), None),
    "table": ((4, 3), P("fsdp", None), Vocabulary(0)),
}
SHAPES, SPECS, KINDS = (list(column) for column in zip(*LEAVES.values(), strict=True))
MESHES = [dict(diloco=2, data=2, fsdp=2), dict(data=2, fsdp=4)]


def leaves(mesh, seed=0):
    """On the host, and on the mesh."""
    numbers = np.random.default_rng(seed)
    arrays = [numbers.normal(size=(M, *shape)).astype(np.float32) for shape in SHAPES]
    return arrays, [
        jax.device_put(x, NamedSharding(mesh, P("diloco", *spec)))
        for x, spec in zip(arrays, SPECS, strict=True)
    ]


def received(mesh, fragment, sent, kinds=None):
    arrived = [collective.all_gather_chunk(chunk, mesh) for chunk in sent.chunks]
    return collective.receive(fragment, arrived, num_replicas=M, kinds=kinds)


def rda(x_R):
    """mean(|v|) * u / |u|, u = mean(v / |v|), of one tensor in float64."""
    norms = [np.linalg.norm(x) for x in x_R]
    u = np.mean([x / norm for x, norm in zip(x_R, norms, strict=True)], axis=0)
    return np.mean(norms) * u / np.linalg.norm(u)


def rda_of_a_leaf(x_R, kind):
    x_R = x_R.astype(np.float64)
    if isinstance(kind, Vocabulary):
        return x_R.mean(0)
    if kind is None:
        return rda(x_R)
    layers = np.moveaxis(x_R, 1 + kind.axis, 0)
    return np.moveaxis(np.stack([rda(layer_R) for layer_R in layers]), 0, kind.axis)


@pytest.mark.parametrize("sizes", MESHES)
def test_rda_takes_the_norms_of_whole_tensors_whoever_has_their_values(devices, sizes):
    """Of each layer, of each other tensor; the table is averaged. The sizes that the metrics show
    are of the plain mean."""
    mesh = mesh_of(devices, **sizes)
    fragment = payload.for_leaves(SHAPES, SPECS, wire="float32", mesh=mesh)
    arrays, placed = leaves(mesh)

    @jax.jit
    def run(leaves_R):
        sent = collective.send(fragment, leaves_R, (payload.pad_to_tile(fragment.size),))
        return received(mesh, fragment, sent, KINDS)

    found = run(placed)
    for name, x_R, kind, mean in zip(LEAVES, arrays, KINDS, found.mean, strict=True):
        np.testing.assert_allclose(mean, rda_of_a_leaf(x_R, kind), atol=1e-6, err_msg=name)
    plain = np.concatenate([x_R.mean(0).ravel() for x_R in arrays])
    assert float(found.sizes.mean_norm) == pytest.approx(np.linalg.norm(plain), rel=1e-5)


@pytest.mark.parametrize("sizes", MESHES)
def test_what_arrives_and_what_is_left_over_are_what_was_wanted(devices, sizes):
    """Every value is left over once, on whichever devices it is, and counts once in the norm.

    int2 has no code for the zeros that fill up the last of equal parts."""
    mesh = mesh_of(devices, **sizes)
    fragment = payload.for_leaves(SHAPES, SPECS, wire="int2", mesh=mesh)
    (g_R, placed), (before_R, residual) = leaves(mesh), leaves(mesh, seed=1)

    @jax.jit
    def run(leaves_R, residual_R):
        lengths = (payload.pad_to_tile(fragment.size),)
        sent = collective.send(fragment, leaves_R, lengths, residual_R)
        return sent, received(mesh, fragment, sent).mean

    sent, mean = run(placed, residual)
    for x, e, left, arrived in zip(g_R, before_R, sent.residual, mean, strict=True):
        np.testing.assert_allclose((x + e - left).mean(0), arrived, atol=1e-6)
    squares = sum(jnp.sum(x**2, axis=range(1, x.ndim)) for x in sent.residual)
    np.testing.assert_allclose(sent.norm_R, np.sqrt(squares), rtol=1e-5)
    assert min(np.asarray(sent.norm_R)) > 1
