"""The index from the papers' lines to functions: `maxdiloco/diloco/__init__.py`."""

import importlib
import re

import pytest

from maxdiloco import diloco

NAME = r"(?:data|diloco|engine|exchange|models|parallel|trainer)(?:\.\w+)+"
ROWS = re.findall(rf"^\| (\d+)(?:-(\d+))? +\|.*\| ({NAME}) +\|$", diloco.__doc__, re.MULTILINE)


def named(dotted):
    """The object of a name below `maxdiloco`: a module, then attributes of it."""
    folder, module, *attributes = dotted.split(".")
    item = importlib.import_module(f"maxdiloco.{folder}.{module}")
    for attribute in attributes:
        item = getattr(item, attribute)
    return item


def cited(docstring):
    """The lines of Algorithm 2 that a docstring names."""
    lines = set()
    for first, last in re.findall(r"\bline(?:s)? (\d+)(?:-(\d+))?", docstring):
        lines.update(range(int(first), int(last or first) + 1))
    return lines


@pytest.mark.parametrize("dotted", sorted(set(re.findall(rf"\b{NAME}", diloco.__doc__))))
def test_every_function_of_the_index_exists(dotted):
    assert callable(named(dotted))


@pytest.mark.parametrize("dotted", ["diloco.outer.absent", "parallel.absent.map_fn"])
def test_a_name_that_is_no_function_is_found(dotted):
    with pytest.raises((AttributeError, ModuleNotFoundError), match="absent"):
        named(dotted)


def test_every_line_of_algorithm_2_has_a_function():
    assert {int(first) for first, last, _ in ROWS if not last} == set(range(1, 13))
    assert len(ROWS) == diloco.__doc__.count("\n|") - 2  # all rows but the two of the heading


@pytest.mark.parametrize(("first", "last", "dotted"), ROWS)
def test_a_function_of_the_index_cites_its_line(first, last, dotted):
    lines = range(int(first), int(last or first) + 1)
    assert cited(named(dotted).__doc__) >= set(lines)


def test_lines_are_read_alone_and_in_ranges():
    assert cited("Algorithm 2, line 7: old minus new. Then lines 10-12.") == {7, 10, 11, 12}
    assert cited("Aligned to 8.") == set()
