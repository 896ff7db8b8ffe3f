"""Which cases of a grid the default tier runs: a corner of it; the full tier runs all."""

import pytest


def corner(cases, kept):
    """The cases as parameters; one that is not in `kept` runs in the full tier alone.

    A case that is a plain tuple stands for the arguments of several names, a NamedTuple for one.
    """
    cases = list(cases)
    missing = [case for case in kept if case not in cases]
    assert not missing, f"no such case: {missing}"

    def parameters(case):
        values = case if type(case) is tuple else (case,)
        return pytest.param(*values, marks=() if case in kept else pytest.mark.full)

    return [parameters(case) for case in cases]


def full(*values):
    """A case that runs in the full tier alone."""
    return pytest.param(*values, marks=pytest.mark.full)
