"""Receive slots: what arrives beside a step takes the memory of what it replaces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

OPTIONS = {"tau 2": dict(overlap_steps=2), "eager": dict(outer_overlap="eager")}


def inner_step(params, opt_state, batch):
    return jax.tree.map(lambda p: p - 0.1 * (p - batch), params), opt_state, {}


def started(devices, mode):
    """A trainer of two replicas, each on its own device, and its state."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    algorithm = DiLoCo(
        inner_step,
        num_replicas=2,
        mesh=mesh,
        sync_period=4,
        num_fragments=2,
        layer_axis={"w": 0},
        exchange_dtype="bfloat16",
        **OPTIONS[mode],
    )
    w = jax.device_put(jnp.linspace(-1, 1, 4 * 3000).reshape(4, 3000), NamedSharding(mesh, P()))
    return algorithm, algorithm.init({"w": w}, ())


def addresses(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


@pytest.mark.parametrize("mode", OPTIONS)
def test_what_arrives_lies_where_what_it_replaces_lay(devices, mode):
    """The arrays of a slot that a step does not replace are the control: they stay."""
    algorithm, state = started(devices, mode)
    replaced, kept = 0, 0
    for t in range(1, 13):
        before = [(x, addresses(x)) for x in jax.tree.leaves(state.incoming)]
        state, _ = algorithm.step(state, np.array([1, 2], np.float32) * t)
        for (old, place), new in zip(before, jax.tree.leaves(state.incoming), strict=True):
            assert addresses(new) == place
            assert old.is_deleted() == (new is not old)
            replaced, kept = replaced + (new is not old), kept + (new is old)
    assert replaced > 4 and kept > 4


def test_the_program_of_an_exchange_names_the_memory_that_it_shares(devices):
    """One alias more than the plain step has for each array that arrives, of its size."""
    algorithm, state = started(devices, "tau 2")
    step = (state.params, state.opt_state, jnp.ones(2))
    slot, programs = state.incoming[0], algorithm.programs
    chunk, old = (state.outgoing[0],), (slot[0],)
    plain = programs.inner.lower(*step).compile()
    beside = programs.inner_exchange(algorithm.layout.plans[0]).lower(*step, chunk, old).compile()
    header = [program.as_text().splitlines()[0] for program in (plain, beside)]
    before, after = (len(re.findall(r"(?:may|must)-alias", line)) for line in header)
    assert before == 1 and after == 2, header
    shared = [x.memory_analysis().alias_size_in_bytes for x in (plain, beside)]
    assert shared[1] - shared[0] == slot[0].nbytes
