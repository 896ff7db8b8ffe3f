"""The benchmark of thin links: its rows, what each measures and reads, and its arithmetic by hand.

What needs root, to make network namespaces, is in test_thin_link_hosts.py.
"""

import io
import json
import pathlib

import pytest
from thin_link_rows import PLAIN, SETUP, measured

from benchmarks import thin_link
from benchmarks.link import arguments, command, counters, draw, figures, grid, process, rows
from benchmarks.link.arguments import Part
from benchmarks.link.counters import Sample
from benchmarks.link.grid import Row, Window
from maxdiloco.diloco import schedule
from maxdiloco.engine import data_parallel

# -- rows ---------------------------------------------------------------------------------------


def test_rows_are_every_mode_wire_and_carrier_or_the_lines_between_two_plain_ones():
    """At every rate. Lines stand in place of modes, wires and carriers."""
    _, found, _ = arguments.arguments(
        ["modes=data_parallel,eager", "wires=int8,float32", "rates=unlimited,2.50"]
    )
    ways = [(wire, carrier) for wire in ("int8", "float32") for carrier in ("program", "host")]
    between = []
    for rate in ("unlimited", "2.5"):
        between += [Row("data_parallel", rate=rate), *(Row("eager", *way, rate) for way in ways)]
    assert found == [Row("plain"), *between, Row("plain", turn=1)]
    [part] = arguments.parts(["lines=data_parallel,eager:int8:host", "rates=5"])
    between = [Row("data_parallel", rate="5"), Row("eager", "int8", "host", "5")]
    assert part.rows == [Row("plain"), *between, Row("plain", turn=1)]


def test_the_published_grid_has_what_the_claims_need_and_arguments_go_before_its_own():
    """4 bits with overlap and eager at a rate where data parallelism has less than 5 %."""
    fast, real = arguments.parts(["grid=published", "out=x", "rates=5", "hosts=3"])
    assert (fast.setup["fast_device_ms"], real.setup["fast_device_ms"]) == (180, 0)
    assert (fast.out.name, real.out.name) == ("fast_device", "real")
    assert fast.out.parent == real.out.parent == pathlib.Path("x").resolve()
    for part, window in ((fast, Window(40, 140, 141)), (real, Window(200, 400, 401))):
        assert part.setup["hosts"] == 3 and {row.rate for row in part.rows} == {"5", "unlimited"}
        for mode in ("overlapped", "eager"):
            row = Row(mode, "float4_e3m0", "host", "5")
            assert row in part.rows and grid.window(row, part.setup, None) == window
        assert Row("data_parallel", rate="5") in part.rows
    # Two hosts: 4.33 MB, the tied embedding twice, at 5 Mbit/s are 6.93 s beside a step of 0.2.
    plain = {"mode": "plain", "step_ms": 200.0, "parameters": 1_033_600}
    row, two = Row("data_parallel", rate="5"), real.setup | {"hosts": 2}
    assert 200 / grid.expected_step_ms(row, two, plain) == pytest.approx(0.0281, abs=1e-4)


def test_the_grid_of_owners_has_what_they_and_gathering_do_with_and_without_a_limit():
    """By arithmetic with two cores for eight processes: owners wait for nothing, gathering for more
    than the steps take. What a limit leaves of a speed is said of both."""
    [part] = arguments.parts(["grid=owners", "out=x"])
    ways = [Row(mode, "int8", "host", "20") for mode in ("overlapped", "owners")]
    twins = [row._replace(rate="unlimited") for row in ways]
    assert part.rows == [Row("plain"), *ways, *twins, Row("plain", turn=1)]
    keys = [figures.mode_keys(row.mode, part.setup["keys"]) for row in ways]
    assert [each["diloco_exchange"] for each in keys] == ["gather", "owners"]
    plain = {"mode": "plain", "step_ms": 600.0, "parameters": 3_000_000}
    gather, owners = (grid.expected_step_ms(row, part.setup, plain) for row in ways)
    assert gather > 600 / 0.6 and owners < 600 / 0.99
    step_ms = {"20": 2000.0, "unlimited": 800.0}
    found = [measured(row.mode, step_ms[row.rate]) | row._asdict() for row in (*ways, *twins)]
    lines = figures.beside_unlimited(found, tau=2)
    assert all(line.endswith(" has 40.0% of its speed on an unlimited link.") for line in lines)
    assert len(lines) == 2 and "owners, int8, host" in lines[1]


