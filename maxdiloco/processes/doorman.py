"""The side of a link that is dialled: answers the requests of peers with a higher number.

    GET    /LANE/N   message N for the peer, which has all before it. Range: from which byte
    PUT    /LANE/N   message N of the peer. Content-Range: from which byte. 409: that is not next
    HEAD   /LANE     Next: the number and the first byte of what is to come from the peer
    DELETE /LANE     the peer's goodbye. Its body: an error in words, or nothing

A stranger gets no further than TLS: it shows no certificate of a process of the run, so that none
of its bytes is read as a request. It takes a place among some guests for some seconds.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiohttp import web

from maxdiloco.processes.lane import Lane, Message
from maxdiloco.processes.sockets import Times, set_up

READ_BYTES = 1 << 20  # that aiohttp takes ahead of what is read; our choice
MOST_WHY_BYTES = 1 << 16  # of an error in words; our choice
# Our choice.
_GUESTS = 64  # who have shown no certificate yet, beside peers; then the oldest one goes
_GUEST_S = 10.0  # for one of them to show it
_TIRED_S = 0.2  # before the next try where the system has no file descriptor left
_LINGER_S = 1.0  # for peers to read a goodbye and close

Lanes = Mapping[tuple[bytes, str], Lane]  # by the certificate of a peer and the lane's name


def span(message: Message, start: int) -> str:
    """Content-Range of the bytes from `start` on."""
    here = f"{start}-{message.size - 1}" if start < message.size else "*"
    return f"bytes {here}/{message.size}"


def read_span(text: str) -> tuple[int, int]:
    """The first byte and the size. Raises ValueError."""
    here, size = text.removeprefix("bytes ").split("/")
    return int(size) if here == "*" else int(here.split("-")[0]), int(size)


class Doorman(web.Server):
    """Serves the lanes. For the thread of the event loop.

    lanes: of the peers that may come; may grow. start: runs a coroutine as a task. adopted: gets
    the name of a lane and each socket that serves it.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        lanes: Lanes,
        times: Times,
        *,
        start: Callable[[Coroutine], asyncio.Task],
        adopted: Callable[[str, socket.socket], None],
    ) -> None:
        super().__init__(self._answer, read_bufsize=READ_BYTES, access_log=None)
        self._listener, self._context, self._lanes, self._times = listener, context, lanes, times
        self._start, self._adopted = start, adopted
        self._guests: dict[asyncio.Task, None] = {}  # oldest first
        self._used: dict[Any, Lane] = {}  # by connection
        self._readers: dict[Lane, asyncio.Task] = {}  # that read a message of a peer

    async def serve(self) -> None:
        """Accept all that dial, for ever."""
        self._listener.setblocking(False)
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_TIRED_S)
                continue
            if len(self._guests) >= _GUESTS + len(self._lanes):
                next(iter(self._guests)).cancel()
            guest = self._start(self._admit(connection))
            self._guests[guest] = None
            guest.add_done_callback(self._guests.pop)

    async def close(self) -> None:
        """Accept no more, and close the connections once peers have had time to."""
        for guest in self._guests:
            guest.cancel()
        self._listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self.connections:
                    await asyncio.sleep(_LINGER_S / 50)
        await self.shutdown(_LINGER_S / 50)  # 0 would wait for ever

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        """The hook of aiohttp. exc: TimeoutError where the kernel gave it up, not the peer.

        A peer that has not been heard for a while has not heard this process either: it gives the
        connection up, and lives.
        """
        super().connection_lost(handler, exc)
        lane = self._used.pop(handler, None)
        if lane is None or lane in self._used.values():
            return
        if not isinstance(exc, TimeoutError) and lane.silence_s < self._times.quiet_s / 2:
            lane.close()

    async def _admit(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ssl.SSLError and TimeoutError are, too
            set_up(connection, self._times.quiet_s)
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(
                self, connection, ssl=self._context, ssl_handshake_timeout=_GUEST_S
            )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        certificate = request.get_extra_info("ssl_object").getpeercert(binary_form=True)
        _, name, *number = request.path.split("/")
        lane = self._lanes.get((certificate, name))
        if lane is None:
            return web.Response(status=503)  # it will be opened here, too
        try:
            reply = _REPLIES[request.method](self, request, lane, *map(int, number))
        except (KeyError, TypeError, ValueError):
            return web.Response(status=400)
        lane.hear()
        task = self._start(reply)
        if request.protocol not in self._used:
            self._used[request.protocol] = lane
            self._adopted(name, request.get_extra_info("socket"))
        await asyncio.wait([task])
        failed = not task.cancelled() and task.exception()
        if failed and not isinstance(failed, OSError):
            return web.Response(status=500)  # the error is known: see `start`
        return task.result()

    async def _place(self, request: web.BaseRequest, lane: Lane) -> web.Response:
        return web.Response(headers={"Next": "{} {}".format(*lane.place)})

    async def _part(self, request: web.BaseRequest, lane: Lane) -> web.Response:
        why = await request.content.read(MOST_WHY_BYTES)
        lane.leave(why.decode(errors="replace"))
        return web.Response(status=204)

    async def _take(self, request: web.BaseRequest, lane: Lane, number: int) -> web.Response:
        """A message of the peer, by the newest connection: the peer has given up the others."""
        try:
            (start, size), key = read_span(request.headers["Content-Range"]), request.headers["Key"]
        except (KeyError, ValueError):
            return web.Response(status=400)
        if earlier := self._readers.pop(lane, None):
            earlier.cancel()
        self._readers[lane] = asyncio.current_task()
        if not lane.begin(number, key, start, size):
            return web.Response(status=409)
        async for data in request.content.iter_any():
            lane.fill(data)
        del self._readers[lane]
        return web.Response(status=204 if lane.finish() else 409)

    async def _give(self, request: web.BaseRequest, lane: Lane, number: int) -> web.StreamResponse:
        """A message for the peer; 204: there is none yet; 410: there will be none any more."""
        message = await lane.next(number, self._times.beat_s)
        if message is None:
            if not lane.ends:
                return web.Response(status=204)
            gone = web.Response(status=410, text=lane.goodbye)
            gone.force_close()
            await gone.prepare(request)
            await gone.write_eof()
            lane.told = True
            return gone
        start = int(request.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        response = web.StreamResponse(
            status=206, headers={"Key": message.key, "Content-Range": span(message, start)}
        )
        response.content_length = message.size - start
        await response.prepare(request)
        for piece in message.pieces(start):
            if lane.goodbye:
                request.transport.abort()
            await response.write(piece)  # raises ConnectionError then
        await response.write_eof()
        return response


_REPLIES = {
    "GET": Doorman._give,
    "PUT": Doorman._take,
    "HEAD": Doorman._place,
    "DELETE": Doorman._part,
}
