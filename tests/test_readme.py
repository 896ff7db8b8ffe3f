"""What README and the pages beside it say of the code, and the figure that they show, are true."""

import ast
import importlib.util
import pathlib
import re

from maxdiloco.flags import base_yml

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "maxdiloco"
README = (ROOT / "README.md").read_text(encoding="utf-8")


def without_first_line(sources):
    """Names of modules whose docstring does not begin with a line of its own."""
    docs = {name: ast.get_docstring(ast.parse(text)) for name, text in sources.items()}
    return {name for name, doc in docs.items() if not re.match(r".{10,}[.:`]?(\n\n|$)", doc or "")}


def test_every_module_says_on_its_first_line_what_it_holds():
    """In place of a tree of files in README. Control: modules without such a line are found."""
    paths = sorted(PACKAGE.rglob("*.py"))
    sources = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in paths}
    assert len(sources) > 200 and without_first_line(sources) == set()
    bad = {"a": "x = 1", "b": '"""Outer."""', "c": '"""A line that\nruns on."""'}
    assert without_first_line(bad) == set(bad)


def test_every_folder_is_in_the_table_of_the_design():
    """Control: the row of a folder that is not there is missed."""
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| \d+ \| `(\w+)/` \|", design, re.M))
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rows == folders and "docs/design.md" in README and "cellar" not in rows


def copies(text):
    """Commands that replace the editable install of scripts/quickstart.sh by a copy."""
    return re.findall(r"pip install '?\.\[\w+", re.sub(r'"\s*f?"', "", text))


def test_an_extra_is_added_to_the_editable_install_and_does_not_replace_it():
    """Control: an extra without -e is found, quoted or not: zsh takes bare brackets for a glob."""
    texts = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *PACKAGE.rglob("*.py")]
    found = [copies(path.read_text(encoding="utf-8")) for path in texts]
    assert [copy for one in found for copy in one] == []
    assert "pip install -e '.[data,text]'" in README
    assert copies("pip install '.[gcs]'") and copies("pip install \"\n   f\"'.[tpu]'")
    assert copies("pip install .[gcs]")


def unknown_flags(text):
    folder = base_yml.config_folder(PACKAGE)
    known = set(base_yml.declared(folder / "base.yml"))
    used = re.findall(r"(?<=[ `])([a-z_]+)=[\w./-]+", text)
    return set(used) - known


def test_every_flag_in_the_readme_exists():
    """Positive control: a misspelt one is found. JAX_... and prompt= are not flags."""
    commands = "\n".join(line for line in README.splitlines() if "generate" not in line)
    known = {"key", "check", "out", "prompt", "mesh", "num_replicas", "sync_period", "max_to_keep"}
    known |= {"step_time", "slice_bandwidth_gbps", "latency_ms", "watch"}
    assert unknown_flags(commands) <= known
    assert unknown_flags("use `stepz=5`") == {"stepz"}


def test_the_figure_in_docs_is_current_and_shows_what_overlaps():
    """H=12, P=3, tau=3: nine chunks beside steps; eager: all twelve steps carry one."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "scripts" / "draw_schedules.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figure = module.draw()
    assert (ROOT / "docs" / "schedules.svg").read_text(encoding="utf-8") == figure
    assert figure.count(">f0.2<") == 2 and figure.count(">f0.3<") == 1
    assert figure.count('fill="#cc2222"') == 1 + 3  # DiLoCo waits once, streaming three times
