"""The executor over a bucket: the numbers of its steps, its ledger, and its end."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import together
from tiers import corner
from together import PACE, Together, a_run, begun, in_lockstep, movement, start_values

from maxdiloco import DiLoCo, Island
from maxdiloco.errors import ConfigError
from maxdiloco.islands import (
    audit,
    executor,
    log_store,
    outer_step,
    records,
    rules,
    signatures,
)
from maxdiloco.islands.records import Leaf
from maxdiloco.islands.state_machine import REPLACED, Apply, Stop
from maxdiloco.storage import store

STEPS = 14


def by_leaf(run, flat):
    """{name: leaf} of the fragments' values; leaf i of the library is of fragment i mod P."""
    names, leaves = iter("abcdefgh"), []
    for values, leaves_of in zip(flat, run.fragments, strict=True):
        leaves.append(np.split(values, np.cumsum([leaf.size for leaf in leaves_of])[:-1]))
    order = [leaves[i % len(leaves)][i // len(leaves)] for i in range(sum(map(len, leaves)))]
    return dict(zip(names, map(jnp.asarray, order), strict=False))


def on_devices(run, M, steps):
    """theta and the replicas of the library class, whose host transport has the same bits."""
    algorithm = DiLoCo(
        lambda params, opt, batch: (jax.tree.map(jnp.add, params, batch), opt, {}),
        num_replicas=M, sync_period=run.sync_period, num_fragments=len(run.fragments),
        overlap_steps=run.overlap_steps, alpha=run.alpha, outer_lr=run.outer_lr,
        outer_momentum=run.outer_momentum, exchange_dtype=run.wire, transport="host",
    )  # fmt: skip
    state = algorithm.init(by_leaf(run, start_values(run)), {})
    for t in range(1, steps + 1):
        moved = [by_leaf(run, movement(m, t, run)) for m in range(M)]
        batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *moved)
        state, _ = algorithm.step(state, batch)
    theta, replicas = algorithm.outer_params(state), algorithm.replica_params(state)
    algorithm.close()
    return theta, replicas


def bound_of(bucket, run):
    """What rounding may add up to, of both sides, over the records of a log, by fragment."""
    bounds = []
    for fragment, theta in enumerate(start_values(run)):
        state, total, read = (
            outer_step.fresh(theta),
            0.0,
            functools.partial(log_store.read, bucket, run),
        )
        for record in audit.replay(bucket, run, fragment).records:
            terms = [log_store.read_term(read, run, fragment, member) for member in record.members]
            total = total + 4 * together.rounding(run, state, terms)
            state = outer_step.stepped(
                run, state, record, log_store.read_gradient(read, run, record)
            )
        bounds.append(total)
    return bounds


GRID = [(M, wire, tau, P) for M in (1, 2, 3) for wire in ("float32", "int8", "float4_e3m0")
        for tau in (0, 1, 3) for P in (1, 2)]  # fmt: skip


@pytest.mark.parametrize(
    ("M", "wire", "tau", "P"),
    corner(GRID, [(2, "float32", 0, 1), (3, "int8", 1, 2), (2, "float4_e3m0", 3, 2)]),
)
def test_islands_in_lockstep_have_the_numbers_of_the_host_carrier(M, wire, tau, P):
    fragments = a_run().fragments if P == 2 else ((*a_run().fragments[0],),)
    run = a_run(wire=wire, overlap_steps=tau, fragments=fragments, snapshot_every=64, islands_min=M)
    islands = in_lockstep(bucket := store.in_memory(), run, "abc"[:M], STEPS)
    theta, replicas = on_devices(run, M, STEPS)
    bounds = by_leaf(run, bound_of(bucket, run))
    found = by_leaf(run, [state.theta for state in islands[0].outer])
    for name, leaf in found.items():
        assert np.all(np.abs(leaf - theta[name]) <= bounds[name]), name
        assert np.abs(leaf - by_leaf(run, start_values(run))[name]).max() > 0.1
        for m, island in enumerate(islands):
            x = by_leaf(run, island.x)[name]
            assert np.all(np.abs(x - replicas[name][m]) <= bounds[name] + 1e-6), name


class Recorded(log_store.MeteredStore):
    """A bucket that keeps the names of the objects that were read, and of absent ones."""

    def __init__(self, bucket):
        super().__init__(bucket)
        self.read, self.absent = [], []

    def get_first(self, name, most):
        self.read.append(name)
        try:
            return super().get_first(name, most)
        except FileNotFoundError:
            self.absent.append(name)
            raise


def test_a_message_is_read_once_a_heartbeat_announces_it():
    """Nobody polls for messages. Control: the next record is polled for."""
    bucket = Recorded(store.in_memory())
    begun(a_run(islands_min=2), "ab", 8, bucket=bucket)
    assert {name[0] for name in bucket.absent} == {"c", "r"}


def test_heartbeats_that_have_not_changed_are_not_read_again():
    bucket = Recorded(begun(run := a_run(), "ab", 1).bucket)
    first = log_store.heartbeats(bucket, run, known := {})
    assert sorted(bucket.read) == ["hb/a", "hb/b"]
    later = first["b"]._replace(count=10**6)
    bucket.put("hb/b", records.encode(later))
    assert log_store.heartbeats(bucket, run, known) == first | {"b": later}
    assert bucket.read[2:] == ["hb/b"]


@pytest.mark.parametrize(("names", "writes"), [("a", False), ("ab", False), ("abc", True)])
def test_a_gradient_is_stored_if_it_is_smaller_than_the_messages_of_others(names, writes):
    """With one wire format both ways: from three members on. The audit computes all of them."""
    bucket, run = Recorded(store.in_memory()), a_run(islands_min=len(names))
    begun(run, names, 8, bucket=bucket)
    stored = [*log_store.listed(bucket, "g/0")]
    assert bool(stored) == writes == any(name[0] == "g" for name in bucket.read)
    log = audit.replay(bucket, run, 0)
    assert log.computed > 0 and log.remade == log.computed


def test_an_island_does_not_read_its_own_messages():
    """Control: of two islands, each reads the messages of the other island."""
    bucket = Recorded(store.in_memory())
    begun(a_run(), "a", 8, bucket=bucket)
    assert not [name for name in bucket.read if name[0] == "u"]
    begun(a_run(islands_min=2), "ab", 8, bucket=(both := Recorded(store.in_memory())))
    assert {name.split("/")[2][0] for name in both.read if name[0] == "u"} == {"a", "b"}


def test_a_message_that_is_replaced_after_its_record_is_not_applied():
    """A record has the sha256 of its gradient, also if no object has the gradient."""
    group = begun(run := a_run(islands_min=2), "ab", 2)
    record, _ = log_store.read(group.bucket, run, "c/0/1")
    name = log_store.sources_of(run, record)[0]
    message, payload = log_store.read(group.bucket, run, name)
    values = outer_step.decode(run.wire, outer_step.sizes_of(run, 0), payload) * 2
    other = outer_step.encode(run.wire, outer_step.sizes_of(run, 0), values)
    forged = message._replace(sha256=records.sha256(other), norm=outer_step.norm(values))
    group.bucket.put(name, records.encode(forged, other))
    read = functools.partial(log_store.read, group.bucket, run)
    with pytest.raises(records.Damaged, match="c/0/1"):
        log_store.read_gradient(read, run, record)


def test_a_coarser_wire_down_changes_theta_only_by_rounding():
    """int8 down: a / 253 of a block's largest, for each record of one fragment of one block."""
    fine = a_run(islands_min=2, fragments=a_run().fragments[1:], overlap_steps=0, alpha=0.0)
    thetas = []
    for run in (fine, fine._replace(wire_down="int8")):
        island = in_lockstep(store.in_memory(), run, "ab", 4)[0]
        thetas.append(island.outer[0].theta)
    largest = max(abs(sum(movement(m, t, fine)[0] for t in range(1, 5))).max() for m in (0, 1))
    error = np.abs(thetas[0] - thetas[1])
    assert 0 < error.max() <= largest / 253 * fine.outer_lr * (1 + fine.outer_momentum)


def decided_of(island):
    """Names and incarnations of which the ledger of fragment 0 has a message."""
    return {mark[:2] for mark in island.state.logs[0].state.watermarks}


def elastic(seed):
    """Three islands, one of which is killed and starts again; its log has some records."""
    radial = "radial_directional_mean"
    run = a_run(block_tokens=64, wire="int8", wire_down="int8", aggregation=radial)
    group = begun(run, "abc", 3, seed)
    group.islands["c"] = group.make("c")
    group.until(lambda _: ("c", 2) in decided_of(group.islands["a"]))
    return group


@pytest.fixture(scope="module")
def group():
    return elastic(seed=0)


def test_elastic_islands_agree_and_the_ledger_adds_up(group):
    logs = [audit.replay(group.bucket, group.run, fragment) for fragment in range(2)]
    rejects = {line for log in logs for r in log.records for line in executor.reject_lines(r)}
    rejects |= {executor.scale_line(r) for log in logs for r in log.records if r.scale < 0.5}
    for one in group.islands.values():
        assert one.stop is None and set(one.said) <= rejects
    members = [m for record in logs[0].records for m in record.members]
    assert {m.island for m in members} == {"a", "b", "c"}
    assert logs[0].state.tokens == sum(m.tokens for m in members) > 0
    assert max(m.incarnation for m in members) == 2  # the one that started again


@pytest.mark.parametrize("reason", ["stale", "data"])
def test_the_audit_finds_a_reject_without_a_reason(reason, group):
    bucket, run = group.bucket, group.run
    last = audit.replay(bucket, run, 1).records[-1]
    name, out = records.record_name(1, last.number), last.members[-1][:2]  # all of one island
    out_of_it = [m for m in last.members if m[:2] == out]
    rejected = (records.Reject(*rules.message_key(m), reason, m.steps, m.norm) for m in out_of_it)
    members = tuple(m for m in last.members if m[:2] != out)
    before = bucket.get(name)
    bucket.put(name, records.encode(last._replace(members=members, rejected=tuple(rejected))))
    with pytest.raises(records.Damaged, match=f"{name} .*u/1/.*{reason}"):
        audit.replay(bucket, run, 1)
    bucket.put(name, before)


@pytest.mark.full
def test_elastic_islands_agree_in_many_orders():
    for seed in range(1, 20):
        group = elastic(seed)
        assert all(audit.replay(group.bucket, group.run, F).remade > 0 for F in range(2)), seed


def test_an_islands_own_progress_is_what_it_has_not_sent(group):
    """Rule 10 on arrays: x = theta - undecided - unsent, and unsent is what the next would be."""
    for island in group.islands.values():
        for F, x in enumerate(island.x):
            left = rules.unsent(island.outer[F].theta, island.sent[F].values(), x)
            back = island.outer[F].theta - sum(island.sent[F].values()) - left
            np.testing.assert_allclose(x, back, atol=1e-5)
            assert len(island.sent[F]) == len(island.state.logs[F].undecided)


def test_a_guest_is_stored_and_never_counted():
    """Of two islands the run knows the keys; a message of one is signed with another."""
    secret = {name: bytes([place] * 32) for place, name in enumerate(("a", "b"))}
    run = a_run(keys=tuple((name, signatures.public(key)) for name, key in secret.items()))
    group = begun(run, "a", 3, keys=secret)
    newest = max(log_store.listed(group.bucket, "u/0"), key=lambda name: int(name.split(".")[-1]))
    message, payload = log_store.read(group.bucket, run, newest)
    forged = signatures.signed(message._replace(island="b", seq=1), b"\7" * 32)
    group.bucket.put("u/0/b.1.1", records.encode(forged, payload))
    beat = signatures.signed(records.Heartbeat("b", 1, 1, (1, 1), 1.0, False), secret["b"])
    group.bucket.put("hb/b", records.encode(beat))
    group.until(lambda islands: all(("b", 1) in decided_of(island) for island in islands))
    log = audit.replay(group.bucket, run, 0)
    assert {m.island for record in log.records for m in record.members} == {"a"}
    reasons = {(r.island, r.reason) for record in log.records for r in record.rejected}
    assert reasons == {("b", "signature")}


def test_a_sign_of_life_that_its_key_has_not_signed_is_ignored():
    secret = {name: bytes([place] * 32) for place, name in enumerate("ab")}
    run = a_run(keys=tuple((name, signatures.public(key)) for name, key in secret.items()))
    bucket = begun(run, "ab", 1, keys=secret).bucket
    known = log_store.heartbeats(bucket, run, {})
    assert known.keys() == {"a", "b"}
    forged = known["b"]._replace(count=10**6, speed=9e11)
    bucket.put("hb/b", records.encode(forged))
    assert log_store.heartbeats(bucket, run, {}) == {"a": known["a"]}
    bucket.put("hb/b", records.encode(signatures.signed(forged, secret["a"])))
    assert log_store.heartbeats(bucket, run, {}) == {"a": known["a"]}


def test_an_island_that_sends_nothing_scales_nothing_for_long():
    """9e11 tokens/s: at first it is expected to bring what the other does, half of the record."""
    group = begun(a_run(), "a", 1)
    beat = records.Heartbeat("liar", 1, 1, (1, 1), 9e11, False)
    (one,) = group.islands.values()
    until = one.state.logs[0].state.number + 8
    while one.state.logs[0].state.number < until:
        beat = beat._replace(count=beat.count + 1)
        group.bucket.put("hb/liar", records.encode(beat))
        for _ in range(20):
            group.event(10**6)
    scales = [record.scale for record in audit.replay(group.bucket, group.run, 0).records]
    assert min(scales) == 0.5 and scales[-3:] == [1, 1, 1]


def test_an_island_that_stops_applies_no_further_record():
    """It has both next records between two steps, and the first one declares it dead."""
    group = begun(a_run(), "ab", 3)
    one = group.islands.pop("a")
    one.state.timing = one.state.timing._replace(period=1e9)  # it sends nothing more

    def has_both(_):
        one.tick(within_step=True)
        while one.work():
            pass
        return all(log.fetched for log in one.state.logs)

    group.until(has_both)
    first, second = one.state.logs
    first.record = first.record._replace(dead=(("a", 1),))
    before = first.state.number, second.state.number
    one.step_done(8)
    assert one.stop is not None and one.stop.again
    assert (first.state.number, second.state.number) == (before[0] + 1, before[1])
    assert [outer.digest() for outer in one.outer] == [first.state.digest, second.state.digest]


def test_a_record_that_moves_little_is_logged_once_in_a_row():
    (one,) = begun(a_run(), "a", 3).islands.values()
    record, _ = log_store.read(one._bucket, one._run, "c/0/2")

    def lines(scale):
        del one.said[:]
        state = one.outer[0]
        little = record._replace(scale=scale)
        one._after[records.gradient_name(little)] = state, state.digest()
        one._applied(Apply(little, "shift", (), (), keep=False))
        return len(one.said)

    assert [lines(scale) for scale in (1.0, 0.5, 0.2, 0.1, 1.0, 0.49)] == [0, 0, 1, 0, 0, 1]


def test_an_island_that_ends_leaves_and_a_replaced_one_does_not():
    group = begun(a_run(), "ab", 1)
    a, b = group.islands.values()
    a.stop = Stop("", again=False)
    a.leave()
    b.stop = Stop("", again=False, why=REPLACED)
    b.leave()
    b.stop, beats = None, log_store.heartbeats(group.bucket, group.run, {})
    assert beats["a"].left and not beats["b"].left
    group.until(lambda _: b.state.peers["a"].heartbeat.left)
    assert "a" not in b.state._present()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"wire_down": "topk"}, "wire_down=topk"),
        ({"aggregation": "median"}, "aggregation=median"),
        ({"outer_optimizer": "adam"}, "outer_optimizer=adam"),
        ({"snapshot_every": 0}, "snapshot_every=0"),
        ({"overlap_steps": 4}, "overlap_steps=4 .*sync_period=4"),
        ({"fragments": ((Leaf(6, 4),),)}, "fragments"),
        ({"fragments": ()}, "fragments"),
    ],
)
def test_a_run_that_cannot_be_computed_with_is_named(changes, named):
    with pytest.raises(ConfigError, match=named):
        Together(store.in_memory(), a_run(**changes), ("a",), 0)


