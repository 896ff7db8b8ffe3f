"""configs/base.yml as a table: every key with its group, default, type, limits and meaning."""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from maxdiloco import small_files
from maxdiloco.errors import ConfigError

MOST_NESTED = 10  # lists in a yml file; no key has more than 3
MAY_CHANGE = "may change, because "
SHAPES = "must stay, because it shapes the parameters."
MAY_DIFFER = "may differ, because "
PATHS_MAY_DIFFER = "paths may differ, because "
IS_READ, NOT_READ = "is read, because ", "is not read, because "


class Table(tuple):
    """A map of yml as pairs (name, value) in its order."""


Value = bool | int | float | str | tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of base.yml.

    allowed: see `allows`. unit: such as `inner steps`. source: where the default comes from.
    resume: MAY_CHANGE and the reason, or SHAPES, or empty. hosts: MAY_DIFFER or PATHS_MAY_DIFFER
    and the reason, or empty: the same in all processes of a run. stored: IS_READ or NOT_READ and
    the reason, or empty: see `of_host`.
    entries: those of a table, by their name in it; empty: any, or no table. An entry is a Key named
    `table.entry`. required: it has no default, and `default` is an example. condition: the entry
    that has to have one of some values for this one to be read, and the values; or nothing.
    """

    name: str
    group: str
    default: Value
    meaning: str
    allowed: str
    unit: str
    source: str
    resume: str
    hosts: str
    stored: str
    condition: str
    entries: Mapping[str, "Key"] = dataclasses.field(default_factory=dict)
    required: bool = False

    @property
    def of_host(self) -> bool:
        """Whether the key belongs to a host or its user: code, secrets, places, their settings.

        A checkpoint, which another person may have written, never gives such a key: it comes from
        the command line, a yml file named there, the environment, or its default.
        """
        if self.stored:
            return self.stored.startswith(NOT_READ)
        return bool(self.hosts) or self.group.startswith("islands")

    @property
    def read_with(self) -> tuple[str, list[str]]:
        """The condition as the name of the entry, empty for none, and its values."""
        other, _, values = self.condition.partition(" ")
        return other, values.split(" or ")

    def whole(self, table: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """The entries of a table, with the defaults of those that it leaves out."""
        return {name: entry.default for name, entry in self.entries.items()} | dict(table)


# The largest yml file: twenty times base.yml, which has every key and its comments.
_MOST_BYTES = 1 << 20
PACKAGE = pathlib.Path(__file__).parents[1]


def config_folder(package: pathlib.Path = PACKAGE) -> pathlib.Path:
    """The folder `configs`: inside the package when installed, beside it in a checkout.

    Raises ConfigError where there is neither.
    """
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "base.yml").is_file():
            return folder
    raise ConfigError(
        f"configs={package / 'configs'} holds no base.yml: the installation is incomplete. "
        f"Install maxdiloco again."
    )


def read_table(name: str) -> Any:
    """A yml file beside this one; by libyaml, ten times as fast, where PyYAML has it."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    text = pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=loader)


def read_yml(path: pathlib.Path, loader: Any = None, where: str = "") -> list[tuple[str, Any, int]]:
    """The keys of a yml file in its order, as (key, text or nested lists of text, line from 0).

    Scalars stay text, so that `1e-4` and `yes` mean what they mean on the command line. loader: of
    a file that nobody has to mend. where: the key and value that name it, for messages; "": its
    path.
    Raises ConfigError for a file that cannot be read, does not parse, is no table of keys, or
    holds a key twice.
    """
    where = where or str(path)
    try:
        content = small_files.read_bytes(path, _MOST_BYTES)
        node = yaml.compose(content, Loader=loader or _Loader)
    except OSError as error:
        raise ConfigError(
            f"{where} cannot be read: {error.strerror}. Give the path of a yml file, or none."
        ) from error
    except yaml.YAMLError as error:
        why = "it is not text"
        if isinstance(error, yaml.MarkedYAMLError):
            line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            why = f"{line}{error.problem}"
        raise ConfigError(
            f"{where} is not a yml file: {why}. Write one `key: value` a line."
        ) from error
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{where} holds no keys. Write one `key: value` a line.")
    entries: dict[str, tuple[str, Any, int]] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line
        if name in entries:
            raise ConfigError(
                f"{where} holds {name} twice, in lines {entries[name][2] + 1} and {line + 1}. "
                f"Keep one of them."
            )
        entries[name] = (name, _plain(value_node, path), line)
    return list(entries.values())


class _Loader(yaml.BaseLoader):
    """Refuses what makes a short text endless: anchors, aliases and deep nesting."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """PyYAML calls it for each node, nested ones included."""
        event, problem = self.peek_event(), ""
        if event.anchor is not None:
            problem = "& and * name and repeat values: write the value itself, or in quotes"
        elif self._depth > MOST_NESTED:
            problem = f"values are nested more than {MOST_NESTED} deep"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _plain(node: yaml.Node, path: pathlib.Path | str) -> Any:
    """Text, or nested tuples and Tables of text."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain(child, path) for child in node.value)
    names = [str(_plain(key, path)) for key, _ in node.value]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"{path}: {twice[0]} stands twice in one {{table}}. Keep one of them.")
    return Table(
        (name, _plain(child, path)) for name, (_, child) in zip(names, node.value, strict=True)
    )


