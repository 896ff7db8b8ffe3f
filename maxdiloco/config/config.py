"""Load the configuration of a run from the command line, or from a checkpoint, without JAX."""

import difflib
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from maxdiloco import ownership
from maxdiloco.config import files, maxtext, values
from maxdiloco.config.keys import KEYS, Config, Key
from maxdiloco.config.maxtext import MaxText
from maxdiloco.config.values import shorten, show
from maxdiloco.diloco import outer_rate
from maxdiloco.errors import ConfigError

ENVIRONMENT_PREFIX = "M_"  # MaxText's
BASE = "base.yml"  # the file of defaults, the first argument of MaxText's command lines
COMMAND_LINE = "command line"
STORED = "stored config"
# Least similarity of two names, by difflib, for which one is suggested instead of the other. It
# accepts a typing error, but not another key with some equal words; tests check both.
_SIMILAR = 0.8
Warn = Callable[[str], None]


class RawValue(NamedTuple):
    """A value as it was written, and its origin for messages, such as a file."""

    raw: Any
    where: str


Layer = dict[str, RawValue]


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
      warn: called with a line for each key that is given twice on the command line, and for keys
        of MaxText that are ignored.

    Raises:
      ConfigError: a key or value is invalid. The message is one line with key, value, reason and
        remedy, or with all unknown keys.
    """
    foreign = maxtext.read()
    given = _accept(_layers(list(argv), environ, foreign, warn), foreign, warn)
    found = _defaults() | convert(given)
    found |= _from_model(found, given, foreign, warn)
    has_weights = found["load_parameters_path"] or found["load_full_state_path"]
    if "vocab_size" not in given and found["tokenizer_type"] != "byte" and not has_weights:
        found["vocab_size"] = "auto"
    return check(found)


def check(found: Mapping[str, Any]) -> Config:
    """Return the checked config with some values and the defaults of all other keys.

    Raises:
      ConfigError: a value is outside its limits, or values cannot be combined.
    """
    try:
        cfg = Config.model_validate(found)
    except ValidationError as error:
        raise _config_error(error, found) from None
    cfg.check_keys()
    return cfg


def convert(given: Mapping[str, RawValue]) -> dict[str, Any]:
    """Convert text, or nested tuples and dicts of text, to values within the limits of their keys.

    Raises:
      ConfigError: a key is unknown, or a value has another type or is outside its limits.
    """
    _refuse_unknown(given)
    # For a key whose default means "none", null is another spelling of the default.
    raw = {name: one.raw for name, one in given.items() if not _is_null(KEYS[name], one.raw)}
    where = {name: one.where for name, one in given.items()}
    try:
        config = Config.model_validate(raw, strict=False)
    except ValidationError as error:
        raise _config_error(error, raw, where) from None
    return {name: vars(config)[name] for name in given}


def _is_null(key: Key, raw: Any) -> bool:
    return raw == "null" and key.default in (None, "", (), {}, -1)


def from_dict(stored: Mapping[str, Any]) -> Config:
    """Return the config that `Config.as_dict` stored; a missing key has its default.

    Values are not checked against each other.

    Raises:
      ConfigError: a key is unknown, or a value has another type or is outside its limits.
    """
    stored = {name: values.frozen(value) for name, value in stored.items()}
    _refuse_unknown({name: RawValue(value, STORED) for name, value in stored.items()})
    try:
        return Config.model_validate(stored)
    except ValidationError as error:
        raise _config_error(error, stored, dict.fromkeys(stored, STORED)) from None


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


def changed(
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
    foreign = maxtext.read()
    given = _from_environment(environ, foreign)
    given = {name: one for name, one in given.items() if name in may_change}
    written = _from_command_line(argv, warn)
    _refuse_unknown(written)
    for name, one in written.items():
        if name not in may_change:
            raise ConfigError(
                f"{name}={shorten(one.raw)} ({COMMAND_LINE}) is read from the run and cannot be "
                f"changed here. Leave it out; these keys may change: {', '.join(may_change)}."
            )
    return check(vars(_without_host_keys(stored)) | convert(given | written))


def replace(cfg: Config, **changes: Any) -> Config:
    """Return a checked config with other values for some keys. Raises ConfigError."""
    return check(vars(cfg) | changes)


def model_vocab_size(cfg: Config) -> int | None:
    """Return vocab_size of the model file that the config names; None if the file lacks it."""
    if cfg.model_name == "default":
        return None
    given = _read(_model_path(cfg.model_name))
    return convert({name: given[name] for name in given if name == "vocab_size"}).get("vocab_size")


def with_replicas(cfg: Config, num_replicas: int) -> Config:
    """Return a config in which `auto` is replaced for the outer learning rate and momentum.

    The values depend on the number of replicas and on the method. The config.yml of a run keeps
    `auto`, so that a run that resumes with another number of replicas uses the values for it.
    """
    if not cfg.enable_diloco:
        return cfg
    momentum = cfg.diloco_outer_momentum
    if momentum == "auto":
        momentum = outer_rate.momentum(cfg.diloco_outer_optimizer)
    rate = outer_lr(vars(cfg), num_replicas)
    return cfg.model_copy(update={"diloco_outer_lr": rate, "diloco_outer_momentum": momentum})


def outer_lr(keys: Mapping[str, Any], num_replicas: int) -> float:
    """Return the outer learning rate of a DiLoCo run with these keys and `num_replicas`."""
    if keys["diloco_outer_lr"] != "auto":
        return keys["diloco_outer_lr"]
    return outer_rate.rate(
        num_replicas,
        round_overlap=keys["diloco_round_overlap"],
        aggregation=keys["diloco_aggregation"],
    )


def describe_differences(cfg: Config) -> list[str]:
    """Return a line `key=value (default)` for each key that is not at its default."""
    return [
        f"{name}={show(vars(cfg)[name])} (default {show(key.default) or 'empty'})"
        for name, key in KEYS.items()
        if vars(cfg)[name] != key.default
    ]


def names_given(argv: Iterable[str], environ: Mapping[str, str]) -> set[str]:
    """Return the keys that a command line, its yml file and the environment set."""
    return set(_layers(list(argv), environ, maxtext.read(), lambda line: None))


# -- layers ---------------------------------------------------------------------------------------


def _layers(argv: list[str], environ: Mapping[str, str], foreign: MaxText, warn: Warn) -> Layer:
    """Read a yml file, the environment and the command line, with MaxText's names replaced."""
    given: Layer = {}
    if argv and "=" not in argv[0] and argv[0].endswith((".yml", ".yaml")):
        path = _resolve_path(pathlib.Path(argv.pop(0)))
        is_base = path.name == BASE
        given = _read_copy_of_base(path, foreign) if is_base else _rename(_read(path), foreign)
        _warn_of_another_user(path, given, warn)
    given |= _rename(_from_environment(environ, foreign), foreign)
    return given | _rename(_from_command_line(argv, warn), foreign)


