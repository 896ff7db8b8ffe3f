"""The report on compiled programs and its verdict; figures by hand."""

import re

import pytest

from maxdiloco.config import config
from maxdiloco.metrics import out_of_memory
from maxdiloco.parallel.chips import Chip
from maxdiloco.planning import compile_report, report_text
from maxdiloco.planning.compile_report import Report
from maxdiloco.planning.hlo.traffic import Collective, Timing
from maxdiloco.planning.program_costs import Memory, ProgramCost
from maxdiloco.run.remat_choice import memory_remedies

MIB = 2**20
CHIP = Chip(("TPU v5 lite",), 1e12, hbm_gib=1.0, clock_hz=1.5e9, ici_gbps=1600)


def memory(peak=100, elsewhere=50):
    return Memory(60 * MIB, 60 * MIB, 40 * MIB, peak * MIB, elsewhere * MIB)


def crossing(*, waited=0.0, least=0.0, busy=0.004, axes=("diloco",)):
    """On the link from a quarter of a program of 10 ms (and the wait) to its end."""
    timing = Timing(start=0.0025, done=0.010 + waited, busy=busy, waited=waited)
    return Collective("all-gather", "u8", axes, 1000, 1, False, 24, False, timing, least)


def program(name="inner", *, runs=3, crossings=(), **changes):
    gather = Collective("all-gather", "bf16", ("fsdp",), 2 * MIB, 4, False)
    reduce = Collective("all-reduce", "f32", ("fsdp",), MIB, 1, True)
    made = ProgramCost(
        name, runs, "step", "", 12.5, memory(), flops=2e12, seconds=0.010,
        crossings=tuple(crossings), inside=(gather, reduce),
    )  # fmt: skip
    return made._replace(**changes)


def a_report(*programs, chip=CHIP, **changes):
    made = Report(
        "tiny", 4, programs, chip, "v5e-4", devices_per_slice=4, devices_per_host=0, num_devices=8,
        gbps=25.0, flags={"XLA_FLAGS": ""}, tokens_per_step=4096, flops_per_token=6e6, tau=1,
        overlap="none", remedy="Use more devices in a slice.", ici={"data": 1, "fsdp": 32},
    )  # fmt: skip
    return made._replace(**changes)


def exchange(waited=0.0):
    return program("inner + exchange", runs=1, crossings=[crossing(waited=waited)])


def test_times_and_bytes_of_a_period():
    """Three plain steps and one with an exchange of which 1 of 4 ms is waited for."""
    found = a_report(program(), exchange(waited=0.001))
    assert found.step_seconds == pytest.approx((3 * 0.010 + 0.011) / 4)
    steps = found.cost("step")
    assert (steps.exposed, steps.busy, steps.dcn_bytes) == pytest.approx((0.001, 0.004, 1000))
    sent, busy = report_text.lines(found)[-6:-4]
    assert "1,000 bytes" in sent and "9.8%" in busy and "25.0%" in busy


def test_the_share_of_a_device_is_shown_with_the_link_of_its_host():
    """25 Gbit/s for each of four devices. If hosts are not known, only the device's share."""
    for hosts, of_host in ((0, None), (4, 100)):
        found = a_report(exchange(), devices_per_host=hosts)
        (line,) = [line for line in report_text.lines(found) if " 25 Gbit/s a device" in line]
        assert (" 100 a host of 4" in line) == (hosts == 4)
        assert compile_report.as_json(found)["dcn_bandwidth_gbps_per_host"] == of_host


def test_two_readings_of_send_done_are_told_where_they_differ():
    both = program(crossings=[crossing(waited=0.001, least=0.0005)], runs=2)
    found = a_report(both)
    assert set(report_text.SEND_DONE) <= set(report_text.lines(found))
    (line,) = [line for line in report_text.lines(found) if "u8" in line]
    assert line.split()[-2:] == ["1.000", "0.500"]
    same = program(crossings=[crossing(waited=0.001, least=0.001)])
    assert not set(report_text.SEND_DONE) & set(report_text.lines(a_report(same)))
    (told,) = compile_report.as_json(found)["programs"]
    assert told["dcn"][0]["exposed_seconds_least"] == 0.0005
    assert compile_report.as_json(found)["dcn_exposed_seconds_per_period_least"] == pytest.approx(
        0.001
    )


