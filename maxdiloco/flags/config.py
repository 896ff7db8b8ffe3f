"""The flags of a run: read, checked as far as no device is needed, and frozen, without JAX."""

import difflib
import os
import pathlib
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from maxdiloco import ownership
from maxdiloco.diloco import outer_rate
from maxdiloco.errors import ConfigError
from maxdiloco.flags import base_yml, checks, maxtext
from maxdiloco.flags.base_yml import Key, Value, show
from maxdiloco.flags.values import Given, convert, same_type, shown

ENVIRONMENT_PREFIX = "M_"  # MaxText's
# How alike two names of keys are, of difflib, for one to be suggested: a slip of the finger, not
# another key that shares some words. Our choice.
_ALIKE = 0.8
_AUTO = -1.0  # of diloco_outer_lr and diloco_outer_momentum
Warn = Callable[[str], None]


class Config(types.SimpleNamespace):
    """The value of every key of base.yml, as attributes that cannot be set.

    Lists are tuples, tables are Tables. A name that is no key raises AttributeError.
    """

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name}={value} cannot be set: a Config is frozen. Load another one.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{name} cannot be deleted: a Config is frozen. Load another one.")

    def as_dict(self) -> dict[str, Any]:
        """Every key and value, fit for JSON: lists and dicts. `from_dict` takes it back."""
        return {name: base_yml.as_lists(value) for name, value in vars(self).items()}

    def sizes(self, tier: str) -> dict[str, int]:
        """Sizes of the mesh's axes over slices, tier=dcn, or inside one, ici; one may be -1."""
        return {axis: vars(self)[f"{tier}_{axis}_parallelism"] for axis in checks.AXES}

    def eval_paths(self) -> dict[str, str]:
        """{name: path} of eval_dataset_path, the text of eval/loss first: that without a name, or
        else the first one. An empty path is the part of the training text that is held out."""
        given = self.eval_dataset_path
        if not isinstance(given, base_yml.Table):
            return {"": given}
        return dict(sorted(given, key=lambda entry: entry[0] != "")) or {"": ""}

    def holds_out(self) -> bool:
        """Whether a part of the training text is held out of it (eval_fraction)."""
        return "" in self.eval_paths().values()


def load(argv: Iterable[str], environ: Mapping[str, str], *, warn: Warn = print) -> Config:
    """The config of a run.

    argv: the command line without the program: at most one yml file, first, then key=value.
      base.yml itself may stand there, as MaxText wants it; of an edited copy the edits count.
      configs/... that is not here is taken from the package.
    environ: the environment; names that start with M_ are keys.
    warn: called with a line for each key that is given twice on the command line, and for MaxText's
      keys and values that have no meaning or another one here.
    Later wins: base.yml, the model file, the yml file, the environment, key=value. vocab_size that
    none of the last three gives is -1 with a tokenizer file, unless weights are loaded.
    Raises ConfigError, one line with key, value, why and remedy; of unknown keys it names all.
    """
    known, argv = maxtext.tables(), list(argv)
    given: dict[str, Given] = {}
    if argv and "=" not in argv[0] and argv[0].endswith((".yml", ".yaml")):
        path = found(pathlib.Path(argv.pop(0)))
        given |= of_file(path, known)
        for line in _of_another_user(path, given, known.ours):
            warn(line)
    given |= maxtext.renamed(_from_environment(environ, known), known)
    given |= maxtext.renamed(_from_command_line(argv, warn), known)
    given = maxtext.taken(given, known, warn)
    values = _values(given, known.ours, convert)
    values |= _from_model(values, given, known, warn)
    weights = values["load_parameters_path"] or values["load_full_state_path"]
    if "vocab_size" not in given and values["tokenizer_type"] != "byte" and not weights:
        values["vocab_size"] = -1
    checks.check(Config(**values), known.ours)
    return Config(**values)


