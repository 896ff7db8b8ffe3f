"""Where chunks lie: those kept on the host, and what arrives in the memory of what it replaces."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxdiloco import DiLoCo
from maxdiloco.diloco.schedule import INNER_EXCHANGE
from maxdiloco.engine import actions
from maxdiloco.engine.calls import elsewhere
from maxdiloco.parallel import offload


def slow_step(params, opt_state, batch):
    """Some tens of milliseconds of one core, so that the host runs ahead."""
    y = jax.lax.fori_loop(0, 6, lambda _, y: jnp.tanh(y @ y), opt_state)
    return jax.tree.map(lambda x: x - 1e-3 * y[0, 0], params), y, {"loss": y[0, 0]}


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_host_that_runs_ahead_has_the_chunks_of_two_steps_on_the_device(memory, monkeypatch):
    """Eager with H=20: every step carries a chunk, and nothing else waits in steps 22 to 33.
    A step's chunks are there from the copy of the one it sends until what arrives is on the host.
    Control: with both in device memory nothing is copied."""
    arrived, most, move = [], [], offload.moved

    def moved(x, kind):
        out = move(x, kind)
        if isinstance(x, jax.Array) and out is not x:
            if kind == offload.HOST:
                arrived.append(out)
            else:
                most.append(1 + sum(not y.is_ready() for y in arrived))
        return out

    algorithm = DiLoCo(
        slow_step, num_replicas=2, sync_period=20, outer_overlap="eager", outer_memory=memory
    )
    state = algorithm.init({"w": jnp.zeros((64, 1024))}, jnp.full((400, 400), 1e-3))
    for _ in range(21):
        state, _ = algorithm.step(state, np.zeros(2))
    jax.block_until_ready(state)
    monkeypatch.setattr(offload, "moved", moved)
    for _ in range(12):
        state, _ = algorithm.step(state, np.zeros(2))
    assert max(most, default=0) == (2 if memory == "pinned_host" else 0)


def made(step=lambda p, o, b: (p, o, {}), **options):
    """Two replicas with two chunks a send, whose steps change nothing unless one is given."""
    return DiLoCo(step, **(dict(num_replicas=2, sync_period=4, overlap_steps=2) | options))


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
def test_a_step_takes_the_chunk_that_it_sends_in_device_memory(memory):
    """As an array and as a ShapeDtypeStruct; the state keeps it where outer_memory says."""
    algorithm = made(outer_memory=memory)
    state = algorithm.init({"w": jnp.zeros((64, 64))}, ())
    (action, *_) = algorithm.schedule.actions(5)
    assert action.program == INNER_EXCHANGE
    for given in (state, algorithm.layout.state):
        on = actions.Given(algorithm.layout, action, given, np.zeros(2))
        _, args = actions.INNER_EXCHANGE.call(algorithm.programs, on)
        assert {x.sharding.memory_kind or "device" for x in args[3]} == {"device"}
        assert given.outgoing[0].sharding.memory_kind in (memory, None)


@pytest.mark.parametrize(("carrier", "chunks"), [("program", {0: 8, 1: 4}), ("host", {0: 0})])
def test_a_program_counts_the_chunks_on_the_device_that_are_not_its_own(carrier, chunks):
    """A chunk is half of w in float32, 4096 bytes; the device sends those of two replicas and gets
    as many: with two steps eight, of which the step that carries some has four itself. No state
    is counted."""
    algorithm = made(outer_memory="pinned_host", exchange_carrier=carrier)
    algorithm.bind({"w": jnp.zeros((1024 - 2, 2))}, ())
    calls = algorithm.calls(jax.ShapeDtypeStruct((2,), jnp.float32))
    found = {call.program.name: elsewhere(call, ()) / 4096 for call in calls}
    algorithm.close()
    wanted = {name: chunks[name == INNER_EXCHANGE] for name in found}
    assert found == wanted and (INNER_EXCHANGE in found) == (carrier == "program")


# --- receive slots ----------------------------------------------------------------------------


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
    [dict(overlap_steps=2), dict(overlap_steps=0, outer_overlap="eager")],
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


@pytest.mark.usefixtures("few_compiler_passes")
def test_the_program_of_an_exchange_names_the_memory_that_it_shares(devices):
    """One alias more than the plain step has for each array that arrives, of its size."""
    algorithm, state = started(devices, overlap_steps=2)
    step = (state.params, state.opt_state, jnp.ones(2))
    slot, programs = state.incoming[0], algorithm.programs
    chunk, old = (state.outgoing[0],), (slot[0],)
    plain = programs.inner.compile(*step)
    beside = programs.inner_exchange(algorithm.layout.plans[0]).compile(*step, chunk, old)
    header = [program.as_text().splitlines()[0] for program in (plain, beside)]
    before, after = (len(re.findall(r"(?:may|must)-alias", line)) for line in header)
    assert before == 1 and after == 2, header
    shared = [x.memory_analysis().alias_size_in_bytes for x in (plain, beside)]
    assert shared[1] - shared[0] == slot[0].nbytes
