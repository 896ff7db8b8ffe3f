"""Load the configuration of a run from the command line, or from a checkpoint, without JAX."""

import difflib
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from maxdiloco import ownership
from maxdiloco.config import files, maxtext
from maxdiloco.config.files import Layer, RawValue
from maxdiloco.config.keys import KEYS, Config
from maxdiloco.config.maxtext import MaxText
from maxdiloco.config.values import shorten, show
from maxdiloco.errors import ConfigError

ENVIRONMENT_PREFIX = "M_"  # MaxText's
BASE = "base.yml"  # the file of defaults, the first argument of MaxText's command lines
COMMAND_LINE = "command line"
# Least similarity of two names, by difflib, for which one is suggested instead of the other. It
# accepts a typing error, but not another key with some equal words; tests check both.
_SIMILAR = 0.8
# Keys whose default means "none", for which null is another spelling of the default.
_NULLABLE = {name for name, key in KEYS.items() if key.default in (None, "", (), {}, -1)}
Warn = Callable[[str], None]


def load(argv: Iterable[str], environ: Mapping[str, str], *, warn: Warn = print) -> Config:
    """Load the config of a run.

    Later sources override earlier ones: base.yml, the model file, the yml file, the environment,
    key=value. If none of the last three sets vocab_size, it is auto with a tokenizer file, unless
    weights are loaded.

    Args:
      argv: the command line without the program: at most one yml file, first, then key=value. The
        file may be base.yml, as in MaxText's commands; only edited values of a copy are used. A
        path configs/... that is not in the working directory is read from the package.
      environ: the environment; variables whose names start with M_ set keys.
      warn: called with a line for keys of MaxText that are ignored, and with a line on keys of this
        host that a yml file of another user sets.

    Raises:
      ConfigError: a key or value is invalid. The message is one line with key, value, reason and
        remedy, or with all unknown keys.
    """
    theirs = maxtext.read()
    given = theirs.accept(_layers(list(argv), environ, theirs, warn), warn)
    base = convert(files.read_yml(files.config_folder() / BASE))  # a user may have edited it
    found = {name: key.default for name, key in KEYS.items()} | base | convert(given)
    found |= _from_model(found, given, theirs, warn)
    has_weights = found["load_parameters_path"] or found["load_full_state_path"]
    if "vocab_size" not in given and found["tokenizer_type"] != "byte" and not has_weights:
        found["vocab_size"] = "auto"
    return check(found)


def check(found: Mapping[str, Any]) -> Config:
    """Return the checked config with some values and the defaults of all other keys.

    Raises:
      ConfigError: a value is outside its limits, or values cannot be combined.
    """
    cfg = _validate(found)
    cfg.check_keys()
    return cfg


def convert(given: Layer) -> dict[str, Any]:
    """Convert text, or nested lists and dicts of text, to values within the limits of their keys.

    Raises:
      ConfigError: a key is unknown, or a value has another type or is outside its limits.
    """
    raw = {n: one.raw for n, one in given.items() if one.raw != "null" or n not in _NULLABLE}
    where = {name: f" ({one.where})" for name, one in given.items()}
    config = _validate(raw, where, strict=False)
    return {name: vars(config)[name] for name in given}


def from_dict(stored: Mapping[str, Any]) -> Config:
    """Return the config that `Config.as_dict` stored; a missing key has its default.

    Values are not checked against each other.

    Raises:
      ConfigError: a key is unknown, or a value has another type or is outside its limits.
    """
    return _validate(stored, dict.fromkeys(stored, " (stored config)"))


def _validate(
    raw: Mapping[str, Any],
    where: Mapping[str, str] = MappingProxyType({}),
    *,
    strict: bool | None = None,  # None: as the types say
) -> Config:
    """Return the config with some values and defaults. where: origins of values, for messages."""
    unknown = []
    for name in (name for name in raw if name not in KEYS):
        near = nearest_key(name)
        remedy = f" Did you mean {near}?" if near else ""
        unknown.append(f"{name}={shorten(raw[name])}{where[name]} is not a key.{remedy}")
    if unknown:
        raise ConfigError(f"{' '.join(unknown)} --help all lists every key.")
    try:
        return Config.model_validate(raw, strict=strict)
    except ValidationError as error:
        raise _config_error(error, raw, where) from None


def from_checkpoint(stored: Mapping[str, Any]) -> Config:
    """Return the config that a checkpoint stores, checked, without the keys that concern a host.

    Another person may have written the checkpoint, so code, secrets and paths are not read from it.

    Raises:
      ConfigError: see `from_dict` and `check`.
    """
    return check(vars(_without_host_keys(stored)))


