"""Checks of a config that need neither JAX nor devices."""

import contextlib
import difflib
import math
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from maxdiloco.diloco import schedule
from maxdiloco.errors import ConfigError
from maxdiloco.flags import together
from maxdiloco.flags.base_yml import Key, Table, allows, choices, declared, show

BUCKETS = ("gs", "s3", "az")  # as storage.store has them
LARGEST = 2**31 - 1  # of int32: the limit of a whole number that has none in base.yml
# Axes of the mesh in its order; each has a size in the dcn and in the ici tier.
AXES = ("diloco", "data", "fsdp", "expert", "context", "tensor")
FEEDBACK = {"auto": None, "always": True, "never": False}  # None: as the wire needs it
_SCHEDULE = schedule.Names(
    H="diloco_sync_period",
    P="num_diloco_fragments",
    tau="num_communication_overlapping_steps",
    round_overlap="diloco_round_overlap",
)
_ADDRESS = r"[A-Za-z][A-Za-z0-9+.-]*://"
# A path of text, and what is said of others.
_PATH = rf"(?!{_ADDRESS}).*|(gs|s3|az|https)://[A-Za-z0-9].*"
_NOT_READ = (
    "is an address that is not read. Use gs://, s3:// or az:// with a bucket and a folder, "
    "file or glob in it, https:// with one file, or mount the text on every host"
)
_FORM = "Write dataset_mixture=[{path: ..., weight: ..., name: ...}, ...]."
# {entry of a source: (regular expression of its values, what is said of others)}.
_OF_SOURCE = {
    "name": (
        r"[A-Za-z0-9_][A-Za-z0-9._-]*",
        "cannot be part of a metric's name. Use letters, digits, '.', '_' and '-'",
    ),
    "path": (_PATH, _NOT_READ),
    "weight": (
        r"([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,2})?",
        "is not a number of at least 0. Give its share, such as 0.7 or 7",
    ),
}


def check(cfg: Any, keys: Mapping[str, Key]) -> None:
    """Raise ConfigError for the first value, or pair of values, that cannot work.

    cfg: a Config; keys: base.yml's table, whose limits apply first.
    """
    for key in keys.values():
        _check_limit(key, vars(cfg)[key.name])
        if key.entries and vars(cfg)[key.name]:
            _check_entries(key, dict(vars(cfg)[key.name]))
    together.check(cfg, keys)
    for key in ("base_output_directory", "load_parameters_path", "load_full_state_path"):
        refuse_store(key, vars(cfg)[key])
    for check_group in (_mesh, _replicas, _texts, _mixture):
        check_group(cfg)


def _check_limit(key: Key, value: Any) -> None:
    usual = f"{'an example' if key.required else 'the default'} is {key.name}={show(key.default)}"
    if type(value) is int and " to " not in key.allowed and value > LARGEST:
        raise ConfigError(
            f"{key.name}={value} is too large: sizes and counts are at most {LARGEST}. Use a "
            f"smaller one; {usual}."
        )
    if allows(key.allowed, value):
        return
    if not key.allowed.startswith("one of "):
        raise ConfigError(
            f"{key.name}={show(value)} must be {key.allowed}{f' ({key.unit})' if key.unit else ''}."
            f" Use such a value; {usual}."
        )
    names = choices(key.allowed)
    entries = value if isinstance(value, tuple) else (value,)
    wrong = next(show(entry) for entry in entries if entry not in names)
    longer = [name for name in names if wrong and name.startswith(wrong)]
    near = longer or difflib.get_close_matches(wrong, names, n=1, cutoff=0.7)
    listed = ", ".join(name or "empty" for name in names)
    remedy = f"Did you mean {near[0]}?" if near else "Use one of these."
    raise ConfigError(f"{key.name}={show(value)} must be one of: {listed}. {remedy}")


def _check_entries(key: Key, table: Mapping[str, Any]) -> None:
    """Refuse a table that lacks an entry, or has one out of its limits or that nothing reads."""
    whole, shown = key.whole(table.items()), f"{key.name}={show(dict(table))}"
    for name, entry in key.entries.items():
        other, values = entry.read_with
        is_read = not other or whole[other] in values
        if name in table and not is_read:
            raise ConfigError(
                f"{shown}: {name} does nothing with {other}: {show(whole[other])}. Leave it out, "
                f"or use {other}: {' or '.join(values)}."
            )
        if name not in table and is_read and entry.required:
            raise ConfigError(f"{shown} lacks {name}. Add it, such as {name}: {entry.default}.")
        if name in table:
            _check_limit(entry, table[name])


def refuse_store(key: str, value: str) -> None:
    """Raise ConfigError when a path is on an object store that is not one of BUCKETS.

    The lock of a run needs their conditional writes, and a run reads at once what it has written.
    """
    scheme, separator, rest = value.partition("://")
    if not separator or (scheme in BUCKETS and re.match(r"[A-Za-z0-9]", rest)):
        return
    if scheme in BUCKETS:
        raise ConfigError(f"{key}={value} names no bucket. Use {scheme}://bucket/folder.")
    if scheme in ("http", "https"):
        raise ConfigError(
            f"{key}={value} cannot be on {scheme}://, which gives single files to read and takes "
            f"none. Use {'://, '.join(BUCKETS)}://, or a folder on a mounted file system."
        )
    raise ConfigError(
        f"{key}={value} is on {scheme}://, where a checkpoint cannot become visible at once and a "
        f"run cannot be locked. Use {'://, '.join(BUCKETS)}://, or a folder on a mounted file "
        f"system."
    )


def has_replicas(cfg: Any) -> bool:
    """Whether a run of this config keeps, and saves, parameters of each replica."""
    return cfg.enable_diloco