def parse_list(text: str, where: str) -> Any:
    """A list or a table written in yml or JSON as nested tuples of text; None if it is neither.

    where: what gave it, for messages. Raises ConfigError for a name that a table has twice.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None
    return _plain(node, where) if isinstance(node, yaml.CollectionNode) else None


def allows(allowed: str, value: Any) -> bool:
    """Whether a limit admits a value; a list is admitted entry by entry.

    allowed: `` (anything), `one of a, b`, or terms joined by ` or `: `-1`, `>= 1`, `> 0`,
    `0 to 1` (ends included), `0 to below 1`, `a multiple of 2`. Raises ValueError for other
    wording.
    """
    if allowed.startswith("one of "):
        entries = value if isinstance(value, tuple) else (value,)
        return all(entry in choices(allowed) for entry in entries)
    return not allowed or any(_term(term, value) for term in allowed.split(" or "))


def choices(allowed: str) -> list[str]:
    """The names in `one of a, b`; `""` there is the empty text."""
    return [name.strip().strip('"') for name in allowed.removeprefix("one of ").split(",")]


def _term(term: str, value: float) -> bool:
    number = r"-?[0-9.]+(?:e[+-]?[0-9]+)?"
    first, *last = map(float, re.findall(number, term) or ["nan"])
    match re.sub(number, "n", term):
        case "n":
            return value == first
        case ">= n":
            return value >= first
        case "> n":
            return value > first
        case "n to n":
            return first <= value <= last[0]
        case "n to below n":
            return first <= value < last[0]
        case "a multiple of n":
            return value % first == 0
    raise ValueError(f"Allowed: {term} in base.yml is no known wording. Use one that allows() has.")


def infer(text: str | tuple[Any, ...]) -> Value:
    """A default of base.yml as a value; its type becomes the type of the key."""
    if isinstance(text, tuple):
        return text
    if text in ("true", "false"):
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if re.fullmatch(r"-?\d+(\.\d*)?(e-?\d+)?", text):
        return float(text)
    return text


def declared(path: pathlib.Path | None = None) -> dict[str, Key]:
    """Every key of base.yml, in its order. path: another base.yml than the package's."""
    loader = yaml.CBaseLoader if path is None and yaml.__with_libyaml__ else None
    path = path or config_folder() / "base.yml"
    lines = path.read_text(encoding="utf-8").splitlines()
    keys, group, read_to = {}, "", 0
    for name, text, line in read_yml(path, loader):
        comment: list[str] = []
        for above in lines[read_to:line]:
            if above.startswith("# == "):
                group = above.removeprefix("# == ")
            comment = [*comment, above[2:]] if above.startswith("# ") else []
        read_to = line + 1
        about, *entries = re.split(r" Entry (\w+)(=|, such as )(\S+): ", " ".join(comment))
        keys[name] = Key(
            name,
            group,
            infer(text),
            **_facts(about),
            entries={  # written `name=default: ...` or `name, such as value: ...`
                entry: Key(
                    f"{name}.{entry}", group, infer(value), **_facts(text), required=sign != "="
                )
                for entry, sign, value, text in zip(*[iter(entries)] * 4, strict=True)
            },
        )
    return keys


def _facts(comment: str) -> dict[str, str]:
    """`What it is. Allowed: x. Unit: y. Default: z.` and so on, by field of Key.

    The others are Resume, Hosts, Stored and With. Allowed, unit and condition come without their
    full stops.
    """
    names = ("allowed", "unit", "source", "resume", "hosts", "stored", "condition")
    fields = dict.fromkeys(names, "")
    meaning, *parts = re.split(r"(Allowed|Unit|Default|Resume|Hosts|Stored|With): ", comment)
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        field = {"Default": "source", "With": "condition"}.get(name, name.lower())
        stop = "." if name in ("Allowed", "Unit", "With") else ""
        fields[field] = text.strip().removesuffix(stop)
    return fields | {"meaning": meaning.strip()}


def as_lists(value: Any) -> Any:
    """A value as JSON gives it back: lists and dicts, not tuples."""
    if isinstance(value, Table):
        return {name: as_lists(entry) for name, entry in value}
    return [as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


def show(value: Any) -> str:
    """A value, or what as_lists makes of it, as it is written on the command line and in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Table | dict):
        return f"{{{', '.join(f'{name}: {show(entry)}' for name, entry in dict(value).items())}}}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(show(entry) for entry in value)}]"
    return str(value)


def model_names() -> list[str]:
    """The model files, without `.yml`."""
    return sorted(path.stem for path in (config_folder() / "models").glob("*.yml"))