def _without_host_keys(stored: Mapping[str, Any]) -> Config:
    kept = {
        name: value
        for name, value in stored.items()
        if name not in KEYS or KEYS[name].from_checkpoint
    }
    return from_dict(kept)


def with_changes(
    stored: Mapping[str, Any],
    argv: Iterable[str],
    environ: Mapping[str, str],
    *,
    may_change: Collection[str],
    warn: Warn = print,
) -> Config:
    """Return the config of a checkpoint with other values for some keys.

    Args:
      stored: the config of the checkpoint; see `from_checkpoint`.
      argv: arguments key=value.
      environ: as for `load`; keys that are not in may_change are ignored, as they are for training.
      may_change: the keys that argv may set.
      warn: as for `load`.

    Raises:
      ConfigError: as for `load`, or argv has a key that is not in may_change.
    """
    theirs = maxtext.read()
    given = theirs.accept(theirs.rename(_from_environment(environ)), warn)
    given = {name: one for name, one in given.items() if name in may_change or name not in KEYS}
    written = _from_command_line(argv)
    changes = convert(given | written)
    for name, one in written.items():
        if name not in may_change:
            raise ConfigError(
                f"{name}={shorten(one.raw)} ({COMMAND_LINE}) is read from the run and cannot be "
                f"changed here. Leave it out; these keys may change: {', '.join(may_change)}."
            )
    return check(vars(_without_host_keys(stored)) | changes)


def model_vocab_size(cfg: Config) -> int | None:
    """Return vocab_size of the model file that the config names; None if the file lacks it."""
    if cfg.model_name == "default":
        return None
    given = files.read_yml(_model_path(cfg.model_name))
    return convert({name: given[name] for name in given if name == "vocab_size"}).get("vocab_size")


def describe_differences(cfg: Config) -> list[str]:
    """Return a line `key=value (default)` for each key that is not at its default."""
    return [
        f"{name}={show(vars(cfg)[name])} (default {show(key.default) or 'empty'})"
        for name, key in KEYS.items()
        if vars(cfg)[name] != key.default
    ]


def user_keys(argv: Iterable[str], environ: Mapping[str, str]) -> set[str]:
    """Return the keys that a command line, its yml file and the environment set."""
    return set(_layers(list(argv), environ, maxtext.read(), warn=lambda _: None))


# -- layers ---------------------------------------------------------------------------------------


def _layers(argv: list[str], environ: Mapping[str, str], theirs: MaxText, warn: Warn) -> Layer:
    """Read a yml file, the environment and the command line, with MaxText's names replaced."""
    given: Layer = {}
    if argv and "=" not in argv[0] and argv[0].endswith((".yml", ".yaml")):
        given = _from_file(pathlib.Path(argv.pop(0)), theirs, warn)
    given |= theirs.rename(_from_environment(environ))
    return given | theirs.rename(_from_command_line(argv))


def _from_file(path: pathlib.Path, theirs: MaxText, warn: Warn) -> Layer:
    """Read a yml file.

    From a copy of base.yml only the values that differ from it are read; the others are defaults. A
    file of that name with fewer than half of the keys is read like any other file.
    """
    shipped = files.config_folder().parent / path
    if path.parts[:1] == ("configs",) and shipped.is_file() and not path.is_file():
        path = shipped  # configs/... is not in the working directory
    is_base = path.name == BASE
    given = {} if is_base and not path.is_file() else files.read_yml(path)
    is_foreign = sum(theirs.find(name) is not None for name in given) > maxtext.MAX_FOREIGN
    if is_base and (is_foreign or not path.is_file()):
        raise ConfigError(
            f"{path}: MaxText's defaults are not read. Put configs/base.yml in its place: the "
            "defaults here are this package's, and docs/howto/migrate-from-maxtext.md lists those "
            "that differ."
        )
    given = theirs.rename(given)
    _warn_of_another_user(path, given, warn)
    if not is_base or len(given) < len(KEYS) / 2:
        return given
    edited = convert({name: one for name, one in given.items() if name in KEYS})
    defaults = {name for name, value in edited.items() if value == KEYS[name].default}
    return {name: one for name, one in given.items() if name not in defaults}


def _warn_of_another_user(path: pathlib.Path, given: Layer, warn: Warn) -> None:
    """Warn if a file of another user sets keys that concern this host."""
    status = os.stat(path)
    if ownership.is_own(status):
        return
    host = {n: one for n, one in given.items() if n in KEYS and not KEYS[n].from_checkpoint}
    named = [
        f"{name}={shorten(host[name].raw)}"
        for name, value in convert(host).items()
        if value != KEYS[name].default
    ]
    if named:
        warn(
            f"note: {path} belongs to user {status.st_uid} and sets keys of this host: "
            f"{', '.join(named)}. Give another value after it, if you do not want that."
        )