def test_what_runs_outside_the_steps_is_counted_apart():
    """An evaluation sends 1000 bytes in 1 of 10 periods; the start counts as once."""
    beside = program("evaluate", runs=0.1, when="outside", crossings=[crossing(waited=0.003)],
                     event="evaluation")  # fmt: skip
    start = program("init", runs=0, when="start", crossings=[crossing()])
    alone, found = a_report(program()), a_report(program(), beside, start)
    assert found.cost("step") == alone.cost("step") and found.step_seconds == alone.step_seconds
    numbers = [re.findall(r"[\d.]+", line) for line in report_text.lines(found)[-4:]]
    evaluated, none = ["100", "1.30", "4.3", "0.30"], ["0", "0.00", "0.0", "0.00"]
    assert numbers == [evaluated[:3], evaluated, none, none]
    told = compile_report.as_json(found)["outside_the_steps"]["evaluation"]
    assert told["exposed_seconds"] == pytest.approx(0.0003)
    assert any(line.split()[:2] == ["init", "once"] for line in report_text.lines(found))
    assert report_text.refusals(found, max_exposed_fraction=0.1) == []


def test_lines_and_json_have_each_program_transfer_and_axis():
    """2 ms of standing still: the transfer lies between 2.5 and 12 ms, beside 7.5 of the 10 ms of
    the program itself."""
    flags = {"XLA_FLAGS": "", "LIBTPU_INIT_ARGS": "--xla_enable_async_all_gather=true"}
    whole = a_report(program(), exchange(waited=0.002), flags=flags)
    lines = report_text.lines(whole)
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
    (plain, other) = compile_report.as_json(whole)["programs"]
    assert plain["dcn"] == [] and plain["memory"]["needed"] == 150 * MIB
    (cross,) = other["dcn"]
    assert (cross["bytes_per_slice"], cross["exposed_seconds"]) == (4000, 0.002)
    numbers = {ici["collective"]: ici["number"] for ici in other["ici"]}
    assert numbers == {"all-gather bf16": 4, "all-reduce f32": 1}


def test_an_unknown_kernel_is_a_line_and_refuses_nothing():
    """Control: without one there is no such line."""
    found = a_report(program(unknown_calls={"Odd": 8}), exchange())
    (line,) = [line for line in report_text.lines(found) if "Odd" in line]
    assert "inner" in line and "8 times" in line
    assert any("Odd" in line for line in report_text.verdict_lines(found))
    assert [each["unknown_calls"] for each in compile_report.as_json(found)["programs"]] == [
        {"Odd": 8},
        {},
    ]
    assert report_text.refusals(found, max_exposed_fraction=1) == []
    whole = a_report(program(), exchange())
    assert "unknown" not in " ".join(report_text.lines(whole) + report_text.verdict_lines(whole))


def test_off_tpu_there_are_no_times():
    cross = crossing()._replace(timing=None)
    one = program("inner + exchange", seconds=None, crossings=[cross])
    found = a_report(one, chip=None)
    assert found.step_seconds is None
    assert compile_report.as_json(found)["programs"][0]["dcn"][0]["bytes_per_device"] == 1000
    assert "3,000 bytes" in report_text.lines(found)[-5]


@pytest.mark.parametrize(
    ("refused", "line", "well"),
    [
        # 1 of 4 ms is a quarter.
        (
            exchange(waited=0.001),
            r"max_exposed_fraction=0.2: inner \+ exchange .*25.0%",
            exchange(waited=0.0008),
        ),
        # Traffic over slices inside a replica is not.
        (
            program(crossings=[crossing()]),
            ".* diloco",
            program(crossings=[crossing(axes=("data",))]),
        ),
        (program(too_big="Ran out of memory.", seconds=None), "inner ", program()),
        # 900 MiB of its own and 200 of the rest, of 1024; with less of the rest it fits.
        (
            program(memory=memory(peak=900, elsewhere=200)),
            "inner .*1,100 MiB",
            program(memory=memory(peak=900, elsewhere=100)),
        ),
    ],
)
def test_a_program_that_is_refused_is_named_with_its_number(refused, line, well):
    """Positive control: a program within the limits is not refused."""
    found, none = (
        report_text.refusals(a_report(one), max_exposed_fraction=0.2) for one in (refused, well)
    )
    assert len(found) in (1, 2) and re.match(line, found[-1])
    assert none == []


