"""The flags of a run: read from base.yml, the model file, a yml file, the environment and the
command line, checked as far as no device is needed, and frozen. JAX is not imported here."""

import dataclasses
import difflib
import math
import pathlib
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, maxtext
from maxdiloco.flags.base_yml import Key, Table, Value, show
from maxdiloco.flags.other_names import OTHER_NAMES, current, translate

ENVIRONMENT_PREFIX = "M_"  # MaxText's
MOST_DIGITS = 20  # of a whole number; more are no limit of any key, and Python refuses 4,301
MOST_SHOWN = 200  # characters of a value in a message


class Config(types.SimpleNamespace):
    """The value of every key of base.yml, as attributes that cannot be set.

    Lists are tuples, tables are Tables. A name that is no key raises AttributeError.
    """

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{name}={value} cannot be set: a Config is frozen. Load another one."
        )

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(
            f"{name} cannot be deleted: a Config is frozen. Load another one."
        )

    def as_dict(self) -> dict[str, Any]:
        """Every key and value, fit for JSON: lists and dicts. `from_dict` takes it back."""
        return {name: base_yml.as_lists(value) for name, value in vars(self).items()}


class Given(NamedTuple):
    """A value as it was written, and where."""

    raw: Any
    where: str


def load(
    argv: Iterable[str], environ: Mapping[str, str], *, warn: Callable[[str], None] = print
) -> Config:
    """The config of a run.

    argv: the command line without the program: at most one yml file, first, then key=value.
      base.yml itself may stand there, as MaxText wants it, and changes nothing.
    environ: the environment; names that start with M_ are keys.
    warn: called with a line on MaxText's keys that do nothing here, and on values of its own.
    Later wins: base.yml, the model file, the yml file, the environment, key=value.
    Raises ConfigError, one line with key, value, why and remedy.
    """
    folder, keys = base_yml.config_folder(), base_yml.declared()
    argv = list(argv)
    given: dict[str, Given] = {}
    if argv and _is_file(argv[0]):
        path = pathlib.Path(argv.pop(0))
        if path.resolve() != (folder / "base.yml").resolve():
            given |= translate(_from_file(path))
    given |= translate(_from_environment(environ, keys))
    given |= translate(_from_command_line(argv))
    given = maxtext.taken(given, keys, warn)
    values = {name: key.default for name, key in keys.items()}
    values |= {name: _convert(_known(name, text, keys), text) for name, text in given.items()}
    values |= _from_model(values, given, folder, keys, warn)
    cfg = Config(**values)
    checks.check(cfg, keys)
    return cfg


def from_dict(stored: Mapping[str, Any]) -> Config:
    """The config that `as_dict` stored: no file or environment changes it, and nothing is checked.

    A key that is younger than `stored` takes its default. Raises ConfigError for a key that
    base.yml does not have and for a value of another type.
    """
    keys = base_yml.declared()
    values = {name: key.default for name, key in keys.items()}
    for name, value in current(stored).items():
        given = Given(value, "stored config")
        values[name] = _same_type(_known(name, given, keys), given)
    return Config(**values)


def with_vocab_size(cfg: Config, vocab_size: int) -> Config:
    """The config with the number that vocab_size=-1 stands for. Raises ConfigError as `load`."""
    changed = Config(**vars(cfg) | {"vocab_size": vocab_size})
    checks.check(changed, base_yml.declared())
    return changed


def changed(
    stored: Mapping[str, Any],
    argv: Iterable[str],
    environ: Mapping[str, str],
    *,
    may_change: Collection[str],
) -> Config:
    """A stored config with other values for some keys.

    stored: of `as_dict`. argv: key=value alone. environ: as for `load`; only those of may_change
    count, since the others are meant for training. Raises ConfigError.
    """
    keys = base_yml.declared()
    given = _from_environment(environ, keys)
    given = {name: text for name, text in given.items() if name in may_change}
    for name, text in _from_command_line(list(argv)).items():
        if name not in may_change:
            _known(name, text, keys)
            raise ConfigError(
                f"{name}={_shown(text.raw)} (command line) is taken from the run and cannot be "
                f"changed here. Leave it out; what may change: {', '.join(may_change)}."
            )
        given[name] = text
    values = vars(from_dict(stored))
    cfg = Config(**values | {name: _convert(keys[name], text) for name, text in given.items()})
    checks.check(cfg, keys)
    return cfg


def describe_differences(cfg: Config) -> list[str]:
    """One line `key=value (default)` for each key that differs from base.yml, in its order."""
    keys = base_yml.declared()
    values = vars(cfg)
    return [
        f"{name}={show(values[name])} (default {show(key.default) or 'empty'})"
        for name, key in keys.items()
        if values[name] != key.default
    ]


def warnings(cfg: Config) -> list[str]:
    """One line for each setting that works but is seldom meant."""
    return checks.warnings(cfg)


def _is_file(argument: str) -> bool:
    return "=" not in argument and argument.endswith((".yml", ".yaml"))


def _from_file(path: pathlib.Path) -> dict[str, Given]:
    return {name: Given(raw, str(path)) for name, raw, _ in base_yml.read_yml(path)}


def _from_environment(environ: Mapping[str, str], keys: Mapping[str, Key]) -> dict[str, Given]:
    given = {}
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if variable != ENVIRONMENT_PREFIX + name.upper() or not (
            name in {*keys, *OTHER_NAMES} or maxtext.foreign(name)
        ):
            near = _nearest(name, keys)
            remedy = f"Did you mean {ENVIRONMENT_PREFIX}{near.upper()}?" if near else "Unset it."
            raise ConfigError(
                f"{variable}={environ[variable]} is no key: names that start with "
                f"{ENVIRONMENT_PREFIX} are keys in capitals. {remedy}"
            )
        given[name] = Given(environ[variable], f"environment {variable}")
    return given


