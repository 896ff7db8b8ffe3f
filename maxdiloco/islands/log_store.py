"""Read and write the objects of a log in a store. Reads are bounded, and bytes are checked."""

import contextlib
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import numpy as np

from maxdiloco.data.packages import require
from maxdiloco.errors import ConfigError
from maxdiloco.islands import outer_step, records, rules, signatures
from maxdiloco.islands.outer_step import Term
from maxdiloco.islands.records import Damaged, Heartbeat, LogState, Message, Record, Run
from maxdiloco.storage import os_errors, store
from maxdiloco.storage.store import Bucket, Entry, LocalFolder, Version

T = TypeVar("T")
Key = rules.Key
Read = Callable[[str], tuple[Any, bytes]]  # name -> (object, payload)
_NAMES = re.compile(
    r"hb/[A-Za-z0-9_-]{1,64}|[cs]/\d{1,9}/\d{1,19}|d/\d{1,19}(\.2)?"
    r"|g/\d{1,9}/\d{1,19}\.[A-Za-z0-9_.-]{1,400}|u/\d{1,9}/[A-Za-z0-9_-]{1,64}(\.\d{1,19}){2}"
)
_GRADIENT = re.compile(r"g/\d+/\d+\.[A-Za-z0-9_-]{1,64}\.[0-9.]{1,40}")
GONE = "gone"  # the reason to reject an absent message
_MAX_SPEED = 1e12  # tokens a second; a heartbeat that claims more is ignored
_FIRST_BYTES = 1 << 12  # read first of a message; few headers are longer


def open_bucket(url: str, key: str = "URL") -> Bucket | LocalFolder:
    """Open the bucket or folder of a URL or a path.

    Args:
      url: gs://, s3://, az:// or file:// with a folder, or a path.
      key: name of the option, for errors.

    Raises:
      ConfigError: it cannot be opened.
    """
    scheme, _, rest = url.rpartition("://")
    remedy = "Name a folder or a bucket that can."
    with os_errors.replace_os_error(ConfigError, f"{key}={url} cannot be opened", remedy):
        if scheme in ("", "file"):
            return store.local_folder(os.path.expanduser(rest))
        if scheme not in store.SCHEMES:
            known = ", ".join(f"{name}://" for name in (*store.SCHEMES, "file"))
            raise ConfigError(f"{key}={url} has an unknown scheme. Use {known} or a path.")
        if not re.match(r"[A-Za-z0-9]", rest):
            raise ConfigError(f"{key}={url} does not name a bucket. Use {scheme}://bucket/folder.")
        require("obstore", f"{key}={url}", extra="buckets")
        return store.connect(scheme, *re.split("/+", rest.rstrip("/"), maxsplit=1))


# -- one object ------------------------------------------------------------------------------------


def max_bytes(run: Run | None, name: str) -> int:
    """Rule 12: return the most bytes of an object with its payload. run: None for run.json."""
    header = records.max_header(records.kind_of(name))
    if run is None or name[0] not in "ugs":
        return header
    sizes = outer_step.sizes_of(run, records.fragment_of(name))
    if name[0] == "s":
        return header + 8 * sum(sizes)
    wire = run.wire if name[0] == "u" else run.wire_down
    return header + outer_step.payload_size(wire, sizes)


def require_size(run: Run | None, name: str, size: int) -> None:
    """Rule 12: raise TooLarge for an object that no reader accepts."""
    if size > (most := max_bytes(run, name)):
        raise records.TooLarge(f"{name} has {size} bytes, and {most} are the most")


def encoded(run: Run, name: str, value: Any, payload: bytes = b"") -> bytes:
    """Return the bytes of an object that every reader accepts. Raises TooLarge."""
    data = records.encode(value, payload)
    require_size(run, name, len(data))
    return data


def create(bucket: Bucket, run: Run, name: str, value: Any, payload: bytes = b"") -> bool:
    """Put an object if its name is free, and return whether it was. Raises OSError, TooLarge."""
    return bucket.put_if(name, encoded(run, name, value, payload), None) is not None


