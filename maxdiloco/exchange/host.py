"""The exchange through host memory: codes travel between processes while inner steps go on.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 8 and 10, beside the compiled programs.
`start` copies the chunks that `collective.send` made to the host and hands them to the processes
that need them; `take` gives back what `collective.all_gather_chunk` would have made, to the bit.

No deadlock: `start` never waits. `take` waits for what peers start in the same exchange or an
earlier one, and every process starts the exchanges in the same order, each before it takes any
later one. The thread that fetches waits for device programs that wait for no other slice.

    # R replicas  S replicas of a mesh slot  C wire elements of a replica on one device
"""

import time
from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from maxdiloco.exchange.collective import incoming_spec, outgoing_spec
from maxdiloco.processes import patience
from maxdiloco.processes.patience import Patience


class Mailbox(patience.Mailbox, Protocol):
    """The messages of a process: processes.mailbox.Mailbox."""

    def put(self, peer: int, key: Hashable, data: Sequence[memoryview]) -> None:
        """Queue a message; never blocks."""

    def pace(self, bytes_per_second: float | None) -> bool:
        """Send to each peer at most so fast; None: at once."""


class Shard(NamedTuple):
    """A device's part of the outgoing chunks: a slot of the axis diloco, a place in its slice."""

    slot: int
    place: int


class Routes(NamedTuple):
    """Which shards a process has, sends to whom and gets from whom, each in one order."""

    own: tuple[Shard, ...]
    sends: dict[int, tuple[Shard, ...]]
    gets: dict[int, tuple[Shard, ...]]


def shards_of(mesh: Mesh) -> dict[jax.Device, Shard]:
    """{device: its shard} of arrays laid out by outgoing_spec."""
    slots = mesh.shape["diloco"]
    places = mesh.size // slots
    sharding = NamedSharding(mesh, outgoing_spec(mesh))
    parts = sharding.devices_indices_map((mesh.size,))
    return {device: Shard(*divmod(part.start or 0, places)) for device, (part,) in parts.items()}


def routes(owners: dict[Shard, int], process: int) -> Routes:
    """The routes of one process. owners: {shard: process that holds it}, of the whole mesh.

    A process needs, for each place it holds in any slot, the shards of that place in all slots.
    """
    holders: dict[int, set[int]] = {}
    for shard, owner in owners.items():
        holders.setdefault(shard.place, set()).add(owner)

    def moved(source: int, target: int) -> tuple[Shard, ...]:
        return tuple(
            shard
            for shard in sorted(owners)
            if owners[shard] == source and target in holders[shard.place]
        )

    others = sorted(set(owners.values()) - {process})
    return Routes(
        own=tuple(shard for shard in sorted(owners) if owners[shard] == process),
        sends={peer: found for peer in others if (found := moved(process, peer))},
        gets={peer: found for peer in others if (found := moved(peer, process))},
    )


