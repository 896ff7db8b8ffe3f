"""The server of the channels, which accepts only processes of this start of the run.

A connection is TLS in which the client shows a certificate of the run's authority. An
unauthenticated client therefore cannot send a request. It can only occupy one of a limited number
of handshakes for some seconds.
"""

import asyncio
import collections
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping

import aiohttp
from aiohttp import web

from maxdiloco.cluster.certificates import subject
from maxdiloco.cluster.channel import READ_BYTES, Channel, Connection
from maxdiloco.cluster.deadlines import Times
from maxdiloco.cluster.sockets import set_timeouts

# Most concurrent handshakes, in addition to one for each channel. With a limit of 1,024 file
# descriptors, 64 handshakes leave enough for the run's own files.
_HANDSHAKES = 64
_HANDSHAKE_S = 10.0  # time limit: several round trips of a slow link
_RETRY_S = 0.2  # pause after an accept that failed, as without a free file descriptor
_LINGER_S = 1.0  # time for peers to read a goodbye and close

Channels = Mapping[tuple[str, str], Channel]  # by the name of the peer's certificate, and the path


class Server(web.Server):
    """Serves channels. Use it in the event loop's thread only."""

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        channels: Channels,
        times: Times,
        *,
        start_task: Callable[[Coroutine], asyncio.Task],
    ):
        """Keep the arguments; `serve` accepts connections.

        Args:
          listener: a listening socket, which `close` closes.
          context: TLS context with this process's certificate and its authority.
          channels: channels that clients may open; the mapping may grow.
          times: time limits of the links.
          start_task: starts a coroutine as a task.
        """
        super().__init__(self._answer, read_bufsize=READ_BYTES, access_log=None, lingering_time=0)
        self._listener, self._context = listener, context
        self._channels, self._times, self._start_task = channels, times, start_task
        self._handshakes: dict[asyncio.Task, str] = {}  # {task: client's address}, oldest first
        self._newest: dict[Channel, asyncio.Task] = {}

    async def serve(self) -> None:
        """Accept connections until this task is cancelled."""
        self._listener.setblocking(False)
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            if len(self._handshakes) >= _HANDSHAKES + len(self._channels):
                await self._drop_a_handshake()
            task = self._start_task(self._handshake(connection))
            self._handshakes[task] = address[0]
            task.add_done_callback(lambda task: self._handshakes.pop(task, None))

    async def close(self) -> None:
        """Stop accepting, give peers _LINGER_S to close their connections, and close the rest."""
        for task in self._handshakes:
            task.cancel()
        self._listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while self.connections:
                    await asyncio.sleep(_LINGER_S / 50)
        await self.shutdown(_LINGER_S / 50)  # 0 would wait without a limit

    async def _drop_a_handshake(self) -> None:
        """Drop the oldest handshake of the busiest address, so that a flood drops its own ones.

        Return only after its socket is closed. Otherwise a flood would use up the file descriptors,
        because sock_accept does not pause while clients wait.
        """
        ((busiest, _),) = collections.Counter(self._handshakes.values()).most_common(1)
        oldest = next(task for task, host in self._handshakes.items() if host == busiest)
        oldest.cancel()
        await asyncio.wait([oldest])
        await asyncio.sleep(0)  # asyncio closes the socket in the next iteration of its loop

    async def _handshake(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ssl.SSLError and TimeoutError are subclasses
            await asyncio.get_running_loop().connect_accepted_socket(
                self, connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_S
            )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Use this connection for its channel, instead of an older connection."""
        secured, connection = map(request.get_extra_info, ("ssl_object", "socket"))
        if secured is None or connection is None:
            raise ConnectionResetError("it has been closed")
        name = subject(secured.getpeercert())
        channel = self._channels.get((name, request.path.removeprefix("/")))
        if channel is None:
            return web.Response(status=503)  # the channel may be opened later
        if request.method != "POST":
            return web.Response(status=405)
        set_timeouts(connection, self._times.quiet_s)
        if older := self._newest.get(channel):
            older.cancel()
            await asyncio.wait([older])
        response = web.StreamResponse()
        response.force_close()
        await response.prepare(request)
        task = self._start_task(self._run(channel, request.content, response))
        self._newest[channel] = task
        await asyncio.wait([task])
        if self._newest[channel] is task and not task.cancelled():
            self._note_end(channel, task.exception())
        return response

    async def _run(
        self, channel: Channel, content: aiohttp.StreamReader, response: web.StreamResponse
    ) -> None:
        """Send and receive until the peer has left, or until sending or receiving fails."""
        connection = Connection(channel, self._times.heartbeat_s)

        async def send() -> None:
            async for block in connection.outgoing():
                await response.write(block)

        both = [asyncio.ensure_future(each) for each in (connection.incoming(content), send())]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            connection.close()
            for task in both:
                task.cancel()
            ends = await asyncio.gather(*both, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error

    def _note_end(self, channel: Channel, error: BaseException | None) -> None:
        """Note that the peer has closed its last connection, unless it was silent before.

        A peer that was silent has not received anything either. It has then replaced a dead
        connection, and is alive.
        """
        if isinstance(error, ConnectionResetError) and channel.silence_s < self._times.quiet_s / 2:
            channel.closed_by_peer()