def from_dict(stored: Mapping[str, Any]) -> Config:
    """The config that `as_dict` stored, unchecked; a key that is younger takes its default.

    Raises ConfigError for a key that base.yml does not have and for a value of another type.
    """
    given = {name: Given(value, "stored config") for name, value in maxtext.current(stored).items()}
    return Config(**_values(given, base_yml.declared(), same_type))


def of_checkpoint(stored: Mapping[str, Any]) -> Config:
    """The config that a checkpoint stores, checked, without the keys of a host (Key.of_host).

    Another person may have written it. Raises ConfigError.
    """
    cfg = _of_no_host(stored)
    checks.check(cfg, base_yml.declared())
    return cfg


def _of_no_host(stored: Mapping[str, Any]) -> Config:
    """A stored config without the keys of a host, unchecked. Raises ConfigError as from_dict."""
    keys, stored = base_yml.declared(), maxtext.current(stored)
    host = {name for name, key in keys.items() if key.of_host}
    return from_dict({name: value for name, value in stored.items() if name not in host})


def with_vocab_size(cfg: Config, vocab_size: int, padded_vocab_size: int) -> Config:
    """The config with the numbers that vocab_size=-1 stands for. Raises ConfigError as `load`."""
    sizes = {"vocab_size": vocab_size, "padded_vocab_size": padded_vocab_size}
    changed = Config(**vars(cfg) | sizes)
    checks.check(changed, base_yml.declared())
    return changed


def rows_of_model(cfg: Config) -> int | None:
    """vocab_size of the model file that the config names, None where there is none."""
    if cfg.model_name == "default":
        return None
    given = _from_file(_model_file(cfg.model_name)).get("vocab_size")
    return given and convert(base_yml.declared()["vocab_size"], given)


def with_replicas(cfg: Config, num_replicas: int) -> Config:
    """The config with the outer learning rate and momentum that -1 stands for.

    They depend on the number of replicas and on the method, so a run's config.yml has what was
    asked for: a run that goes on with other replicas takes what -1 stands for then.
    """
    if not cfg.enable_diloco:
        return cfg
    keys = vars(cfg)
    momentum = cfg.diloco_outer_momentum
    if momentum == _AUTO:
        momentum = outer_rate.momentum(cfg.diloco_outer_optimizer)
    rates = {"diloco_outer_lr": outer_lr(keys, num_replicas), "diloco_outer_momentum": momentum}
    return Config(**keys | rates)


def outer_lr(keys: Mapping[str, Any], num_replicas: int) -> float:
    """The outer learning rate of a DiLoCo run with these keys and so many replicas."""
    if keys["diloco_outer_lr"] != _AUTO:
        return keys["diloco_outer_lr"]
    return outer_rate.rate(
        num_replicas,
        round_overlap=keys["diloco_round_overlap"],
        aggregation=keys["diloco_aggregation"],
    )


def changed(
    stored: Mapping[str, Any],
    argv: Iterable[str],
    environ: Mapping[str, str],
    *,
    may_change: Collection[str],
    warn: Warn = print,
) -> Config:
    """The config of a checkpoint with other values for some keys.

    stored: see `of_checkpoint`. argv: key=value alone. environ: as for `load`; only those of
    may_change count, since the others are meant for training. warn: as for `load`. Raises
    ConfigError.
    """
    known = maxtext.tables()
    keys, given = known.ours, _from_environment(environ, known)
    given = {name: text for name, text in given.items() if name in may_change}
    written = _from_command_line(argv, warn)
    _refuse_unknown(written, keys)
    for name, text in written.items():
        if name not in may_change:
            raise ConfigError(
                f"{name}={shown(text.raw)} (command line) is taken from the run and cannot be "
                f"changed here. Leave it out; what may change: {', '.join(may_change)}."
            )
        given[name] = text
    values = vars(_of_no_host(stored))
    cfg = Config(**values | {name: convert(keys[name], text) for name, text in given.items()})
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