def read(bucket: Bucket, run: Run | None, name: str) -> tuple[Any, bytes]:
    """Return an object and its payload.

    Raises:
      FileNotFoundError: it is absent.
      OSError: the store cannot be read.
      Damaged: its content does not match its name.
    """
    part = store.BLOCK_BYTES
    data, entry = bucket.get_first(name, min(max_bytes(run, name), part))
    require_size(run, name, entry.size)
    starts = range(len(data), entry.size, part)
    rest = [bucket.get_range(name, n, min(n + part, entry.size)) for n in starts]
    value, payload = records.decode(name, b"".join([data, *rest]))
    if not _has_name(value, name):
        raise Damaged(f"{name} is damaged: it is not the object of its name")
    return value, payload


def _has_name(value: Any, name: str) -> bool:
    """Return whether the fields of an object match a name."""
    match value:
        case Record(fragment, number):
            is_safe = _GRADIENT.fullmatch(records.gradient_name(value)) is not None
            return name == records.record_name(fragment, number) and is_safe
        case Message():
            return name == records.name_of_message(value)
        case LogState(fragment, number):
            return name == records.snapshot_name(fragment, number)
        case records.Gradient(fragment, number):
            return name.startswith(f"g/{fragment}/{number}.")
        case Heartbeat(island):
            return name == f"hb/{island}"
        case records.Lease(own):
            return name == own
    return True


def read_header(bucket: Bucket, run: Run, name: str) -> Message:
    """Return a message without its payload.

    Raises:
      FileNotFoundError, OSError: as `read`.
      Damaged: it cannot count. The text is the reason in a record: format, name, size or signature.
    """
    data, entry = bucket.get_first(name, _FIRST_BYTES)
    if data.count(b"\n", 0, _FIRST_BYTES) < 2 and len(data) < entry.size:
        data, entry = bucket.get_first(name, records.max_header(Message))
    try:
        message, _ = records.decode(name, data, whole=False)
    except Damaged as error:
        raise Damaged("format") from error
    if not _has_name(message, name):
        raise Damaged("name")
    sizes = outer_step.sizes_of(run, message.fragment)
    if entry.size != len(records.encode(message)) + outer_step.payload_size(run.wire, sizes):
        raise Damaged("size")
    if not signatures.is_trusted(run, message):
        raise Damaged("signature")
    return message


class Unusable(Damaged):
    """Members of a record cannot count.

    Attributes:
      members: their keys, and the reasons.
    """

    def __init__(self, record: Record, members: tuple[tuple[Key, str], ...]):
        """Describe the first member."""
        name, (key, reason) = records.record_name(record.fragment, record.number), members[0]
        super().__init__(f"{name} takes the message {key}, which is bad: {reason}")
        self.members = members


def read_term(
    read: Read, run: Run, fragment: int, member: records.Member
) -> Term | tuple[Key, str]:
    """Return a member's values; or its key and the reason why they cannot count. Raises OSError."""
    key = rules.message_key(member)
    try:
        message, payload = read(records.message_name(fragment, *key))
        values = outer_step.decode(run.wire, outer_step.sizes_of(run, fragment), payload)
    except FileNotFoundError:
        return key, GONE
    except ValueError:  # Damaged, too
        return key, "sha256"
    if not signatures.is_trusted(run, message):
        return key, "signature"
    if not np.isfinite(values).all():
        return key, "not finite"
    if message.norm != outer_step.norm(values):
        return key, "another norm"
    return Term(key[:2], member.weight, values)


def sources_of(run: Run, record: Record) -> list[str]:
    """Return the names of the objects from which the gradient of a record is read."""
    if outer_step.has_gradient(run, record):
        return [records.gradient_name(record)]
    keys = map(rules.message_key, record.members)
    return [records.message_name(record.fragment, *key) for key in keys]


def read_gradient(read: Read, run: Run, record: Record) -> np.ndarray:
    """Return the gradient of a record [N]: read, or computed from its members.

    Raises:
      FileNotFoundError: an object is absent.
      OSError: the store cannot be read.
      Damaged: the objects do not match the record.
    """
    name = records.record_name(record.fragment, record.number)
    if outer_step.has_gradient(run, record):
        _, payload = read(records.gradient_name(record))
    else:
        try:
            payload = compute_gradient(read, run, record)
        except Unusable as error:
            if error.members[0][1] == GONE:
                raise FileNotFoundError(name) from error
            raise
    if records.sha256(payload) != record.gradient:
        raise Damaged(f"{name}: its gradient has another sha256")
    return outer_step.decode(run.wire_down, outer_step.sizes_of(run, record.fragment), payload)


