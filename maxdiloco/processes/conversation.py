"""One connection of a lane: a request whose body and whose answer flow at the same time.

Either side writes lines of JSON, some of them with bytes behind them:

    ["have", NUMBER, START]                      the message and byte that this side lacks next
    ["part", NUMBER, START, SIZE, KEY, COUNT]    COUNT bytes of a message of SIZE bytes follow

The first "have" says where the other side begins, each later one what it need not keep any more,
and in silence that this side lives. Messages follow each other without a wait for it, so that a
link with a delay stays busy, and TCP stays as quick as it was.
"""

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import http_exceptions

from maxdiloco import json_text
from maxdiloco.processes.lane import Lane
from maxdiloco.processes.sockets import Times

READ_BYTES = 1 << 20  # that aiohttp takes ahead of what is read; our choice
_MOST_LINE = 1 << 16  # bytes; our choice
_PART_BYTES = 1 << 20  # our choice
_WRITE_BYTES = 1 << 18  # at once; our choice
_PART_OF_QUIET = 0.9  # a connection is given up after so much of it, at least; our choice
_GIVEN_UP = "it has given the connection up"


class Conversation:
    """Of a lane, on one connection: what `say` gives is to be sent, and `listen` to be run."""

    def __init__(self, lane: Lane, times: Times) -> None:
        self._lane, self._times = lane, times
        self._begins = asyncio.get_running_loop().create_future()
        self._over = lane.left

    def end(self) -> None:
        """Say no more."""
        self._over = True
        self._begins.cancel()
        self._lane.wake()

    async def say(self) -> AsyncIterator[bytes | memoryview]:
        """What this side sends, until the peer has left."""
        lane = self._lane
        yield self._have()
        number, start = (1, 0) if self._over else await self._begins
        while not (lane.left or self._over):
            message = await lane.next(number, self._times.beat_s)
            if message is None:
                yield self._have()
                continue
            for part in message.parts(start, _PART_BYTES):
                if lane.owes:
                    yield self._have()
                yield _line(["part", number, start, message.size, message.key, part.nbytes])
                for at in range(0, part.nbytes, _WRITE_BYTES):
                    yield part[at : at + _WRITE_BYTES]
                start += part.nbytes
                if self._over:
                    return
            number, start = number + 1, 0
        yield self._have()

    async def listen(self, content: aiohttp.StreamReader) -> None:
        """Until the goodbye of the peer.

        Raises OSError or aiohttp.ClientError where the connection breaks (ConnectionAbortedError:
        the peer gives it up and lives), LostPeerError for what no process of a run sends.
        """
        lane = self._lane
        async with asyncio.timeout(self._times.quiet_s) as limit:
            while not lane.left:
                count = await self._read(content)
                self._hear(limit)
                while count:
                    if not (data := await content.read(count)):
                        raise ConnectionAbortedError(_GIVEN_UP)
                    lane.fill(data)
                    self._hear(limit)
                    count -= len(data)

    def _hear(self, limit: asyncio.Timeout) -> None:
        """Put the limit off, now and then: that takes longer than a read."""
        self._lane.hear()
        now, quiet_s = asyncio.get_running_loop().time(), self._times.quiet_s
        if limit.when() - now < _PART_OF_QUIET * quiet_s:
            limit.reschedule(now + quiet_s)

    async def _read(self, content: aiohttp.StreamReader) -> int:
        """The number of bytes that follow a line."""
        line = b"a line without an end"
        try:
            line = await content.readline(max_line_length=_MOST_LINE)
            said = json_text.parse(line) if line else None
        except (ValueError, http_exceptions.LineTooLong):
            said = None
        if not line:
            raise ConnectionAbortedError(_GIVEN_UP)
        match said:
            case ["have", int(number), int(start)]:
                self._lane.drop_before((number, start))
                if not self._begins.done():
                    self._begins.set_result((number, start))
                return 0
            case ["part", int(number), int(start), int(size), key, int(count)] if count >= 0:
                self._lane.begin((number, start), size, key)
                return count
        raise self._lane.nonsense(repr(line[:60]))

    def _have(self) -> bytes:
        self._lane.owes = False
        return _line(["have", *self._lane.place])


def _line(parts: list) -> bytes:
    return json.dumps(parts).encode() + b"\n"