def is_island(cfg: Any) -> bool:
    """Whether a run of this config is an island among others.

    It trains until the log of the islands has all tokens, in any number of steps.
    """
    return cfg.islands != "none"


def check_replicas(num_replicas: int, slots: int, slots_name: str) -> None:
    """Raise ConfigError unless num_diloco_replicas is a multiple of the mesh's slots."""
    with _as_config_errors():
        schedule.check_replicas(
            num_replicas, slots, name="num_diloco_replicas", slots_name=slots_name
        )


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _mesh(cfg: Any) -> None:
    for tier, where in (("dcn", "slices"), ("ici", "devices of a slice")):
        axes = [axis for axis, size in cfg.sizes(tier).items() if size == -1]
        still_open = [f"{tier}_{axis}_parallelism" for axis in axes]
        if len(still_open) > 1:
            raise ConfigError(
                f"{'=-1 and '.join(still_open)}=-1: the number of {where} can fill only one. Set "
                f"{still_open[0]} to a number."
            )
    sizes = cfg.sizes("dcn")
    known = math.prod(size for size in sizes.values() if size != -1)
    fits = cfg.num_slices == known if -1 not in sizes.values() else cfg.num_slices % known == 0
    if cfg.num_slices != -1 and not fits:
        shown = [f"{axis} {size}" for axis, size in sizes.items() if size not in (1, -1)]
        raise ConfigError(
            f"num_slices={cfg.num_slices} does not fit the dcn sizes "
            f"{' * '.join(shown) or 'all 1'} = {known}. Leave num_slices=-1 or change a "
            f"dcn_*_parallelism key."
        )
    for entry in cfg.logical_axis_rules:
        pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        axes = (entry[1],) if pair and isinstance(entry[1], str) else entry[1] if pair else ()
        if not pair or not set(axes) <= set(AXES) or len(set(axes)) < len(axes):
            raise ConfigError(
                f"logical_axis_rules={show(cfg.logical_axis_rules)}: {show(entry)} is not "
                f"[logical axis, [mesh axes, each once]]. Mesh axes: {', '.join(AXES)}."
            )


def _replicas(cfg: Any) -> None:
    dcn, ici = cfg.dcn_diloco_parallelism, cfg.ici_diloco_parallelism
    if dcn * ici > 0 and cfg.num_diloco_replicas != -1:
        check_replicas(cfg.num_diloco_replicas, dcn * ici, f"dcn diloco {dcn} * ici diloco {ici} =")
    with _as_config_errors():
        counts = {name: vars(cfg)[key] for name, key in _SCHEDULE._asdict().items()}
        schedule.check_counts(**counts, names=_SCHEDULE)


def _texts(cfg: Any) -> None:
    """What is text is at paths, and what is evaluated has names."""
    paths = {"dataset_path": cfg.dataset_path}
    for name, path in cfg.eval_paths().items():
        if not re.fullmatch(r"[A-Za-z0-9_-]*", name) or not isinstance(path, str):
            raise ConfigError(
                f"eval_dataset_path={show(cfg.eval_dataset_path)}: {name}: {show(path)} is not "
                f"name: path. Write {{wiki: /data/wiki}}, with letters, digits, '_' and '-' in a "
                f"name."
            )
        paths[key_of_eval(name)] = path
    for key, path in paths.items():
        if cfg.dataset_type != "synthetic" and not re.fullmatch(f"(?s:{_PATH})", path):
            raise ConfigError(f"{key}={path} {_NOT_READ}.")


def key_of_eval(name: str) -> str:
    """The key of an evaluated text for messages, such as eval_dataset_path.wiki."""
    return f"eval_dataset_path.{name}" if name else "eval_dataset_path"


def _mixture(cfg: Any) -> None:
    mixture = cfg.dataset_mixture
    weights = [_weight(entry) for entry in mixture]
    names = [dict(entry)["name"] for entry in mixture]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"dataset_mixture has {names.count(name)} sources named {name}: checkpoints and "
                f"metrics tell them apart by name. Give each its own."
            )
    if mixture and not any(weights):
        raise ConfigError(
            f"dataset_mixture={show(mixture)} has no weight above 0. Give a source one."
        )
    if cfg.dataset_per_replica and len(set(weights)) > 1:
        raise ConfigError(
            "dataset_mixture has weights, which do nothing with dataset_per_replica=true: a "
            "replica reads one source. Leave them out."
        )


def _weight(entry: Any) -> Fraction:
    """The weight of a source whose entry is in order."""
    if not isinstance(entry, Table) or not all(isinstance(text, str) for _, text in entry):
        raise ConfigError(f"dataset_mixture: {show(entry)} is not a source. {_FORM}")
    shown, entry = show(entry), dict(entry)
    unknown = sorted(entry.keys() - {*_OF_SOURCE, "dataset_type", "text_column"})
    missing = [key for key in ("path", "name") if not entry.get(key)]
    if unknown or missing:
        why = f"has no {missing[0]}" if missing else f"has {unknown[0]}, which is no key of it"
        raise ConfigError(f"dataset_mixture: source {shown} {why}. {_FORM}")
    kinds = [kind for kind in choices(declared()["dataset_type"].allowed) if kind != "synthetic"]
    other = f"is none of {', '.join(kinds)}. Use one of them, or leave it out for the run's"
    limits = {"dataset_type": ("|".join(kinds), f"{other} dataset_type"), **_OF_SOURCE}
    for key, (pattern, problem) in limits.items():
        if key in entry and not re.fullmatch(f"(?s:{pattern})", entry[key]):
            whose = "" if key == "name" else f" of source {entry['name']}"
            raise ConfigError(f"dataset_mixture: {key} {entry[key]}{whose} {problem}.")
    return Fraction(entry.get("weight", "1"))
