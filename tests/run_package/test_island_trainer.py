"""Islands of one process, each in a thread, over one folder."""

import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny_problem
from jax.sharding import Mesh
from tiers import corner

import maxdiloco
from maxdiloco import DiLoCo
from maxdiloco.checkpoint.saved_state import read_layout
from maxdiloco.errors import NumericsError
from maxdiloco.islands import audit, log_store, rules
from maxdiloco.islands.rules import Timing
from maxdiloco.run.island import IslandControl, LeasedText, RunProperties

H, STEPS = 4, 14
FAST = Timing(
    period=0.3, dead=5.0, grace=0.2, takeover=0.05, beat=0.1, list=0.1, poll=0.01, max_poll=0.05
)
# A message after each H steps, whatever the time.
LOCKSTEP = FAST._replace(period=1e-6, min_steps=H)
FACTS = RunProperties("d", "t", steps=100, step_tokens=4, length=4, say=print)
# Arguments of Island; a step has 4 tokens.
ELASTIC = dict(
    sync_period=H,
    outer_lr=0.7,
    outer_momentum=0.6,
    total_tokens=10**6,
    step_tokens=4,
    block_tokens=64,
    init_opt_state=lambda params: jax.tree.map(lambda x: 0 * x - 3, params),
)


def an_island(url, name, *, said=None, timing=FAST, **options):
    """An island of the tiny problem. timing: None for the one of its arguments."""
    place = int(name) if name.isdecimal() else 0
    options = {"mesh": Mesh(np.array(jax.devices()[place : place + 1]), ("diloco",))} | options
    island = maxdiloco.Island(
        tiny_problem.jax_inner_step,
        store=str(url),
        name=name,
        layer_axis=tiny_problem.layer_axis(tiny_problem.TREES["layers"]),
        say=([] if said is None else said).append,
        **ELASTIC | options,
    )
    island.timing = timing or island.timing
    # The host transport has no second encoding, so neither has the log here.
    island.run = island.run._replace(wire_down="float32")
    return island


def first_state(trainer, problem):
    values = first_values(problem)
    trainer.bind(*values)
    return trainer.init_program(lambda *given: given)(*values)


def first_values(problem):
    """The parameters and the moments before the first step."""
    params = problem.named(problem.params)
    return params, jax.tree.map(np.zeros_like, params)


def batch_of(problem, t, place=0):
    return jax.tree.map(lambda x: x[place : place + 1], problem.batch(t, 4))


def steps_of(trainer, place, steps, problem=None):
    """Train from the start; the state after the last step."""
    problem = problem or tiny_problem.problem("layers")
    state = trainer.rejoin(first_state(trainer, problem))
    for t in range(1, steps + 1):
        state, _ = trainer.step(state, batch_of(problem, t, place))
        if trainer.timing == LOCKSTEP:
            decided(trainer)
    return state


def decided(trainer):
    """Wait until what process 0 of an island has sent is in a record that it has read."""

    def all_decided():
        logs = trainer._runtime.executor.state.logs
        return all(not log.undecided or (log.record is not None and log.fetched) for log in logs)

    if jax.process_index() == 0:
        for _ in range(2000):
            if all_decided():
                return
            time.sleep(0.01)
        raise AssertionError("no record in 20 s")


def started(trainer):
    """The state from which it goes on, and its next batches."""
    problem = tiny_problem.problem("layers", steps=2000)
    state = trainer.rejoin(first_state(trainer, problem))
    return state, lambda t, place=0: batch_of(problem, t % 2000 + 1, place)


def until(trainer, state, batch, done):
    """Train until done(), at a hundred steps a second."""
    pause = threading.Event()
    for _ in range(2000):
        if done():
            return state
        state, _ = trainer.step(state, batch(state.t))
        pause.wait(0.01)
    raise AssertionError("it goes on for ever")


def ledger_of(trainer):
    return trainer._runtime.executor.state.logs[0].state


def records_of(trainer):
    return ledger_of(trainer).number


