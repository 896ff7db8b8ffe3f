"""Read YAML files: configuration files, whose values stay text, and files of the package."""

import pathlib
from typing import Any

import yaml

from maxdiloco import small_files
from maxdiloco.errors import ConfigError

PACKAGE = pathlib.Path(__file__).parents[1]
_MAX_NESTED = 10  # levels of nesting in a yml file; no key has more than 3
# The largest yml file: forty times base.yml, which has every key and its comments.
_MAX_BYTES = 1 << 20


def config_folder(package: pathlib.Path = PACKAGE) -> pathlib.Path:
    """Return the folder `configs`: inside the package when installed, next to it in a checkout.

    Raises:
      ConfigError: neither folder exists.
    """
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "base.yml").is_file():
            return folder
    raise ConfigError(
        f"configs={package / 'configs'} has no base.yml: the installation is incomplete. "
        "Install maxdiloco again."
    )


def model_names() -> list[str]:
    """Return the names of the model files, without `.yml`."""
    return sorted(path.stem for path in (config_folder() / "models").glob("*.yml"))


def read_data(name: str) -> Any:
    """Read a yml file in this module's folder, with libyaml if PyYAML has it: ten times as fast."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    text = pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")
    return yaml.load(text, Loader=loader)


def read_yml(path: pathlib.Path, *, source: str = "", trusted: bool = False) -> dict[str, Any]:
    """Read the keys of a yml file, as text or nested tuples and dicts of text.

    Scalars stay text, so that `1e-4` and `yes` have the same meaning as on the command line.

    Args:
      path: the file.
      source: name of the file in messages, such as a key with its value; by default the path.
      trusted: whether the file belongs to the package; a faster parser then reads it.

    Raises:
      ConfigError: the file cannot be read or parsed, is not a table, or has a key twice.
    """
    source = source or str(path)
    loader = yaml.CBaseLoader if trusted and yaml.__with_libyaml__ else _Loader
    try:
        node = yaml.compose(small_files.read_bytes(path, _MAX_BYTES), Loader=loader)
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be read: {error.strerror}. Give the path of a yml file, or none."
        ) from error
    except yaml.YAMLError as error:
        reason = "it is not text"
        if isinstance(error, yaml.MarkedYAMLError):
            line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
            reason = f"{line}{error.problem}"
        raise ConfigError(
            f"{source} is not a yml file: {reason}. Write one `key: value` a line."
        ) from error
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{source} has no keys. Write one `key: value` a line.")
    lines: dict[str, int] = {}
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name, line = str(key_node.value), key_node.start_mark.line + 1
        if name in lines:
            raise ConfigError(
                f"{source} has {name} twice, in lines {lines[name]} and {line}. Keep one of them."
            )
        lines[name] = line
        values[name] = _plain(value_node, source)
    return values


def parse_nested(text: str) -> tuple | dict | None:
    """Parse a list or a table written in yml or JSON as nested tuples and dicts of text.

    Returns:
      The value, or None if the text is neither a list nor a table.

    Raises:
      ConfigError: a table has a name twice.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None
    return _plain(node, text) if isinstance(node, yaml.CollectionNode) else None


class _Loader(yaml.BaseLoader):
    """A loader that refuses anchors, aliases and deep nesting, which can make short text huge."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose one node; PyYAML calls it for nested nodes as well."""
        event, problem = self.peek_event(), ""
        if event.anchor is not None:
            problem = "& and * name and repeat values: write the value itself, or in quotes"
        elif self._depth > _MAX_NESTED:
            problem = f"values are nested more than {_MAX_NESTED} deep"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


def _plain(node: yaml.Node, source: str) -> Any:
    """Return a node as text, or as nested tuples and dicts of text."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    if isinstance(node, yaml.SequenceNode):
        return tuple(_plain(child, source) for child in node.value)
    table: dict[str, Any] = {}
    for key_node, value_node in node.value:
        name = str(_plain(key_node, source))
        if name in table:
            raise ConfigError(f"{source}: {name} is twice in one table. Keep one of them.")
        table[name] = _plain(value_node, source)
    return table
