"""The sentences at the top of the page, and the timeline: the schedule that a run carries out, with
the bytes that it has written down. Expected numbers by hand."""

import numpy as np
from synthetic_runs import DEFAULTS, FALLING, ROWS, end, evaluated, run_of, start

from maxdiloco.page import facts, html, timeline, verdict
from maxdiloco.page.run import NOT_FINITE


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
    found = timeline.of_run(told([4.0, 4.0, 0.0, 7.0, 7.0, 0.0]))
    assert (found["steps"], found["fragments"]) == ([13, 24], 2)
    assert found["bytes"] == [4, 4, 0, 7, 7, 0] * 2
    assert [tuple(each) for each in found["exchanges"]] == [
        (0, 12, 14, [13, 14]),
        (1, 15, 17, [16, 17]),
        (0, 18, 20, [19, 20]),
        (1, 21, 23, [22, 23]),
        (0, 24, 26, []),
    ]
    assert found["caption"] == "H = 6 inner steps, P = 2 fragments; an exchange has 2 inner steps"


def test_the_steps_that_carry_chunks_are_those_whose_bytes_were_told():
    """Through host memory all bytes are of the step that sends; a small fragment needs fewer steps.
    Without a record no step carries any, and the caption says so."""
    for bytes_sent, chunks in (
        ([0.0, 0.0, 5.0, 0.0, 0.0, 6.0], [[]] * 5),
        ([4.0, 0.0, 0.0, 4.0, 4.0, 0.0], [[13], [16, 17], [19], [22, 23], []]),
    ):
        found = timeline.of_run(told(bytes_sent))
        assert found["bytes"] == bytes_sent * 2
        assert [carried for *_, carried in found["exchanges"]] == chunks
    found = timeline.of_run(sending(**STREAMING))
    assert found["bytes"] == [0] * 12 and found["caption"].endswith("; its bytes are not recorded")


def test_of_owners_the_parts_and_the_means_are_drawn_and_no_other_fragment():
    """H=6, P=1, tau=4: a part at t+1, nothing at t+2, means at t+3 and t+4. Through host memory the
    parts leave with the send, the means a step later; sends at 3 and 6 are of other fragments."""
    keys = {"diloco_exchange": "owners", "diloco_sync_period": 6}
    keys |= {"num_communication_overlapping_steps": 4}
    run = sending(history=[start(0, bytes_sent=[4.0, 0.0, 8.0, 8.0, 0.0, 0.0])], **keys)
    assert [carried for *_, carried in timeline.of_run(run)["exchanges"]] == [
        [13, 15, 16], [19, 21, 22], [],
    ]  # fmt: skip
    assert timeline.describe(run).endswith(", owners")
    for owners in (True, False):  # a run with diloco_exchange=auto says at its start which it was
        auto = run._replace(keys=run.keys | {"diloco_exchange": "auto"})
        auto = auto._replace(history=[run.history[0] | {"owners": owners}])
        assert (timeline.of_run(auto) == timeline.of_run(run)) == owners
        assert timeline.describe(auto).endswith(", owners") == owners
    keys = STREAMING | {"diloco_exchange": "owners", "num_communication_overlapping_steps": 3}
    run = sending(history=[start(0, bytes_sent=[8.0, 0.0, 4.0, 8.0, 0.0, 4.0])], **keys)
    run = run._replace(columns=run.columns | {"dcn/waited_s": np.zeros(10)})
    carried = [carried for *_, carried in timeline.of_run(run)["exchanges"]]
    assert carried == [[13], [16], [19], [22], []]


def test_the_apply_is_where_the_mode_puts_it():
    for overlap, lag, how in (
        ("eager", 6, "a whole period (eager)"),
        ("delayed", 6, "a whole period (delayed)"),
        ("none", 0, "training waits for each exchange (tau 0)"),
    ):
        mode = {"num_communication_overlapping_steps": 0, "diloco_outer_overlap": overlap}
        found = timeline.of_run(sending(**STREAMING | mode))
        assert {apply - send for _, send, apply, _ in found["exchanges"]} == {lag}
        assert how in found["caption"]