def test_a_message_of_another_name_is_rejected():
    group = begun(a_run(), "ab", 1)
    bucket = group.bucket
    name = next(log_store.listed(bucket, "u/0"))
    bucket.put("u/0/c.1.1", bucket.get(name))
    bucket.put("hb/c", records.encode(records.Heartbeat("c", 1, 1, (1, 1), 1.0, False)))
    group.until(lambda islands: all(("c", 1) in decided_of(island) for island in islands))
    rejected = [r for one in audit.replay(bucket, group.run, 0).records for r in one.rejected]
    assert [(r.island, r.reason) for r in rejected] == [("c", "name")]


def test_a_run_of_other_keys_is_refused_by_name():
    bucket = store.in_memory()
    begun(a_run(), "a", 1, bucket=bucket)
    other = Together(bucket, a_run(wire="int8"), ("a",), 0)
    other.until_stopped()
    line = other.islands["a"].stop.line
    assert line.startswith("wire=int8 ")


def test_a_run_ends_at_its_tokens_and_is_evaluated_once_a_mark():
    bucket, run = store.in_memory(), a_run(tokens=4000, eval_tokens=500)
    group = Together(bucket, run, "ab", 0)
    group.until_stopped()
    for island in group.islands.values():
        assert not island.stop.again
    numbers = sorted(n for island in group.islands.values() for n in island.evaluations)
    assert len(numbers) == len(set(numbers)) and set(numbers) <= set(range(9)) and numbers
    assert audit.replay(bucket, run, 0).state.tokens >= 4000


