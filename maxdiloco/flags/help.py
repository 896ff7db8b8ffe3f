"""What --help prints: the usage and the keys, all of them or those that a word chooses."""

import re
import textwrap
from collections.abc import Iterable, Sequence

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml
from maxdiloco.flags.base_yml import Key, show

WIDTH = 100  # of a terminal, in characters; our choice
_ASKING = ("-h", "--help", "help")


def asked(argv: Sequence[str]) -> list[str]:
    """The word that asks for help and those behind it; none where help is not asked for."""
    places = [place for place, argument in enumerate(argv) if argument in _ASKING]
    return list(argv[places[0] :]) if places else []


def help_text(
    program: str,
    words: Sequence[str] = (),
    *,
    own: Sequence[str] = (),
    examples: Sequence[str] = (),
) -> str:
    """The usage, and keys by group with their defaults and meaning, in lines of WIDTH at most.

    Args:
      program: such as `maxdiloco.train`.
      words: names of groups or keys, parts of them, or words of their meaning; none: all.
      own: lines about options that the program alone has. They come first, and of the keys only
        the names follow.
      examples: arguments of the program.

    Raises ConfigError for a word that chooses nothing.
    """
    keys = list(base_yml.declared().values())
    names = ", ".join(dict.fromkeys(_name(key.group) for key in keys))
    if words:
        chosen = [key for word in words for key in _chosen(word, keys, names)]
        return "\n".join(_table([key for key in keys if key in chosen]))
    models = ", ".join(base_yml.model_names())
    intro = (
        "Later wins: configs/base.yml, the file of model_name, file.yml, environment M_<KEY>, "
        f"key=value. Model names: default, {models}. Where each default comes from, and why a "
        "resumed run may change a key or hosts may differ in it, is written in configs/base.yml."
    )
    lines = [
        f"usage: python -m {program} [file.yml] [key=value ...]",
        f"       python -m {program} --help [GROUP, KEY or WORD ...]    or --version",
        "",
    ]
    about = [
        *textwrap.wrap(intro, WIDTH, break_on_hyphens=False),
        *textwrap.wrap(f"Groups: {names}.", WIDTH),
    ]
    if not own:
        return "\n".join([*lines, *about, *_table(keys)])
    for example in examples:
        lines.append(f"  python -m {program} {example}")
    lines += ["", f"of {program} alone", *own, ""]
    lines.append("keys of a run, as of maxdiloco.train; --help GROUP or KEY says what they mean")
    for group in dict.fromkeys(key.group for key in keys):
        of_group = ", ".join(key.name for key in keys if key.group == group)
        text = f"{_name(group)}: {of_group}"
        lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    return "\n".join([*lines, "", *about])


def _table(keys: Iterable[Key]) -> list[str]:
    lines, group = [], ""
    for key in keys:
        if key.group != group:
            group = key.group
            lines += ["", group]
        resume = "may change on resume" if key.resume.startswith(base_yml.MAY_CHANGE) else ""
        hosts = "may differ between hosts" if key.hosts else ""
        lines += _lines(key, f"{key.name}={show(key.default)}", "  ", resume, hosts)
        for name, entry in key.entries.items():
            sign, (other, values) = " such as " if entry.required else "=", entry.read_with
            condition = f"with {other} {' or '.join(values)}" if other else ""
            lines += _lines(entry, f"{name}{sign}{show(entry.default)}", "      ", condition)
    return lines


def _lines(key: Key, name: str, indent: str, *more: str) -> list[str]:
    limits = "; ".join(part for part in (key.allowed, key.unit, *more) if part)
    return textwrap.wrap(
        f"{name}  {key.meaning}{f' [{limits}]' if limits else ''}",
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}    ",
        break_on_hyphens=False,
    )


def _chosen(word: str, keys: Sequence[Key], names: str) -> list[Key]:
    """The keys of a group, the key of that name, or those whose name or meaning holds the word.

    Also a key that other trainers call so.
    """
    of_group = [key for key in keys if _name(key.group) == word]
    of_name = [key for key in keys if key.name == word]
    called_so = [
        name for name, others in base_yml.read_table("other_trainers.yml").items() if word in others
    ]
    in_text = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE)
    holding = [
        key
        for key in keys
        if word in key.name or key.name in called_so or in_text.search(key.meaning)
    ]
    chosen = of_group or of_name or holding
    if not chosen:
        raise ConfigError(
            f"--help {word}: no group or key is named so, and no key's meaning holds the word. "
            f"Groups: {names}."
        )
    return chosen


def _name(group: str) -> str:
    return group.partition(":")[0]
