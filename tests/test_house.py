"""Rules for the source text that ruff and lint-imports (pyproject.toml) do not check."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
CODE = ("maxdiloco", "tests", "scripts", "benchmarks")
SUFFIXES = {".py", ".sh", ".yml", ".yaml", ".md", ".txt", ".toml", ".env"}

# diloco/ holds numbers and pytrees: no file, clock, thread, device or configuration.
DILOCO_IMPORTS = {
    "bisect", "collections", "dataclasses", "enum", "fractions", "functools", "itertools", "jax",
    "math", "maxdiloco", "ml_dtypes", "numbers", "numpy", "operator", "optax", "statistics",
    "types", "typing",
}  # fmt: skip
# {rule: (pattern, text that breaks it)}
PACKAGE_RULES = {
    "broad except": (r"(?m)^ *except\b[^:]*\b(Base)?Exception\b", "except (OSError, Exception):"),
    "broad suppress": (r"\bsuppress\([^)]*\b(Base)?Exception\b", "with suppress(Exception):"),
    # etils asks /etc/passwd for the owner, and pathlib for the home: a container has neither.
    "stat of a path object": (r"\.stat\(\)", "path.stat().length"),
    "home of a path object": (r"(?<!os\.path)\.expanduser\(", "pathlib.Path(path).expanduser()"),
    "stub": (r"\braise NotImplementedError\b|(?m:(^|: ) *(\.\.\.|pass)$)", "def f():\n    ..."),
}
TEXT_RULES = {
    "path of one machine": (r"/wor[k]/|\.\./share[d]", "/wo" + "rk/main"),
    "unfinished merge": (r"(?m)^(<{7}|>{7}) ", "<" * 7 + " HEAD"),
    "registry host": (
        r"(?i)pypi\.or[g]|pythonhoste[d]|(?<!emit-)index-ur[l]|artifactor[y]",
        "pypi" + ".org",
    ),
}


def texts(*folders):
    """{path relative to the root: text} of the project's files in some of its folders."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
        for path in paths
        if path.suffix in SUFFIXES and path.is_file() and ".egg-info" not in str(path)
    }


def breaches(texts, pattern):
    return [
        f"{path}:{text.count(chr(10), 0, found.start()) + 1}: {found[0]}"
        for path, text in texts.items()
        for found in re.finditer(pattern, text)
    ]


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_the_package_has_no(rule):
    pattern, breach = PACKAGE_RULES[rule]
    assert breaches({"": breach}, pattern)
    assert breaches(texts("maxdiloco"), pattern) == []


@pytest.mark.parametrize("rule", TEXT_RULES)
def test_no_text_of_the_project_has_a(rule):
    pattern, breach = TEXT_RULES[rule]
    assert breaches({"": breach}, pattern)
    top = {path.name: path.read_text() for path in ROOT.iterdir() if path.suffix in SUFFIXES}
    top["Dockerfile"] = (ROOT / "Dockerfile").read_text()
    found = texts("configs", "docs", *CODE) | top
    assert len(found) > 300 and breaches(found, pattern) == []


def test_diloco_imports_numbers_and_pytrees_only():
    used = {
        name
        for text in texts("maxdiloco/diloco").values()
        for name in re.findall(r"(?m)^ *(?:import|from) (\w+)", text)
    }
    assert {"jax", "maxdiloco"} <= used <= DILOCO_IMPORTS
