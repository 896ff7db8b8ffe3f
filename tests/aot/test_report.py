"""What the report on compiled programs says and refuses; figures by hand."""

import re

import pytest

from maxdiloco.aot import figures, report
from maxdiloco.aot.figures import Report
from maxdiloco.aot.hlo.collectives import Collective
from maxdiloco.aot.hlo.replay import Timing
from maxdiloco.aot.measure import Crossing, Measured, Memory
from maxdiloco.parallel.chips import Chip

MIB = 2**20
CHIP = Chip(("a chip",), 1e12, hbm_gib=1.0, clock_hz=1.5e9, ici_gbps=1600)


def memory(peak=100, elsewhere=50):
    return Memory(60 * MIB, 60 * MIB, 40 * MIB, peak * MIB, elsewhere * MIB)


def crossing(*, waited=0.0, least=0.0, axes=("diloco",)):
    """4 ms on the link, from a quarter of a program of 10 ms (and the wait) to its end."""
    timing = Timing(start=0.0025, done=0.010 + waited, busy=0.004, waited=waited)
    return Crossing("all-gather", "u8", axes, 1000, 24, 1, False, timing, least)


def program(name="inner", *, runs=3, crossings=(), **changes):
    gather = Collective("all-gather", "bf16", ("fsdp",), 2 * MIB, 4, False)
    reduce = Collective("all-reduce", "f32", ("fsdp",), MIB, 1, True)
    made = Measured(
        name, runs, "step", 12.5, "", 2e12, 0.010, 0, memory(), tuple(crossings), (gather, reduce)
    )
    return made._replace(**changes)


def a_report(*programs, chip=CHIP, period=4, flags=None):
    return Report("tiny", period, 4, chip, 25.0, programs, flags or {"XLA_FLAGS": ""})


def exchange(waited=0.0):
    return program("inner + exchange", runs=1, crossings=[crossing(waited=waited)])


def test_times_and_bytes_of_a_period():
    """Three plain steps and one with an exchange of which 1 of 4 ms is waited for."""
    found = a_report(program(), exchange(waited=0.001))
    assert found.step_seconds == pytest.approx((3 * 0.010 + 0.011) / 4)
    assert found.exposed_seconds == pytest.approx(0.001)
    assert found.busy_seconds == pytest.approx(0.004)
    assert found.bytes_per_step == 250
    assert report.lines(found)[-6:-4] == [
        "to other slices, a device and period of 4 steps: 1,000 bytes",
        "link busy 9.8% of the time, 25.0% of it exposed",
    ]


def test_the_share_of_a_device_is_told_beside_the_link_of_its_host():
    """25 Gbit/s for each of four devices. Where hosts are not known, the device's alone."""
    for hosts, of_host, told in ((0, None, ""), (4, 100, ", 100 a host of 4")):
        found = a_report(exchange())._replace(devices_per_host=hosts)
        assert f"what crosses slices, at 25 Gbit/s a device{told}" in report.lines(found)
        assert figures.as_json(found)["dcn_bandwidth_gbps_per_host"] == of_host


def test_two_readings_of_send_done_are_told_where_they_differ():
    both = program(crossings=[crossing(waited=0.001, least=0.0005)], runs=2)
    found = a_report(both)
    assert found.exposed_seconds_least == pytest.approx(0.001)
    assert set(report.SEND_DONE) <= set(report.lines(found))
    assert next(line for line in report.lines(found) if "u8" in line).split()[-2:] == [
        "1.000", "0.500",
    ]  # fmt: skip
    same = program(crossings=[crossing(waited=0.001, least=0.001)])
    assert not set(report.SEND_DONE) & set(report.lines(a_report(same)))
    (told,) = figures.as_json(found)["programs"]
    assert told["dcn"][0]["exposed_seconds_least"] == 0.0005
    assert figures.as_json(found)["dcn_exposed_seconds_per_period_least"] == pytest.approx(0.001)


def test_what_runs_beside_the_steps_is_counted_apart():
    """An evaluation sends 1000 bytes in 1 of 10 periods; the start counts as once."""
    beside = program("evaluate", runs=0.1, when="beside", crossings=[crossing(waited=0.003)],
                     event="evaluation")  # fmt: skip
    start = program("init", runs=0, when="start", crossings=[crossing()])
    alone, found = a_report(program()), a_report(program(), beside, start)
    for figure in ("step_seconds", "exposed_seconds", "busy_seconds", "bytes_per_step"):
        assert getattr(found, figure) == getattr(alone, figure)
    assert found.bytes_sent("beside") == pytest.approx(100)
    assert report.lines(found)[-4:] == [
        "beside the steps: 100 bytes, 1.30 ms, 4.3% of the steps' time",
        "  evaluation: 100 bytes to other slices, 1.30 ms, 4.3% of the steps' time, "
        "0.30 ms of it exposed",
        "  save: 0 bytes to other slices, 0.00 ms, 0.0% of the steps' time, 0.00 ms of it exposed",
        "  log step: 0 bytes to other slices, 0.00 ms, 0.0% of the steps' time, "
        "0.00 ms of it exposed",
    ]
    told = figures.as_json(found)["beside_the_steps"]["evaluation"]
    assert told["exposed_seconds"] == pytest.approx(0.0003)
    rows = [line.split() for line in report.lines(found)]
    assert ["init", "once"] in [row[:2] for row in rows]
    assert report.refusals(found, max_exposed_fraction=0.1) == []


