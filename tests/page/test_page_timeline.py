"""The timeline is the schedule that a run carries out, with the bytes that it has written down."""

import numpy as np
import pytest
import synthetic_runs

from maxdiloco.page import run as run_lib
from maxdiloco.page import timeline


def run_of(history=(), sent=3.0, **keys):
    """A run of 10 rows, with some keys."""
    config = synthetic_runs.defaults()
    steps = np.arange(1, 11)
    columns = {"dcn/bytes_sent": np.full(10, sent)}
    return run_lib.Run("a", None, steps, columns, config | keys, list(history), [], [])


STREAMING = {
    "enable_streaming_diloco": True,
    "diloco_sync_period": 6,
    "num_diloco_fragments": 2,
    "num_communication_overlapping_steps": 2,
}


def test_an_exchange_is_sent_carried_and_applied_as_scheduled():
    """H=6, P=2, tau=2: fragment 0 after 12, 18, 24, fragment 1 after 15, 21; two periods."""
    told = [4.0, 4.0, 0.0, 7.0, 7.0, 0.0]  # of t = 1..6 (mod 6)
    found = timeline.of_run(run_of([synthetic_runs.start(0, bytes_sent=told)], **STREAMING))
    assert (found.steps, found.fragments, found.told) == ((13, 24), 2, True)
    assert found.bytes == told * 2
    assert [tuple(each) for each in found.exchanges] == [
        (0, 12, 14, [13, 14]),
        (1, 15, 17, [16, 17]),
        (0, 18, 20, [19, 20]),
        (1, 21, 23, [22, 23]),
        (0, 24, 26, []),
    ]
    assert found.caption == "H = 6 inner steps, P = 2 fragments; an exchange has 2 inner steps"


def test_through_host_memory_no_step_carries_a_chunk():
    """All bytes of a fragment are those of the step that sends it: t = 0 and 3 (mod 6)."""
    told = [0.0, 0.0, 5.0, 0.0, 0.0, 6.0]
    found = timeline.of_run(run_of([synthetic_runs.start(0, bytes_sent=told)], **STREAMING))
    assert found.bytes == told * 2
    assert [each.chunks for each in found.exchanges] == [[]] * 5


def test_a_small_fragment_needs_fewer_chunks():
    told = [4.0, 0.0, 0.0, 4.0, 4.0, 0.0]
    found = timeline.of_run(run_of([synthetic_runs.start(0, bytes_sent=told)], **STREAMING))
    assert [each.chunks for each in found.exchanges[:2]] == [[13], [16, 17]]


def test_without_a_record_the_mean_is_divided_equally_among_the_steps_that_send():
    """4 of 6 steps carry a chunk: 3 bytes a step are 4.5 in each of them."""
    found = timeline.of_run(run_of(**STREAMING))
    assert found.bytes == [4.5, 4.5, 0, 4.5, 4.5, 0] * 2 and not found.told


@pytest.mark.parametrize(
    ("keys", "lag", "how"),
    [
        ({"diloco_outer_overlap": "eager"}, 6, "a whole period (eager)"),
        ({"diloco_outer_overlap": "delayed"}, 6, "a whole period (delayed)"),
        ({}, 0, "training waits for each exchange (tau 0)"),
    ],
)
def test_the_apply_is_where_the_mode_puts_it(keys, lag, how):
    mode = STREAMING | {"num_communication_overlapping_steps": 0} | keys
    found = timeline.of_run(run_of(**mode))
    assert {each.apply - each.send for each in found.exchanges} == {lag}
    assert found.caption.endswith(how)


def test_bytes_are_means_of_whole_periods_and_no_sawtooth():
    """H=6 sends 12 bytes after steps 6, 12, ...; rows of 4 steps have 0, 12, 12, 0, 12, 12 of them.

    From step 12 on, a period of both, each value is 2 bytes a step.
    """
    raw = np.tile([0.0, 3.0, 3.0], 5)
    run = run_of(diloco_sync_period=6)._replace(
        steps_N=np.arange(4, 64, 4), columns={"dcn/bytes_sent": raw}
    )
    means = timeline.over_whole_periods(run)
    np.testing.assert_allclose(means[:3], [0, 12 / 8, 24 / 12])
    np.testing.assert_allclose(means[2:], 2.0)
    assert np.ptp(raw[2:]) == 3
    plain = run._replace(keys=run.keys | {"enable_diloco": False})
    np.testing.assert_array_equal(timeline.over_whole_periods(plain), raw)


def test_one_replica_has_a_line_in_place_of_an_empty_chart():
    found = timeline.of_run(run_of(sent=0.0, diloco_sync_period=20))
    assert found == "one replica sends nothing; its theta moves every H = 20 inner steps"
    assert not isinstance(timeline.of_run(run_of(diloco_sync_period=20)), str)


def test_a_long_period_is_drawn_once_and_a_very_long_one_not():
    assert timeline.of_run(run_of(diloco_sync_period=100)).steps == (201, 300)
    assert "H = 6,000 steps is longer" in timeline.of_run(run_of(diloco_sync_period=6000))


def test_data_parallelism_has_no_schedule():
    assert timeline.of_run(run_of(enable_diloco=False, sent=2.5e6)) == (
        "data parallelism: every step sends 2.5 MB a slice"
    )


def test_amounts_have_three_digits_and_a_unit():
    amounts = (0, 0.5, 999, 1974272, 2.5e9, 1e18)
    shown = ["0 B", "0.5 B", "999 B", "1.97 MB", "2.5 GB", "1e+03 PB"]
    assert [timeline.amount(n) for n in amounts] == shown
