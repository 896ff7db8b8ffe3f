"""Messages of bytes as frames, and one TCP connection that carries them: see channel.py."""

import contextlib
import json
import socket
import struct
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maxdiloco import json_text

# Kinds of frames. The first two carry no number.
RESUME, BEAT, MESSAGE, DATA, GOODBYE = range(5)

Key = tuple[str | int, ...]

# At most so many bytes in a frame, our choice: its checksum costs microseconds and a link of
# 10 KB/s moves it within the default timeout. So many pieces of memory, too.
MOST_BYTES = 1 << 18
MOST_VIEWS = 64
_MOST_FRAMES = 8  # in one call of sendmsg, which takes 1024 pieces
# kind, bytes of the body, number, number of the last one that arrived from the other side, checksum
# of the body; then the checksum of all that.
_HEADER = struct.Struct("!BIQQI")
_CHECKSUM = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_TOTAL = struct.Struct("!Q")
# Linux, include/uapi/asm-generic/socket.h; Python has no name for it. All ones: no pacing.
_SO_MAX_PACING_RATE = 47
_UNPACED = (1 << 64) - 1


class BrokenError(ConnectionError):
    """A connection is of no use any more: it has ended, or what arrives is not what was sent."""


class Frame(NamedTuple):
    """A frame that waits to be sent, or to be acknowledged."""

    number: int  # 0: none
    kind: int
    views: Sequence[memoryview]
    size: int


class Header(NamedTuple):
    """What is ahead of a frame's body."""

    kind: int
    size: int
    number: int
    arrived: int
    checksum: int


def pack(frame: Frame, arrived: int) -> bytes:
    """The header of a frame. arrived: the number of the last frame from the other side."""
    checksum = 0
    for view in frame.views:
        checksum = zlib.crc32(view, checksum)
    header = _HEADER.pack(frame.kind, frame.size, frame.number, arrived, checksum)
    return header + _CHECKSUM.pack(zlib.crc32(header))


def unpack(data: bytearray) -> Header:
    """Raises BrokenError when the bytes are not those of a header."""
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    if checksum != zlib.crc32(data[: _HEADER.size]):
        raise BrokenError("the checksum of a header was wrong")
    return Header(*_HEADER.unpack_from(data))


def check(header: Header, body: memoryview) -> None:
    """Raises BrokenError when the body is not that of the header."""
    if header.checksum != zlib.crc32(body):
        raise BrokenError("the checksum of a message was wrong")


class Outgoing:
    """Frames to send, in order, and those that are sent and not acknowledged."""

    def __init__(self) -> None:
        self._messages: deque[Iterator[tuple[int, list, int]]] = deque()
        self._goodbye: Iterator[tuple[int, list, int]] = iter(())
        self._kept: list[Frame] = []  # numbered, not acknowledged
        self._sent = 0  # how many of them this connection has been given
        self._said = False  # the goodbye has been made
        self._number = 0  # of the last frame made
        self._acknowledged = 0

    def add(self, key: Key, data: Sequence[object]) -> None:
        """Queue a message of contiguous buffers, which must not change. Raises TypeError."""
        if not all(isinstance(part, str | int) for part in key):
            raise TypeError(f"the key of a message is a tuple of numbers and words, not {key!r}")
        views = [view.cast("B") for view in map(memoryview, data) if view.nbytes]
        head = _TOTAL.pack(sum(view.nbytes for view in views)) + json.dumps(key).encode()
        self._messages.append(_cut(head, views))

    def add_goodbye(self, why: str) -> None:
        """The frame after all messages."""
        body = memoryview(why.encode()[:MOST_BYTES])
        self._goodbye = iter([(GOODBYE, [body], len(body))])

    def drop(self) -> None:
        """Forget the messages, even the rest of one that has been begun."""
        self._messages.clear()

    def done(self) -> bool:
        """Whether everything has been acknowledged, the goodbye too."""
        return self._said and not (self._messages or self._kept)

    def acknowledge(self, number: int) -> None:
        """The other side has the frames up to this one."""
        count = number - self._acknowledged
        if not 0 <= count <= len(self._kept):
            raise BrokenError("it acknowledged what was never sent")
        del self._kept[:count]
        self._sent -= count
        self._acknowledged = number

    def resume(self, number: int) -> None:
        """On a new connection: the other side has the frames up to this one and no other."""
        self._sent = len(self._kept)
        self.acknowledge(number)
        self._sent = 0

    def batch(self) -> list[Frame]:
        """The next frames: half of MOST_BYTES or more, so that no head of a message goes alone."""
        batch, size = [], 0
        while size < MOST_BYTES / 2 and len(batch) < _MOST_FRAMES:
            if self._sent == len(self._kept) and not self._make():
                break
            batch.append(self._kept[self._sent])
            size += batch[-1].size
            self._sent += 1
        return batch

    def _make(self) -> bool:
        piece = None
        while piece is None and self._messages:
            piece = next(self._messages[0], None)
            if piece is None:
                self._messages.popleft()
        piece = piece or next(self._goodbye, None)
        if piece is None:
            return False
        self._said = piece[0] == GOODBYE
        self._number += 1
        self._kept.append(Frame(self._number, *piece))
        return True


