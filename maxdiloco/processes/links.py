"""Messages of bytes between the processes of a run, point to point, while the program goes on.

Two streams to a peer, as channel.py describes them, each a TCP connection of its own: one for bulk,
which may be paced, one for rows. In one connection a row would stand behind what the kernel has
already taken of the bulk: with 200 KB/s and a buffer of some megabytes that is tens of seconds.

The process with the higher number dials: process 0, whose host is the coordinator's and so in reach
of every other host, needs to reach no one, and host 1 of two may stay behind a firewall. No JAX.
"""

import functools
import json
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from maxdiloco import json_text
from maxdiloco.errors import LostPeerError
from maxdiloco.processes import handshake
from maxdiloco.processes.channel import REMEDY, Channel
from maxdiloco.processes.frames import Key

Address = tuple[str, int]  # host and port

OTHERS_WRITE = "Keep the coordinator's port from all but the hosts of the run."

BULK, ROWS = 0, 1  # numbers of the channels
_LEAST_SECRET = 16  # bytes, our choice


def listen(host: str = "", port: int = 0) -> socket.socket:
    """A listening socket. host: of the interface, "" for all; port: 0 for any. Raises OSError."""
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=dual)


def interface_towards(address: Address) -> str:
    """The address of this host as the process at `address` sees it. Nothing is sent."""
    family = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def exchange_addresses(
    rank: int,
    peers: Collection[int],
    mine: Address,
    *,
    put: Callable[[str, str], None],
    get: Callable[[str], str],
) -> dict[int, Address]:
    """Tell the peers where this process listens, by a store of texts, and read where they do.

    get: waits until the key is there, or raises an error of its own. Raises LostPeerError where
    somebody else has written to the store.
    """
    put(f"maxdiloco/links/{rank}", json.dumps(mine))
    addresses = {}
    for peer in peers:
        text = get(f"maxdiloco/links/{peer}")
        try:
            host, port = json_text.parse(text)
        except (ValueError, TypeError):
            host = port = None
        if not isinstance(host, str) or not isinstance(port, int):
            raise LostPeerError(
                f"JAX's key-value store holds no address of process {peer}, but {text[:60]!r}. "
                f"{OTHERS_WRITE}"
            )
        addresses[peer] = host, port
    return addresses