class HostCarrier:
    """Exchanges of fragments between processes, in the order in which they start.

    mailbox: None in a run of one process. memory: the kind in which `take` leaves the chunks, None
    for the device's own. waited_s: what `take` has waited for [s].
    """

    def __init__(
        self, mesh: Mesh, *, num_replicas: int, mailbox: Mailbox | None, memory: str | None = None
    ):
        self._mailbox = mailbox
        self._incoming = NamedSharding(mesh, incoming_spec(mesh), memory_kind=memory)
        self._shards = shards_of(mesh)
        self._slots = mesh.shape["diloco"]
        self._places = mesh.size // self._slots
        self._replicas = num_replicas
        owners = {shard: device.process_index for device, shard in self._shards.items()}
        self._routes = routes(owners, jax.process_index())
        # One thread each: exchanges leave and arrive in the order in which they start.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self._arriving: dict[Hashable, Future] = {}
        self._patience = Patience()  # of the collector, from one exchange to the next
        self.waited_s = 0.0

    def start(
        self,
        key: Hashable,
        chunks: Sequence[jax.Array],
        *,
        size: int,
        within_s: float | None,
        what: str,
    ) -> None:
        """Begin to exchange the chunks of a fragment; returns at once.

        key: names the exchange, the same in every process. chunks: laid out by outgoing_spec; they
        must not be donated before `take`. size: wire elements of a replica on one device that are
        not padding, C. within_s: the time to spread the bytes over [s]; None: at once. what: the
        fragment in words, for messages.
        """
        if self._mailbox is not None:
            self._pace(chunks, size, within_s)
        for chunk in chunks:
            chunk.copy_to_host_async()
        fetched = self._fetcher.submit(self._fetch, key, tuple(chunks), size)
        lengths = [chunk.shape[0] // (self._replicas * self._places) for chunk in chunks]
        self._arriving[key] = self._collector.submit(
            self._collect, key, fetched, lengths, size, chunks[0].dtype, what
        )

    def take(self, key: Hashable) -> tuple[jax.Array, ...]:
        """The chunks of all replicas, laid out by incoming_spec; waits for those still under way.

        Raises LostPeerError as Patience does.
        """
        started = time.perf_counter()
        arrived = self._arriving.pop(key).result()
        self.waited_s += time.perf_counter() - started
        return arrived

    def peek(self, key: Hashable) -> tuple[jax.Array, ...]:
        """As `take`, but the exchange stays under way: what a checkpoint needs to know of it."""
        return self._arriving[key].result()

    def under_way(self, key: Hashable) -> bool:
        """Whether the exchange has started and was not taken."""
        return key in self._arriving

    def forget(self) -> None:
        """No exchange is under way any more; what still arrives of them is not taken."""
        self._arriving.clear()
        self._patience.begin()

    def close(self) -> None:
        """End the threads; one that waits for a peer ends when the mailbox is closed."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._collector.shutdown(wait=False, cancel_futures=True)

    def _pace(self, chunks, size, within_s) -> None:
        """Load the link evenly: a burst holds up what else is on it."""
        shards = max((len(shards) for shards in self._routes.sends.values()), default=0)
        rows = shards * (self._replicas // self._slots)
        sent = rows * size * chunks[0].dtype.itemsize
        self._mailbox.pace(sent / within_s if within_s and sent else None)

    def _fetch(self, key, chunks, size) -> dict[Shard, list[np.ndarray]]:
        """This process's shards on the host, [S, length] for each chunk, on their way to others."""
        own: dict[Shard, list[np.ndarray]] = {shard: [] for shard in self._routes.own}
        for chunk in chunks:
            for part in chunk.addressable_shards:
                codes = np.asarray(part.data).reshape(self._replicas // self._slots, -1)
                own[self._shards[part.device]].append(codes)
        for peer, shards in self._routes.sends.items():
            rows = [row for shard in shards for row in _live(own[shard], size)]
            flat = [np.ascontiguousarray(row).reshape(-1).view(np.uint8) for row in rows]
            self._mailbox.put(peer, key, [memoryview(codes) for codes in flat])
        return own

    def _collect(self, key, fetched, lengths, size, dtype, what) -> tuple[jax.Array, ...]:
        """The chunks as `take` gives them, on the devices."""
        here, M = {shard.place for shard in self._routes.own}, self._replicas
        codes = [{p: np.zeros((M, length), dtype) for p in here} for length in lengths]
        own = fetched.result()
        self._patience.worked()
        for shard, chunks in own.items():
            for chunk, block in zip(codes, chunks, strict=True):
                chunk[shard.place][self._rows(shard)] = block
        for peer, shards in self._routes.gets.items():
            received = self._patience.receive(self._mailbox, peer, key, what)
            data = np.frombuffer(received, np.uint8).view(dtype)
            for shard in shards:
                blocks = [chunk[shard.place][self._rows(shard)] for chunk in codes]
                for block in _live(blocks, size):
                    block[:] = data[: block.size].reshape(block.shape)
                    data = data[block.size :]
        pairs = zip(codes, lengths, strict=True)
        return tuple(self._on_devices(chunk, length) for chunk, length in pairs)

    def _rows(self, shard: Shard) -> slice:
        """The replicas of a shard's slot."""
        S = self._replicas // self._slots
        return slice(shard.slot * S, (shard.slot + 1) * S)

    def _on_devices(self, codes: dict[int, np.ndarray], length: int) -> jax.Array:
        total = self._replicas * self._places * length
        arrays = [
            jax.device_put(
                codes[shard.place].reshape(-1),
                SingleDeviceSharding(device, memory_kind=self._incoming.memory_kind),
            )
            for device, shard in self._shards.items()
            if device.process_index == jax.process_index()
        ]
        return jax.make_array_from_single_device_arrays((total,), self._incoming, arrays)


def _live(chunks: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Views [S, n] of what is not padding of the chunks [S, length] of C = size elements."""
    views = []
    for chunk in chunks:
        views.append(chunk[:, : max(size, 0)])
        size -= chunk.shape[1]
    return [view for view in views if view.size]
