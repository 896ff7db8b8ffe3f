"""Sphinx settings of the documentation site, which scripts/docs.sh builds.

The source folder is the repository: the pages of benchmarks/ and tests/ belong to the site, and a
relative link leads to the same file on the site as on GitHub.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import site_pages  # noqa: E402  the line above makes it importable

project = "maxdiloco"
author = "The maxdiloco maintainers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/README.md",
    "benchmarks/link/README.md",
    "benchmarks/results/*",
    "tests/README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
# Folders that Sphinx would walk through; some hold thousands of files.
exclude_patterns = [".*", "build", "configs", "maxdiloco", "runs", "scripts", "tests/*/**"]

html_theme = "furo"
html_title = "maxdiloco"
html_copy_source = False

myst_heading_anchors = 3  # the anchors that GitHub gives to headings
myst_enable_extensions = ["attrs_inline"]  # anchors of the keys in the configuration reference

default_role = "literal"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app):
    """Fill the generated parts into pages as Sphinx reads them."""
    app.connect("source-read", _fill)


def _fill(app, docname, source):
    source[0] = site_pages.filled(docname, source[0])