def test_a_run_goes_on_at_the_row_that_failed_or_was_ended(monkeypatch, tmp_path, capsys):
    """Rows measure nothing here. What was measured with another set-up is not mixed in."""
    seen, stops = [], {}
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(thin_link, "check", lambda: None)
    monkeypatch.setattr(thin_link, "hosts", lambda *_: open("/dev/null"))

    def measure(row, setup, folder, plain):
        if row.mode in stops:
            raise stops[row.mode]
        seen.append(row.mode)
        assert (plain is None) == (not seen[1:] and row.mode == "plain")
        return measured(row.mode, 200.0) | row._asdict() | {"period_ms": [200.0]}

    monkeypatch.setattr(thin_link, "measure", measure)
    out = tmp_path / "out"
    argv = [f"out={out}", "wires=float32", "rates=10", "carriers=program"]
    stops |= {"streaming": KeyboardInterrupt()}
    assert thin_link.main(argv) == 130
    assert seen == ["plain", "data_parallel", "diloco"] and not (out / "table.md").exists()
    stops = {"streaming": rows.RowError("exit codes [3, 5]")}
    assert thin_link.main(argv) == 1
    assert seen[3:] == ["overlapped", "eager", "plain"]
    assert "failed: streaming-float32-program-10. The same command" in capsys.readouterr().err
    stops = {}
    assert thin_link.main(argv) == 0
    assert seen[6:] == ["streaming"]
    assert (out / "table.md").read_text().count("| 10 |") == 5
    assert thin_link.main([*argv, "periods=6", "fast_device_ms=180"]) == 2
    told = capsys.readouterr().err
    assert "rows that were measured with another periods, other_periods, fast_device_ms" in told


EAGER, SLOW = Row("eager", "int8", "host", "5"), Row("diloco", "float32", "host", "10")
PARALLEL = Row("data_parallel", rate="10")


@pytest.mark.parametrize(
    ("row", "changes", "window"),
    [
        # An exchange that waits for nothing is applied in its period, others in the next one.
        (EAGER, {}, (40, 140)),
        (EAGER._replace(mode="diloco"), {}, (20, 120)),
        # The lowest rate and the plain step measure more periods.
        (EAGER, {"other_periods": 2}, (40, 140)),
        (Row("plain", turn=1), {"other_periods": 2}, (40, 140)),
        # 4 MB at 10 Mbit/s are 3.2 s, beside 20 steps of 200 ms 7.2 s a period; never none.
        (SLOW, {"row_seconds": 72.1}, (20, 20 + 5 * 20)),
        (SLOW, {"row_seconds": 1}, (20, 20 + 20)),
        # About as long: 100 steps of 200 ms. 20 s are 5.9 steps of 3.4 s.
        (PARALLEL, {}, (2, 8)),
    ],
)
def test_a_row_measures_whole_periods_that_row_seconds_have_room_for(row, changes, window):
    found = grid.window(row, SETUP | changes, PLAIN)
    assert found == Window(*window, window[1] + 1)


# -- what one row reads -------------------------------------------------------------------------


def test_the_trainer_s_log_and_metrics_are_read(tmp_path):
    """Metrics at 20, 40 and 60, 70 at the end: those of 20..60 are 300 and 500 a step."""
    log, metrics = tmp_path / "log", tmp_path / "metrics.jsonl"
    table = (
        "model: tiny, 1,033,600 parameters\n"
        "fragment  layers  parameters  padding  bytes on the wire  share\n"
        "0           none      49,280        0             24,887   5.2%\n"
        "1            0-1     492,160       12            248,832  52.0%\n"
        "outer state: 7.9 MiB a device\n"
    )
    log.write_text(table)
    assert rows.parse_log(log) == (1_033_600, [24_887, 248_832])
    log.write_text(table.splitlines()[0])
    assert rows.parse_log(log) == (1_033_600, [])
    log.write_text("ConfigError: no\n")
    with pytest.raises(rows.RowError, match="no line of the model"):
        rows.parse_log(log)
    claims = [(20, 100), (40, 300), (60, 500), (70, 900)]
    lines = [json.dumps({"step": step, "dcn/bytes_sent": sent}) for step, sent in claims]
    metrics.write_text("\n".join(lines))
    assert rows.claimed(metrics, Window(20, 60, 70)) == 400
    assert rows.claimed(metrics, Window(41, 50, 70)) == 500
    metrics.write_text(json.dumps({"step": 20}) + "\n")
    assert rows.claimed(metrics, Window(20, 60, 70)) is None


