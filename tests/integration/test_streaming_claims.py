"""Streaming, delayed and eager exchanges on every wire, inside programs and through host memory:
equal bits on slices and in every copy, resumed between send and apply, and untouched by one
replica's NaN.

Trainers are made once; each keeps the programs it has compiled.

# R replicas
"""

import functools
import json
import os
import re
import sys

import jax
import numpy as np
import pytest
from run import FEW_OPTIMIZATIONS, ROOT, Process, cluster_environs
from streaming import (
    MODES,
    SHAPES,
    STOPS,
    WIRES,
    assert_carriers_agree_and_resume,
    digests,
    made,
    numbers,
    poisoned,
    steps,
    with_start,
)  # fmt: skip
from tiers import corner, full

from maxdiloco.errors import NumericsError
from maxdiloco.planning.hlo import notation

# As in test_against_oracle.py nearly all the time goes into compiling.
pytestmark = pytest.mark.usefixtures("few_compiler_passes")

CASES = [(mode, wire) for mode in MODES for wire in WIRES]
# But for eager, with the merge rda, too.
FEEDBACK = [("at once", "int2"), ("overlapped", "topk"), ("delayed", "int2"), ("eager", "topk")]
# Each mode, and the wires whose encoding is most at risk; two of them are compiled below, too.
CORNER = [("at once", "int8"), ("overlapped", "float4_e3m0"), ("delayed", "int2")]
CORNER += [("eager", "topk")]


@functools.cache
def trainer(mode, wire, carrier="xla", slots=2):
    """A trainer and what gives its first state."""
    merge = "radial_directional_mean" if (mode, wire) in FEEDBACK and mode != "eager" else "mean"
    return with_start(made(mode, wire, slots, transport=carrier, aggregation=merge))


def assert_replicas_hold_what_was_applied(algorithm, state):
    """With alpha 0. Control: the layers that were not applied after this step are unequal."""
    plans = algorithm.layout.plans
    applied = [plans[event.fragment].fragment for event in algorithm.schedule.applies(state.t)]
    layers = [layer for fragment in applied for layer in fragment.layers]
    if layers:
        kernel_R, theta = np.array(state.params["kernel"]), np.array(state.outer["kernel"])
        equal = [(kernel_R == kernel_R[0])[:, layer].all() for layer in range(4)]
        assert equal == [layer in layers for layer in range(4)]
        np.testing.assert_array_equal(kernel_R[0, layers], theta[layers])


@pytest.mark.parametrize("mode, wire", corner(CASES + FEEDBACK, CORNER))
def test_both_transports_have_equal_bits_and_resume_each_other(mode, wire):
    """Saved after 8 and 9: one exchange was just sent, one has one of two chunks there, one is
    whole."""

    def check(algorithm, state):
        if MODES[mode]["alpha"] == 0.0:
            assert_replicas_hold_what_was_applied(algorithm, state)

    assert_carriers_agree_and_resume(functools.partial(trainer, mode, wire), (8, 9), check)


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
    one, start_one = trainer(mode, wire, slots=1)
    two, start_two = trainer(mode, wire)
    for both in zip(steps(one, start_one()), steps(two, start_two()), strict=True):
        a, b = ([np.array(x).tobytes() for x in jax.tree.leaves((s.params, s.outer))] for s in both)
        assert a == b


@pytest.mark.parametrize("mode", corner(MODES, ["at once", "overlapped"]))
def test_no_program_of_the_host_carrier_sends_to_another_slice(mode):
    """Positive control: the programs of the other transport do."""
    sends = {}
    for carrier in ("xla", "host"):
        algorithm, _ = trainer(mode, "int8", carrier)
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            algorithm.abstract_state.params,
        )
        lines = [
            line
            for c in algorithm.calls(batch)
            for line in c.program.compile(*c.args).as_text().splitlines()
            if " all-gather" in line and "replica_groups" in line
        ]
        sends[carrier] = any((0, 2) in notation.groups_of(line) for line in lines)
    assert sends == {"xla": True, "host": False}


