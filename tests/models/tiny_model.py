"""A decoder small enough to check by hand, with every choice a test may want to turn.

# B sequences  L tokens
"""

import dataclasses
import math

import jax
import jax.extend
import numpy as np
from jax.sharding import Mesh

from maxdiloco.config import config as base
from maxdiloco.models.build import ModelSettings, build_model
from maxdiloco.models.model import Model
from maxdiloco.parallel.mesh import AXES

# Packed: documents of 5, 4 and 3 tokens; one of 7 and padding; one that fills the window;
# padding alone.
SEGMENTS = np.array(
    [
        [1, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3],
        [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0],
        [1] * 12,
        [0] * 12,
    ],
    np.int32,
)


BASE = base.from_dict({})
DEFAULTS = BASE.as_dict()
TINY = dict(
    base_emb_dim=16, base_num_decoder_layers=2, base_mlp_dim=24, base_num_query_heads=4,
    base_num_kv_heads=2, head_dim=4, vocab_size=32, max_target_length=12, use_qk_norm="head",
    mlp_activations=("silu", "linear"), logits_via_embedding=False, attention_pattern=(),
    logical_axis_rules=(), z_loss_multiplier=1e-2, dtype="float32", attention="dot_product",
    remat_policy="none",
)  # fmt: skip


def config(**changes):
    """Two layers of width 16, four query heads on two key/value heads, gated, untied; the other
    keys as in base.yml."""
    assert not changes.keys() - DEFAULTS.keys()
    return BASE.model_copy(update=TINY | changes)


def build(*, backend="cpu", **changes):
    settings = ModelSettings.from_keys(config(**changes), backend=backend)
    return build_model(settings, backend=backend)


def with_kernels(model, **changes):
    """The same model with other kernels; those of `products` by their own names."""
    kernels = model.kernels
    of_products = {field.name for field in dataclasses.fields(kernels.products)} & changes.keys()
    products = {name: changes.pop(name) for name in of_products}
    changes["products"] = dataclasses.replace(kernels.products, **products)
    return Model(model.config, dataclasses.replace(kernels, **changes))


def params_of(model, seed=0):
    """Parameters as large as fresh ones, with norm scales off 1, so that no scale can be left out
    unseen. NumPy's numbers, since drawing them in JAX compiles some twenty programs."""
    rng = np.random.default_rng(seed)

    def draw(path, x):
        scale = path[-1].key == "scale"
        values = rng.uniform(0.5, 1.5, x.shape) if scale else rng.normal(0, 0.25, x.shape)
        return values.astype(x.dtype)

    return jax.tree_util.tree_map_with_path(draw, jax.eval_shape(model.init, jax.random.key(0)))


def tokens(shape, seed=1, vocab_size=32):
    return np.random.default_rng(seed).integers(0, vocab_size, shape, dtype=np.int32)


def batch(segment_ids=SEGMENTS, seed=1):
    return {"tokens": tokens(segment_ids.shape, seed), "segment_ids": segment_ids}


def compiled(fn, **kwargs):
    """jax.jit with little optimisation: half the compile time, and nothing here runs long."""
    return jax.jit(fn, compiler_options={"xla_backend_optimization_level": 0}, **kwargs)


def value_and_gradient(model):
    """((loss, aux), gradient) of parameters and a batch, compiled."""
    return compiled(jax.value_and_grad(model.loss, has_aux=True))


def assert_close(tree, expected, **tolerance):
    jax.tree.map(lambda x, e: np.testing.assert_allclose(x, e, **tolerance), tree, expected)


def assert_slopes(oracle, at, gradient, *, step, slack):
    """Each leaf of the gradient is the oracle's slope (central differences of what it gives for
    the leaves `at`, float64) along a random direction."""
    rng = np.random.default_rng(3)
    for i, leaf in enumerate(gradient):
        direction = rng.standard_normal(leaf.shape)
        ahead, behind = (
            oracle([x + move * direction if j == i else x for j, x in enumerate(at)])
            for move in (step, -step)
        )
        typical = np.linalg.norm(leaf)  # size of a random direction's slope
        slope = (ahead - behind) / (2 * step)
        tolerance = 2e-4 * typical + slack
        np.testing.assert_allclose(np.vdot(leaf, direction), slope, atol=tolerance)


def equations(fn, *args):
    """Those of the program of fn, inside loops and kernels too."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from walk(inner)

    return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def mesh_of(devices, **sizes):
    """A mesh with the given sizes; the other axes have size 1."""
    shape = [sizes.get(axis, 1) for axis in AXES]
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), AXES)
