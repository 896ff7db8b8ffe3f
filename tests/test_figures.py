"""The figures in docs/ are those that the scripts draw now."""

import importlib.util
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def drawn(name):
    """The figure of a script."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw()


def test_the_figure_of_owners_is_current_and_has_the_bytes_of_the_table():
    """Of four slices, with 4 bits there and 8 back: 1.12 in the table of wire-formats.md."""
    figure = drawn("draw_reduce_scatter")
    assert (ROOT / "docs" / "figures" / "reduce_scatter.svg").read_text(encoding="utf-8") == figure
    sent = [float(x) for x in re.findall(r">([\d.]+) in \d bits<", figure)]
    table = (ROOT / "docs" / "concepts" / "wire-formats.md").read_text(encoding="utf-8")
    gathered, owned = re.search(r"^\| 4 \| ([\d.]+) \| ([\d.]+) ", table, re.M).groups()
    assert sum(sent) == pytest.approx(float(owned), abs=0.01)
    assert f"to all: {float(gathered):.3g}<" in figure


def test_the_figure_in_docs_is_current_and_shows_what_overlaps():
    """H=12, P=3, tau=3: nine chunks beside steps; eager: all twelve steps carry one."""
    figure = drawn("draw_schedules")
    assert (ROOT / "docs" / "figures" / "schedules.svg").read_text(encoding="utf-8") == figure
    assert figure.count(">f0.2<") == 2 and figure.count(">f0.3<") == 1
    assert figure.count('fill="#cc2222"') == 1 + 3  # DiLoCo waits once, streaming three times
