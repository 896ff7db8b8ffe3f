"""The image of the Dockerfile, what the documents tell to install, pages beside the code."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import yaml

ROOT = pathlib.Path(__file__).parent.parent
# Packages of an index that a document may name; the project is none of them.
INDEXED = {"xpk", "jax", "wandb"}


def instructions(text):
    """(instruction, its text) of a Dockerfile, lines that go on joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"(?m)^#.*\n", "", text)).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def build(folder):
    """The Dockerfile's steps as plain commands; returns the folder of installed packages.

    Its pip installs into a folder of the test, and only what lies in the checkout.
    """
    site, work = folder / "site", folder / "work"
    work.mkdir(parents=True)
    pip = folder / "bin/pip"
    pip.parent.mkdir()
    pip.write_text(
        '#!/bin/bash\ncase "${@: -1}" in .*) ;; *) exit 0 ;; esac\n'
        f'exec {sys.executable} -m pip "$@" --quiet --no-index --no-deps --upgrade --target {site}'
    )
    pip.chmod(0o755)
    environ = {**os.environ, "PATH": f"{pip.parent}:{os.environ['PATH']}", "EXTRAS": "tpu,gcs"}
    for instruction, rest in instructions((ROOT / "Dockerfile").read_text(encoding="utf-8")):
        if instruction == "COPY":
            for name in rest.split()[:-1]:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, work / name, dirs_exist_ok=True)
                else:
                    shutil.copy2(ROOT / name, work / name)
        if instruction == "RUN":
            command = ["bash", "-c", rest]
            done = subprocess.run(
                command, cwd=work, env=environ, text=True, capture_output=True, timeout=300
            )
            assert done.returncode == 0, done.stderr
    return site, work


def test_the_image_holds_a_working_maxdiloco(tmp_path):
    """From its working folder: what is imported is the installed package, whole."""
    site, work = build(tmp_path)
    code = (
        "import maxdiloco; from maxdiloco.flags import config; print(maxdiloco.__file__); "
        "print(config.load(['model_name=35m'], {}).model_name, maxdiloco.DiLoCo.__name__)"
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=work, env=environ, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "maxdiloco/__init__.py"), "35m", "DiLoCo"]


def test_lines_of_a_dockerfile_are_joined():
    """Positive control: a step over three lines is one command."""
    assert instructions("# a\nFROM x\nRUN a \\\n  && b \\\n  && c\n") == [
        ("FROM", "x"),
        ("RUN", "a    && b    && c"),
    ]


def named_packages(text):
    """The first thing that each `pip install` is told to take from an index: no option, no path."""
    found = set()
    for rest in re.findall(r"pip install (.*)", text):
        words = re.sub(r"-c \S+", "", rest).split()
        wanted = next((word.strip("'\"`") for word in words if not word.startswith("-")), ".")
        found |= {re.match(r"[\w-]*", wanted)[0]} - {""}
    return found


def test_no_command_installs_a_package_that_no_index_has():
    """Positive control: the project's own name with an extra is found, a checkout is not."""
    assert named_packages("`pip install 'maxdiloco[tpu]'` or `pip install .[gcs]`") == {"maxdiloco"}
    assert named_packages("pip install --quiet maxdiloco") == {"maxdiloco"}
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "scripts").glob("*.sh")]
    texts += [*(ROOT / "maxdiloco").rglob("*.py"), ROOT / "configs/base.yml", ROOT / "Dockerfile"]
    joined = [re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8")) for path in texts]
    assert sum("pip install" in text for text in joined) > 5, "the texts are read at all"
    named = {path.name: named_packages(text) for path, text in zip(texts, joined, strict=True)}
    assert {name: found for name, found in named.items() if found - INDEXED - {"setuptools"}} == {}


def test_the_citation_is_yml_of_the_version_in_setup_py():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    version = re.search(r'version="([\d.]+)"', (ROOT / "setup.py").read_text(encoding="utf-8"))[1]
    assert cited["version"] == version
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_pages_say_that_no_licence_is_given_until_there_is_one():
    assert not list(ROOT.glob("LICEN[CS]E*"))
    for name in ("README.md", "CONTRIBUTING.md"):
        assert re.search(r"(?i)licen[cs]e.{0,20}none is given yet|no licence is given yet",
                         (ROOT / name).read_text(encoding="utf-8"))  # fmt: skip
    assert "the owner has not chosen one yet" in (ROOT / "setup.py").read_text(encoding="utf-8")