def test_bytes_are_means_of_whole_periods_and_no_sawtooth():
    """H=6 sends 12 bytes after steps 6, 12, ...; rows of 4 steps have 0, 12, 12, 0, 12, 12 of them.

    From step 12 on, a period of both, each value is 2 bytes a step.
    """
    raw = np.tile([0.0, 3.0, 3.0], 5)
    run = run_of(rows=15, columns={"dcn/bytes_sent": raw}, diloco_sync_period=6)
    run = run._replace(steps_N=4 * run.steps_N)
    means = timeline.over_whole_periods(run)
    np.testing.assert_allclose(means[:3], [0, 12 / 8, 24 / 12])
    np.testing.assert_allclose(means[2:], 2.0)
    assert np.ptp(raw[2:]) == 3
    plain = run._replace(keys=run.keys | {"enable_diloco": False})
    np.testing.assert_array_equal(timeline.over_whole_periods(plain), raw)


def test_a_run_whose_schedule_cannot_be_drawn_has_a_line_and_a_long_period_is_drawn_once():
    assert timeline.of_run(sending(diloco_sync_period=100))["steps"] == [201, 300]
    assert not isinstance(timeline.of_run(sending(diloco_sync_period=20)), str)
    found = timeline.of_run(sending(sent=0.0, diloco_sync_period=20))
    assert found == "one replica sends nothing; its theta moves every H = 20 inner steps"
    assert "H = 6,000 steps is longer" in timeline.of_run(sending(diloco_sync_period=6000))
    assert timeline.of_run(sending(enable_diloco=False, sent=2.5e6)) == (
        "data parallelism: every step sends 2.5 MB a slice"
    )
    amounts = {0: "0 B", 0.5: "0.5 B", 999: "999 B", 1974272: "1.97 MB", 1e18: "1e+03 PB"}
    assert {n: timeline.amount(n) for n in amounts} == amounts


def with_columns(**columns):
    """Two replicas; names of metrics with _ for /."""
    columns = {"learning_loss": FALLING} | columns
    named = {name.replace("_", "/", 1): np.array(each) for name, each in columns.items()}
    named |= {f"learning/loss_replica_{m}": named["learning/loss"] for m in (0, 1)}
    return run_of(columns=named)


def test_a_loss_that_falls_is_healthy_and_one_that_rises_or_is_not_finite_is_not():
    """Means of rows 81 to 90 and 91 to 100 of 4 to 2 in 99 equal steps."""
    said = verdict.health(with_columns())
    assert said == "Healthy: the loss falls, 2.2929 to 2.0909 (means of 10 rows)."
    said = verdict.health(with_columns(learning_loss=FALLING[[0, -1]]))
    assert said.endswith("4.0000 to 2.0000 (the last two rows).")
    noisy = np.append(FALLING[:90:10], 3.0)  # above the row before, as one of ten may be
    assert verdict.health(with_columns(learning_loss=noisy)).startswith("Healthy: the loss falls")
    said = verdict.health(with_columns(learning_loss=FALLING[::-1]))
    assert said.startswith("Not healthy: the loss rises, 3.7071 to 3.9091")
    said = verdict.health(with_columns(learning_loss=np.ones(ROWS)))
    assert said.startswith("Healthy: the loss is flat")
    for zeros in (np.zeros(ROWS), np.append(np.ones(90), np.zeros(10))):
        said = verdict.health(with_columns(learning_loss=zeros))
        assert said.startswith(f"Healthy: the loss {'falls, 1.0' if zeros[0] else 'is flat, 0.0'}")
    broken = np.append(FALLING[1:], NOT_FINITE)
    said = verdict.health(with_columns(learning_loss=broken))
    assert said == "Not healthy: the loss is not finite."
    theta = np.where(np.arange(ROWS) < 50, 2.5, 2.75)
    said = verdict.health(with_columns(eval_loss=theta))
    assert said.endswith("; but theta's is 0.2500 above its best.")


