"""A channel to one peer, which delivers whole messages, in order, each exactly once.

A channel outlives its connections. A message is kept until the peer acknowledges it. After a broken
connection every message that is not acknowledged is sent again, from its first byte.

Both sides of a connection write records. A record is one line of JSON; the record of a message is
followed by SIZE bytes:

    ["received", NUMBER]              all messages up to this one have arrived; also the heartbeat
    ["message", NUMBER, SIZE, KEY]    the next message

The first record of each side tells the other side the message with which to start. Messages are
sent without waiting for replies, so the latency of the link counts once.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import aiohttp
from aiohttp import http_exceptions

from maxdiloco import json_text
from maxdiloco.cluster.payloads import MESSAGE_BYTES, Key, Message
from maxdiloco.errors import LostPeerError

READ_BYTES = 1 << 20  # bytes that aiohttp reads ahead
_WRITE_BYTES = 1 << 18  # larger writes took 20% more CPU time in benchmarks/results/thin_link.md
_LINE_BYTES = 1 << 16  # limit of a record's line; keys of this package have less than 100 bytes

_GOODBYE: Key = ()  # the key of the last message


class Channel:
    """The state of a channel, which its connections share. Use it in the event loop's thread only.

    Attributes:
      peer: description of the peer, for messages.
      problem: why the channel is not connected, for messages.
      num_reads: how often bytes have arrived.
      left: whether the peer has sent its goodbye, or is lost.
      silence_s: time since the last byte was received [s].
      closed_at: when the peer closed its last connection [time.monotonic()]; None: it is open.
      refused: whether the peer's port refuses connections after it has accepted some.
      owes_acknowledgement: whether a message has arrived that is not yet acknowledged.
    """

    def __init__(self, peer: str, deliver: Callable[[Key, bytearray], None]):
        """Create an open channel. deliver: called with the key and bytes of each message."""
        self.peer, self._deliver = peer, deliver
        self.problem = "it has not connected"
        self.num_reads = 0
        self.left = self.refused = False
        self.silence_s = 0.0
        self.closed_at: float | None = None
        self._outgoing: deque[Message] = deque()
        self._ended = False  # True once the goodbye is queued
        self._acknowledged = 0  # messages that the peer has acknowledged
        self._received = 0
        self.owes_acknowledgement = False
        self._changed = asyncio.Event()

    @property
    def was_connected(self) -> bool:
        """Whether the peer was ever connected."""
        return self.num_reads > 0

    @property
    def flushed(self) -> bool:
        """Whether the peer has received all messages, or has left."""
        return self.left or (self._ended and not self._outgoing)

    def add(self, new: Message) -> None:
        """Queue a message. Do nothing after the goodbye of either side."""
        if not self._ended and not self.left:
            self._outgoing.append(new)
            self._changed.set()

    def say_goodbye(self) -> None:
        """Queue the goodbye, which is the last message."""
        self.add(Message(_GOODBYE, ()))
        self._ended = True

    def leave(self) -> None:
        """End the channel: the peer sends and receives nothing more."""
        self.left = True
        self._outgoing.clear()
        self._changed.set()

    def record_read(self) -> None:
        """Note that bytes have arrived."""
        self.num_reads += 1
        self.silence_s, self.closed_at = 0.0, None
        self.problem = "it sends nothing"

    def wake(self) -> None:
        """Wake a connection that waits in `next`, so that it checks whether it is closed."""
        self._changed.set()

    def closed_by_peer(self) -> None:
        """Note that the peer has closed its last connection."""
        self.closed_at = time.monotonic()

    def protocol_error(self, line: object) -> LostPeerError:
        """Return the error for a record that no process of this run sends."""
        return LostPeerError(f"{self.peer} has sent an invalid record: {line!r:.60}")

    # Called by connections:

    def acknowledge(self, number: int) -> None:
        """Drop the messages up to `number`. Raises LostPeerError if that one was not sent."""
        if self.left:
            return
        if not self._acknowledged <= number <= self._acknowledged + len(self._outgoing):
            raise self.protocol_error(["received", number])
        for _ in range(number - self._acknowledged):
            self._outgoing.popleft()
        self._acknowledged = number

    def receive(self, number: int, key: Key, data: bytearray) -> None:
        """Deliver the next message. Raises LostPeerError if `number` is not the next number."""
        if number != self._received + 1:
            raise self.protocol_error(["message", number])
        self._received, self.owes_acknowledgement = number, True
        self._changed.set()
        if key == _GOODBYE:
            self.leave()
        else:
            self._deliver(key, data)

    async def next(self, number: int, within_s: float) -> Message | None:
        """Wait for message `number`; None after within_s, or if an acknowledgement is due."""
        if number > self._acknowledged + len(self._outgoing) and not self.owes_acknowledgement:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await self._changed.wait()
        index = number - self._acknowledged - 1
        return self._outgoing[index] if index < len(self._outgoing) else None

    def acknowledgement(self) -> bytes:
        """Return the record with the number of messages that have arrived."""
        self.owes_acknowledgement = False
        return _line(["received", self._received])


class Connection:
    """One connection of a channel; `outgoing` and `incoming` run concurrently."""

    def __init__(self, channel: Channel, heartbeat_s: float):
        """Start a connection. heartbeat_s: longest time between two records that are sent [s]."""
        self._channel, self._heartbeat_s = channel, heartbeat_s
        self._start = asyncio.get_running_loop().create_future()  # messages of the peer
        self._closed = False

    def close(self) -> None:
        """Send nothing more, and end `outgoing` at once, which a killed peer would not do."""
        self._closed = True
        self._channel.wake()
        if not self._start.done():
            self._start.set_result(0)

    async def outgoing(self) -> AsyncIterator[bytes | memoryview]:
        """Yield the bytes to send, until the peer has left."""
        channel = self._channel
        yield channel.acknowledgement()
        number = 1 + await self._start
        while not (channel.left or self._closed):
            new = await channel.next(number, self._heartbeat_s)
            if new is None or channel.owes_acknowledgement:
                yield channel.acknowledgement()
            if new is not None:
                yield _line(["message", number, new.size, new.key])
                for block in _blocks(new):
                    yield block
                number += 1
        yield channel.acknowledgement()

    async def incoming(self, content: aiohttp.StreamReader) -> None:
        """Receive records until the goodbye of the peer.

        Raises:
          OSError, aiohttp.ClientError: the connection is broken.
          LostPeerError: the peer has sent an invalid record.
        """
        channel = self._channel
        while not channel.left:
            try:
                line = await content.readline(max_line_length=_LINE_BYTES)
            except (ValueError, http_exceptions.LineTooLong) as error:
                raise channel.protocol_error("a line without an end") from error
            if not line:
                raise ConnectionAbortedError("it has closed the connection")
            channel.record_read()
            match _parsed(line):
                case ["received", int(number)]:
                    channel.acknowledge(number)
                    if not self._start.done():
                        self._start.set_result(number)
                case ["message", int(number), int(size), list(key)] if (
                    0 <= size <= MESSAGE_BYTES and all(isinstance(x, str | int) for x in key)
                ):
                    data = bytearray(size)
                    await self._fill(content, memoryview(data))
                    channel.receive(number, tuple(key), data)
                case _:
                    raise channel.protocol_error(line)

    async def _fill(self, content: aiohttp.StreamReader, data: memoryview) -> None:
        filled = 0
        while filled < data.nbytes:
            block = await content.read(data.nbytes - filled)
            if not block:
                raise ConnectionAbortedError("it has closed the connection")
            data[filled : filled + len(block)] = block
            filled += len(block)
            self._channel.record_read()


def _line(record: list) -> bytes:
    return json.dumps(record).encode() + b"\n"


def _parsed(line: bytes) -> object:
    try:
        return json_text.parse(line)
    except ValueError:
        return None


def _blocks(new: Message) -> Iterator[memoryview]:
    for buffer in new.buffers:
        for start in range(0, buffer.nbytes, _WRITE_BYTES):
            yield buffer[start : start + _WRITE_BYTES]
