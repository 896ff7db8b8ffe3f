"""Time limits of the links between processes, all of which follow from peer_timeout_seconds.

A peer that is silent is lost after peer_timeout_seconds. A peer that is alive and owes a message
has longer, because it may compute more slowly than this process.
"""

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from maxdiloco import output
from maxdiloco.cluster.payloads import Key, get_payload
from maxdiloco.errors import LostPeerError

# A peer may need this many times as long for the same work. A slower one wastes most of the run.
SLOWER = 4
# A dead connection is replaced after 10 s, or a quarter of the timeout: TCP repeats a lost segment
# after 0.2, 0.4, ... s, so it would find a mended link again only after twice the outage.
_QUIET_S, _QUIET_PART = 10.0, 1 / 4
# A connection has four heartbeats, or more, before it counts as dead.
_HEARTBEAT_S, _HEARTBEAT_PART = 2.0, 1 / 20
_FIRST_PAUSE_S, _MOST_DOUBLINGS = 0.1, 10  # between two attempts to connect


class Times(NamedTuple):
    """Time limits of one link [s].

    Attributes:
      timeout_s: silence after which the peer is lost.
      quiet_s: silence after which a connection is replaced.
      heartbeat_s: longest time between two records that are sent.
    """

    timeout_s: float
    quiet_s: float
    heartbeat_s: float


def times(timeout_s: float) -> Times:
    """Return the limits that follow from peer_timeout_seconds."""
    quiet_s = min(_QUIET_S, _QUIET_PART * timeout_s)
    return Times(timeout_s, quiet_s, min(_HEARTBEAT_S, _HEARTBEAT_PART * timeout_s))


def retry_pause_s(failures: int, most_s: float) -> float:
    """Return the pause before the next attempt to connect [s].

    It doubles up to most_s. Half of it is random, so that clients do not return together.

    Args:
      failures: attempts that failed in a row.
      most_s: the longest pause [s].
    """
    pause = min(_FIRST_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS), most_s)
    return secrets.SystemRandom().uniform(0.5, 1) * pause


class Mailbox(Protocol):
    """The messages of a process; see cluster.messages.Mailbox."""

    timeout_s: float

    def get(self, peer: int, key: Key, deadline: float) -> bytearray:
        """Wait for a message until a value of time.monotonic(). Raises TimeoutError."""


class Deadlines:
    """Receives messages with deadlines that follow from the schedule.

    By the schedule all processes do the same work between two exchanges. So a peer that is alive
    has peer_timeout_seconds, plus SLOWER times as long as this process worked between two of them.
    Each message of a payload has a deadline of its own, so a large payload may take longer.
    For one thread.
    """

    def __init__(
        self,
        *,
        say: Callable[[str], None] = output.say_error,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Start to measure.

        Args:
          say: prints one line for the user.
          clock: time [s].
        """
        self._say, self._clock = say, clock
        self.begin()

    def begin(self) -> None:
        """Start to measure the work again."""
        self._since, self._longest_s = self._clock(), 0.0

    def worked(self) -> None:
        """Note that this process has done its own part of the work."""
        now = self._clock()
        self._longest_s, self._since = max(self._longest_s, now - self._since), now

    def receive_payload(self, mailbox: Mailbox, peer: int, key: Key, what: str) -> np.ndarray:
        """Wait for a payload; each of its messages has a deadline of its own. See `receive`."""
        return get_payload(lambda part: self.receive(mailbox, peer, part, what), key)

    def receive(self, mailbox: Mailbox, peer: int, key: Key, what: str) -> bytearray:
        """Wait for one message; the wait is not work of this process.

        Args:
          mailbox: where it arrives.
          peer: the process that sends it.
          key: its name.
          what: its content in words.

        Raises:
          LostPeerError: the peer is lost, or alive and too late.
        """
        begun, begun_at = self._clock(), time.strftime("%H:%M:%S")
        deadline = begun + mailbox.timeout_s
        try:
            try:
                return mailbox.get(peer, key, deadline)
            except TimeoutError:
                line = f"waiting since {begun_at} for {what} of process {peer}, which is alive"
                self._say(line)
            try:
                return mailbox.get(peer, key, deadline + SLOWER * self._longest_s)
            except TimeoutError as error:
                raise LostPeerError(
                    f"process {peer} is alive, but has not sent {what} since {begun_at} "
                    f"(peer_timeout_seconds={mailbox.timeout_s:g}, and {SLOWER} times the "
                    f"{self._longest_s:.1f} s that this process worked). See the end of its own "
                    f"output, and start the run again with the same run_name. Raise "
                    f"peer_timeout_seconds if it was only slow."
                ) from error
        finally:
            self._since += self._clock() - begun
