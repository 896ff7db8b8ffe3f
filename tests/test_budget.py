"""The default tier has a budget: the durations of its last run, which that run kept.

No figure of this run decides: a test that is too slow is named by the next run.
"""

import json

import durations
import pytest

WORKERS = 2
MINUTES = 12  # of the default tier on two quiet cores
LONGEST_S = 20


def over_budget(seconds):
    """What is over the budget, as lines; the ten slowest tests beside a sum that is."""
    lines = [
        f"{spent:.1f} s of {LONGEST_S}: {name}. Make it smaller, or mark it full"
        for name, spent in seconds.items()
        if spent > LONGEST_S
    ]
    total = sum(seconds.values())
    if total > WORKERS * MINUTES * 60:
        lines.append(f"{total:.0f} s of {WORKERS * MINUTES * 60} in all; the slowest:")
        lines += durations.slowest(seconds)
    return lines


def test_the_last_run_of_the_default_tier_kept_its_budget(request):
    """On a machine that was busy meanwhile, run `pytest --cache-clear` once."""
    seconds = request.config.cache.get(durations.CACHED, None)
    if seconds is None:
        pytest.skip("no run of scripts/test.sh has kept its durations here")
    assert over_budget(seconds) == []


def test_a_slow_test_and_a_slow_tier_are_named():
    assert over_budget({"tests/a.py::test_a": 20.0}) == []
    (line,) = over_budget({"tests/a.py::test_a": 20.1, "tests/a.py::test_b": 1.0})
    assert line.startswith("20.1 s of 20: tests/a.py::test_a. ")
    many = {f"tests/a.py::test_a[{n}]": 15 + n / 100 for n in range(96)}
    total, *ten = over_budget(many)
    assert total == "1486 s of 1440 in all; the slowest:"
    assert ten[0] == "   15.9 s  tests/a.py::test_a[95]"
    assert len(ten) == 10


def test_seconds_add_up_by_folder():
    seconds = {"tests/a/test_a.py::test_a": 1, "tests/a/b/test_b.py::t": 2, "tests/test_c.py::t": 4}
    assert durations.by_folder(seconds) == {"tests": 4, "tests/a": 3}


def test_a_run_of_pytest_says_where_its_time_went_and_keeps_it(pytester, request):
    """A fixture beside its test. Control: without the option nothing is kept."""
    pytester.makeconftest(
        f"import sys\nsys.path.insert(0, {str(request.path.parent)!r})\n"
        "from durations import pytest_addoption, pytest_configure  # noqa: F401\n"
    )
    pytester.makepyfile(
        "import time, pytest\n"
        "@pytest.fixture\ndef slow():\n    time.sleep(0.1)\n"
        "def test_a(slow):\n    time.sleep(0.2)\n"
    )
    kept = pytester.path / ".pytest_cache" / "v" / durations.CACHED
    said = pytester.runpytest_subprocess().stdout.str()
    assert "test_a_run_of_pytest_says_where_its_time_went_and_keeps_it.py::test_a" in said
    assert not kept.exists()
    pytester.runpytest_subprocess("--keep-durations")
    found = {name.partition("::")[2]: spent for name, spent in json.loads(kept.read_text()).items()}
    assert found.keys() == {"test_a", "test_a (setup)", "test_a (teardown)"}
    assert 0.2 <= found["test_a"] < 0.35 and 0.1 <= found["test_a (setup)"] < 0.2
