"""The README names every file and only flags that exist."""

import pathlib
import re

from maxdiloco.flags import base_yml

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def missing_modules(text):
    names = {path.name for path in (ROOT / "maxdiloco").rglob("*.py")} - {"__init__.py"}
    return {name for name in names if not re.search(rf"(?<![\w]){re.escape(name)}", text)}


def test_every_module_is_in_the_tree():
    """Positive control: without the line of quantize.py that module is missing."""
    assert not missing_modules(README)
    without = "\n".join(line for line in README.splitlines() if "quantize.py" not in line)
    assert missing_modules(without) == {"quantize.py"}


def unknown_flags(text):
    folder = base_yml.config_folder(ROOT / "maxdiloco")
    known = set(base_yml.declared(folder / "base.yml"))
    used = re.findall(r"(?<=[ `])([a-z_]+)=[\w./-]+", text)
    return set(used) - known


def test_every_flag_in_the_readme_exists():
    """Positive control: a misspelt one is found. JAX_... and prompt= are not flags."""
    commands = "\n".join(line for line in README.splitlines() if "generate" not in line)
    known = {"key", "check", "out", "prompt", "mesh", "num_replicas", "sync_period", "max_to_keep"}
    known |= {"step_time", "slice_bandwidth_gbps"}
    assert unknown_flags(commands) <= known
    assert unknown_flags("use `stepz=5`") == {"stepz"}
