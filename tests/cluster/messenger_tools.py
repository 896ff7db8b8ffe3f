"""Messengers in threads of one process, and a bad network between them."""

import contextlib
import functools
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from maxdiloco.cluster import certificates, sockets
from maxdiloco.cluster.messages import Messenger, Peer
from maxdiloco.cluster.payloads import BULK, CONTROL, MESSAGE_BYTES

WAIT_S = 60  # far above what anything here takes
TICK_S = 0.02


@dataclass
class Pair:
    """Two connections of a proxy, one to each side."""

    near: socket.socket
    far: socket.socket
    ended: bool = False
    passed: int = 0

    def end(self):
        self.ended = True
        for connection in (self.near, self.far):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Proxy:
    """A TCP link to `target` that can stop, damage and end what goes through.

    stopped: directions that do, "to" the target and "from" it. fault: ("end" or "flip", after how
    many more bytes in any direction), happens once and is None then. seen: a bytearray records.
    limit: bytes after which a connection stops.
    """

    def __init__(self, target):
        self.target = target
        self.stopped, self.fault, self.seen, self.limit = set(), None, None, float("inf")
        self.pairs = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = []
        self._start(self._accept)

    def _start(self, body, *arguments):
        self._threads.append(threading.Thread(target=body, args=arguments))
        self._threads[-1].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.target)
                except OSError:
                    near.close()
                    continue
                self.pairs.append(pair := Pair(near, far))
                for connection in (near, far):
                    connection.settimeout(TICK_S)
                self._start(self._pump, near, far, "to", pair)
                self._start(self._pump, far, near, "from", pair)

    def _pump(self, source, sink, direction, pair):
        with contextlib.suppress(OSError):
            while not pair.ended:
                try:
                    data = bytearray(source.recv(65536))
                except TimeoutError:
                    continue
                while (direction in self.stopped or pair.passed > self.limit) and not pair.ended:
                    time.sleep(TICK_S)
                if not data:
                    break
                self._pass_on(data, sink, pair)
        pair.end()

    def _pass_on(self, data, sink, pair):
        pair.passed += len(data)
        if self.seen is not None:
            self.seen += data
        fault = self._due(len(data))
        if fault == "flip":
            data[len(data) // 2] ^= 1
        if fault == "end":
            pair.end()
        while data and not pair.ended:
            with contextlib.suppress(TimeoutError):
                del data[: sink.send(data)]

    def _due(self, count):
        with self._lock:
            if self.fault is None:
                return None
            fault, after = self.fault
            self.fault = (fault, after - count) if after > count else None
            return None if self.fault else fault

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for pair in self.pairs:
            pair.end()
        for thread in self._threads:
            thread.join()
        for pair in self.pairs:
            pair.near.close()
            pair.far.close()


AUTHORITY = certificates.authority_key(b"the secret of the run")
START_ID = "start"


@contextlib.contextmanager
def key_files(process, authority=AUTHORITY):
    """Certificate files of a process."""
    with certificates.key_files(authority, certificates.name_of(process)) as paths:
        yield paths


def messenger(process, listener, *, timeout_s=WAIT_S, start_id=START_ID):
    with key_files(process) as keys:
        return Messenger(process, keys, listener=listener, timeout_s=timeout_s, start_id=start_id)


class Network(contextlib.ExitStack):
    """Makes messengers, and closes them and their proxies at its end."""

    def messengers(self, count, *, proxies=(), timeout_s=WAIT_S, bulk=None, start_ids=None):
        """One for each of `count` processes; the others reach those of `proxies` through one.

        bulk: pairs with that channel; all if it is None. All have CONTROL.
        """
        listeners = [sockets.listen("127.0.0.1") for _ in range(count)]
        addresses = [listener.getsockname() for listener in listeners]
        self.proxies = {}
        for process in proxies:
            self.proxies[process] = Proxy(addresses[process])
            addresses[process] = self.proxies[process].address
            self.callback(self.proxies[process].close)
        peers = {process: Peer(*address, "host") for process, address in enumerate(addresses)}
        made = []
        for process, listener in enumerate(listeners):
            start_id = start_ids[process] if start_ids else START_ID
            one = messenger(process, listener, timeout_s=timeout_s, start_id=start_id)
            others = {peer: where for peer, where in peers.items() if peer != process}
            one.open(CONTROL, others)
            paired = {p: each for p, each in others.items() if bulk is None or {process, p} in bulk}
            one.open(BULK, paired)
            made.append(one)
        self.callback(close_all, made)
        return made

    def pair(self, **options):
        """Messengers 0 and 1, which are connected, and the proxy between them."""
        zero, one = self.messengers(2, proxies=(0,), **options)
        meet(zero, one)
        return zero, one, self.proxies[0]


def meet(*made):
    """Wait until all channels are connected."""
    waits = [
        functools.partial(each.wait_until_connected, name, WAIT_S)
        for name in (CONTROL, BULK)
        for each in made
    ]
    assert not any(together(*waits))


def close_all(made):
    """As processes do, at the same time."""
    return together(*(lambda each=each: each.close(0.5) for each in made))


def together(*calls):
    """The results of calls made in threads at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(call) for call in calls]]


def later(call):
    """A future of a call in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def soon():
    """A deadline no test reaches."""
    return time.monotonic() + WAIT_S


def until(condition):
    """Wait for it."""
    limit = soon()
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def contents(seed, count, most=MESSAGE_BYTES):
    """{key: bytes}: sizes from none to `most`, as many small as large ones."""
    chance = random.Random(seed)
    sizes = [0, 1, most] + [int(most ** chance.random()) for _ in range(count - 3)]
    return {(seed, i): chance.randbytes(size) for i, size in enumerate(sizes)}
