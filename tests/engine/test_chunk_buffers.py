"""Memory of an exchange: reused chunks, and chunks of equal length."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tiers import corner

from maxdiloco import DiLoCo
from maxdiloco.engine.layout import ChunkBuffer
from maxdiloco.engine.payload import Cut


def made(step=lambda p, o, b: (p, o, {}), **options):
    """Two replicas with two chunks a send, whose steps change nothing unless one is given."""
    return DiLoCo(step, **(dict(num_replicas=2, sync_period=4, overlap_steps=2) | options))


def started(devices, **overlap):
    """A trainer of two replicas, each on its own device, and its state."""
    mesh = Mesh(np.array(devices[:2]), ("diloco",))
    step = lambda p, o, b: (jax.tree.map(lambda x: x - 0.1 * (x - b), p), o, {})  # noqa: E731
    options = dict(num_fragments=2, layer_axis={"w": 0}, exchange_dtype="bfloat16") | overlap
    algorithm = made(step, mesh=mesh, **options)
    w = jax.device_put(jnp.linspace(-1, 1, 4 * 3000).reshape(4, 3000), NamedSharding(mesh, P()))
    return algorithm, algorithm.init({"w": w}, ())


def addresses(x):
    return [shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards]


@pytest.mark.parametrize(
    "overlap",
    [dict(overlap_steps=2), dict(overlap_steps=0, round_overlap="eager")],
    ids=["tau 2", "eager"],
)
@pytest.mark.usefixtures("few_compiler_passes")
def test_what_arrives_lies_where_what_it_replaces_lay(devices, overlap):
    """The arrays of a slot that a step does not replace are the control: they stay."""
    algorithm, state = started(devices, **overlap)
    replaced, kept = 0, 0
    for t in range(1, 13):
        before = [(x, addresses(x)) for x in jax.tree.leaves(state.incoming)]
        state, _ = algorithm.step(state, np.array([1, 2], np.float32) * t)
        for (old, place), new in zip(before, jax.tree.leaves(state.incoming), strict=True):
            assert addresses(new) == place
            assert old.is_deleted() == (new is not old)
            replaced, kept = replaced + (new is not old), kept + (new is old)
    assert replaced > 4 and kept > 4


SENDS = {
    "all-gather": dict(overlap_steps=2),
    "reduce-scatter": dict(overlap_steps=2, collective="reduce_scatter"),
    "delayed": dict(overlap_steps=0, round_overlap="delayed"),
    "eager": dict(overlap_steps=0, round_overlap="eager"),
}


@pytest.mark.parametrize("transport", ["xla", "host"])
@pytest.mark.parametrize("mode", corner(SENDS, ["all-gather", "reduce-scatter", "eager"]))
@pytest.mark.usefixtures("few_compiler_passes")
def test_a_send_lies_where_the_last_one_lay(devices, mode, transport):
    """With the transport `host` threads may still read the last send, so it stays."""
    algorithm, state = started(devices, transport=transport, **SENDS[mode])
    replaced = 0
    for t in range(1, 13):
        before = [(x, addresses(x)) for x in sent(state)]
        state, _ = algorithm.step(state, np.array([1, 2], np.float32) * t)
        for (old, place), new in zip(before, sent(state), strict=True):
            if new is old:
                assert not old.is_deleted()
            elif transport == "host":
                assert not old.is_deleted() and addresses(new) != place
            else:
                assert old.is_deleted() and addresses(new) == place
            replaced += new is not old
    assert replaced > 4
    algorithm.close()


def sent(state):
    return jax.tree.leaves((state.outgoing, state.scatter_outgoing))


@pytest.mark.usefixtures("few_compiler_passes")
def test_the_program_of_an_exchange_names_the_memory_that_it_shares(devices):
    """One alias more than the plain step has for each array that arrives, of its size."""
    algorithm, state = started(devices, overlap_steps=2)
    step = (state.params, state.opt_state, jnp.ones(2))
    programs = algorithm.programs
    (chunk,), (old,) = state.outgoing.read(0, [0]), state.incoming.read(0, [0])
    plain = programs.inner.compile(*step)
    beside = programs.inner_exchange.compile(*step, chunk, old)
    header = [program.as_text().splitlines()[0] for program in (plain, beside)]
    before, after = (len(re.findall(r"(?:may|must)-alias", line)) for line in header)
    assert before == 1 and after == 2, header
    shared = [x.memory_analysis().alias_size_in_bytes for x in (plain, beside)]
    assert shared[1] - shared[0] == old.nbytes


def test_all_chunks_have_the_length_of_the_largest_fragment(devices):
    """One fragment of 6,000 values and one of 12,000, 2 bytes each, in at most two chunks: the
    large one has two of 6,144 elements, the small one one."""
    params = {"a": jnp.zeros(6000), "b": jnp.zeros(12000)}
    algorithm = made(num_fragments=2, exchange_dtype="bfloat16")
    layout = algorithm.bind(params, ())
    assert [plan.gather for plan in layout.plans] == [Cut(1, 6144), Cut(2, 6144)]
    assert [x.shape for x in layout.state.outgoing.chunks] == [(2 * 6144,)] * 2
    assert layout.state.incoming.per_slot == 2
    algorithm.close()


def test_a_buffer_writes_the_chunks_of_one_slot():
    buffer = ChunkBuffer(("a", "b", "c", "d", "e", "f"), per_slot=3)
    assert buffer.read(1, range(3)) == ("d", "e", "f")
    assert buffer.write(1, [0, 2], ["x", "y"]).chunks == ("a", "b", "c", "x", "e", "y")
