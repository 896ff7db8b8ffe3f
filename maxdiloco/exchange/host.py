"""The exchange through host memory: codes travel between processes while inner steps go on.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 8 and 10, beside the compiled programs.
`start` copies the chunks that `collective.send` made to the host and hands them to the processes
that need them; its result is what `collective.all_gather_chunk` would have made, to the bit.

No deadlock: `start` never waits. A result waits for what peers start in the same exchange or an
earlier one, and every process starts the exchanges in the same order, each before it takes any
later one. The thread that fetches waits for device programs that wait for no other slice.

    # R replicas  S replicas of a mesh slot  C wire elements of a replica on one device
"""

from collections.abc import Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

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
    """Which shards a process sends to whom and gets from whom, each in one order."""

    sends: dict[int, tuple[Shard, ...]]
    gets: dict[int, tuple[Shard, ...]]


def owners_of(mesh: Mesh) -> dict[Shard, int]:
    """{shard: process that holds it} of arrays laid out by outgoing_spec."""
    places = mesh.size // mesh.shape["diloco"]
    parts = NamedSharding(mesh, outgoing_spec(mesh)).devices_indices_map((mesh.size,))
    return {
        Shard(*divmod(part.start or 0, places)): device.process_index
        for device, (part,) in parts.items()
    }


def routes(owners: dict[Shard, int], process: int) -> Routes:
    """The routes of one process. owners: of owners_of, of the whole mesh.

    A process needs, for each place it holds in any slot, the shards of that place in all slots.
    """
    held = {(owner, shard.place) for shard, owner in owners.items()}

    def moved(source: int, target: int) -> tuple[Shard, ...]:
        of_source = (shard for shard in sorted(owners) if owners[shard] == source)
        return tuple(shard for shard in of_source if (target, shard.place) in held)

    others = sorted(set(owners.values()) - {process})
    return Routes(
        sends={peer: found for peer in others if (found := moved(process, peer))},
        gets={peer: found for peer in others if (found := moved(peer, process))},
    )


class HostCarrier:
    """Exchanges of fragments between processes, in the order in which they start.

    mailbox: None in a run of one process. memory: the kind in which arrived chunks are, None for
    the device's own. patience: begins anew when no exchange is under way any more.
    """

    def __init__(
        self, mesh: Mesh, *, num_replicas: int, mailbox: Mailbox | None, memory: str | None = None
    ):
        self._mailbox = mailbox
        self._incoming = NamedSharding(mesh, incoming_spec(mesh), memory_kind=memory)
        self._slots, self._replicas = mesh.shape["diloco"], num_replicas
        self._places = mesh.size // self._slots
        self._routes = routes(owners_of(mesh), jax.process_index())
        # One thread each: exchanges leave and arrive in the order in which they start.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self.patience = Patience()  # of the collector, from one exchange to the next

    def start(
        self,
        key: Hashable,
        chunks: Sequence[jax.Array],
        *,
        size: int,
        within_s: float | None,
        what: str,
    ) -> Future:
        """Begin to exchange the chunks of a fragment; returns at once.

        The result: the chunks of all replicas, laid out by incoming_spec, or LostPeerError as of
        Patience. key: names the exchange, the same in every process. chunks: laid out by
        outgoing_spec; they must not be donated before the result is there. size: wire elements of
        a replica on one device that are not padding, C. within_s: the time to spread the bytes over
        [s]; None: at once. what: the fragment in words, for messages.
        """
        if self._mailbox is not None:
            self._pace(chunks, size, within_s)
        for chunk in chunks:
            chunk.copy_to_host_async()
        fetched = self._fetcher.submit(self._fetch, key, tuple(chunks), size)
        return self._collector.submit(self._collect, key, fetched, size, what)

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
        own: dict[Shard, list[np.ndarray]] = {}
        for chunk in chunks:
            for part in chunk.addressable_shards:
                codes = np.asarray(part.data).reshape(self._replicas // self._slots, -1)
                number = (part.index[0].start or 0) // codes.size
                own.setdefault(Shard(*divmod(number, self._places)), []).append(codes)
        for peer, shards in self._routes.sends.items():
            rows = [row for shard in shards for row in _live(own[shard], size)]
            flat = [np.ascontiguousarray(row).reshape(-1).view(np.uint8) for row in rows]
            self._mailbox.put(peer, key, [memoryview(codes) for codes in flat])
        return own

    def _collect(self, key, fetched, size, what) -> tuple[jax.Array, ...]:
        """The chunks of all replicas, on the devices."""
        own = fetched.result()
        self.patience.worked()
        M, S = self._replicas, self._replicas // self._slots
        places, like = {shard.place for shard in own}, next(iter(own.values()))
        codes = [{p: np.zeros((M, x.shape[1]), x.dtype) for p in places} for x in like]

        def blocks_of(shard):
            rows = slice(shard.slot * S, (shard.slot + 1) * S)
            return [chunk[shard.place][rows] for chunk in codes]

        for shard, chunks in own.items():
            for block, chunk in zip(blocks_of(shard), chunks, strict=True):
                block[:] = chunk
        for peer, shards in self._routes.gets.items():
            received = self.patience.receive(self._mailbox, peer, key, what)
            data = np.frombuffer(received, np.uint8).view(like[0].dtype)
            for block in (block for shard in shards for block in _live(blocks_of(shard), size)):
                block[:] = data[: block.size].reshape(block.shape)
                data = data[block.size :]
        return tuple(map(self._on_devices, codes))

    def _on_devices(self, codes: dict[int, np.ndarray]) -> jax.Array:
        """codes: {place: [R, length]} of the places of this process."""
        length = next(iter(codes.values())).size
        return jax.make_array_from_callback(
            (self._places * length,),
            self._incoming,
            lambda index: codes[(index[0].start or 0) // length].reshape(-1),
        )


def _live(chunks: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Views [S, n] of what is not padding of the chunks [S, length] of C = size elements."""
    views = []
    for chunk in chunks:
        views.append(chunk[:, : max(size, 0)])
        size -= chunk.shape[1]
    return [view for view in views if view.size]
