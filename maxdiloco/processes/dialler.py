"""The side of a link that dials: fetches what the peer has for it, and leaves its own there.

The requests are those of doorman.py. Either loop makes a connection that breaks anew, and asks the
peer where to go on.
"""

import asyncio
import secrets
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp

from maxdiloco.processes.doorman import READ_BYTES, read_span, span
from maxdiloco.processes.lane import Lane, Message
from maxdiloco.processes.sockets import Times, set_up

_PAUSE_S = 0.1  # from the first try to connect to the second; our choice
_MOST_DOUBLINGS = 10  # of the pause between two tries
_HEADERS = ("Accept", "Accept-Encoding", "User-Agent", "Content-Type")  # that no one reads


def pause_s(failures: int, most_s: float) -> float:
    """Time between two tries to connect, after so many failures in a row [seconds].

    It doubles up to most_s. Half of it is random, so that no two come back together.
    """
    pause = min(_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS), most_s)
    return secrets.SystemRandom().uniform(0.5, 1) * pause


class Dialler:
    """Carries a lane to and from one peer. For the thread of the event loop.

    context: trusts this peer alone. adopted: gets the name and each new socket.
    """

    def __init__(
        self,
        name: str,
        lane: Lane,
        address: tuple[str, int],
        context: ssl.SSLContext,
        times: Times,
        *,
        adopted: Callable[[str, socket.socket], None],
    ) -> None:
        host, port = address
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{port}/{name}"
        self._name, self._lane, self._context, self._times = name, lane, context, times
        self._adopted = adopted

    async def run(self) -> None:
        """Until both sides have said goodbye, or the task is cancelled."""
        quiet_s = self._times.quiet_s
        connector = aiohttp.TCPConnector(
            ssl=self._context, limit=0, keepalive_timeout=None, socket_factory=self._socket
        )
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=quiet_s, sock_read=quiet_s)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=READ_BYTES,
            skip_auto_headers=_HEADERS,
        ) as self._session:
            await asyncio.gather(self._again(self._fetch), self._again(self._bring))

    def _socket(self, address: tuple) -> socket.socket:
        made = socket.socket(*address[:3])
        made.setblocking(False)
        set_up(made, self._times.quiet_s)
        self._adopted(self._name, made)
        return made

    async def _again(self, loop: Callable[[], Awaitable[None]]) -> None:
        """Run a loop to its end, from its beginning after each error of the network."""
        failures = 0
        while True:
            before = self._lane.place, self._lane.received
            try:
                await loop()
                return
            except aiohttp.ClientConnectorError as error:
                self._lane.problem = error.os_error.strerror or str(error.os_error)
                self._lane.gone = self._lane.met and isinstance(
                    error.os_error, ConnectionRefusedError
                )
            except (OSError, aiohttp.ClientError) as error:
                self._lane.problem = str(error) or "it did not answer in time"
            failures = 0 if before != (self._lane.place, self._lane.received) else failures + 1
            await asyncio.sleep(pause_s(failures, self._times.beat_s))

    async def _fetch(self) -> None:
        """Messages of the peer, until its goodbye."""
        lane = self._lane
        while not lane.left:
            number, start = lane.place
            wanted = {"Range": f"bytes={start}-"}
            async with self._session.get(f"{self._url}/{number}", headers=wanted) as response:
                if response.status == 503:
                    raise ConnectionError("it is not ready")
                lane.hear()
                if response.status == 410:
                    lane.leave(await response.text())
                if response.status != 206:
                    continue
                start, size = read_span(response.headers["Content-Range"])
                if lane.begin(number, response.headers["Key"], start, size):
                    async for data in response.content.iter_any():
                        lane.fill(data)
                    lane.finish()

    async def _bring(self) -> None:
        """Messages for the peer, and a sign of life each beat; at the end the goodbye."""
        lane = self._lane
        number, start = await self._place_there()
        while True:
            message = await lane.next(number, self._times.beat_s)
            if message is not None and await self._put(message, number, start):
                number, start = number + 1, 0
            elif lane.left:
                return
            elif message is None and lane.ends:
                async with self._session.delete(self._url, data=lane.goodbye.encode()):
                    lane.told = True
                return
            else:
                number, start = await self._place_there()

    async def _place_there(self) -> tuple[int, int]:
        """The number of the message that the peer takes next, and from which byte."""
        async with self._session.head(self._url) as response:
            if response.status != 200:
                raise ConnectionError("it is not ready")
            self._lane.hear()
            number, start = map(int, response.headers["Next"].split())
            return number, start

    async def _put(self, message: Message, number: int, start: int) -> bool:
        """Whether the peer has it whole."""
        headers = {
            "Key": message.key,
            "Content-Range": span(message, start),
            "Content-Length": str(message.size - start),
        }
        body = self._body(message, start)
        url = f"{self._url}/{number}"
        async with self._session.put(url, headers=headers, data=body) as response:
            self._lane.hear()
            return response.status == 204

    async def _body(self, message: Message, start: int) -> AsyncIterator[memoryview]:
        for piece in message.pieces(start):
            if self._lane.goodbye:
                raise ConnectionAbortedError("the rest is not sent")
            yield piece
