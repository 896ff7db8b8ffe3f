"""Where the time of a run of the tests went: printed at its end, and kept for the next run.

The hooks that tests/conftest.py imports. With pytest-xdist the controller sees the reports of all
workers, so only it prints and writes.
"""

import collections

import pytest

CACHED = "maxdiloco/durations"  # in .pytest_cache, a folder that git ignores
SHOWN = 10


def by_folder(seconds):
    """{folder: summed seconds of the tests below it}, the largest first."""
    total = collections.Counter()
    for name, spent in seconds.items():
        total["/".join(name.partition("::")[0].split("/")[:-1][:2])] += spent
    return dict(total.most_common())


def slowest(seconds, count=SHOWN):
    """The `count` longest tests as lines, the longest first."""
    longest = sorted(seconds, key=seconds.get, reverse=True)[:count]
    return [f"{seconds[name]:7.1f} s  {name}" for name in longest]


class Durations:
    """Seconds on the clock of each test, and beside it of its set-up and tear-down."""

    def __init__(self):
        self.seconds = collections.Counter()

    def pytest_runtest_logreport(self, report):
        """One phase of one test has ended. What a fixture takes is none of its first test."""
        phase = "" if report.when == "call" else f" ({report.when})"
        self.seconds[report.nodeid + phase] += report.duration

    def pytest_terminal_summary(self, terminalreporter, config):
        """Prints the ten slowest tests and the sum of each folder, and keeps the durations of a
        run of the whole default tier."""
        if not self.seconds:
            return
        terminalreporter.section("where the time went")
        for line in slowest(self.seconds):
            terminalreporter.line(line)
        folders = by_folder(self.seconds).items()
        said = ", ".join(f"{name} {spent:.0f}" for name, spent in folders if spent >= 0.5)
        terminalreporter.line(f"{sum(self.seconds.values()):7.0f} s in all: {said}")
        if config.getoption("--keep-durations"):
            config.cache.set(CACHED, dict(self.seconds))


def pytest_addoption(parser):
    """The option of scripts/test.sh for a run of the whole default tier."""
    parser.addoption(
        "--keep-durations",
        action="store_true",
        help="keep the durations of this run for tests/test_budget.py of the next one",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Only the process that prints has durations of all tests."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(), "durations")
