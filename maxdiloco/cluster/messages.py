"""Send and receive messages between two processes of a run, in a background thread.

The process with the higher number is the client. Process 0 runs on the host of the
coordinator, which every host can reach, and never has to connect to another host. With two hosts,
host 1 may therefore be behind a firewall. This module does not import JAX.
"""

import asyncio
import functools
import socket
import ssl
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple

import aiohttp

from maxdiloco.cluster import client
from maxdiloco.cluster.certificates import KeyFiles, name_of
from maxdiloco.cluster.channel import Channel
from maxdiloco.cluster.deadlines import times
from maxdiloco.cluster.payloads import BULK, CONTROL, Key, message
from maxdiloco.cluster.server import Server
from maxdiloco.errors import LostPeerError

SEE_OUTPUT = "See the end of its own output."
RESUME = "Start the run again with the same run_name: it resumes from the last checkpoint."
REMEDY = f"{SEE_OUTPUT} {RESUME}"
# A peer that has closed its connections and does not connect again within this time is lost [s]. A
# peer that is alive connects again after 0.1 s, the first pause before a retry.
_GONE_S = 2.0
_TICK_S = 0.1  # longest time between two checks for silent peers [s]


class Peer(NamedTuple):
    """Another process of the run: the address of its server, and the name of its machine."""

    host: str
    port: int
    machine: str


