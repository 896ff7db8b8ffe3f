"""The documents: their links lead somewhere, and their figures are those of benchmarks/results."""

import importlib.util
import pathlib
import re

import pytest

from maxdiloco.config.keys import KEYS

ROOT = pathlib.Path(__file__).parents[1]


def script(name, folder="scripts"):
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_relative_link_and_anchor_exists(capsys):
    assert script("check_links").main() == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](other.md#a-b) [b](#here) `[no](link)` [w](https://x.y/z)\n# Here", None),
        ("[a](missing.md)", "missing.md: no such file"),
        ("[a](other.md#b)", "other.md#b: no such heading"),
        ("[two\nlines](#there)", "#there: no such heading"),
    ],
)
def test_a_broken_link_is_found(tmp_path, text, problem):
    (tmp_path / "other.md").write_text("# A `b`!\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    expected = [] if problem is None else [f"page.md: {problem}"]
    assert script("check_links").broken(tmp_path, [page]) == expected


def test_the_results_page_has_the_tables_of_the_results():
    """And the script notices a figure that differs."""
    results = script("results_page")
    page = results.PAGE.read_text(encoding="utf-8")
    assert results.written(page) == page
    assert results.written(page.replace("1.2864", "1.2865")) == page
    assert len(results.MARKER.findall(page)) > 20


def test_the_readme_s_table_is_that_of_the_results_page():
    """Reduction and loss of three modes; the papers' losses at 1B are relative to 2.49."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "reference" / "results.md").read_text(encoding="utf-8")
    published = re.search(r"^\| 1B \| (.*) \|$", page, re.M)[1].split(" | ")
    parallel, diloco, streaming, _, eager = map(float, published)
    for name, ours, paper in (
        ("DiLoCo, float32", "DiLoCo, H=30", diloco),
        ("Streaming DiLoCo, overlap of one step, 4 bits", "streaming, tau=1, 4 bits", streaming),
        ("eager updates, 4 bits", "eager, 4 bits", eager),
    ):
        row = re.search(rf"^\| {re.escape(name)} \| (\d+)x \| (\S+%) \| (\S+)% \|$", readme, re.M)
        source = re.search(rf"^\| {re.escape(ours)} \| .*? \| (\S+%) .* (\d+) \|$", page, re.M)
        assert row.groups()[:2] == (source[2], source[1]), name
        assert float(row[3]) == pytest.approx(100 * (paper / parallel - 1), abs=0.05), name


def test_the_site_generates_a_row_for_every_key():
    """With an anchor; a part that does not exist is an error."""
    site = script("site_pages", "docs")
    text = site.filled("docs/reference/configuration", "a\n<!-- generated: configuration -->\n")
    assert re.findall(r"^\| \[`(\w+)`\]\{#\1\}", text, re.M) == list(KEYS)
    with pytest.raises(KeyError):
        site.filled("docs/page", "<!-- generated: other -->")


def test_the_navigation_of_the_site_has_every_page():
    site = script("site_pages", "docs")
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    found = set(re.findall(r"^/(\S+\.md)$", site.navigation(text), re.M))
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"docs/index.md"} == {page for page in found if page.startswith("docs/")}


def test_the_commands_of_every_tutorial_are_run_and_their_outputs_compared():
    pages = script("run_pages")
    tutorials = {f"docs/tutorials/{path.name}" for path in ROOT.glob("docs/tutorials/*.md")}
    assert tutorials and tutorials <= set(pages.PAGES)
    for name in tutorials - {"docs/tutorials/own-loop.md"}:  # a test has its program
        assert pages.commands((ROOT / name).read_text()) and pages.outputs(
            (ROOT / name).read_text()
        )


@pytest.mark.parametrize(
    ("printed", "differing"),
    [
        ("step 2  loss 3.25  0.1 s  45 tok/s\nrun 8f00aa11\n", []),
        ("step 9  loss 3.25  7 min\nrun 12345678\n", []),
        ("step 2  eval 3.25  0.1 s\nrun 8f00aa11\n", ["step 1  loss 2.5  4 s ..."]),
        ("step 2  loss 3.25  0.1 s\n", ["run 1a2b3c4d"]),
    ],
)
def test_an_output_of_a_page_is_found_whatever_its_numbers(printed, differing):
    page = "```\nbash run.sh\n```\n\n```text\nstep 1  loss 2.5  4 s ...\nrun 1a2b3c4d\n```\n"
    assert script("run_pages").differing(page, printed) == differing