def _from_environment(environ: Mapping[str, str]) -> Layer:
    return {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): RawValue(value, f"environment {name}")
        for name, value in sorted(environ.items())
        if name.startswith(ENVIRONMENT_PREFIX)
    }


def _from_command_line(argv: Iterable[str]) -> Layer:
    """Read key=value or --key=value. The last value of a repeated key counts."""
    given: Layer = {}
    for argument in argv:
        name, equals, raw = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"{argument} is not key=value. Write key=value; a yml file comes first, and "
                "--help all lists every key."
            )
        given[name.lstrip("-")] = RawValue(raw, COMMAND_LINE)
    return given


def _from_model(
    found: Mapping[str, Any], given: Layer, theirs: MaxText, warn: Warn
) -> dict[str, Any]:
    """Return the values of the model file that no later layer sets."""
    model = found["model_name"]
    if model == "default":
        return {}
    layer = files.read_yml(_model_path(model), source=f"model_name={model}")
    values = convert(theirs.accept(theirs.rename(layer), warn))
    for name, value in values.items():
        if KEYS[name].group != "model":
            raise ConfigError(
                f"model_name={model} sets {name}={show(value)}, but a model file sets only keys of "
                f"the group model. Put {name} into a yml file before the keys, or on the command "
                "line."
            )
        # The size of a vocabulary depends on the tokenizer, and a model may have any size.
        is_vocabulary = name == "vocab_size" and (
            found[name] == "auto" or found["tokenizer_type"] != "byte"
        )
        is_free = name not in given or is_vocabulary or found[name] == value
        if not is_free and not found["override_model_config"]:
            raise ConfigError(
                f"{name}={show(found[name])} ({given[name].where}) differs from "
                f"{name}={show(value)} of model_name={model}. Leave {name} out, or add "
                "override_model_config=true."
            )
    return {name: value for name, value in values.items() if name not in given}


def _model_path(model: str) -> pathlib.Path:
    """Return the path of the file that model_name names: a name in configs/models, or a path."""
    if model.endswith((".yml", ".yaml")):
        return pathlib.Path(model)
    models = files.model_names()
    if model not in models:
        near = difflib.get_close_matches(model, models, n=1)
        raise ConfigError(
            f"model_name={model} is not in configs/models. "
            f"{f'Did you mean {near[0]}? ' if near else ''}Use default, {', '.join(models)}, or "
            "the path of a yml file with keys of the group model."
        )
    return files.config_folder() / "models" / f"{model}.yml"


# -- errors ---------------------------------------------------------------------------------------


def nearest_key(name: str) -> str:
    """Return the key that an unknown name probably means, or an empty text.

    It is the key for which other trainers use the name, a key that contains the name, or the key
    with the most similar spelling.
    """
    name = name.lower().replace("-", "_")
    for key, others in files.read_data("other_trainers.yml").items():
        if name in others:
            return key
    containing = [key for key in KEYS if "_" in name and f"_{name}_" in f"_{key}_"]
    similar = difflib.get_close_matches(name, list(KEYS), n=1, cutoff=_SIMILAR)
    return min(containing, key=len) if containing else next(iter(similar), "")


def _config_error(
    error: ValidationError, raw: Mapping[str, Any], where: Mapping[str, str]
) -> ConfigError:
    """Return a ConfigError for the first problem of a validation."""
    # A union has errors of all its types.
    problem = min(error.errors(), key=lambda one: one["type"] != "value_error")
    name, *inner = problem["loc"]
    key = KEYS[name]
    start = f"{name}={shorten(raw[name])}{where.get(name, '')}"
    entries, part = key.entries, next((one for one in inner if isinstance(one, str)), "")
    if entries and problem["type"] == "extra_forbidden":
        return ConfigError(f"{start}: {part} is not an entry. Use {', '.join(entries)}.")
    if part in entries:
        key, start = entries[part], f"{start}: {part}"
    near = difflib.get_close_matches(str(problem["input"]), key.choices, n=1, cutoff=0.7)
    unit = f" ({key.unit})" if key.unit else ""
    default = "" if key.field.is_required() else f"The default is {show(key.default) or 'empty'}."
    remedy = f"Did you mean {near[0]}?" if near else default or key.description
    expected = f"expected {key.expected()}{unit}"
    if problem["type"] == "value_error":
        expected = str(problem["ctx"]["error"])
    return ConfigError(f"{start}: {expected}. {remedy}")
