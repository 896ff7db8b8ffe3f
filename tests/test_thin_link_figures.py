"""The arithmetic of the benchmark of thin links, by hand: counters, predictions, table, figures."""

from xml.etree import ElementTree

import pytest
from thin_link_rows import PLAIN, SETUP, measured

from benchmarks.link import counters, draw, figures
from benchmarks.link.counters import Sample

MODES = ("data_parallel", "diloco", "streaming", "overlapped", "eager")


def test_the_kernel_s_counters_are_read():
    text = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
        "    lo:       0       0    0    0    0     0          0         0        0       0    0\n"
        " port0: 1234567    8901    0    0    0     0          0         7      765      43    0\n"
    )
    assert counters.parse(text)["port0"] == (1_234_567, 765)


def samples(*sent):
    """One host, a sample every 50 ms; it receives nothing."""
    return [Sample(k * 0.05, (n,), (0,)) for k, n in enumerate(sent)]


def test_counts_are_of_any_moments_and_of_spans_of_100_ms():
    """0.025 s is half of the first 100 bytes, 0.10 s all 300. Of 300 bytes within 0.05 s, 400 are
    within any 0.1 s: 4,000 a second, not 6,000."""
    sent, received = counters.between(samples(0, 100, 300, 300), 0.025, 0.10)
    assert (sent, received) == ([pytest.approx(250)], [0])
    with pytest.raises(ValueError, match="outside"):
        counters.between(samples(0, 100), 0.01, 0.2)
    assert counters.peak(samples(0, 100, 400, 400, 400), 0, 1) == pytest.approx(4000)
    assert counters.peak(samples(0, 100, 400, 400, 400), 0.10, 1) == 0
    assert counters.peak(samples(0, 400, 400), 0, 1) == pytest.approx(4000)
    assert counters.bars(samples(0, 100, 300, 300, 350, 350), 0.0001, 0.2002) == [300, 50]


THREE = {"hosts": 3, "delay_ms": 25.0}


@pytest.mark.parametrize(
    ("mode", "changes", "milliseconds"),
    [
        # 4 MB of gradients a step: 3.2 s.
        ("data_parallel", {}, 3200.0),
        # 1.5 MB a period of 20 steps, all of it waited for: 1.2 s; twice that.
        ("diloco", {}, 60.0),
        ("streaming", {}, 60.0),
        ("streaming", {"rate": "5"}, 120.0),
        # 4 steps of 0.2 s are as long as 1 MB at 10 Mbit/s; at 5 it takes 1.6 s, 0.8 too many, and
        # the other 0.5 MB exactly 0.8 s.
        ("overlapped", {}, 0.0),
        ("overlapped", {"rate": "5"}, 40.0),
        # A whole period of 4 s: 2.4 s at 5 Mbit/s fit, 6 s at 2 do not, and 2 s of 20 steps stay.
        ("eager", {"rate": "5"}, 0.0),
        ("eager", {"rate": "2"}, 100.0),
        *((mode, {"rate": "unlimited"}, 0.0) for mode in MODES),
        # Three hosts, 25 ms one way. Data parallelism: 4/3 of 4 MB and 4 turns. DiLoCo: to each of
        # two others, 2.4 s, and 25 ms once a period; streaming twice. tau=4 hides 0.8 of 1.6 and
        # of 0.8 s.
        ("data_parallel", THREE, 4266.667 + 100.0),
        ("diloco", THREE, 121.25),
        ("streaming", THREE, 122.5),
        ("overlapped", THREE, 42.5),
        ("eager", THREE, 0.0),
    ],
)
def test_the_predicted_exposure_of_each_mode(mode, changes, milliseconds):
    sizes = [1_000_000, 500_000] if mode in ("streaming", "overlapped") else [1_500_000]
    row = measured(mode, 300.0, fragment_bytes=sizes) | changes
    found = figures.predicted_ms(row, SETUP | changes, 200.0)
    assert found == pytest.approx(milliseconds, abs=1e-3)


def test_a_tied_embedding_s_gradient_is_reduced_twice():
    """100,000 of 1,000,000 parameters again: 4.4 MB are 3.52 s. A claim without them may be that
    much lower than what is on the link, one that holds them not.
    """
    setup = SETUP | {"tied_parameters": 100_000}
    claims = {4_000_000: (4_400_000 * 1.11, True), 4_400_000: (4_400_000 * 1.13, False)}
    for claim, (sent, agree) in claims.items():
        row = measured("data_parallel", 4000.0, wire="", carrier="", claimed_per_step=claim,
                       sent_per_step=[sent, sent])  # fmt: skip
        assert figures.predicted_ms(row, setup, 200.0) == pytest.approx(3520)
        assert figures.result(row, [PLAIN, row], setup).bytes_agree == agree
    more = row | {"claimed_per_step": 4_000_000, "sent_per_step": [4_400_000 * 1.13] * 2}
    assert not figures.result(more, [PLAIN, more], setup).bytes_agree


