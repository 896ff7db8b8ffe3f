"""The side of a link that is dialled: admits peers with a higher number, and converses with them.

The path of a request is the name of a lane. A stranger gets no further than TLS: it shows no
certificate of a process of the run, so that none of its bytes is read as a request. It takes a
place among some guests for some seconds.
"""

import asyncio
import collections
import contextlib
import socket
import ssl
from collections.abc import Callable, Coroutine, Mapping

import aiohttp
from aiohttp import web

from maxdiloco.processes.conversation import READ_BYTES, Conversation
from maxdiloco.processes.lane import Lane
from maxdiloco.processes.sockets import Times, set_up

# Our choice.
_GUESTS = 64  # who have shown no certificate yet, beside peers; then one of the most numerous goes
_GUEST_S = 10.0  # for one of them to show it
_TIRED_S = 0.2  # before the next try where the system has no file descriptor left
_LINGER_S = 1.0  # for peers to read a goodbye and close

Lanes = Mapping[tuple[bytes, str], Lane]  # by the certificate of a peer and the lane's name


class Doorman(web.Server):
    """Serves the lanes. For the thread of the event loop.

    lanes: of the peers that may come; may grow. start: runs a coroutine as a task.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        lanes: Lanes,
        times: Times,
        *,
        start: Callable[[Coroutine], asyncio.Task],
    ) -> None:
        super().__init__(self._answer, read_bufsize=READ_BYTES, access_log=None, lingering_time=0)
        self._listener, self._context, self._lanes, self._times = listener, context, lanes, times
        self._start = start
        self._guests: dict[asyncio.Task, str] = {}  # whence they come; oldest first
        self._talks: dict[Lane, asyncio.Task] = {}  # the newest of each lane

    async def serve(self) -> None:
        """Accept all that dial, for ever."""
        self._listener.setblocking(False)
        while True:
            try:
                connection, address = await asyncio.get_running_loop().sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(_TIRED_S)
                continue
            if len(self._guests) >= _GUESTS + len(self._lanes):
                await self._crowd_out()
            guest = self._start(self._admit(connection))
            self._guests[guest] = address[0]
            guest.add_done_callback(lambda guest: self._guests.pop(guest, None))

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

    async def _crowd_out(self) -> None:
        """Send the oldest guest of the address with the most away: a peer is one of few.

        It waits for the end of its connection. sock_accept returns without a pause while others
        wait in the kernel: in a flood the descriptors of guests that have gone would pile up, and
        nothing else would run in this thread.
        """
        ((most, _),) = collections.Counter(self._guests.values()).most_common(1)
        oldest = next(guest for guest, host in self._guests.items() if host == most)
        oldest.cancel()
        await asyncio.wait([oldest])
        await asyncio.sleep(0)  # asyncio closes the socket in the next round of its loop

    async def _admit(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # ssl.SSLError and TimeoutError are, too
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(
                self, connection, ssl=self._context, ssl_handshake_timeout=_GUEST_S
            )

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Converse on the newest connection of a lane: the peer has given up the others."""
        secured, connection = map(request.get_extra_info, ("ssl_object", "socket"))
        if secured is None or connection is None:
            raise ConnectionResetError("it has been closed")
        certificate = secured.getpeercert(binary_form=True)
        lane = self._lanes.get((certificate, request.path.removeprefix("/")))
        if lane is None:
            return web.Response(status=503)  # it will be opened here, too
        if request.method != "POST":
            return web.Response(status=405)
        set_up(connection, self._times.quiet_s)
        if earlier := self._talks.get(lane):
            earlier.cancel()
            await asyncio.wait([earlier])
        lane.connect(connection)
        answer = web.StreamResponse()
        answer.force_close()
        await answer.prepare(request)
        talk = self._talks[lane] = self._start(self._converse(lane, request.content, answer))
        await asyncio.wait([talk])
        if self._talks[lane] is talk:
            self._judge(lane, None if talk.cancelled() else talk.exception())
        return answer

    async def _converse(
        self, lane: Lane, content: aiohttp.StreamReader, answer: web.StreamResponse
    ) -> None:
        talk = Conversation(lane, self._times)
        both = [asyncio.ensure_future(each) for each in (talk.listen(content), _say(talk, answer))]
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            talk.end()
            for task in both:
                task.cancel()
            ends = await asyncio.gather(*both, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error

    def _judge(self, lane: Lane, error: BaseException | None) -> None:
        """Note that the peer has closed its last connection without a word.

        A peer that has not been heard for a while has not heard this process either: it gives the
        connection up, and lives.
        """
        if isinstance(error, ConnectionResetError) and lane.silence_s < self._times.quiet_s / 2:
            lane.close()


async def _say(talk: Conversation, answer: web.StreamResponse) -> None:
    async for word in talk.say():
        await answer.write(word)
