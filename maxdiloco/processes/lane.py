"""What two processes have to say to each other, in order and once, whatever their connections do.

Each side numbers its messages from 1 and keeps them until the other side has them whole. The part
of a message that has come is kept too, so that a new connection goes on after it. The goodbye is
the last message; it has no key.
"""

import asyncio
import contextlib
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxdiloco.errors import LostPeerError
from maxdiloco.processes.sockets import set_pace

WORDS, BULK = "words", "bulk"  # the two lanes to a peer, see mailbox.py
Key = tuple[str | int, ...]

Place = tuple[int, int]  # the number of a message, and how many of its bytes are before it


class Message(NamedTuple):
    """A message on its way out. key: None is the goodbye."""

    key: Key | None
    views: Sequence[memoryview]
    size: int

    def parts(self, start: int, most_bytes: int) -> Iterator[memoryview]:
        """The bytes from `start` on, at most so many at once; an empty one of an empty message."""
        if not self.size:
            yield memoryview(b"")
        for view in self.views:
            for at in range(min(start, view.nbytes), view.nbytes, most_bytes):
                yield view[at : at + most_bytes]
            start = max(0, start - view.nbytes)


def message(key: Key, data: Sequence[object]) -> Message:
    """A message of contiguous buffers, which must not change any more. Raises TypeError."""
    if not all(isinstance(part, str | int) for part in key):
        raise TypeError(f"the key of a message is a tuple of numbers and words, not {key!r}")
    views = [view.cast("B") for view in map(memoryview, data) if view.nbytes]
    return Message(key, views, sum(view.nbytes for view in views))


class Lane:
    """What goes to one peer and what comes from it. For the thread of the event loop alone.

    peer: in words. deliver: gets the key and the bytes of each message that is whole. most_bytes:
    of a message that comes. left: the peer has said goodbye. silence_s: for how long nothing came.
    """

    def __init__(
        self, peer: str, deliver: Callable[[Key, bytearray], None], most_bytes: int
    ) -> None:
        self.peer, self._deliver, self._most_bytes = peer, deliver, most_bytes
        self.problem = "it has not connected"
        self._rate: int | None = None  # bytes per second
        self._connection: socket.socket | None = None  # the newest
        self.met = self.left = self._ends = False
        self.owes = False  # the peer does not know of a message that is here
        self.silence_s = 0.0
        self.closed_at: float | None = None  # by the peer, which has no connection since
        self.gone = False  # its port refuses, where it once was
        self.received = 0  # bytes
        self.heard = 0  # how often something has come
        self._outgoing: deque[Message] = deque()
        self._has = 0  # messages that the peer has
        self._news = asyncio.Event()
        self._came = self._filled = 0  # messages that are whole; bytes of the next one
        self._key: Key | None = None
        self._buffer = bytearray()

    def add(self, new: Message) -> None:
        """Queue a message. Nothing goes to a peer that has left, or after the goodbye."""
        if not self._ends and not self.left:
            self._outgoing.append(new)
            self.wake()

    def say_goodbye(self) -> None:
        """The end, after all messages."""
        self.add(Message(None, (), 0))
        self._ends = True

    @property
    def told(self) -> bool:
        """Whether the peer has got the goodbye and all before it, or has itself left."""
        return self.left or self._ends and not self._outgoing

    def connect(self, connection: socket.socket) -> None:
        """This socket carries the lane."""
        self._connection = connection
        set_pace(connection, self._rate)

    def pace(self, rate: int | None) -> None:
        """Send at most so many bytes per second; None: at once."""
        self._rate = rate
        if self._connection is not None:
            set_pace(self._connection, rate)

    def hear(self) -> None:
        """Something has come."""
        self.met, self.silence_s, self.closed_at = True, 0.0, None
        self.heard += 1

    def close(self) -> None:
        """The peer has closed its last connection."""
        self.closed_at = time.monotonic()

    def leave(self) -> None:
        """The peer takes no more."""
        self.left = True
        self._outgoing.clear()
        self.wake()

    def wake(self) -> None:
        """Let `next` return."""
        self._news.set()

    def drop_before(self, place: Place) -> None:
        """The peer has what is before this place. Raises LostPeerError where it cannot have it."""
        number, start = place
        if self.left:
            return
        while self._has < number - 1 and self._outgoing:
            self._outgoing.popleft()
            self._has += 1
        size = self._outgoing[0].size if self._outgoing else 0
        if number != self._has + 1 or not 0 <= start <= size:
            raise self.nonsense(f"that it has all before byte {start} of message {number}")

    async def next(self, number: int, within_s: float) -> Message | None:
        """Message `number`; None: there is none in time, or the peer is to know what is here."""
        if number > self._has + len(self._outgoing) and not (self.left or self.owes):
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._news.wait()
        at = number - self._has - 1
        return self._outgoing[at] if at < len(self._outgoing) else None

    @property
    def place(self) -> Place:
        """Of what comes next."""
        return self._came + 1, self._filled

    def begin(self, place: Place, size: int, key: object) -> None:
        """Bytes of a message come, from a place on; an empty one is whole.

        Raises LostPeerError for what is not next.
        """
        if place != self.place or size < 0:
            raise self.nonsense(f"a message out of turn: {place} of {size} bytes, not {self.place}")
        if size > self._most_bytes:
            raise self.nonsense(f"a message of {size} bytes: {self._most_bytes} are the most")
        if not self._filled:
            self._key, self._buffer = self._parsed(key), bytearray(size)
        elif len(self._buffer) != size:
            raise self.nonsense("another size of the same message")
        if not size:
            self.fill(b"")

    def fill(self, data: bytes) -> None:
        """The next bytes. A message that is whole is delivered.

        Raises LostPeerError where they are too many.
        """
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise self.nonsense("more bytes than the message has")
        self._buffer[self._filled : end] = data
        self._filled = end
        self.received += len(data)
        if end < len(self._buffer):
            return
        self._came, self._filled, self.owes = self._came + 1, 0, True
        self.wake()
        buffer, self._buffer = self._buffer, bytearray()
        if self._key is None:
            self.leave()
        else:
            self._deliver(self._key, buffer)

    def nonsense(self, what: str) -> LostPeerError:
        """The error for what no process of a run sends."""
        return LostPeerError(f"{self.peer} has sent what no process of a run does: {what}")

    def _parsed(self, key: object) -> Key | None:
        if key is None:
            return None
        if not isinstance(key, list) or not all(isinstance(part, str | int) for part in key):
            raise self.nonsense(f"a message with the key {json.dumps(key)[:60]}")
        return tuple(key)
