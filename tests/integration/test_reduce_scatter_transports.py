"""Reduce-scatter: the same results with both transports, in all wire formats and modes.

Bits are equal with both transports and any number of slices, and with float32, whose means lose
nothing, those of all-gather. Results equal the oracle that encodes the means again.

# R replicas
"""

import functools
import itertools

import jax
import numpy as np
import pytest
import streaming
from streaming import copied, placed, poisoned, steps, with_start
from test_against_oracle import simulate
from test_wires_against_oracle import (
    DELTA,
    FAR,
    H,
    both,
    clear_of_edges,
    compare,
    distances,
    guarded,
)
from tiers import corner, full
from tiny_problem import jax_inner_step
from wire_codecs import CODECS

from maxdiloco import DiLoCo
from maxdiloco.engine.trainer import SavedLayout
from maxdiloco.errors import NumericsError

pytestmark = pytest.mark.usefixtures("few_compiler_passes")

WIRES = ("float32", "bfloat16", "int8", "float4_e3m0", "int2")
MODES = {
    "at once": dict(alpha=0.0),
    "one step": dict(alpha=0.25, overlap_steps=1),  # which brings the parts; the means wait
    "two steps": dict(alpha=0.25, overlap_steps=3),  # one each, and two fragments in flight
    "five steps": dict(alpha=0.25, overlap_steps=5, num_fragments=1),  # chunks, with float32
    "delayed": dict(alpha=0.0, round_overlap="delayed"),
}


@functools.lru_cache(16)
def trainer(mode, wire, M, carrier="xla", slots=None, collective="reduce_scatter"):
    """A trainer and what gives its first state."""
    options = dict(num_replicas=M, in_slice=2 if M < 8 else 1, transport=carrier)
    options |= MODES[mode] | dict(collective=collective)
    return with_start(streaming.made("at once", wire, slots or M, **options))


def values(states):
    """Bits of the replicas and theta after each step."""
    return [
        [np.array(x).tobytes() for x in jax.tree.leaves((s.params, s.outer, s.outer_opt))]
        for s in states
    ]


CASES = list(itertools.product(MODES, WIRES, (2, 3, 4, 8)))
CORNER = [("one step", "float4_e3m0", 4), ("two steps", "int2", 3), ("delayed", "bfloat16", 2)]


@pytest.mark.parametrize("mode, wire, M", corner(CASES, CORNER))
def test_both_transports_have_equal_bits_and_resume_each_other(mode, wire, M):
    """Saved with parts in flight, with means in flight, and between."""
    make = functools.partial(trainer, mode, wire, M)
    streaming.assert_carriers_agree_and_resume(make, (7, 8, 9, 10))


OVERLAPPING = [name for name in streaming.MODES if name != "eager"]
CARRIERS, EXCHANGES = ("xla", "host"), ("all_gather", "reduce_scatter")
CONTRACT = [("five steps", "float32", 2), ("delayed", "bfloat16", 2)]


@pytest.mark.parametrize("mode, wire, M", corner(CASES, CONTRACT))
def test_transports_share_bits_and_collectives_with_float32(mode, wire, M):
    """Both transports always, and one slice with many. All-gather with float32 only: in other wire
    formats the means are encoded again."""
    found = {
        (carrier, exchange): values(steps(algorithm, start()))
        for carrier, exchange in itertools.product(CARRIERS, EXCHANGES)
        for algorithm, start in [trainer(mode, wire, M, carrier, collective=exchange)]
    }
    for exchange in EXCHANGES:
        assert found["xla", exchange] == found["host", exchange]
    many, gathered = found["host", "reduce_scatter"], found["host", "all_gather"]
    assert (many == gathered) == (wire == "float32")
    algorithm, start = trainer(mode, wire, M, slots=1)
    assert many == values(steps(algorithm, start()))


@pytest.mark.parametrize(
    "mode, wire, M",
    corner(
        itertools.product(OVERLAPPING, [name for name in CODECS if name != "topk"], (2, 4)),
        [("overlapped", "float4_e3m0", 2), ("delayed", "int2", 2)],
    ),
)
def test_rounds_equal_the_oracle_that_encodes_the_means_again(mode, wire, M):
    """Which is 100 tolerances from one that does not, but for float32. The mean of bfloat16 values
    is exact, and often halfway between two of them: on an edge, but on the same one."""
    length = 3 * H + 2
    settings, arguments = both(wire, mode, P=3, M=M, outer_lr=0.5, outer_momentum=0.6)
    names, exact = list(CODECS), wire == "bfloat16"
    reduced = CODECS[min(wire, "int8", key=names.index)]
    delta = DELTA / 5 if exact else DELTA  # its steps are small, and more of them near
    reducer = reduced if exact else guarded(reduced, delta)
    codec = guarded(CODECS[wire], delta)
    problem, expected = clear_of_edges(settings, length, codec, reduced=reducer)
    compare(DiLoCo(jax_inner_step, collective="reduce_scatter", **arguments), problem, expected)
    plain = distances(simulate(settings, problem, length, CODECS[wire]), expected)
    assert wire == "float32" or max(plain) > FAR


def test_error_feedback_is_that_of_all_gather():
    """Residuals of the first send, to the bit; a later one is of other outer gradients."""
    residuals = []
    for exchange in ("all_gather", "reduce_scatter"):
        options = dict(num_replicas=2, error_feedback=True, collective=exchange)
        algorithm = streaming.made("at once", "float4_e3m0", 2, **options)
        (*_, state) = steps(algorithm, algorithm.init(placed(algorithm.mesh), ()), until=2)
        residuals.append([np.array(x) for x in jax.tree.leaves(state.residual)])
    for x, y in zip(*residuals, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(x.any() for x in residuals[0])


@pytest.mark.parametrize("mode", ["two steps", full("delayed")])
def test_a_bad_value_stops_the_run_and_names_its_replica(mode):
    """One slice has its part, and passes the flag on to all; outer parameters stay finite."""
    algorithm, start = trainer(mode, "float4_e3m0", 4)
    seen = []
    with pytest.raises(NumericsError, match="replica 2 .*'kernel'"):
        seen.extend(np.array(x.outer["kernel"]) for x in poisoned(algorithm, start(), np.nan))
    assert len(seen) > 12 and np.isfinite(seen).all()


def test_another_collective_drops_what_is_in_flight():
    """Sent after step 8, and resumed there with the other collective, both ways."""
    for before, after in itertools.permutations(("all_gather", "reduce_scatter")):
        algorithm, start = trainer("two steps", "int8", 2, collective=before)
        *_, state = steps(algorithm, start(), until=8)
        layout = SavedLayout(**algorithm.checkpoint(state)[1], same_rules=True)
        reader, _ = trainer("two steps", "int8", 2, collective=after)
        reading = reader.restore_plan(layout)
        assert [line.partition(":")[0] for line in reading.lines(8)] == ["dropped"]
        items = copied(algorithm.checkpoint(state)[0])
        again = reading.state_of({name: items[name] for name in reading.items}, t=8)
        assert again.dropped_until == 8 and len(list(steps(reader, again, until=16))) == 8
