"""Sockets between the processes of a run: where they listen, and when one is given up."""

import contextlib
import socket
import sys
from typing import NamedTuple

# Linux, include/uapi/asm-generic/socket.h and tcp.h; Python has no name for the first. All ones: no
# pacing.
_SO_MAX_PACING_RATE = 47
_UNPACED = (1 << 64) - 1
_UNSENT_BYTES = 1 << 18  # the kernel takes so much ahead of what it sends; our choice
# In seconds, at most and as a part of the timeout; our choice.
_BEAT_S, _BEAT_PART = 2.0, 1 / 20
_QUIET_S, _QUIET_PART = 10.0, 1 / 4


class Times(NamedTuple):
    """Of a link, in seconds.

    timeout_s: of silence after which the peer is lost. quiet_s: of silence after which a connection
    is made anew: TCP alone tries a dead link ever more rarely. beat_s: between two signs of life.
    """

    timeout_s: float
    quiet_s: float
    beat_s: float


def times(timeout_s: float) -> Times:
    """The others follow from the timeout."""
    quiet_s = min(_QUIET_S, _QUIET_PART * timeout_s)
    return Times(timeout_s, quiet_s, min(_BEAT_S, _BEAT_PART * timeout_s))


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A listening socket. host: of the interface, "" for all; port: 0 for any. Raises OSError."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual)


def interface_towards(address: tuple[str, int]) -> str:
    """The address of this host as the process at `address` sees it. Nothing is sent."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def set_up(connection: socket.socket, quiet_s: float) -> None:
    """Let the kernel end a connection on which what was sent is not acknowledged for quiet_s."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        quiet_ms = round(1000 * quiet_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, quiet_ms)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)


def set_pace(connection: socket.socket, bytes_per_second: int | None) -> None:
    """Let the kernel spread what is sent; None: no limit. Does nothing where it cannot."""
    if sys.platform == "linux":
        rate = _UNPACED if bytes_per_second is None else bytes_per_second
        value = rate.to_bytes(8, sys.byteorder)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)
