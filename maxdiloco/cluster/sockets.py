"""Open sockets between the processes of a run, find addresses, and set the kernel's timeouts."""

import socket
import sys

# The kernel buffers at most this many unsent bytes, so that an acknowledgement does not wait behind
# megabytes of data: 0.4 s at 5 Mbit/s.
_UNSENT_BYTES = 1 << 18


def listen(host: str = "", port: int = 0) -> socket.socket:
    """Return a listening socket. host "": all interfaces; port 0: any free one. Raises OSError."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual)


def interface_towards(address: tuple[str, int]) -> str:
    """Return this host's address on the route to another address. Sends nothing. Raises OSError."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def set_timeouts(connection: socket.socket, quiet_s: float) -> None:
    """Let the kernel end a connection if sent bytes are not acknowledged for quiet_s seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        quiet_ms = round(1000 * quiet_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, quiet_ms)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
