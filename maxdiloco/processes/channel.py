"""One lasting stream of messages between two processes, over TCP connections that may break.

A message is cut into frames. Frames are numbered, carry a checksum and the number of the last frame
that arrived from the other side, and are kept until that side has acknowledged them. A new
connection begins with a frame of each side that says the same number, and goes on after it: nothing
is lost, nothing arrives twice, and a message is resumed in its middle. A wrong checksum, or a
number out of turn, breaks the connection.

Two threads: the receiver makes the connection, reads until it breaks, and makes the next; the
sender writes to it. Neither waits for the program, so whatever arrives is always read, every write
ends, and the two processes cannot wait for each other in a circle.

Each side says something once a beat. After _quiet_s of silence the connection is made anew, since
TCP alone tries a dead link ever more rarely; after timeout_s the peer is lost. The time in which
this process was stopped itself does not count.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from maxdiloco.errors import LostPeerError
from maxdiloco.processes import frames
from maxdiloco.processes.frames import BrokenError, Connection, Frame, Key, Meter, set_pace
from maxdiloco.processes.handshake import MismatchError, pause_s
from maxdiloco.processes.threads import reporting_thread

# In seconds, at most and as a part of the timeout; our choice.
_BEAT_S, _BEAT_PART = 2.0, 1 / 20
_QUIET_S, _QUIET_PART = 10.0, 1 / 4
_ACKNOWLEDGE_AFTER = 16  # frames, within a message

REMEDY = (
    "See the end of its own output. Start the run again with the same run_name: it resumes from "
    "the last checkpoint."
)


class Channel:
    """One side of a stream.

    peer: the other process in words. fingerprint: the text that both sides must share.
    dial: makes a connection, each part of it in so many seconds, or raises OSError; None where the
    peer dials: see adopt(). The threads call, with no lock held: met, once a connection is open;
    deliver, with the key and bytes of each message; left, with the reason in the peer's goodbye,
    "" for none; fail, with the error that ended a thread.
    """

    def __init__(
        self,
        peer: str,
        fingerprint: str,
        *,
        timeout_s: float,
        dial: Callable[[float], socket.socket] | None,
        met: Callable[[], None],
        deliver: Callable[[Key, bytearray], None],
        left: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._peer, self._fingerprint, self._timeout_s = peer, fingerprint.encode(), timeout_s
        self._dial, self._met, self._left_with, self._fail_with = dial, met, left, fail
        self._beat_s = min(_BEAT_S, _BEAT_PART * timeout_s)
        self._quiet_s = min(_QUIET_S, _QUIET_PART * timeout_s)
        self._problem = "it has not connected"
        self.meter = Meter()
        self.outgoing = frames.Outgoing()  # behind the lock, as all that follows
        self._changed = threading.Condition()
        self._offered: socket.socket | None = None  # the next connection
        self._reading: Connection | None = None  # the receiver's
        self._writing: Connection | None = None  # the same one while the sender may use it
        self._sending = False  # the sender does use it
        self._spoke_at = 0.0  # when it last did
        self._owes = False  # an acknowledgement
        self._pace: int | None = None
        self._closing = False  # goodbye is said here
        self._left = False  # the peer has said it
        self._last_words = False  # the sender ends when it has nothing more to send
        self._over = False
        # Of the receiver alone.
        self.incoming = frames.Incoming(deliver)
        self._unanswered = 0  # frames
        self._failures = 0  # to connect, in a row
        self._whole_at = self._dialled_at = time.monotonic()  # a frame last came as it was sent

    def start(self) -> None:
        """Start both threads."""
        self._sender = reporting_thread("maxdiloco-send", self._send, self._fail)
        self._receiver = reporting_thread("maxdiloco-receive", self._receive, self._fail)

    def send(self, key: Key, data: Sequence[object]) -> None:
        """Queue a message: see Outgoing.add. A peer that has left is sent nothing."""
        with self._changed:
            if not (self._over or self._left or self._closing):
                self.outgoing.add(key, data)
                self._changed.notify_all()

    def adopt(self, connection: socket.socket) -> None:
        """Take the next connection. The newest counts: the peer has given the others up."""
        with self._changed:
            if self._offered is not None:
                self._offered.close()
            self._offered = connection
            if self._ending():
                connection.close()
                self._offered = None
            if self._reading is not None:
                self._reading.shut()
            self._changed.notify_all()

    def complain(self, problem: str) -> None:
        """Remember why the peer does not come, for the error that may follow."""
        self._problem = problem

    def pace(self, bytes_per_second: int | None) -> None:
        """Spread what is sent from now on; None: send at once."""
        with self._changed:
            self._pace = bytes_per_second
            if self._writing is not None:
                set_pace(self._writing.socket, bytes_per_second)

    def say_goodbye(self, why: str | None) -> None:
        """The last message, after all the others; with a reason, instead of them."""
        with self._changed:
            if why is not None:
                self.outgoing.drop()
            self._closing = True
            self.outgoing.add_goodbye(why or "")
            self._changed.notify_all()

    def wait_until_told(self, limit: float) -> bool:
        """Whether the peer has all that was sent, or has left, before `limit` [monotonic]."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._left or self.outgoing.done() or self._over, limit - time.monotonic()
            )
            return self._left or self.outgoing.done()

    def stop(self, limit: float) -> None:
        """End the threads and, after the peer until `limit`, the connection.

        What the peer still sends would be answered with a reset, which can overtake the goodbye.
        """
        with self._changed:
            self._last_words = True
            self._changed.notify_all()
        self._sender.join(max(0.0, limit - time.monotonic()))
        with self._changed:
            if self._reading is not None and not self._sending:
                self._reading.shut(socket.SHUT_WR)
        self._receiver.join(max(0.0, limit - time.monotonic()))
        self._end()
        self._sender.join()
        self._receiver.join()

    def _fail(self, error: BaseException) -> None:
        self._end()
        self._fail_with(error)

    def _end(self) -> None:
        with self._changed:
            self._over = True
            if self._reading is not None:
                self._reading.shut()
            if self._offered is not None:
                self._offered.close()
                self._offered = None
            self._changed.notify_all()

    def _ending(self) -> bool:
        return self._over or self._left or self._last_words

    def _send(self) -> None:
        while (work := self._next_work()) is not None:
            connection, batch = work
            try:
                connection.write(batch, self.incoming.arrived)
            except OSError:
                connection.shut()  # the receiver notices, and knows why
                with self._changed:
                    self._writing = None
            finally:
                with self._changed:
                    self._spoke_at = time.monotonic()
                    self._sending = False
                    self._changed.notify_all()

    def _next_work(self) -> tuple[Connection, list[Frame]] | None:
        """Wait for something to send and a connection to send it to; None at the end."""
        with self._changed:
            while not self._over:
                wait_s = self._beat_s
                if self._writing is not None:
                    batch = self.outgoing.batch()
                    wait_s = self._spoke_at + self._beat_s - time.monotonic()
                    if batch or self._owes or (wait_s <= 0 and not self._last_words):
                        self._owes, self._sending = False, True
                        return self._writing, batch or [Frame(0, frames.BEAT, (), 0)]
                if self._last_words:
                    break
                self._changed.wait(wait_s)
            return None

    def _receive(self) -> None:
        while (connection := self._next_connection()) is not None:
            try:
                self._open(connection)
                while True:
                    self._take(connection)
            except OSError as error:
                self._problem = str(error.strerror or error)
            finally:
                self._drop(connection)
            if (seconds := time.monotonic() - self._whole_at) > 2 * self._timeout_s:
                raise self._lost(seconds)  # it comes back again and again, and breaks every time
        self._end()

    def _next_connection(self) -> Connection | None:
        """Dial, or wait until the peer has; None at the end. Raises LostPeerError."""
        started = time.monotonic()
        while True:
            if self._dial is not None:
                self._try_to_dial(self._dial)
            with self._changed:
                patience_s = self._beat_s if self._dial is None else 0.0
                self._changed.wait_for(lambda: self._offered or self._ending(), patience_s)
                if self._ending():
                    return None
                if self._offered is not None:
                    times = {"beat_s": self._beat_s, "quiet_s": self._quiet_s}
                    self._reading = Connection(self._offered, self.meter, **times)
                    self._offered = None
                    return self._reading
            started = self.meter.count(started, 3 * self._quiet_s)
            if self.meter.silence_s > self._timeout_s:
                raise self._lost(self.meter.silence_s)

    def _try_to_dial(self, dial: Callable[[float], socket.socket]) -> None:
        with self._changed:
            again_at = self._dialled_at + pause_s(self._failures, self._beat_s)
            if self._changed.wait_for(self._ending, again_at - time.monotonic()):
                return
        self._failures += 1  # until the connection is open
        self._dialled_at = time.monotonic()
        try:
            self.adopt(dial(self._quiet_s))
        except OSError as error:
            self._problem = str(error.strerror or error)

    def _open(self, connection: Connection) -> None:
        """Agree with the peer on where to go on, and let the sender begin."""
        text = memoryview(self._fingerprint)
        connection.prepare()
        connection.write([Frame(0, frames.RESUME, [text], len(text))], self.incoming.arrived)
        header, body = connection.read(self.incoming)
        if header.kind != frames.RESUME:
            raise BrokenError("it began a connection in the middle")
        if body != text:
            raise MismatchError(
                f"{self._peer} has other keys than this process: {str(body, 'utf-8')!r}, here "
                f"{str(text, 'utf-8')!r}. Start all processes of a run with the same keys."
            )
        with self._changed:
            self.outgoing.resume(header.arrived)
            self.meter.connections += 1
            self._writing = connection
            set_pace(connection.socket, self._pace)
            self._changed.notify_all()
        self._failures = 0
        self._met()

    def _take(self, connection: Connection) -> None:
        """One frame of an open connection."""
        header, body = connection.read(self.incoming)
        self._whole_at = time.monotonic()
        if header.number:
            self._unanswered += 1
            if self.incoming.take(header, body) or header.kind == frames.GOODBYE:
                self._unanswered = _ACKNOWLEDGE_AFTER
        with self._changed:
            self.outgoing.acknowledge(header.arrived)
            if self._unanswered >= _ACKNOWLEDGE_AFTER:
                self._owes, self._unanswered = True, 0
            if header.kind == frames.GOODBYE:
                self._left = True
                self.outgoing.drop()
            self._changed.notify_all()
        if header.kind == frames.GOODBYE:
            self._left_with(str(body, "utf-8"))

    def _drop(self, connection: Connection) -> None:
        """Close a connection, once the sender has let go of it."""
        with self._changed:
            connection.shut()
            self._writing = None
            self._changed.wait_for(lambda: not self._sending)
            self._reading = None
            connection.socket.close()

    def _lost(self, seconds: float) -> LostPeerError:
        return LostPeerError(
            f"{self._peer} has been out of reach for {seconds:.0f} s "
            f"(peer_timeout_seconds={self._timeout_s:g}): {self._problem}. {REMEDY}"
        )
