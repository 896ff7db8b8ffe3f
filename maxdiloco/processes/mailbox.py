"""Messages of bytes between the processes of a run, point to point, while the program goes on.

Two lanes to a peer, each with connections of its own: BULK, which may be paced, and WORDS for what
is short, which must not stand behind it: with 200 KB/s and a kernel's buffer of some megabytes that
is tens of seconds.

The process with the higher number dials: process 0, whose host is the coordinator's and so in reach
of every other host, needs to reach no one, and host 1 of two may stay behind a firewall. No JAX.
"""

import asyncio
import functools
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence

import aiohttp

from maxdiloco.errors import LostPeerError
from maxdiloco.processes.certificates import Identity, Peer
from maxdiloco.processes.dialler import dial, url
from maxdiloco.processes.doorman import Doorman
from maxdiloco.processes.lane import BULK, WORDS, Key, Lane, message
from maxdiloco.processes.sockets import times

SEE_OUTPUT = "See the end of its own output."
RESUME = "Start the run again with the same run_name: it resumes from the last checkpoint."
REMEDY = f"{SEE_OUTPUT} {RESUME}"
# Our choice.
_MOST_WORDS = 1 << 20  # bytes of a message of the lane WORDS
_GONE_S = 2.0  # after it has closed its connections a peer that lives has come back
_TICK_S = 0.1  # between two looks at who is silent, at most
_RECORDS = 4  # that come in quiet_s at least, however slowly the bulk is spread
_RECORD_BYTES = 1 << 14  # of TLS at most (RFC 8446 sec. 5.1); a record is read once it is whole


