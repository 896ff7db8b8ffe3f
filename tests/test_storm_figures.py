"""The figures of islands_storm.py: steps compared with a median step, and pauses."""

import pytest

from benchmarks.link import storm_figures
from benchmarks.link.storm_figures import Fault


def test_steps_are_beside_those_of_the_median_step():
    """Three starts take 3, 1 and 3 steps of 1 s. It lives 2 + 0 + 4 s, of which it stands still 3;
    from the first step to the end are 12 s."""
    times = {"a": [[0.0, 1.0, 2.0], [6.0], [7.0, 8.0, 11.0]]}
    (steps,) = storm_figures.given(times, {"a": 3.0}, end=12.0)
    assert steps == (7, 6 - 3, 12)


FAULTS = [Fault("kill", "a", 10.0, 13.0), Fault("store", "", 20.0, 30.0)]


@pytest.mark.parametrize(
    ("box", "steps", "longest"),
    [
        ("a", [0, 4, 5], {"no fault": 4}),
        ("b", [0, 4, 10.5, 12], {"no fault": 4, "kill": 6.5}),  # begins before, is of the fault
        ("b", [14, 19], {"kill": 5}),  # the last one before
        ("b", [11, 21], {"kill": 10}),  # it goes on when the pause begins, not the next one
        ("b", [22, 31], {"store": 9}),
        ("a", [9, 15, 19], {}),  # its own
        ("a", [14, 21], {}),  # begins in what its own has left
        ("a", [21, 29], {"store": 8}),
    ],
)
def test_a_pause_belongs_to_the_fault_of_another_box(box, steps, longest):
    """A new start of a process is not the end of a pause."""
    times = {box: [steps[:1], steps[1:]]}
    assert storm_figures.longest_pauses(times, FAULTS, begun=0.0) == longest
    assert storm_figures.longest_pauses(times, FAULTS, begun=23.0) == {}
    assert storm_figures.pauses_text({"store": 9, "kill": 6.54}) == "kill 6.5 s, store 9.0 s"
