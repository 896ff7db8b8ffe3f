"""Compute the time limits of links between processes from peer_timeout_seconds.

A peer that sends nothing for peer_timeout_seconds is lost. A peer that is alive, but has not sent
an expected message, has longer, because it may compute more slowly than this process.
"""

import secrets
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from maxdiloco import output
from maxdiloco.cluster.payloads import Key, get_payload
from maxdiloco.errors import LostPeerError

# A peer may need this many times as long for the same work. A slower peer wastes most of the run.
SLOWER = 4
# A dead connection is replaced after 10 s, or a quarter of the timeout. TCP would resume later, up
# to twice the length of the outage, because it repeats a lost segment after 0.2, 0.4, ... s.
_QUIET_S, _QUIET_PART = 10.0, 1 / 4
# At least four heartbeats must be missing before a connection counts as dead.
_HEARTBEAT_S, _HEARTBEAT_PART = 2.0, 1 / 20
_FIRST_PAUSE_S, _MOST_DOUBLINGS = 0.1, 10  # pauses between two attempts to connect


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

    The pause doubles with each failure up to most_s. Half of it is random, so that clients do not
    reconnect at the same time.

    Args:
      failures: number of consecutive failed attempts.
      most_s: the longest pause [s].
    """
    pause = min(_FIRST_PAUSE_S * 2 ** min(failures, _MOST_DOUBLINGS), most_s)
    return secrets.SystemRandom().uniform(0.5, 1) * pause


class Messenger(Protocol):
    """The messages of a process; see cluster.messages.Messenger."""

    timeout_s: float

    def get(self, peer: int, key: Key, deadline: float) -> bytearray:
        """Wait for a message until a value of time.monotonic(). Raises TimeoutError."""


class Deadlines:
    """Receives messages with deadlines that depend on the work of this process.

    The schedule gives all processes the same work between two exchanges. A peer that is alive
    therefore has peer_timeout_seconds, plus SLOWER times the longest time that this process worked
    between two exchanges. Each message of a payload has its own deadline, so a large payload may
    arrive later. Use one object in one thread.
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
          clock: returns the time [s].
        """
        self._say, self._clock = say, clock
        self.begin()

    def begin(self) -> None:
        """Start to measure the work again."""
        self._since, self._longest_s = self._clock(), 0.0

    def record_work(self) -> None:
        """Note that this process has done its own part of the work."""
        now = self._clock()
        self._longest_s, self._since = max(self._longest_s, now - self._since), now

    def receive_payload(self, messenger: Messenger, peer: int, key: Key, what: str) -> np.ndarray:
        """Wait for a payload, each of whose messages has its own deadline. See `receive`."""
        return get_payload(lambda part: self.receive(messenger, peer, part, what), key)

    def receive(self, messenger: Messenger, peer: int, key: Key, what: str) -> bytearray:
        """Wait for one message. The wait does not count as work of this process.

        Args:
          messenger: receives the message.
          peer: number of the process that sends it.
          key: key of the message.
          what: description of its content, for messages to the user.

        Raises:
          LostPeerError: the peer is lost, or is alive and missed the deadline.
        """
        begun, begun_at = self._clock(), time.strftime("%H:%M:%S")
        deadline = begun + messenger.timeout_s
        try:
            try:
                return messenger.get(peer, key, deadline)
            except TimeoutError:
                line = f"waiting since {begun_at} for {what} of process {peer}, which is alive"
                self._say(line)
            try:
                return messenger.get(peer, key, deadline + SLOWER * self._longest_s)
            except TimeoutError as error:
                raise LostPeerError(
                    f"process {peer} is alive, but has not sent {what} since {begun_at} "
                    f"(peer_timeout_seconds={messenger.timeout_s:g}, and {SLOWER} times the "
                    f"{self._longest_s:.1f} s that this process worked). See the end of its own "
                    f"output, and start the run again with the same run_name. Raise "
                    f"peer_timeout_seconds if it was only slow."
                ) from error
        finally:
            self._since += self._clock() - begun
