"""The objects of a log: NamedTuples to bytes and back, with versions, sizes and digests. No I/O.

An object is a line `maxdiloco-islands VERSION KIND`, a line of JSON, then its payload, if any. One
value has one text: what does not give the same bytes again is refused. Nothing is executed.
"""

import hashlib
import json
import re
import types
from types import MappingProxyType
from typing import Any, NamedTuple

from maxdiloco import json_text

VERSION = 5
MAGIC = "maxdiloco-islands"
# Bytes of both lines of an object, without its payload. A record of some thousand members fits, and
# so do at least four of the largest messages in one record.
_MAX_HEADER, _MAX_MESSAGE_HEADER = 1 << 20, 1 << 18
_MOST_INT, _MOST_TEXT = 2**63, 256
_JSON = json.JSONEncoder(allow_nan=False, separators=(",", ":"))
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Damaged(ValueError):
    """An object is not what its name says."""


class TooLarge(Damaged):
    """An object has more bytes than any reader accepts."""


class Leaf(NamedTuple):
    """A leaf of a fragment: its values, and the tensors that they are; 0: rows of a vocabulary."""

    size: int
    tensors: int


class Run(NamedTuple):
    """run.json: what has to be equal. model, tokenizer, data: fingerprints, compared as texts.

    wire, wire_down: of a message and of a record's gradient. islands_min: of a record.
    sync_period: H; overlap_steps: tau. tokens: the run's end. block_tokens: of a lease, 0: none.
    snapshot_every: records. keys: {island: public key} as pairs.
    """

    model: str
    tokenizer: str
    data: str
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


class Range(NamedTuple):
    """Tokens `start` to before `stop`, counted from the first token of the block `block`.

    They may run on into the blocks that follow, all of them read under leases number `lease`.
    """

    block: int
    lease: int
    start: int
    stop: int


class Message(NamedTuple):
    """u/F/ISLAND.INC.SEQ: an outer gradient. base: records of the fragment that it is behind.

    steps, tokens: since the message before; a rejected one's are in the next. data: what was read;
    ranges that do not fit wait for the next message, and so do their tokens. read: tokens that this
    incarnation has read up to there. sha256: of the payload. signature: "" or Ed25519's, in hex.
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
    signature: str = ""


class Member(NamedTuple):
    """A message that a record takes."""

    island: str
    incarnation: int
    seq: int
    weight: float
    steps: int
    tokens: int
    norm: float
    data: tuple[Range, ...]


class Reject(NamedTuple):
    """A message that a record does not take, and why."""

    island: str
    incarnation: int
    seq: int
    reason: str
    steps: int
    norm: float


class Record(NamedTuple):
    """c/F/R: the decision. Members and rejects by island, incarnation and seq.

    dead: islands whose unfinished blocks may be leased again. previous: sha256 of record R-1.
    state: digest of the outer state after it. gradient: sha256 of the payload of g/F/R.
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


class Mark(NamedTuple):
    """Messages of an incarnation up to `seq` are decided; tokens of the members.

    since, record: the first and the last record that named it. A forgotten incarnation's tokens are
    added to those of the island's next one.
    """

    island: str
    incarnation: int
    seq: int
    tokens: int
    since: int
    record: int


class Block(NamedTuple):
    """A block that is read under a lease: `tokens` of it are in the log, none after `stop`."""

    block: int
    lease: int
    island: str
    incarnation: int
    stop: int
    tokens: int


class Ledger(NamedTuple):
    """s/F/R: what the records up to R add up to; its payload is the outer state after R.

    link: sha256 of record R, rules.origin before the first. digest: of the outer state. norms: of
    the last messages, and their steps. top: the highest block seen; tops: what it was after each of
    the last records that are divisible by snapshot_every. blocks: unfinished ones.
    """

    fragment: int
    number: int
    link: str
    digest: str
    tokens: int
    marks: tuple[Mark, ...]
    norms: tuple[tuple[float, int], ...]
    dead: tuple[tuple[str, int], ...]
    blocks: tuple[Block, ...]
    top: int
    tops: tuple[int, ...]


class Gradient(NamedTuple):
    """g/F/R.AUTHOR.NONCE; its payload is what everyone applies."""

    fragment: int
    number: int
    sha256: str


class Beat(NamedTuple):
    """hb/ISLAND: a sign of life. ready: has sent a message. speed: tokens a second.

    left: this is the last one, since the program has ended. signature: as that of a message.
    """

    island: str
    incarnation: int
    beat: int
    ready: bool
    speed: float
    left: bool
    signature: str = ""


class Claim(NamedTuple):
    """A name that one program owns: i/ISLAND/INC, d/BLOCK or d/BLOCK.2. nonce: the program's."""

    name: str
    island: str
    incarnation: int
    nonce: str


_OF_NAME = MappingProxyType({
    "r": Run, "u": Message, "c": Record, "s": Ledger, "g": Gradient, "h": Beat,
    "i": Claim, "d": Claim,
})  # fmt: skip
RUN = "run.json"


def max_header(kind: type) -> int:
    """The most bytes of an object of this kind before its payload, for writers and readers."""
    return _MAX_MESSAGE_HEADER if kind is Message else _MAX_HEADER


def kind_of(name: str) -> type:
    """The kind of the object of a name."""
    return _OF_NAME[name[0]]


def message_name(fragment: int, island: str, incarnation: int, seq: int) -> str:
    """Of a message."""
    return f"u/{fragment}/{island}.{incarnation}.{seq}"


