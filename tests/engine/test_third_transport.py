"""A transport is six methods: an in-process queue trains to the bits of the others."""

import jax
import numpy as np
import pytest
import tiny_problem
from jax.sharding import Mesh, NamedSharding
from tiers import corner

from maxdiloco import DiLoCo
from maxdiloco.engine import settings, transports
from maxdiloco.engine.collective import incoming_spec


class QueueTransport:
    """What was packed waits in this process until it is merged."""

    in_programs = False
    waited_s = None

    def __init__(self, programs, messenger):
        self._programs, self._chunks = programs, {}
        mesh = programs.layout.mesh
        self._arrived = NamedSharding(mesh, incoming_spec(mesh))

    def begin(self, state):
        self._chunks.clear()

    def start_send(self, leg, chunks):
        moved = tuple(jax.device_put(np.asarray(chunk), self._arrived) for chunk in chunks)
        self._chunks[leg] = moved

    def inner_step(self, run, state, action, batch):
        return transports.plain_inner_step(run, self._programs.inner, state, batch)

    def receive(self, leg):
        return self._chunks.pop(leg, None)

    def state_for_checkpoint(self, state):
        return state

    def close(self):
        self._chunks.clear()


MODES = {
    "tau 0": dict(num_fragments=2),
    "tau 2": dict(num_fragments=2, overlap_steps=2, alpha=0.25),
    "eager": dict(round_overlap="eager"),
}


def trained(transport, **options):
    """Leaves of all states, bytes sent, and the names of the compiled programs."""
    problem = tiny_problem.problem("mixed")
    algorithm = DiLoCo(
        tiny_problem.jax_inner_step,
        num_replicas=3,
        sync_period=4,
        exchange_dtype="int8",
        mesh=Mesh(np.array(jax.devices()[:3]), ("diloco",)),
        layer_axis=tiny_problem.layer_axis(problem.tree),
        transport=transport,
        **options,
    )
    steps = list(tiny_problem.train(algorithm, problem, 9))
    batch = jax.tree.map(np.asarray, problem.batch(1, 3))
    calls = algorithm.calls(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    algorithm.close()
    sent = [algorithm.bytes_sent(t) for t in range(1, 10)]
    return jax.tree.leaves(steps), (sent, [call.program.name for call in calls])


@pytest.mark.parametrize("mode", corner(MODES, ["tau 2", "eager"]))
def test_a_third_transport_has_the_bits_of_the_others(mode, monkeypatch):
    """Also the bytes and the programs of the transport `host`, which are not among a chunk's."""
    known = transports.TRANSPORTS | {"queue": QueueTransport}
    monkeypatch.setattr("maxdiloco.engine.diloco.TRANSPORTS", known)
    monkeypatch.setattr(settings, "TRANSPORTS", (*settings.TRANSPORTS, "queue"))
    values, facts = trained("queue", **MODES[mode])
    expected, of_host = trained("host", **MODES[mode])
    assert facts == of_host and any(facts[0])
    for one, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(one, other)
