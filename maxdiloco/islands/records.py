"""Encode and decode the objects of a log, with versions, sizes and digests. No I/O.

An object is a line `maxdiloco-islands VERSION KIND`, a line of JSON, and an optional payload. In
Python it is a NamedTuple. Each value has exactly one encoding, and other bytes are refused. Nothing
is executed.
"""

import hashlib
import json
import re
import types
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco import json_text

VERSION = 8
MAGIC = "maxdiloco-islands"
# Limit on the bytes of both lines of an object, without its payload. A record of about a thousand
# members fits, and at least four of the largest messages fit into one record.
_MAX_HEADER, _MAX_MESSAGE_HEADER = 1 << 20, 1 << 18
_MAX_INT, _MAX_TEXT = 2**63, 256
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Damaged(ValueError):
    """An object does not match its name, or contradicts other objects of its log.

    The message has the name and the reason.
    """


class TooLarge(Damaged):
    """An object has more bytes than any reader accepts."""


class Leaf(NamedTuple):
    """A leaf of a fragment: its numbers of values and of tensors. 0 tensors: vocabulary rows."""

    size: int
    tensors: int


class Run(NamedTuple):
    """run.json: the settings that all islands have in common.

    Attributes:
      settings: (name, value) pairs that determine the parameters and the data.
      wire, wire_down: wire formats of a message and of a record's gradient.
      aggregation, outer_optimizer, outer_lr, outer_momentum: of the outer step.
      fragments: leaves of each fragment.
      islands_min: fewest islands of a record.
      sync_period, overlap_steps, alpha: H, tau and alpha of Streaming DiLoCo.
      tokens: committed tokens at which the run ends.
      block_tokens: tokens of a lease; 0: data are not leased.
      eval_tokens: tokens between two evaluations; 0: none.
      snapshot_every: records between two snapshots.
      keys: (island, public key) pairs; empty: messages are not signed.
      global_batch_size: sequences of an inner step in all islands; 0: each island decides its own.
    """

    settings: tuple[tuple[str, str], ...]
    wire: str
    wire_down: str
    aggregation: str
    outer_optimizer: str
    outer_lr: float
    outer_momentum: float
    fragments: tuple[tuple[Leaf, ...], ...]
    islands_min: int
    sync_period: int
    overlap_steps: int
    alpha: float
    tokens: int
    block_tokens: int
    eval_tokens: int
    snapshot_every: int
    keys: tuple[tuple[str, str], ...]
    global_batch_size: int = 0


class Range(NamedTuple):
    """Tokens `start` to before `stop`, counted from the first token of the block `block`.

    They may extend into the following blocks. All of them are read under leases number `lease`.
    """

    block: int
    lease: int
    start: int
    stop: int


class Message(NamedTuple):
    """u/F/ISLAND.INCARNATION.SEQ: an outer gradient, encoded in the payload.

    Attributes:
      fragment, island, incarnation, seq: its name.
      base: records of the fragment that the island had applied.
      steps, tokens: since the previous message. The next one adds a rejected message's.
      read: tokens that this incarnation has read so far.
      data: ranges of the tokens. Ranges that do not fit wait for the next message.
      norm: L2 norm of the values.
      finite: whether all values are finite.
      sha256: of the payload.
      period: time between two messages that suits the island [s]; 0: unknown.
      signature: Ed25519 in hex, or "".
    """

    fragment: int
    island: str
    incarnation: int
    seq: int
    base: int
    steps: int
    tokens: int
    read: int
    data: tuple[Range, ...]
    norm: float
    finite: bool
    sha256: str
    period: float = 0.0
    signature: str = ""


class Member(NamedTuple):
    """A message that a record accepts."""

    island: str
    incarnation: int
    seq: int
    weight: float
    steps: int
    tokens: int
    norm: float
    data: tuple[Range, ...]
    period: float = 0.0


class Reject(NamedTuple):
    """A message that a record rejects, and the reason."""

    island: str
    incarnation: int
    seq: int
    reason: str
    steps: int
    norm: float


class Record(NamedTuple):
    """c/F/R: a log record, which decides messages.

    Attributes:
      fragment, number: its name.
      author: island that wrote it.
      nonce: nonce of the draft.
      members, rejected: by island, incarnation and seq.
      dead: incarnations that this record declares dead.
      scale: part of a full outer step.
      previous: sha256 of the previous record.
      state: digest of the outer state before it.
      gradient: sha256 of the payload of its gradient.
    """

    fragment: int
    number: int
    author: str
    nonce: str
    members: tuple[Member, ...]
    rejected: tuple[Reject, ...]
    dead: tuple[tuple[str, int], ...]
    scale: float
    previous: str
    state: str
    gradient: str