def _resolve_path(path: pathlib.Path) -> pathlib.Path:
    """Return the yml file, or the package's if configs/... is not in the working directory."""
    shipped = files.config_folder().parent / path
    known = path.parts[:1] == ("configs",) and shipped.is_file()
    return shipped if known and not path.is_file() else path


def _read(path: pathlib.Path, **options: Any) -> Layer:
    raw = files.read_yml(path, **options)
    return {name: RawValue(value, str(path)) for name, value in raw.items()}


def _defaults() -> dict[str, Any]:
    """Return the values of base.yml, which a user may have edited."""
    given = _read(files.config_folder() / BASE, trusted=True)
    return {name: key.default for name, key in KEYS.items()} | convert(given)


def _read_copy_of_base(path: pathlib.Path, foreign: MaxText) -> Layer:
    """Read the values of a copy of base.yml that differ from it; the others are defaults.

    A file of that name with fewer than half of the keys is read like any other file.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file here; MaxText's commands name one. {maxtext.USE_OUR_BASE}"
        )
    given = _read(path)
    if sum(foreign.find(name) is not None for name in given) > maxtext.MAX_FOREIGN:
        raise ConfigError(
            f"{path} is MaxText's, whose defaults are not read. {maxtext.USE_OUR_BASE}"
        )
    given = _rename(given, foreign)
    if len(given) < len(KEYS) / 2:
        return given
    converted = convert({name: one for name, one in given.items() if name in KEYS})
    return {
        name: one
        for name, one in given.items()
        if name not in KEYS or converted[name] != KEYS[name].default
    }


def _warn_of_another_user(path: pathlib.Path, given: Layer, warn: Warn) -> None:
    """Warn if a file of another user sets keys that concern this host."""
    status = os.stat(path)
    if ownership.is_own(status):
        return
    host = {n: x for n, x in given.items() if n in KEYS and not KEYS[n].from_checkpoint}
    converted = convert(host)
    named = [
        f"{name}={shorten(one.raw)}"
        for name, one in host.items()
        if converted[name] != KEYS[name].default
    ]
    if named:
        warn(
            f"note: {path} belongs to user {status.st_uid} and sets keys of this host: "
            f"{', '.join(named)}. Give another value after it, if you do not want that."
        )


def _from_environment(environ: Mapping[str, str], foreign: MaxText) -> Layer:
    given, unknown = {}, []
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        is_key = name in KEYS or foreign.knows(name)
        if not is_key or variable != ENVIRONMENT_PREFIX + name.upper():
            near = nearest_key(name)
            remedy = f"Did you mean {ENVIRONMENT_PREFIX}{near.upper()}?" if near else "Unset it."
            unknown.append(f"{variable}={shorten(value)} is not a key. {remedy}")
        given[name] = RawValue(value, f"environment {variable}")
    if unknown:
        raise ConfigError(
            f"{' '.join(unknown)} Names that start with {ENVIRONMENT_PREFIX} are keys in capitals."
        )
    return given


def _from_command_line(argv: Iterable[str], warn: Warn) -> Layer:
    """Read key=value or --key=value; if a key is repeated, its last value is used."""
    given: Layer = {}
    for argument in argv:
        name, equals, raw = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"{argument} is not key=value. Write key=value; a yml file comes first, and "
                "--help all lists every key."
            )
        name = name.removeprefix("--")
        if name.startswith("-"):
            raise ConfigError(f"{argument} has a dash. Write {name.lstrip('-')}={raw}.")
        if name in given:
            warn(
                f"warning: {name}={shorten(raw)} comes after "
                f"{name}={shorten(given[name].raw)} on the command line, and the last one counts."
            )
        given[name] = RawValue(raw, COMMAND_LINE)
    return given


def _from_model(
    found: Mapping[str, Any], given: Layer, foreign: MaxText, warn: Warn
) -> dict[str, Any]:
    """Return the values of the model file that no later layer sets."""
    model = found["model_name"]
    if model == "default":
        return {}
    layer = _rename(_read(_model_path(model), source=f"model_name={model}"), foreign)
    layer = _accept(layer, foreign, warn)
    for name, value in convert(layer).items():
        if KEYS[name].group != "model":
            raise ConfigError(
                f"model_name={model} sets {name}={shorten(layer[name].raw)}, but a model file sets "
                f"only keys of the group model. Put {name} into a yml file before the keys, or on "
                "the command line."
            )
        # The size of a vocabulary depends on the tokenizer, and a model may have any size.
        is_vocabulary = name == "vocab_size" and (
            found[name] == "auto" or found["tokenizer_type"] != "byte"
        )
        if name not in given or is_vocabulary or found[name] == value:
            continue
        if not found["override_model_config"]:
            raise ConfigError(
                f"{name}={show(found[name])} ({given[name].where}) differs from "
                f"{name}={show(value)} of model_name={model}. Leave {name} out, or add "
                "override_model_config=true."
            )
    return {name: value for name, value in convert(layer).items() if name not in given}


def _model_path(model: str) -> pathlib.Path:
    """Return the path of the file that model_name names: a name in configs/models, or a path."""
    if model.endswith((".yml", ".yaml")):
        path = pathlib.Path(model)
        if not path.is_file():
            raise ConfigError(f"model_name={model} is not a file here. Give a path or a name.")
        return path
    models = files.model_names()
    if model not in models:
        near = difflib.get_close_matches(model, models, n=1)
        raise ConfigError(
            f"model_name={model} is not in configs/models. "
            f"{f'Did you mean {near[0]}? ' if near else ''}Use default, {', '.join(models)}, or "
            "the path of a yml file with keys of the group model."
        )
    return files.config_folder() / "models" / f"{model}.yml"


def _rename(layer: Layer, foreign: MaxText) -> Layer:
    """Replace MaxText's names in a layer. Raises ConfigError if a key has both names."""
    names: dict[str, str] = {}
    for name in layer:
        own = foreign.other_names.get(name, name)
        if own in names:
            raise ConfigError(
                f"{name}={shorten(layer[name].raw)} and "
                f"{names[own]}={shorten(layer[names[own]].raw)} both mean {own}. Give only {own}."
            )
        names[own] = name
    return {own: layer[name] for own, name in names.items()}


