"""How long this process waits for a message of a peer that is alive, and what it says."""

import time
from collections.abc import Callable, Hashable
from typing import Protocol

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import output

# A peer may take so much longer for the same work. Our choice: a slower one wastes most of the run.
SLOWER = 4
_SLICE = 1 / 10  # of the timeout, from one look at what has come to the next; our choice


class Mailbox(Protocol):
    """The messages of a process: processes.mailbox.Mailbox."""

    timeout_s: float

    def get(self, peer: int, key: Hashable, deadline: float) -> bytearray:
        """Wait for a message until a time of time.monotonic(). Raises TimeoutError."""

    def received_bytes(self, peer: int) -> int:
        """Bytes of messages, parts included, that have come from a peer so far."""


class Patience:
    """Waits for messages; a peer that is alive and sends nothing for too long is lost.

    Too long is the timeout of the mailbox, and SLOWER times the longest time that this process's
    own part of the same work took. The mailbox notices a dead peer. clock: of seconds. For one
    thread.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None] = output.say_error,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._say, self._clock = say, clock
        self.begin()

    def begin(self) -> None:
        """Begin to count the time of the work anew."""
        self._since, self._longest_s = self._clock(), 0.0

    def worked(self) -> None:
        """This process has done its own part of the work."""
        now = self._clock()
        self._longest_s, self._since = max(self._longest_s, now - self._since), now

    def receive(self, mailbox: Mailbox, peer: int, key: Hashable, what: str) -> bytearray:
        """The message. what: it is, in words. Raises LostPeerError and what `mailbox` raises.

        The wait is no work of this process.
        """
        timeout_s = mailbox.timeout_s
        limit_s = timeout_s + SLOWER * self._longest_s
        begun = silent_since = now = self._clock()
        begun_at, warned = time.strftime("%H:%M:%S"), False
        received = mailbox.received_bytes(peer)
        while now - silent_since < limit_s:
            try:
                data = mailbox.get(peer, key, now + _SLICE * timeout_s)
                self._since += self._clock() - begun
                return data
            except TimeoutError:
                before, now = now, self._clock()
            if now - before > timeout_s / 2:
                silent_since += now - before  # this process was stopped, not the peer
            if (so_far := mailbox.received_bytes(peer)) != received:
                received, silent_since = so_far, now
            if not warned and now - begun >= timeout_s:
                self._say(f"waiting since {begun_at} for {what} of process {peer}, which is alive")
                warned = True
        raise LostPeerError(
            f"process {peer} is alive, but {what} has not come from it since {begun_at}, and "
            f"nothing else for {now - silent_since:.0f} s (peer_timeout_seconds={timeout_s:g}, and "
            f"{SLOWER} times the {self._longest_s:.1f} s that this process took itself). See the "
            f"end of its own output, and start the run again with the same run_name. Raise "
            f"peer_timeout_seconds if it was only slow."
        )