def test_lines_have_each_program_transfer_and_axis():
    """2 ms of standing still: the transfer lies between 2.5 and 12 ms, beside 7.5 of the 10 ms of
    the program itself."""
    flags = {"XLA_FLAGS": "", "LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=true"}
    lines = report.lines(a_report(program(), exchange(waited=0.002), flags=flags))
    told = [line for line in lines if line.startswith("compiled under")]
    assert told == ["compiled under LIBTPU_INIT_ARGS=--xla_enable_async_all_gather=true"]
    (place,) = [i for i, line in enumerate(lines) if "u8" in line]
    assert lines[place - 1] == "inner + exchange", "the program stands above its rows"
    row = lines[place].split()
    assert row[-9:-2] == ["diloco", "1,000", "24", "21%", "100%", "75%", "4.000"]
    assert row[-2:] == ["2.000", "0.000"]
    assert any("all-reduce f32, waited for" in line for line in lines)
    gathers = next(line for line in lines if "all-gather bf16" in line).split()
    assert gathers[-3:] == ["4", "8.00", f"{8 * MIB * 8 / 1600e9 * 1e3:.3f}"]


def test_json_has_the_same_figures():
    (plain, other) = figures.as_json(a_report(program(), exchange(waited=0.001)))["programs"]
    assert plain["dcn"] == [] and plain["memory"]["needed"] == 150 * MIB
    (cross,) = other["dcn"]
    assert (cross["bytes_per_slice"], cross["exposed_seconds"]) == (4000, 0.001)
    numbers = {ici["collective"]: ici["number"] for ici in other["ici"]}
    assert numbers == {"all-gather bf16": 4, "all-reduce f32": 1}


def test_off_tpu_there_are_no_times():
    cross = crossing()._replace(timing=None)
    one = program("inner + exchange", seconds=None, crossings=[cross])
    found = a_report(one, chip=None)
    assert found.step_seconds is None
    assert figures.as_json(found)["programs"][0]["dcn"][0]["bytes_per_device"] == 1000
    assert report.lines(found)[-5].endswith("period of 4 steps: 3,000 bytes")


def refusals(*programs, chip=CHIP, most=0.2):
    return report.refusals(a_report(*programs, chip=chip), max_exposed_fraction=most)


def test_too_much_exposed_time_is_refused():
    """1 of 4 ms is a quarter. Positive control: nothing is refused that is well."""
    (line,) = refusals(exchange(waited=0.001))
    assert line.startswith("max_exposed_fraction=0.2: inner + exchange exposes 25.0% of its time")
    assert "num_communication_overlapping_steps" in line
    assert refusals(exchange(waited=0.001), most=0.25) == refusals(program(), exchange()) == []


def test_traffic_over_diloco_in_a_plain_step_is_refused():
    """Traffic over slices inside a replica is not."""
    (line,) = refusals(program(crossings=[crossing()]))
    assert line.startswith("a plain step sends bytes to other slices over diloco")
    assert refusals(program(crossings=[crossing(axes=("data",))])) == []


def test_a_program_that_the_compiler_refuses_is_refused():
    found = program(too_big="Ran out of memory.", seconds=None)
    assert refusals(found) == ["inner is too big for the chip: Ran out of memory."]
    assert "inner does not fit: Ran out of memory." in report.lines(a_report(found))


def test_what_was_not_compiled_is_never_shown_as_zero():
    """Positive control: the same report with all programs compiled has the figures."""
    big = program("inner", too_big="Ran out.", seconds=None, flops=0.0, inside=(),
                  memory=Memory(60 * MIB, 0, 0, 60 * MIB, 40 * MIB))  # fmt: skip
    whole, found = a_report(program(), exchange()), a_report(big, exchange())
    for figure in ("step_seconds", "dcn_bytes_per_device_and_step", "dcn_busy_seconds_per_period",
                   "dcn_exposed_seconds_per_period"):  # fmt: skip
        assert figures.as_json(whole)[figure] is not None
        assert figures.as_json(found)[figure] is None
    (inner, other) = figures.as_json(found)["programs"]
    assert [inner[name] for name in ("flops_per_device", "dcn", "ici", "estimated_seconds")] == [
        None, None, None, None,
    ]  # fmt: skip
    assert other["flops_per_device"] and other["dcn"]
    lines = report.lines(found)
    assert lines.count("not known: inner") == 2, "over slices and inside a slice"
    assert "to other slices, a device and period of 4 steps: not known" in lines
    assert "nothing" not in lines
    assert re.search("steps: 250 bytes|steps: 1,000 bytes", " ".join(report.lines(whole)))
    row = next(line.split() for line in lines if line.startswith("inner ")
               and "fit" not in line)  # fmt: skip
    assert row[2:] == ["-"] * 6


def test_every_line_fits_100_columns():
    """The longest names there are, and sizes of a large model."""
    name = "synchronise [48 layers, 12 leaves]"
    big = crossing()._replace(bytes_per_device=1_610_612_736)
    made = program(name, crossings=[big], flops=9.9e15, seconds=12.3,
                   memory=memory(peak=123_456, elsewhere=99_999))  # fmt: skip
    assert max(map(len, report.lines(a_report(made)))) <= report.WIDTH


def test_a_program_that_leaves_no_room_for_the_rest_is_refused():
    """900 MiB of its own and 200 of the rest, of 1024; without the rest it fits."""
    (line,) = refusals(program(memory=memory(peak=900, elsewhere=200)))
    assert line.startswith("inner needs 1,100 MiB a device with the rest of the run's state, but")
    assert refusals(program(memory=memory(peak=900, elsewhere=100))) == []
