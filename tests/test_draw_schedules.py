"""The figure of the schedules is drawn from the schedule that runs follow."""

import importlib.util
import pathlib

ROOT = pathlib.Path(__file__).parents[1]


def test_the_figure_in_docs_is_current_and_shows_what_overlaps():
    """H=12, P=3, tau=3: nine chunks beside steps; eager: all twelve steps carry one."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "scripts" / "draw_schedules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figure = module.draw()
    assert (ROOT / "docs" / "schedules.svg").read_text(encoding="utf-8") == figure
    assert figure.count(">f0.2<") == 2 and figure.count(">f0.3<") == 1
    assert figure.count('fill="#cc2222"') == 1 + 3  # DiLoCo waits once, streaming three times
