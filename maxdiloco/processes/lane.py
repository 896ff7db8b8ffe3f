"""What two processes have to say to each other, in order and once, whatever their connections do.

Each side numbers its messages from 1 and keeps them until the other side has them whole. The part
of a message that has come is kept too, so that a new connection goes on after it. No network.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from maxdiloco import json_text
from maxdiloco.errors import LostPeerError

Key = tuple[str | int, ...]

PIECE_BYTES = 1 << 18  # of one write; our choice
_MOST_KEY_CHARS = 1000  # in a header, of which aiohttp takes 8 KB


class Message(NamedTuple):
    """A message on its way out. key: as JSON."""

    key: str
    views: Sequence[memoryview]
    size: int

    def pieces(self, start: int) -> Iterator[memoryview]:
        """The bytes from `start` on."""
        for view in self.views:
            for at in range(min(start, view.nbytes), view.nbytes, PIECE_BYTES):
                yield view[at : at + PIECE_BYTES]
            start = max(0, start - view.nbytes)


def message(key: Key, data: Sequence[object]) -> Message:
    """A message of contiguous buffers, which must not change any more. Raises TypeError."""
    if not all(isinstance(part, str | int) for part in key):
        raise TypeError(f"the key of a message is a tuple of numbers and words, not {key!r}")
    views = [view.cast("B") for view in map(memoryview, data) if view.nbytes]
    return Message(json.dumps(key), views, sum(view.nbytes for view in views))


class Lane:
    """What goes to one peer and what comes from it. For the thread of the event loop alone.

    peer: in words. deliver: gets the key and the bytes of each message that is whole. most_bytes:
    of a message that comes. goodbye: said here, "" or why. told: the peer has got it and all before
    it, and left: the peer has said its own. silence_s: for how long nothing has come.
    """

    def __init__(
        self, peer: str, deliver: Callable[[Key, bytearray], None], most_bytes: int
    ) -> None:
        self.peer, self._deliver, self._most_bytes = peer, deliver, most_bytes
        self.problem = "it has not connected"
        self.met = self.told = self.left = False
        self.goodbye: str | None = None
        self.why = ""  # the peer has left
        self.silence_s = 0.0
        self.closed_at: float | None = None  # by the peer, which has no connection since
        self.gone = False  # its port refuses, where it once was
        self.received = 0  # bytes
        self._outgoing: deque[Message] = deque()
        self._sent = 0  # messages that the peer has
        self._news = asyncio.Event()
        self._came = self._filled = 0  # messages that are whole; bytes of the next one
        self._key: Key = ()
        self._buffer = bytearray()

    def add(self, new: Message) -> None:
        """Queue a message. Nothing goes to a peer that has left."""
        if self.goodbye is None and not self.left:
            self._outgoing.append(new)
            self._news.set()

    def say_goodbye(self, why: str | None) -> None:
        """The end, after all messages; with a reason, instead of them."""
        if why is not None:
            self._outgoing.clear()
        self.goodbye = self.goodbye or why or ""
        self._news.set()

    def hear(self) -> None:
        """Something has come."""
        self.met, self.silence_s, self.closed_at = True, 0.0, None

    def close(self) -> None:
        """The peer has closed its last connection."""
        self.closed_at = time.monotonic()

    def leave(self, why: str = "") -> None:
        """The peer has said goodbye: it takes no more."""
        self.left, self.why = True, why
        self._outgoing.clear()
        self._news.set()

    async def next(self, number: int, within_s: float) -> Message | None:
        """Message `number`, when the peer has those before it; None: there is none in time."""
        while self._sent < number - 1 and self._outgoing:
            self._outgoing.popleft()
            self._sent += 1
        if not self._outgoing and self.goodbye is None and not self.left:
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._news.wait()
        return self._outgoing[0] if self._outgoing and number == self._sent + 1 else None

    @property
    def ends(self) -> bool:
        """Whether nothing more is to be sent, ever."""
        return (self.goodbye is not None or self.left) and not self._outgoing

    @property
    def place(self) -> tuple[int, int]:
        """The number of the message that comes next, and how many of its bytes are here."""
        return self._came + 1, self._filled

    def begin(self, number: int, key: str, start: int, size: int) -> bool:
        """Bytes of a message come, from `start` on. Returns whether they are the next ones.

        Raises LostPeerError for what no process of the run sends.
        """
        if (number, start) != self.place:
            return False
        if not start:
            if size > self._most_bytes:
                raise self._nonsense(f"a message of {size} bytes: {self._most_bytes} are the most")
            self._key, self._buffer = self._parsed(key), bytearray(size)
        elif len(self._buffer) != size:
            raise self._nonsense("another size of the same message")
        return True

    def fill(self, data: bytes) -> None:
        """The next bytes. Raises LostPeerError where they are too many."""
        end = self._filled + len(data)
        if end > len(self._buffer):
            raise self._nonsense("more bytes than the message has")
        self._buffer[self._filled : end] = data
        self._filled = end
        self.received += len(data)
        self.hear()

    def finish(self) -> bool:
        """The bytes have ended. Returns whether the message is whole, and delivers it."""
        if self._filled < len(self._buffer):
            return False
        self._came, self._filled = self._came + 1, 0
        buffer, self._buffer = self._buffer, bytearray()
        self._deliver(self._key, buffer)
        return True

    def _parsed(self, text: str) -> Key:
        try:
            key = json_text.parse(text[:_MOST_KEY_CHARS])
        except ValueError:
            key = None
        if not isinstance(key, list) or not all(isinstance(part, str | int) for part in key):
            raise self._nonsense("a message without a key")
        return tuple(key)

    def _nonsense(self, what: str) -> LostPeerError:
        return LostPeerError(f"{self.peer} has sent what no process of a run does: {what}")
