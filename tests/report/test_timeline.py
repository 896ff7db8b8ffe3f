"""The timeline: the schedule that a run carries out, with the bytes that it has written down.
Expected numbers by hand."""

import numpy as np
from synthetic_runs import run_of, start

from maxdiloco.report import timeline


def sending(sent=3.0, **keys):
    return run_of(rows=10, columns={"dcn/bytes_sent": np.full(10, sent)}, **keys)


def told(bytes_sent):
    """That run, streaming, whose first start has written down the bytes of t = 1..6 (mod 6)."""
    return sending(history=[start(0, bytes_sent=bytes_sent)], **STREAMING)


STREAMING = {
    "enable_streaming_diloco": True,
    "diloco_sync_period": 6,
    "num_diloco_fragments": 2,
    "num_communication_overlapping_steps": 2,
}


def test_an_exchange_is_sent_carried_and_applied_as_scheduled():
    """H=6, P=2, tau=2: fragment 0 after 12, 18, 24, fragment 1 after 15, 21; two periods."""
    found = timeline.build(told([4.0, 4.0, 0.0, 7.0, 7.0, 0.0]))
    assert (found["steps"], found["fragments"]) == ([13, 24], 2)
    assert found["bytes"] == [4, 4, 0, 7, 7, 0] * 2
    assert [tuple(each) for each in found["exchanges"]] == [
        (0, 12, 14, [13, 14]),
        (1, 15, 17, [16, 17]),
        (0, 18, 20, [19, 20]),
        (1, 21, 23, [22, 23]),
        (0, 24, 26, []),
    ]
    for named in ("H = 6 ", "P = 2 ", "2 inner steps"):
        assert named in found["caption"]


def test_the_steps_that_send_chunks_are_those_with_bytes():
    """Through host memory all bytes are of the step that sends; a small fragment needs fewer steps.
    Without a record no step carries any."""
    for bytes_sent, chunks in (
        ([0.0, 0.0, 5.0, 0.0, 0.0, 6.0], [[]] * 5),
        ([4.0, 0.0, 0.0, 4.0, 4.0, 0.0], [[13], [16, 17], [19], [22, 23], []]),
    ):
        found = timeline.build(told(bytes_sent))
        assert found["bytes"] == bytes_sent * 2
        assert [carried for *_, carried in found["exchanges"]] == chunks
    found = timeline.build(sending(**STREAMING))
    assert found["bytes"] == [0] * 12


def test_parts_and_means_of_reduce_scatter_are_drawn():
    """H=6, P=1, tau=4: a part at t+1, nothing at t+2, means at t+3 and t+4. Through host memory the
    parts leave with the send, the means a step later; sends at 3 and 6 are of other fragments."""
    keys = {"diloco_collective": "reduce_scatter", "diloco_sync_period": 6}
    keys |= {"num_communication_overlapping_steps": 4}
    run = sending(history=[start(0, bytes_sent=[4.0, 0.0, 8.0, 8.0, 0.0, 0.0])], **keys)
    assert [carried for *_, carried in timeline.build(run)["exchanges"]] == [
        [13, 15, 16], [19, 21, 22], [],
    ]  # fmt: skip
    assert timeline.describe(run).endswith(", reduce-scatter")
    for scatters in (True, False):  # a start with diloco_collective=auto has which it was
        auto = run._replace(config=run.config | {"diloco_collective": "auto"})
        auto = auto._replace(history=[run.history[0] | {"reduce_scatter": scatters}])
        assert (timeline.build(auto) == timeline.build(run)) == scatters
        assert timeline.describe(auto).endswith(", reduce-scatter") == scatters
    keys = STREAMING | {"diloco_collective": "reduce_scatter"}
    keys |= {"num_communication_overlapping_steps": 3}
    run = sending(history=[start(0, bytes_sent=[8.0, 0.0, 4.0, 8.0, 0.0, 4.0])], **keys)
    run = run._replace(columns=run.columns | {"dcn/waited_s": np.zeros(10)})
    carried = [carried for *_, carried in timeline.build(run)["exchanges"]]
    assert carried == [[13], [16], [19], [22], []]


def test_the_apply_is_where_the_mode_puts_it():
    for overlap, lag in (("eager", 6), ("delayed", 6), ("none", 0)):
        mode = {"num_communication_overlapping_steps": 0, "diloco_round_overlap": overlap}
        found = timeline.build(sending(**STREAMING | mode))
        assert {apply - send for _, send, apply, _ in found["exchanges"]} == {lag}


def test_bytes_are_means_of_whole_periods_and_no_sawtooth():
    """H=6 sends 12 bytes after steps 6, 12, ...; rows of 4 steps have 0, 12, 12, 0, 12, 12 of them.

    From step 12 on, a period of both, each value is 2 bytes a step.
    """
    raw = np.tile([0.0, 3.0, 3.0], 5)
    run = run_of(rows=15, columns={"dcn/bytes_sent": raw}, diloco_sync_period=6)
    run = run._replace(steps=4 * run.steps)
    means = timeline.mean_bytes(run)
    np.testing.assert_allclose(means[:3], [0, 12 / 8, 24 / 12])
    np.testing.assert_allclose(means[2:], 2.0)
    assert np.ptp(raw[2:]) == 3
    plain = run._replace(config=run.config | {"enable_diloco": False})
    np.testing.assert_array_equal(timeline.mean_bytes(plain), raw)


def test_a_schedule_that_cannot_be_drawn_is_a_caption():
    assert timeline.build(sending(diloco_sync_period=100))["steps"] == [201, 300]
    assert not isinstance(timeline.build(sending(diloco_sync_period=20)), str)
    assert "H = 20 " in timeline.build(sending(sent=0.0, diloco_sync_period=20))
    assert "H = 6,000 " in timeline.build(sending(diloco_sync_period=6000))
    assert "2.5 MB" in timeline.build(sending(enable_diloco=False, sent=2.5e6))
    amounts = {0: "0 B", 0.5: "0.5 B", 999: "999 B", 1974272: "1.97 MB", 1e18: "1e+03 PB"}
    assert {n: timeline.amount(n) for n in amounts} == amounts


def test_an_island_has_no_timeline_of_steps():
    """It sends by the clock. Control: without the tokens of a log the run has a timeline."""
    run = told([4.0, 4.0, 0.0, 7.0, 7.0, 0.0])
    assert not isinstance(timeline.build(run), str)
    island = run._replace(columns=run.columns | {timeline.COMMITTED: np.full(10, 5.0)})
    assert isinstance(timeline.build(island), str)
    assert (timeline.describe(island), timeline.describe(run)) == (
        "islands, P 2, float32", "DiLoCo, streaming, H 6, P 2, tau 2, float32",
    )  # fmt: skip
