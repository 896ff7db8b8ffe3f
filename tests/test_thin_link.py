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
from benchmarks.link import hosts, process, rows
from benchmarks.link.rows import Row, Window
from maxdiloco.diloco import schedule
from maxdiloco.engine import data_parallel
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml

# -- arguments ----------------------------------------------------------------------------------


def test_rows_are_every_mode_wire_and_carrier_at_every_rate_between_two_plain_ones():
    _, found, _ = thin_link.arguments(
        ["modes=data_parallel,eager", "wires=int8,float32", "rates=unlimited,2.50", "periods=3"]
    )
    carriers = ["program", "host"] if "exchange_carrier" in known_keys() else ["program"]
    assert (found[0], found[-1]) == (Row("plain"), Row("plain", turn=1))
    assert found[1:-1] == [
        row
        for rate in ("unlimited", "2.5")
        for row in [
            Row("data_parallel", "", "", rate),
            *(Row("eager", wire, carrier, rate) for wire in ("int8", "float32")
              for carrier in carriers),
        ]
    ]  # fmt: skip


def known_keys():
    return set(base_yml.declared(thin_link.ROOT / "configs" / "base.yml"))


def test_the_names_of_the_benchmark_are_no_keys_of_the_trainer():
    keys = known_keys()
    assert set(thin_link.KEYS) <= keys
    assert not set(thin_link.OWN) & keys
    assert thin_link.SET_HERE - {"exchange_carrier"} <= keys


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("hosts=1", "hosts=1 is not a whole number of 2 or more. Use 2"),
        ("periods=1.5", "periods=1.5 is not a whole number of 1 or more"),
        ("delay_ms=nan", "delay_ms=nan is not a number of 0 or more. Use 0"),
        ("modes=eager,fast", "modes=eager,fast: 'fast' is not offered. Use all, or some of data_"),
        ("wires=int4", "wires=int4: 'int4' is not offered.*float4_e3m0"),
        ("carriers=pigeon", "carriers=pigeon: 'pigeon' is not offered"),
        ("rates=10,none", "rates=10,none: every rate is a number of Mbit/s.*or unlimited. Use"),
        ("rates=0", "rates=0: every rate is a number of Mbit/s from 0.1"),
        ("diloco_sync_period=x", "diloco_sync_period=x is not a whole number of 1 or more. Use 20"),
        ("num_communication_overlapping_steps=-1", "steps=-1 is not a whole number of 0 or more"),
        ("log_period=7", "log_period=7 does not divide diloco_sync_period=20.*Use log_period=20"),
        ("steps=5", "steps=5: steps is chosen for every row. Use hosts, "),
        ("hosst=3", "hosst=3: hosst is no key of the trainer. Use hosts, "),
    ],
)
def test_an_argument_that_cannot_work_is_refused(argument, message):
    with pytest.raises(ConfigError, match=message):
        thin_link.arguments([argument])


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
        [f"out={seen.out}", "modes=all", "wires=float32", "rates=10", "carriers=program", *more]
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
    assert "rows that were measured with another periods, fast_device_ms" in capsys.readouterr().err


def test_bytes_that_are_not_those_claimed_end_it_with_exit_code_1(capsys, tmp_path):
    """Chatter 100 a step, 1,100 sent: 1,000 are 1.053 of 950, 0.980 of 1,020, 1.136 of 880."""
    for claim, code in ((950.0, 0), (1020.0, 1), (880.0, 1)):
        row = measured("diloco", 400.0, claimed_per_step=claim)
        assert thin_link.report(tmp_path, SETUP, [PLAIN, row]) == code
        assert ("at 10 Mbit/s" in capsys.readouterr().out) == bool(code)


# -- what one row reads -------------------------------------------------------------------------


def test_the_window_is_whole_periods_after_two():
    assert rows.window(Row("eager", rate="5"), SETUP, PLAIN) == Window(40, 140, 141)


def test_data_parallelism_is_measured_about_as_long():
    """100 steps of 200 ms. 4 MB at 10 Mbit/s take 3.2 s: 20 s are 5.9 steps, so the least, 8; at
    160 Mbit/s 0.2 s: 50 steps.
    """
    assert rows.window(Row("data_parallel", rate="10"), SETUP, PLAIN) == Window(2, 10, 11)
    assert rows.window(Row("data_parallel", rate="160"), SETUP, PLAIN) == Window(2, 52, 53)


def test_the_keys_of_each_mode():
    setup = SETUP | {"has_carriers": False}

    def keys(row):
        return dict(key.split("=", 1) for key in rows.trainer_keys(row, setup, "f", 9))

    assert keys(Row("plain"))["diloco_sync_period"] == "1000000"
    assert keys(Row("data_parallel"))["enable_diloco"] == "false"
    streaming = keys(Row("streaming", "int8", "program"))
    assert streaming["num_communication_overlapping_steps"] == "0"
    assert streaming["num_diloco_fragments"] == "2"
    assert streaming["diloco_exchange_dtype"] == "int8"
    assert keys(Row("overlapped"))["num_communication_overlapping_steps"] == "4"
    eager = keys(Row("eager", "int8", "host"))
    assert eager["diloco_outer_overlap"] == "eager" and "num_diloco_fragments" not in eager
    assert "exchange_carrier" not in eager
    setup["has_carriers"] = True
    assert keys(Row("eager", "int8", "host"))["exchange_carrier"] == "host"


def test_the_tables_of_the_trainer_s_log_are_read(tmp_path):
    log = tmp_path / "log"
    table = (
        "model: tiny, 1,033,600 parameters\n"
        "fragment  layers  parameters  bytes on the wire  share\n"
        "0           none      49,280             24,887   5.2%\n"
        "1            0-1     492,160            248,832  52.0%\n"
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
