"""Move encoded chunks between processes through host memory, while inner steps run.

Streaming DiLoCo (arXiv 2501.18512), Algorithm 2, lines 8 and 10. `start` copies the chunks that
`collective.send` made to the host and sends them to the processes that need them. Its result has
the bits that `collective.all_gather_chunk`, or `all_to_all_chunk` with reduce-scatter, would give.

Deadlocks cannot occur. `start` never waits. A result depends only on the peers' sends of the same
exchange or earlier ones. Every process starts the exchanges in the same order, and starts each
before it waits for a later one. The thread that copies to the host waits only for device programs,
which do not wait for another slice.

    # R replicas  S replicas of a slice  C wire elements of a replica on one device
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxdiloco.cluster import deadlines
from maxdiloco.cluster.deadlines import Deadlines
from maxdiloco.cluster.payloads import Key, put_payload
from maxdiloco.engine.collective import incoming_spec, outgoing_spec


class Messenger(deadlines.Messenger, Protocol):
    """Messages between processes; see cluster.messages.Messenger."""

    def put(self, peer: int, key: Key, buffers: Sequence[object]) -> None:
        """Queue a message; never blocks."""


class Shard(NamedTuple):
    """One device's part of the outgoing chunks.

    Attributes:
      slice_index: slice of the device.
      device: index of the device in its slice.
      to: reduce-scatter: index of the slice that averages this part; 0 with all-gather.
    """

    slice_index: int
    device: int
    to: int = 0


class Routes(NamedTuple):
    """The shards that a process sends to each peer, receives from each peer and keeps, in order."""

    sends: dict[int, tuple[Shard, ...]]
    gets: dict[int, tuple[Shard, ...]]
    keeps: tuple[Shard, ...]


class Transfer(NamedTuple):
    """One leg of an exchange of one fragment.

    Attributes:
      key: identifier, the same in every process.
      size: length of a row on one device, without padding [wire elements].
      rows: number of rows that a device sends to one slice: one for each replica, or one mean.
      scatters: whether each slice receives the part that it averages, instead of all chunks.
      what: the fragment in words, for messages.
    """

    key: Key
    size: int
    rows: int
    scatters: bool
    what: str


def process_of_shards(mesh: Mesh) -> dict[Shard, int]:
    """Return {shard: process that holds it} of arrays sharded by outgoing_spec."""
    devices = mesh.size // mesh.shape["diloco"]
    parts = NamedSharding(mesh, outgoing_spec(mesh)).devices_indices_map((mesh.size,))
    return {
        Shard(*divmod(part.start or 0, devices)): device.process_index
        for device, (part,) in parts.items()
    }


def routes(holders: dict[Shard, int], process: int, *, scatters: bool = False) -> Routes:
    """Return the routes of one process.

    A process needs the shards of all slices for every device index that it holds in any slice. To
    scatter, it needs of each shard the part for its own slice.

    Args:
      holders: from process_of_shards, of the whole mesh.
      process: index of the process.
      scatters: see Transfer.
    """
    slices = sorted({shard.slice_index for shard in holders})
    held = {(holder, shard.device) for shard, holder in holders.items()}

    def moved(source: int, target: int) -> tuple[Shard, ...]:
        from_source = (shard for shard in sorted(holders) if holders[shard] == source)
        if scatters:
            parts = (shard._replace(to=j) for shard in from_source for j in slices)
            return tuple(part for part in parts if holders[Shard(part.to, part.device)] == target)
        return tuple(shard for shard in from_source if (target, shard.device) in held)

    others = sorted(set(holders.values()) - {process})
    return Routes(
        sends={peer: found for peer in others if (found := moved(process, peer))},
        gets={peer: found for peer in others if (found := moved(peer, process))},
        keeps=moved(process, process),
    )


class HostTransfers:
    """Transfers between processes, in the order in which they start.

    Attributes:
      deadlines: how long a result waits for a peer.
    """

    def __init__(self, mesh: Mesh, *, messenger: Messenger | None):
        """Create the threads. messenger: None in a run of one process."""
        self._messenger = messenger
        self._arrived = [
            NamedSharding(mesh, spec) for spec in (incoming_spec(mesh), outgoing_spec(mesh))
        ]
        self._slices, self._devices = mesh.shape["diloco"], mesh.size // mesh.shape["diloco"]
        holders, here = process_of_shards(mesh), jax.process_index()
        self._routes = [routes(holders, here, scatters=scatters) for scatters in (False, True)]
        # One thread each: transfers leave and arrive in the order in which they start.
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._collector = ThreadPoolExecutor(1, thread_name_prefix="collect")
        self.deadlines = Deadlines()

    def start(self, transfer: Transfer, chunks: Sequence[jax.Array]) -> Future:
        """Begin to exchange the chunks of a fragment, and return at once.

        Args:
          transfer: names and sizes.
          chunks: sharded by outgoing_spec. They must not be donated before the result is there.

        Returns:
          A future. Its result is the chunks of all slices, sharded by incoming_spec (outgoing_spec
          if the transfer scatters); it raises LostPeerError as Deadlines does.
        """
        for chunk in chunks:
            chunk.copy_to_host_async()
        fetched = self._fetcher.submit(self._fetch, transfer, tuple(chunks))
        return self._collector.submit(self._collect, transfer, fetched)

    def close(self) -> None:
        """Stop the threads; a thread that waits for a peer stops when the messenger is closed."""
        self._fetcher.shutdown(wait=False, cancel_futures=True)
        self._collector.shutdown(wait=False, cancel_futures=True)

    def _fetch(self, transfer: Transfer, chunks) -> dict[Shard, list[np.ndarray]]:
        """Send the shards for other processes; return the others, [rows, length] a chunk."""
        held: dict[tuple[int, int], list[np.ndarray]] = {}
        rows, slices = transfer.rows, self._slices if transfer.scatters else 1
        for chunk in chunks:
            for part in chunk.addressable_shards:
                codes = np.asarray(part.data).reshape(slices, rows, -1)
                number = (part.index[0].start or 0) // codes.size
                held.setdefault(divmod(number, self._devices), []).append(codes)

        def rows_of(shard):
            return [codes[shard.to] for codes in held[shard.slice_index, shard.device]]

        routes = self._routes[transfer.scatters]
        for peer, shards in routes.sends.items():
            views = [view for shard in shards for view in _unpadded(rows_of(shard), transfer.size)]
            flat = [np.ascontiguousarray(view).reshape(-1).view(np.uint8) for view in views]
            put_payload(self._messenger, peer, transfer.key, flat)
        return {shard: rows_of(shard) for shard in routes.keeps}

    def _collect(self, transfer: Transfer, fetched: Future) -> tuple[jax.Array, ...]:
        """Wait for the shards of the peers; return the chunks of all slices, on the devices."""
        own, routes = fetched.result(), self._routes[transfer.scatters]
        self.deadlines.record_work()
        like, targets = next(iter(own.values())), {(shard.to, shard.device) for shard in own}
        rows = self._slices * transfer.rows
        codes = [{at: np.zeros((rows, x.shape[1]), x.dtype) for at in targets} for x in like]

        def rows_of(shard):
            start = shard.slice_index * transfer.rows
            some = slice(start, start + transfer.rows)
            return [chunk[shard.to, shard.device][some] for chunk in codes]

        for shard, chunks in own.items():
            for target, chunk in zip(rows_of(shard), chunks, strict=True):
                target[:] = chunk
        for peer, shards in routes.gets.items():
            received = self.deadlines.receive_payload(
                self._messenger, peer, transfer.key, transfer.what
            )
            data = received.view(like[0].dtype)
            for view in (v for s in shards for v in _unpadded(rows_of(s), transfer.size)):
                view[:] = data[: view.size].reshape(view.shape)
                data = data[view.size :]
        return tuple(self._to_devices(chunk, transfer.scatters) for chunk in codes)

    def _to_devices(self, codes: dict[tuple[int, int], np.ndarray], scatters: bool) -> jax.Array:
        """Put {(slice or 0, device): [rows, length]} of this process's devices into one array."""
        length, slices = next(iter(codes.values())).size, self._slices if scatters else 1

        def of_device(index):
            return codes[divmod((index[0].start or 0) // length, self._devices)].reshape(-1)

        shape = (slices * self._devices * length,)
        return jax.make_array_from_callback(shape, self._arrived[scatters], of_device)


def _unpadded(chunks: Sequence[np.ndarray], size: int) -> list[np.ndarray]:
    """Return views [S, n] of the chunks [S, length] without the padding beyond `size` elements."""
    views = []
    for chunk in chunks:
        views.append(chunk[:, : max(size, 0)])
        size -= chunk.shape[1]
    return [view for view in views if view.size]