def test_an_inner_program_writes_its_time_and_sleeps_after_its_results():
    """By the names that the trainer gives its programs. A step begins when the last process begins
    it: two take turns in being first at an exchange, and each one's own steps are uneven."""

    class Program:
        def __init__(self, name):
            self.name = name

        def __call__(self, x):
            order.append(self.name)
            return x

    order, trace = [], io.StringIO()
    process.trace_steps(Program, trace, 0.05, lambda results: order.append(f"waited {results}"))
    others = (schedule.PACK, schedule.MERGE, schedule.SYNCHRONISE, schedule.OUTER_STEP)
    assert [Program(name)(1) for name in others] == [1] * 4 and not trace.getvalue()
    order.clear()
    assert Program(schedule.INNER)(2) == 2 and Program(schedule.INNER_EXCHANGE)(3) == 3
    assert order == [schedule.INNER, "waited 2", schedule.INNER_EXCHANGE, "waited 3"]
    first, second = map(float, trace.getvalue().split())
    assert second - first >= 0.05
    source = pathlib.Path(data_parallel.__file__).read_text(encoding="utf-8")
    assert f'"{process.INNER[1]}",' in source
    begun = [[0.0, 1.0, 9.0, 11.0], [0.5, 4.0, 6.0, 14.0]]
    assert rows.together(begun) == [0.5, 4.0, 9.0, 14.0]


def test_the_kernel_s_counters_are_counts_of_any_moments_and_of_spans_of_100_ms():
    """A sample every 50 ms: 0.025 s is half of the first 100 bytes, 0.10 s all 300. Of 300 bytes
    within 0.05 s, 400 are within any 0.1 s: 4,000 a second, not 6,000."""
    text = (
        "Inter-|   Receive                            |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs\n"
        "    lo:       0       0    0    0    0     0          0         0        0       0    0\n"
        " port0: 1234567    8901    0    0    0     0          0         7      765      43    0\n"
    )
    assert counters.parse(text)["port0"] == (1_234_567, 765)

    def samples(*sent):
        return [Sample(k * 0.05, (n,), (0,)) for k, n in enumerate(sent)]

    sent, received = counters.between(samples(0, 100, 300, 300), 0.025, 0.10)
    assert (sent, received) == ([pytest.approx(250)], [0])
    with pytest.raises(ValueError, match="outside"):
        counters.between(samples(0, 100), 0.01, 0.2)
    assert counters.peak(samples(0, 100, 400, 400, 400), 0, 1) == pytest.approx(4000)
    assert counters.peak(samples(0, 100, 400, 400, 400), 0.10, 1) == 0
    assert counters.peak(samples(0, 400, 400), 0, 1) == pytest.approx(4000)
    assert counters.bars(samples(0, 100, 300, 300, 350, 350), 0.0001, 0.2002) == [300, 50]


# -- arithmetic ---------------------------------------------------------------------------------

MODES = ("data_parallel", "diloco", "streaming", "overlapped", "eager")
THREE = {"hosts": 3, "delay_ms": 25.0}