def record_name(fragment: int, number: int) -> str:
    """Of a record; numbers begin at 1."""
    return f"c/{fragment}/{number}"


def gradient_name(record: Record) -> str:
    """Of the gradient that a record names."""
    return f"g/{record.fragment}/{record.number}.{record.author}.{record.nonce}"


def incarnation_name(island: str, incarnation: int) -> str:
    """Return the name of the object that claims a start of an island."""
    return f"i/{island}/{incarnation}"


def snapshot_name(fragment: int, number: int) -> str:
    """Of the state after a record; 0 is the start."""
    return f"s/{fragment}/{number}"


def numbers(name: str) -> tuple[str, int]:
    """The folder and the number of a name: "g/0/12.a.1" -> ("g/0/", 12); -1: it has none."""
    folder, _, last = name.rpartition("/")
    number = last.partition(".")[0]
    return f"{folder}/", int(number) if number.isdecimal() else -1


def encode(value: Any, payload: bytes = b"") -> bytes:
    """The bytes of an object.

    Raises ValueError for a number that JSON does not have, TooLarge for what no reader accepts.
    """
    header = _header(value)
    _require_header(type(value), len(header))
    return header + payload


def fits(value: Any) -> bool:
    """Whether an object is small enough to be written and read."""
    return len(_header(value)) <= max_header(type(value))


def size_in_list(value: Any) -> int:
    """The bytes that a value takes as an element of a list."""
    return len(_JSON.encode(_plain(value))) + 1


def _header(value: Any) -> bytes:
    text = _JSON.encode(_plain(value))
    return f"{MAGIC} {VERSION} {type(value).__name__.lower()}\n{text}\n".encode()


def _require_header(kind: type, size: int) -> None:
    if size > (most := max_header(kind)):
        raise TooLarge(f"a {kind.__name__.lower()} has {size} bytes, and {most} are the most")


def digest(value: Any) -> str:
    """sha256 of an object without its payload."""
    return hashlib.sha256(encode(value)).hexdigest()


def sha256(payload: bytes) -> str:
    """sha256 in hex."""
    return hashlib.sha256(payload).hexdigest()


def decode(name: str, data: bytes, *, whole: bool = True) -> tuple[Any, bytes]:
    """The object of this name and its payload, as far as it is there.

    whole: False for the first bytes of an object. Raises Damaged with one line.
    """
    of = kind_of(name)
    first, _, rest = data[: max_header(of)].partition(b"\n")
    magic = re.fullmatch(rb"maxdiloco-islands (\d{1,9}) ([a-z]{1,20})", first)
    kind = of.__name__.lower()
    if magic is None:
        raise Damaged(f"{name} is no object of an islands log: it begins with {first[:40]!r}")
    if int(magic[1]) != VERSION:
        raise Damaged(
            f"{name} has format {int(magic[1])}, and this program reads {VERSION}: install the "
            "maxdiloco that wrote it"
        )
    text, end, _ = rest.partition(b"\n")
    try:
        if magic[2].decode() != kind or not end:
            raise ValueError(f"it is a {magic[2].decode()} of {len(data)} bytes, no {kind}")
        value = _typed(of, json_text.parse(text))
        header = encode(value)
        if not data.startswith(header):
            raise ValueError("it is not written as this program writes it")
    except ValueError as error:
        raise Damaged(f"{name} is damaged: {error}") from error
    payload = data[len(header) :]
    if payload and kind not in ("message", "gradient", "ledger"):
        raise Damaged(f"{name} is damaged: {len(payload)} bytes follow its end")
    if whole and isinstance(value, Message | Gradient) and sha256(payload) != value.sha256:
        raise Damaged(f"{name} is damaged: its payload has another sha256")
    return value, payload


def _plain(value: Any) -> Any:
    """A value as JSON: a NamedTuple is an object, other tuples are lists."""
    if not isinstance(value, tuple):
        return value
    if type(value) is tuple:
        return list(map(_plain, value))
    return dict(zip(value._fields, map(_plain, value), strict=True))


def _typed(kind: Any, value: Any) -> Any:
    """The value as this type. Raises ValueError where it is of another, too large or too long."""
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list):
            raise ValueError(f"{str(value)[:40]!r} is no list")
        inner = kind.__args__
        if inner[-1] is Ellipsis:
            return tuple(_typed(inner[0], v) for v in value)
        if len(value) != len(inner):
            raise ValueError(f"{str(value)[:40]!r} has not {len(inner)} values")
        return tuple(map(_typed, inner, value))
    if kind in (str, int, float, bool):
        if type(value) is not kind:
            raise ValueError(f"{str(value)[:40]!r} is no {kind.__name__}")
        if kind is int and not 0 <= value < _MOST_INT or kind is str and len(value) > _MOST_TEXT:
            raise ValueError(f"{str(value)[:40]!r} is out of range")
        if kind is float and not abs(value) < float("inf"):
            raise ValueError(f"{value} is not finite")
        return value
    if not isinstance(value, dict) or list(value) != list(kind._fields):
        raise ValueError(f"{str(value)[:40]!r} has not the fields {', '.join(kind._fields)}")
    made = kind(*map(_typed, _hints(kind), value.values()))
    if "island" in kind._fields and not _NAME.fullmatch(made.island):
        raise ValueError(f"{made.island[:40]!r} is no name of an island")
    return made


def _hints(kind: Any) -> tuple[Any, ...]:
    return tuple(kind.__annotations__.values())