def test_what_was_not_compiled_is_never_shown_as_zero():
    """Positive control: the same report with all programs compiled has the figures."""
    big = program("inner", too_big="Ran out.", seconds=None, flops=0.0, inside=(),
                  memory=Memory(60 * MIB, 0, 0, 60 * MIB, 40 * MIB))  # fmt: skip
    whole, found = a_report(program(), exchange()), a_report(big, exchange())
    for figure in ("step_seconds", "dcn_bytes_per_device_and_step", "dcn_busy_seconds_per_period",
                   "dcn_exposed_seconds_per_period"):  # fmt: skip
        assert compile_report.as_json(whole)[figure] is not None
        assert compile_report.as_json(found)[figure] is None
    (inner, other) = compile_report.as_json(found)["programs"]
    for figure in ("flops_per_device", "dcn", "ici", "estimated_seconds"):
        assert inner[figure] is None
    assert other["flops_per_device"] and other["dcn"]
    lines = report_text.lines(found)
    assert not any("1,000 bytes" in line for line in lines), "control: the whole report has them"
    assert any("1,000 bytes" in line for line in report_text.lines(whole))
    row = next(line for line in lines if line.startswith("inner ") and "fit" not in line)
    assert row.split()[2:] == ["-"] * 6


def test_every_line_fits_100_columns():
    """The longest names there are, and sizes of a large model; the verdict's lines too."""
    name = "synchronise [48 layers, 12 leaves]"
    big = crossing()._replace(bytes_sent=1_610_612_736)
    made = program(name, crossings=[big], flops=9.9e15, seconds=12.3,
                   memory=memory(peak=123_456, elsewhere=99_999))  # fmt: skip
    assert max(map(len, report_text.lines(a_report(made)))) <= report_text.WIDTH
    name = "inner + exchange [0, 3, 6, 9, 12, 15 of 48 layers]"
    big = program(name, too_big="Ran out.", seconds=None, memory=memory(peak=10**6))
    remedy = "Use more devices in a slice or remat_policy=full. " * 2
    found = a_report(big, exchange(), remedy=remedy)
    assert max(map(len, report_text.verdict_lines(found))) <= report_text.WIDTH


# -- the verdict: what fits, how fast, what is exposed ---------------------------------------------


def synchronise(seconds):
    """An exchange at once, all of which is waited for."""
    return program("synchronise", runs=1, crossings=[crossing(busy=seconds, waited=seconds)])


def enough(made):
    found = compile_report.verdict(made)
    return found["bandwidth_enough_gbps"], found["tau_enough"]


def test_the_verdict_has_memory_speed_and_exposure():
    """150 of 1024 MiB; 4096 tokens in a step of (3 * 10 + 11) / 4 ms, which is 4096 * 6e6 FLOPs on
    8 devices of 1e12: 30 %; 1 of 41 ms exposed, and the other 3 of 4 ms of the link hide, so that
    a link of 4/3 the rate would do: 33.4 Gbit/s, in two digits 34."""
    lines = report_text.verdict_lines(a_report(program(), exchange(waited=0.001)))
    for line, named in zip(
        lines,
        (
            ["tiny"],
            ["fits", "150 of 1,024 MiB", "15%", "inner"],
            ["10.2 ms", "399,610 tokens/s", f"{399610 * 6e6 / 8 / 197e12:.1%} MFU"],
            ["1.00 ms", "2.44%", "25 Gbit/s"],
            ["dcn_bandwidth_gbps=34"],
        ),
        strict=True,
    ):
        assert all(each in line for each in named), line
    hidden = a_report(program(), exchange())
    assert compile_report.verdict(hidden)["bandwidth_enough_gbps"] is None
    off_tpu = report_text.verdict_lines(a_report(program(seconds=None), chip=None))
    assert "150 MiB" in off_tpu[1] and not re.search(r"\d", " ".join(off_tpu[2:]))


@pytest.mark.parametrize(
    ("ici", "remedy"),
    [
        ({"data": 1, "fsdp": 64}, "ici_data_parallelism=2 ici_fsdp_parallelism=32"),
        ({"data": 2, "fsdp": 128}, "ici_data_parallelism=8 ici_fsdp_parallelism=32"),
        ({"data": 2, "fsdp": 32}, None),
        ({"data": 64, "fsdp": 1}, None),
    ],
)
def test_an_axis_too_long_for_all_gathers_has_a_mesh_that_gathers(ici, remedy):
    lines = report_text.verdict_lines(a_report(program(), exchange(), ici=ici))
    text = " ".join(line.strip() for line in lines)
    assert (f"fsdp has {ici['fsdp']} " in text) == (remedy is not None)
    assert remedy is None or remedy in text
    assert "fsdp has" not in " ".join(
        report_text.verdict_lines(a_report(program(), ici=ici, chip=None))
    )


