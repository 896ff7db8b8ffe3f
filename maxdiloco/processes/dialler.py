"""The side of a link that dials: makes a connection that breaks anew."""

import asyncio
import secrets
import ssl

import aiohttp

from maxdiloco.processes.conversation import READ_BYTES, Conversation
from maxdiloco.processes.lane import Lane
from maxdiloco.processes.sockets import Times, set_up

# Our choice.
_PAUSE_S = 0.1  # from the first try to connect to the second
_MOST_DOUBLINGS = 10  # of the pause between two tries
_LAST_S = 0.1  # for the last word on a connection


def pause_s(failures: int, most_s: float) -> float:
    """Time between two tries to connect, after so many failures in a row [seconds].

    It doubles up to most_s. Half of it is random, so that no two come back together.
    """
    pause = min(_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS), most_s)
    return secrets.SystemRandom().uniform(0.5, 1) * pause


def url(host: str, port: int, name: str) -> str:
    """Where a peer serves the lane of this name."""
    return f"https://{f'[{host}]' if ':' in host else host}:{port}/{name}"


async def dial(lane: Lane, url: str, context: ssl.SSLContext, times: Times) -> None:
    """Carry a lane to and from one peer until it has left. context: trusts this peer alone."""
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    timeout = aiohttp.ClientTimeout(None, sock_connect=times.quiet_s, sock_read=times.quiet_s)
    failures = 0
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=READ_BYTES
    ) as session:
        while not lane.left:
            before = lane.heard
            try:
                await _converse(lane, session, url, times)
            except aiohttp.ClientConnectorError as error:
                lane.problem = error.os_error.strerror or str(error.os_error)
                lane.gone = lane.met and isinstance(error.os_error, ConnectionRefusedError)
            except (OSError, aiohttp.ClientError) as error:
                lane.problem = str(error) or "it did not answer in time"
            failures = failures + 1 if lane.heard == before else 0
            await asyncio.sleep(pause_s(failures, times.beat_s))


async def _converse(lane: Lane, session: aiohttp.ClientSession, url: str, times: Times) -> None:
    """Over one connection, until the peer has left. Raises OSError, aiohttp.ClientError."""
    talk = Conversation(lane, times)
    answer = await session.post(url, data=talk.say(), allow_redirects=False)
    try:
        if answer.status != 200 or answer.connection is None:
            raise ConnectionError("it is not ready")
        connection = answer.connection.transport.get_extra_info("socket")
        set_up(connection, times.quiet_s)
        lane.connect(connection)
        await talk.listen(answer.content)
    finally:
        talk.end()
        await asyncio.sleep(_LAST_S)
        answer.close()
