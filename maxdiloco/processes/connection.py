"""One TCP connection that carries frames, and how long its other end has been silent."""

import contextlib
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from maxdiloco.processes.frames import (
    HEADER_BYTES,
    BrokenError,
    Frame,
    Header,
    Incoming,
    check,
    pack,
    unpack,
)

# Linux, include/uapi/asm-generic/socket.h; Python has no name for it. All ones: no pacing.
_SO_MAX_PACING_RATE = 47
_UNPACED = (1 << 64) - 1


@dataclass
class Meter:
    """What has gone over the connections to a peer, one after the other, in bytes and seconds."""

    wire_sent: int = 0  # with headers, beats and frames sent again
    wire_received: int = 0
    connections: int = 0
    silence_s: float = 0.0  # since the peer was last heard
    longest_silence_s: float = 0.0

    def count(self, since: float, most_s: float) -> float:
        """Add a silence, and return the time [monotonic].

        most_s: what is longer was a time in which this process did not run.
        """
        now = time.monotonic()
        self.silence_s += min(now - since, most_s)
        self.longest_silence_s = max(self.longest_silence_s, self.silence_s)
        return now


class Connection:
    """A socket with an owner for each direction: one thread reads, another one writes.

    beat_s: between two looks at whether it is silent. quiet_s: of silence that break it.
    """

    def __init__(
        self, connection: socket.socket, meter: Meter, *, beat_s: float, quiet_s: float
    ) -> None:
        self._socket, self._meter, self._beat_s, self._quiet_s = connection, meter, beat_s, quiet_s
        self._patience_s = meter.silence_s + quiet_s

    def prepare(self) -> None:
        """Set the socket up. Raises OSError when it has ended meanwhile."""
        self._socket.settimeout(self._beat_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def pace(self, bytes_per_second: int | None) -> None:
        """See set_pace."""
        set_pace(self._socket, bytes_per_second)

    def read(self, incoming: Incoming) -> tuple[Header, memoryview]:
        """The next frame. Raises OSError when the connection has broken."""
        data = bytearray(HEADER_BYTES)
        self._fill(memoryview(data))
        header = unpack(data)
        body = incoming.space(header)
        self._fill(body)
        check(header, body)
        return header, body

    def write(self, batch: Sequence[Frame], arrived: int) -> None:
        """Send frames. arrived: see pack. Raises OSError once someone has shut the connection."""
        views = []
        for frame in batch:
            views += [memoryview(pack(frame, arrived)), *frame.views]
        while views:
            try:
                count = self._socket.sendmsg(views)
            except TimeoutError:
                continue  # whether the link is dead is for the reader to judge
            self._meter.wire_sent += count
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """End one or both directions, and wake the threads that wait for them."""
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(how)

    def close(self) -> None:
        """Give the descriptor back: when no thread uses it any more."""
        self._socket.close()

    def _fill(self, view: memoryview) -> None:
        meter, most_s = self._meter, 2 * self._beat_s
        started = time.monotonic()
        while view:
            try:
                count = self._socket.recv_into(view)
            except TimeoutError:
                started = meter.count(started, most_s)
                if meter.silence_s > self._patience_s:
                    raise BrokenError(f"it was silent for {meter.silence_s:.1f} s") from None
                continue
            if not count:
                raise BrokenError("it closed the connection")
            started = meter.count(started, most_s)
            meter.silence_s, self._patience_s = 0.0, self._quiet_s
            meter.wire_received += count
            view = view[count:]


def set_pace(connection: socket.socket, bytes_per_second: int | None) -> bool:
    """Let the kernel spread what is sent; None: no limit. False where the kernel cannot."""
    if sys.platform != "linux":
        return False
    rate = _UNPACED if bytes_per_second is None else bytes_per_second
    value = rate.to_bytes(8, sys.byteorder)
    try:
        connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, value)
    except OSError:
        return False
    return True