def test_a_row_beside_the_plain_step():
    """1.5 MB at 10 Mbit/s are 1.2 s, 60 ms of each of 20 steps; 250 ms is 50 above the plain 200.
    1,100 bytes less the chatter of 100 against 950.
    """
    row = measured("streaming", 250.0, claimed_per_step=950.0)
    one = figures.result(row, [PLAIN, row], SETUP)
    assert one.utilisation == pytest.approx(0.8)
    assert (one.exposed_ms, one.predicted_ms) == (pytest.approx(50), pytest.approx(60))
    assert one.claimed_ratio == pytest.approx(1000 / 950)
    # The plain steps measured again: 140 and 160 bytes a step.
    again = PLAIN | {"step_ms": 204.0, "sent_per_step": [140.0, 160.0]}
    assert figures.plain_ms([PLAIN, row, again]) == pytest.approx(202)
    assert figures.chatter([PLAIN, row, again]) == 125
    cells = figures.cells(row, [PLAIN, row], SETUP)
    assert cells == [
        "streaming, tau=0, float32, program", "10", "20", "250.0", "80.0%", "50.0", "60.0", "0.83",
        "1.1", "1.053", "9.5",
    ]  # fmt: skip


def test_every_figure_states_its_conditions():
    rows = [PLAIN, *(measured(mode, 300.0) for mode in MODES)]
    words = "fast device (180 ms of sleep in place of compute); 2 hosts, tiny, H=20, P=2, tau=4"
    for text in (
        figures.table(rows, SETUP), draw.utilisation(rows, SETUP), draw.period(rows, SETUP)
    ):  # fmt: skip
        assert words in text and "TCP reno" in text and "delay 0 ms" in text and "abc" in text
    real = figures.table(rows, SETUP | {"fast_device_ms": 0.0})
    assert real.startswith("real compute; 2 hosts")


def test_what_is_claimed_is_said_where_data_parallelism_starves():
    """200 ms of 5,000 are 4 %: there 4 bits have to reach 99 %, with real compute 95 %. At 100
    Mbit/s data parallelism has 10 %, so nothing is claimed.
    """
    bits = dict(wire="float4_e3m0", carrier="host")
    rows = [
        PLAIN,
        measured("data_parallel", 5000.0, wire="", carrier=""),
        measured("data_parallel", 2000.0, wire="", carrier="", rate="100"),
        measured("diloco", 201.0, **bits),
        measured("overlapped", 208.0, **bits, period_ms=[208.0] * 5),
        measured("eager", 201.0, **bits),
        measured("eager", 201.0),
        measured("eager", 201.0, **bits, rate="100"),
    ]
    assert figures.claims(rows, SETUP) == [
        "At 10 Mbit/s data parallelism has 4.0%; streaming, tau=4, float4_e3m0, host 96.2% over 5 "
        "periods (below 99%), eager, float4_e3m0, host 99.5% over 1 periods (at least 99%)."
    ]
    [real] = figures.claims(rows, SETUP | {"fast_device_ms": 0.0})
    assert "host 96.2% over 5 periods (at least 95%)" in real
    assert figures.claims(rows[:1] + rows[2:], SETUP) == [
        "No rate here leaves data parallelism less than 5%."
    ]
    assert figures.claims(rows, SETUP)[0] in figures.table(rows, SETUP)


def shapes(figure, name):
    root = ElementTree.fromstring(figure)
    return [shape for shape in root.iter() if shape.tag.endswith(f"}}{name}")]


def test_the_figure_of_utilisation_has_a_line_for_every_mode_wire_and_carrier():
    """Five modes at two rates; 0, 20, .. 100 % are lines too, and each line is in the legend."""
    rows = [PLAIN]
    for rate, step_ms in (("unlimited", 200.0), ("10", 400.0)):
        rows += [measured(mode, step_ms, rate=rate) for mode in MODES]
    lines = shapes(draw.utilisation(rows, SETUP), "polyline")
    assert len(lines) == 6 + 2 * 5
    xs, ys = zip(*(point.split(",") for point in lines[6].get("points").split()), strict=True)
    assert float(xs[0]) < float(xs[1])
    assert [float(y) for y in ys] == [draw.TOP + draw.HEIGHT / 2, draw.TOP]  # 50 % and 100 %


def test_the_figure_of_a_period_shows_the_thinnest_link():
    """125,000 bytes in 100 ms are 10 Mbit/s: a bar as high as its strip; three bars a mode."""
    rows = [PLAIN, measured("eager", 300.0, rate="100"), measured("overlapped", 300.0),
            measured("diloco", 300.0)]  # fmt: skip
    figure = draw.period(rows, SETUP)
    assert "10 Mbit/s" in figure and "eager" not in figure
    bars = [bar for bar in shapes(figure, "rect") if bar.get("fill") != "white"]
    assert [float(bar.get("height")) for bar in bars[:3]] == [0.0, draw.STRIP, pytest.approx(23.0)]
    assert len(bars) == 6
