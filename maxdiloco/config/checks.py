"""Checks of values that the rules in `groups/` share with the programs."""

import contextlib
import re
from collections.abc import Iterator

from maxdiloco.diloco import schedule
from maxdiloco.errors import ConfigError

BUCKETS = ("gs", "s3", "az")  # URL schemes that storage.store supports
FEEDBACK = {"auto": None, "always": True, "never": False}  # None: as the wire format needs it
_ADDRESS = r"[A-Za-z][A-Za-z0-9+.-]*://"


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
            f"{key}={path} is an address that is not read. Use gs://, s3:// or az:// with a bucket "
            "and a folder, file or glob in it, https:// with one file, or mount the text on every "
            "host."
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
