"""Count the traffic on the links of hosts: the kernel's byte counters, sampled by a thread.

Counted at the ports of the switch, behind the shaping of the host that sends: a port receives the
bytes that its host has sent. The counters hold Ethernet headers; a large segment that no shaping
has cut counts with one set of headers.
"""

import bisect
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.link.hosts import NAMESPACES, Hosts, port_name

SAMPLE_S = 0.05
WINDOW_S = 0.1  # of a peak rate, and of a bar in the figure
CLONE_NEWNET = 0x40000000  # sched.h


class Sample(NamedTuple):
    """Bytes of every host since its link was made, at one moment [s, time.monotonic]."""

    at: float
    sent: tuple[int, ...]
    received: tuple[int, ...]


def parse(text: str) -> dict[str, tuple[int, int]]:
    """/proc/net/dev as {interface: (bytes received, bytes sent)}."""
    counted = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        counted[name.strip()] = (int(fields[0]), int(fields[8]))
    return counted


class Sampler:
    """Samples the counters of hosts from `with` to its end, in a thread inside the switch."""

    def __init__(self, hosts: Hosts):
        self.samples: list[Sample] = []
        self._path = NAMESPACES / hosts.switch
        self._ports = [port_name(i) for i in range(len(hosts.names))]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> "Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        _enter(os.fspath(self._path))
        due = time.monotonic()
        with open("/proc/thread-self/net/dev") as counters:
            while not self._over.is_set():
                counters.seek(0)
                ports = parse(counters.read())
                received, sent = zip(*(ports[port] for port in self._ports), strict=True)
                self.samples.append(Sample(time.monotonic(), received, sent))
                due = max(due + SAMPLE_S, time.monotonic())
                self._over.wait(due - time.monotonic())


def _enter(path: str) -> None:
    """Move this thread, and no other, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
    finally:
        os.close(namespace)


def between(samples: Sequence[Sample], start: float, end: float) -> tuple[list[float], list[float]]:
    """Bytes (sent, received) of every host between two moments, interpolated."""
    a, b = _at(samples, start), _at(samples, end)
    pairs = [[y - x for x, y in zip(*both, strict=True)] for both in zip(a, b, strict=True)]
    return pairs[0], pairs[1]


def _at(samples: Sequence[Sample], moment: float) -> tuple[list[float], list[float]]:
    k = bisect.bisect_left(samples, moment, key=lambda sample: sample.at)
    if not 0 < k < len(samples):
        raise ValueError(f"{moment} is outside what was sampled")
    before, after = samples[k - 1], samples[k]
    part = (moment - before.at) / (after.at - before.at)

    def mixed(x: Sequence[int], y: Sequence[int]) -> list[float]:
        return [p + part * (q - p) for p, q in zip(x, y, strict=True)]

    return mixed(before.sent, after.sent), mixed(before.received, after.received)


def peak(samples: Sequence[Sample], start: float, end: float) -> float:
    """Highest rate of any host and direction over WINDOW_S between two moments [bytes/s]."""
    inside = [sample for sample in samples if start <= sample.at <= end]
    highest, first = 0.0, 0
    for last, after in enumerate(inside):
        while first + 1 < last and after.at - inside[first + 1].at >= WINDOW_S:
            first += 1
        before = inside[first]
        if after.at - before.at < WINDOW_S:
            continue
        grown = [b - a for a, b in zip(before.sent, after.sent, strict=True)]
        grown += [b - a for a, b in zip(before.received, after.received, strict=True)]
        highest = max(highest, max(grown) / (after.at - before.at))
    return highest


def bars(samples: Sequence[Sample], start: float, end: float) -> list[int]:
    """Bytes that the first host sent in each WINDOW_S from start on."""
    count = int((end - start) / WINDOW_S)
    edges = [_at(samples, start + k * WINDOW_S)[0][0] for k in range(count + 1)]
    return [round(b - a) for a, b in zip(edges, edges[1:], strict=False)]