def found(path: pathlib.Path) -> pathlib.Path:
    """The yml file, or that of the installed package where configs/... names none here."""
    shipped = base_yml.config_folder().parent / path
    known = path.parts[:1] == ("configs",) and shipped.is_file()
    return shipped if known and not path.is_file() else path


def of_file(path: pathlib.Path, known: maxtext.Tables) -> dict[str, Given]:
    """What a yml file before the keys sets; of base.yml and its copies, what differs from it."""
    is_base = path.name == maxtext.BASE
    return _edited(path, known) if is_base else maxtext.renamed(_from_file(path), known)


def _of_another_user(
    path: pathlib.Path, given: Mapping[str, Given], keys: Mapping[str, Key]
) -> list[str]:
    """The line on a file of another user that sets keys of this host."""
    status = os.stat(path)
    of_host = [
        f"{name}={shown(given[name].raw)}"
        for name, key in keys.items()
        if name in given and key.of_host and convert(key, given[name]) != key.default
    ]
    if ownership.is_own(status) or not of_host:
        return []
    return [
        f"note: {path} belongs to user {status.st_uid} and sets keys of this host: "
        f"{', '.join(of_host)}. Give another value after it, if that is not what you want."
    ]


def _from_file(path: pathlib.Path, where: str = "") -> dict[str, Given]:
    entries = base_yml.read_yml(path, where=where)
    return {name: Given(raw, str(path)) for name, raw, _ in entries}