def test_progress_counts_what_every_living_island_has_not_committed():
    """Of three islands: by its own alone the learning rate would jump at each record."""
    group = begun(run := a_run(tokens=10**6), "abc", 3, seed=1)
    one = group.islands["a"]
    island = Island(lambda *trees: trees, store="s", name="a", sync_period=4, total_tokens=1)
    island.run, island._runtime = run, SimpleNamespace(executor=one)
    log = one.state.logs[0]
    own = log.tokens + sum(each.message.tokens for each in log.undecided)
    before = island._read_position()
    assert own > 0 and before.expected == (log.state.tokens + 3 * own) / 10**6
    assert before.progress == log.state.tokens / 10**6
    one.state.peers = {
        name: peer._replace(changed_at=-1e9) if name != "a" else peer
        for name, peer in one.state.peers.items()
    }
    assert island._read_position().expected == (log.state.tokens + own) / 10**6


def leases(bucket):
    return [int(entry.name.split("/")[1].split(".")[0]) for entry in bucket.list_all("d")]


def test_leases_of_what_was_read_long_ago_are_deleted():
    """A snapshot each four records; those of the blocks of some 30 records are left."""
    group, counts = begun(a_run(block_tokens=32), "ab", 40), []
    for number in (60, 120):
        group.until_records(number)
        counts.append(len(leases(group.bucket)))
    assert min(leases(group.bucket)) > 1 and counts[1] < 1.5 * counts[0]
    log = audit.replay(group.bucket, group.run, 0)
    assert "data" not in {one.reason for record in log.records for one in record.rejected}
    assert log.state.top > 2 * counts[1]


