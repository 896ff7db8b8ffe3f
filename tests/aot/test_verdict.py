"""The verdict on compiled programs: what fits, how fast, what is exposed; figures by hand."""

import pytest
from test_report import CHIP, MIB, a_report, crossing, exchange, memory, program

from maxdiloco.aot import figures, report, verdict
from maxdiloco.aot.measure import Memory
from maxdiloco.flags import config
from maxdiloco.metrics import compiles

JOB = figures.Job(tokens_per_step=4096, flops_per_token=6e6, num_devices=8, tau=1, overlap="none",
                 topology="v5e-4", room="Use more devices in a slice.",
                 ici={"data": 1, "fsdp": 32})  # fmt: skip

V5E = CHIP._replace(kinds=("TPU v5 lite",))


def judged(*programs, chip=V5E, **changes):
    return a_report(*programs, chip=chip)._replace(job=JOB._replace(**changes))


def synchronise(busy, waited):
    """An exchange at once: on the link for `busy` s, of which `waited` are waited for."""
    cross = crossing()
    timing = cross.timing._replace(busy=busy, waited=waited)
    return program("synchronise", runs=1, crossings=[cross._replace(timing=timing)])


def test_the_verdict_stands_in_a_few_lines():
    """150 of 1024 MiB; 4096 tokens in a step of (3 * 10 + 11) / 4 ms, which is 4096 * 6e6 FLOPs on
    8 devices of 1e12: 30 %; 1 of 41 ms exposed, and the other 3 of 4 ms of the link hide, so that
    a link of 4/3 the rate would do: 33.4 Gbit/s, in two digits 34."""
    lines = verdict.lines(judged(program(), exchange(waited=0.001)))
    assert lines == [
        "verdict on tiny",
        "fits: 150 of 1,024 MiB a device (15%), most in inner",
        f"speed: 10.2 ms a step, 399,610 tokens/s, {399610 * 6e6 / 8 / 197e12:.1%} MFU (estimate; "
        "nothing was run)",
        "exposed: 1.00 ms (or 0.00) a period of 4 steps, 2.44% of the time, at 25 Gbit/s a device",
        "nothing would be exposed with dcn_bandwidth_gbps=34 (estimate)",
    ]


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
    lines = verdict.lines(judged(program(), exchange(), ici=ici))
    text = " ".join(line.strip() for line in lines)
    assert (f"fsdp has {ici['fsdp']} devices" in text) == (remedy is not None)
    assert remedy is None or f"Compare with {remedy}, which gathers" in text
    assert "fsdp has" not in " ".join(verdict.lines(judged(program(), ici=ici, chip=None)))


def test_nothing_exposed_needs_no_other_link():
    found = judged(program(), exchange())
    assert verdict.lines(found)[-1] == "exposed: nothing, at 25 Gbit/s a device"
    assert verdict.as_json(found)["bandwidth_enough_gbps"] is None


def test_what_is_waited_for_by_design_hides_with_a_larger_tau_and_on_no_link():
    """tau=0: all of 25 ms; three steps of 10 ms hide it. With H=3 they are the whole period."""
    found = judged(program(), synchronise(0.025, 0.025), tau=0)
    assert verdict.bandwidth_enough(found) is None
    assert verdict.tau_enough(found) == 3
    line = "nothing would be exposed with num_communication_overlapping_steps=3 (estimate)"
    assert verdict.lines(found)[-1] == line
    assert verdict.tau_enough(found._replace(period=3)) is None
    assert verdict.tau_enough(judged(program(), synchronise(0.05, 0.05), tau=0)) is None
    assert "use a longer diloco_sync_period" in verdict.lines(found._replace(period=3))[-2]


