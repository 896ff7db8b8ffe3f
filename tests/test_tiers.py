"""What decides which tests run: the corners of grids, the markers, and what mutate.py breaks."""

import pathlib
from typing import NamedTuple

import mutate
import pytest
from tiers import corner, full

ROOT = pathlib.Path(__file__).parent.parent


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


def test_a_corner_that_is_no_case_is_refused():
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


@pytest.mark.parametrize("mutation", mutate.MUTATIONS, ids=lambda m: m.wrong)
def test_every_mutation_has_its_place(mutation):
    """Once, so that `python tests/mutate.py` breaks what it says."""
    text = (ROOT / "maxdiloco" / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