def test_the_link_is_judged_by_what_the_last_half_of_the_run_waited_where_a_metric_tells():
    """Steps of 1 s; what the first half waited does not count."""
    for waited, words in (
        (0.004, "The link is no bottleneck: process 0 waits for exchanges 0.4% of the time."),
        (0.05, "The link costs a little: process 0 waits for exchanges 5.0% of the time."),
        (0.3, "The link, or a slower process, is the bottleneck: process 0 waits for exchanges 30"),
    ):
        waits = np.where(np.arange(ROWS) < ROWS // 2, 0.9, waited)
        run = with_columns(dcn_waited_s=waits, perf_step_time=np.ones(ROWS))
        assert verdict.link(run).startswith(words)
    assert "not measured: exchanges are inside" in verdict.link(with_columns())
    assert "not measured: gradients cross it" in verdict.link(run_of(enable_diloco=False))
    assert verdict.link(run_of()) == "One replica has no link."


def test_the_rest_of_a_run_takes_its_step_time():
    """100 of 400 steps are done, 300 of 2 s are left; without an end the run goes on."""
    columns = {"learning/loss": FALLING, "perf/step_time": np.full(ROWS, 2.0)}
    run = run_of(columns=columns, history=[start(0, until=400)])
    assert verdict.progress(run) == "Step 100 of 400, running, or killed; 10 min left."
    ended = run._replace(history=[*run.history, end()])
    assert verdict.progress(ended) == "Step 100 of 400, Ctrl-C."


def test_an_elastic_island_is_done_when_the_log_has_the_tokens_whatever_its_steps():
    """At 100 of 300 steps. Control: with less than all tokens, and as a fixed island."""
    ended = [start(0, until=300), end()]
    for islands, part, said in (
        ("elastic", 1.02, "Step 100, 100.0% of the islands' tokens, done."),
        ("elastic", 0.625, "Step 100, 62.5% of the islands' tokens, Ctrl-C."),
        ("fixed", 1.02, "Step 100 of 300, Ctrl-C."),
    ):
        columns = {"learning/loss": FALLING, "islands/progress": np.linspace(0, part, ROWS)}
        run = run_of(columns=columns, history=ended, islands=islands)
        assert verdict.progress(run) == said
        assert facts.lives(run)[-1].how == said[:-1].split(", ")[-1]
    goes_on = run_of(columns=columns, history=ended[:1], islands="elastic", rows=ROWS)
    assert verdict.progress(goes_on).endswith("tokens, running, or killed.")


def test_a_run_is_behind_another_at_as_many_tokens():
    """b reads twice as many tokens a step: a's last row, 1,000 tokens, is b's step 50."""
    falling = np.linspace(3, 2.01, ROWS)
    a, b = evaluated("a", falling), evaluated("b", falling, tokens=20.0)
    words = "b is behind a: theta's loss is 2.5100 beside 2.0100 (+24.9%) after 1,000 tokens."
    assert verdict.beside(a, b) == words
    assert verdict.beside(b, a).startswith("a is ahead of b: theta's loss is 2.0100 beside 2.5100")
    assert verdict.beside(a, a._replace(name="c")).startswith("c is level with a: ")


def test_runs_with_other_held_out_texts_and_one_alone_are_not_compared_and_it_is_said():
    """A training text of its own is no other held-out text where eval_dataset_path names one."""
    theta = np.full(ROWS, 2.0)
    a = evaluated("a", theta, dataset_path="/data/x")
    b = evaluated("b", theta, dataset_path="/data/y", eval_steps=3)
    said = (
        "b and a are not compared, since their losses may be of different held-out texts: they "
        "differ in dataset_path, eval_steps."
    )
    assert verdict.beside(a, b) == said
    assert said in verdict.lines([a, b]) and "not compared" in html.page([a, b], DEFAULTS)
    same = dict(eval_dataset_path="/data/held_out")
    a, b = a._replace(keys=a.keys | same), b._replace(keys=b.keys | same | {"eval_steps": 10})
    assert verdict.beside(a, b).startswith("b is level with a")
    own, how = verdict.lines([with_columns()])
    assert own.startswith("Healthy: ") and "with enable_diloco=false" in how
    plain = with_columns()._replace(keys=a.keys | {"enable_diloco": False})
    assert len(verdict.lines([plain])) == 1
