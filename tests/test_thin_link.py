"""The benchmark of thin links: its arguments, counters and arithmetic, and what a row is made of.

What needs root, to make network namespaces, is in test_thin_link_hosts.py.
"""

import io
import json
import pathlib
import types

import pytest
from thin_link_rows import PLAIN, SETUP, measured

from benchmarks import thin_link
from benchmarks.link import arguments, command, grid, process, rows
from benchmarks.link.arguments import Part
from benchmarks.link.grid import Row, Window
from maxdiloco.diloco import schedule
from maxdiloco.engine import data_parallel

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


# -- a run of rows ------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Starts the benchmark with rows that measure nothing; `ends` says before which it is ended."""
    seen = types.SimpleNamespace(measured=[], ends=None, fails=None, out=tmp_path / "out")
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
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
    bench.ends = None
    assert bench.start() == 0
    assert bench.measured == ALL
    assert (bench.out / "table.md").read_text().count("| 10 |") == 5


def test_a_row_that_fails_is_tried_again_and_the_others_are_measured(bench, capsys):
    bench.fails = "diloco"
    assert bench.start() == 1
    others = [mode for mode in ALL if mode != "diloco"]
    assert bench.measured == others
    assert "failed: diloco-float32-program-10. The same command" in capsys.readouterr().err
    bench.fails = None
    assert bench.start() == 0
    assert bench.measured == [*others, "diloco"]


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
        (EAGER._replace(rate="10"), {"other_periods": 2}, (40, 80)),
        (Row("plain", turn=1), {"other_periods": 2}, (40, 140)),
        # 4 MB at 10 Mbit/s are 3.2 s, beside 20 steps of 200 ms 7.2 s a period; never none.
        (SLOW, {"row_seconds": 72.1}, (20, 20 + 5 * 20)),
        (SLOW, {"row_seconds": 29}, (20, 20 + 4 * 20)),
        (SLOW, {"row_seconds": 15}, (20, 20 + 2 * 20)),
        (SLOW, {"row_seconds": 1}, (20, 20 + 20)),
        # About as long: 100 steps of 200 ms. 20 s are 5.9 steps of 3.4 s; at 160 Mbit/s 50 of 0.4.
        (PARALLEL, {}, (2, 8)),
        (PARALLEL._replace(rate="160"), {}, (2, 52)),
        # 5 s have room for 1.5 steps, and the least is 4.
        (PARALLEL, {"row_seconds": 5.0}, (2, 6)),
    ],
)
def test_a_row_measures_whole_periods_that_row_seconds_have_room_for(row, changes, window):
    found = grid.window(row, SETUP | changes, PLAIN)
    assert found == Window(*window, window[1] + 1)


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


@pytest.mark.parametrize(
    ("row", "given", "absent"),
    [
        (Row("plain"), "diloco_sync_period=1000000", "exchange_carrier"),
        (Row("data_parallel"), "enable_diloco=false", "exchange_carrier"),
        (
            Row("streaming", "int8", "program"),
            "num_communication_overlapping_steps=0 num_diloco_fragments=2 "
            "diloco_exchange_dtype=int8",
            "diloco_outer_overlap",
        ),
        (Row("overlapped"), "num_communication_overlapping_steps=4", "diloco_outer_overlap"),
        (
            Row("eager", "int8", "host"),
            "diloco_outer_overlap=eager exchange_carrier=host",
            "num_diloco_fragments",
        ),
    ],
)
def test_the_keys_of_each_mode(row, given, absent):
    found = rows.trainer_keys(row, SETUP, "f", 9)
    assert set(given.split()) <= set(found)
    assert not any(key.startswith(absent) for key in found)


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