class Messenger:
    """The messages of this process to and from its peers.

    Once a peer is lost, or the thread has failed, every pending and later call except close()
    raises that error.

    Attributes:
      timeout_s: silence after which a peer is lost [s].
      received_bytes: total size of all messages that have arrived.
    """

    def __init__(
        self,
        process: int,
        keys: KeyFiles,
        *,
        listener: socket.socket,
        timeout_s: float,
        start_id: str = "",
    ):
        """Start the server.

        Args:
          process: number of this process.
          keys: files of its certificate, which are read here and not needed afterwards.
          listener: a listening socket, which close() closes.
          timeout_s: silence after which a peer is lost [s].
          start_id: identifier of this start of the run; processes of an earlier start are refused.
        """
        self._process, self._start_id = process, start_id
        self.timeout_s, self._times = timeout_s, times(timeout_s)
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, Key], deque[bytearray]] = defaultdict(deque)
        self._subscribed: str | None = None  # see `subscribe`
        self._on_message = self._on_loss = lambda peer, what: None
        self._failure: BaseException | None = None
        self._flushed: bool | None = None  # the result of close()
        self._stopped_s = 0.0
        self.received_bytes = 0
        self._peers: dict[int, Peer] = {}
        self._channels: dict[tuple[int, str], Channel] = {}
        self._served: dict[tuple[str, str], Channel] = {}
        self._tasks: set[asyncio.Task] = set()
        self._client_context = keys.context(ssl.PROTOCOL_TLS_CLIENT)
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda loop, context: None)  # of broken connections
        self._thread = threading.Thread(target=self._run, name="maxdiloco-messages", daemon=True)
        self._thread.start()
        self._call(self._serve(listener, keys.context(ssl.PROTOCOL_TLS_SERVER)))

    def open(self, channel: str, peers: Mapping[int, Peer]) -> None:
        """Open a channel to each of these peers, without waiting. The peers must do the same."""
        self._call(self._open(channel, dict(peers)))

    def wait_until_connected(self, channel: str, within_s: float) -> list[int]:
        """Wait until all peers of a channel are connected. Return those that are not, in order."""
        channels = {peer: each for (peer, name), each in self._channels.items() if name == channel}
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(each.was_connected for each in channels.values()),
                within_s,
            )
            self._raise_failure()
        return sorted(peer for peer, each in channels.items() if not each.was_connected)

    @property
    def machines(self) -> dict[int, str]:
        """{peer: name of its machine} of the peers with a control channel."""
        return {peer: self._peers[peer].machine for peer, name in self._channels if name == CONTROL}

    def subscribe(
        self,
        word: str,
        on_message: Callable[[int, bytearray], None],
        on_loss: Callable[[int, str], None],
    ) -> None:
        """Report lost peers, and messages with the key (word,), in the thread of the event loop.

        Args:
          word: the key. Messages with this key are not returned by get().
          on_message: called with the peer and the bytes of the message.
          on_loss: called with the peer and a description of the loss.
        """
        self._subscribed, self._on_message, self._on_loss = word, on_message, on_loss

    def put(self, peer: int, key: Key, buffers: Sequence[object], channel: str = BULK) -> None:
        """Queue one message and return at once. A peer that has left receives nothing.

        Args:
          peer: the process that receives it.
          key: key of the message.
          buffers: contiguous buffers (bytes, arrays ...). They are not copied, so they must not
            change afterwards.
          channel: CONTROL for short messages, which do not wait behind BULK messages.

        Raises:
          LostPeerError: a peer is lost.
          TypeError, ValueError: see payloads.message.
        """
        new = message(key, buffers)
        with self._changed:
            self._raise_failure()
        self._loop.call_soon_threadsafe(self._channels[peer, channel].add, new)

    def notify(self, peer: int, word: str, data: bytes) -> None:
        """Queue a message for the callback of the peer's `subscribe`, even after a failure."""
        self._loop.call_soon_threadsafe(self._channels[peer, CONTROL].add, message((word,), [data]))

    def has_message(self, peer: int, key: Key) -> bool:
        """Return whether get() would return without waiting."""
        with self._changed:
            self._raise_failure()
            return (peer, key) in self._messages

    def get(self, peer: int, key: Key, deadline: float) -> bytearray:
        """Wait for a message; messages of the same key are returned in their order.

        Args:
          peer: the process that sends it.
          key: key of the message.
          deadline: end of the wait [time.monotonic()]. If this process is stopped meanwhile, the
            deadline moves by that time.

        Raises:
          LostPeerError: a peer is lost, or has left without this message.
          TimeoutError: the peer is alive, but has not sent it by the deadline.
        """
        place = peer, key
        with self._changed:
            deadline -= self._stopped_s
            self._changed.wait_for(
                lambda: (
                    self._failure
                    or place in self._messages
                    or not self._stays(peer)
                    or time.monotonic() >= deadline + self._stopped_s
                )
            )
            self._raise_failure()
            if place in self._messages:
                data = self._messages[place].popleft()
                if not self._messages[place]:
                    del self._messages[place]
                return data
            if self._stays(peer):
                raise TimeoutError(f"{self._name(peer)} has not sent {key} in time")
        raise LostPeerError(f"{self._name(peer)} has ended and never sent {key}. {REMEDY}")

    @property
    def has_silent_peer(self) -> bool:
        """Whether a peer that has not left has been silent for longer than a heartbeat."""
        limit_s = 1.5 * self._times.heartbeat_s
        return any(not each.left and each.silence_s > limit_s for each in self._channels.values())

    def fail(self, error: BaseException) -> None:
        """Let every pending and later call raise this error, or an earlier one if there was one."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def wait_until_left(self, within_s: float) -> None:
        """Wait until every peer has sent its goodbye or is lost."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(each.left for each in self._channels.values()), within_s
            )

    def close(self, within_s: float) -> bool:
        """Send all queued messages and the goodbye, and end the thread. A second call does nothing.

        Returns:
          Whether every peer has received all messages, or has left, within within_s seconds.
        """
        if self._flushed is not None:
            return self._flushed
        channels = list(self._channels.values())
        for each in channels:
            self._loop.call_soon_threadsafe(each.say_goodbye)
        with self._changed:
            self._flushed = self._changed.wait_for(
                lambda: all(each.flushed for each in channels), within_s
            )
        self._call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.fail(RuntimeError("this messenger is closed"))
        return self._flushed

    def _run(self) -> None:
        """Run the event loop in its thread."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _call(self, work: Coroutine) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _start_task(self, work: Coroutine) -> asyncio.Task:
        """Start a task. An error that is not one of the network fails the messenger."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish_task)
        return task

    def _finish_task(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError | aiohttp.ClientError):
            self.fail(error)

    async def _serve(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        self._server = Server(
            listener, context, self._served, self._times, start_task=self._start_task
        )
        self._start_task(self._server.serve())
        self._start_task(self._find_lost_peers())

    async def _open(self, name: str, peers: dict[int, Peer]) -> None:
        self._peers |= peers
        path = f"{self._start_id}/{name}"
        for peer, where in peers.items():
            channel = Channel(self._name(peer), functools.partial(self._deliver, peer))
            self._channels[peer, name] = channel
            if peer > self._process:
                self._served[name_of(peer), path] = channel
                continue
            self._start_task(
                client.connect(
                    channel,
                    client.url(where.host, where.port, path),
                    self._client_context,
                    self._times,
                    server_name=name_of(peer),
                )
            )

    async def _find_lost_peers(self) -> None:
        tick_s = min(_TICK_S, self._times.heartbeat_s / 4)
        before = time.monotonic()
        while True:
            await asyncio.sleep(tick_s)
            now = time.monotonic()
            # A longer time means that this process was stopped, which does not count as silence.
            passed_s = min(now - before, 2 * self._times.heartbeat_s)
            self._stopped_s += now - before - passed_s
            before = now
            for (peer, name), channel in self._channels.items():
                channel.silence_s += passed_s
                if not channel.left and (what := self._loss_of(channel, name, now)):
                    self._lose(peer, channel, what)
            with self._changed:
                self._changed.notify_all()

    def _loss_of(self, channel: Channel, name: str, now: float) -> str | None:
        """Return a description of a peer's loss, or None if the peer is not lost."""
        if channel.silence_s > self.timeout_s:
            return (
                f"has been out of reach for {channel.silence_s:.0f} s "
                f"(peer_timeout_seconds={self.timeout_s:g}): {channel.problem}"
            )
        closed = channel.closed_at is not None and now - channel.closed_at > _GONE_S
        if name == CONTROL and (channel.refused or closed):
            return "is gone: it closed its connections without a goodbye"
        return None

    def _lose(self, peer: int, channel: Channel, what: str) -> None:
        for (other, _), each in self._channels.items():
            if other == peer:
                each.leave()
        self._on_loss(peer, f"{what}.")
        self.fail(LostPeerError(f"{channel.peer} {what}. {REMEDY}"))

    async def _end(self) -> None:
        await self._server.close()
        while self._tasks:  # a task may ignore one cancellation at the end of a wait
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=_TICK_S)

    def _deliver(self, peer: int, key: Key, data: bytearray) -> None:
        if key == (self._subscribed,):
            self._on_message(peer, data)
            return
        with self._changed:
            self.received_bytes += len(data)
            self._messages[peer, key].append(data)
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _name(self, peer: int) -> str:
        where = self._peers[peer]
        return f"process {peer} at {where.host or where.machine} port {where.port}"

    def _stays(self, peer: int) -> bool:
        return any(other == peer and not each.left for (other, _), each in self._channels.items())