def test_what_is_waited_for_by_design_hides_with_a_larger_tau_and_on_no_link():
    """tau=0: all of 25 ms; three steps of 10 ms hide it. With H=3 they are the whole period."""
    found = a_report(program(), synchronise(0.025), tau=0)
    assert enough(found) == (None, 3)
    assert "num_communication_overlapping_steps=3 " in report_text.verdict_lines(found)[-1]
    assert enough(found._replace(period=3)) == (None, None)
    assert enough(a_report(program(), synchronise(0.05), tau=0)) == (None, None)
    assert any(
        "diloco_sync_period" in x for x in report_text.verdict_lines(found._replace(period=3))
    )
    assert not any("diloco_sync_period" in line for line in report_text.verdict_lines(found))


def test_tau_grows_with_what_a_fragment_takes():
    """tau=2, chunks of 14 ms of which 4 are waited for: 28 ms a fragment, three steps of 10."""
    crossings = [crossing(busy=0.014, waited=0.004)]
    step = program("inner + exchange", runs=2, crossings=crossings)
    found = a_report(program(), step, tau=2)
    assert enough(found) == (35.0, 3)  # 14 / 10 of 25
    assert enough(a_report(program(), step, tau=2, overlap="eager")) == (35.0, None)


@pytest.mark.parametrize(("used", "word"), [(900, "fits:"), (930, "fits tightly:")])
def test_more_than_nine_tenths_of_the_memory_is_tight(used, word):
    line = report_text.verdict_lines(a_report(program(memory=memory(peak=used, elsewhere=0))))[1]
    assert line.startswith(f"{word} {used} of 1,024 MiB a device ({used / 1024:.0%})")


def test_a_program_too_big_names_the_total_the_slice_and_a_remedy():
    """100 MiB of arguments, 400 of other state and 2500 of temporaries on 4 devices of 1024: 12
    devices hold as much, and v5e-16 is the next slice."""
    big = program(too_big="Ran out.", seconds=None,
                  memory=Memory(100 * MIB, 0, 2500 * MIB, 2600 * MIB, 400 * MIB))  # fmt: skip
    found = a_report(big, exchange())
    text = " ".join(" ".join(report_text.verdict_lines(found)).split())
    line, _ = report_text.refusals(found, max_exposed_fraction=1)
    for named in ("inner ", "3,000 of 1,024 MiB", "v5e-16", "Use more devices in a slice"):
        assert named in text and named in line
    assert "500 of state" in text and "2,500 of temporaries" in text
    assert compile_report.verdict(found)["fits"] is False
    assert compile_report.verdict(a_report(program(), exchange()))["topology_enough"] is None
    huge = big._replace(memory=Memory(0, 0, 10**6 * MIB, 10**6 * MIB, 0))
    assert "v5e" not in " ".join(report_text.verdict_lines(a_report(huge)))


@pytest.mark.parametrize(
    ("message", "arguments", "found"),
    [
        ("memory required for HLO temporaries (41.5G) exceeds available HBM (15.75G).", 7,
         int(41.5 * 2**30)),
        ("Used 20.5G of 15.75G hbm.", 2**30, int(19.5 * 2**30)),
        ("Used 512.0M of 256.0M hbm.", 2**30, 0),
        ("Something else.", 7, 0),
    ],
)  # fmt: skip
def test_the_compiler_s_message_tells_the_temporaries(message, arguments, found):
    assert out_of_memory.temporary_bytes(message, arguments) == found


def test_a_remedy_is_one_that_is_not_yet_on():
    cfg = config.load(["remat_policy=full", "per_device_batch_size=1"], {})
    for outer_state in (True, False):
        remedy = memory_remedies(cfg, outer_state=outer_state)
        assert "optimizer_memory_host_offload=true" in remedy
        assert ("diloco_outer_memory=pinned_host" in remedy) == outer_state
    for argv, has_policy in ((["remat_policy=minimal"], True), ([], False)):
        remedy = memory_remedies(config.load(argv, {}), outer_state=True)
        assert ("remat_policy" in remedy) == ("remat_policy=full" in remedy) == has_policy