def _from_command_line(argv: list[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for argument in argv:
        name, equals, raw = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"{argument} is not key=value. Write key=value; a yml file comes first, and "
                f"--help lists every key."
            )
        if name.startswith("-"):
            raise ConfigError(f"{argument} has dashes. Write {name.lstrip('-')}={raw}.")
        if name in given:
            raise ConfigError(
                f"{name}={raw} comes after {name}={given[name].raw} on the same command line. "
                f"Give it once."
            )
        given[name] = Given(raw, "command line")
    return given


def _from_model(
    values: Mapping[str, Value],
    given: Mapping[str, Given],
    folder: pathlib.Path,
    keys: Mapping[str, Key],
    warn: Callable[[str], None],
) -> dict[str, Value]:
    """The values of the model file that no later layer sets.

    model_name is a name in configs/models or the path of a yml file. Raises ConfigError for an
    unknown model, for a file that is no model's, and for a later layer that sets another value
    without override_model_config.
    """
    model = str(values["model_name"])
    if model == "default":
        return {}
    path = _model_file(model, folder)
    given_by_model = maxtext.taken(translate(_from_file(path)), keys, warn)
    out = {}
    for name, text in given_by_model.items():
        if name in keys and keys[name].group != keys["model_name"].group:
            raise ConfigError(
                f"model_name={model} sets {name}={_shown(text.raw)}, but a model file sets keys of "
                f"the group model alone. Put {name} into a yml file before the keys, or on the "
                f"command line."
            )
        of_model = _convert(_known(name, text, keys), text)
        if name not in given:
            out[name] = of_model
        elif values[name] != of_model and not values["override_model_config"]:
            raise ConfigError(
                f"{name}={show(values[name])} ({given[name].where}) differs from "
                f"{name}={show(of_model)} of model_name={model}. Leave {name} out, or add "
                f"override_model_config=true."
            )
    return out


def _model_file(model: str, folder: pathlib.Path) -> pathlib.Path:
    """The file of model_name. Raises ConfigError for a name that has none."""
    if model.endswith((".yml", ".yaml")):
        path = pathlib.Path(model)
        if not path.is_file():
            raise ConfigError(f"model_name={model} is no file here. Give a path or a name.")
        return path
    models = base_yml.model_names(folder)
    if model not in models:
        near = _nearest(model, models)
        raise ConfigError(
            f"model_name={model} has no file in configs/models. "
            f"{f'Did you mean {near}? ' if near else ''}Use default, {', '.join(models)}, or the "
            f"path of a yml file with keys of the group model."
        )
    return folder / "models" / f"{model}.yml"


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), "")


def _known(name: str, given: Given, keys: Mapping[str, Key]) -> Key:
    if name not in keys:
        near = _nearest(name, keys)
        raise ConfigError(
            f"{name}={_shown(given.raw)} ({given.where}) is no key. "
            f"{f'Did you mean {near}? ' if near else ''}--help lists every key."
        )
    return keys[name]


def _convert(key: Key, given: Given) -> Value:
    """Text (or nested tuples of text, from a file) as a value of the key's type."""
    raw = given.raw
    if isinstance(key.default, tuple):
        value = base_yml.parse_list(raw) if isinstance(raw, str) else raw
        if type(value) is not type(key.default):
            raise _wrong(key, given, f"is not a {_TYPES[type(key.default)]}")
        return value
    if isinstance(raw, Table):
        raise _wrong(key, given, "is a table, but keys are not nested")
    if not isinstance(raw, str):
        raise _wrong(key, given, "is a list")
    if isinstance(key.default, bool):
        if raw.lower() not in ("true", "false"):
            raise _wrong(key, given, "is neither true nor false")
        return raw.lower() == "true"
    if isinstance(key.default, int):
        if not re.fullmatch(r"[+-]?[0-9][0-9_]*", raw):
            raise _wrong(key, given, "is not a whole number")
        digits = raw.replace("_", "")
        if len(digits.lstrip("+-0")) > MOST_DIGITS:
            raise _wrong(key, given, "is too large")
        return int(digits)
    if isinstance(key.default, float):
        if not re.fullmatch(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", raw):
            raise _wrong(key, given, "is not a number")
        value = float(raw.replace("_", ""))
        if not math.isfinite(value):
            raise _wrong(key, given, "is too large")
        return value
    return raw


def _same_type(key: Key, given: Given) -> Value:
    value = _frozen(given.raw)
    if isinstance(key.default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(key.default):
        raise _wrong(key, given, f"is not of type {_TYPES[type(key.default)]}")
    return value


_TYPES = {bool: "bool", int: "int", float: "float", str: "text", tuple: "list", Table: "table"}


def _wrong(key: Key, given: Given, why: str) -> ConfigError:
    return ConfigError(
        f"{key.name}={_shown(given.raw)} ({given.where}) {why}. Write it like the default, "
        f"{key.name}={show(key.default)}."
    )


def _shown(raw: Any) -> str:
    text = show(_frozen(raw))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _frozen(value: Any) -> Any:
    if isinstance(value, Table | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return Table((name, _frozen(entry)) for name, entry in pairs)
    return tuple(_frozen(entry) for entry in value) if isinstance(value, list | tuple) else value
