"""The bits of initial weights."""

import jax
import numpy as np
import pytest

from maxdiloco.flags import config
from maxdiloco.models.weights import unrolled_threefry
from maxdiloco.parallel import mesh as mesh_lib
from maxdiloco.trainer import assemble


@pytest.mark.parametrize("shape", [(), (7,), (3, 1, 5)])
def test_unrolled_rounds_give_jaxs_bits(shape):
    """Of keys split, folded and mapped over. Control: another seed has others."""

    def bits(seed, impl):
        key = jax.random.fold_in(jax.random.key(seed, impl=impl), 3)
        keys = jax.random.split(key, 4)
        drawn = jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 1), shape))(keys)
        return drawn, jax.random.truncated_normal(key, -2, 2, shape)

    bits = jax.jit(bits, static_argnums=1)
    of_jax, ours, others = bits(5, None), bits(5, unrolled_threefry()), bits(6, None)
    np.testing.assert_array_equal(of_jax[0], ours[0])
    np.testing.assert_array_equal(of_jax[1], ours[1])
    assert (np.asarray(others[0]) != ours[0]).all()


def test_a_run_begins_with_the_weights_of_jaxs_generator_on_any_mesh():
    """Two slices of two devices, each with half of a matrix.

    Equal bits of integers; what becomes of them is rounded as the compiler fuses it.
    """
    keys = ["model_name=tiny", "hardware=cpu", "dcn_diloco_parallelism=2", "ici_fsdp_parallelism=2"]
    cfg = config.load(keys, {})
    mesh = mesh_lib.build(cfg, jax.devices()[:4])
    parts = assemble.assemble(cfg, mesh, total_steps=1, on_compile=lambda *_: None)
    state = assemble.initial_state(parts, 5)
    init = jax.jit(lambda seed: parts.model.init(jax.random.key(seed)))
    leaves, expected = map(jax.tree.leaves, (state.outer, init(np.uint32(5))))
    for leaf, like in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(leaf, like, rtol=1e-5)