class Mailbox:
    """The messages of one process to and from its peers.

    rank: the number of this process. listener: where it is dialled; is closed at the end.
    timeout_s: a peer that is silent for longer, or cannot be reached again, is lost.

    Once a peer is lost, or the thread has ended with any error, every pending and later call but
    close() and received_bytes() raises that error.
    """

    def __init__(
        self,
        rank: int,
        identity: Identity,
        *,
        listener: socket.socket,
        timeout_s: float,
    ) -> None:
        self._rank, self._identity = rank, identity
        self.timeout_s, self._times = timeout_s, times(timeout_s)
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, Key], deque[bytearray]] = defaultdict(deque)
        self._word: str | None = None  # this and what follows: see `watch`
        self._heard = self._lost = lambda rank, what: None
        self._failure: BaseException | None = None
        self._told: bool | None = None  # the result of close()
        self._peers: dict[int, Peer] = {}
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._served: dict[tuple[bytes, str], Lane] = {}
        self._tasks: set[asyncio.Task] = set()
        self._context = identity.context(ssl.PROTOCOL_TLS_SERVER)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # a connection that breaks
        self._thread = threading.Thread(target=self._run, name="maxdiloco-link", daemon=True)
        self._thread.start()
        self._call(self._serve(listener))

    def open(self, name: str, peers: Mapping[int, Peer], *, most_bytes: int = _MOST_WORDS) -> None:
        """Open a lane to each of these peers; both sides do.

        most_bytes: of a message; a larger one is no process's of the run. Raises OSError.
        """
        self._call(self._open(name, dict(peers), most_bytes))

    @property
    def names(self) -> dict[int, str]:
        """{peer: its machine}, of those with a lane WORDS."""
        return {rank: self._peers[rank].name for rank, lane in self._lanes if lane == WORDS}

    def meet(self, name: str, within_s: float) -> list[int]:
        """Wait until all peers of a lane are reached. Returns those that are not, in order.

        Raises LostPeerError and the like.
        """
        lanes = {rank: lane for (rank, other), lane in self._lanes.items() if other == name}
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(lane.met for lane in lanes.values()), within_s
            )
            self._raise_failure()
        return sorted(rank for rank, lane in lanes.items() if not lane.met)

    def watch(
        self,
        word: str,
        heard: Callable[[int, bytearray], None],
        lost: Callable[[int, str], None],
    ) -> None:
        """Call `heard` for each message whose key is `word`, and `lost` for each peer that is lost.

        heard gets the peer and the bytes, lost the peer and what has become of it, both in the
        thread of the event loop. get() does not see such messages.
        """
        self._word, self._heard, self._lost = word, heard, lost

    def tell(self, peer: int, word: str, data: bytes) -> None:
        """Put a short message, even after a failure."""
        self._loop.call_soon_threadsafe(self._lanes[peer, WORDS].add, message((word,), [data]))

    def put(self, peer: int, key: Key, data: Sequence[object], lane: str = BULK) -> None:
        """Send buffers (bytes, memoryviews, arrays ...) as one message; never waits.

        The buffers are not copied and must not change any more: they are kept until the peer has
        all of it. What is sent to a peer that has left goes nowhere.
        Raises LostPeerError and the like; TypeError for what is no contiguous buffer or no key.
        """
        new = message(key, data)
        with self._changed:
            self._raise_failure()
        self._loop.call_soon_threadsafe(self._lanes[peer, lane].add, new)

    def arrived(self, peer: int, key: Key) -> bool:
        """Whether get() would return at once. Raises as it does."""
        with self._changed:
            self._raise_failure()
            return (peer, key) in self._messages

    def get(self, peer: int, key: Key, deadline: float) -> bytearray:
        """The message of this key; those of the same key in their order.

        Raises LostPeerError and the like, and TimeoutError at the deadline [time.monotonic()]: the
        peer is there, but has not sent it.
        """
        place = peer, key
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._failure or place in self._messages or not self._stays(peer),
                deadline - time.monotonic(),
            )
            self._raise_failure()
            if place in self._messages:
                data = self._messages[place].popleft()
                if not self._messages[place]:
                    del self._messages[place]
                return data
        if in_time:
            raise LostPeerError(f"{self._name(peer)} has ended and never sent {key}. {REMEDY}")
        raise TimeoutError(f"{self._name(peer)} is there, but has not sent {key} in time")

    def pace(self, bytes_per_second: float | None) -> None:
        """Spread the bulk to each peer, at most so fast, where it is Linux; None: send at once."""
        # A record of TLS that took longer than quiet_s would end its connection, again and again.
        least = _RECORDS * _RECORD_BYTES / self._times.quiet_s
        rate = None if bytes_per_second is None else round(max(bytes_per_second, least))
        for (_, name), lane in self._lanes.items():
            if name == BULK:
                self._loop.call_soon_threadsafe(lane.pace, rate)

    def received_bytes(self, peer: int) -> int:
        """Bytes of messages, parts included, that have come from a peer so far."""
        return sum(lane.received for (other, _), lane in self._lanes.items() if other == peer)

    @property
    def misses_a_peer(self) -> bool:
        """Whether a peer that has not left is silent for longer than between two signs of life."""
        limit_s = 1.5 * self._times.beat_s
        return any(not lane.left and lane.silence_s > limit_s for lane in self._lanes.values())

    def fail(self, error: BaseException) -> None:
        """Let every pending and later call raise this error, or the first one."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait_until_left(self, within_s: float) -> None:
        """Wait for the goodbye of every peer, or its loss."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(lane.left for lane in self._lanes.values()), within_s
            )

    def close(self, within_s: float) -> bool:
        """Send what is queued, say goodbye and end the thread. Again: nothing happens.

        Returns whether every peer has got everything, or has itself left, within_s seconds.
        """
        if self._told is not None:
            return self._told
        lanes = list(self._lanes.values())
        for lane in lanes:
            self._loop.call_soon_threadsafe(lane.say_goodbye)
        with self._changed:
            self._told = self._changed.wait_for(lambda: all(lane.told for lane in lanes), within_s)
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.fail(RuntimeError("this mailbox is closed"))
        return self._told

    def _run(self) -> None:
        """The thread of the event loop."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _call(self, work: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start(self, work: Coroutine) -> asyncio.Task:
        """A task; an error that ends it, but for one of the network, ends all."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError | aiohttp.ClientError):
            self.fail(error)
        self._notify()

    async def _serve(self, listener: socket.socket) -> None:
        self._doorman = Doorman(
            listener, self._context, self._served, self._times, start=self._start
        )
        self._start(self._doorman.serve())
        self._start(self._watch())

    async def _open(self, name: str, peers: dict[int, Peer], most_bytes: int) -> None:
        self._peers |= peers
        for rank, peer in peers.items():
            lane = Lane(self._name(rank), functools.partial(self._deliver, rank), most_bytes)
            self._lanes[rank, name] = lane
            if rank > self._rank:
                self._context.load_verify_locations(cadata=peer.certificate)
                self._served[ssl.PEM_cert_to_DER_cert(peer.certificate), name] = lane
            else:
                context = self._identity.context(ssl.PROTOCOL_TLS_CLIENT)
                context.load_verify_locations(cadata=peer.certificate)
                self._start(dial(lane, url(peer.host, peer.port, name), context, self._times))

    async def _watch(self) -> None:
        """Find the peers that are lost, and tell the waiting threads what is new."""
        tick_s = min(_TICK_S, self._times.beat_s / 4)
        before = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            passed_s = min(now - before, 2 * self._times.beat_s)  # not if this process was stopped
            before = now
            for (rank, name), lane in self._lanes.items():
                lane.silence_s += passed_s
                if not lane.left and (what := self._lost_how(lane, name, now)):
                    self._lose(rank, lane, what)
            self._notify()

    def _lost_how(self, lane: Lane, name: str, now: float) -> str | None:
        """What has become of a peer that is lost, in words."""
        if lane.silence_s > self.timeout_s:
            return (
                f"has been out of reach for {lane.silence_s:.0f} s "
                f"(peer_timeout_seconds={self.timeout_s:g}): {lane.problem}"
            )
        closed = lane.closed_at is not None and now - lane.closed_at > _GONE_S
        if name == WORDS and (lane.gone or closed):
            return "is gone: it closed its connections without a word"
        return None

    def _lose(self, rank: int, lane: Lane, what: str) -> None:
        for (other, _), each in self._lanes.items():
            if other == rank:
                each.leave()
        self._lost(rank, f"{what}.")
        self.fail(LostPeerError(f"{lane.peer} {what}. {REMEDY}"))

    async def _end(self) -> None:
        await self._doorman.close()
        while self._tasks:  # again, where a cancellation met the end of what a task waited for
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_TICK_S)

    def _deliver(self, rank: int, key: Key, data: bytearray) -> None:
        if key == (self._word,):
            self._heard(rank, data)
            return
        with self._changed:
            self._messages[rank, key].append(data)
            self._changed.notify_all()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _name(self, rank: int) -> str:
        peer = self._peers[rank]
        return f"process {rank} at {peer.host or peer.name} port {peer.port}"

    def _stays(self, rank: int) -> bool:
        return any(other == rank and not lane.left for (other, _), lane in self._lanes.items())