def test_a_restart_of_everything_goes_on_with_the_log():
    """Rule 9: no living peer. The second programs are new incarnations and begin at theta."""
    bucket, run = store.in_memory(), a_run()
    begun(run, "ab", 5, 0, bucket)
    begun(run, "ab", 8, 1, bucket)
    log = audit.replay(bucket, run, 0)
    assert {m.incarnation for m in log.records[-1].members} == {2}
    assert log.state.number >= 8


def test_values_that_are_not_finite_end_the_island_alone():
    group = begun(a_run(), "ab", 1)
    a, b = group.islands.values()
    a.x[0] = a.x[0] * np.float32("nan")
    group.until(lambda _: a.stop is not None)
    assert "fragment 0" in a.stop.line
    before = b.state.logs[0].state.number
    group.until(lambda _: b.state.logs[0].state.number > before + 1)
    assert np.isfinite(b.outer[0].theta).all()


def test_a_program_gives_way_to_a_later_one_of_its_name():
    """Which the others may have taken it for dead by, before it saw that one's sign of life."""
    bucket, run = store.in_memory(), a_run()
    ways, islands = [], [None, None]
    for number in range(4):  # two programs; each joins again
        after = islands[number].state.incarnation if islands[number] else 0
        island = executor.Executor(bucket, run, PACE, "a", start_values(run), after=after)
        islands.append(island)
        while island.stop is None and island.state.phase != "train":
            island.tick()
            while island.work():
                pass
        ways.append((island.state.incarnation, island.stop and island.stop.why))
    assert ways == [(1, None), (2, None), (1, REPLACED), (3, None)]
