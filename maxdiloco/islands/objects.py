"""A log's objects in a bucket: bounded reads, checked bytes, and answers in place of errors."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from maxdiloco.data.packages import require
from maxdiloco.errors import ConfigError
from maxdiloco.islands import keys, outer, records, wires
from maxdiloco.islands.island import CREATED, EXISTS, FAILED, Damage
from maxdiloco.islands.records import (
    Beat,
    Claim,
    Damaged,
    Gradient,
    Ledger,
    Message,
    Record,
    Run,
    TooLarge,
)
from maxdiloco.storage import store
from maxdiloco.storage.store import Bucket, LocalFolder

Read = Callable[[str], tuple[Any, bytes]]  # of a name: the object and its payload
_GRADIENT = re.compile(r"g/\d+/\d+\.[A-Za-z0-9_-]{1,64}\.[0-9.]{1,40}")
_MOST_SPEED = 1e12  # tokens a second; our choice
_LOOK_BYTES = 1 << 16  # of a message are read first; few headers are longer


def open_bucket(url: str, key: str = "URL") -> Bucket | LocalFolder:
    """The bucket, or the folder of one, that a URL or a path names. Raises ConfigError."""
    scheme, _, rest = url.rpartition("://")
    if scheme and scheme not in (*store.SCHEMES, "file"):
        known = ", ".join(f"{name}://" for name in (*store.SCHEMES, "file"))
        raise ConfigError(f"{key}={url} is in a store that is not known. Use {known} or a path.")
    if scheme in store.SCHEMES and not re.match(r"[A-Za-z0-9]", rest):
        raise ConfigError(f"{key}={url} names no bucket. Use {scheme}://bucket/folder.")
    try:
        if scheme in store.SCHEMES:
            require("obstore", f"{key}={url}", extra="buckets")
            return store.connect(scheme, *re.split("/+", rest.rstrip("/"), maxsplit=1))
        return store.local_folder(os.path.expanduser(rest))
    except OSError as error:
        raise ConfigError(
            f"{key}={url} cannot be opened: {error.strerror or error}. Name a folder or a bucket "
            "that can."
        ) from error


def max_bytes(run: Run | None, name: str) -> int:
    """Rule 12: the most that an object may have, payload and all. run: None for run.json."""
    header = records.max_header(records.kind_of(name))
    if run is None or name[0] not in "ugs":
        return header
    sizes = outer.sizes_of(run, int(name.split("/")[1]))
    payload = {
        "u": wires.payload_size(run.wire, sizes),
        "g": wires.payload_size(run.wire_down, sizes),
        "s": 8 * sum(sizes),
    }[name[0]]
    return header + payload


def require_size(run: Run | None, name: str, size: int) -> None:
    """Rule 12, of every object that is written or read. Raises TooLarge."""
    if size > (most := max_bytes(run, name)):
        raise TooLarge(f"{name} has {size} bytes, and {most} are the most")


def encoded(run: Run, name: str, value: Any, payload: bytes = b"") -> bytes:
    """The bytes of an object that every reader accepts. Raises TooLarge."""
    data = records.encode(value, payload)
    require_size(run, name, len(data))
    return data


def create(bucket: Bucket, run: Run, name: str, value: Any, payload: bytes = b"") -> str:
    """Put an object if there is none: CREATED, EXISTS, or FAILED, which says nothing.

    Raises TooLarge.
    """
    data = encoded(run, name, value, payload)
    try:
        version = bucket.put_if(name, data, None)
    except OSError:
        return FAILED
    return EXISTS if version is None else CREATED


def read(bucket: Bucket, run: Run | None, name: str) -> tuple[Any, bytes]:
    """An object and its payload. Raises OSError, FileNotFoundError, Damaged."""
    block = store.BLOCK_BYTES
    data, entry = bucket.get_first(name, min(max_bytes(run, name), block))
    require_size(run, name, entry.size)
    starts = range(len(data), entry.size, block)
    rest = [bucket.get_range(name, n, min(n + block, entry.size)) for n in starts]
    value, payload = records.decode(name, b"".join([data, *rest]))
    if not _is_named(name, value):
        raise Damaged(f"{name} is damaged: it is not the object of its name")
    return value, payload


def _is_named(name, value):
    """Whether an object is the one of this name, as far as it says so."""
    match value:
        case Record(fragment, number):
            own = records.record_name(fragment, number)
            return name == own and _GRADIENT.fullmatch(records.gradient_name(value)) is not None
        case Message():
            return name == records.message_name(value.fragment, *value[1:4])
        case Ledger(fragment, number):
            return name == records.snapshot_name(fragment, number)
        case Gradient(fragment, number):
            return records.numbers(name) == (f"g/{fragment}/", number)
        case Beat(island):
            return name == f"hb/{island}"
        case Claim(own):
            return name == own
    return True


def get(bucket: Bucket, run: Run | None, name: str) -> Any:
    """The object, None, FAILED or Damage."""
    return answered(functools.partial(read, bucket, run), name)


def answered(read: Read, name: str) -> Any:
    """Return what a read gives: the object, None, FAILED or Damage. A damaged lease counts as
    another island's."""
    try:
        return read(name)[0]
    except FileNotFoundError:
        return None
    except OSError:
        return FAILED
    except Damaged as error:
        if name.startswith("d/"):
            return Claim(name, "", 0, "")
        return Damage(str(error))


