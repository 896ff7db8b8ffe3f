"""What README and the pages beside it say of the code, and the figure that they show, are true."""

import ast
import importlib.util
import pathlib
import re

import pytest

from maxdiloco.flags import base_yml

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "maxdiloco"
README = (ROOT / "README.md").read_text(encoding="utf-8")
# Packages of an index that a document may name; the project is none of them.
INDEXED = {"xpk", "jax", "wandb", "setuptools"}


def test_every_module_says_on_its_first_line_what_it_holds():
    """In place of a tree of files in README. Control: modules without such a line are found."""

    def without_first_line(text):
        doc = ast.get_docstring(ast.parse(text)) or ""
        return not re.match(r".{10,}[.:`]?(\n\n|$)", doc)

    sources = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    assert len(sources) > 150
    assert [path for path, text in sources.items() if without_first_line(text)] == []
    assert all(map(without_first_line, ("x = 1", '"""Outer."""', '"""A line that\nruns on."""')))


def test_every_folder_is_in_the_table_of_the_design():
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| \d+ \| `(\w+)/` \|", design, re.M))
    assert rows == {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert "docs/design.md" in README


def named_packages(text):
    """The first thing that each `pip install` is told to take from an index: no option, no path."""
    found = set()
    for rest in re.findall(r"pip install (.*)", text):
        words = re.sub(r"-c \S+", "", rest).split()
        wanted = next((word.strip("'\"`") for word in words if not word.startswith("-")), ".")
        found |= {re.match(r"[\w-]*", wanted)[0]} - {""}
    return found


def test_commands_install_what_an_index_has_and_extras_into_the_editable_install():
    """Controls: the project's own name is found, a checkout is not; an extra without -e, which
    would replace the install of scripts/quickstart.sh by a copy, is found, quoted or not: zsh takes
    bare brackets for a glob."""
    copy = r"pip install '?\.\[\w+"
    assert named_packages("`pip install 'maxdiloco[tpu]'` or `pip install .[hf]`") == {"maxdiloco"}
    assert named_packages("pip install --quiet maxdiloco") == {"maxdiloco"}
    assert all(re.search(copy, f"pip install {what}") for what in ("'.[buckets]'", ".[buckets]"))
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.sh")]
    texts += [*PACKAGE.rglob("*.py"), ROOT / "configs/base.yml", ROOT / "Dockerfile"]
    joined = {path: re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8")) for path in texts}
    assert sum("pip install" in text for text in joined.values()) > 5, "the texts are read at all"
    assert [path for path, text in joined.items() if named_packages(text) - INDEXED] == []
    assert [path for path, text in joined.items() if re.search(copy, text)] == []
    assert "pip install -e '.[data,text]'" in README


def test_every_flag_in_the_readme_exists():
    """Positive control: a misspelt one is found. JAX_... and prompt= are not flags."""
    declared = set(base_yml.declared(base_yml.config_folder(PACKAGE) / "base.yml"))

    def unknown_flags(text):
        return set(re.findall(r"(?<=[ `])([a-z_]+)=[\w./-]+", text)) - declared

    commands = "\n".join(line for line in README.splitlines() if "generate" not in line)
    known = {"key", "check", "out", "prompt", "mesh", "num_replicas", "sync_period", "max_to_keep"}
    known |= {"step_time", "dcn_bandwidth_gbps", "slice_bandwidth_gbps", "latency_ms", "report"}
    known |= {"watch"}
    assert unknown_flags(commands) <= known
    assert unknown_flags("use `stepz=5`") == {"stepz"}


def drawn(name):
    """The figure of a script."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw()


def test_the_figure_of_owners_is_current_and_has_the_bytes_of_the_table():
    """Of four slices, with 4 bits there and 8 back: 1.12 in the table of docs/slow_link.md."""
    figure = drawn("draw_owners")
    assert (ROOT / "docs" / "owners.svg").read_text(encoding="utf-8") == figure
    sent = [float(x) for x in re.findall(r">([\d.]+) in \d bits<", figure)]
    table = (ROOT / "docs" / "slow_link.md").read_text(encoding="utf-8")
    gathered, owned = re.search(r"^\| 4 \| ([\d.]+) \| ([\d.]+) ", table, re.M).groups()
    assert sum(sent) == pytest.approx(float(owned), abs=0.01)
    assert f"to all: {float(gathered):.3g}<" in figure


def test_the_figure_in_docs_is_current_and_shows_what_overlaps():
    """H=12, P=3, tau=3: nine chunks beside steps; eager: all twelve steps carry one."""
    figure = drawn("draw_schedules")
    assert (ROOT / "docs" / "schedules.svg").read_text(encoding="utf-8") == figure
    assert figure.count(">f0.2<") == 2 and figure.count(">f0.3<") == 1
    assert figure.count('fill="#cc2222"') == 1 + 3  # DiLoCo waits once, streaming three times
