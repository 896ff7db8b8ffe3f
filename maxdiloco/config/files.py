"""Read YAML files: configuration files, whose values stay text, and files of the package."""

import pathlib
from typing import Any, NamedTuple

import yaml
from yaml.constructor import ConstructorError

from maxdiloco import small_files
from maxdiloco.errors import ConfigError

PACKAGE = pathlib.Path(__file__).parents[1]
# The largest yml file: forty times base.yml, which has every key and its comments.
_MAX_BYTES = 1 << 20


class RawValue(NamedTuple):
    """A value as it was written, and its origin for messages, such as a file."""

    raw: Any
    where: str


Layer = dict[str, RawValue]


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
    """Read a yml file in this module's folder, as text and nested lists and dicts of text."""
    loader = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader  # ten times as fast
    return yaml.load(pathlib.Path(__file__).with_name(name).read_bytes(), Loader=loader)


def read_yml(path: pathlib.Path, *, source: str = "") -> Layer:
    """Read the keys of a yml file, as text or nested lists and dicts of text.

    Scalars stay text, so that `1e-4` and `yes` have the same meaning as on the command line.

    Args:
      path: the file.
      source: name of the file in messages, such as a key with its value; by default the path.

    Raises:
      ConfigError: the file cannot be read or parsed, is not a table, or has a key twice.
    """
    source = source or str(path)
    try:
        keys = yaml.load(small_files.read_bytes(path, _MAX_BYTES), Loader=_Loader)
    except OSError as error:
        raise ConfigError(
            f"{source} cannot be read: {error.strerror}. Give the path of a yml file, or none."
        ) from error
    except (yaml.YAMLError, RecursionError) as error:
        reason = "it is not text, or is nested too deeply"
        if isinstance(error, yaml.MarkedYAMLError):
            reason = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise ConfigError(
            f"{source} is not a yml file: {reason}. Write one `key: value` a line."
        ) from error
    if keys and not isinstance(keys, dict):
        raise ConfigError(f"{source} has no keys. Write one `key: value` a line.")
    return {name: RawValue(value, source) for name, value in (keys or {}).items()}


def parse_nested(text: str) -> Any:
    """Parse a list or a table in yml or JSON as nested lists and dicts of text.

    Returns:
      The value; the text itself if it is neither a list nor a table.

    Raises:
      ValueError: a table has a name twice.
    """
    try:
        parsed = yaml.load(text, Loader=_Loader)
    except ConstructorError as error:
        raise ValueError(error.problem) from error
    except (yaml.YAMLError, RecursionError):
        return text
    return parsed if isinstance(parsed, list | dict) else text


class _Loader(yaml.BaseLoader):
    """A loader of text that refuses repeated names, and anchors, which make short text huge."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose one node; PyYAML calls it for nested nodes as well."""
        event = self.peek_event()
        if event.anchor is not None:
            problem = "& and * name and repeat values: write the value itself, or in quotes"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Construct a table."""
        names: list[Any] = []
        for key, _ in node.value:
            if key.value in names:
                raise ConstructorError(
                    problem=f"{key.value} is there twice", problem_mark=key.start_mark
                )
            names.append(key.value)
        return super().construct_mapping(node, deep)
