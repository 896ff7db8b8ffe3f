"""Streaming, delayed and eager exchanges on every wire: equal bits on slices and in every copy,
resumed between send and apply, and untouched by one replica's NaN.

Trainers are made once; each keeps the programs it has compiled.

    # R replicas
"""

import functools
import json
import os
import socket
import sys

import jax
import numpy as np
import process_tools
import pytest
from streaming import (
    MODES,
    SHAPES,
    STOPS,
    WIRES,
    digests,
    made,
    numbers,
    placed,
    poisoned,
    steps,
)
from tiers import corner, full

from maxdiloco.checkpoint import saved_state
from maxdiloco.checkpoint.checkpointer import Checkpointer
from maxdiloco.engine.trainer import SavedLayout
from maxdiloco.errors import NumericsError

CASES = [(mode, wire) for mode in MODES for wire in WIRES]
CORNER = list(zip(MODES, reversed(WIRES), strict=True))  # each mode and each wire once


@pytest.fixture(scope="module", autouse=True)
def few_compiler_passes():
    """As in test_against_oracle.py: nearly all the time goes into compiling."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    trainer.cache_clear()
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def trainer(mode, wire, *, slots=2):
    """A trainer, what gives its first state, and the names of what it has compiled."""
    compiles = []
    algorithm = made(mode, wire, slots, compiled=compiles.append)
    first = algorithm.init(placed(algorithm.mesh), ())
    lies = jax.tree.map(lambda x: x.sharding, first)
    arrays = jax.tree.map(np.array, first)
    return algorithm, lambda: jax.device_put(arrays, lies), compiles


def host(tree):
    return [np.array(x) for x in jax.tree.leaves(tree)]


def assert_equal_bits(found, wanted):
    for a, b in zip(host(found), host(wanted), strict=True):
        assert a.tobytes() == b.tobytes()


def assert_copies_agree(tree):
    """Every device that holds a part of an array holds the same bits of it."""
    for leaf in jax.tree.leaves(tree):
        held = {}
        for shard in leaf.addressable_shards:
            held.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert {len(copies) for copies in held.values()} == {1}


def layers_applied(algorithm, t):
    """The layers that a fragment applied after step t holds."""
    plans = algorithm.layout.plans
    applied = [plans[event.fragment].fragment for event in algorithm.schedule.applies(t)]
    return [layer for fragment in applied for layer in fragment.layers]


@pytest.mark.parametrize("mode, wire", corner(CASES, CORNER))
def test_all_copies_have_the_same_bits_after_every_apply(mode, wire):
    """theta on both slices; and with alpha 0 all replicas hold what was applied. Control: what was
    not is unequal."""
    algorithm, start, _ = trainer(mode, wire)
    for state in steps(algorithm, start(), until=13):
        assert_copies_agree((state.outer, state.outer_opt))
        applied = layers_applied(algorithm, state.t)
        if MODES[mode]["alpha"] == 0.0 and applied:
            kernel_R = np.array(state.params["kernel"])
            equal = [(kernel_R == kernel_R[0])[:, layer].all() for layer in range(4)]
            assert equal == [layer in applied for layer in range(4)]
            np.testing.assert_array_equal(
                kernel_R[0, applied], np.array(state.outer["kernel"])[applied]
            )


@pytest.mark.parametrize(
    "mode, wire",
    [
        full("at once", "int8"),
        ("overlapped", "float4_e3m0"),
        full("delayed", "bfloat16"),
        full("eager", "float4_e3m0"),
    ],
)
def test_four_replicas_compute_the_same_bits_on_one_slice_and_on_two(mode, wire):
    one, start_one, _ = trainer(mode, wire, slots=1)
    two, start_two, _ = trainer(mode, wire)
    for a, b in zip(steps(one, start_one()), steps(two, start_two()), strict=True):
        assert_equal_bits((a.params, a.outer), (b.params, b.outer))


@pytest.mark.parametrize("mode, wire", corner(CASES, CORNER))
def test_a_run_resumed_between_send_and_apply_goes_on_with_the_same_bits(mode, wire, tmp_path):
    """Saved after step 8, which sends what step 11 applies while what 6 sent waits for 9, and after
    9, when one of two chunks has gone."""
    algorithm, start, _ = trainer(mode, wire)
    with Checkpointer(tmp_path / "all", max_to_keep=None, use_async=False) as checkpointer:
        for state in steps(algorithm, start()):
            if state.t in (8, 9):
                note = algorithm.note(state)
                assert checkpointer.save(state.t, algorithm.saved_items(state), note)
        wanted = host(state)
        layout = SavedLayout(**note, same_rules=True)
        for t in (9, 8):
            back = checkpointer.restore(lambda meta: saved_state.abstract_items(algorithm, layout))
            assert back.step == t
            again = algorithm.restored(back.items, layout, t=t)
            flight = host((again.outgoing, again.incoming))
            assert any(x.any() for x in flight) == (mode != "at once")
            *_, last = steps(algorithm, again)
            assert_equal_bits(last, wanted)
            back.path.rmtree()  # so that the one before it is the newest


@pytest.mark.parametrize("mode", STOPS)
def test_a_value_of_one_replica_that_is_not_finite_changes_no_bit_of_the_others(mode):
    """Until the run stops, the other replicas and theta are those of a run without it, but for the
    fragment that holds it: from its apply on, that takes inner steps alone."""
    wire, bad, found, last = STOPS[mode]
    algorithm, start, _ = trainer(mode, wire)
    others, own = [0, 1, 3], [1, 3]
    reference = list(map(host_of_others, steps(algorithm, start())))
    seen = []
    with pytest.raises(NumericsError) as error:
        seen.extend(map(host_of_others, poisoned(algorithm, start(), bad)))
    assert len(seen) == last
    assert error.value.exit_code == 4
    said = f"step {last}: the outer gradient of replica 2 has a NaN or infinity in params['kernel']"
    assert str(error.value).startswith(said)
    for t, (before, got) in enumerate(zip([None, *seen], seen, strict=False), start=1):
        wanted = dict(reference[t - 1])
        if t >= found:
            wanted["params.kernel"] = wanted["params.kernel"].copy()
            wanted["outer.kernel"] = wanted["outer.kernel"].copy()
            step = numbers()[1][t - 1]["kernel"][others][:, own]
            wanted["params.kernel"][:, own] = before["params.kernel"][:, own] + step
            wanted["outer.kernel"][..., own, :, :] = before["outer.kernel"][..., own, :, :]
        for name, array in wanted.items():
            assert got[name].tobytes() == array.tobytes(), (t, name)


def host_of_others(state):
    """Replicas 0, 1 and 3, and theta; eager: theirs."""
    found = {}
    for name in SHAPES:
        found[f"params.{name}"] = np.array(state.params[name])[[0, 1, 3]]
        theta = np.array(state.outer[name])
        found[f"outer.{name}"] = theta[[0, 1, 3]] if theta.ndim > len(SHAPES[name]) else theta
    return found


@pytest.fixture
def two_processes(tmp_path):
    """streaming_process.py as two processes that have ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    together = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": "2",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(process_tools.ROOT), *sys.path]),
    }
    command = [sys.executable, "tests/integration/streaming_process.py"]
    running = [
        process_tools.Process(command, tmp_path / f"{i}.log", together | {"JAX_PROCESS_ID": str(i)})
        for i in range(2)
    ]
    try:
        for process in running:
            process.end()
        yield running
    finally:
        for process in running:
            process.kill()


@pytest.mark.full
def test_two_processes_have_the_bits_of_one_and_stop_at_one_step_for_one_replicas_nan(
    two_processes,
):
    """Each with a slice of two devices; the NaN is in replica 2, which is in process 1. Exit code
    4 of both, with the same line that one process ends with."""
    assert [process.end() for process in two_processes] == [4, 4], two_processes[0].text()
    told = [
        [json.loads(line) for line in process.text().splitlines() if line.startswith("{")]
        for process in two_processes
    ]
    for process in two_processes:
        (line,) = process.errors()
        assert "replica 2 has a NaN or infinity in params['kernel']" in line
    for mode, *both in zip(STOPS, *told, strict=True):
        wire, bad, _, last = STOPS[mode]
        algorithm, start, _ = trainer(mode, wire)
        wanted = []
        with pytest.raises(NumericsError) as error:
            wanted.extend(map(digests, poisoned(algorithm, start(), bad)))
        assert len(wanted) == last
        for one in both:
            assert one["error"] == str(error.value)
            for found, whole in zip(one["digests"], wanted, strict=True):
                assert found == {name: whole[name] for name in found}
        for first, second, whole in zip(*(one["digests"] for one in both), wanted, strict=True):
            assert first.keys() | second.keys() == whole.keys()