class Links:
    """The streams of one process to its peers.

    rank: the number of this process. addresses: {number of a peer: where it listens}.
    listener: where this process listens; closed at once if no one is to dial it. secret: of the
    run. fingerprint: a text that all processes must share. timeout_s: a peer that is silent for
    longer, or cannot be reached again, is lost. bulk, rows: the peers with such a stream; both
    sides must say the same. Default: all.

    Once a peer is lost, has left with a reason, is of another run, or a thread has ended with any
    error, every pending and later call but close() and received_bytes() raises that error.
    """

    def __init__(
        self,
        rank: int,
        addresses: Mapping[int, Address],
        *,
        listener: socket.socket,
        secret: bytes,
        fingerprint: str,
        timeout_s: float,
        bulk: Collection[int] | None = None,
        rows: Collection[int] | None = None,
    ) -> None:
        if len(secret) < _LEAST_SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes: {_LEAST_SECRET} are the least")
        self._rank, self._addresses, self._secret = rank, dict(addresses), secret
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._messages: dict[tuple[int, Key], deque[bytearray]] = defaultdict(deque)
        self._failure: BaseException | None = None
        self._told: bool | None = None  # the result of close()
        self._channels = {
            (peer, number): self._channel(peer, number, fingerprint, timeout_s)
            for number, peers in ((BULK, bulk), (ROWS, rows))
            for peer in (addresses if peers is None else peers)
        }
        self._staying = set(self._channels)  # those whose peer has not said goodbye
        self._acceptor = None
        if expected := [(peer, number) for peer, number in self._channels if peer > rank]:
            self._acceptor = handshake.Acceptor(
                *(rank, secret, listener, expected),
                admit=lambda hello, new: self._channels[hello.source, hello.channel].adopt(new),
                complain=lambda hello, it: self._channels[hello.source, hello.channel].complain(it),
                fail=self._fail,
            )
            self._acceptor.start()
        else:
            listener.close()
        for channel in self._channels.values():
            channel.start()

    def meet(self) -> None:
        """Wait for the first connection to every peer."""
        meters = [channel.meter for channel in self._channels.values()]
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure or all(meter.connections for meter in meters)
            )
            self._raise_failure()

    def send(self, peer: int, key: Key, data: Sequence[object]) -> None:
        """Send buffers (bytes, memoryviews, arrays ...) as one message of bulk; never waits.

        The buffers are not copied and must not change any more: they are kept until the peer has
        all of it. What is sent to a peer that has left without a reason goes nowhere.
        Raises LostPeerError and the like; TypeError for what is no contiguous buffer or no key.
        """
        self._send(peer, BULK, key, data)

    def send_row(self, peer: int, key: Key, data: Sequence[object]) -> None:
        """As send(), past all bulk."""
        self._send(peer, ROWS, key, data)

    def arrived(self, peer: int, key: Key) -> bool:
        """Whether receive() would return at once. Raises as it does."""
        with self._changed:
            self._raise_failure()
            return (peer, key) in self._messages

    def receive(self, peer: int, key: Key, deadline: float) -> bytearray:
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
        rate = None if bytes_per_second is None else max(1, round(bytes_per_second))
        for (_, number), channel in self._channels.items():
            if number == BULK:
                channel.pace(rate)

    def received_bytes(self, peer: int) -> int:
        """Bytes of messages, parts included, that have come from a peer so far."""
        streams = self._channels.items()
        return sum(stream.incoming.payload for (other, _), stream in streams if other == peer)

    def close(self, within_s: float, why: str | None = None) -> bool:
        """Send what is queued, say goodbye and end all threads. Again: nothing happens.

        why: an error in words, for the peers to raise; then what is queued is dropped.
        Returns whether every peer has got everything, or has itself left, within_s seconds.
        """
        if self._told is not None:
            return self._told
        limit = time.monotonic() + within_s
        channels = list(self._channels.values())
        for channel in channels:
            channel.say_goodbye(why)
        told = [channel.wait_until_told(limit) for channel in channels]
        self._told = all(told)
        for channel in channels:
            channel.stop(limit)
        if self._acceptor is not None:
            self._acceptor.stop()
        self._fail(RuntimeError("these links are closed"))
        return self._told

    def _channel(self, peer: int, number: int, fingerprint: str, timeout_s: float) -> Channel:
        return Channel(
            self._name(peer),
            fingerprint,
            timeout_s=timeout_s,
            dial=functools.partial(self._dial, peer, number) if peer < self._rank else None,
            met=self._notify,
            deliver=functools.partial(self._deliver, peer),
            left=functools.partial(self._leave, peer, number),
            fail=self._fail,
        )

    def _dial(self, peer: int, number: int, limit_s: float) -> socket.socket:
        mine = handshake.hello(self._rank, peer, number)
        address = self._addresses[peer]
        return handshake.dial(address, self._secret, mine, connect_s=limit_s, answer_s=limit_s)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _deliver(self, peer: int, key: Key, data: bytearray) -> None:
        with self._changed:
            self._messages[peer, key].append(data)
            self._changed.notify_all()

    def _leave(self, peer: int, number: int, why: str) -> None:
        if why:
            self._fail(LostPeerError(f"{self._name(peer)} has ended: {why}"))
        with self._changed:
            self._staying.discard((peer, number))
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _send(self, peer: int, number: int, key: Key, data: Sequence[object]) -> None:
        with self._changed:
            self._raise_failure()
        self._channels[peer, number].send(key, data)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _name(self, peer: int) -> str:
        host, port = self._addresses[peer]
        return f"process {peer} at {host} port {port}"

    def _stays(self, peer: int) -> bool:
        return any((peer, number) in self._staying for number in (BULK, ROWS))