def compute_gradient(read: Read, run: Run, record: Record) -> bytes:
    """Return the payload of a record's gradient, computed from its members.

    Raises:
      Unusable: messages cannot count.
      OSError: the store cannot be read.
    """
    found = [read_term(read, run, record.fragment, member) for member in record.members]
    if unusable := tuple(each for each in found if not isinstance(each, Term)):
        raise Unusable(record, unusable)
    return outer_step.reduced(run, record.fragment, found)


# -- listings --------------------------------------------------------------------------------------


def _entries(bucket: Bucket, folder: str) -> Iterator[Entry]:
    return (entry for entry in bucket.list_all(folder) if _NAMES.fullmatch(entry.name))


def listed(bucket: Bucket, folder: str) -> Iterator[str]:
    """Yield the names in a folder that are valid in a log. Raises OSError."""
    return (entry.name for entry in _entries(bucket, folder))


def heartbeats(
    bucket: Bucket, run: Run, known: dict[str, tuple[Version, Heartbeat]]
) -> dict[str, Heartbeat]:
    """Return trusted heartbeats by island. Reads the heartbeats that have changed.

    Args:
      bucket: the store.
      run: run.json of the log.
      known: {name: version and heartbeat} of earlier calls; updated.

    Raises:
      OSError: they cannot be listed.
    """
    for entry in _entries(bucket, "hb"):
        version, _ = known.get(entry.name, (None, None))
        if version == entry.version != {}:
            continue
        known.pop(entry.name, None)
        with contextlib.suppress(OSError, Damaged):
            one, _ = read(bucket, run, entry.name)
            is_valid = 0 <= one.speed < _MAX_SPEED and len(one.sent) == len(run.fragments)
            if is_valid and signatures.is_trusted(run, one):
                known[entry.name] = entry.version, one
    return {one.island: one for _, one in known.values()}


def snapshots(bucket: Bucket, fragment: int) -> list[str]:
    """Return the names of the listed snapshots, the oldest first. Raises OSError."""
    return sorted(listed(bucket, f"s/{fragment}"), key=records.number_of)


# -- counts ----------------------------------------------------------------------------------------


class MeteredStore:
    """The methods of a bucket with which an island follows a log, with counts of the requests.

    Attributes:
      counts: "requests" so far, and bytes of objects that were "sent" and "received". It is
        replaced, never changed in place.
      failure: text of the last error; "" without an error.
    """

    def __init__(self, bucket: Bucket):
        """Wrap a bucket."""
        self._bucket, self._lock = bucket, threading.Lock()
        self.counts, self.failure = Counter[str](), ""

    def get_range(self, name: str, start: int, end: int) -> bytes:
        """See Bucket."""
        return self._ask(self._bucket.get_range, name, start, end)

    def get_first(self, name: str, most: int) -> tuple[bytes, Entry]:
        """See Bucket."""
        return self._ask(self._bucket.get_first, name, most)

    def put(self, name: str, data: bytes) -> None:
        """See Bucket."""
        self._ask(self._bucket.put, name, data, sent=len(data))

    def put_if(self, name: str, data: bytes, version: Version | None) -> Version | None:
        """See Bucket."""
        return self._ask(self._bucket.put_if, name, data, version, sent=len(data))

    def list_all(self, prefix: str) -> Iterator[Entry]:
        """See Bucket. Each 1,000 names are one request."""
        found = self._ask(lambda: list(self._bucket.list_all(prefix)))
        self._count(requests=len(found) // 1000)
        return iter(found)

    def delete(self, names: Collection[str]) -> None:
        """See Bucket."""
        self._ask(self._bucket.delete, names)

    def _ask(self, request: Callable[..., T], *args: Any, sent: int = 0) -> T:
        try:
            result = request(*args)
        except FileNotFoundError:
            raise
        except OSError as error:
            self.failure = str(error.strerror)
            raise
        data = result[0] if isinstance(result, tuple) else result
        received = len(data) if isinstance(data, bytes) else 0
        self._count(requests=1, sent=sent, received=received)
        return result

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts = self.counts + Counter(more)