def test_tau_grows_with_what_a_fragment_takes():
    """tau=2, chunks of 14 ms of which 4 are waited for: 28 ms a fragment, three steps of 10."""
    step = program("inner + exchange", runs=2, crossings=[crossing()._replace(
        timing=crossing().timing._replace(busy=0.014, waited=0.004))])  # fmt: skip
    found = judged(program(), step, tau=2)
    assert verdict.tau_enough(found) == 3
    assert verdict.bandwidth_enough(found) == 35.0  # 14 / 10 of 25
    assert verdict.tau_enough(judged(program(), step, tau=2, overlap="eager")) is None


@pytest.mark.parametrize(("used", "word"), [(900, "fits:"), (930, "fits tightly:")])
def test_more_than_nine_tenths_of_the_memory_is_tight(used, word):
    line = verdict.lines(judged(program(memory=memory(peak=used, elsewhere=0))))[1]
    assert line.startswith(f"{word} {used} of 1,024 MiB a device ({used / 1024:.0%})")


def test_a_program_too_big_names_the_total_the_slice_and_a_remedy():
    """100 MiB of arguments, 400 of other state and 2500 of temporaries on 4 devices of 1024: 12
    devices hold as much, and v5e-16 is the next slice."""
    big = program(too_big="Ran out.", seconds=None,
                  memory=Memory(100 * MIB, 0, 2500 * MIB, 2600 * MIB, 400 * MIB))  # fmt: skip
    found = judged(big, exchange())
    text = " ".join(" ".join(verdict.lines(found)).split())
    assert "does not fit: inner needs at least 3,000 of 1,024 MiB a device" in text
    assert "500 of state, 2,500 of temporaries" in text
    assert "by arithmetic v5e-16 would do, if all of it is shared by more devices" in text
    assert "Use more devices in a slice not compiled, so not known below: inner" in text
    line = verdict.does_not_fit(found)
    for words in ("at least 3,000 of 1,024 MiB", "v5e-16 would do", "Use more devices in a slice."):
        assert words in line
    assert verdict.does_not_fit(judged(program(), exchange())) == ""
    assert "speed: not known exposed: not known" in text
    assert verdict.as_json(found)["fits"] is False
    assert verdict.as_json(judged(program(), exchange()))["topology_enough"] is None
    huge = big._replace(memory=Memory(0, 0, 10**6 * MIB, 10**6 * MIB, 0))
    assert "no known slice of this kind would do" in " ".join(verdict.lines(judged(huge)))


def test_off_tpu_there_is_memory_alone():
    lines = verdict.lines(judged(program(seconds=None), chip=None))
    assert lines[1] == "memory: 150 MiB a device, in inner"
    assert lines[2:] == ["speed: not known off TPU", "exposed: not known off TPU"]


def test_lines_of_the_verdict_fit_100_columns():
    name = "inner + exchange [0, 3, 6, 9, 12, 15 of 48 layers]"
    big = program(name, too_big="Ran out.", seconds=None, memory=memory(peak=10**6))
    found = judged(big, exchange(), room="Use more devices in a slice or remat_policy=full. " * 2)
    assert max(map(len, verdict.lines(found))) <= report.WIDTH


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
    assert compiles.temporaries(message, arguments) == found


def test_a_remedy_is_one_that_is_not_yet_on():
    cfg = config.load(["remat_policy=full", "per_device_batch_size=1"], {})
    room = (
        "Use more devices in a slice, diloco_outer_memory=pinned_host or "
        "optimizer_memory_host_offload=true."
    )
    assert compiles.make_room(cfg, outer_state=True) == room
    without = room.replace(", diloco_outer_memory=pinned_host", "")
    assert compiles.make_room(cfg, outer_state=False) == without
    elsewhere = (
        "Use more devices in a slice, diloco_outer_memory=pinned_host on the GPUs themselves or "
        "optimizer_memory_host_offload=true on the GPUs themselves."
    )
    assert compiles.make_room(cfg, outer_state=True, there=False) == elsewhere
    other = config.load(["remat_policy=minimal"], {})
    assert "remat_policy=full" in compiles.make_room(other, outer_state=True)
    auto = config.load([], {})
    assert "remat_policy" not in compiles.make_room(auto, outer_state=True)