def _cut(head: bytes, views: Sequence[memoryview]) -> Iterator[tuple[int, list, int]]:
    """A message as (kind, views, bytes) of its frames."""
    yield MESSAGE, [memoryview(head)], len(head)
    gathered, size = [], 0
    for view in views:
        while view:
            part, view = view[: MOST_BYTES - size], view[MOST_BYTES - size :]
            gathered.append(part)
            size += part.nbytes
            if size == MOST_BYTES or len(gathered) == MOST_VIEWS:
                yield DATA, gathered, size
                gathered, size = [], 0
    if gathered:
        yield DATA, gathered, size


class Incoming:
    """Puts frames together to messages. deliver(key, data) gets each one that is whole."""

    def __init__(self, deliver: Callable[[Key, bytearray], None]) -> None:
        self.payload = 0  # bytes of the messages, in frames that have arrived
        self.arrived = 0  # number of the last frame
        self._deliver = deliver
        self._key: Key | None = None
        self._data = bytearray()
        self._filled = 0

    def space(self, header: Header) -> memoryview:
        """Where the body of a frame is to be read to, until take(). Raises BrokenError."""
        if header.size > MOST_BYTES or header.number not in (0, self.arrived + 1):
            raise BrokenError("a frame came out of turn")
        if header.kind != DATA:
            return memoryview(bytearray(header.size))
        end = self._filled + header.size
        if end > len(self._data):
            raise BrokenError("a frame belonged to no message")
        return memoryview(self._data)[self._filled : end]

    def take(self, header: Header, body: memoryview) -> bool:
        """A numbered frame has arrived; whether a message is whole now. Raises BrokenError."""
        if header.kind == MESSAGE:
            try:
                (total,) = _TOTAL.unpack_from(body)
                key = json_text.parse(bytes(body[_TOTAL.size :]))
            except (ValueError, struct.error):
                key = None
            if not isinstance(key, list) or not all(isinstance(part, str | int) for part in key):
                raise BrokenError("a message began with no key")
            self._key, self._data, self._filled = tuple(key), bytearray(total), 0
        elif header.kind == DATA:
            self._filled += header.size
            self.payload += header.size
        self.arrived = header.number
        if self._key is None or self._filled < len(self._data):
            return False
        key, data = self._key, self._data
        self._key, self._data, self._filled = None, bytearray(), 0
        self._deliver(key, data)
        return True


@dataclass
class Meter:
    """How often a peer was reached, and how long it has been silent since, in seconds."""

    connections: int = 0
    silence_s: float = 0.0

    def count(self, since: float, most_s: float) -> float:
        """Add a silence, and return the time [monotonic].

        most_s: what is longer was a time in which this process did not run.
        """
        now = time.monotonic()
        self.silence_s += min(now - since, most_s)
        return now


class Connection:
    """A socket with an owner for each direction: one thread reads, another one writes.

    beat_s: between two looks at whether it is silent. quiet_s: of silence that break it.
    """

    def __init__(
        self, connection: socket.socket, meter: Meter, *, beat_s: float, quiet_s: float
    ) -> None:
        self.socket, self._meter, self._beat_s, self._quiet_s = connection, meter, beat_s, quiet_s
        self._patience_s = meter.silence_s + quiet_s

    def prepare(self) -> None:
        """Set the socket up. Raises OSError when it has ended meanwhile."""
        self.socket.settimeout(self._beat_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read(self, incoming: Incoming) -> tuple[Header, memoryview]:
        """The next frame. Raises OSError when the connection has broken."""
        data = bytearray(HEADER_BYTES)
        self._fill(memoryview(data))
        header = unpack(data)
        body = incoming.space(header)
        self._fill(body)
        check(header, body)
        return header, body

    def write(self, batch: Sequence[Frame], arrived: int) -> None:
        """Send  arrived: see pack. Raises OSError once someone has shut the connection."""
        views = []
        for frame in batch:
            views += [memoryview(pack(frame, arrived)), *frame.views]
        while views:
            try:
                count = self.socket.sendmsg(views)
            except TimeoutError:
                continue  # whether the link is dead is for the reader to judge
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """End one or both directions, and wake the threads that wait for them."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self.socket.shutdown(how)

    def _fill(self, view: memoryview) -> None:
        meter, most_s = self._meter, 2 * self._beat_s
        started = time.monotonic()
        while view:
            try:
                count = self.socket.recv_into(view)
            except TimeoutError:
                started = meter.count(started, most_s)
                if meter.silence_s > self._patience_s:
                    raise BrokenError(f"it was silent for {meter.silence_s:.1f} s") from None
                continue
            if not count:
                raise BrokenError("it closed the connection")
            started = meter.count(started, most_s)
            meter.silence_s, self._patience_s = 0.0, self._quiet_s
            view = view[count:]


def set_pace(connection: socket.socket, bytes_per_second: int | None) -> None:
    """Let the kernel spread what is sent; None: no limit. Does nothing where it cannot."""
    if sys.platform == "linux":
        rate = _UNPACED if bytes_per_second is None else bytes_per_second
        value = rate.to_bytes(8, sys.byteorder)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)