@pytest.mark.parametrize(
    ("mode", "changes", "milliseconds"),
    [
        # 4 MB of gradients a step: 3.2 s; a tied embedding's are reduced twice, 3.52 s of 4.4 MB.
        ("data_parallel", {}, 3200.0),
        ("data_parallel", {"tied_parameters": 100_000}, 3520.0),
        # 1.5 MB a period of 20 steps, all of it waited for: 1.2 s; twice that.
        ("diloco", {}, 60.0),
        ("streaming", {"rate": "5"}, 120.0),
        # 4 steps of 0.2 s are as long as 1 MB at 10 Mbit/s; at 5 it takes 1.6 s, 0.8 too many, and
        # the other 0.5 MB exactly 0.8 s.
        ("overlapped", {}, 0.0),
        ("overlapped", {"rate": "5"}, 40.0),
        # A whole period of 4 s: 2.4 s at 5 Mbit/s fit.
        ("eager", {"rate": "5"}, 0.0),
        *((mode, {"rate": "unlimited"}, 0.0) for mode in MODES),
        # Three hosts, 25 ms one way. Data parallelism: 4/3 of 4 MB and 4 turns. DiLoCo: to each of
        # two others, 2.4 s, and 25 ms once a period. tau=4 hides 0.8 of 1.6 and of 0.8 s.
        ("data_parallel", THREE, 4266.667 + 100.0),
        ("diloco", THREE, 121.25),
        ("overlapped", THREE, 42.5),
        # Half of it are parts, in the first two of tau's steps: 0.8 and 0.4 s beside 0.4; then as
        # many means. With the delay each of these four comes 25 ms later.
        ("owners", {"hosts": 3}, 40.0),
        ("owners", THREE, 45.0),
    ],
)
def test_the_predicted_exposure_of_each_mode(mode, changes, milliseconds):
    streams = mode in ("streaming", "overlapped", "owners")
    sizes = [1_000_000, 500_000] if streams else [1_500_000]
    row = measured(mode, 300.0, fragment_bytes=sizes) | changes
    found = figures.predicted_ms(row, SETUP | changes, 200.0)
    assert found == pytest.approx(milliseconds, abs=1e-3)


@pytest.mark.parametrize(
    ("claim", "agree"),
    # Chatter 100 a step, 1,100 sent: 1,000 are 1.053 of 950, 0.980 of 1,020, 1.136 of 880.
    [(950, True), (1020, False), (880, False)],
)
def test_bytes_that_are_not_those_claimed_end_it_with_exit_code_1(claim, agree, capsys, tmp_path):
    row = measured("diloco", 4000.0, claimed_per_step=claim, sent_per_step=[1100, 1100])
    part = Part(SETUP, [], tmp_path)
    assert thin_link.report(part, [PLAIN, row]) == int(not agree)
    assert ("at 10 Mbit/s: " in capsys.readouterr().out) != agree


def test_a_row_beside_the_plain_step():
    """1.5 MB at 10 Mbit/s are 1.2 s, 60 ms of each of 20 steps; 250 ms is 50 above the plain 200,
    50 / 60 = 0.83. 1,100 bytes less the chatter of 100 against 950."""
    row = measured("streaming", 250.0, claimed_per_step=950.0)
    assert figures.cells(row, [PLAIN, row], SETUP) == [
        "streaming, tau=0, float32, program", "10", "20", "250.0", "80.0%", "50.0", "60.0", "0.83",
        "1.1", "1.053", "9.5",
    ]  # fmt: skip


def test_every_mode_and_wire_that_a_grid_may_have_can_be_drawn():
    assert figures.MODES.keys() - draw.COLOURS.keys() == {figures.PLAIN}
    assert draw.DASHES.keys() - {""} == grid.WIDTH.keys() - {""}


def test_what_is_claimed_is_said_where_data_parallelism_starves():
    """200 ms of 5,000 are 4 %: there 4 bits have to reach 99 %, with real compute 95 %. At 100
    Mbit/s data parallelism has 10 %, so nothing is claimed."""
    bits = dict(wire="float4_e3m0", carrier="host")
    found = [
        PLAIN,
        measured("data_parallel", 5000.0, wire="", carrier=""),
        measured("data_parallel", 2000.0, wire="", carrier="", rate="100"),
        measured("diloco", 201.0, **bits),
        measured("overlapped", 208.0, **bits, period_ms=[208.0] * 5),
        measured("eager", 201.0, **bits),
        measured("eager", 201.0),
        measured("eager", 201.0, **bits, rate="100"),
    ]
    [claim] = figures.claims(found, SETUP)
    assert claim == (
        "At 10 Mbit/s data parallelism has 4.0%; streaming, tau=4, float4_e3m0, host 96.2% over 5 "
        "periods (below 99%), eager, float4_e3m0, host 99.5% over 1 periods (at least 99%)."
    )
    assert claim in figures.table(found, SETUP)
    [real] = figures.claims(found, SETUP | {"fast_device_ms": 0.0})
    assert "host 96.2% over 5 periods (at least 95%)" in real
    nothing = ["No rate here leaves data parallelism less than 5%."]
    assert figures.claims(found[:1] + found[2:], SETUP) == nothing
