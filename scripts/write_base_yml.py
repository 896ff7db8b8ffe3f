"""Write configs/base.yml and configs/schema.json from the declared keys.

    python scripts/write_base_yml.py

A test compares both files with the output of this program.
"""

import pathlib
import sys
import textwrap
from collections.abc import Iterator

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from maxdiloco.config import help
from maxdiloco.config.files import PACKAGE
from maxdiloco.config.keys import KEYS, Key
from maxdiloco.config.values import show

WIDTH = 100
HEAD = """\
# yaml-language-server: $schema=schema.json
#
# Every key of maxdiloco with its default. Editors that read the line above complete and check keys;
# for your own file, write the path of the schema there (`python -m maxdiloco.train --schema`).
# A value may come from several sources, and the last one wins: this file, the model file of
# model_name, a yml file, the environment, the command line. The yml file is the first argument, the
# environment has M_ and the key in capitals, and the command line has key=value.
#
# Brackets have the limits, the unit and these tags:
#   start here       most runs set this key
#   resume: free     a resumed run may change it; without the tag a change is refused
#   resume: drops in-flight    it may change, and the exchanges in flight are dropped
#   hosts: may differ          processes of one run may have different values
#   hosts: paths may differ    each has a path, or none has
# Keys that MaxText has too have its names: see docs/howto/migrate-from-maxtext.md.
"""


def text() -> str:
    """Return the content of base.yml."""
    return "\n".join([HEAD, *_lines()])


def _lines() -> Iterator[str]:
    group, heading = "", ""
    for key in KEYS.values():
        if key.group != group:
            group, heading = key.group, ""
            yield f"# == {group}: {key.title}\n"
        if key.heading != heading:
            heading = key.heading
            yield f"# -- {heading}\n"
        yield from _comment(key, "")
        for entry in key.entries.values():
            yield from _comment(entry, f"  {entry.name}: ")
        yield f"{key.name}: {_value(key)}\n"


def _comment(key: Key, start: str) -> list[str]:
    tags = help.tags(key)
    if key.start_here:
        tags = tags.replace("[", "[start here; ", 1) if tags else "[start here]"
    line = f"# {start}{key.description} {tags}".rstrip()
    if len(line) <= WIDTH:
        return [line]
    indent = "#     " if start else "# "
    lines = textwrap.wrap(
        f"{start}{key.description}",
        WIDTH,
        initial_indent="# ",
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return [*lines, f"{indent}{tags}"] if tags else lines


def _value(key: Key) -> str:
    return '""' if key.default == "" else show(key.default)


def main() -> None:
    """Write both files."""
    folder = PACKAGE.parent / "configs"
    (folder / "base.yml").write_text(text(), encoding="utf-8")
    (folder / "schema.json").write_text(f"{help.schema_text()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
