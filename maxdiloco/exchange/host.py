"""The exchange through host memory: codes travel between processes while inner steps go on.

Streaming DiLoCo (arXiv 2501.18512) Algorithm 2, lines 8 and 10, beside the compiled programs.
`start` copies the chunks that `collective.send` made to the host and hands them to the processes
that need them; its result is what `collective.all_gather_chunk`, or to owners of parts
`all_to_all_chunk`, would have made, to the bit.

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
    """A device's part of the outgoing chunks: a slot of the axis diloco, a place in its slice.

    to: the slot that it is for, of parts that slots own; 0 of what is for all.
    """

    slot: int
    place: int
    to: int = 0


class Routes(NamedTuple):
    """Which shards a process sends to whom and gets from whom, each in one order; its own."""

    sends: dict[int, tuple[Shard, ...]]
    gets: dict[int, tuple[Shard, ...]]
    stays: tuple[Shard, ...]


class Passage(NamedTuple):
    """An exchange of a fragment, or half of one: to the owners of parts, or to all.

    key: its name, the same in every process. size: wire elements of a row on one device that are
    not padding. rows: for one slot, of each device. within_s: the time to spread the bytes over
    [s]; None: at once. what: the fragment in words, for messages.
    """

    key: Hashable
    size: int
    rows: int
    to_owners: bool
    within_s: float | None
    what: str


def owners_of(mesh: Mesh) -> dict[Shard, int]:
    """{shard: process that holds it} of arrays laid out by outgoing_spec."""
    places = mesh.size // mesh.shape["diloco"]
    parts = NamedSharding(mesh, outgoing_spec(mesh)).devices_indices_map((mesh.size,))
    return {
        Shard(*divmod(part.start or 0, places)): device.process_index
        for device, (part,) in parts.items()
    }


def routes(owners: dict[Shard, int], process: int, *, to_owners: bool = False) -> Routes:
    """The routes of one process. owners: of owners_of, of the whole mesh.

    A process needs, for each place it holds in any slot, the shards of that place in all slots;
    to_owners: of each the part for its own slot.
    """
    slots = sorted({shard.slot for shard in owners})
    held = {(owner, shard.place) for shard, owner in owners.items()}

    def moved(source: int, target: int) -> tuple[Shard, ...]:
        of_source = (shard for shard in sorted(owners) if owners[shard] == source)
        if to_owners:
            parts = (shard._replace(to=slot) for shard in of_source for slot in slots)
            return tuple(part for part in parts if owners[Shard(part.to, part.place)] == target)
        return tuple(shard for shard in of_source if (target, shard.place) in held)

    others = sorted(set(owners.values()) - {process})
    return Routes(
        sends={peer: found for peer in others if (found := moved(process, peer))},
        gets={peer: found for peer in others if (found := moved(peer, process))},
        stays=moved(process, process),
    )


class HostCarrier:
    """Exchanges of fragments between processes, in the order in which they start.

    mailbox: None in a run of one process. memory: the kind in which arrived chunks are, None for
    the device's own. patience: begins anew when no exchange is under way any more.
    """

    def __init__(self, mesh: Mesh, *, mailbox: Mailbox | None, memory: str | None = None):
        self._mailbox = mailbox
        specs = incoming_spec(mesh), outgoing_spec(mesh)
        self._arrived = [NamedSharding(mesh, spec, memory_kind=memory) for spec in specs]
        self._slots, self._places = mesh.shape["diloco"], mesh.size // mesh.shape["diloco"]
        here = owners_of(mesh), jax.process_index()
        self._routes = [routes(*here, to_owners=to_owners) for to_owners in (False, True)]
        # One thread each: exchanges leave and arrive in the order in which they start.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self.patience = Patience()  # of the collector, from one exchange to the next

    def start(self, passage: Passage, chunks: Sequence[jax.Array]) -> Future:
        """Begin to exchange the chunks of a fragment; returns at once.

        The result: the chunks of all slots, laid out by incoming_spec (to owners: outgoing_spec),
        or LostPeerError as of Patience. chunks: laid out by outgoing_spec; they must not be donated
        before the result is there.
        """
        if self._mailbox is not None:
            self._pace(passage, chunks[0].dtype.itemsize)
        for chunk in chunks:
            chunk.copy_to_host_async()
        fetched = self._fetcher.submit(self._fetch, passage, tuple(chunks))
        return self._collector.submit(self._collect, passage, fetched)

    def close(self) -> None:
        """End the threads; one that waits for a peer ends when the mailbox is closed."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._collector.shutdown(wait=False, cancel_futures=True)

    def _pace(self, passage: Passage, itemsize: int) -> None:
        """Load the link evenly: a burst holds up what else is on it."""
        sends, within_s = self._routes[passage.to_owners].sends.values(), passage.within_s
        shards = max((len(shards) for shards in sends), default=0)
        sent = shards * passage.rows * passage.size * itemsize
        self._mailbox.pace(sent / within_s if within_s and sent else None)

    def _fetch(self, passage: Passage, chunks) -> dict[Shard, list[np.ndarray]]:
        """This process's shards for itself, [rows, length] of each chunk; the others are sent."""
        held: dict[tuple[int, int], list[np.ndarray]] = {}
        rows, slots = passage.rows, self._slots if passage.to_owners else 1
        for chunk in chunks:
            for part in chunk.addressable_shards:
                codes = np.asarray(part.data).reshape(slots, rows, -1)
                number = (part.index[0].start or 0) // codes.size
                held.setdefault(divmod(number, self._places), []).append(codes)

        def rows_of(shard):
            return [codes[shard.to] for codes in held[shard.slot, shard.place]]

        routes = self._routes[passage.to_owners]
        for peer, shards in routes.sends.items():
            views = [view for shard in shards for view in _live(rows_of(shard), passage.size)]
            flat = [np.ascontiguousarray(view).reshape(-1).view(np.uint8) for view in views]
            self._mailbox.put(peer, passage.key, [memoryview(codes) for codes in flat])
        return {shard: rows_of(shard) for shard in routes.stays}

    def _collect(self, passage: Passage, fetched: Future) -> tuple[jax.Array, ...]:
        """The chunks of all slots, on the devices."""
        own, routes = fetched.result(), self._routes[passage.to_owners]
        self.patience.worked()
        like, devices = next(iter(own.values())), {(shard.to, shard.place) for shard in own}
        rows = self._slots * passage.rows
        codes = [{at: np.zeros((rows, x.shape[1]), x.dtype) for at in devices} for x in like]

        def rows_of(shard):
            start = shard.slot * passage.rows
            some = slice(start, start + passage.rows)
            return [chunk[shard.to, shard.place][some] for chunk in codes]

        for shard, chunks in own.items():
            for target, chunk in zip(rows_of(shard), chunks, strict=True):
                target[:] = chunk
        for peer, shards in routes.gets.items():
            received = self.patience.receive(self._mailbox, peer, passage.key, passage.what)
            data = np.frombuffer(received, np.uint8).view(like[0].dtype)
            for view in (v for shard in shards for v in _live(rows_of(shard), passage.size)):
                view[:] = data[: view.size].reshape(view.shape)
                data = data[view.size :]
        return tuple(self._on_devices(chunk, passage.to_owners) for chunk in codes)

    def _on_devices(self, codes: dict[tuple[int, int], np.ndarray], to_owners: bool) -> jax.Array:
        """codes: {slot of parts or 0, place: [rows, length]} of the devices of this process."""
        length, slots = next(iter(codes.values())).size, self._slots if to_owners else 1

        def of_device(index):
            return codes[divmod((index[0].start or 0) // length, self._places)].reshape(-1)

        shape = (slots * self._places * length,)
        return jax.make_array_from_callback(shape, self._arrived[to_owners], of_device)


def _live(chunks: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Views [S, n] of what is not padding of the chunks [S, length] of `size` elements."""
    views = []
    for chunk in chunks:
        views.append(chunk[:, : max(size, 0)])
        size -= chunk.shape[1]
    return [view for view in views if view.size]