def _accept(layer: Layer, foreign: MaxText, warn: Warn) -> Layer:
    """Remove the keys of MaxText that have no effect here, with a warning."""
    kept, notes = foreign.accept({name: one.raw for name, one in layer.items()})
    for note in notes:
        warn(note)
    return {name: layer[name] for name in kept}


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


def _refuse_unknown(given: Mapping[str, RawValue]) -> None:
    """Raise ConfigError that names every unknown key."""
    lines = []
    for name, one in given.items():
        if name not in KEYS:
            near = nearest_key(name)
            lines.append(
                f"{name}={shorten(one.raw)} ({one.where}) is not a key."
                f"{f' Did you mean {near}?' if near else ''}"
            )
    if lines:
        raise ConfigError(f"{' '.join(lines)} --help all lists every key.")


def _config_error(
    error: ValidationError, raw: Mapping[str, Any], where: Mapping[str, str] | None = None
) -> ConfigError:
    """Return a ConfigError for the first problem of a validation."""
    problem = error.errors()[0]
    name, *inner = problem["loc"]
    key = KEYS[name]
    source = f" ({where[name]})" if where and name in where else ""
    start = f"{name}={shorten(raw[name])}{source}"
    entries, part = key.entries, next((one for one in inner if isinstance(one, str)), "")
    if entries and problem["type"] == "extra_forbidden":
        return ConfigError(f"{start}: {part} is not an entry. Use {', '.join(entries)}.")
    if entries and problem["type"] == "missing":
        return ConfigError(f"{start} lacks {part}. Add it: {entries[part].description}")
    if part in entries:
        key, start = entries[part], f"{start}: {part}"
    near = _nearest_choice(problem["input"], key.choices)
    unit = f" ({key.unit})" if key.unit else ""
    default = "" if key.field.is_required() else f"The default is {show(key.default) or 'empty'}."
    remedy = f"Did you mean {near}?" if near else default or key.description
    return ConfigError(f"{start}: expected {key.expected()}{unit}. {remedy}")


def _nearest_choice(value: Any, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or not value:
        return ""
    longer = [name for name in choices if name.startswith(value)]
    return next(iter(longer or difflib.get_close_matches(value, choices, n=1, cutoff=0.7)), "")
