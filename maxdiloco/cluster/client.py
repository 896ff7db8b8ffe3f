"""The client of a channel: connect to the peer's server, again after each broken connection."""

import asyncio
import contextlib
import ssl

import aiohttp

from maxdiloco.cluster.channel import READ_BYTES, Channel, Connection
from maxdiloco.cluster.deadlines import Times, retry_pause_s
from maxdiloco.cluster.sockets import set_timeouts

_LAST_S = 0.1  # wait for the last record of a connection to be sent [s]


def url(host: str, port: int, path: str) -> str:
    """Return the URL of a channel at a server."""
    return f"https://{f'[{host}]' if ':' in host else host}:{port}/{path}"


async def connect(
    channel: Channel, url: str, context: ssl.SSLContext, times: Times, *, server_name: str
) -> None:
    """Keep a channel connected until the peer has left.

    Args:
      channel: the state of the channel.
      url: URL of the channel at the server.
      context: TLS context with this process's certificate and its authority.
      times: time limits of the link.
      server_name: the DNS name that the server's certificate must have.
    """
    connector = aiohttp.TCPConnector(ssl=context, force_close=True)
    limits = aiohttp.ClientTimeout(None, sock_connect=times.quiet_s, sock_read=times.quiet_s)
    failures = 0
    async with aiohttp.ClientSession(
        connector=connector, timeout=limits, read_bufsize=READ_BYTES
    ) as session:
        while not channel.left:
            reads_before = channel.num_reads
            try:
                await _connect_once(channel, session, url, times, server_name)
            except aiohttp.ClientConnectorError as error:
                channel.problem = error.os_error.strerror or str(error.os_error)
                refused = isinstance(error.os_error, ConnectionRefusedError)
                channel.refused = refused and channel.was_connected
            except (OSError, aiohttp.ClientError) as error:
                channel.problem = str(error) or "it did not answer in time"
            failures = failures + 1 if channel.num_reads == reads_before else 0
            await asyncio.sleep(retry_pause_s(failures, times.heartbeat_s))


async def _connect_once(
    channel: Channel, session: aiohttp.ClientSession, url: str, times: Times, server_name: str
) -> None:
    """Use one connection until the peer has left. Raises OSError or aiohttp.ClientError."""
    connection = Connection(channel, times.heartbeat_s)
    response = await session.post(
        url, data=connection.outgoing(), server_hostname=server_name, allow_redirects=False
    )
    with contextlib.closing(response):
        if response.status != 200 or response.connection is None:
            connection.close()
            raise ConnectionError("it is not ready")
        set_timeouts(response.connection.transport.get_extra_info("socket"), times.quiet_s)
        try:
            await connection.incoming(response.content)
        finally:
            connection.close()
            await asyncio.sleep(_LAST_S)
