"""The benchmark of thin links: its arguments, counters and arithmetic, and what a row is made of.

What needs root, to make network namespaces, is in test_thin_link_hosts.py.
"""

import io
import json
import pathlib
import signal
import types

import pytest
from thin_link_rows import PLAIN, SETUP, measured

from benchmarks import thin_link
from benchmarks.link import arguments, grid, hosts, process, rows
from benchmarks.link.arguments import Part
from benchmarks.link.grid import Row, Window
from maxdiloco.diloco import schedule
from maxdiloco.engine import data_parallel
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml

# -- times --------------------------------------------------------------------------------------


def test_a_step_begins_when_the_last_process_begins_it():
    """Two processes take turns in being first at an exchange: each one's own steps are uneven."""
    begun = [[0.0, 1.0, 9.0, 11.0], [0.5, 4.0, 6.0, 14.0]]
    assert rows.together(begun) == [0.5, 4.0, 9.0, 14.0]


# -- arguments ----------------------------------------------------------------------------------


def test_rows_are_every_mode_wire_and_carrier_at_every_rate_between_two_plain_ones():
    _, found, _ = arguments.arguments(
        ["modes=data_parallel,eager", "wires=int8,float32", "rates=unlimited,2.50"]
    )
    assert (found[0], found[-1]) == (Row("plain"), Row("plain", turn=1))
    assert found[1:-1] == [
        row
        for rate in ("unlimited", "2.5")
        for row in [
            Row("data_parallel", "", "", rate),
            *(Row("eager", wire, carrier, rate) for wire in ("int8", "float32")
              for carrier in ("program", "host")),
        ]
    ]  # fmt: skip


def test_lines_name_the_rows_in_place_of_modes_wires_and_carriers():
    [part] = arguments.parts(["lines=data_parallel,eager:int8:host", "rates=5"])
    assert part.rows == [
        Row("plain"),
        Row("data_parallel", rate="5"),
        Row("eager", "int8", "host", "5"),
        Row("plain", turn=1),
    ]
    with pytest.raises(ConfigError, match="wires=int8 and lines=data_parallel: .* Leave one of"):
        arguments.parts(["lines=data_parallel", "wires=int8"])


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


def known_keys():
    return set(base_yml.declared(rows.ROOT / "configs" / "base.yml"))


def test_the_names_of_the_benchmark_are_no_keys_of_the_trainer():
    keys = known_keys()
    assert set(arguments.KEYS) <= keys
    assert not set(arguments.OWN) & keys
    assert arguments.SET_HERE <= keys


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hosts=1", "hosts=1 is not a whole number of 2 or more. Use 2"),
        ("periods=1.5", "periods=1.5 is not a whole number of 1 or more"),
        ("delay_ms=nan", "delay_ms=nan is not a number of 0 or more. Use 0"),
        ("modes=eager,fast", "modes=eager,fast: 'fast' is not offered. Use all, or some of data_"),
        ("wires=int4", "wires=int4: 'int4' is not offered.*float4_e3m0"),
        ("carriers=pigeon", "carriers=pigeon: 'pigeon' is not offered"),
        ("lines=eager", "lines=eager: 'eager' is not data_parallel or mode:wire:carrier.*Use data"),
        ("lines=plain", "lines=plain: 'plain' is not data_parallel or mode"),
        ("lines=data_parallel:int8:host", "'data_parallel:int8:host' is not data_parallel or mode"),
        ("grid=all", "grid=all is not known. Use published"),
        ("other_periods=0", "other_periods=0 is not a whole number of 1 or more. Use 1"),
        ("row_seconds=0", "row_seconds=0 is not a number of 1 or more. Use 300"),
        ("rates=10,none", "rates=10,none: every rate is a number of Mbit/s.*or unlimited. Use"),
        ("rates=0", "rates=0: every rate is a number of Mbit/s from 0.1"),
        ("diloco_sync_period=x", "diloco_sync_period=x is not a whole number of 1 or more. Use 20"),
        ("num_communication_overlapping_steps=-1", "steps=-1 is not a whole number of 0 or more"),
        ("log_period=7", "log_period=7 does not divide diloco_sync_period=20.*Use log_period=20"),
        ("model_name=giant", "model_name=giant"),
        ("steps=5", "steps=5: steps is chosen for every row. Use grid, hosts, "),
        ("hosst=3", "hosst=3: hosst is no key of the trainer. Use grid, hosts, "),
    ],
)
def test_an_argument_that_cannot_work_is_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        arguments.parts([argument])


