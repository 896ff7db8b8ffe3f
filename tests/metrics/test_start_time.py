"""The parts of the time until the end of a run's first step."""

from maxdiloco.metrics.start_time import StartClock


def test_all_of_the_time_is_shared_out_and_a_part_may_come_twice():
    """From 100 s on: 2 for imports, 0.5 + 0.25 for a restore with 4 s of compiling between."""
    times = iter([100.0, 102.0, 102.5, 106.5, 106.75, 107.0])
    clock = StartClock(clock=lambda: next(times))
    assert clock.begun == 100.0
    assert [clock.lap(what) for what in ("imports", "restore", "compile", "restore")] == [
        2.0, 2.5, 6.5, 6.75,
    ]  # fmt: skip
    line = clock.line("first step")
    assert " 7.0 s" in line
    for part in ("imports 2.0", "restore 0.8", "compile 4.0", "first step 0.2"):
        assert part in line
