"""The index from the papers' lines to functions: `maxdiloco/diloco/__init__.py`."""

import importlib
import re

import pytest

from maxdiloco import diloco

NAME = r"(?:data|diloco|engine|models|parallel|run)(?:\.\w+)+"
ROWS = re.findall(rf"^\| (\d+)(?:-(\d+))? +\|.*\| ({NAME}) +\|$", diloco.__doc__, re.MULTILINE)


def named(dotted):
    """The object of a name below `maxdiloco`: a module, then attributes of it."""
    folder, module, *attributes = dotted.split(".")
    item = importlib.import_module(f"maxdiloco.{folder}.{module}")
    for attribute in attributes:
        item = getattr(item, attribute)
    return item


def lines_of(first, last):
    return set(range(int(first), int(last or first) + 1))


def test_every_function_of_the_index_exists():
    """Controls: names that are none."""
    for dotted in re.findall(rf"\b{NAME}", diloco.__doc__):
        assert callable(named(dotted)), dotted
    for dotted in ("diloco.outer.absent", "parallel.absent.map_fn"):
        with pytest.raises((AttributeError, ModuleNotFoundError), match="absent"):
            named(dotted)


def test_every_line_of_algorithm_2_has_a_function_that_cites_it():
    assert {int(first) for first, last, _ in ROWS if not last} == set(range(1, 13))
    assert len(ROWS) == diloco.__doc__.count("\n|") - 2  # all rows but the two of the heading
    for first, last, dotted in ROWS:
        cited = re.findall(r"\blines? (\d+)(?:-(\d+))?", named(dotted).__doc__)
        assert lines_of(first, last) <= set().union(*(lines_of(*pair) for pair in cited)), dotted
