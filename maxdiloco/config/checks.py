"""Checks that the groups of keys share with each other and with the programs."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from maxdiloco.config.values import show
from maxdiloco.diloco import schedule
from maxdiloco.errors import ConfigError

BUCKETS = ("gs", "s3", "az")  # URL schemes that storage.store supports
FEEDBACK = {"auto": None, "always": True, "never": False}  # None: as the wire format needs it
_ADDRESS = r"[A-Za-z][A-Za-z0-9+.-]*://"


def _shown(cfg: Any, names: str) -> str:
    """Return `key=value and key=value` of some keys, whose names are separated by spaces."""
    return " and ".join(f"{name}={show(getattr(cfg, name))}" for name in names.split())


def require_default(cfg: Any, names: str, because: str) -> None:
    """Raise ConfigError for the first key that has no effect but is not at its default.

    Args:
      cfg: a Config.
      names: the keys that have no effect, separated by spaces.
      because: the keys with whose values they have no effect.
    """
    for name in names.split():
        default = type(cfg).model_fields[name].default
        if getattr(cfg, name) != default:
            use = f"Use {name}={show(default)}" if default != "" else f"Leave {name} out"
            other = getattr(cfg, because, None)
            is_switch = isinstance(other, bool)
            use += f" or {because}={show(not other)}" if is_switch else f", or change {because}"
            raise ConfigError(
                f"{_shown(cfg, name)} has no effect with {_shown(cfg, because)}. {use}."
            )


def require(cfg: Any, name: str, allowed: Sequence[Any], because: str, reason: str) -> None:
    """Raise ConfigError unless a key has one of the values that other keys allow.

    Args:
      cfg: a Config.
      name: the key.
      allowed: the values that can be combined with the other keys; the first is the remedy.
      because: the other keys, separated by spaces.
      reason: why they allow no other values.
    """
    if getattr(cfg, name) not in allowed:
        use = show(allowed[0])
        raise ConfigError(
            f"{_shown(cfg, name)} cannot be combined with {_shown(cfg, because)}: {reason}. "
            f"{f'Use {name}={use}' if use else f'Leave {name} out'}."
        )


def require_set(cfg: Any, name: str, because: str) -> None:
    """Raise ConfigError if a key is empty or 0, but other keys need it."""
    if not getattr(cfg, name):
        raise ConfigError(f"{_shown(cfg, because)} requires {name}. Set {name}.")


def require_at_most(cfg: Any, name: str, most: int, because: str) -> None:
    """Raise ConfigError if the value of a key is above a limit that other keys set."""
    if getattr(cfg, name) > most:
        shown = _shown(cfg, because)
        raise ConfigError(f"{_shown(cfg, name)}: expected at most {most} with {shown}.")


def require_multiple(cfg: Any, name: str, divisor: int, because: str) -> None:
    """Raise ConfigError unless the value of a key is a multiple of a number that other keys set."""
    if getattr(cfg, name) % divisor:
        shown = _shown(cfg, because)
        raise ConfigError(f"{_shown(cfg, name)}: expected a multiple of {divisor} with {shown}.")


def refuse_store(key: str, value: str) -> None:
    """Raise ConfigError when a path is on an object store that is not one of BUCKETS.

    The lock of a run needs conditional writes, and a run reads objects right after it wrote them.
    BUCKETS have both.
    """
    scheme, separator, rest = value.partition("://")
    if not separator or (scheme in BUCKETS and re.match(r"[A-Za-z0-9]", rest)):
        return
    if scheme in BUCKETS:
        raise ConfigError(f"{key}={value} has no bucket. Use {scheme}://bucket/folder.")
    usable = f"Use {'://, '.join(BUCKETS)}://, or a folder on a mounted file system."
    if scheme in ("http", "https"):
        raise ConfigError(f"{key}={value}: {scheme}:// is for reading single files. {usable}")
    raise ConfigError(
        f"{key}={value}: on {scheme}:// a checkpoint cannot become visible at once, and a run "
        f"cannot be locked. {usable}"
    )


def refuse_text_path(key: str, path: str) -> None:
    """Raise ConfigError when text cannot be read from a path."""
    readable = rf"(?!{_ADDRESS}).*|(gs|s3|az|https)://[A-Za-z0-9].*"
    if not re.fullmatch(readable, path, re.DOTALL):
        raise ConfigError(
            f"{key}={path}: expected a path that is mounted on every host, https:// with one file, "
            "or gs://, s3:// or az:// with a bucket and a path or glob."
        )


def eval_key(name: str) -> str:
    """Return the key of an evaluated text for messages, such as eval_dataset_path.wiki."""
    return f"eval_dataset_path.{name}" if name else "eval_dataset_path"


def check_replicas(num_replicas: int, positions: int, positions_name: str) -> None:
    """Raise ConfigError unless num_diloco_replicas is a multiple of the mesh positions."""
    with as_config_error():
        schedule.check_replicas(
            num_replicas, positions, name="num_diloco_replicas", slots_name=positions_name
        )


@contextlib.contextmanager
def as_config_error() -> Iterator[None]:
    """Turn a ValueError, which checks of the library raise, into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from None