def host_of_others(state):
    """Replicas 0, 1 and 3, and theta; eager: theirs."""
    found = {}
    for name in SHAPES:
        found[f"params.{name}"] = np.array(state.params[name])[[0, 1, 3]]
        theta = np.array(state.outer[name])
        found[f"outer.{name}"] = theta[[0, 1, 3]] if theta.ndim > len(SHAPES[name]) else theta
    return found


@pytest.mark.parametrize("mode", STOPS)
def test_a_nan_in_one_replica_changes_no_bit_of_the_others(mode):
    """Until the run stops, the other replicas and theta are those of a run without it, but for the
    fragment that holds it: from its apply on, that takes inner steps alone."""
    wire, bad, found, last = STOPS[mode]
    algorithm, start = trainer(mode, wire)
    others, own = [0, 1, 3], [1, 3]
    reference = list(map(host_of_others, steps(algorithm, start())))
    seen = []
    with pytest.raises(NumericsError) as error:
        seen.extend(map(host_of_others, poisoned(algorithm, start(), bad)))
    assert len(seen) == last
    assert error.value.exit_code == 4
    assert re.match(rf"step {last}: .* replica 2 .*params\['kernel'\]", str(error.value))
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


@pytest.fixture
def together(started):
    """Run streaming_process.py in several processes; return their exit codes and outputs."""

    def run(count, *arguments):
        environ = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | FEW_OPTIMIZATIONS
        command = [sys.executable, "tests/integration/streaming_process.py", *arguments]
        started.extend(Process(command, environ | own) for own in cluster_environs(count))
        codes = [process.wait_for_exit() for process in started]
        return codes, [process.output for process in started]

    return run


@pytest.mark.parametrize(
    ("count", "slots", "replicas", "cases"),
    [
        (2, 2, 4, ["eager:int8", "overlapped:float4_e3m0:pinned_host:reduce_scatter"]),
        full(2, 2, 4, ["at once:float32", "overlapped:float4_e3m0:pinned_host",
                       "delayed:bfloat16"]),
        full(3, 3, 3, ["overlapped:int2", "eager:float4_e3m0:pinned_host",
                       "at once:int8:device:reduce_scatter"]),
        full(4, 2, 2, ["at once:int8", "overlapped:float32", "delayed:int2:device:reduce_scatter"]),
    ],
)  # fmt: skip
def test_several_processes_exchange_the_bits_that_programs_do(
    together, count, slots, replicas, cases
):
    """Two devices in a slice: in one process each except for the last, where two share a slice."""
    codes, texts = together(count, str(slots), str(replicas), *cases)
    assert codes == [0] * count, texts[0]
    for text in texts:
        lines = [line for line in text.splitlines() if line.startswith("equal ")]
        for line, case in zip(lines, cases, strict=True):
            assert line.startswith(f"equal {case.replace(':', ' ')}")
            assert not line.endswith(": 0 bytes received")


@pytest.mark.full
def test_two_processes_have_the_bits_of_one_and_stop_at_a_nan(together):
    """Each with a slice of two devices; the NaN is in replica 2, which is in process 1. Both exit
    with 4 and the error of one process."""
    codes, texts = together(2, "2", "4")
    assert codes == [4, 4], texts[0]
    assert all(re.search(r"replica 2 .*params\['kernel'\]", text) for text in texts)
    told = [[json.loads(line) for line in text.splitlines() if line[:1] == "{"] for text in texts]
    for mode, *both in zip(STOPS, *told, strict=True):
        wire, bad, _, last = STOPS[mode]
        algorithm, start = trainer(mode, wire)
        wanted = []
        with pytest.raises(NumericsError) as error:
            wanted.extend(map(digests, poisoned(algorithm, start(), bad)))
        assert len(wanted) == last
        assert [one["error"] for one in both] == [str(error.value)] * 2
        for first, second, whole in zip(*(one["digests"] for one in both), wanted, strict=True):
            assert first | second == whole
            assert second | first == whole
