"""What decides which tests run: the corners of grids, the markers, the budget of the default tier,
and what mutate.py breaks.
"""

import pathlib
import re
import sys
from typing import NamedTuple
from xml.etree import ElementTree

import mutate
import pytest
from tiers import corner, full

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = (ROOT / "scripts/test.sh").read_text(encoding="utf-8")
DURATIONS = ROOT / ".pytest_cache/v/durations.xml"
MINUTES = 12  # of the default tier on two quiet cores
LONGEST_S = 20


class Case(NamedTuple):
    a: int
    b: int


def test_what_is_not_in_the_corner_is_of_the_full_tier():
    """A plain tuple is the arguments of several names, a NamedTuple one argument."""
    found = corner([(1, 2), (3, 4)], [(3, 4)])
    assert [param.values for param in found] == [(1, 2), (3, 4)]
    assert [[mark.name for mark in param.marks] for param in found] == [["full"], []]
    (param,) = corner([Case(1, 2)], [])
    assert param.values == (Case(1, 2),) and [mark.name for mark in param.marks] == ["full"]
    assert [mark.name for mark in full("a").marks] == ["full"]
    with pytest.raises(AssertionError, match=r"no such case: \['c'\]"):
        corner(["a", "b"], ["a", "c"])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [((), ["a"]), (("-m", "not exhaustive"), ["a", "b"]), (("-m", "exhaustive"), ["c"])],
)
def test_the_default_tier_has_no_full_or_exhaustive_test(pytester, arguments, found):
    """By the settings of this project; an -m of the caller takes their place."""
    (pytester.path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    pytester.makepyfile(
        """
        import pytest
        def test_a(): pass
        @pytest.mark.full
        def test_b(): pass
        @pytest.mark.exhaustive
        def test_c(): pass
        """
    )
    run = pytester.runpytest_subprocess("--collect-only", "-q", *arguments)
    names = [line.partition("::test_")[2] for line in run.outlines if "::" in line]
    assert names == found


def over_budget(path):
    """What a run whose durations pytest has written to `path` had over the budget, as lines."""
    (suite,) = ElementTree.parse(path).getroot()
    spent = {f"{case.get('classname')}::{case.get('name')}": case.get("time") for case in suite}
    lines = [
        f"{seconds} s of {LONGEST_S}: {name}. Make it smaller, or mark it full"
        for name, seconds in spent.items()
        if float(seconds) > LONGEST_S
    ]
    whole = float(suite.get("time"))
    return lines + [f"{whole:.0f} s of {MINUTES * 60} in all"] * (whole > MINUTES * 60)


def test_the_last_run_of_the_default_tier_kept_its_budget():
    """No figure of this run decides. On a machine that was busy meanwhile, run
    `pytest --cache-clear` once."""
    if not DURATIONS.exists():
        pytest.skip("no run of scripts/test.sh has kept its durations here")
    assert over_budget(DURATIONS) == []


def test_a_slow_test_and_a_slow_tier_are_named(pytester, monkeypatch):
    """As scripts/test.sh has them written. What a fixture takes is none of its first test."""
    written, option = re.search(r"--junitxml=(\S+) (-o \S+)", SCRIPT).groups()
    assert ROOT / written == DURATIONS
    pytester.makepyfile(
        "import time, pytest\n"
        "@pytest.fixture\ndef slow():\n    time.sleep(0.5)\n"
        "def test_a(slow):\n    pass\n"
        "def test_b(slow):\n    time.sleep(0.2)\n"
    )
    pytester.runpytest(f"--junitxml={written}", *option.split())
    assert over_budget(pytester.path / written) == []
    monkeypatch.setattr(sys.modules[__name__], "LONGEST_S", 0.1)
    monkeypatch.setattr(sys.modules[__name__], "MINUTES", 0.01)
    one, whole = over_budget(pytester.path / written)
    assert re.match(r"0\.2\d* s of 0\.1: test_\w+::test_b\. ", one)
    assert whole == "1 s of 0.6 in all"


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda m: m.wrong)
def test_every_mutation_has_its_place(mutation):
    """Once, so that `python tests/mutate.py` breaks what it says."""
    text = (ROOT / "maxdiloco" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