def in_threads(work, count):
    """work(m) of each, at once; their results."""
    found = [None] * count

    def one(m):
        found[m] = work(m)

    threads = [threading.Thread(target=one, args=(m,), daemon=True) for m in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in found
    return found


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def ended(trainer, state):
    """theta and replicas of a trainer that is done."""
    found = leaves(state.outer), leaves(state.params)
    trainer.close()
    return found


def in_lockstep(store, M, **options):
    """theta and replicas by island, whose records each have a message of every island."""

    def one(m):
        trainer = an_island(store, str(m), timing=LOCKSTEP, min_members=M, **options)
        return ended(trainer, steps_of(trainer, m, STEPS))

    return in_threads(one, M)


def through_host(M, **options):
    algorithm = DiLoCo(
        tiny_problem.jax_inner_step,
        num_replicas=M,
        sync_period=H,
        outer_lr=0.7,
        outer_momentum=0.6,
        transport="host",
        layer_axis=tiny_problem.layer_axis(tiny_problem.TREES["layers"]),
        **options,
    )
    problem = tiny_problem.problem("layers")
    state = algorithm.init(*first_values(problem))
    for t in range(1, STEPS + 1):
        state, _ = algorithm.step(state, problem.batch(t, M))
    return ended(algorithm, state)


GRID = [
    (M, wire, tau, feedback, merge)
    for M in (1, 2, 3)
    for wire in ("float32", "bfloat16", "int8", "float4_e3m0")
    for tau in (0, 2)
    for feedback in ((False, True) if wire != "float32" else (False,))
    for merge in ("mean", "radial_directional_mean")
]
# A value that replica 2 sends at step 12 lies 3e-8 from the middle of two bfloat16, 2^-13 apart: a
# sum in another order takes the other one.
ON_AN_EDGE = (3, "bfloat16", 2, True, "radial_directional_mean")


@pytest.mark.parametrize(
    ("M", "wire", "tau", "feedback", "merge"),
    corner(
        GRID,
        [
            (2, "float32", 0, False, "mean"),
            (2, "float4_e3m0", 2, True, "radial_directional_mean"),
        ],
    ),
)
def test_islands_in_lockstep_have_the_numbers_of_the_host_carrier(
    M, wire, tau, feedback, merge, tmp_path, few_compiler_passes
):
    """Both round float32 sums, each in its order: some 2^-24 of each value a record."""
    alpha = 0.25 if tau else 0.0
    exchange = dict(
        exchange_dtype=wire,
        overlap_steps=tau,
        alpha=alpha,
        aggregation=merge,
        error_feedback=feedback,
    )
    off = 2e-4 if (M, wire, tau, feedback, merge) == ON_AN_EDGE else 1e-5
    found = in_lockstep(tmp_path / "store", M, **exchange)
    theta, replicas = through_host(M, **exchange)
    start = tiny_problem.problem("layers").params
    for m, (own_theta, own) in enumerate(found):
        for a, b, x, xs, first in zip(own_theta, theta, own, replicas, start, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=off)
            np.testing.assert_allclose(x[0], xs[m], rtol=1e-5, atol=off)
            assert np.abs(a - first).max() > 0.1
        assert all(np.array_equal(a, b) for a, b in zip(own_theta, found[0][0], strict=True))
    audit.replay(log_store.open_bucket(str(tmp_path / "store")), run_of(tmp_path), 0)


def run_of(tmp_path):
    return audit.read_run(log_store.open_bucket(str(tmp_path / "store")))


def test_elastic_islands_agree_read_once_and_the_log_adds_up(tmp_path, few_compiler_passes):
    """Three islands go on until 400 tokens, 100 steps of a sequence each, are committed: the places
    of the data that they read are all different."""
    options, url = dict(total_tokens=400, overlap_steps=1, alpha=0.5), tmp_path / "store"
    said = [[] for _ in range(3)]

    def work(m):
        trainer = an_island(url, "abc"[m], said=said[m], num_fragments=2, **options)
        (state, batch), read = started(trainer), []
        control = IslandControl(trainer, FACTS)
        text = LeasedText(SimpleNamespace(computed=False), trainer, length=4)
        while not trainer.done:
            read += text.sequences(state.t + 1)
            rate = control.learning_rate(lambda count: count, state.t + 1)
            state, _ = trainer.step(state, batch(state.t, m))
            pause.wait(0.02)
        trainer.leave()
        return state, rate, read, trainer.extra_metrics(state)

    pause = threading.Event()
    results = in_threads(work, 3)
    log = audit.replay(log_store.open_bucket(str(url)), run_of(tmp_path), 0)
    assert log.state.tokens >= 400 and len(log.records) > 2
    assert {m.island for r in log.records for m in r.members} == {"a", "b", "c"}
    reads = [each for _, _, read, _ in results for each in read]
    places = [first + i for first, count in reads for i in range(count)]
    assert len(places) >= 100 and len(set(places)) == len(places)
    for state, rate, _, metrics in results:
        assert state.t >= 20 and 0 < rate <= 99
        assert metrics["islands/progress"] >= 1 and metrics["islands/requests"] > 0
    assert any("island b has joined" in line for line in said[0] + said[2])


def test_the_global_batch_is_whole_again_after_a_death_and_after_a_join(
    tmp_path, few_compiler_passes
):
    """Five sequences of 4 tokens: islands a and b have 2 and 3 of them. Once b is killed, a has
    all 5. Then c joins, and a and c have 2 and 3. A step reads as many sequences as it has, no
    sequence is read by two islands that are alive, and the log has records of each situation."""
    timing, url = FAST._replace(dead=0.8), tmp_path / "store"
    shared = dict(timing=timing, global_batch_size=5, step_tokens=20, num_fragments=2)
    killed, ended = threading.Event(), threading.Event()
    sizes, read, before = {}, {name: [] for name in "abc"}, []

    def train(name, done):
        trainer = an_island(url, name, **shared)
        state, batch = started(trainer)
        text = LeasedText(SimpleNamespace(computed=False), trainer, length=4)
        while not done():
            parts = text.sequences(state.t + 1)
            sizes[name] = trainer.batch_size(state.t + 1)
            assert sum(count for _, count in parts) == sizes[name]
            read[name] += [first + i for first, count in parts for i in range(count)]
            state, _ = trainer.step(state, batch(state.t))
            time.sleep(0.01)
        return trainer

    def records():
        bucket = log_store.open_bucket(str(url))
        return audit.replay(bucket, audit.read_run(bucket), 0).records

    def per_step(record):
        """Tokens of a step, by island."""
        return {one.island: one.tokens / max(one.steps, 1) for one in record.members}

    def has_both(first, second):
        both = {first: 2 * 4, second: 3 * 4}
        return (sizes.get(first), sizes.get(second)) == (2, 3) and both in map(per_step, records())

    def work(m):
        if m == 0:
            train("a", ended.is_set).leave()
        elif m == 1:
            train("b", lambda: has_both("a", "b"))._runtime.close(drain=False)
            before.extend(read["a"])
            killed.set()
        else:
            assert killed.wait(30)
            while {"a": 5 * 4} not in map(per_step, records()[-3:]):
                time.sleep(0.1)
            train("c", lambda: has_both("a", "c")).leave()
            ended.set()
        return True

    in_threads(work, 3)
    for together in (before + read["b"], read["a"] + read["c"]):
        assert len(set(together)) == len(together) > 20


def test_islands_with_an_automatic_period_send_at_the_period_of_the_log(
    tmp_path, few_compiler_passes
):
    """Four steps of 10 ms and messages in a folder allow the least period, 1 s."""
    trainers = [
        an_island(tmp_path / "store", name, timing=None, period_seconds="auto") for name in "ab"
    ]

    def work(m):
        trainer = trainers[m]
        state, batch = started(trainer)
        until(trainer, state, batch, lambda: records_of(trainer) >= 4)
        trainer.leave()
        return trainer._runtime.executor.state

    for state in in_threads(work, 2):
        shared = rules.shared_period(state.logs[0].state)
        assert 1.0 <= state.timing.period == shared < 20.0
    log = audit.replay(log_store.open_bucket(str(tmp_path / "store")), run_of(tmp_path), 0)
    periods = {m.island: m.period for record in log.records for m in record.members}
    assert periods.keys() == {"a", "b"} and min(periods.values()) >= 1.0


def test_who_comes_back_keeps_its_moments_where_it_is_not_late(tmp_path, few_compiler_passes):
    """With the newest checkpoint or one of two records ago; else they are as at the start, here -3,
    and the learning rate rises over H = 4 steps: a quarter, a half. A new run has no warm-up."""
    first = an_island(tmp_path / "store", "a")
    state, batch = started(first)
    assert first.warmup(1) == 1.0
    state = until(first, state, batch, lambda: records_of(first) >= 4)
    note = first.checkpoint(state)[1]
    head = note["records"]
    first.leave()
    values, _ = first_values(problem := tiny_problem.problem("layers"))
    for records, rates in ((head, [1, 1]), (head - 2, [1, 1]), (head - 3, [0.25, 0.5])):
        again = an_island(tmp_path / "store", "a")
        again.bind(values, values)
        state = again.init_program(lambda *given: given)(values, values)
        again.restore_plan(read_layout(note | {"records": records}, same_rules=True))
        state = again.rejoin(state)
        assert [again.warmup(t) for t in (1, 2)] == rates
        for moments, x in zip(leaves(state.opt_state), problem.params, strict=True):
            np.testing.assert_array_equal(moments[0], x if rates == [1, 1] else 0 * x - 3)
        again.leave()


def test_an_island_that_was_frozen_joins_again(tmp_path, few_compiler_passes):
    """It stands still past its death: the other says so, goes on, and says that it is back."""
    timing, said = FAST._replace(dead=0.8), [[], []]
    trainers = [an_island(tmp_path / "store", "ab"[m], said=said[m], timing=timing) for m in (0, 1)]
    froze = threading.Event()

    def work(m):
        trainer = trainers[m]
        state, batch = started(trainer)
        state = until(trainer, state, batch, lambda: records_of(trainer) >= 3)
        if m == 1:
            state = until(trainer, state, batch, lambda: sent(trainer))
            with trainer._runtime._changed:  # no thread of it goes on
                froze.wait(20)
        else:
            state = until(trainer, state, batch, lambda: dead(trainer))
            froze.set()
        state = until(trainer, state, batch, lambda: "joins again" in " ".join(said[1]))
        head = records_of(trainer)
        until(trainer, state, batch, lambda: records_of(trainer) > head + (1 if m else 4))
        trainer.leave()
        return True

    in_threads(work, 2)
    assert "island b joins again: the others took it for dead" in said[1]
    assert any(line.startswith("island b has joined as incarnation 2") for line in said[1])
    about_b = [line for line in said[0] if line.startswith("island b")]
    assert about_b[:2] == [
        "island b has joined", "island b is considered dead: no heartbeat for 0.8 s"
    ] and about_b[2].startswith("island b has returned")  # fmt: skip


def sent(trainer):
    return any(mark.island == "b" for mark in ledger_of(trainer).watermarks)


def dead(trainer):
    return ("b", 1) in ledger_of(trainer).dead


def test_an_unavailable_store_is_logged_until_it_is_back(tmp_path, few_compiler_passes):
    said = []
    trainer = an_island(tmp_path / "store", "a", said=said)
    state, batch = started(trainer)
    state = until(trainer, state, batch, lambda: records_of(trainer) >= 2)
    bucket, head = trainer._bucket._bucket, records_of(trainer)
    trainer._bucket._bucket = Away()
    # Beside the steps, which wait once two messages are undecided.
    back = threading.Timer(2.0, setattr, (trainer._bucket, "_bucket", bucket))
    back.start()
    state = until(trainer, state, batch, lambda: records_of(trainer) > head + 2)
    trainer.leave()
    away, back = (line for line in said if line.startswith("the store"))
    assert away.endswith("No space") and back == "the store is back"


class Away:
    """A bucket whose every request fails."""

    def __getattr__(self, name):
        raise OSError(28, "No space")


def test_values_that_are_not_finite_end_an_island(tmp_path, few_compiler_passes):
    problem = tiny_problem.problem("layers")
    nan = np.float32("nan")
    targets = [[[x * nan for x in leaf] for leaf in step] for step in problem.targets]
    trainer = an_island(tmp_path / "store", "a")
    with pytest.raises(NumericsError, match="a: .* fragment 0 "):
        steps_of(trainer, 0, 10**4, problem._replace(targets=targets * 400))
    trainer.leave()


def test_an_island_that_diverges_while_it_waits_names_its_step(
    tmp_path, few_compiler_passes, monkeypatch
):
    """A message is due before the next step, which does not begin."""
    trainer = an_island(tmp_path / "store", "a")
    state, batch = started(trainer)
    log = trainer._runtime.executor.state.logs[0]
    while not log.steps:  # it may have sent them
        state, _ = trainer.step(state, batch(state.t))
    params = trainer._values.params
    monkeypatch.setattr(trainer._values, "params", lambda *args: params(*args) * np.float32("nan"))
    time.sleep(2 * FAST.period)
    with pytest.raises(NumericsError, match=f"^step {state.t}: island a: "):
        trainer.step(state, batch(state.t))
    trainer.leave()