class Watermark(NamedTuple):
    """The messages of an incarnation up to `seq` are decided.

    Attributes:
      island, incarnation, seq: the last decided message.
      tokens: committed tokens, including the island's forgotten incarnations.
      since, record: first and last record that named it.
      period: of the last message that a record accepted.
    """

    island: str
    incarnation: int
    seq: int
    tokens: int
    since: int
    record: int
    period: float = 0.0


class Block(NamedTuple):
    """A leased block. `tokens` of its tokens are committed, none of them at or after `stop`."""

    block: int
    lease: int
    island: str
    incarnation: int
    stop: int
    tokens: int


class LogState(NamedTuple):
    """s/F/R: a snapshot, the state after all records up to R. The payload is the outer state.

    Attributes:
      fragment, number: its name.
      record_hash: sha256 of record R; rules.genesis_hash before the first record.
      digest: sha256 of the outer state.
      tokens: committed so far.
      watermarks: by island and incarnation.
      norms: L2 norms of the last messages, with their steps.
      dead: incarnations that are dead and not forgotten.
      blocks: unfinished blocks.
      top: highest block seen.
      tops: values of `top` at the last snapshots.
    """

    fragment: int
    number: int
    record_hash: str
    digest: str
    tokens: int
    watermarks: tuple[Watermark, ...]
    norms: tuple[tuple[float, int], ...]
    dead: tuple[tuple[str, int], ...]
    blocks: tuple[Block, ...]
    top: int
    tops: tuple[int, ...]


class Gradient(NamedTuple):
    """g/F/R.AUTHOR.NONCE: the reduced gradient of a record, encoded in the payload."""

    fragment: int
    number: int
    sha256: str


class Heartbeat(NamedTuple):
    """hb/ISLAND: shows that an island is alive.

    Attributes:
      island, incarnation: of the island.
      count: grows with each heartbeat.
      sent: number of its last message in the store, by fragment.
      speed: tokens a second.
      left: whether this is the last heartbeat, since the program has ended.
      signature: Ed25519 in hex, or "".
    """

    island: str
    incarnation: int
    count: int
    sent: tuple[int, ...]
    speed: float
    left: bool
    signature: str = ""


class Lease(NamedTuple):
    """A name that belongs to one program: i/ISLAND/INCARNATION, d/BLOCK or d/BLOCK.2.

    Attributes:
      name: name of this object.
      island, incarnation: of its owner.
      nonce: nonce of the owner's program.
    """

    name: str
    island: str
    incarnation: int
    nonce: str


_KINDS = MappingProxyType({
    "r": Run, "u": Message, "c": Record, "s": LogState, "g": Gradient, "h": Heartbeat,
    "i": Lease, "d": Lease,
})  # fmt: skip
_WITH_PAYLOAD = ("message", "gradient", "logstate")
RUN = "run.json"


# -- names -----------------------------------------------------------------------------------------


def message_name(fragment: int, island: str, incarnation: int, seq: int) -> str:
    """Return the name of a message. seq begins at 1."""
    return f"u/{fragment}/{island}.{incarnation}.{seq}"


def name_of_message(message: Message) -> str:
    """Return the name of a message."""
    return message_name(*message[:4])


def record_name(fragment: int, number: int) -> str:
    """Return the name of a record. Numbers begin at 1."""
    return f"c/{fragment}/{number}"


def gradient_name(record: Record) -> str:
    """Return the name of the gradient of a record."""
    return f"g/{record.fragment}/{record.number}.{record.author}.{record.nonce}"


def incarnation_name(island: str, incarnation: int) -> str:
    """Return the name of the object that leases a start of an island."""
    return f"i/{island}/{incarnation}"


def snapshot_name(fragment: int, number: int) -> str:
    """Return the name of the state after a record; 0 is the start."""
    return f"s/{fragment}/{number}"


def number_of(name: str) -> int:
    """Return the number in a name: 12 in "g/0/12.a.1"; -1 without one."""
    number = name.rpartition("/")[2].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def fragment_of(name: str) -> int:
    """Return the fragment in a name."""
    return int(name.split("/")[1])


def message_of(name: str) -> tuple[str, int, int]:
    """Return island, incarnation and seq in the name of a message."""
    island, incarnation, seq = name.rpartition("/")[2].split(".")
    return island, int(incarnation), int(seq)


# -- bytes -----------------------------------------------------------------------------------------


def max_header(kind: type) -> int:
    """Rule 12: return the most bytes of an object of this kind before its payload."""
    return _MAX_MESSAGE_HEADER if kind is Message else _MAX_HEADER


