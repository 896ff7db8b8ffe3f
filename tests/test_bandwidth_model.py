"""The bandwidth model: by hand, and against the published tables."""

import pytest

from benchmarks import bandwidth_model as model
from benchmarks.bandwidth import own, simulator
from benchmarks.bandwidth import tables as published
from benchmarks.bandwidth.tables import Size
from maxdiloco.diloco.schedule import Schedule
from maxdiloco.planning.exposure import least_gbps

ONE = Size("one layer", 1, 1e9, 3.0)  # 1 s forward, 2 s backward


def utilisation(sends, *, steps, seconds):
    return simulator.utilisation(ONE, sends, steps=steps, bits_per_layer=seconds * 1e9, gbps=1.0)


def test_a_step_waits_for_the_reduction_of_the_one_before():
    """4 s on the link after each step but the last: 3 + 4 + 3 + 4 + 3."""
    sends = simulator.data_parallel(1, 3)
    assert utilisation(sends, steps=3, seconds=4.0) == pytest.approx(9 / 17)


def test_a_later_step_waits_only_for_what_the_steps_between_did_not_hide():
    """Sent at 3, needed at 6 instead of 3: of 4 s one is left."""
    sends = [simulator.Send(1, [0], 3)]
    assert utilisation(sends, steps=3, seconds=4.0) == pytest.approx(9 / 10)


def test_the_first_layer_is_released_last():
    """Two layers, units of 0.5 s: layer 1 leaves at 2 s and arrives at 3, layer 0 at 3 and 4."""
    two = Size("two layers", 2, 1e9, 3.0)
    whole = simulator.utilisation(
        two, simulator.data_parallel(2, 2), steps=2, bits_per_layer=1e9, gbps=1.0
    )
    assert whole == pytest.approx(6 / 7)


def test_most_published_bandwidths_come_out():
    """Of Table 4 of 2501.18512, whose constant is fitted; the others are within one grid point."""
    rows = [row for row in model.rows_of_fragments() if row[0] in published.STREAMING]
    assert model.agreement(rows) == (69, 75, 75)


@pytest.mark.parametrize(
    ("schedule", "carrier", "gbps"),
    [
        # One fragment of 32e9 bits in a period of 300 s; 3.03 s may be waited for.
        (Schedule(100, 0, (0,)), "program", 32 / (300 / 0.99 - 300)),
        (Schedule(100, 0, (0,), overlap="eager"), "host", 32 / (300 / 0.99)),
        # A chunk a step: the step takes as long as its 32e9 / 4 bits.
        (Schedule(100, 4, (0,)), "program", 8 / (3 + 3.0303 / 4)),
    ],
)
def test_what_a_run_without_end_needs(schedule, carrier, gbps):
    mode = own.Mode("", schedule, "float32", carrier)
    found = least_gbps(lambda g: own.sustained(ONE, mode, replicas=2, gbps=g))
    assert found == pytest.approx(gbps, rel=0.002)


def test_every_other_replica_gets_a_copy():
    mode = own.Mode("", Schedule(100, 0, (0,)), "float32", "program")
    two, four = (
        least_gbps(lambda g, n=n: own.sustained(ONE, mode, replicas=n, gbps=g))
        for n in (2, 4)
    )
    assert four == pytest.approx(3 * two, rel=0.005)