def look(bucket: Bucket, run: Run, name: str) -> Any:
    """A message without its payload, None, FAILED or Damage; a guest's is Damage."""
    try:
        data, entry = bucket.get_first(name, _LOOK_BYTES)
        if data.count(b"\n", 0, _LOOK_BYTES) < 2 and len(data) < entry.size:
            data, entry = bucket.get_first(name, records.max_header(Message))
        message, _ = records.decode(name, data, whole=False)
    except FileNotFoundError:
        return None
    except OSError:
        return FAILED
    except Damaged:
        return Damage("format")
    if not _is_named(name, message):
        return Damage("name")
    sizes = outer.sizes_of(run, message.fragment)
    if entry.size != len(records.encode(message)) + wires.payload_size(run.wire, sizes):
        return Damage("size")
    return message if keys.is_known(run, message) else Damage("guest")


def beats(bucket: Bucket, run: Run) -> dict[str, Beat]:
    """Signs of life by island, of those whose key has signed them. Raises OSError."""
    found = (get(bucket, run, name) for name in listed(bucket, "hb"))
    return {
        beat.island: beat
        for beat in found
        if isinstance(beat, Beat) and 0 <= beat.speed < _MOST_SPEED and keys.is_known(run, beat)
    }


def starts(bucket: Bucket, island: str) -> int:
    """The highest incarnation of an island that is listed, 0: none. Raises OSError."""
    return max((records.numbers(n)[1] for n in listed(bucket, f"i/{island}")), default=0)


def newest_snapshot(bucket: Bucket, run: Run, fragment: int) -> tuple[Ledger, bytes] | None:
    """Return the newest one that is listed, None where there is none. Raises OSError, Damaged."""
    names = snapshots(bucket, fragment)
    with contextlib.suppress(FileNotFoundError):
        return read(bucket, run, names[-1]) if names else None
    return None


def snapshots(bucket: Bucket, fragment: int) -> list[str]:
    """The names of the snapshots that are listed, the oldest first. Raises OSError."""
    names = (n for n in listed(bucket, f"s/{fragment}") if records.numbers(n)[1] >= 0)
    return sorted(names, key=records.numbers)


def listed(bucket: Bucket, folder: str) -> Iterator[str]:
    """Names of the objects in a folder that could be of a log. Raises OSError."""
    pattern = re.compile(
        r"hb/[A-Za-z0-9_-]{1,64}|i/[A-Za-z0-9_-]{1,64}/\d{1,19}|[cs]/\d{1,9}/\d{1,19}|g/\d{1,9}/\d{1,19}\.[A-Za-z0-9_.-]{1,400}"
        r"|d/\d{1,19}(\.2)?|u/\d{1,9}/[A-Za-z0-9_-]{1,64}(\.\d{1,19}){2}"
    )
    return (entry.name for entry in bucket.list_all(folder) if pattern.fullmatch(entry.name))