def is_island_name(name: str) -> bool:
    """Return whether an island may have this name."""
    return _NAME.fullmatch(name) is not None


def kind_of(name: str) -> type:
    """Return the kind of the object with this name."""
    return _KINDS[name[0]]


def encode(value: Any, payload: bytes = b"") -> bytes:
    """Return the bytes of an object.

    Raises:
      ValueError: a number that JSON lacks.
      TooLarge: the object is larger than readers accept.
    """
    header = _header(value)
    if len(header) > (most := max_header(type(value))):
        kind = type(value).__name__.lower()
        raise TooLarge(f"a {kind} has {len(header)} bytes, and {most} are the most")
    return header + payload


def fits(value: Any) -> bool:
    """Return whether an object is small enough to be written and read."""
    return len(_header(value)) <= max_header(type(value))


def size_in_list(value: Any) -> int:
    """Return the bytes of a value as an element of a list."""
    return len(_JSON.encode(_plain(value))) + 1


def _header(value: Any) -> bytes:
    text = _JSON.encode(_plain(value))
    return f"{MAGIC} {VERSION} {type(value).__name__.lower()}\n{text}\n".encode()


def digest(value: Any) -> str:
    """Return the sha256 of an object without its payload."""
    return sha256(encode(value))


def sha256(payload: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(payload).hexdigest()


def decode(name: str, data: bytes, *, whole: bool = True) -> tuple[Any, bytes]:
    """Return an object and its payload.

    Args:
      name: name of the object.
      data: its bytes.
      whole: False if these are only the first bytes.

    Raises:
      Damaged: the bytes are not an object of this name.
    """
    expected = kind_of(name)
    first, _, rest = data[: max_header(expected)].partition(b"\n")
    magic = re.fullmatch(rb"maxdiloco-islands (\d{1,9}) ([a-z]{1,20})", first)
    kind = expected.__name__.lower()
    if magic is None:
        raise Damaged(f"{name} is not an object of an islands log: it begins with {first[:40]!r}")
    if int(magic[1]) != VERSION:
        raise Damaged(
            f"{name} has format {int(magic[1])}, and this program reads {VERSION}: install the "
            "maxdiloco that wrote it"
        )
    text, end, _ = rest.partition(b"\n")
    try:
        if magic[2].decode() != kind or not end:
            raise ValueError(f"expected a {kind}, found {magic[2].decode()} of {len(data)} bytes")
        value = _typed(expected, json_text.parse(text))
        header = encode(value)
        if not data.startswith(header):
            raise ValueError("it is not written as this program writes it")
    except ValueError as error:
        raise Damaged(f"{name} is damaged: {error}") from error
    payload = data[len(header) :]
    if payload and kind not in _WITH_PAYLOAD:
        raise Damaged(f"{name} is damaged: {len(payload)} bytes follow its end")
    if whole and isinstance(value, Message | Gradient) and sha256(payload) != value.sha256:
        raise Damaged(f"{name} is damaged: its payload has another sha256")
    return value, payload


def _plain(value: Any) -> Any:
    """Return a value as JSON: a NamedTuple is an object, other tuples are lists."""
    if not isinstance(value, tuple):
        return value
    if type(value) is tuple:
        return list(map(_plain, value))
    return dict(zip(value._fields, map(_plain, value), strict=True))


def _typed(kind: Any, value: Any) -> Any:
    """Return a JSON value as this type. Raises ValueError."""
    shown = repr(str(value)[:40])
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list):
            raise ValueError(f"{shown} is not a list")
        inner = kind.__args__
        if inner[-1] is Ellipsis:
            return tuple(_typed(inner[0], v) for v in value)
        if len(value) != len(inner):
            raise ValueError(f"{shown} does not have {len(inner)} values")
        return tuple(map(_typed, inner, value))
    if kind in (str, int, float, bool):
        if type(value) is not kind:
            raise ValueError(f"{shown} is not of type {kind.__name__}")
        if kind is int and not 0 <= value < _MAX_INT or kind is str and len(value) > _MAX_TEXT:
            raise ValueError(f"{shown} is out of range")
        if kind is float and not abs(value) < float("inf"):
            raise ValueError(f"{value} is not finite")
        return value
    if not isinstance(value, dict) or list(value) != list(kind._fields):
        raise ValueError(f"{shown} does not have the fields {', '.join(kind._fields)}")
    made = kind(*map(_typed, kind.__annotations__.values(), value.values()))
    if "island" in kind._fields and not is_island_name(made.island):
        raise ValueError(f"{made.island[:40]!r} is not a name of an island")
    return made