@pytest.fixture
def no_hosts(monkeypatch):
    """Hosts that must not be made; and the signals of this process stay as they are."""
    monkeypatch.setattr(thin_link, "hosts", lambda *_: pytest.fail("it makes hosts"))
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("no_hosts")
def test_without_root_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert thin_link.main([f"out={tmp_path}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ConfigError: user id 1000 may not make network namespaces")
    assert line.endswith("Run it as root.")


@pytest.mark.usefixtures("no_hosts")
@pytest.mark.parametrize("program", ["ip", "tc"])
def test_without_iproute2_one_line_and_exit_code_2(monkeypatch, capsys, tmp_path, program):
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    present = {"ip", "tc"} - {program}
    monkeypatch.setattr(hosts.shutil, "which", lambda name: name if name in present else None)
    assert thin_link.main([f"out={tmp_path}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ConfigError: the command {program} is not there")
    assert line.endswith("Install iproute2.")


# -- a run of rows ------------------------------------------------------------------------------


@pytest.fixture
def bench(no_hosts, monkeypatch, tmp_path):
    """Starts the benchmark with rows that measure nothing; `ends` says before which it is ended."""
    seen = types.SimpleNamespace(measured=[], ends=None, fails=None, out=tmp_path / "out")
    monkeypatch.setattr(thin_link, "check", lambda: None)
    monkeypatch.setattr(thin_link, "hosts", lambda *_: open("/dev/null"))

    def measure(row, setup, folder, plain):
        if row.mode == seen.ends:
            raise KeyboardInterrupt
        if row.mode == seen.fails:
            raise rows.RowError("exit codes [3, 5]")
        seen.measured.append(row.mode)
        assert (plain is None) == (not seen.measured[1:] and row.mode == "plain")
        return measured(row.mode, 200.0) | row._asdict() | {"period_ms": [200.0]}

    monkeypatch.setattr(thin_link, "measure", measure)
    seen.start = lambda *more: thin_link.main(
        [f"out={seen.out}", "wires=float32", "rates=10", "carriers=program", *more]
    )
    return seen


ALL = ["plain", "data_parallel", "diloco", "streaming", "overlapped", "eager", "plain"]


def test_a_run_that_was_ended_goes_on_at_its_row(bench):
    bench.ends = "streaming"
    assert bench.start() == 130
    assert bench.measured == ALL[:3] and not (bench.out / "table.md").exists()
    bench.measured.clear()
    bench.ends = None
    assert bench.start() == 0
    assert bench.measured == ALL[3:]
    assert sum("| 10 |" in line for line in (bench.out / "table.md").read_text().splitlines()) == 5


def test_a_row_that_fails_is_tried_again_and_the_others_are_measured(bench, capsys):
    bench.fails = "diloco"
    assert bench.start() == 1
    assert bench.measured == [mode for mode in ALL if mode != "diloco"]
    assert "failed: diloco-float32-program-10. The same command" in capsys.readouterr().err
    bench.measured.clear()
    bench.fails = None
    assert bench.start() == 0
    assert bench.measured == ["diloco"]


def test_rows_of_another_setup_are_not_mixed_in(bench, capsys):
    assert bench.start() == 0
    assert bench.start("periods=6", "fast_device_ms=180") == 2
    told = capsys.readouterr().err
    assert "rows that were measured with another periods, other_periods, fast_device_ms" in told


def test_bytes_that_are_not_those_claimed_end_it_with_exit_code_1(capsys, tmp_path):
    """Chatter 100 a step, 1,100 sent: 1,000 are 1.053 of 950, 0.980 of 1,020, 1.136 of 880."""
    for claim, code in ((950.0, 0), (1020.0, 1), (880.0, 1)):
        row = measured("diloco", 400.0, claimed_per_step=claim)
        assert thin_link.report(Part(SETUP, [], tmp_path), [PLAIN, row]) == code
        assert ("at 10 Mbit/s" in capsys.readouterr().out) == bool(code)


# -- what one row reads -------------------------------------------------------------------------


def test_the_window_is_whole_periods_after_the_first_exchanges_are_applied():
    """An exchange that waits for nothing is applied in its period, others in the next one."""
    assert grid.window(Row("eager", "int8", "host", "5"), SETUP, PLAIN) == Window(40, 140, 141)
    assert grid.window(Row("diloco", "int8", "host", "5"), SETUP, PLAIN) == Window(20, 120, 121)
    assert grid.window(Row("plain"), SETUP, None) == Window(40, 140, 141)


def test_the_lowest_rate_and_the_plain_step_measure_more_periods():
    setup = SETUP | {"other_periods": 2}
    assert grid.window(Row("eager", "int8", "host", "5"), setup, PLAIN) == Window(40, 140, 141)
    assert grid.window(Row("eager", "int8", "host", "10"), setup, PLAIN) == Window(40, 80, 81)
    assert grid.window(Row("plain", turn=1), setup, PLAIN) == Window(40, 140, 141)


def test_a_slow_row_measures_the_periods_that_row_seconds_have_room_for():
    """4 MB at 10 Mbit/s are 3.2 s, beside 20 steps of 200 ms 7.2 s a period; never none."""
    row = Row("diloco", "float32", "host", "10")
    for seconds, periods in ((72.1, 5), (29, 4), (15, 2), (1, 1)):
        span = grid.window(row, SETUP | {"row_seconds": seconds}, PLAIN)
        assert span == Window(20, 20 + 20 * periods, 21 + 20 * periods)


def test_data_parallelism_is_measured_about_as_long():
    """100 steps of 200 ms. 4 MB at 10 Mbit/s take 3.2 s: 20 s are 5.9 steps; at 160 Mbit/s 0.2 s:
    50 steps. 5 s have room for 1.5 of the former, and the least is 4.
    """
    row = Row("data_parallel", rate="10")
    assert grid.window(row, SETUP, PLAIN) == Window(2, 8, 9)
    assert grid.window(row._replace(rate="160"), SETUP, PLAIN) == Window(2, 52, 53)
    assert grid.window(row, SETUP | {"row_seconds": 5.0}, PLAIN) == Window(2, 6, 7)


def test_the_time_a_row_takes_is_told_from_those_before():
    """10 s around the steps of the plain row; 141 of 200 ms, and 1 MB of int8 at 10 Mbit/s, 0.8 s,
    hides behind a period.
    """
    row = Row("eager", "int8", "host", "10")
    assert grid.expected_s(row, SETUP, [PLAIN]) == pytest.approx(10 + 141 * 0.2)
    later = [PLAIN, PLAIN | {"start_s": 14.0}, PLAIN | {"start_s": 15.0}]
    assert grid.expected_s(row, SETUP, later) == pytest.approx(14 + 141 * 0.2)
    first = grid.START_S + 141 * (180 + grid.STEP_MS) / 1000
    assert grid.expected_s(Row("plain"), SETUP, []) == pytest.approx(first)


def test_the_keys_of_each_mode():

    def keys(row):
        return dict(key.split("=", 1) for key in rows.trainer_keys(row, SETUP, "f", 9))

    assert keys(Row("plain"))["diloco_sync_period"] == "1000000"
    assert keys(Row("data_parallel"))["enable_diloco"] == "false"
    streaming = keys(Row("streaming", "int8", "program"))
    assert streaming["num_communication_overlapping_steps"] == "0"
    assert streaming["num_diloco_fragments"] == "2"
    assert streaming["diloco_exchange_dtype"] == "int8"
    assert keys(Row("overlapped"))["num_communication_overlapping_steps"] == "4"
    eager = keys(Row("eager", "int8", "host"))
    assert eager["diloco_outer_overlap"] == "eager" and "num_diloco_fragments" not in eager
    assert eager["exchange_carrier"] == "host" and "exchange_carrier" not in keys(Row("plain"))


def test_the_tables_of_the_trainer_s_log_are_read(tmp_path):
    log = tmp_path / "log"
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


def test_the_claim_is_that_of_the_logs_in_the_window(tmp_path):
    """Logs at 20, 40 and 60, 70 at the end: those of 20..60 are 300 and 500 a step."""
    path = tmp_path / "metrics.jsonl"
    claims = {20: 100, 40: 300, 60: 500, 70: 900}
    path.write_text("".join(json.dumps({"step": t, "dcn/bytes_sent": x}) + "\n"
                            for t, x in claims.items()))  # fmt: skip
    assert rows.claimed(path, Window(20, 60, 70)) == 400
    assert rows.claimed(path, Window(41, 50, 70)) == 500
    path.write_text(json.dumps({"step": 20}) + "\n")
    assert rows.claimed(path, Window(20, 60, 70)) is None


def test_the_programs_of_an_inner_step_are_called_so():
    assert schedule.INNER.startswith(process.INNER)
    assert schedule.INNER_EXCHANGE.startswith(process.INNER)
    for name in (schedule.PACK, schedule.MERGE, schedule.SYNCHRONISE, schedule.OUTER_STEP):
        assert not name.startswith(process.INNER)
    source = pathlib.Path(data_parallel.__file__).read_text(encoding="utf-8")
    assert f'"{process.INNER[1]}",' in source


def test_an_inner_program_writes_its_time_and_sleeps_after_its_results():
    class Program:
        def __init__(self, name):
            self.name = name

        def __call__(self, x):
            order.append(self.name)
            return x

    order, trace = [], io.StringIO()
    process.trace_steps(Program, trace, 0.05, lambda results: order.append(f"waited {results}"))
    assert Program("pack")(1) == 1 and not trace.getvalue()
    assert Program("inner")(2) == 2 and Program("inner + exchange")(3) == 3
    assert order == ["pack", "inner", "waited 2", "inner + exchange", "waited 3"]
    first, second = map(float, trace.getvalue().split())
    assert second - first >= 0.05
