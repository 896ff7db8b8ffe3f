"""Links between threads of one process, and a bad network between them."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from maxdiloco.processes import links

WAIT_S = 60  # far above what anything here takes
SECRET = b"known to all of them"
TICK_S = 0.02


class Pair:
    """Two connections of a proxy, one to each side."""

    def __init__(self, near, far):
        self.near, self.far = near, far
        self.dead = False  # what enters it never comes out
        self.ended = False
        self._pumps = 2
        self._lock = threading.Lock()

    def end(self, reset=False):
        self.ended = True
        for connection in (self.near, self.far):
            with contextlib.suppress(OSError):
                if reset:
                    hard = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, hard)
                else:
                    connection.shutdown(socket.SHUT_RDWR)

    def release(self):
        with self._lock:
            self._pumps -= 1
            if self._pumps == 0:
                self.near.close()
                self.far.close()


class Proxy:
    """A TCP link to `target` that can stop, damage, lose and end what goes through.

    Directions: "to" the target and "from" it.
    """

    def __init__(self, target):
        self.target = target
        self.seen = None  # a bytearray records
        self._stopped = {"to": threading.Event(), "from": threading.Event()}
        self._pairs = []
        self._faults = {}  # {"end", "reset" or "flip": bytes until then}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._threads = []
        self._start(self._accept)

    def _start(self, body, *arguments):
        thread = threading.Thread(target=body, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self.target)
                except OSError:
                    near.close()
                    continue
                self._pairs.append(pair := Pair(near, far))
                for connection in (near, far):
                    connection.settimeout(TICK_S)
                self._start(self._pump, near, far, "to", pair)
                self._start(self._pump, far, near, "from", pair)

    def _pump(self, source, sink, direction, pair):
        try:
            while not pair.ended:
                try:
                    data = bytearray(source.recv(65536))
                except TimeoutError:
                    continue
                while self._stopped[direction].is_set() and not pair.ended:
                    time.sleep(TICK_S)
                if not data:
                    break
                if not pair.dead:
                    self._pass_on(data, sink, pair)
        except OSError:
            pair.end()
        finally:
            if not pair.dead:
                pair.end()
            pair.release()

    def _pass_on(self, data, sink, pair):
        if self.seen is not None:
            self.seen += data
        if self._due("flip", len(data)):
            data[len(data) // 2] ^= 1
        for fault in ("end", "reset"):
            if self._due(fault, len(data)):
                pair.end(reset=fault == "reset")
        while data and not pair.ended:
            with contextlib.suppress(TimeoutError):
                del data[: sink.send(data)]

    def _due(self, fault, count):
        with self._lock:
            if fault not in self._faults:
                return False
            self._faults[fault] -= count
            if self._faults[fault] > 0:
                return False
            del self._faults[fault]
            return True

    def arm(self, fault, after):
        """Let something happen once, after so many more bytes in any direction."""
        with self._lock:
            self._faults[fault] = after

    def armed(self):
        with self._lock:
            return bool(self._faults)

    def lose(self):
        """What enters the connections of now never comes out. New ones work."""
        for pair in self._pairs:
            pair.dead = True

    def stop(self, *directions):
        for direction in directions or ("to", "from"):
            self._stopped[direction].set()

    def go_on(self):
        for event in self._stopped.values():
            event.clear()

    def close(self):
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        for pair in self._pairs:
            pair.end()
        for thread in self._threads:
            thread.join()


class Network(contextlib.ExitStack):
    """Makes links, and closes them and their proxies at its end."""

    def links(self, count, *, proxies=(), timeout_s=WAIT_S, each=None, **options):
        """One for each of `count` processes; the others reach those of `proxies` through one.

        each: {rank: options of this one alone}.
        """
        listeners = [links.listen("127.0.0.1") for _ in range(count)]
        addresses = [listener.getsockname() for listener in listeners]
        self.proxies = {}
        for rank in proxies:
            self.proxies[rank] = Proxy(addresses[rank])
            addresses[rank] = self.proxies[rank].address
            self.callback(self.proxies[rank].close)
        made = []
        for rank in range(count):
            given = dict(secret=SECRET, fingerprint="H=20", timeout_s=timeout_s)
            given |= options | (each or {}).get(rank, {})
            others = {peer: addresses[peer] for peer in range(count) if peer != rank}
            made.append(links.Links(rank, others, listener=listeners[rank], **given))
        self.callback(close_all, made)
        return made

    def pair(self, **options):
        """Links 0 and 1, which have met, and the proxy between them."""
        zero, one = self.links(2, proxies=(0,), **options)
        together(zero.meet, one.meet)
        return zero, one, self.proxies[0]


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


def descriptors():
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))


def contents(seed, count, most=5_000_000):
    """{key: bytes}: sizes from none to `most`, as many small as large ones."""
    random.seed(seed)
    sizes = [0, 1, most] + [int(most ** random.random()) for _ in range(count - 3)]
    pool = random.randbytes(most)
    offsets = [random.randrange(most - size + 1) for size in sizes]
    return {
        (seed, i): pool[offset : offset + size]
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True))
    }


def assert_all_arrive(zero, one, seeds, count):
    """Both ways at once; asked for in another order than sent, before and after they come."""
    there, back = (contents(seed, count) for seed in seeds)

    def send(side, peer, messages):
        for key, data in messages.items():
            middle = len(data) // 3
            side.send(peer, key, [data[:middle], np.frombuffer(data[middle:], np.uint8)])

    def receive(side, peer, messages):
        for key in random.Random(seeds[0]).sample(list(messages), len(messages)):
            assert side.receive(peer, key, soon()) == messages[key], key

    together(
        lambda: send(zero, 1, there),
        lambda: send(one, 0, back),
        lambda: receive(zero, 1, back),
        lambda: receive(one, 0, there),
    )
    return sum(map(len, there.values())), sum(map(len, back.values()))
