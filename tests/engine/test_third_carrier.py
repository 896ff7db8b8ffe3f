"""A carrier is a table of kinds: one that is added by its table alone trains to the same bits."""

import pathlib
import re
from types import MappingProxyType

import jax
import numpy as np
import pytest
import tiny_problem
from jax.sharding import Mesh, NamedSharding
from tiers import corner

from benchmarks.link import moments
from maxdiloco import DiLoCo
from maxdiloco.diloco import schedule
from maxdiloco.engine import exchanges
from maxdiloco.engine.actions import INNER, KINDS, MERGE, OUTER_STEP, PACK, on_host
from maxdiloco.exchange.collective import incoming_spec
from maxdiloco.exchange.host import HostCarrier
from maxdiloco.exchange.payload import payload_bytes


class ThroughQueue(exchanges.Carrier):
    """What was packed waits in this process until it is merged."""

    def __init__(self, programs, schedule_of_run, mailbox):
        super().__init__(programs, schedule_of_run, mailbox)
        mesh, queue = programs.layout.mesh, {}
        arrived = NamedSharding(mesh, incoming_spec(mesh))

        def put(given):
            chunks = tuple(jax.device_put(np.asarray(chunk), arrived) for chunk in given.chunks)
            queue[given.plan.index, given.state.t] = chunks

        def get(given):
            return queue.pop((given.plan.index, given.state.t - schedule_of_run.lag), None)

        put = on_host(put, bytes_sent=lambda _, plan: payload_bytes(plan.payload))
        get = on_host(get, abstract=self._abstract_incoming)
        self.table = MappingProxyType({
            schedule.INNER: (INNER,),
            schedule.INNER_EXCHANGE: (INNER,),
            schedule.PACK: (PACK, put),
            schedule.MERGE: (get, MERGE),
            schedule.SYNCHRONISE: (PACK, put, get, MERGE),
            schedule.OUTER_STEP: (get, OUTER_STEP, put),
        })  # fmt: skip


MODES = {
    "tau 0": dict(num_fragments=2),
    "tau 2": dict(num_fragments=2, overlap_steps=2, alpha=0.25),
    "eager": dict(outer_overlap="eager"),
}


def made(problem, carrier, **options):
    mesh = Mesh(np.array(jax.devices()[:3]), ("diloco",))
    return DiLoCo(
        tiny_problem.jax_inner_step, num_replicas=3, sync_period=4, exchange_dtype="int8",
        mesh=mesh, layer_axis=tiny_problem.layer_axis(problem.tree), exchange_carrier=carrier,
        **options,
    )  # fmt: skip


def trained(carrier, **options):
    problem = tiny_problem.problem("mixed")
    algorithm = made(problem, carrier, **options)
    steps = list(tiny_problem.train(algorithm, problem, 9))
    batch = jax.tree.map(np.asarray, problem.batch(1, 3))
    calls = algorithm.calls(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    algorithm.close()
    sent = [algorithm.bytes_sent(t) for t in range(1, 10)]
    return jax.tree.leaves(steps), (sent, [call.program.name for call in calls])


@pytest.mark.parametrize("mode", corner(MODES, ["tau 2", "eager"]))
def test_a_carrier_is_added_by_a_table_alone(mode, monkeypatch):
    """On three slices; a run also asks which programs it calls."""
    monkeypatch.setattr(exchanges, "CARRIERS", exchanges.CARRIERS | {"queue": ThroughQueue})
    values, told = trained("queue", **MODES[mode])
    wanted, of_host = trained("host", **MODES[mode])
    assert told == of_host and any(told[0])
    for one, other in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("exchange", ["gather", "owners"])
def test_faults_are_met_where_a_step_sends_and_where_it_is_waited_for(exchange, monkeypatch):
    """What step 6 sends is taken at step 8. A step that sends nothing has no such moment."""
    seen = []
    for owner, name in ((HostCarrier, "start"), (exchanges.ThroughHost, "_take")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after the test
    for t in (6, 7):
        moments.act_at("at apply", t, lambda t=t: seen.append(("sends", t)))
        moments.act_at_take(t, moments.once(lambda t=t: seen.append(("waits", t))))
    trained("host", **MODES["tau 2"], exchange=exchange)
    assert seen == [("sends", 6), ("waits", 6)]


def test_every_kind_has_all_its_parts_and_every_carrier_every_kind():
    """A part that lacks is found here, not in a run."""
    assert set(KINDS) == set(schedule.PROGRAMS)
    for kind in KINDS.values():
        assert all(map(callable, (kind.call, kind.changed)))
    problem = tiny_problem.problem("mixed")
    params = problem.named(problem.params)
    for carrier in exchanges.CARRIERS:
        algorithm = made(problem, carrier)
        algorithm.bind(params, params)
        assert set(algorithm._carrier.table) == set(schedule.PROGRAMS), carrier
        algorithm.close()


def test_the_engine_compares_no_kind_of_an_action():
    """Control: a comparison is found."""
    comparison = re.compile(r"\.program (==|!=|in|not in) ")
    paths = list(pathlib.Path(exchanges.__file__).parent.glob("*.py"))
    assert len(paths) > 10 and not [p for p in paths if comparison.search(p.read_text())]
    assert comparison.search("if action.program in (PACK, MERGE):")
