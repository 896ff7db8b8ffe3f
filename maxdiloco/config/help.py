"""The text of --help, and the JSON schema of --schema."""

import json
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from maxdiloco.config import files
from maxdiloco.config.fields import Hosts
from maxdiloco.config.keys import KEYS, Config, Key
from maxdiloco.config.values import show
from maxdiloco.errors import ConfigError

WIDTH = 100  # characters of a line
_HELP = ("-h", "--help", "help")


def help_words(argv: Sequence[str]) -> list[str]:
    """Return the argument that requests help and all arguments after it; [] if there is none."""
    positions = [position for position, argument in enumerate(argv) if argument in _HELP]
    return list(argv[positions[0] :]) if positions else []


def help_text(
    program: str,
    words: Sequence[str] = (),
    *,
    own: Sequence[str] = (),
    examples: Sequence[str] = (),
) -> str:
    """Return the usage, examples and groups of keys; or, with `words`, the keys they select.

    Args:
      program: name of the program's module, such as `maxdiloco.train`.
      words: `all`, or names of groups or keys, parts of them, or words of their descriptions.
      own: lines about options that only this program has.
      examples: example arguments of the program.

    Raises:
      ConfigError: a word selects no key.
    """
    if words:
        selected = {key.name for word in words for key in _select(word)}
        return "\n".join(_table(key for key in KEYS.values() if key.name in selected))
    command = f"python -m {program}"
    lines = [
        f"usage: {command} [file.yml] [key=value ...]",
        f"       {command} --help [all, or a GROUP, KEY or WORD ...]    or --version",
        "",
        "examples:",
        *(f"  {command} {example}".rstrip() for example in examples),
        "",
        f"options of {program}:",
        *own,
        "",
        "groups of keys (configs/base.yml has every key; --help GROUP explains them):",
    ]
    titles = {key.group: key.title for key in KEYS.values()}
    lines += [f"  {group:<12}{title}" for group, title in titles.items()]
    start = ", ".join(key.name for key in KEYS.values() if key.start_here)
    models = ", ".join(files.model_names())
    for paragraph in (
        f"Keys to start with: {start}.",
        f"Models (model_name): default, {models}.",
    ):
        lines += ["", *textwrap.wrap(paragraph, WIDTH, break_on_hyphens=False)]
    return "\n".join(lines)


def tags(key: Key) -> str:
    """Return limits, unit and tags of a key, such as `[>= 1; inner steps; resume: free]`."""
    parts = [key.expected(brief=True), key.unit]
    parts += [f"resume: {key.resume.tag}"] if key.resume.tag != "fixed" else []
    parts += [f"hosts: {key.hosts.value}"] if key.hosts is not Hosts.SAME else []
    shown = "; ".join(filter(None, parts))
    return f"[{shown}]" if shown else ""


def schema_text() -> str:
    """Return the text that --schema prints: the JSON schema of a yml file, for editors."""
    schema = Config.model_json_schema()
    for name, key in KEYS.items():
        content = schema["properties"][name]
        _describe(content, key)
        if key.entry_table:
            properties = schema["$defs"][key.entry_table.__name__]["properties"]
            for entry in key.entries.values():
                _describe(properties[entry.name], entry)
        if "$ref" in content:  # {} means none, even with required entries
            content["anyOf"] = [{"$ref": content.pop("$ref")}, {"maxProperties": 0}]
    schema["title"] = "Keys of maxdiloco"
    schema["description"] = "A yml file of maxdiloco: any of these keys."
    return json.dumps(schema, indent=1)


def _describe(content: dict[str, Any], key: Key) -> None:
    """Replace the title and the tags of a key in the JSON schema by its description."""
    for unused in ("title", *key.field.json_schema_extra):
        content.pop(unused, None)
    content["description"] = key.description


def _table(keys: Iterable[Key]) -> list[str]:
    lines, group = [], ""
    for key in keys:
        if key.group != group:
            group = key.group
            lines += [*([""] if lines else []), f"{group}: {key.title}"]
        lines += _lines(key, f"{key.name}={show(key.default)}", "  ")
        for name, entry in key.entries.items():
            shown = f"{name}: {'' if entry.field.is_required() else show(entry.default)}".rstrip()
            lines += _lines(entry, shown, "      ")
    return lines


def _lines(key: Key, start: str, indent: str) -> list[str]:
    return textwrap.wrap(
        f"{start}  {key.description} {tags(key)}".rstrip(),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
    )


def _select(word: str) -> list[Key]:
    """Return the keys of a group, the key of that name, or all keys that contain the word.

    A key is also found by the name that other trainers use for it.
    """
    keys = list(KEYS.values())
    named = [key for key in keys if word in ("all", key.group, key.name)]
    if named:
        return named
    elsewhere = files.read_data("other_trainers.yml")
    pattern = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    containing = [
        key
        for key in keys
        if word in key.name
        or word in elsewhere.get(key.name, [])
        or pattern.search(key.description)
    ]
    if not containing:
        groups = ", ".join(dict.fromkeys(key.group for key in keys))
        raise ConfigError(f"--help {word}: no such group, key or word. Groups: {groups}.")
    return containing