def _edited(path: pathlib.Path, known: maxtext.Tables) -> dict[str, Given]:
    """What a copy of base.yml has otherwise: its other values are defaults, which a model may set.

    A file of that name with fewer than half of the keys is one as any other.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path} is no file here; MaxText's commands name one. {maxtext.IN_ITS_PLACE}"
        )
    given, keys = _from_file(path), known.ours
    if sum(known.foreign(name) is not None for name in given) > maxtext.MOST_FOREIGN:
        raise ConfigError(
            f"{path} is MaxText's, whose defaults are not read. {maxtext.IN_ITS_PLACE}"
        )
    given = maxtext.renamed(given, known)
    if len(given) < len(keys) / 2:
        return given
    return {
        name: text
        for name, text in given.items()
        if name not in keys or convert(keys[name], text) != keys[name].default
    }


def _from_environment(environ: Mapping[str, str], known: maxtext.Tables) -> dict[str, Given]:
    given, unknown = {}, []
    for variable in sorted(environ):
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        is_key = any(name in names for names in (known.ours, known.removed, known.other_names))
        if not (is_key or known.foreign(name)) or variable != ENVIRONMENT_PREFIX + name.upper():
            near = _nearest_key(name, known.ours)
            remedy = f"Did you mean {ENVIRONMENT_PREFIX}{near.upper()}?" if near else "Unset it."
            unknown.append(f"{variable}={environ[variable]} is no key. {remedy}")
        given[name] = Given(environ[variable], f"environment {variable}")
    if unknown:
        raise ConfigError(
            f"{' '.join(unknown)} Names that start with {ENVIRONMENT_PREFIX} are keys in capitals."
        )
    return given


def _from_command_line(argv: Iterable[str], warn: Warn) -> dict[str, Given]:
    """key=value or --key=value; the last of several counts."""
    given: dict[str, Given] = {}
    for argument in argv:
        name, equals, raw = argument.partition("=")
        if not equals:
            raise ConfigError(
                f"{argument} is not key=value. Write key=value; a yml file comes first, and "
                f"--help lists every key."
            )
        name = name.removeprefix("--")
        if name.startswith("-"):
            raise ConfigError(f"{argument} has a dash. Write {name.lstrip('-')}={raw}.")
        if name in given:
            warn(
                f"warning: {name}={shown(raw)} comes after {name}={shown(given[name].raw)} on the "
                f"command line, and the last one counts."
            )
        given[name] = Given(raw, "command line")
    return given


def _from_model(
    values: dict[str, Value], given: dict[str, Given], known: maxtext.Tables, warn: Warn
) -> dict[str, Value]:
    """The values of the model file that no later layer sets."""
    model, keys, out = str(values["model_name"]), known.ours, {}
    if model == "default":
        return {}
    of_file = maxtext.renamed(_from_file(_model_file(model), f"model_name={model}"), known)
    given_by_model = maxtext.taken(of_file, known, warn)
    _refuse_unknown(given_by_model, keys)
    for name, text in given_by_model.items():
        if keys[name].group != keys["model_name"].group:
            raise ConfigError(
                f"model_name={model} sets {name}={shown(text.raw)}, but a model file sets keys of "
                f"the group model alone. Put {name} into a yml file before the keys, or on the "
                f"command line."
            )
        of_model = convert(keys[name], text)
        if name not in given:
            out[name] = of_model
        elif name == "vocab_size" and (values[name] == -1 or values["tokenizer_type"] != "byte"):
            continue  # the rows belong to the tokenizer, and a model may have any
        elif values[name] != of_model and not values["override_model_config"]:
            raise ConfigError(
                f"{name}={show(values[name])} ({given[name].where}) differs from "
                f"{name}={show(of_model)} of model_name={model}. Leave {name} out, or add "
                f"override_model_config=true."
            )
    return out


def _model_file(model: str) -> pathlib.Path:
    """The file of model_name, a name in configs/models or a path. Raises ConfigError."""
    if model.endswith((".yml", ".yaml")):
        path = pathlib.Path(model)
        if not path.is_file():
            raise ConfigError(f"model_name={model} is no file here. Give a path or a name.")
        return path
    models = base_yml.model_names()
    if model not in models:
        near = difflib.get_close_matches(model, models, n=1)
        raise ConfigError(
            f"model_name={model} has no file in configs/models. "
            f"{f'Did you mean {near[0]}? ' if near else ''}Use default, {', '.join(models)}, or "
            f"the path of a yml file with keys of the group model."
        )
    return base_yml.config_folder() / "models" / f"{model}.yml"


def _nearest_key(name: str, keys: Iterable[str]) -> str:
    """A key that may be meant: one that other trainers call so, one that holds the words of the
    name, else one spelt alike."""
    name = name.lower().replace("-", "_")
    for key, names in base_yml.read_table("other_trainers.yml").items():
        if name in names:
            return key
    holders = [key for key in keys if "_" in name and f"_{name}_" in f"_{key}_"]
    alike = difflib.get_close_matches(name, list(keys), n=1, cutoff=_ALIKE)
    return min(holders, key=len) if holders else next(iter(alike), "")


def _values(
    given: Mapping[str, Given], keys: Mapping[str, Key], read: Callable[[Key, Given], Value]
) -> dict[str, Value]:
    """What is given, and the defaults of the other keys. Raises ConfigError."""
    _refuse_unknown(given, keys)
    defaults = {name: key.default for name, key in keys.items()}
    return defaults | {name: read(keys[name], text) for name, text in given.items()}


def _refuse_unknown(given: Mapping[str, Given], keys: Mapping[str, Key]) -> None:
    """Raise ConfigError that names every key that base.yml does not have."""
    lines, unknown = [], [name for name in given if name not in keys]
    gone = maxtext.removed() if unknown else {}
    for name in unknown:
        written = f"{name}={shown(given[name].raw)} ({given[name].where}) is no key"
        near = _nearest_key(name, keys)
        if name in gone:
            remedy = gone[name][1].replace("VALUE", shown(given[name].raw))
            lines.append(f"{written} any more. {remedy}")
        else:
            lines.append(f"{written}.{f' Did you mean {near}?' if near else ''}")
    if lines:
        raise ConfigError(f"{' '.join(lines)} --help lists every key.")
